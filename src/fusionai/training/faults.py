"""The timeline of a job's faults, reported as progress events.

This module decides when a fault is over: when the next step is committed with all stages working. The loss of a guard
stops nothing and is never waited for. `training.driver` reports the machine's commands, and `client.pool.faults`
renders the events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fusionai.coordination.training.commands import TellFault, TellRestored
from fusionai.scheduling.problem.types import Plan
from fusionai.training import progress


@dataclass(slots=True)
class FaultLog:
    """Tracks the fault in progress. `now_s` returns monotonic seconds."""

    tell: Callable[[progress.Progress], None]
    now_s: Callable[[], float]
    _since_s: float | None = None
    """Time at which the first unresolved fault was seen."""
    _reason: str = ""
    """Why a new plan was requested."""

    def seen(self, fault: TellFault) -> None:
        self.tell(progress.FaultSeen(fault.kind, fault.peer, fault.stages, fault.step, fault.reason))
        if fault.stages and self._since_s is None:
            self._since_s = self.now_s()

    def asked(self, reason: str) -> None:
        self._reason = reason

    def adopted(self, plan: Plan, reason: str) -> None:
        """Report a plan as adopted. `reason`: why it was offered, if it was not requested after a fault."""
        self.tell(progress.PlanChanged(plan, self._reason or reason))
        self._reason = ""

    def restored(self, told: TellRestored) -> None:
        if told.restored and self._since_s is not None:
            self.tell(progress.Restored(told.committed, told.base, told.restored, told.rollback))

    def committed(self, step: int) -> None:
        """Report that `step` was committed with every stage working."""
        if self._since_s is not None:
            self.tell(progress.Recovered(step, self.now_s() - self._since_s))
            self._since_s = None
