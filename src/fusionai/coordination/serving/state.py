"""The state that all parts of the serving machine share: the roles in force, the round, who is lost, leaving or warm.

Neighbours: `driver` is the machine with its table; `rounds`, `standbys` and `takeovers` are its parts, and each keeps
the state of its own subject."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from fusionai.coordination.round.driver import JobState
from fusionai.coordination.round.interface import AskPlan, EndJob
from fusionai.coordination.serving.batching import Batcher
from fusionai.coordination.serving.checks import TextChecks
from fusionai.coordination.serving.interface import ReportState, ServingCommand, ServingRoles
from fusionai.coordination.serving.stage_times import Patience, RoundLimits, StageTimes
from fusionai.wire.base import Fence


@dataclass(slots=True)
class StandbyRoster:
    members: set[str] = field(default_factory=set[str])
    """Peers that were enlisted and not dismissed since."""
    enlisted: set[str] = field(default_factory=set[str])
    """Members that have answered in this round."""
    _beside: dict[str, Fence] = field(default_factory=dict[str, Fence])
    """Member that was enlisted beside the round -> its fence."""
    _announced: dict[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])
    """Member -> stages that its last `Enlist` named it a standby of. It accepts no others."""
    asked: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])
    """(stage, standby) that was asked to load since it was last enlisted in this round."""
    warm: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])
    """(stage, standby) that has the weights and could run the stage now."""

    def begin(self, roles: ServingRoles) -> None:
        """Begin a round, in which all its members are enlisted."""
        self.void()
        self.members |= roles.members
        for peer in roles.members:
            self._announce(peer, roles)

    def void(self) -> None:
        """End the round. Weights stay loaded."""
        self.enlisted.clear()
        self._beside.clear()
        self._announced.clear()
        self.asked.clear()

    def bring(self, peer: str, fence: Fence, roles: ServingRoles) -> None:
        """Record that a peer is enlisted beside the round. It may have dropped what it was asked to load before."""
        self.members.add(peer)
        self.enlisted.discard(peer)
        self._beside[peer] = fence
        self.asked = {one for one in self.asked if one[1] != peer}
        self._announce(peer, roles)

    def strike(self, peer: str) -> None:
        self.members.discard(peer)
        self.enlisted.discard(peer)
        self._beside.pop(peer, None)
        self._announced.pop(peer, None)
        self.asked = {one for one in self.asked if one[1] != peer}
        self.warm = {one for one in self.warm if one[1] != peer}

    def _announce(self, peer: str, roles: ServingRoles) -> None:
        """Record which stages its `Enlist` names: the peer drops the weights of all others."""
        self._announced[peer] = kept = frozenset(roles.standby_of(peer))
        self.warm = {(stage, one) for stage, one in self.warm if one != peer or stage in kept}

    def fence_of(self, peer: str, fence: Fence) -> Fence:
        """Return the fence of the peer's messages in the round of `fence`."""
        return self._beside.get(peer, fence)

    def may_hold(self, stage: int, peer: str) -> bool:
        """Return whether its last `Enlist` named it the standby of the stage."""
        return stage in self._announced.get(peer, ())


class ServingPhase(StrEnum):
    ENLISTING = "enlisting"
    LOADING = "loading"
    """Stages load their programs and weights. Loaded stages are ready at once."""
    REBUILDING = "rebuilding"
    """Lost caches are computed again from what the stages before them retained."""
    PROBING = "probing"
    RUNNING = "running"
    WAITING = "waiting"
    """A stage has no peer to run it. The driver has asked for another plan."""
    ENDED = "ended"


@dataclass(slots=True)
class ServingJobState(JobState[ServingPhase, ServingCommand, ServingRoles]):
    """`probe`: tokens of the probe, as many as the batcher keeps pages for."""

    batcher: Batcher
    probe: tuple[int, ...]
    retain: bool = True
    """Whether stages retain what they sent on. If not, sessions are read again after a takeover."""
    limits: RoundLimits = field(default_factory=RoundLimits)
    checks: TextChecks | None = None
    """Decides on spot checks of ended texts, which the batcher then holds. None: work is not checked."""
    phase: ServingPhase = field(default=ServingPhase.ENLISTING, kw_only=True)
    fence: Fence = field(default_factory=lambda: Fence(0, 0, 0))
    """Fence of the round. The plan version in `roles` may be newer, because new standbys need no round."""
    ready: bool = False
    """Whether the job has been ready before."""
    must_probe: bool = False
    """Weights were replaced since passes last ran, so a probe must cross the stages although none is new."""
    leaving: set[str] = field(default_factory=set[str])
    roster: StandbyRoster = field(default_factory=StandbyRoster)
    sound: dict[int, str] = field(default_factory=dict[int, str])
    """Stage -> its holder, where every round since passes last ran placed it there and none had another cut."""
    patience: Patience = field(init=False)

    def __post_init__(self) -> None:
        self.patience = Patience(self.batcher.times or StageTimes(), self.limits.pass_s)

    @property
    def participants(self) -> set[str]:
        """The owner and all members of the roles in force and of the pending plan."""
        members = {self.roles.owner, *self.roles.members}
        return members if self.pending is None else members | self.pending.members

    @property
    def unsound(self) -> list[int]:
        """Stages whose holder has not taken part in passes yet."""
        return [stage for stage, peer in self.roles.places.items() if self.sound.get(stage) != peer]

    @property
    def is_running(self) -> bool:
        return self.phase is ServingPhase.RUNNING

    @property
    def is_waiting(self) -> bool:
        return self.phase is ServingPhase.WAITING

    def is_warm(self, stage: int) -> bool:
        """Return whether the stage's standby could take over now."""
        return (stage, self.roles.standbys.get(stage, "")) in self.roster.warm

    def moving(self, roles: ServingRoles) -> dict[int, str]:
        """Return the stages that a plan would move, and to which peer. For another cut nothing can be prepared, because
        the stage numbers are in use."""
        if roles.partition != self.roles.partition:
            return {}
        return {stage: peer for stage, peer in roles.places.items() if self.roles.places.get(stage) != peer}

    def promote(self, successors: Mapping[int, str]) -> None:
        """Give stages to their heirs (stage -> peer) under the same plan version."""
        standbys = {stage: peer for stage, peer in self.roles.standbys.items() if stage not in successors}
        self.roles = replace(self.roles, places={**self.roles.places, **successors}, standbys=standbys)
        self.pending = None

    def strike(self, peer: str) -> None:
        """Remove a peer from all records of members. A stage that it holds in `roles` then has no peer."""
        self.roster.strike(peer)
        self.roles = replace(self.roles, standbys={s: one for s, one in self.roles.standbys.items() if one != peer})

    def plan_request(self, reason: str, *, urgent: bool) -> AskPlan:
        return AskPlan(frozenset(self.lost | self.leaving), reason, urgent)

    def fail(self, reason: str) -> list[ServingCommand]:
        """End the job because it can't continue."""
        self.phase = ServingPhase.ENDED
        self.batcher.rewind()
        return [ReportState("stopped", reason), EndJob(failed=reason)]
