"""What reaches the machine of a serving job: answers of members, faults, plans, time. Decides nothing.

Whatever a member says carries its fence; the machine itself drops what is not of the present round. Results of passes
do not come this way: `ServingMachine.returned` takes them. Neighbours: `coordination.serving.driver` takes these, the
serving driver and the tests' virtual world make them."""

from __future__ import annotations

from dataclasses import dataclass

from fusionai.coordination.round.events import CommandFailed, PeerLost, StopAsked
from fusionai.coordination.round.verification import Check, Opinion
from fusionai.coordination.serving.roles import ServingRoles
from fusionai.wire.base import Fence


@dataclass(frozen=True, slots=True)
class MemberEnlisted:
    """Answer to `Enlist`."""

    fence: Fence
    peer: str


@dataclass(frozen=True, slots=True)
class LoadProgressed:
    """A sign that a member still loads, also while it compiles or packs: then `done_bytes` of its weights stay."""

    fence: Fence
    peer: str
    stage: int
    done_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StageLoaded:
    """The stage is ready for passes. `cached`: (session, positions) that its cache has."""

    fence: Fence
    peer: str
    stage: int
    cached: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class StandbyLoaded:
    """A standby has the stage's weights."""

    fence: Fence
    peer: str
    stage: int


@dataclass(frozen=True, slots=True)
class StageFailed:
    """The peer lives, this stage of its (run or with a standby) can't go on. `fatal`: it never will, on no peer."""

    fence: Fence
    peer: str
    stage: int
    reason: str
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class CacheRebuilt:
    """The last stage of rebuild `number` has this session's positions below `end`."""

    fence: Fence
    number: int
    session: int
    end: int


@dataclass(frozen=True, slots=True)
class StageWorking:
    """Now and then, while passes are at a stage: it works on pass `number`, which may be of an earlier round, for
    `busy_s` so far. `number` -1: on none, though the first of those that wait came `busy_s` ago; 0.0 where none waits
    and some were computed since it said so last."""

    fence: Fence
    peer: str
    stage: int
    number: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class ProbeReturned:
    """A probe crossed all stages. `digest`: SHA-256 of its output's bytes, in hexadecimal. `distance`: greatest
    relative difference from the job's first probe, 0.0 for that one; at most `tolerance` is right."""

    fence: Fence
    number: int
    digest: str
    distance: float
    tolerance: float


@dataclass(frozen=True, slots=True)
class PassFailed:
    """A stage could not compute pass, probe or rebuild `number`, or no longer has what the rebuild needs. It goes on
    with other passes."""

    fence: Fence
    number: int
    stage: int
    reason: str


@dataclass(frozen=True, slots=True)
class TextChecked:
    """Answer to `BeginCheck`."""

    fence: Fence
    check: Check
    opinion: Opinion


@dataclass(frozen=True, slots=True)
class LinkBroken:
    """A member lost its connection to another member; both may live."""

    fence: Fence
    reporter: str
    other: str
    reason: str


@dataclass(frozen=True, slots=True)
class MemberLeaving:
    """A member wants to leave in order: it works until somebody has taken its place."""

    peer: str


@dataclass(frozen=True, slots=True)
class PlanGiven:
    """A newer plan version, minted by the broker. For more than other standbys it is first prepared, then switched to.
    `knows`: peers lost before the pool was looked at for it (`ServingMachine.lost`); with others lost it is void."""

    roles: ServingRoles
    knows: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Tick:
    """Time, on the driver's monotonic clock; a few times a second."""

    now_s: float


MemberEvent = (
    MemberEnlisted
    | LoadProgressed
    | StageLoaded
    | StandbyLoaded
    | StageFailed
    | CacheRebuilt
    | StageWorking
    | ProbeReturned
    | PassFailed
    | TextChecked
    | LinkBroken
)
"""Events of one round."""
ServingEvent = MemberEvent | PeerLost | MemberLeaving | PlanGiven | StopAsked | CommandFailed | Tick
