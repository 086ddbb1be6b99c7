"""What a running job tells those who watch: the terminal, TensorBoard, the report, the broker.

Neighbours: `training.driver` emits, `client` listens.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    step: int
    path: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Warned:
    """Something the owner should read; the job goes on."""

    text: str


Progress = JobReady | StepDone | Evaluated | CheckpointSaved | Warned
