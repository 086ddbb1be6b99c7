"""The time line of a job's faults, for those who watch. Decides when a fault counts as over: when the next step is
official, all stages being well.

A guard's loss stops nothing and is never waited for. Neighbours: `training.driver` tells what the machine commands,
`client.fault_story` puts what comes out into words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fusionai.coordination.driver_commands import TellFault, TellRestored
from fusionai.scheduling.types import Plan
from fusionai.training import progress


@dataclass(slots=True)
class FaultLog:
    """`now_s` is monotonic."""

    tell: Callable[[progress.Progress], None]
    now_s: Callable[[], float]
    _since_s: float | None = None
    """When the first fault was seen that is not over."""
    _reason: str = ""
    """Why a plan was asked for."""

    def seen(self, fault: TellFault) -> None:
        self.tell(progress.FaultSeen(fault.kind, fault.peer, fault.stages, fault.step, fault.reason))
        if fault.stages and self._since_s is None:
            self._since_s = self.now_s()

    def asked(self, reason: str) -> None:
        self._reason = reason

    def adopted(self, plan: Plan, reason: str) -> None:
        """`reason`: why it was offered, for a plan nobody had to ask for."""
        self.tell(progress.PlanChanged(plan, self._reason or reason))
        self._reason = ""

    def restored(self, told: TellRestored) -> None:
        if told.restored and self._since_s is not None:
            self.tell(progress.Restored(told.committed, told.base, told.restored, told.rollback))

    def committed(self, step: int) -> None:
        """`step` is official and every stage is well."""
        if self._since_s is not None:
            self.tell(progress.Recovered(step, self.now_s() - self._since_s))
            self._since_s = None
