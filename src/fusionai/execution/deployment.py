"""A plan made real: who takes part, where they listen, with which tickets. Changes with each plan version.

Decides nothing. Neighbours: `client` gets deployments from the broker, `execution.connections` dials what they name,
`training.driver` and `serving.driver` run them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fusionai.scheduling.types import Plan
from fusionai.wire import messages as wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """`plan` carries the broker's version. `members`: where each peer of the plan listens (the owner's own: empty).
    `tickets`: by peer id; the owner's is the driver's. `clock_ahead_s`: how far the owner's clock is ahead of the
    broker's, by which tickets expire."""

    plan: Plan
    members: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    tickets: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    clock_ahead_s: float = 0.0

    def neighbours(self) -> tuple[wire.Neighbour, ...]:
        return tuple(
            wire.Neighbour(stage=p.stage, peer=p.peer, addresses=self.members.get(p.peer, ())) for p in self.plan.stages
        )


class Replanner(Protocol):
    """Who gets a driver another plan when a stage has nobody; `client.replanning` asks the broker."""

    async def replacement(
        self, present: Deployment, lost: frozenset[str], waiting: Callable[[str], None]
    ) -> Deployment:
        """`present` with others in the place of `lost`, recorded as the plan in force. Takes as long as it takes;
        `waiting` hears what is waited for. Raises `FusionError` where the job can't go on at all."""
        ...

    def distrust(self, peer: str, reason: str) -> None:
        """No later plan of this job may have this peer."""
        ...
