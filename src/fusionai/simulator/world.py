"""What connects the processes of a simulated job: virtual time, and links with costs.

A message without data takes the link's latency, a state or snapshot is a transfer over `network`, so states and
snapshots compete for links with each other. A dead process drops what arrives, a frozen one handles it when it wakes.
Tensors of steady steps are fast-forwarded, because hours of single messages would take too long: a step's microbatches
count as one microbatch, whose duration `pace` takes from a few steps simulated message by message.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fusionai.coordination.round.interface import DriverEvent
from fusionai.coordination.training.interface import Roles
from fusionai.coordination.training.step import StageShape
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import Plan
from fusionai.simulator.agenda import Agenda
from fusionai.simulator.network import SimulatedNetwork, Weather
from fusionai.simulator.step import FEED
from fusionai.wire.messages import Fence


class World:
    """Carries messages. `to_driver` and `collect` must be set before the first message."""

    to_driver: Callable[[Fence, DriverEvent], None]
    """Takes an event that a member reported under this fence."""
    collect: Callable[[Fence, int, int], None]
    """Takes the state of (stage, step) for a checkpoint."""

    def __init__(self, agenda: Agenda, costs: StageCosts, owner: str, weather: Weather, seed: int) -> None:
        self.agenda = agenda
        self.costs = costs
        self.owner = owner
        self.send = SimulatedNetwork(agenda, costs, weather, seed, recording=False).send

    def report(self, sender: str, fence: Fence, event: DriverEvent) -> None:
        """Send an event of a member to the driver."""
        self.send(sender, self.owner, 0.0, partial(self.to_driver, fence, event))

    def roles(self, plan: Plan) -> Roles:
        """Return the driver machine's view of a plan: a chain of stages, of which the first and the last are fed."""
        numbers = [placement.stage for placement in plan.stages]
        return Roles(
            version=plan.version,
            owner=self.owner,
            places={placement.stage: placement.peer for placement in plan.stages},
            standbys={standby.stage: standby.peer for standby in plan.standbys},
            snapshot_every=plan.snapshot_every,
            feed_window=1,
            neighbours={stage: frozenset({stage - 1, stage + 1} & set(numbers)) for stage in numbers},
            fed=frozenset({0, numbers[-1]}),
            stateless=frozenset(one.stage for one in plan.stages if self.costs.state_bytes(one) == 0),
            partition=repr(plan.ranges),
        )

    def replay_s(self, plan: Plan, stage: int) -> float:
        """Return the duration of one replayed step of a stage: its compute time without bubbles, or its neighbours'
        resending time if that is longer."""
        placement = plan.stages[stage]
        sending_s = 0.0
        if stage > 0:
            before = plan.stages[stage - 1]
            sending_s = self._transfer_s(before.peer, placement.peer, self.costs.forward_bytes(before))
        if stage + 1 < len(plan.stages):
            after = plan.stages[stage + 1]
            returning_s = self._transfer_s(after.peer, placement.peer, self.costs.gradient_bytes(after))
            sending_s = max(sending_s, returning_s)
        return plan.microbatches * max(self.costs.compute_s(placement, placement.peer), sending_s)

    def _transfer_s(self, sender: str, receiver: str, size_bytes: float) -> float:
        return size_bytes / self.costs.hop(sender, receiver).bandwidth_bytes_per_s


def shape_of(plan: Plan, stage: int) -> StageShape:
    """Return a stage's shape when all microbatches of a step count as one."""
    last = len(plan.stages) - 1
    producers = frozenset({stage - 1, FEED} if stage == last else {stage - 1})
    return StageShape(
        stage=stage,
        microbatches=1,
        in_flight=1,
        producers={"train": producers},
        consumers=frozenset() if stage == last else frozenset({stage + 1}),
        gradients_to=frozenset({stage - 1} - {FEED}),
    )
