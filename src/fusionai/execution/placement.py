"""A member's view of one round: its fence, the peer of every stage, and the stages this member guards.

`execution.training.member` makes it from `Enlist`; `execution.training.snapshot_store` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fusionai.execution.part import Task
from fusionai.execution.training.boundary import FEED
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.ids import PeerId
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the stages of a round run. It has no stages before the first `Enlist`."""

    job: str
    me: PeerId
    owner: PeerId
    fence: Fence
    neighbours: dict[int, wire.Neighbour] = field(default_factory=dict[int, wire.Neighbour])
    guards: frozenset[int] = frozenset()
    ticket: bytes = b""
    signed: bytes = b""
    """The placement signed by the owner, to show to other members."""
    named: frozenset[PeerId] = frozenset()
    """All peers that the signed placement names, including guards."""
    task: Task = "train"

    @property
    def places(self) -> dict[int, PeerId]:
        return {stage: PeerId(neighbour.peer) for stage, neighbour in self.neighbours.items()}

    @property
    def peers(self) -> frozenset[PeerId]:
        """All other peers that have a stage, and the owner."""
        return frozenset({*self.places.values(), self.owner} - {self.me})

    @property
    def opening(self) -> wire.OpenJob:
        """The message with which this member opens connections to others."""
        return wire.OpenJob(job=self.job, fence=self.fence, ticket=self.ticket, placement=self.signed, task=self.task)

    def peer_of(self, stage: int) -> PeerId:
        """Return the peer that runs `stage`. Raises `ExecutionError` for a stage outside the plan."""
        if stage == FEED:
            return self.owner
        neighbour = self.neighbours.get(stage)
        if neighbour is None:
            raise ExecutionError(f"job {self.job} has no stage {stage} in its plan.")
        return PeerId(neighbour.peer)
