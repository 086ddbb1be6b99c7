"""The machine of a serving job: rounds of enlisting, loading, rebuilding and probing; takeovers, plans, drains.

The machine decides which peer runs a stage and which is its standby, when passes may go, how a stage that lost its
cache gets it back, and when another plan is needed. Sessions, pages and passes are the batcher's subject. The serving
driver performs the commands; the tests' virtual world does the same.

Any fault that touches a stage ends the round. Then every session goes on from its last emitted token, and an emitted
token never changes. Each subject is a part of its own: `rounds` up to running passes, `standbys` with plans and leaving
members, `takeovers` after faults and delays. They share the state in `state`; this module has the interface and the
table.

Neighbours: `interface` has events, commands and roles, `batching` and `pages` for sessions, `checks` for spot
checks, `stage_times` for how long stages take.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from fusionai.coordination.machine import Table, Transition, in_each
from fusionai.coordination.round.interface import (
    CommandFailed,
    DriverEvent,
    EndJob,
    LinkBroken,
    MemberEnlisted,
    PeerLost,
    StageFailure,
    StopAsked,
)
from fusionai.coordination.serving import interface
from fusionai.coordination.serving.interface import ServingCommand
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

    def __post_init__(self) -> None:
        ServingJobState.__post_init__(self)
        self.rounds = Rounds(self)
        self.standbys = Standbys(self, self.rounds)
        self.takeovers = Takeovers(self, self.rounds, self.standbys)

    def start(self) -> list[ServingCommand]:
        return self.rounds.begin("")

    def handle(self, event: DriverEvent) -> list[ServingCommand]:
        """Apply one event. An event of another round, or without a row for the present phase, changes nothing."""
        if not self._is_of_this_round(event) or (self.phase, type(event)) not in TABLE:
            return []
        if not isinstance(event, (interface.Tick, interface.StageWorking, interface.LoadProgressed)):
            self.patience.progressed(None)
        commands = self.react(TABLE, event) or []
        return commands if self.phase is ServingPhase.ENDED else [*commands, *self.standbys.dismiss_idle()]

    def brief(self, event: object) -> str:
        return "" if isinstance(event, interface.Tick) else repr(event)

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
            self.faults.clear()
        return counted

    def next_checks(self) -> tuple[interface.BeginCheck, ...]:
        """Return the checks to start now. Call it after every event, as with passes."""
        checks = self.checks
        if checks is None or not self.is_running:
            return ()
        due = checks.due(self.batcher, self.roles.places, self.checkable)
        text = checks.reading
        if text is None:
            return ()
        return tuple(interface.BeginCheck(one, text, self.roster.fence_of(one.verifier, self.fence)) for one in due)

    @property
    def checkable(self) -> dict[int, str]:
        """Stages whose standbys could recompute a text now: the stage's inputs are retained before it, and its outputs
        go to another stage."""
        if not self.retain:
            return {}
        return {
            stage: standby
            for stage, standby in self.roles.checkers(self.roles.standbys).items()
            if (stage, standby) in self.roster.warm and stage in self.roles.checkable
        }

    def on_stop(self, event: StopAsked) -> list[ServingCommand]:
        self.phase = ServingPhase.ENDED
        self.batcher.rewind()
        return [interface.ReportState("stopped", event.reason), EndJob(stopped=event.reason)]

    def on_command_failed(self, event: CommandFailed) -> list[ServingCommand]:
        return self.fail(event.reason)

    def _is_of_this_round(self, event: DriverEvent) -> bool:
        match event:
            case (
                MemberEnlisted()
                | interface.LoadProgressed()
                | interface.StandbyLoaded()
                | StageFailure()
                | interface.StageWorking()
            ):
                fence = self.roster.fence_of(event.peer, self.fence)
                return event.fence == fence and event.peer in self.participants
            case _:
                return self.counts(event, self.fence)


_N, _L, _B, _P, _G, _W, _E = ServingPhase  # enlisting, loading, rebuilding, ..., ended: in the order of definition
_ROUND: Final = (_N, _L, _B, _P)

TABLE: Final[Table[ServingMachine, list[ServingCommand]]] = Table(
    "serving",
    (
        Transition((_N,), MemberEnlisted, (_N, _L), lambda m, event: m.rounds.on_enlisted(event)),
        *in_each((_L, _B, _P), MemberEnlisted, (), lambda m, event: m.rounds.on_standby_enlisted(event)),
        Transition((_G,), MemberEnlisted, (_G, _N), lambda m, event: m.standbys.on_enlisted(event)),
        Transition((_N,), interface.StageLoaded, (_N,), lambda m, event: m.rounds.on_loaded(event)),
        Transition((_L,), interface.StageLoaded, (_L,), lambda m, event: m.rounds.on_loaded(event)),
        Transition((_L,), AllLoaded, (_B, _P, _G), lambda m, event: m.rounds.on_all_loaded(event)),
        *in_each((_N, _L, _G), interface.LoadProgressed, (), lambda m, event: m.takeovers.on_load_progressed(event)),
        Transition((_B,), interface.CacheRebuilt, (_B, _P, _G), lambda m, event: m.rounds.on_rebuilt(event)),
        Transition((_B,), interface.ProbeReturned, (_B, _E), lambda m, event: m.rounds.on_probed(event)),
        Transition((_P,), interface.ProbeReturned, (_P, _G, _E), lambda m, event: m.rounds.on_probed(event)),
        Transition((_B, _P), ProbeRefused, (_N, _W, _E), lambda m, event: m.takeovers.on_probe_refused(event)),
        Transition((_G,), PassesResumed, (_G, _N), lambda m, event: m.standbys.on_passes_resumed(event)),
        Transition((_G,), interface.StandbyLoaded, (_G, _N), lambda m, event: m.standbys.on_loaded(event)),
        *in_each((*_ROUND, _G), interface.StageWorking, (_N, _W, _E), lambda m, event: m.takeovers.on_working(event)),
        *in_each((_B, _P), interface.PassFailure, (_N, _W, _E), lambda m, event: m.takeovers.on_pass_failed(event)),
        Transition((_G,), interface.PassFailure, (_G,), lambda m, event: m.takeovers.on_pass_failed(event)),
        Transition((_G,), interface.TextChecked, (_G, _N, _W), lambda m, event: m.takeovers.on_checked(event)),
        *in_each((*_ROUND, _G), StageFailure, (_N, _W, _E), lambda m, event: m.takeovers.on_stage_failed(event)),
        *in_each((*_ROUND, _G), LinkBroken, (_N, _W), lambda m, event: m.takeovers.on_link_broken(event)),
        *in_each((*_ROUND, _G), PeerLost, (_N, _W, _E), lambda m, event: m.takeovers.on_peer_lost(event)),
        Transition((_W,), PeerLost, (_W, _E), lambda m, event: m.takeovers.on_peer_lost(event)),
        *in_each((*_ROUND, _W), interface.MemberLeaving, (), lambda m, event: m.standbys.on_leaving(event)),
        Transition((_G,), interface.MemberLeaving, (_G, _N), lambda m, event: m.standbys.on_leaving(event)),
        *in_each(_ROUND, interface.PlanGiven, (), lambda m, event: m.standbys.on_plan(event)),
        Transition((_G,), interface.PlanGiven, (_G, _N), lambda m, event: m.standbys.on_plan(event)),
        Transition((_W,), interface.PlanGiven, (_N, _W), lambda m, event: m.standbys.on_plan(event)),
        *in_each(
            (*_ROUND, _G), interface.WeightsReplaced, (_N,), lambda m, event: m.standbys.on_weights_replaced(event)
        ),
        *in_each(_ROUND, interface.Tick, (_N, _W, _E), lambda m, event: m.takeovers.on_tick(event)),
        Transition((_G,), interface.Tick, (_G, _N), lambda m, event: m.takeovers.on_tick(event)),
        Transition((*_ROUND, _G, _W), StopAsked, (_E,), ServingMachine.on_stop),
        Transition((*_ROUND, _G, _W), CommandFailed, (_E,), ServingMachine.on_command_failed),
    ),
    initial=(_N,),
    final=(_E,),
)
"""(phase, event) -> transition. An event without a row comes too late to matter and changes nothing."""
