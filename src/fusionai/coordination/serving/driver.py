"""The machine of a serving job: rounds of enlisting, loading, rebuilding and probing; takeovers, plans, drains.

It decides who runs and who guards which stage, when passes may go, how a stage that lost its cache gets it back, when
another plan is needed. It never touches a tensor, a clock or a connection: the serving driver performs its commands,
the tests' virtual world does the same. Sessions, pages and passes are its batcher's.

Any fault that touches a stage ends the *round*: a higher fence, whatever was under way is void, everybody says what it
has. A stage is *sound* while its holder has taken part in every pass since it was whole. The others drop what they may
have and are rebuilt, in contiguous runs, from what the stage before each run retains, from the tokens where there is
none before. A probe crosses all stages: twice before the job's first pass, equal to the bit; once after a takeover,
behind what is rebuilt, close to the first. Then every session goes on from its last emitted token, and nothing emitted
ever changes.

A lost stage goes to its guard at once, under the same plan version; the broker is asked beside that. A plan that moves
stages is prepared first (their new holders load as guards do, beside the passes) and then costs one round. Other guards
cost none.

Progress is what arrives: results, and stages that say what they work on. A stage is waited for as long as it works
within what `patience` grants it for this piece of work, however slow it is. Where nothing came back in time a round
begins with shorter pieces of prompts and longer limits; after `ATTEMPTS` such rounds the sessions concerned fail, with
the stage and its speed, and others have their turn.

Where work is checked (`checks`), texts that are over are read again by the stages' guards beside the passes. A peer
whose results were found wrong is lost for good: all that is under way is read again from its tokens by others.

Neighbours: `serving_events`, `serving_commands` are its words, `serving_roles` who shall do what, `serving_muster` who
is in, `batching` and `pages` the sessions, `stage_times` and `patience` what is slow and what is stuck.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, Literal

from fusionai.coordination.round.verification import Found
from fusionai.coordination.serving.batching import PROBE_SESSION, Batcher
from fusionai.coordination.serving.checks import TextChecks
from fusionai.coordination.serving.commands import (
    AskPlan,
    BeginCheck,
    BeginRound,
    Dismiss,
    Distrust,
    EndJob,
    EnlistStandby,
    FailSessions,
    ResumePasses,
    SendLoad,
    SendProbe,
    SendRebuild,
    ServingCommand,
    TellCheck,
    TellFault,
    TellRebuilding,
    TellState,
)
from fusionai.coordination.serving.events import (
    CommandFailed,
    LinkBroken,
    LoadProgressed,
    MemberEnlisted,
    MemberLeaving,
    MemberLost,
    PassFailed,
    PlanGiven,
    ProbeReturned,
    RebuildFailed,
    Rebuilt,
    ServingEvent,
    StageFailed,
    StageLoaded,
    StageWorking,
    StandbyLoaded,
    StopAsked,
    TextChecked,
    Tick,
)
from fusionai.coordination.serving.passes import PassPlan
from fusionai.coordination.serving.patience import ATTEMPTS, IDLE_MARGIN, Patience
from fusionai.coordination.serving.roles import ServingRoles
from fusionai.coordination.serving.stage_times import StageTimes, Work
from fusionai.coordination.serving.standby_roster import Muster
from fusionai.wire.base import Fence
from fusionai.wire.serving import Segment


class ServingPhase(Enum):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLimits:
    """How long a phase may go without a sign of progress before it is given up. `pass_s`: the least that a stage may
    work on a pass, and that passes may be under way without a sign (`Patience.floor_s`)."""

    enlist_s: float = 10.0
    load_s: float = 60.0
    rebuild_s: float = 20.0
    probe_s: float = 20.0
    pass_s: float = 30.0
    loading_s: float = 1800.0
    """Longest time without a further byte of weights, or until all are packed, for a stage that reports loading."""


FaultKind = Literal["peer", "guard", "link", "stage", "probe", "late", "leaving", "liar"]


@dataclass(slots=True)
class ServingMachine:
    """See the module. `start` returns the first commands; `handle` takes an event and returns commands. Passes go
    through `next_pass` and `returned`. `probe`: tokens of the probe, as many as the batcher keeps pages for."""

    batcher: Batcher
    roles: ServingRoles
    incarnation: int
    probe: tuple[int, ...]
    retain: bool = True
    """Whether stages retain what they sent on. If not, sessions are read again after a takeover."""
    limits: RoundLimits = RoundLimits()
    checks: TextChecks | None = None
    """Decides on spot checks of ended texts, which the batcher then holds. None: work is not checked."""
    phase: ServingPhase = ServingPhase.ENLISTING
    attempt: int = -1
    fence: Fence = field(default_factory=lambda: Fence(0, 0, 0))
    """Fence of the round. The plan version in `roles` may be newer, because new guards need no round."""
    story: list[str] = field(default_factory=list[str])
    _ready: bool = False
    """Whether the job has been ready before."""
    _lost: set[str] = field(default_factory=set[str])
    _leaving: set[str] = field(default_factory=set[str])
    _muster: Muster = field(default_factory=Muster)
    _loaded: dict[int, Mapping[int, int]] = field(default_factory=dict[int, Mapping[int, int]])
    """Stage -> positions it reported for each session."""
    _sound: dict[int, str] = field(default_factory=dict[int, str])
    """Stage -> its holder, where every round since passes last ran placed it there and none had another cut."""
    _arrived: dict[int, tuple[int, float]] = field(default_factory=dict[int, tuple[int, float]])
    """Stage -> bytes of its weights in its last report, and the time since which it has had that many."""
    _rebuilds: dict[int, tuple[SendRebuild, set[int]]] = field(default_factory=dict[int, tuple[SendRebuild, set[int]]])
    """Number -> the rebuild request, and the sessions that are not rebuilt yet."""
    _probes: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """Number of each probe under way -> the sessions that it told the stages to drop."""
    _digests: list[str] = field(default_factory=list[str])
    _pending: ServingRoles | None = None
    """A plan that moves stages, while their new holders load."""
    _link_faults: Counter[frozenset[str]] = field(default_factory=Counter[frozenset[str]])
    _stage_faults: Counter[int] = field(default_factory=Counter[int])
    """Both counters cover the time since the last pass came back."""
    _patience: Patience = field(init=False)
    _now_s: float = 0.0
    _moved_s: float | None = None
    """Time of the last sign of progress; None until the next tick sets it."""

    def __post_init__(self) -> None:
        self._patience = Patience(self.batcher.times or StageTimes(), self.limits.pass_s)

    # ------------------------------------------------------------------------------------------------ interface

    def start(self) -> list[ServingCommand]:
        return self._begin_round("")

    def handle(self, event: ServingEvent) -> list[ServingCommand]:
        """Apply one event; one of another round, or without a row for the present phase, changes nothing."""
        transition = TABLE.get((self.phase, type(event)))
        if not self._is_of_this_round(event) or transition is None:
            return []
        if not isinstance(event, Tick):
            self.story.append(f"{self.phase.value}: {event!r}")
            del self.story[:-STORY_LENGTH]
            if not isinstance(event, (StageWorking, LoadProgressed)):
                self._moved_s = None
        commands = [*transition.act(self, event), *self._dismiss_idle()]
        assert self.phase in transition.targets, (self.phase, transition.targets, self.story)
        return commands

    def next_pass(self, now_s: float) -> PassPlan | None:
        if self.phase is not ServingPhase.RUNNING:
            return None
        if not self.batcher.under_way:
            self._moved_s = now_s
        return self.batcher.next_pass(now_s)

    def measured(self, fence: Fence, number: int, stage: int, seconds: float) -> None:
        """Record the time that a stage took for this pass or probe. Call it before `returned`."""
        work = self._work_of(number) if fence == self.fence else None
        if work is not None:
            self._patience.times.measured(stage, work, seconds)

    def sessions_of(self, fence: Fence, number: int) -> tuple[int, ...]:
        """Return the sessions for which an arrived result counts. The driver samples for these."""
        return self.batcher.sessions_of(number) if fence == self.fence else ()

    def returned(
        self,
        fence: Fence,
        number: int,
        tokens: Mapping[int, Sequence[int]],
        finished: Collection[int],
        now_s: float,
    ) -> frozenset[int]:
        """See `Batcher.returned`: only tokens of the returned sessions may be emitted."""
        if fence != self.fence:
            return frozenset()
        counted = self.batcher.returned(number, tokens, finished, now_s)
        self._moved_s = now_s
        if counted:
            self._patience.stalls = 0
            self.batcher.pieces.recover()
            self._link_faults.clear()
            self._stage_faults.clear()
        return counted

    def next_checks(self) -> tuple[BeginCheck, ...]:
        """Return the checks to start now. Call it after every event, as with passes."""
        checks = self.checks
        if checks is None or self.phase is not ServingPhase.RUNNING:
            return ()
        due = checks.due(self.batcher, self.roles.places, self.checkable)
        text = checks.reading
        if not due or text is None:
            return ()
        return tuple(BeginCheck(one, text, self._muster.fence_of(one.referee, self.fence)) for one in due)

    @property
    def checkable(self) -> dict[int, str]:
        """Stages whose guards could read a text again now: what the stage got is retained before it, what it gives
        goes to another stage."""
        if not self.retain:
            return {}
        return {
            stage: guard
            for stage, guard in self.roles.guards.items()
            if self._muster.is_warm(stage, guard) and stage in self.roles.checkable
        }

    @property
    def lost(self) -> frozenset[str]:
        """Lost peers. A later plan must not contain them."""
        return frozenset(self._lost)

    def is_warm(self, stage: int) -> bool:
        """Return whether the stage's guard could take over now."""
        return self._muster.is_warm(stage, self.roles.guards.get(stage, ""))

    # ---------------------------------------------------------------------------------------------------- rounds

    def _begin_round(self, why: str) -> list[ServingCommand]:
        """Begin a round. Everything under way is void; sessions keep their emitted tokens."""
        self.phase = ServingPhase.ENLISTING
        self.attempt += 1
        self.fence = Fence(self.roles.version, self.incarnation, self.attempt)
        self._void_round()
        # A member without a place for a stage drops it, so it is unsound even if a later round gives it back before
        # passes run.
        self._sound = {stage: one for stage, one in self._sound.items() if self.roles.places.get(stage) == one}
        self._muster.begin(self.roles)
        self._patience.times.begin(self.roles)
        state: Final = "recovering" if self._ready else "starting"
        return [TellState(state, why), BeginRound(self.fence, self.roles)]

    def _void_round(self) -> None:
        self.batcher.rewind()
        for forgotten in self._probes.values():
            self.batcher.forget(forgotten)
        self._muster.void()
        if self.checks is not None:
            self.checks.drop()
        for one in (self._loaded, self._arrived, self._rebuilds, self._probes):
            one.clear()
        self._digests.clear()
        self._moved_s = None

    def on_enlisted(self, event: ServingEvent) -> list[ServingCommand]:
        """Load each stage as soon as its member is enlisted. Guards load when passes run, so that they do not delay
        stages."""
        assert isinstance(event, MemberEnlisted)
        self._muster.enlisted.add(event.peer)
        if self.phase is ServingPhase.RUNNING:
            return self._prepare()
        unsound = set(self._unsound())
        loads = [
            SendLoad(self.fence, event.peer, stage, standby=False, fresh=stage in unsound, roles=self.roles)
            for stage in self.roles.stages_of(event.peer)
        ]
        return [*loads, *self._go_on_when_loaded()]

    def on_guard_enlisted(self, event: ServingEvent) -> list[ServingCommand]:
        """Enlist a guard that runs no stage. Guards load when passes run."""
        assert isinstance(event, MemberEnlisted)
        self._muster.enlisted.add(event.peer)
        return []

    def on_loaded(self, event: ServingEvent) -> list[ServingCommand]:
        assert isinstance(event, StageLoaded)
        if self.roles.places.get(event.stage) != event.peer:
            return []
        self._loaded[event.stage] = dict(event.cached)
        return self._go_on_when_loaded()

    def _go_on_when_loaded(self) -> list[ServingCommand]:
        if not set(self.roles.places.values()) <= self._muster.enlisted:
            return []
        self.phase = ServingPhase.LOADING
        return self._rebuild() if self._loaded.keys() >= set(self.roles.stages) else []

    def _rebuild(self) -> list[ServingCommand]:
        """Start rebuilds once all members have reported."""
        live = self.batcher.live
        for cached in self._loaded.values():
            self.batcher.forget(session for session in cached if session not in live)
        short = [stage for stage in range(self.roles.last_caching + 1) if not self._is_whole(stage, live)]
        if not short:
            return self._send_probes()
        segments = self.batcher.segments_for_rebuild()
        if not self.retain:
            segments = ()
            self.batcher.compute_again()
        self.batcher.caches_lost()
        if not segments:
            return self._send_probes()
        self.phase = ServingPhase.REBUILDING
        told = TellRebuilding(tuple(short), len(segments), sum(segment.length for segment in segments))
        commands: list[ServingCommand] = [told]
        for first, last in _runs(short):
            tokens = () if first else tuple(token for one in segments for token in self.batcher.tokens_of(one))
            asked = SendRebuild(self.batcher.take_number(), first - 1, last, segments, tokens)
            self._rebuilds[asked.number] = (asked, {segment.session for segment in segments})
            commands.append(asked)
        # Sent behind the rebuilds without waiting for them: a probe has pages of its own.
        return [*commands, *self._probing()]

    def _is_whole(self, stage: int, live: Mapping[int, int]) -> bool:
        """Return whether the stage has all that passes need, and retains what it should."""
        if stage in self._unsound():
            return False
        cached = self._loaded[stage]
        return stage not in self.roles.caching or all(cached.get(one, 0) >= live[one] for one in live)

    def on_rebuilt(self, event: ServingEvent) -> list[ServingCommand]:
        assert isinstance(event, Rebuilt)
        if event.number not in self._rebuilds:
            return []
        _, missing = self._rebuilds[event.number]
        missing.discard(event.session)
        if missing:
            return []
        del self._rebuilds[event.number]
        return [] if self._rebuilds else self._await_probes()

    def on_rebuild_failed(self, event: ServingEvent) -> list[ServingCommand]:
        """A stage did not retain what a rebuild needs. Read the sessions again from their tokens, which always
        works."""
        assert isinstance(event, RebuildFailed)
        if event.number not in self._rebuilds:
            return []
        asked, _ = self._rebuilds[event.number]
        return self._read_again(asked.through, event.reason)

    def _read_again(self, stage: int, reason: str) -> list[ServingCommand]:
        self.batcher.compute_again()
        why = f"caches of stage {stage} could not be rebuilt ({reason}): sessions are read again"
        return [TellFault("stage", self.roles.places[stage], (stage,), why, {}), *self._begin_round(why)]

    def _send_probes(self) -> list[ServingCommand]:
        return [*self._probing(), *self._await_probes()]

    def _await_probes(self) -> list[ServingCommand]:
        if not self._probes:
            return self._run()
        self.phase = ServingPhase.PROBING
        return []

    def _probing(self) -> list[ServingCommand]:
        """Start probes. None is needed after a round without changes, because its links and stages have been probed."""
        if not self._unsound():
            return []
        commands: list[ServingCommand] = []
        segment = Segment(PROBE_SESSION, 0, len(self.probe), 0, self.batcher.pages.table(PROBE_SESSION))
        for _ in range(1 if self._ready else 2):
            number = self.batcher.take_number()
            self._probes[number] = forget = self.batcher.take_forgotten()
            commands.append(SendProbe(number, (segment,), self.probe, forget))
        return commands

    def on_probed(self, event: ServingEvent) -> list[ServingCommand]:
        assert isinstance(event, ProbeReturned)
        if event.number not in self._probes:
            return []
        del self._probes[event.number]
        self._digests.append(event.digest)
        if not event.distance <= event.tolerance:
            return self._refuse_plan(f"a probe is {event.distance:.3g} off, at most {event.tolerance:.3g} is right")
        if len(set(self._digests)) > 1:
            return self._fail("the same probe came back with other bits the second time")
        return [] if self._probes or self._rebuilds else self._run()

    def _refuse_plan(self, reason: str) -> list[ServingCommand]:
        """Refuse a plan whose new peers compute different results."""
        new = sorted({self.roles.places[stage] for stage in self._unsound()} - {self.roles.owner})
        if not self._ready or not new:
            return self._fail(reason)
        return self._lose(new, "probe", reason)

    def _unsound(self) -> list[int]:
        """Stages whose holder has not taken part in passes yet."""
        return [stage for stage, peer in self.roles.places.items() if self._sound.get(stage) != peer]

    def _run(self) -> list[ServingCommand]:
        self.phase = ServingPhase.RUNNING
        self._ready = True
        self._sound = dict(self.roles.places)
        self._muster.took_over(self._sound)
        return [TellState("ready", ""), ResumePasses(), *self._hand_over(), *self._prepare()]

    # --------------------------------------------------------------------------------------------- guards and plans

    def _prepare(self) -> list[ServingCommand]:
        """Load guards while passes run, and the new holders of stages in a pending plan."""
        if self.phase is not ServingPhase.RUNNING:
            return []
        wanted = [(stage, peer, self.roles) for stage, peer in sorted(self.roles.guards.items())]
        if self._pending is not None:
            wanted += [(stage, peer, self._pending) for stage, peer in sorted(self._moving(self._pending).items())]
        commands: list[ServingCommand] = []
        for stage, peer, roles in wanted:
            if self._muster.is_warm(stage, peer) or self._muster.was_asked(stage, peer):
                continue
            if not self._muster.may_hold(stage, peer):
                if self._may_enlist(peer, roles):
                    commands.append(self._enlist_standby(peer, roles))
            elif peer in self._muster.enlisted:
                self._muster.ask(stage, peer)
                fence = self._muster.fence_of(peer, self.fence)
                commands.append(SendLoad(fence, peer, stage, standby=True, fresh=False, roles=roles))
        return [*commands, *self._switch_if_prepared()]

    def _may_enlist(self, peer: str, roles: ServingRoles) -> bool:
        """Beside the round: nobody who runs a stage in it. Whoever has a part in the round's roles goes by no later
        plan: the next round would be stale to it."""
        if roles is self.roles:
            return not self.roles.stages_of(peer)
        return peer not in self.roles.members | {self.roles.owner}

    def _enlist_standby(self, peer: str, roles: ServingRoles) -> EnlistStandby:
        """Enlist a peer beside the round, with everything it will hold. Its ticket has the plan's version, which may be
        later than the round's."""
        fence = Fence(roles.version, self.incarnation, self.attempt)
        stages = roles.guarded_by(peer) if roles is self.roles else tuple(self._moved_to(peer, roles))
        told = replace(self.roles, version=roles.version, guards={**self.roles.guards, **dict.fromkeys(stages, peer)})
        self._muster.bring(peer, fence, told)
        return EnlistStandby(fence, peer, told)

    def _moved_to(self, peer: str, roles: ServingRoles) -> list[int]:
        return [stage for stage, one in self._moving(roles).items() if one == peer]

    def _moving(self, roles: ServingRoles) -> dict[int, str]:
        """Return the stages that a plan would move, and to which peer. For another cut nothing can be prepared, because
        the stage numbers are in use."""
        if roles.partition != self.roles.partition:
            return {}
        return {stage: peer for stage, peer in roles.places.items() if self.roles.places.get(stage) != peer}

    def _switch_if_prepared(self) -> list[ServingCommand]:
        """Switch to the pending plan once its peers are prepared. Peers that only a round can prepare are not waited
        for."""
        pending = self._pending
        if pending is None:
            return []
        ready = all(
            self._muster.is_warm(stage, peer) or not self._muster.may_hold(stage, peer)
            for stage, peer in self._moving(pending).items()
        )
        return self._adopt(pending, "another plan") if ready else []

    def on_standby_loaded(self, event: ServingEvent) -> list[ServingCommand]:
        assert isinstance(event, StandbyLoaded)
        self._muster.loaded(event.stage, event.peer)
        return [*self._hand_over(), *self._switch_if_prepared()]

    def on_plan(self, event: ServingEvent) -> list[ServingCommand]:
        assert isinstance(event, PlanGiven)
        roles = event.roles
        newest = max(self.roles.version, self._pending.version if self._pending is not None else 0)
        if roles.version <= newest:
            return []
        if roles.members & (self._lost - event.knows):
            return []  # overtaken by a fault, whose handling follows
        if self.checks is not None and roles.members & self.checks.inspector.liars:
            return []  # an expelled peer is not readmitted by a plan
        self._lost -= roles.members
        self._leaving -= roles.members
        if self.phase is ServingPhase.WAITING:
            return self._adopt(roles, "another plan")
        if self.roles.moves(roles):
            self._pending = roles
        else:
            self._pending = None
            self.roles = roles
        return self._prepare()

    def _adopt(self, roles: ServingRoles, why: str) -> list[ServingCommand]:
        if roles.partition != self.roles.partition:
            self._muster.cut_anew()
            self._sound.clear()
        self.roles = roles
        self._pending = None
        return self._begin_round(why)

    def _parts(self) -> set[str]:
        parts = {self.roles.owner, *self.roles.members}
        return parts if self._pending is None else parts | self._pending.members

    def _dismiss_idle(self) -> list[ServingCommand]:
        """Dismiss enlisted members without a part in any plan."""
        gone = sorted(self._muster.members - self._parts()) if self.phase is not ServingPhase.ENDED else []
        for peer in gone:
            self._strike(peer)
        return [Dismiss(peer, "no part in the plan any more") for peer in gone]

    def _strike(self, peer: str) -> None:
        """Remove a peer from all records of members. A stage it holds in `roles` then has no peer."""
        self._muster.strike(peer)
        self.roles = replace(self.roles, guards={s: one for s, one in self.roles.guards.items() if one != peer})

    def on_leaving(self, event: ServingEvent) -> list[ServingCommand]:
        """A leaving member works until other peers have its stages. A guard leaves at once."""
        assert isinstance(event, MemberLeaving)
        if event.peer in self._leaving or event.peer not in self._parts() or event.peer == self.roles.owner:
            return []
        self._leaving.add(event.peer)
        if self._pending is not None and event.peer in self._pending.members:
            self._pending = None
        if not self.roles.stages_of(event.peer):
            self._strike(event.peer)
            return [Dismiss(event.peer, "it leaves"), self._ask(f"{event.peer} leaves", urgent=self._is_waiting)]
        return self._hand_over() or [self._ask(f"{event.peer} leaves", urgent=self._is_waiting)]

    def _hand_over(self) -> list[ServingCommand]:
        """Move stages of leaving members to their guards as soon as the guards are warm."""
        if self.phase is not ServingPhase.RUNNING:
            return []
        for peer in sorted(self._leaving):
            stages = self.roles.stages_of(peer)
            heirs = {stage: self.roles.guards[stage] for stage in stages if self.is_warm(stage)}
            if stages and len(heirs) == len(stages) and not self._leaving & set(heirs.values()):
                self._promote(heirs)
                self._strike(peer)
                told = TellFault("leaving", peer, stages, "it leaves the pool", heirs)
                begun = self._begin_round(f"{peer} hands over")
                return [told, Dismiss(peer, "it leaves"), *begun, self._ask(f"{peer} leaves", urgent=False)]
        return []

    def _promote(self, heirs: Mapping[int, str]) -> None:
        guards = {stage: peer for stage, peer in self.roles.guards.items() if stage not in heirs}
        self.roles = replace(self.roles, places={**self.roles.places, **heirs}, guards=guards)
        self._pending = None

    def _ask(self, reason: str, *, urgent: bool) -> AskPlan:
        return AskPlan(self.roles, frozenset(self._lost | self._leaving), reason, urgent)

    # ------------------------------------------------------------------------------------------------- spot checks

    def on_checked(self, event: ServingEvent) -> list[ServingCommand]:
        assert isinstance(event, TextChecked)
        if self.checks is None:
            return []
        text = self.checks.reading
        found = self.checks.answered(self.batcher, event.check, event.opinion)
        if found is None or text is None:
            return []
        told = TellCheck(event.check, found.outcome, found.reason)
        if found.again is not None:
            return [told, BeginCheck(found.again, text, self.fence)]
        return [told, *(self._expel(found) if found.liar else [])]

    def _expel(self, found: Found) -> list[ServingCommand]:
        """Expel a peer for good. Everything under way may depend on its results, so all of it is read again from
        tokens."""
        if self.roles.stages_of(found.liar):
            self.batcher.compute_again()
        return [Distrust(found.liar, found.reason), *self._lose([found.liar], "liar", found.reason)]

    # ---------------------------------------------------------------------------------------------------- faults

    def on_member_lost(self, event: ServingEvent) -> list[ServingCommand]:
        assert isinstance(event, MemberLost)
        return self._lose([event.peer], "peer", event.reason)

    def _lose(self, peers: Collection[str], kind: FaultKind, reason: str) -> list[ServingCommand]:
        """Remove lost peers. Their stages go to their guards at once; a stage without a guard waits for a plan."""
        gone = [peer for peer in peers if peer in self._parts() and peer not in self._lost]
        if self.roles.owner in gone:
            return self._fail(f"a stage of the job's own machine failed: {reason}")
        if not gone:
            return []
        commands: list[ServingCommand] = []
        guarded = [stage for peer in gone for stage in self.roles.guarded_by(peer)]
        for peer in gone:
            self._lost.add(peer)
            self._leaving.discard(peer)
            # The peer may return to the same stages without its former state.
            self._sound = {stage: one for stage, one in self._sound.items() if one != peer}
            self._strike(peer)
        if self._pending is not None and self._pending.members & self._lost:
            self._pending = None
        unmanned = {stage for stage, peer in self.roles.places.items() if peer in self._lost}
        heirs = self._heirs(unmanned)
        for peer in gone:
            stages = self.roles.stages_of(peer)
            inherited = {stage: heirs[stage] for stage in stages if stage in heirs}
            commands.append(TellFault(kind if stages or kind == "liar" else "guard", peer, stages, reason, inherited))
            commands.append(Dismiss(peer, reason))
        if not unmanned:
            if guarded:
                commands.append(self._ask(reason, urgent=False))
            return [*commands, *self._prepare()]
        self._promote(heirs)
        fell = f"lost {' and '.join(gone)} ({reason.rstrip('.')})"
        if left := sorted(unmanned - heirs.keys()):
            self.phase = ServingPhase.WAITING
            self._void_round()
            nobody = f"waiting for a machine to run stage {', '.join(map(str, left))}: {fell}"
            return [*commands, TellState("waiting", nobody), self._ask(reason, urgent=True)]
        return [*commands, *self._begin_round(fell), self._ask(reason, urgent=False)]

    @property
    def _is_waiting(self) -> bool:
        return self.phase is ServingPhase.WAITING

    def _heirs(self, stages: Iterable[int]) -> dict[int, str]:
        """Return the successors of these stages: guards, and peers that were about to take the stage over."""
        heirs = {stage: self.roles.guards[stage] for stage in stages if stage in self.roles.guards}
        if self._pending is not None:
            moving = self._moving(self._pending)
            prepared = {stage: moving[stage] for stage in stages if self._muster.is_warm(stage, moving.get(stage, ""))}
            heirs = {**prepared, **heirs}
        return heirs

    def on_link_broken(self, event: ServingEvent) -> list[ServingCommand]:
        """First break of a link: another round under the same plan. Second break before a pass came back: one of the
        two peers is removed."""
        assert isinstance(event, LinkBroken)
        pair = frozenset((event.reporter, event.other))
        if len(pair) < 2 or not pair <= set(self.roles.places.values()) | {self.roles.owner}:
            return []
        self._link_faults[pair] += 1
        if self._link_faults[pair] > 1:
            return self._lose([self._blamed(pair)], "link", event.reason)
        told = TellFault("link", event.other, self.roles.stages_of(event.other), event.reason, {})
        return [told, *self._begin_round(event.reason)]

    def _blamed(self, pair: Collection[str]) -> str:
        """Return which peer of a broken link to remove. Never the driver's own machine; otherwise in order: a peer that
        has trouble with most others, a peer that can be replaced at once."""

        def weight(peer: str) -> tuple[int, bool, str]:
            troubles = sum(peer in other for other in self._link_faults)
            return (troubles, all(stage in self.roles.guards for stage in self.roles.stages_of(peer)), peer)

        return max((peer for peer in pair if peer != self.roles.owner), key=weight)

    def on_stage_failed(self, event: ServingEvent) -> list[ServingCommand]:
        """A running stage that fails gets another round first, and another peer if it fails again before a pass came
        back. If the job was never ready, a third failure ends it, because the peer is not the cause. For a guarded or
        prepared stage another guard is chosen."""
        assert isinstance(event, StageFailed)
        if self.roles.places.get(event.stage) != event.peer:
            return self._fail_standby(event)
        return self._stage_trouble(event.stage, event.reason, fatal=event.fatal)

    def _stage_trouble(self, stage: int, reason: str, *, fatal: bool) -> list[ServingCommand]:
        self._stage_faults[stage] += 1
        times = self._stage_faults[stage]
        peer = self.roles.places[stage]
        if fatal or (times > 2 and (not self._ready or peer == self.roles.owner)):
            return self._fail(f"stage {stage} failed: {reason}")
        if times > 1 and peer != self.roles.owner:
            return self._lose([peer], "stage", reason)
        return [TellFault("stage", peer, (stage,), reason, {}), *self._begin_round(reason)]

    def _fail_standby(self, event: StageFailed) -> list[ServingCommand]:
        peer = event.peer
        if not self.roles.stages_of(peer):
            return self._lose([peer], "guard", event.reason)
        if self._pending is not None and self._pending.places.get(event.stage) == peer:
            self._pending = None
        guards = {stage: one for stage, one in self.roles.guards.items() if (stage, one) != (event.stage, peer)}
        self.roles = replace(self.roles, guards=guards)
        return [TellFault("guard", peer, (), event.reason, {})]

    def on_pass_failed(self, event: ServingEvent) -> list[ServingCommand]:
        """Let each session of the failed pass try once more in a pass of its own."""
        assert isinstance(event, PassFailed)
        if event.number in self._probes:
            return self._stage_trouble(event.stage, event.reason, fatal=False)
        over = self.batcher.failed(event.number, self._now_s)
        failed: list[ServingCommand] = [FailSessions(over, f"stage {event.stage}: {event.reason}")] if over else []
        return [*failed, ResumePasses()]

    def on_tick(self, event: ServingEvent) -> list[ServingCommand]:
        assert isinstance(event, Tick)
        self._now_s = event.now_s
        if self._moved_s is None or (self.phase is ServingPhase.RUNNING and not self.batcher.under_way):
            self._moved_s = event.now_s
        idle_s = event.now_s - self._moved_s
        match self.phase:
            case ServingPhase.ENLISTING if idle_s > self.limits.enlist_s:
                return self._lose_late(set(self.roles.places.values()) - self._muster.enlisted, "it does not answer")
            case ServingPhase.LOADING if idle_s > self._patience.grown_s(self.limits.load_s):
                late = {peer for stage, peer in self.roles.places.items() if stage not in self._loaded}
                return self._lose_late(late, "it does not load its stage")
            case ServingPhase.REBUILDING if idle_s > self._patience.grown_s(self.limits.rebuild_s):
                return self._stalled({asked.through for asked, _ in self._rebuilds.values()})
            case ServingPhase.PROBING if idle_s > self._patience.grown_s(self.limits.probe_s):
                return self._stalled(self._unsound())
            case ServingPhase.RUNNING if idle_s > self._patience.silence_s(self.batcher.works):
                return self._stalled(())
            case ServingPhase.RUNNING if self._is_overdue(event.now_s):
                return self._stalled(())
            case _:
                return []

    def _is_overdue(self, now_s: float) -> bool:
        """Return whether a pass has been under way longer than all passes together should take, which means that its
        result was lost."""
        oldest_s = self.batcher.oldest_s
        return oldest_s is not None and now_s - oldest_s > self._patience.whole_s(self.batcher.works)

    def _lose_late(self, peers: Collection[str], reason: str) -> list[ServingCommand]:
        """Remove late peers, except the driver's own machine."""
        self._moved_s = self._now_s
        return self._lose(sorted(set(peers) - {self.roles.owner}), "late", reason)

    def on_working(self, event: ServingEvent) -> list[ServingCommand]:
        """A stage reports what it computes. This is a sign of progress unless the stage exceeds its time limit."""
        assert isinstance(event, StageWorking)
        if self.roles.places.get(event.stage) != event.peer:
            return []
        work = self._work_of(event.number) if event.number >= 0 else None
        # Work of an earlier round, or work that waits behind other work, may be as large as a pass can be.
        most = Work(self.batcher.limits.pass_tokens, float(self.batcher.limits.pass_tokens))
        limit_s = self._patience.limit_s(event.stage, work or most) * (1.0 if work is not None else IDLE_MARGIN)
        if event.busy_s <= limit_s:
            self._moved_s = None
            return []
        if self.phase in (ServingPhase.ENLISTING, ServingPhase.LOADING):
            return []  # whoever does not get on is missed there
        if work is not None:
            self._patience.times.measured(event.stage, work, event.busy_s)
        return self._stalled((event.stage,), busy_s=event.busy_s, work=work)

    def _work_of(self, number: int) -> Work | None:
        """Return the work of a pass or a probe, or the largest pass of a rebuild; None if it is not under way in this
        round."""
        times = self._patience.times
        if number in self._probes:
            return Work(len(self.probe), times.units(0, len(self.probe)))
        if number in self._rebuilds:
            asked, _ = self._rebuilds[number]
            rows = min(self.batcher.limits.pass_tokens, sum(one.length for one in asked.segments))
            end = max(one.start + one.length for one in asked.segments)
            return Work(rows, times.units(max(0, end - rows), end))
        return self.batcher.work_of(number)

    def _stalled(
        self, stages: Collection[int], *, busy_s: float | None = None, work: Work | None = None
    ) -> list[ServingCommand]:
        """Nothing came back in time although everybody answers: another round, with shorter pieces and longer limits;
        where caches are rebuilt or probed then one without anything to rebuild; then others instead of those whose
        `stages` are late; at last the sessions concerned fail."""
        patience = self._patience
        patience.stalls += 1
        self.batcher.pieces.shrink()
        reason = self._why_late(stages, busy_s, work)
        suspects = {self.roles.places[stage] for stage in stages} - {self.roles.owner}
        waiting = self.phase is not ServingPhase.RUNNING
        # A stage that reports working is replaced only by a peer that is ready.
        replaceable = (waiting and busy_s is None) or all(self.is_warm(stage) for stage in stages)
        if patience.stalls > 2 and suspects and replaceable:
            return self._lose_late(suspects, reason)
        if patience.stalls > ATTEMPTS:
            return self._fail(reason) if waiting else self._give_up_sessions(reason)
        if patience.stalls > 1 and waiting:
            self.batcher.compute_again()
        return [TellFault("late", "", (), reason, {}), *self._begin_round(reason)]

    def _why_late(self, stages: Collection[int], busy_s: float | None, work: Work | None) -> str:
        if busy_s is None or not stages:
            return f"nothing came back in time while {self.phase.value}"
        stage = min(stages)
        what = "another piece of work" if work is None else f"a piece of {work.rows} positions"
        speed = self._patience.times.tokens_per_s(stage)
        known = "" if speed is None else f", after {speed:.3g} tokens a second"
        return f"stage {stage} on {self.roles.places[stage]} works on {what} for {busy_s:.0f} s{known}"

    def _give_up_sessions(self, reason: str) -> list[ServingCommand]:
        """Fail the sessions that were under way, because they make no progress. Other sessions may."""
        sessions = self.batcher.sessions_under_way
        why = (
            f"given up after {ATTEMPTS} attempts with shorter pieces and more time: {reason}. Free the machine of "
            "other work, let a faster one join, or ask for less at a time."
        )
        for number in sessions:
            self.batcher.cancel(number)
        self._patience.stalls = 0
        failed: list[ServingCommand] = [FailSessions(sessions, why)] if sessions else []
        return [*failed, TellFault("late", "", (), reason, {}), *self._begin_round(reason)]

    # -------------------------------------------------------------------------------------------------- the end

    def on_stop(self, event: ServingEvent) -> list[ServingCommand]:
        assert isinstance(event, StopAsked)
        self.phase = ServingPhase.ENDED
        self.batcher.rewind()
        return [TellState("stopped", event.reason), EndJob(stopped=event.reason)]

    def on_command_failed(self, event: ServingEvent) -> list[ServingCommand]:
        assert isinstance(event, CommandFailed)
        return self._fail(event.reason)

    def _fail(self, reason: str) -> list[ServingCommand]:
        self.phase = ServingPhase.ENDED
        self.batcher.rewind()
        return [TellState("stopped", reason), EndJob(failed=reason)]

    def on_load_progressed(self, event: ServingEvent) -> list[ServingCommand]:
        """A report of loading is a sign of progress, unless no further bytes came for too long."""
        assert isinstance(event, LoadProgressed)
        known = self._arrived.get(event.stage)
        if known is None or known[0] != event.done_bytes:
            known = self._arrived[event.stage] = event.done_bytes, self._now_s
        if self._now_s - known[1] <= self.limits.loading_s:
            self._moved_s = None
        return []

    # ---------------------------------------------------------------------------------------------------- details

    def _is_of_this_round(self, event: ServingEvent) -> bool:
        match event:
            case (
                MemberEnlisted(fence, peer)
                | LoadProgressed(fence, peer)
                | StandbyLoaded(fence, peer)
                | StageFailed(fence, peer)
                | StageWorking(fence, peer)
            ):
                return fence == self._muster.fence_of(peer, self.fence) and peer in self._parts()
            case (
                StageLoaded()
                | Rebuilt()
                | RebuildFailed()
                | ProbeReturned()
                | PassFailed()
                | TextChecked()
                | LinkBroken()
            ):
                return event.fence == self.fence
            case MemberLost() | MemberLeaving() | PlanGiven() | StopAsked() | CommandFailed() | Tick():
                return True


STORY_LENGTH: Final = 24


def _runs(stages: Sequence[int]) -> list[tuple[int, int]]:
    """Return contiguous runs of ascending numbers, as (first, last)."""
    runs: list[tuple[int, int]] = []
    for stage in stages:
        if runs and runs[-1][1] == stage - 1:
            runs[-1] = (runs[-1][0], stage)
        else:
            runs.append((stage, stage))
    return runs


Act = Callable[[ServingMachine, ServingEvent], list[ServingCommand]]


@dataclass(frozen=True, slots=True)
class ServingTransition:
    """One row of the table: the handler of an event in a phase, and the phases it may lead to."""

    act: Act
    targets: frozenset[ServingPhase]


_N, _L, _B, _P, _G, _W, _E = (
    ServingPhase.ENLISTING,
    ServingPhase.LOADING,
    ServingPhase.REBUILDING,
    ServingPhase.PROBING,
    ServingPhase.RUNNING,
    ServingPhase.WAITING,
    ServingPhase.ENDED,
)
_ROUND: Final = (_N, _L, _B, _P)
_ALIVE: Final = (*_ROUND, _G, _W)


def _row(act: Act, *targets: ServingPhase) -> ServingTransition:
    return ServingTransition(act, frozenset(targets))


TABLE: Final[dict[tuple[ServingPhase, type[ServingEvent]], ServingTransition]] = {
    # A complete barrier may lead through the following phases at once, and from running back into a round.
    (_N, MemberEnlisted): _row(ServingMachine.on_enlisted, _N, _L, _B, _P, _G),
    **{(phase, MemberEnlisted): _row(ServingMachine.on_guard_enlisted, phase) for phase in (_L, _B, _P)},
    (_G, MemberEnlisted): _row(ServingMachine.on_enlisted, _G, _N),
    (_N, StageLoaded): _row(ServingMachine.on_loaded, _N),
    (_L, StageLoaded): _row(ServingMachine.on_loaded, _L, _B, _P, _G, _N),
    **{(phase, LoadProgressed): _row(ServingMachine.on_load_progressed, phase) for phase in (_N, _L, _G)},
    **{(phase, StageWorking): _row(ServingMachine.on_working, phase, _N, _W, _E) for phase in (*_ROUND, _G)},
    (_G, StandbyLoaded): _row(ServingMachine.on_standby_loaded, _G, _N),
    (_B, Rebuilt): _row(ServingMachine.on_rebuilt, _B, _P, _G, _N),
    (_B, RebuildFailed): _row(ServingMachine.on_rebuild_failed, _N),
    (_B, ProbeReturned): _row(ServingMachine.on_probed, _B, _N, _W, _E),
    (_P, ProbeReturned): _row(ServingMachine.on_probed, _P, _G, _N, _W, _E),
    **{(phase, PassFailed): _row(ServingMachine.on_pass_failed, phase, _N, _W, _E) for phase in (_B, _P)},
    (_G, PassFailed): _row(ServingMachine.on_pass_failed, _G),
    (_G, TextChecked): _row(ServingMachine.on_checked, _G, _N, _W),
    **{(phase, StageFailed): _row(ServingMachine.on_stage_failed, phase, _N, _W, _E) for phase in (*_ROUND, _G)},
    **{(phase, LinkBroken): _row(ServingMachine.on_link_broken, phase, _N, _W) for phase in (*_ROUND, _G)},
    **{(phase, MemberLost): _row(ServingMachine.on_member_lost, phase, _N, _W, _E) for phase in (*_ROUND, _G)},
    (_W, MemberLost): _row(ServingMachine.on_member_lost, _W, _E),
    **{(phase, MemberLeaving): _row(ServingMachine.on_leaving, phase) for phase in (*_ROUND, _W)},
    (_G, MemberLeaving): _row(ServingMachine.on_leaving, _G, _N),
    **{(phase, PlanGiven): _row(ServingMachine.on_plan, phase) for phase in _ROUND},
    (_G, PlanGiven): _row(ServingMachine.on_plan, _G, _N),
    (_W, PlanGiven): _row(ServingMachine.on_plan, _N, _W),
    **{(phase, Tick): _row(ServingMachine.on_tick, phase, _N, _W, _E) for phase in _ROUND},
    (_G, Tick): _row(ServingMachine.on_tick, _G, _N),
    **{(phase, StopAsked): _row(ServingMachine.on_stop, _E) for phase in _ALIVE},
    **{(phase, CommandFailed): _row(ServingMachine.on_command_failed, _E) for phase in _ALIVE},
}
"""(phase, event) -> transition. What is not here comes too late to matter and changes nothing."""
