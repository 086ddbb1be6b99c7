"""Follows the faults of a training job: what failed, what replaced it, how long that took.

`FaultReport` builds the episodes from the job's events, for terminal and report. `FaultRecords` appends them to a file
in the job's directory and to the job's history at the broker."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Final, Literal

import msgspec

from fusionai.primitives.clock import Clock
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.units import format_seconds
from fusionai.scheduling.problem.types import PeerProfile, Plan
from fusionai.storage.rundir import RunDirectory
from fusionai.training import progress

Kind = Literal["peer", "standby", "link", "stage", "faulty", "broker"]


@dataclass(slots=True)
class Episode:
    """One fault, from its first sign to its end. `step`: the step under way, counted from 1."""

    kind: Kind
    step: int
    seen_s: float
    reason: str
    peer: str = ""
    """Empty for the broker."""
    stages: tuple[int, ...] = ()
    """Stages that the peer ran; for a lost standby, the stages that it was standby of."""
    killed: bool = False
    """Whether the demo killed it on purpose."""
    takeover: dict[int, str] = field(default_factory=dict)
    """Maps each stage to the peer that has it afterwards."""
    exact: bool | None = None
    """Whether the fingerprints promise the same bits; None if no peer took over."""
    base: int | None = None
    """Number of steps in the state from which the stage continues; None if no state was lost."""
    replays: int = 0
    """Committed steps that are recomputed from there."""
    rollback: bool = False
    """Whether all stages went back to a checkpoint."""
    from_standby: bool = False
    """Whether the peer that took over had snapshots of the stage."""
    recut: tuple[str, ...] = ()
    """The peers over which the model was cut anew, if it was."""
    tolerance: float | None = None
    """Largest relative difference of losses from then on; None if the bits stay the same."""
    over_s: float | None = None
    """Time at which the job had recovered, None before."""
    recovered_s: float | None = None
    """Seconds from the first sign to the next commit, or to the broker's answer; None if no stage was interrupted."""
    waited_s: float = 0.0
    """Seconds without a plan."""
    committed: int | None = None
    """The step of that commit, counted from 1."""
    is_written: bool = False
    """Whether it is in the job's file."""


@dataclass
class FaultReport:
    """Collects faults from all events of a run. `episodes`: the faults so far, oldest first."""

    episodes: list[Episode] = field(default_factory=list[Episode])
    _plan: Plan | None = None
    _names: dict[str, str] = field(default_factory=dict[str, str])
    _killed: set[str] = field(default_factory=set[str])
    _waiting: str = ""
    """What the job waits for."""
    _step: int = 0

    def begin(self, plan: Plan, members: Sequence[PeerProfile]) -> None:
        """Set the first plan and the names of its peers."""
        self._plan = plan
        self._names |= {member.peer: member.name for member in members if member.name}

    def know(self, names: Mapping[str, str]) -> None:
        """Add names of peers."""
        self._names |= names

    def kill(self, peer: str) -> None:
        """Mark the next loss of this peer as a deliberate kill."""
        self._killed.add(peer)

    def kill_broker(self, now_s: float) -> None:
        """Add a deliberate kill of the broker, which counts as a fault even if the job does not notice it."""
        self.episodes.append(Episode("broker", self._step + 1, now_s, "", killed=True))

    def broker_answers(self, now_s: float) -> float | None:
        """Mark the broker as back and return how long it was away, in seconds; None if it was not known to be away."""
        for episode in self.episodes:
            if episode.kind == "broker" and episode.over_s is None:
                episode.over_s, episode.recovered_s = now_s, now_s - episode.seen_s
                return episode.recovered_s
        return None

    def name(self, peer: str) -> str:
        return self._names.get(peer) or short(PeerId(peer))

    def see(self, event: progress.Progress, now_s: float) -> tuple[str, ...]:
        """Record an event and return the lines to print for it, often none."""
        match event:
            case progress.StepDone():
                self._step = max(self._step, event.record.step + 1)
                if self._waiting and not event.replayed:
                    self._waiting = ""
                return ()
            case progress.FaultSeen():
                return self._fault(event, now_s)
            case progress.JobWaiting(reason=reason):
                return self._wait(reason)
            case progress.PlanChanged():
                self._plan_changed(event)
                return ()
            case progress.Restored():
                self._restored(event)
                return ()
            case progress.Recovered():
                return self._recovered(event, now_s)
            case progress.BrokerAway(reason=reason):
                why = reason.rstrip(".")
                if not any(episode.kind == "broker" and episode.over_s is None for episode in self.episodes):
                    self.episodes.append(Episode("broker", self._step + 1, now_s, why))
                return (f"step {self._step + 1}: the broker can't be reached ({why}); the job continues without it",)
            case progress.BrokerBack():
                away_s = self.broker_answers(now_s)
                return ("the broker is back" + ("" if away_s is None else f" after {format_seconds(away_s)}"),)
            case _:
                return ()

    def open(self) -> list[Episode]:
        """Return the faults from which the job has not recovered yet, without those of the broker, oldest first."""
        return [episode for episode in self.episodes if episode.over_s is None and episode.kind != "broker"]

    def _fault(self, event: progress.FaultSeen, now_s: float) -> tuple[str, ...]:
        for episode in self.open():
            # A broken link is often the first sign of a lost peer. The two count as one fault.
            if episode.peer == event.peer and event.kind == "peer" and episode.kind == "link":
                episode.kind, episode.reason = "peer", _bare(event)
                episode.killed = self._take_killed(event.peer)
                return (f"step {episode.step}: {self._what(episode)}",)
            if episode.peer == event.peer and event.kind == episode.kind == "link":
                return ()
        from_standby = () if self._plan is None else tuple(g.stage for g in self._plan.standbys if g.peer == event.peer)
        episode = Episode(
            event.kind,
            event.step + 1,
            now_s,
            _bare(event),
            event.peer,
            from_standby if event.kind == "standby" else event.stages,
            killed=event.kind != "link" and self._take_killed(event.peer),
        )
        self.episodes.append(episode)
        if event.kind == "standby" or (event.kind == "faulty" and not event.stages):
            episode.over_s = now_s
            return (f"step {episode.step}: {self._what(episode)}; the job continues",)
        return (f"step {episode.step}: {self._what(episode)}",)

    def _take_killed(self, peer: str) -> bool:
        killed = peer in self._killed
        self._killed.discard(peer)
        return killed

    def _wait(self, reason: str) -> tuple[str, ...]:
        if reason == self._waiting:
            return ()
        before, self._waiting = self._waiting, reason
        left = _LEFT.search(reason)
        if (news := waiting_news(before, reason)) != reason:
            return (f"step {self._step + 1}: {news}",)
        what = reason.rstrip(".")
        what = f" for {what.removeprefix('waiting for ')}" if what.startswith("waiting for ") else f": {what}"
        if reason.startswith("the broker"):
            remedy = "It continues by itself when the broker is back"
        elif left is not None:
            remedy = "If such a machine joins before that, the job continues unchanged (`fusion invite` invites one)"
        else:
            remedy = "It continues by itself when one joins (`fusion invite` invites one)"
        return (f"step {self._step + 1}: the job waits{what}. {remedy}; Ctrl-C stops it cleanly",)

    def _plan_changed(self, event: progress.PlanChanged) -> None:
        former, self._plan = self._plan, event.plan
        places = {stage.stage: stage for stage in event.plan.stages}
        before = {} if former is None else {stage.stage: stage for stage in former.stages}
        standbys = set() if former is None else {(standby.stage, standby.peer) for standby in former.standbys}
        known = () if former is None else former.tolerant_takeovers
        newest = event.plan.tolerant_takeovers[-1:]
        tolerance = newest[0].tolerance if newest and newest != known[-1:] else None
        recut = former is not None and former.ranges != event.plan.ranges
        for episode in self.open():
            episode.tolerance = tolerance
            if recut and episode.stages:
                peers = dict.fromkeys(stage.peer for stage in event.plan.stages if stage.peer != event.plan.feed)
                episode.recut, episode.exact = tuple(peers), tolerance is None
                episode.takeover = {stage.stage: stage.peer for stage in event.plan.stages if stage.peer in peers}
                continue
            for stage in episode.stages:
                if stage in places and (places[stage].peer != episode.peer or self._waiting):
                    episode.takeover[stage] = places[stage].peer
                    episode.from_standby = (stage, places[stage].peer) in standbys
                    same = stage in before and bool(places[stage].fingerprint)
                    same = same and places[stage].fingerprint == before[stage].fingerprint
                    episode.exact = same and episode.exact is not False

    def _restored(self, event: progress.Restored) -> None:
        for episode in self.open():
            episode.rollback = event.rollback
            if event.rollback or any(stage in event.stages for stage in episode.stages):
                episode.base, episode.replays = event.base, event.committed - event.base

    def _recovered(self, event: progress.Recovered, now_s: float) -> tuple[str, ...]:
        lines: list[str] = []
        self._waiting = ""
        for episode in self.open():
            episode.over_s = now_s
            # The driver measures from the first of several faults; here each has its own time.
            episode.recovered_s = min(event.seconds, now_s - episode.seen_s) if episode.seen_s <= now_s else 0.0
            episode.committed = event.step + 1
            lines.append(f"step {episode.step}: {self.sentence(episode)}")
        return tuple(lines)

    # ------------------------------------------------------------------------------------------------------ words

    def sentence(self, episode: Episode) -> str:
        """Return the fault in one line, as far as it is known."""
        parts = [self._what(episode)]
        if outcome := self.outcome(episode):
            parts.append(outcome)
        if episode.recovered_s is not None and episode.committed is not None:
            parts.append(f"recovered after {format_seconds(episode.recovered_s)} (step {episode.committed} committed)")
        return "; ".join(parts)

    def outcome(self, episode: Episode) -> str:
        """Return which peer continued and from which state; empty if it is not known yet."""
        if episode.kind == "broker":
            return "the job continued without it" + ("" if episode.over_s is None else "; it is back")
        if episode.kind == "standby" or (episode.kind == "faulty" and not episode.stages):
            return "the job continued; no stage was interrupted"
        origin = self._origin(episode)
        takers = list(dict.fromkeys(episode.takeover.values()))
        within = "" if not episode.tolerance else f", losses within {episode.tolerance:g}"
        exactness = {True: "", False: f" (other numerics: tolerant, not bit-exact{within})", None: ""}[episode.exact]
        if episode.recut:
            who = " and ".join(self.name(peer) for peer in episode.recut)
            return f"the model is cut anew over {who} {origin}".rstrip() + exactness
        if not takers:
            if episode.base is None:
                return "every stage kept its state" if episode.committed is not None else ""
            return f"its stage continues {origin}"
        kept = {peer: [stage for stage, taker in episode.takeover.items() if taker == peer] for peer in takers}
        who = [
            f"{self.name(peer)} {'is back and continues' if peer == episode.peer else 'takes over'}"
            + (f" {stages_in_words(kept[peer])}" if len(takers) > 1 else "")
            for peer in takers
        ]
        return f"{' and '.join(who)} {origin}".rstrip() + exactness

    def _origin(self, episode: Episode) -> str:
        if episode.base is None:
            return ""
        if episode.rollback:
            origin = f"with all stages from the checkpoint of step {episode.base}"
            origin = origin if episode.base else "with all stages from the beginning"
        else:
            origin = f"from {'its snapshot' if episode.from_standby else 'a stored state'} of step {episode.base}"
        if not episode.replays:
            return origin
        return f"{origin}, with {episode.replays} {'step' if episode.replays == 1 else 'steps'} recomputed"

    def _what(self, episode: Episode) -> str:
        name, stages = self.name(episode.peer) if episode.peer else "", stages_in_words(episode.stages)
        reason = episode.reason.rstrip(".")
        match episode.kind:
            case "peer" if episode.killed:
                return f"{name} was killed ({stages})"
            case "peer":
                return f"{name} is lost ({stages}): {reason}"
            case "standby":
                how = "was killed" if episode.killed else f"is lost: {reason}"
                return f"{name}, warm standby of {stages}, {how}" if stages else f"{name}, a spare, {how}"
            case "link":
                return f"the connection to {name} broke ({stages}): {reason}"
            case "stage":
                return f"{stages} failed on {name}: {reason}"
            case "faulty":
                where = f"{stages} on {name}" if stages else f"{name}, a spare,"
                return f"{where} gave wrong results and gets no more work from this job: {reason}"
            case "broker":
                return "the broker was killed" if episode.killed else "the broker was away"


_LEFT: Final = re.compile(r"; [^;]* in \d+ s$")
"""Matches the end of a waiting reason that says what follows if no machine comes, and in how many seconds."""


def waiting_news(before: str, reason: str) -> str:
    """Return what `reason` adds to `before`: only the remaining time if the two differ in the count-down alone."""
    left = _LEFT.search(reason)
    known = left is not None and bool(before) and _LEFT.sub("", reason) == _LEFT.sub("", before)
    return left[0].removeprefix("; ") if left is not None and known else reason


def _bare(event: progress.FaultSeen) -> str:
    """Return the event's reason without the prefix that the printed line repeats."""
    return event.reason.removeprefix(f"peer {short(PeerId(event.peer))} was lost: ")


def stages_in_words(stages: Sequence[int]) -> str:
    if not stages:
        return ""
    return f"{'stage' if len(stages) == 1 else 'stages'} {', '.join(str(stage) for stage in sorted(stages))}"


class FaultRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. `step`: the step under way, counted from 1. `peer` and `stages` are empty for the broker's faults."""

    kind: Kind
    step: int
    stages: tuple[int, ...]
    peer: str
    name: str
    reason: str
    at_s: float
    """Time of detection, in seconds since 1970."""
    detected_s: float
    """Time of detection, in seconds since the start of the run."""
    recovered_s: float | None = None
    """Seconds from detection to the next committed step; None if no stage was interrupted or no step followed."""
    waited_s: float = 0.0
    """Seconds of these spent waiting for a machine or for the broker."""
    takeover: dict[int, str] = {}
    """Maps each stage to the peer that has it afterwards."""
    numerics: Literal["exact", "tolerant"] | None = None
    """Whether these peers compute the same bits; None if no peer took over."""
    tolerance: float | None = None
    """Largest relative difference of losses from then on; None if the bits stay the same."""
    recut: bool = False
    """Whether the model was cut anew, over the machines in `takeover`."""
    base: int | None = None
    """Number of steps in the state from which the job continued; None if no state was lost."""
    rollback: bool = False
    """Whether all stages went back to a checkpoint."""
    committed: int | None = None
    """First step committed afterwards, counted from 1."""


@dataclass
class FaultRecords:
    """Records faults from a job's events. `names`: names of the peers, which may grow. `say` receives each line; `warn`
    receives, once, why the file can't be written."""

    directory: RunDirectory
    plan: InitVar[Plan]
    names: Mapping[str, str]
    clock: Clock
    _: KW_ONLY
    say: Callable[[str], None]
    warn: Callable[[str], None]
    _report: FaultReport = field(default_factory=FaultReport)
    _waiting_since_s: float | None = None
    _warned: bool = False

    def __post_init__(self, plan: Plan) -> None:
        self._report.begin(plan, ())
        self._began_s = self.clock.now_s()

    def see(self, event: progress.Progress) -> None:
        now_s = self.clock.now_s()
        self._report.know(self.names)
        match event:
            case progress.JobWaiting():
                self._waiting_since_s = self._waiting_since_s or now_s
            case progress.PlanChanged():
                self._count_waiting(now_s)
            case _:
                pass
        for line in self._report.see(event, now_s):
            self.say(line)
        for episode in self._report.episodes:
            if episode.over_s is not None and not episode.is_written:
                self._write(episode)

    def close(self) -> tuple[FaultRecord, ...]:
        """Write the faults that are not over, and return the records of all."""
        self._count_waiting(self.clock.now_s())
        for episode in self._report.episodes:
            if not episode.is_written:
                self._write(episode)
        return tuple(self._record(episode) for episode in self._report.episodes)

    def _count_waiting(self, now_s: float) -> None:
        if self._waiting_since_s is None:
            return
        waited_s, self._waiting_since_s = now_s - self._waiting_since_s, None
        for episode in self._report.open():
            episode.waited_s += waited_s

    def _record(self, episode: Episode) -> FaultRecord:
        same = ("kind", "step", "stages", "peer", "reason", "recovered_s", "waited_s", "tolerance")
        ago_s = self.clock.now_s() - episode.seen_s
        return FaultRecord(
            **{name: getattr(episode, name) for name in (*same, "base", "rollback", "committed")},
            name=self._report.name(episode.peer) if episode.peer else "broker",
            at_s=self.clock.wall_s() - ago_s,
            detected_s=episode.seen_s - self._began_s,
            takeover=dict(episode.takeover),
            numerics=None if episode.exact is None else ("exact" if episode.exact else "tolerant"),
            recut=bool(episode.recut),
        )

    def _write(self, episode: Episode) -> None:
        episode.is_written = True
        try:
            with self.directory.faults.open("ab") as file:
                file.write(msgspec.json.encode(self._record(episode)) + b"\n")
        except OSError as error:
            if not self._warned:
                self._warned = True
                self.warn(f"{self.directory.faults} can't be written ({error.strerror or error})")
