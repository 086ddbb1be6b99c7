"""Events that a running job reports to the terminal, TensorBoard, the report and the broker.

`FaultLog` decides when a fault is over: when the next step is committed with all stages working. The loss of a standby
stops nothing and is never waited for. `Timeline` shows where the time of a step went on each machine, on the driver's
clock. A member's clock offset is taken from its answer to the attach; it is accurate to half a round trip, enough for a
chart.

`training.driver` emits events, `client` listens; `client.pool.fault_report` renders faults.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fusionai.coordination.round.interface import ReportFault
from fusionai.coordination.round.verification import Check, Inspector, Outcome
from fusionai.coordination.training.interface import ReportRestored
from fusionai.scheduling.problem.types import Plan
from fusionai.wire.messages import CommitRecord, Span


@dataclass(frozen=True, slots=True)
class JobReady:
    """Every stage is at step `base` and every link is up."""

    base: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step is committed. `spans`: stage -> its work on the driver's clock. `step_s`: seconds since the previous
    commit."""

    record: CommitRecord
    losses: tuple[float, ...]
    step_s: float
    tokens_per_s: float
    replayed: bool
    spans: dict[int, tuple[Span, ...]]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """`best`: step of the best evaluation so far. `since`: number of evaluations after the last improvement."""

    step: int
    loss: float
    best: int | None = None
    since: int = 0


@dataclass(frozen=True, slots=True)
class BestKept:
    """The checkpoint at `path` holds the best state so far and stays until a better one exists."""

    step: int
    loss: float
    path: str


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A complete checkpoint of `step` is on disk; collecting and writing it took `seconds`."""

    step: int
    path: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning for the owner. The job continues."""

    text: str


@dataclass(frozen=True, slots=True)
class StepsChecked:
    """Result of a recheck: `verifier` reran steps `first` to `below` - 1 of `stage`, which `peer` had run. `tasks`:
    stage microbatches that could have been checked so far. `checked_tasks`: those that were checked and confirmed."""

    stage: int
    peer: str
    verifier: str
    first: int
    below: int
    outcome: Outcome
    reason: str
    tasks: int
    checked_tasks: int


def checked(check: Check, outcome: Outcome, reason: str, inspector: Inspector | None) -> StepsChecked:
    """Return the event that reports the outcome of `check`. `inspector` counts the tasks; a check has one."""
    assert inspector is not None
    return StepsChecked(
        stage=check.stage,
        peer=check.peer,
        verifier=check.verifier,
        first=check.first,
        below=check.below,
        outcome=outcome,
        reason=reason,
        tasks=inspector.tasks,
        checked_tasks=inspector.checked_tasks,
    )


@dataclass(frozen=True, slots=True)
class FaultSeen:
    """A fault. `step`: number of committed steps, which is the index of the current step. `stages`: stages that stand
    still because of it; none for a standby."""

    kind: Literal["peer", "standby", "link", "stage", "faulty"]
    peer: str
    stages: tuple[int, ...]
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobWaiting:
    """The job stands still until something outside it changes; `reason` says what it waits for."""

    reason: str


@dataclass(frozen=True, slots=True)
class PlanChanged:
    """Another plan version is in force."""

    plan: Plan
    reason: str


@dataclass(frozen=True, slots=True)
class Restored:
    """The way back to step `committed` was chosen: `stages` restore their state of step `base`, the others kept theirs.
    `rollback`: all stages restart from a checkpoint."""

    committed: int
    base: int
    stages: tuple[int, ...]
    rollback: bool


@dataclass(frozen=True, slots=True)
class Recovered:
    """The first commit after a fault: `step` is its index, `seconds` the time since the fault was seen."""

    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class BrokerAway:
    """The broker can't be reached. The job continues without it."""

    reason: str


@dataclass(frozen=True, slots=True)
class BrokerBack:
    """The broker can be reached again."""


Progress = (
    JobReady
    | StepDone
    | Evaluated
    | BestKept
    | CheckpointSaved
    | Warned
    | StepsChecked
    | FaultSeen
    | JobWaiting
    | PlanChanged
    | Restored
    | Recovered
    | BrokerAway
    | BrokerBack
)


@dataclass(slots=True)
class FaultLog:
    """Tracks the fault in progress. `now_s` returns monotonic seconds."""

    emit: Callable[[Progress], None]
    now_s: Callable[[], float]
    _since_s: float | None = None
    """Time at which the first unresolved fault was seen."""
    _reason: str = ""
    """Why a new plan was requested."""

    def seen(self, fault: ReportFault) -> None:
        assert fault.kind not in ("probe", "late", "leaving"), "only serving jobs have these"
        self.emit(FaultSeen(fault.kind, fault.peer, fault.stages, fault.step, fault.reason))
        if fault.stages and self._since_s is None:
            self._since_s = self.now_s()

    def asked(self, reason: str) -> None:
        self._reason = reason

    def adopted(self, plan: Plan, reason: str) -> None:
        """Report a plan as adopted. `reason`: why it was offered, if it was not requested after a fault."""
        self.emit(PlanChanged(plan, self._reason or reason))
        self._reason = ""

    def restored(self, report: ReportRestored) -> None:
        if report.restored and self._since_s is not None:
            self.emit(Restored(report.committed, report.base, report.restored, report.rollback))

    def committed(self, step: int) -> None:
        """Report that `step` was committed with every stage working."""
        if self._since_s is not None:
            self.emit(Recovered(step, self.now_s() - self._since_s))
            self._since_s = None


class Timeline:
    """Spans of the current step and the time of the last commit."""

    def __init__(self) -> None:
        self._offset_s: dict[int, float] = {}
        self._spans: dict[int, tuple[Span, ...]] = {}
        self._last_commit_s: float | None = None

    def clock(self, stage: int, their_now_s: float) -> None:
        self._offset_s[stage] = time.monotonic() - their_now_s
        self._last_commit_s = None

    def spans(self, stage: int, spans: tuple[Span, ...]) -> None:
        """Store a stage's spans since its last report, converted to the driver's clock."""
        offset_s = self._offset_s.get(stage, 0.0)
        self._spans[stage] = tuple(
            Span(span.kind, span.microbatch, span.start_s + offset_s, span.end_s + offset_s) for span in spans
        )

    def step_done(
        self, record: CommitRecord, losses: tuple[float, ...], replayed: bool, tokens_per_step: int
    ) -> StepDone:
        now_s = time.monotonic()
        starts = [span.start_s for spans in self._spans.values() for span in spans if span.kind == "forward"]
        began_s = self._last_commit_s if self._last_commit_s is not None else min(starts, default=now_s)
        self._last_commit_s = now_s
        step_s = max(now_s - began_s, 1e-9)
        done = StepDone(record, losses, step_s, tokens_per_step / step_s, replayed, dict(self._spans))
        self._spans.clear()
        return done
