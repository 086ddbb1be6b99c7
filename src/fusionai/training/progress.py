"""What a running job tells those who watch: the terminal, TensorBoard, the report, the broker.

Neighbours: `training.driver` emits, `client` listens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fusionai.coordination.verification import Outcome
from fusionai.scheduling.types import Plan
from fusionai.wire.messages import CommitRecord, Span


@dataclass(frozen=True, slots=True)
class JobReady:
    """Every stage is at `base`, every link is up."""

    base: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step is official. `spans`: stage -> its work on the driver's clock; `step_s`: since the commit before."""

    record: CommitRecord
    losses: tuple[float, ...]
    step_s: float
    tokens_per_s: float
    replayed: bool
    spans: dict[int, tuple[Span, ...]]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """`best`: step of the best evaluation so far. `since`: evaluations after the last improvement."""

    step: int
    loss: float
    best: int | None = None
    since: int = 0


@dataclass(frozen=True, slots=True)
class BestKept:
    """The checkpoint in `path` holds the best state so far, and stays until there is a better one."""

    step: int
    loss: float
    path: str


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    step: int
    path: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Warned:
    """Something the owner should read; the job goes on."""

    text: str


@dataclass(frozen=True, slots=True)
class Checked:
    """Steps `first` to `below` - 1 of `stage`, which `peer` ran, were run again by `referee`: what came of it, and why.
    `tasks`: microbatches of a stage that were over where somebody could have checked them, `checked_tasks`: those of
    them that were and held."""

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
    """Something is lost. `step`: the number of official steps then, so the index of the step under way. `stages` stand
    still because of it; none do for a guard."""

    kind: Literal["peer", "guard", "link", "stage", "liar"]
    peer: str
    stages: tuple[int, ...]
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """The job stands still until somebody else does something; `reason` says what it waits for."""

    reason: str


@dataclass(frozen=True, slots=True)
class PlanChanged:
    """Another plan version is in force."""

    plan: Plan
    reason: str


@dataclass(frozen=True, slots=True)
class Restored:
    """Decided how the job gets back to `committed`: `stages` from their state at `base`, the others kept theirs.
    `rollback`: everybody from a checkpoint."""

    committed: int
    base: int
    stages: tuple[int, ...]
    rollback: bool


@dataclass(frozen=True, slots=True)
class Recovered:
    """The first commit after a fault: `step` is its index, `seconds` since the fault was seen."""

    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class BrokerAway:
    """The broker can't be reached; the job goes on without it."""

    reason: str


@dataclass(frozen=True, slots=True)
class BrokerBack:
    """The broker answers again."""


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
