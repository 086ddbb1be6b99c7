"""Roles, events and commands of a serving job's machine, beside those in `coordination.round.interface`.

Results of passes do not come as events: `ServingMachine.returned` takes them. Neighbours: `coordination.serving.driver`
takes the events and returns the commands; the serving driver and the tests' virtual world create the events and perform
the commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from fusionai.coordination.round.interface import DriverEvent, PlanRoles, SharedCommand
from fusionai.coordination.round.verification import Check, Opinion
from fusionai.coordination.serving.sessions import Text
from fusionai.wire.base import Fence
from fusionai.wire.serving import Segment

ServingState = Literal["starting", "ready", "recovering", "waiting", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRoles(PlanRoles):
    """Stages are numbered from 0 in pipeline order; each has at most one warm standby."""

    caching: frozenset[int]
    """Stages with attention layers, which have caches."""
    checkable: frozenset[int] = frozenset()
    """Stages that can be spot-checked, because other members know their inputs and outputs."""
    predicted_s: Mapping[int, float] = field(default_factory=dict[int, float])
    """Stage -> time that the plan expects one token to take."""

    @property
    def last_caching(self) -> int:
        """The last stage with a cache; -1 without any."""
        return max(self.caching, default=-1)

    def standby_of(self, peer: str) -> tuple[int, ...]:
        return tuple(stage for stage, standby in sorted(self.standbys.items()) if standby == peer)


# ------------------------------------------------------------------------------------------------------- events


class LoadProgressed(DriverEvent, frozen=True):
    """A member is still loading. While it compiles or packs, `done_bytes` of its weights do not change."""

    peer: str
    stage: int
    done_bytes: int = 0


class StageLoaded(DriverEvent, frozen=True):
    """The stage is ready for passes. `cached`: (session, positions) that its cache has."""

    peer: str
    stage: int
    cached: tuple[tuple[int, int], ...] = ()


class StandbyLoaded(DriverEvent, frozen=True):
    """A standby has the stage's weights."""

    peer: str
    stage: int


class CacheRebuilt(DriverEvent, frozen=True):
    """The last stage of rebuild `number` has this session's positions below `end`."""

    number: int
    session: int
    end: int


class StageWorking(DriverEvent, frozen=True):
    """A stage with passes reports what it does. It has been working on pass `number`, which may be of an earlier round,
    for `busy_s`. If `number` is -1, it works on none, and the first pass that waits came `busy_s` ago; 0.0 if none
    waits and some were computed since the last report."""

    peer: str
    stage: int
    number: int
    busy_s: float


class ProbeReturned(DriverEvent, frozen=True):
    """A probe crossed all stages. `digest`: SHA-256 of its output's bytes, in hexadecimal. `distance`: largest relative
    difference from the job's first probe, 0.0 for the first; at most `tolerance` is right."""

    number: int
    digest: str
    distance: float
    tolerance: float


class PassFailure(DriverEvent, frozen=True):
    """A stage could not compute pass, probe or rebuild `number`, or no longer has what the rebuild needs. It continues
    with other passes."""

    number: int
    stage: int
    reason: str


class TextChecked(DriverEvent, frozen=True):
    """Answer to `BeginCheck`."""

    check: Check
    opinion: Opinion


class MemberLeaving(DriverEvent, frozen=True):
    """A member wants to leave. It works until another peer has taken its place."""

    peer: str


class PlanGiven(DriverEvent, frozen=True):
    """A newer plan version, issued by the broker. If it changes more than standbys, its peers are prepared before the
    job switches to it. `knows`: peers that were lost before the plan was made (`ServingMachine.lost`); a plan with a
    peer that was lost later is void."""

    roles: ServingRoles
    knows: frozenset[str] = frozenset()


class WeightsReplaced(DriverEvent, frozen=True):
    """Some of the job's weights have other values now. Every stage and standby loads those; caches stay."""

    reason: str


class Tick(DriverEvent, frozen=True):
    """Time on the driver's monotonic clock, a few times per second."""

    now_s: float


# ----------------------------------------------------------------------------------------------------- commands


class BeginRound(Struct, frozen=True):
    """Begin a round: drop everything under way for older fences, send `Enlist` with this fence to every member of
    `roles`; answer `MemberEnlisted` for each."""

    fence: Fence
    roles: ServingRoles


class EnlistStandby(Struct, frozen=True):
    """Enlist one more member beside a running round, with a `fence` whose plan version may be newer than the round's;
    answer `MemberEnlisted` with that fence. Passes continue."""

    fence: Fence
    peer: str
    roles: ServingRoles


class SendLoad(Struct, frozen=True):
    """Have the peer load this stage as `roles` cut it. Answer `StageLoaded` (with `standby`, `StandbyLoaded`) or
    `StageFailure`. `fresh`: the stage drops its caches and what it retained, which may be outdated."""

    fence: Fence
    peer: str
    stage: int
    standby: bool
    fresh: bool
    roles: ServingRoles


class SendRebuild(Struct, frozen=True):
    """Have the holder of `source` send what it retains of `segments` to the next stages up to `through`. If `source` is
    -1, the driver itself sends `tokens`, packed in the order of the segments (otherwise empty), as passes with
    `rebuild=through` within the pass limit. Answer `CacheRebuilt` for each segment, or `PassFailure`. All stages up to
    `through` retain what they computed, as in any pass."""

    number: int
    source: int
    through: int
    segments: tuple[Segment, ...]
    tokens: tuple[int, ...]


class SendProbePass(Struct, frozen=True):
    """Send this pass through all stages; its only wanted row is the last. Answer `ProbeReturned` or `PassFailure`."""

    number: int
    segments: tuple[Segment, ...]
    tokens: tuple[int, ...]
    forget: tuple[int, ...]


class ResumePasses(Struct, frozen=True):
    """The pipeline is whole: call `ServingMachine.next_pass` until it returns None, now and after each event."""


class BeginCheck(Struct, frozen=True):
    """Have the verifier of `check` read `text` again, and collect sketches from all members that saw it; answer
    `TextChecked` in any case. Until then the stages hold and retain the text's data. `fence`: the verifier's."""

    check: Check
    text: Text
    fence: Fence


class Dismiss(Struct, frozen=True):
    """This peer has no part in the job any more: `Detach` it if it can be reached, close its connections."""

    peer: str
    reason: str


class FailSessions(Struct, frozen=True):
    """Fail these sessions, whose pages are free already. All others continue."""

    sessions: tuple[int, ...]
    reason: str


class ReportState(Struct, frozen=True):
    """Report the job's state to the user and to `/ready`."""

    state: ServingState
    detail: str


class ReportRebuilding(Struct, frozen=True):
    """Report to the user that these stages get their caches from what the stages before them retained. `positions`: of
    all sessions together."""

    stages: tuple[int, ...]
    sessions: int
    positions: int


ServingCommand = (
    BeginRound
    | EnlistStandby
    | SendLoad
    | SendRebuild
    | SendProbePass
    | ResumePasses
    | BeginCheck
    | Dismiss
    | FailSessions
    | ReportState
    | ReportRebuilding
    | SharedCommand
)
