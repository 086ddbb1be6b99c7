"""Events that a running job reports to the terminal, TensorBoard, the report and the broker.

`training.driver` emits them, `client` listens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fusionai.coordination.round.verification import Outcome
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
class Checked:
    """Result of a recheck: `referee` reran steps `first` to `below` - 1 of `stage`, which `peer` had run. `tasks`:
    stage microbatches that could have been checked so far. `checked_tasks`: those that were checked and confirmed."""

    stage: int
    peer: str
    referee: str
    first: int
    below: int
    outcome: Outcome
    reason: str
    tasks: int
    checked_tasks: int


@dataclass(frozen=True, slots=True)
class FaultSeen:
    """A fault. `step`: number of committed steps, which is the index of the current step. `stages`: stages that stand
    still because of it; none for a guard."""

    kind: Literal["peer", "guard", "link", "stage", "liar"]
    peer: str
    stages: tuple[int, ...]
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Waiting:
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
    | Checked
    | FaultSeen
    | Waiting
    | PlanChanged
    | Restored
    | Recovered
    | BrokerAway
    | BrokerBack
)
