"""Settings of one replica in a job of several: what differs from training a job alone.

`client.training.replicas` creates it, `client.training.train` trains with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fusionai.client.pool.session import Member
from fusionai.client.training.preparation import Prepared
from fusionai.training.driver import Driver
from fusionai.training.local_updates import Exchange

KeptOut = Callable[[tuple[Member, ...], bool], frozenset[str]]
"""Returns the members that this replica may not use. The flag says whether it needs a machine at once."""


@dataclass(slots=True, kw_only=True)
class ReplicaPart:
    """One replica. `prepared` has the replica's share of the data. `first_step`: steps of the job that were over when
    it started. `total_steps`: steps of the job, for the learning rate schedule."""

    number: int
    prepared: Prepared
    exchange: Exchange
    kept_out: KeptOut
    first_step: int
    total_steps: int
    driver: Driver | None = field(default=None)
    """The replica's driver, None until there is one."""
    dropped: str | None = None
    """Reason for which its training was cut off; it continues from there at the next start."""

    def excluded(self, members: tuple[Member, ...]) -> frozenset[str]:
        return self.kept_out(members, self.driver is not None and self.driver.is_waiting)
