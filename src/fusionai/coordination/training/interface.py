"""Roles, events and commands of a training driver's machine, beside those in `coordination.round.interface`.

Neighbours: `coordination.training.driver` takes the events and returns the commands; `training.driver`, the simulator
and the tests' virtual world create the events and perform the commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import Struct

from fusionai.coordination.round.interface import DriverEvent, PlanRoles, SharedCommand
from fusionai.coordination.round.verification import Check, Opinion
from fusionai.coordination.training.evaluations import Evaluation
from fusionai.coordination.training.stage_interface import Resumed
from fusionai.wire.messages import CommitRecord, Fence, NonFinite


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles(PlanRoles):
    snapshot_every: int = 0
    """Steps between the snapshots that standbys get."""
    feed_window: int
    """Microbatches that may be fed beyond those whose loss is known."""
    neighbours: Mapping[int, frozenset[int]]
    """Stage -> stages it exchanges tensors with."""
    fed: frozenset[int]
    """Stages that take inputs from the data feed."""
    stateless: frozenset[int] = frozenset()
    """Stages without parameters and buffers (the loss): their state is known at every step."""


# ------------------------------------------------------------------------------------------------------- events


class StageReported(DriverEvent, frozen=True):
    """Answer to an attach: the stage's position. The stage retains everything it sent in step `retained_from` and later
    ones."""

    stage: int
    applied: int
    prepared: int
    retained_from: int = 2**40


class StageReady(DriverEvent, frozen=True):
    stage: int
    applied: int


class SnapshotStored(DriverEvent, frozen=True):
    """A standby has received this snapshot completely."""

    stage: int
    step: int
    peer: str


class ProbeAnswered(DriverEvent, frozen=True):
    """Losses of the same microbatch, sent twice through all stages."""

    losses: tuple[float, float]


class LossArrived(DriverEvent, frozen=True):
    step: int
    microbatch: int
    loss: float


class StagePrepared(DriverEvent, frozen=True):
    stage: int
    step: int
    norms: Mapping[str, float]
    nonfinite: NonFinite = ""


class ScaleDecided(DriverEvent, frozen=True):
    """The backend's answer to `DecideScale`."""

    step: int
    total_norm: float
    scale: float


class CommitJournalled(DriverEvent, frozen=True):
    """The record is on disk."""

    record: CommitRecord


class CheckpointWritten(DriverEvent, frozen=True):
    step: int


class EvaluationDone(DriverEvent, frozen=True):
    """An evaluation is finished and journalled."""

    step: int
    loss: float


class VerifierReady(DriverEvent, frozen=True):
    """A verifier is ready to run these steps of `stage` again and waits for the inputs."""

    peer: str
    stage: int
    first: int
    below: int


class EvidenceLost(DriverEvent, frozen=True):
    """`peer` no longer has everything that `stage` sent to the checked stage `about`."""

    peer: str
    stage: int
    about: int


class StageChecked(DriverEvent, frozen=True):
    """Result of running an audit interval again."""

    check: Check
    opinion: Opinion


class PlanGranted(DriverEvent, frozen=True):
    """A newer plan version, issued by the broker and journalled by this driver."""

    roles: Roles


# ----------------------------------------------------------------------------------------------------- commands


class SendAttach(Struct, frozen=True):
    """Begin a round: enlist every member of `roles`, attach every stage. Drop everything in progress under the old
    fence: a checkpoint being collected, an evaluation, a probe, states being sent. `standbys`: those still
    connected."""

    fence: Fence
    roles: Roles
    standbys: Mapping[int, str]


class SendSnapshot(Struct, frozen=True):
    """Ask `holder` to send its snapshot of (stage, step) to `peer`."""

    stage: int
    step: int
    holder: str
    peer: str


class SendResume(Struct, frozen=True):
    """Resume a stage. For `import` and `initialise` the driver's process also streams the state of `resume.base`."""

    stage: int
    resume: Resumed


class SendProbe(Struct, frozen=True):
    """Send the first microbatch of `step` through all stages twice in evaluation mode; answer `ProbeAnswered`."""

    step: int


class AnnounceReady(Struct, frozen=True):
    """Announce that every stage is at `base`, every link is up, and a probe came back right. The first work follows."""

    base: int


class FeedMicrobatch(Struct, frozen=True):
    """Send the microbatch's inputs to the stages that need them; in a replay only to the stages in `only`."""

    step: int
    microbatch: int
    only: frozenset[int] | None = None


class DecideScale(Struct, frozen=True):
    """Reduce per-parameter norms (canonical order) to the step's scale, with the backend's arithmetic."""

    step: int
    norms: tuple[float, ...]


class JournalCommit(Struct, frozen=True):
    """Write the record to disk; answer `CommitJournalled`. Nothing is sent before that answer."""

    record: CommitRecord


class SendCommit(Struct, frozen=True):
    """Send the commit to all stages. With `save`, stages stream the resulting state before they go on
    (`WriteCheckpoint` collects it)."""

    record: CommitRecord
    watermark: int
    save: bool


class WriteCheckpoint(Struct, frozen=True):
    """Collect all stages' state of `step`; answer `CheckpointWritten`. `ask`: request it from the stages first."""

    step: int
    ask: bool


class Evaluate(Struct, frozen=True):
    """Run the evaluation data through the state of `step`. The next step is not committed before the result."""

    step: int


class NameBest(Struct, frozen=True):
    """Record that the checkpoint of this state is complete and holds the best state so far."""

    best: Evaluation


class StepCommitted(Struct, frozen=True):
    """Report to the user that a step is official. `replayed`: it was official before and has been computed again."""

    record: CommitRecord
    losses: tuple[float, ...]
    replayed: bool


class StartCheck(Struct, frozen=True):
    """Have an audit interval run again; answer `StageChecked`, also if there is no result."""

    check: Check


class GatherEvidence(Struct, frozen=True):
    """Have all inputs of the checked stage sent to the verifier, which is ready for them."""

    check: Check


class Rewind(Struct, frozen=True):
    """Take back the steps from `step` on: delete their records, and checkpoints of later states. This must be on disk
    before the next plan comes into force."""

    step: int


class ReportRestored(Struct, frozen=True):
    """Report to the user how the stages get to `committed`: `restored` from their state at `base`, the others kept
    theirs."""

    committed: int
    base: int
    restored: tuple[int, ...]
    rollback: bool


class WarnTolerant(Struct, frozen=True):
    """Warn the user that a replayed step gave different bits, which this job allows."""

    step: int
    detail: str


DriverCommand = (
    SendAttach
    | SendSnapshot
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
    | StartCheck
    | GatherEvidence
    | Rewind
    | ReportRestored
    | WarnTolerant
    | SharedCommand
)
