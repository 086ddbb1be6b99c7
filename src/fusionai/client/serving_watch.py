"""Looks out for the pool while a model is served: machines that leave, machines that could guard, tickets that expire.

As `client.pool_watch`, but a machine that leaves is told to the engine: it moves sessions to the stage's guard first
and asks for a plan without the machine itself. Neighbours: `client.serve` runs it, `serving.engine` obeys.
"""

from __future__ import annotations

from fusionai.client.pool_session import Member
from fusionai.client.pool_watch import PoolWatch
from fusionai.client.replanning import PoolReplanner
from fusionai.primitives.clock import Clock
from fusionai.primitives.ids import PeerId
from fusionai.scheduling.types import Plan
from fusionai.serving.engine import ServingEngine


class ServingWatch(PoolWatch):
    """`run` until cancelled."""

    def __init__(self, replanner: PoolReplanner, engine: ServingEngine, owner: PeerId, clock: Clock) -> None:
        super().__init__(replanner, engine, owner, clock)
        self._engine = engine
        self._told: frozenset[str] = frozenset()

    def _handed_over(self, members: tuple[Member, ...]) -> tuple[Plan, str] | None:
        plan = self._engine.deployment.plan
        parts = {stage.peer for stage in plan.stages} | {guard.peer for guard in plan.guards}
        leaving = {one.view.peer for one in members if one.view.state == "draining"} & parts
        for peer in sorted(leaving - self._told):
            self._engine.leaving(peer)
        self._told = frozenset(leaving)
        return None
