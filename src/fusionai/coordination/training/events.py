"""Events that a training driver's machine takes: answers of members, answers of the driver's own machine, faults.

Every event belongs to the present round: `training` drops messages with another fence. Neighbours:
`coordination.training.driver` takes these, `training.driver` and the tests' virtual world create them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusionai.coordination.round.events import CommandFailed, PeerLost, StopAsked
from fusionai.coordination.round.verification import Check, Opinion
from fusionai.coordination.training.roles import Roles
from fusionai.wire.messages import CommitRecord


@dataclass(frozen=True, slots=True)
class MemberEnlisted:
    """Answer to `Enlist`: the (stage, step) of every snapshot that this member holds."""

    peer: str
    snapshots: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class StageReported:
    """Answer to an attach: the stage's position."""

    stage: int
    applied: int
    prepared: int
    retained_from: int = 2**40
    """The stage retains everything it sent in this step and later ones."""


@dataclass(frozen=True, slots=True)
class StageReady:
    stage: int
    applied: int


@dataclass(frozen=True, slots=True)
class SnapshotStored:
    """A standby has received this snapshot completely."""

    stage: int
    step: int
    peer: str


@dataclass(frozen=True, slots=True)
class ProbeAnswered:
    """Losses of the same microbatch, sent twice through all stages."""

    losses: tuple[float, float]


@dataclass(frozen=True, slots=True)
class LossArrived:
    step: int
    microbatch: int
    loss: float


@dataclass(frozen=True, slots=True)
class StagePrepared:
    stage: int
    step: int
    norms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ScaleDecided:
    """The backend's answer to `DecideScale`."""

    step: int
    total_norm: float
    scale: float


@dataclass(frozen=True, slots=True)
class CommitJournalled:
    """The record is on disk."""

    record: CommitRecord


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    step: int


@dataclass(frozen=True, slots=True)
class EvaluationDone:
    """An evaluation is finished and journalled."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class LinkBroken:
    """A member lost its connection to another member; both may still be running."""

    reporter: str
    other: str
    reason: str


@dataclass(frozen=True, slots=True)
class StageFailed:
    """A stage can't go on, but its peer can. `fatal`: it would fail on every peer (a graph that no backend can run)."""

    stage: int
    reason: str
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class VerifierReady:
    """A verifier is ready to run these steps of `stage` again and waits for the inputs."""

    peer: str
    stage: int
    first: int
    below: int


@dataclass(frozen=True, slots=True)
class EvidenceLost:
    """`peer` no longer has everything that `stage` sent to the checked stage `about`."""

    peer: str
    stage: int
    about: int


@dataclass(frozen=True, slots=True)
class StageChecked:
    """Result of running an audit interval again."""

    check: Check
    opinion: Opinion


@dataclass(frozen=True, slots=True)
class PlanGranted:
    """A newer plan version, issued by the broker and journalled by this driver."""

    roles: Roles


DriverEvent = (
    MemberEnlisted
    | StageReported
    | StageReady
    | SnapshotStored
    | ProbeAnswered
    | LossArrived
    | StagePrepared
    | ScaleDecided
    | CommitJournalled
    | CheckpointWritten
    | EvaluationDone
    | StopAsked
    | PeerLost
    | LinkBroken
    | StageFailed
    | VerifierReady
    | EvidenceLost
    | StageChecked
    | PlanGranted
    | CommandFailed
)
