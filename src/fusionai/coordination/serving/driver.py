"""The machine of a serving job: rounds of enlisting, loading, rebuilding and probing; takeovers, plans, drains.

The machine decides which peer runs a stage and which is its standby, when passes may go, how a stage that lost its
cache gets it back, and when another plan is needed. Sessions, pages and passes are the batcher's subject. The serving
driver performs the commands; the tests' virtual world does the same.

Any fault that touches a stage ends the round. Then every session goes on from its last emitted token, and an emitted
token never changes. Each subject is a part of its own: `rounds` up to running passes, `standbys` with plans and leaving
members, `takeovers` after faults, `lateness` of whatever makes no progress. They share the state in `state`; this
module has the interface and the table.

Neighbours: `events` and `commands`, `roles` of a plan version, `batching` and `pages` for sessions, `checks` for spot
checks, `stage_times` for how long stages take.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from fusionai.coordination.machine import Table, Transition
from fusionai.coordination.serving.commands import BeginCheck, EndJob, ReportState, ServingCommand
from fusionai.coordination.serving.events import (
    CacheRebuilt,
    CommandFailed,
    LinkBroken,
    LoadProgressed,
    MemberEnlisted,
    MemberLeaving,
    PassFailed,
    PeerLost,
    PlanGiven,
    ProbeReturned,
    ServingEvent,
    StageFailed,
    StageLoaded,
    StageWorking,
    StandbyLoaded,
    StopAsked,
    TextChecked,
    Tick,
)
from fusionai.coordination.serving.lateness import Lateness
from fusionai.coordination.serving.rounds import AllLoaded, PassesResumed, ProbeRefused, Rounds
from fusionai.coordination.serving.sessions import PassPlan
from fusionai.coordination.serving.standbys import Standbys
from fusionai.coordination.serving.state import ServingJobState, ServingPhase
from fusionai.coordination.serving.takeovers import Takeovers
from fusionai.wire.base import Fence


@dataclass(slots=True)
class ServingMachine(ServingJobState):
    """`start` returns the first commands; `handle` takes an event and returns commands. Passes go through `next_pass`
    and `returned`."""

    rounds: Rounds = field(init=False)
    standbys: Standbys = field(init=False)
    takeovers: Takeovers = field(init=False)
    lateness: Lateness = field(init=False)

    def __post_init__(self) -> None:
        ServingJobState.__post_init__(self)
        self.rounds = Rounds(self)
        self.standbys = Standbys(self, self.rounds)
        self.takeovers = Takeovers(self, self.rounds, self.standbys)
        self.lateness = Lateness(self, self.rounds, self.takeovers)

    def start(self) -> list[ServingCommand]:
        return self.rounds.begin("")

    def handle(self, event: ServingEvent) -> list[ServingCommand]:
        """Apply one event. An event of another round, or without a row for the present phase, changes nothing."""
        if not self._is_of_this_round(event) or (self.phase, type(event)) not in TABLE:
            return []
        if not isinstance(event, (Tick, StageWorking, LoadProgressed)):
            self.patience.progressed(None)
        commands = self.react(TABLE, event) or []
        return commands if self.phase is ServingPhase.ENDED else [*commands, *self.standbys.dismiss_idle()]

    def brief(self, event: object) -> str:
        return "" if isinstance(event, Tick) else repr(event)

    def next_pass(self, now_s: float) -> PassPlan | None:
        if not self.is_running:
            return None
        if not self.batcher.under_way:
            self.patience.progressed(now_s)
        return self.batcher.next_pass(now_s)

    def measured(self, fence: Fence, number: int, stage: int, seconds: float) -> None:
        """Record the time that a stage took for this pass or probe. Call it before `returned`."""
        work = self.rounds.work_of(number) if fence == self.fence else None
        if work is not None:
            self.patience.times.measured(stage, work, seconds)

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
        self.patience.progressed(now_s)
        if counted:
            self.patience.stalls = 0
            self.batcher.pieces.recover()
            self.takeovers.passes_flow()
        return counted

    def next_checks(self) -> tuple[BeginCheck, ...]:
        """Return the checks to start now. Call it after every event, as with passes."""
        checks = self.checks
        if checks is None or not self.is_running:
            return ()
        due = checks.due(self.batcher, self.roles.places, self.checkable)
        text = checks.reading
        if not due or text is None:
            return ()
        return tuple(BeginCheck(one, text, self.roster.fence_of(one.verifier, self.fence)) for one in due)

    @property
    def checkable(self) -> dict[int, str]:
        """Stages whose standbys could recompute a text now: the stage's inputs are retained before it, and its outputs
        go to another stage."""
        if not self.retain:
            return {}
        return {
            stage: standby
            for stage, standby in self.roles.standbys.items()
            if self.roster.is_warm(stage, standby) and stage in self.roles.checkable
        }

    @property
    def lost(self) -> frozenset[str]:
        """Lost peers. A later plan must not contain them."""
        return frozenset(self.lost_peers)

    def on_stop(self, event: StopAsked) -> list[ServingCommand]:
        self.phase = ServingPhase.ENDED
        self.batcher.rewind()
        return [ReportState("stopped", event.reason), EndJob(stopped=event.reason)]

    def on_command_failed(self, event: CommandFailed) -> list[ServingCommand]:
        return self.fail(event.reason)

    def _is_of_this_round(self, event: ServingEvent) -> bool:
        match event:
            case (
                MemberEnlisted(fence, peer)
                | LoadProgressed(fence, peer)
                | StandbyLoaded(fence, peer)
                | StageFailed(fence, peer)
                | StageWorking(fence, peer)
            ):
                return fence == self.roster.fence_of(peer, self.fence) and peer in self.participants
            case StageLoaded() | CacheRebuilt() | ProbeReturned() | PassFailed() | TextChecked() | LinkBroken():
                return event.fence == self.fence
            case PeerLost() | MemberLeaving() | PlanGiven() | StopAsked() | CommandFailed() | Tick():
                return True


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

TABLE: Final[Table[ServingMachine, list[ServingCommand]]] = Table(
    "serving",
    (
        Transition((_N,), MemberEnlisted, (_N, _L), lambda m, event: m.rounds.on_enlisted(event)),
        *(
            Transition((phase,), MemberEnlisted, (phase,), lambda m, event: m.rounds.on_standby_enlisted(event))
            for phase in (_L, _B, _P)
        ),
        Transition((_G,), MemberEnlisted, (_G, _N), lambda m, event: m.standbys.on_enlisted(event)),
        Transition((_N,), StageLoaded, (_N,), lambda m, event: m.rounds.on_loaded(event)),
        Transition((_L,), StageLoaded, (_L,), lambda m, event: m.rounds.on_loaded(event)),
        Transition((_L,), AllLoaded, (_B, _P, _G), lambda m, event: m.rounds.on_all_loaded(event)),
        *(
            Transition((phase,), LoadProgressed, (phase,), lambda m, event: m.lateness.on_load_progressed(event))
            for phase in (_N, _L, _G)
        ),
        Transition((_B,), CacheRebuilt, (_B, _P, _G), lambda m, event: m.rounds.on_rebuilt(event)),
        Transition((_B,), ProbeReturned, (_B, _E), lambda m, event: m.rounds.on_probed(event)),
        Transition((_P,), ProbeReturned, (_P, _G, _E), lambda m, event: m.rounds.on_probed(event)),
        *(
            Transition((phase,), ProbeRefused, (_N, _W, _E), lambda m, event: m.takeovers.on_probe_refused(event))
            for phase in (_B, _P)
        ),
        Transition((_G,), PassesResumed, (_G, _N), lambda m, event: m.standbys.on_passes_resumed(event)),
        Transition((_G,), StandbyLoaded, (_G, _N), lambda m, event: m.standbys.on_loaded(event)),
        *(
            Transition((phase,), StageWorking, (phase, _N, _W, _E), lambda m, event: m.lateness.on_working(event))
            for phase in (*_ROUND, _G)
        ),
        *(
            Transition((phase,), PassFailed, (phase, _N, _W, _E), lambda m, event: m.takeovers.on_pass_failed(event))
            for phase in (_B, _P)
        ),
        Transition((_G,), PassFailed, (_G,), lambda m, event: m.takeovers.on_pass_failed(event)),
        Transition((_G,), TextChecked, (_G, _N, _W), lambda m, event: m.takeovers.on_checked(event)),
        *(
            Transition((phase,), StageFailed, (phase, _N, _W, _E), lambda m, event: m.takeovers.on_stage_failed(event))
            for phase in (*_ROUND, _G)
        ),
        *(
            Transition((phase,), LinkBroken, (phase, _N, _W), lambda m, event: m.takeovers.on_link_broken(event))
            for phase in (*_ROUND, _G)
        ),
        *(
            Transition((phase,), PeerLost, (phase, _N, _W, _E), lambda m, event: m.takeovers.on_peer_lost(event))
            for phase in (*_ROUND, _G)
        ),
        Transition((_W,), PeerLost, (_W, _E), lambda m, event: m.takeovers.on_peer_lost(event)),
        *(
            Transition((phase,), MemberLeaving, (phase,), lambda m, event: m.standbys.on_leaving(event))
            for phase in (*_ROUND, _W)
        ),
        Transition((_G,), MemberLeaving, (_G, _N), lambda m, event: m.standbys.on_leaving(event)),
        *(Transition((phase,), PlanGiven, (phase,), lambda m, event: m.standbys.on_plan(event)) for phase in _ROUND),
        Transition((_G,), PlanGiven, (_G, _N), lambda m, event: m.standbys.on_plan(event)),
        Transition((_W,), PlanGiven, (_N, _W), lambda m, event: m.standbys.on_plan(event)),
        *(
            Transition((phase,), Tick, (phase, _N, _W, _E), lambda m, event: m.lateness.on_tick(event))
            for phase in _ROUND
        ),
        Transition((_G,), Tick, (_G, _N), lambda m, event: m.lateness.on_tick(event)),
        Transition((*_ROUND, _G, _W), StopAsked, (_E,), ServingMachine.on_stop),
        Transition((*_ROUND, _G, _W), CommandFailed, (_E,), ServingMachine.on_command_failed),
    ),
    initial=(_N,),
    final=(_E,),
)
"""(phase, event) -> transition. An event without a row comes too late to matter and changes nothing."""
