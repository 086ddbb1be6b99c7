"""A deployed plan: its members, their addresses and their tickets. Each plan version has its own deployment.

`client` gets deployments from the broker, `execution.links.connections` dials the addresses, and `training.driver` and
`serving.driver` run them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fusionai.scheduling.problem.types import Plan
from fusionai.wire import messages as wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A plan with everything needed to reach its members. `plan` carries the broker's version. `members`: addresses of
    each peer of the plan (none for the owner). `tickets`: by peer id; the owner's is the driver's ticket.
    `clock_ahead_s`: seconds by which the owner's clock is ahead of the broker's, on which ticket expiry is based."""

    plan: Plan
    members: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    tickets: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    clock_ahead_s: float = 0.0

    def neighbours(self) -> tuple[wire.Neighbour, ...]:
        return tuple(
            wire.Neighbour(stage=p.stage, peer=p.peer, addresses=self.members.get(p.peer, ())) for p in self.plan.stages
        )


class PlanSource(Protocol):
    """Gets the driver a new plan when a stage has no peer; `client.pool.replanning` asks the broker."""

    async def replacement(
        self, present: Deployment, lost: frozenset[str], waiting: Callable[[str], None]
    ) -> Deployment:
        """Return `present` with replacements for the peers in `lost`, recorded as the plan in force. There is no time
        limit; `waiting` is called with a text that says what is being waited for. Raises `FusionError` if the job can't
        continue."""
        ...

    def distrust(self, peer: str, reason: str) -> None:
        """Exclude `peer` from all later plans of this job."""
        ...
