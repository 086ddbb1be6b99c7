"""One replica's part in a job of several: what makes its training differ from that of a job alone.

Decides nothing. Neighbours: `client.replicas` makes it, `client.train` trains with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fusionai.client.pool_session import Member
from fusionai.client.preparation import Prepared
from fusionai.training.driver import Driver
from fusionai.training.local_updates import Exchange

KeptOut = Callable[[tuple[Member, ...], bool], frozenset[str]]
"""Who of the members is not for this replica; and whether it needs somebody at once."""


@dataclass(slots=True, kw_only=True)
class ReplicaPart:
    """`prepared` has the replica's own share of the data. `first_step`: so many of the job's steps were over for it
    when it began. `total_steps`: the job's, by which learning rates go."""

    number: int
    prepared: Prepared
    exchange: Exchange
    kept_out: KeptOut
    first_step: int
    total_steps: int
    driver: Driver | None = field(default=None)
    """Once there is one."""
    dropped: str | None = None
    """Why it is cut off where it is, to go on from there when it is started again."""

    def excluded(self, members: tuple[Member, ...]) -> frozenset[str]:
        return self.kept_out(members, self.driver is not None and self.driver.is_waiting)
