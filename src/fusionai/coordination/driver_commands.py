"""What the machine of a job's driver wants done. Decides nothing; `training.driver` performs it.

Neighbours: `coordination.driver` gives these; the tests' virtual world performs them without a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fusionai.coordination.evaluations import Evaluation
from fusionai.coordination.roles import Roles
from fusionai.coordination.stage import Source
from fusionai.coordination.verification import Check, Outcome
from fusionai.wire.messages import CommitRecord, Fence


@dataclass(frozen=True, slots=True)
class SendAttach:
    """A round begins: enlist every member of `roles`, attach every stage. What was under way for the old fence (a
    checkpoint being collected, an evaluation, a probe, states being sent) is dropped. `guards`: those still living."""

    fence: Fence
    roles: Roles
    guards: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class PassSnapshot:
    """Have `holder` send its snapshot of (stage, step) to `peer`."""

    stage: int
    step: int
    holder: str
    peer: str


@dataclass(frozen=True, slots=True)
class SendResume:
    """See `wire.messages.Resume`; for `import` and `initialise` the shell streams the state of `base` as well."""

    stage: int
    committed: int
    source: Source
    base: int
    records: tuple[CommitRecord, ...] = ()
    replaying: frozenset[int] = frozenset()
    snapshot: bool = False
    line: int = 0


@dataclass(frozen=True, slots=True)
class SendProbe:
    """Send the first microbatch of `step` through all stages twice in evaluation mode; answer `ProbeAnswered`."""

    step: int


@dataclass(frozen=True, slots=True)
class AnnounceReady:
    """Every stage is at `base`, every link is up, and a probe came back right; the first work follows."""

    base: int


@dataclass(frozen=True, slots=True)
class Feed:
    """Give the microbatch's inputs to the stages that need them; in a replay only to `only`."""

    step: int
    microbatch: int
    only: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class DecideScale:
    """Reduce per-parameter norms (canonical order) to the step's scale, in the backend's arithmetic."""

    step: int
    norms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class JournalCommit:
    """Make it official on disk; answer `CommitJournalled`. Nothing is sent before."""

    record: CommitRecord


@dataclass(frozen=True, slots=True)
class SendCommit:
    """With `save`, stages stream the state this commit leads to before they go on (`WriteCheckpoint` collects it)."""

    record: CommitRecord
    line: int
    save: bool


@dataclass(frozen=True, slots=True)
class WriteCheckpoint:
    """Collect all stages' state of `step`; answer `CheckpointWritten`. `ask`: the stages have not been told yet."""

    step: int
    ask: bool


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Run the evaluation part through the state of `step`; the next step is not committed before."""

    step: int


@dataclass(frozen=True, slots=True)
class NameBest:
    """The checkpoint of this state is complete and holds the best so far."""

    best: Evaluation


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """For people: a step is official. `replayed`: it already was, and was computed again."""

    record: CommitRecord
    losses: tuple[float, ...]
    replayed: bool


@dataclass(frozen=True, slots=True)
class AskPlan:
    """A stage has nobody: get a plan without these peers (they may serve again if nobody else can); answer
    `PlanGranted`, however long it takes. A later one replaces an earlier one."""

    without: frozenset[str]
    reason: str


@dataclass(frozen=True, slots=True)
class StartCheck:
    """Have a stretch run again; answer `StageChecked`, also when nothing comes of it."""

    check: Check


@dataclass(frozen=True, slots=True)
class TellCheck:
    """For people: what came of a check, and why."""

    check: Check
    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True)
class Distrust:
    """This peer gave wrong results: no later plan of this job may have it."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rewind:
    """Steps from `step` on are void: take their records back, and checkpoints of later states. On the disk before any
    plan that follows is in force."""

    step: int


@dataclass(frozen=True, slots=True)
class TellFault:
    """For people: what happened. `stages` stand still because of it."""

    kind: Literal["peer", "guard", "link", "stage", "liar"]
    peer: str
    stages: tuple[int, ...]
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class TellRestored:
    """For people: how the stages get to `committed`: `restored` from their state at `base`, the others kept theirs."""

    committed: int
    base: int
    restored: tuple[int, ...]
    rollback: bool


@dataclass(frozen=True, slots=True)
class WarnTolerant:
    """A replayed step came out with other bits and the job allows that; said, never hidden."""

    step: int
    detail: str


@dataclass(frozen=True, slots=True)
class EndJob:
    """Nothing more to do. `failed` carries the reason when the job can't go on, `early` why it had enough steps."""

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
    | Feed
    | DecideScale
    | JournalCommit
    | SendCommit
    | WriteCheckpoint
    | Evaluate
    | NameBest
    | StepCommitted
    | AskPlan
    | StartCheck
    | TellCheck
    | Distrust
    | Rewind
    | TellFault
    | TellRestored
    | WarnTolerant
    | EndJob
)
