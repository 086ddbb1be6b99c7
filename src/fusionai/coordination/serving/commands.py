"""What the machine of a serving job wants done. Decides nothing; the serving driver performs it.

Neighbours: `coordination.serving.driver` gives these; the tests' virtual world performs them without a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fusionai.coordination.round.commands import Distrust, ReportCheck
from fusionai.coordination.round.verification import Check
from fusionai.coordination.serving.roles import ServingRoles
from fusionai.coordination.serving.sessions import Text
from fusionai.wire.base import Fence
from fusionai.wire.serving import Segment

ServingState = Literal["starting", "ready", "recovering", "waiting", "stopped"]
FaultKind = Literal["peer", "standby", "link", "stage", "probe", "late", "leaving", "faulty"]


@dataclass(frozen=True, slots=True)
class BeginRound:
    """A round begins: drop whatever is under way for older fences, send `Enlist` with this one to every member of
    `roles`; answer `MemberEnlisted` for each."""

    fence: Fence
    roles: ServingRoles


@dataclass(frozen=True, slots=True)
class EnlistStandby:
    """Bring one more member in beside a running round: `Enlist` it with `fence`, which may be of a newer plan version
    than the round's; answer `MemberEnlisted` with it. Passes go on."""

    fence: Fence
    peer: str
    roles: ServingRoles


@dataclass(frozen=True, slots=True)
class SendLoad:
    """`Load` this stage, as `roles` cut it. Answer `StageLoaded`, on `standby` `StandbyLoaded`, or `StageFailed`.
    `fresh`: it drops all caches and whatever it retained; they may be of another time."""

    fence: Fence
    peer: str
    stage: int
    standby: bool
    fresh: bool
    roles: ServingRoles


@dataclass(frozen=True, slots=True)
class SendRebuild:
    """Have the holder of `source` send what it retains of `segments` to the next stages up to `through`. With `source`
    -1 the driver itself sends `tokens`, packed in the order of the segments (otherwise empty), as passes with
    `rebuild=through` within the pass limit. Answer `Rebuilt` for each segment, or `PassFailed`. Stages on the
    way, the last one too, retain what they computed, as of any pass."""

    number: int
    source: int
    through: int
    segments: tuple[Segment, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendProbe:
    """Send this pass through all stages; its only wanted row is the last. Answer `ProbeReturned` or `PassFailed`."""

    number: int
    segments: tuple[Segment, ...]
    tokens: tuple[int, ...]
    forget: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ResumePasses:
    """The pipeline is whole: ask `ServingMachine.next_pass` until it gives none, now and after each event."""


@dataclass(frozen=True, slots=True)
class BeginCheck:
    """Have the verifier of `check` read `text` again, and hear all who saw it; answer `TextChecked`, whatever happens.
    The stages still have and retain what belongs to it until then. `fence`: what the verifier goes by."""

    check: Check
    text: Text
    fence: Fence


@dataclass(frozen=True, slots=True)
class AskPlan:
    """Get a plan from what is in force, `roles`, without these peers (they may serve again if nobody else can); answer
    `PlanGiven`, however long it takes. `urgent`: a stage has nobody meanwhile. A later one replaces an earlier one."""

    roles: ServingRoles
    without: frozenset[str]
    reason: str
    urgent: bool


@dataclass(frozen=True, slots=True)
class Dismiss:
    """This peer has no part in the job any more: `Detach` it if it can be reached, close its connections."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class FailSessions:
    """These can't go on, everything else does; they are released already."""

    sessions: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class ReportFault:
    """For people: what happened. `stages` stand still because of it; `successors`: who takes them over at once."""

    kind: FaultKind
    peer: str
    stages: tuple[int, ...]
    reason: str
    successors: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class ReportState:
    """For people and for `/ready`: how the job stands now."""

    state: ServingState
    detail: str


@dataclass(frozen=True, slots=True)
class ReportRebuilding:
    """For people: these stages get their caches from what the stages before them retained. `positions`: of all
    sessions together."""

    stages: tuple[int, ...]
    sessions: int
    positions: int


@dataclass(frozen=True, slots=True)
class EndJob:
    """Nothing more to do. `failed` carries the reason when the job can't go on."""

    stopped: str | None = None
    failed: str | None = None


ServingCommand = (
    BeginRound
    | EnlistStandby
    | SendLoad
    | SendRebuild
    | SendProbe
    | ResumePasses
    | BeginCheck
    | ReportCheck
    | Distrust
    | AskPlan
    | Dismiss
    | FailSessions
    | ReportFault
    | ReportState
    | ReportRebuilding
    | EndJob
)
