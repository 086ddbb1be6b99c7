"""Commands that a training driver's machine gives; `training.driver` performs them.

Neighbours: `coordination.training.driver` returns these; in tests a virtual world performs them without tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fusionai.coordination.round.commands import Distrust, ReportCheck
from fusionai.coordination.round.verification import Check
from fusionai.coordination.training.evaluations import Evaluation
from fusionai.coordination.training.roles import Roles
from fusionai.coordination.training.stage_interface import Source
from fusionai.wire.messages import CommitRecord, Fence


@dataclass(frozen=True, slots=True)
class SendAttach:
    """Begin a round: enlist every member of `roles`, attach every stage. Drop everything in progress under the old
    fence: a checkpoint being collected, an evaluation, a probe, states being sent. `standbys`: those still
    connected."""

    fence: Fence
    roles: Roles
    standbys: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class PassSnapshot:
    """Ask `holder` to send its snapshot of (stage, step) to `peer`."""

    stage: int
    step: int
    holder: str
    peer: str


@dataclass(frozen=True, slots=True)
class SendResume:
    """See `wire.messages.Resume`. For `import` and `initialise` the driver's process also streams the state of
    `base`."""

    stage: int
    committed: int
    source: Source
    base: int
    records: tuple[CommitRecord, ...] = ()
    replaying: frozenset[int] = frozenset()
    snapshot: bool = False
    watermark: int = 0


@dataclass(frozen=True, slots=True)
class SendProbe:
    """Send the first microbatch of `step` through all stages twice in evaluation mode; answer `ProbeAnswered`."""

    step: int


@dataclass(frozen=True, slots=True)
class AnnounceReady:
    """Announce that every stage is at `base`, every link is up, and a probe came back right. The first work follows."""

    base: int


@dataclass(frozen=True, slots=True)
class FeedMicrobatch:
    """Send the microbatch's inputs to the stages that need them; in a replay only to the stages in `only`."""

    step: int
    microbatch: int
    only: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class DecideScale:
    """Reduce per-parameter norms (canonical order) to the step's scale, with the backend's arithmetic."""

    step: int
    norms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class JournalCommit:
    """Write the record to disk; answer `CommitJournalled`. Nothing is sent before that answer."""

    record: CommitRecord


@dataclass(frozen=True, slots=True)
class SendCommit:
    """Send the commit to all stages. With `save`, stages stream the resulting state before they go on
    (`WriteCheckpoint` collects it)."""

    record: CommitRecord
    watermark: int
    save: bool


@dataclass(frozen=True, slots=True)
class WriteCheckpoint:
    """Collect all stages' state of `step`; answer `CheckpointWritten`. `ask`: request it from the stages first."""

    step: int
    ask: bool


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Run the evaluation data through the state of `step`. The next step is not committed before the result."""

    step: int


@dataclass(frozen=True, slots=True)
class NameBest:
    """Record that the checkpoint of this state is complete and holds the best state so far."""

    best: Evaluation


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """Report to the user that a step is official. `replayed`: it was official before and has been computed again."""

    record: CommitRecord
    losses: tuple[float, ...]
    replayed: bool


@dataclass(frozen=True, slots=True)
class AskPlan:
    """A stage has no peer: request a plan without these peers (they may serve again if no other peer can). Answer
    `PlanGranted`, however long it takes. A later request replaces an earlier one."""

    without: frozenset[str]
    reason: str


@dataclass(frozen=True, slots=True)
class StartCheck:
    """Have an audit interval run again; answer `StageChecked`, also if there is no result."""

    check: Check


@dataclass(frozen=True, slots=True)
class GatherEvidence:
    """Have all inputs of the checked stage sent to the verifier, which is ready for them."""

    check: Check


@dataclass(frozen=True, slots=True)
class Rewind:
    """Take back the steps from `step` on: delete their records, and checkpoints of later states. This must be on disk
    before the next plan comes into force."""

    step: int


@dataclass(frozen=True, slots=True)
class ReportFault:
    """Report a fault to the user. `stages` wait because of it."""

    kind: Literal["peer", "standby", "link", "stage", "faulty"]
    peer: str
    stages: tuple[int, ...]
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReportRestored:
    """Report to the user how the stages get to `committed`: `restored` from their state at `base`, the others kept
    theirs."""

    committed: int
    base: int
    restored: tuple[int, ...]
    rollback: bool


@dataclass(frozen=True, slots=True)
class WarnTolerant:
    """Warn the user that a replayed step gave different bits, which this job allows."""

    step: int
    detail: str


@dataclass(frozen=True, slots=True)
class EndJob:
    """End the job. `failed`: why the job can't go on. `early`: why it needs no further steps."""

    steps: int
    stopped: str | None = None
    early: str | None = None
    failed: str | None = None


DriverCommand = (
    SendAttach
    | PassSnapshot
    | SendResume
    | SendProbe
    | AnnounceReady
    | FeedMicrobatch
    | DecideScale
    | JournalCommit
    | SendCommit
    | WriteCheckpoint
    | Evaluate
    | NameBest
    | StepCommitted
    | AskPlan
    | StartCheck
    | GatherEvidence
    | ReportCheck
    | Distrust
    | Rewind
    | ReportFault
    | ReportRestored
    | WarnTolerant
    | EndJob
)
