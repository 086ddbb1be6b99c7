"""Checks the pool while a model is served: for machines that leave, machines that could be standbys, expiring tickets.

Works like `client.pool_watch`, except that the engine is notified of a leaving machine: it first moves sessions to the
stage's warm standby and then requests a plan without the machine. `client.serve` runs this.
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
    """Checks the pool for a serving job. `run` lasts until cancelled."""

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
