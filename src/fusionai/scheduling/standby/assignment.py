"""Assigns warm standbys to stages, and chooses how often these stages take snapshots: one interval K for the whole job.

A standby keeps the newest snapshots of its stage and takes the stage over when its peer is lost. All stages with state
get a standby, unless they run in the job owner's own process. First each spare takes one stage, and costly stages get
fast spares. The stages that are left go to spares with room. Neighbouring stages get different standbys if possible,
because two neighbours lost together need two stand-ins. Standbys on another machine come before another device of the
machine that runs the stage, since both may be lost together. Exact standbys (equal fingerprints) come before inexact
ones, which only `takeover = "tolerant"` allows. An existing standby stays, since it holds snapshots; only one on
another machine, or an exact one, replaces it. The result does not depend on the order in which spares are listed.

Memory of a spare: three snapshots of each stage it stands by for while one arrives, and two of each beside any one of
the stages running there. In serving a standby holds the weights instead, and has room for one stage's caches.

All stages take snapshots on the same steps, so K is one number. Three goals determine it:

- *cheap*: snapshots should cost at most 5 % more. On the link this is 5 % of what crosses the stage's cuts anyway
  (K >= 20 * state / boundary bytes per step) or 5 % of the time the link is idle; of the peer's time it is 5 % for
  copying and encrypting. `cheap` is the least K that satisfies all of these.
- *possible*: the same with 50 % instead of 5 %, so `possible` <= `cheap`. Both never need more of a link than it
  carries (K >= transfer time / step time, for a standby with all its stages together).
- *short replay*: when a peer is lost, its stand-in replays up to 2K - 1 steps of that stage's compute, without
  bubbles. `brief` is the largest K for which the replay stays under two seconds, at least 1.

K is `brief`, raised to `possible` if lower and reduced to `cheap` if higher (a larger K gains nothing). K is also at
most 64, and at most what the memory beside the stages allows: every stage retains what it sent in the last 2K + 1 steps
(docs/recovery.md). K affects only the speed of a run, never its results: while a snapshot takes longer than planned,
the feed is slowed down.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf
from typing import Final

import msgspec

from fusionai.primitives.units import format_bytes, format_seconds
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import Excluded, PeerProfile, Plan, Problem, StagePlacement, Standby
from fusionai.scheduling.training.prediction import reduced_bytes

MOST_STEPS: Final = 64
"""Largest interval K, in steps; chosen."""
EXTRA: Final = 0.05
"""Fraction of link and time that snapshots may use, unless a short replay needs more."""
HASTY_EXTRA: Final = 0.50
"""The same fraction if K must be small for a short replay."""
REPLAY_S: Final = 2.0
"""Longest replay to aim for, in seconds of compute; chosen."""
COPY_BYTES_PER_S: Final = 1e9
"""Speed of copying, encrypting and sending a state with one thread of an ordinary machine."""


class SnapshotInterval(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Interval of the snapshots. `every`: K in steps, 0 without standbys. `reason`: a sentence for the user."""

    every: int
    reason: str
    replay_s: float = 0.0
    """Predicted compute seconds of the longest replay, 2K - 1 steps."""


def snapshot_interval(plan: Plan, problem: Problem) -> SnapshotInterval:
    """Return K for the standbys in `plan.standbys`; costs are compared with `plan.step_time_s`."""
    if not plan.standbys:
        return SnapshotInterval(every=0, reason="no stage has a warm standby, so no snapshots are taken.")
    if plan.task == "serve":
        return SnapshotInterval(
            every=0, reason="weights don't change: a warm standby holds them, and caches are rebuilt."
        )
    costs = StageCosts(problem, plan)
    stages = {stage.stage: stage for stage in plan.stages}
    pairs = [(stages[standby.stage], standby.peer) for standby in plan.standbys]
    cheap, why_cheap = _least(plan, costs, pairs, EXTRA)
    possible, why_possible = _least(plan, costs, pairs, HASTY_EXTRA)
    compute_s = max(plan.microbatches_of(stage) * costs.compute_s(stage, peer) for stage, peer in pairs)
    brief = max(1, floor((REPLAY_S / compute_s + 1) / 2)) if compute_s > 0 else MOST_STEPS
    held, holder = _held(plan, costs)
    every = min(max(possible, min(brief, cheap)), MOST_STEPS, max(1, held))
    if every == held < max(possible, min(brief, cheap)):
        why = f"memory of {holder} holds no more steps for a replay"
    elif every == 1:
        why = "a snapshot costs little beside a step"
    elif every == possible > brief:
        why = why_possible
    elif every == cheap:
        why = why_cheap
    elif every == MOST_STEPS:
        why = f"never rarer than every {MOST_STEPS} steps"
    else:
        why = f"so that a replay takes at most {format_seconds(REPLAY_S)}"
    replay_s = (2 * every - 1) * compute_s
    steps = "step" if every == 1 else f"{every} steps"
    return SnapshotInterval(
        every=every,
        reason=f"a snapshot every {steps}: {why}; a lost peer's stand-in replays at most {format_seconds(replay_s)}.",
        replay_s=replay_s,
    )


def _least(plan: Plan, costs: StageCosts, pairs: list[tuple[StagePlacement, str]], extra: float) -> tuple[int, str]:
    """Return the least K at which snapshots cost at most the fraction `extra`, and a sentence that names the limit."""
    step_s = plan.step_time_s
    arriving_s: defaultdict[str, float] = defaultdict(float)
    worst, why = 1.0, ""
    for stage, standby in pairs:
        state = costs.snapshot_bytes(stage)
        transfer_s = costs.snapshot_s(stage, standby)
        if costs.hop(stage.peer, standby).shared:
            arriving_s[standby] += state / costs.profiles[standby].downlink.bandwidth_bytes_per_s
        boundary = _beside_bytes(plan, costs, stage, standby)
        idle_s = step_s - (boundary / costs.profiles[stage.peer].uplink.bandwidth_bytes_per_s if boundary > 0 else 0.0)
        by_idle = transfer_s / (extra * idle_s) if idle_s > 0 else inf
        by_traffic = state / (extra * boundary) if boundary > 0 else inf
        link = max(min(by_idle, by_traffic), transfer_s / step_s)
        if link > worst:
            worst = link
            why = f"stage {stage.stage} sends its {format_bytes(state)} over its link in {format_seconds(transfer_s)}"
        copying_s = state / COPY_BYTES_PER_S
        if copying_s / (extra * step_s) > worst:
            worst = copying_s / (extra * step_s)
            why = f"copying the {format_bytes(state)} of stage {stage.stage} takes {format_seconds(copying_s)}"
    # A standby receives nothing else, but all its stages send their snapshots at once.
    for standby, seconds in arriving_s.items():
        if seconds / step_s > worst:
            worst = seconds / step_s
            why = f"the snapshots for {costs.name(standby)} take {format_seconds(seconds)} over its link"
    # Rounding must not raise K by a step.
    return min(ceil(worst * (1 - 1e-9)), MOST_STEPS), why


def _beside_bytes(plan: Plan, costs: StageCosts, stage: StagePlacement, standby: str) -> float:
    """Return the bytes that `stage` sends per step over the link that also carries its snapshots."""
    if not costs.hop(stage.peer, standby).shared:
        return 0.0
    sent = 0.0
    for other in plan.stages:
        if plan.is_next(stage, other) and costs.hop(stage.peer, other.peer).shared:
            sent += costs.forward_bytes(stage) if other.stage > stage.stage else costs.gradient_bytes(stage)
    return plan.microbatches_of(stage) * sent


def _held(plan: Plan, costs: StageCosts) -> tuple[int, str]:
    """Return the largest K for which every peer has room for what it retains, and the peer that limits it. K is 0 if
    memory is too small even for K = 1."""
    free: dict[str, int] = {}
    sent: defaultdict[str, float] = defaultdict(float)
    for stage in plan.stages:
        free[stage.peer] = free.get(stage.peer, costs.memory_bytes(stage)) - stage.memory_bytes
        sent[stage.peer] += plan.microbatches_of(stage) * costs.sent_bytes(stage) + reduced_bytes(plan, costs, stage)
    least, holder = MOST_STEPS, ""
    for peer, room in free.items():
        if sent[peer] > 0 and floor((room / sent[peer] - 1) / 2) < least:
            least = floor((room / sent[peer] - 1) / 2)
            holder = costs.name(peer)
    return max(0, least), holder


def room_to_retain(plan: Plan, costs: StageCosts) -> str | None:
    """Return the peer whose memory is too small for work with snapshots even with K = 1, or None."""
    held, holder = _held(plan, costs)
    return None if held >= 1 else holder


KEPT: Final = 2
"""Whole snapshots a standby keeps of a stage."""
ARRIVING: Final = KEPT + 1
"""Snapshots of a stage that a standby holds while the next one arrives."""


@dataclass(frozen=True, slots=True)
class WithoutStandby:
    """A stage with state that has no standby, with the reason for every spare. Without spares `reasons` is empty."""

    stage: int
    reasons: tuple[Excluded, ...]


@dataclass(frozen=True, slots=True)
class StandbyAssignment:
    """`plan` with its standbys and K, the reasons for K, and the stages that are left without a standby."""

    plan: Plan
    interval: SnapshotInterval
    without_standby: tuple[WithoutStandby, ...]


def with_standbys(plan: Plan, problem: Problem) -> Plan:
    """`plan` with new `standbys` and `snapshot_every`; nothing else changes. Candidates are `plan.spares`; a spare
    without a profile in `problem.peers` is ignored."""
    return assign_standbys(plan, problem).plan


def assign_standbys(plan: Plan, problem: Problem) -> StandbyAssignment:
    """Like `with_standbys`, with the reasons."""
    costs = StageCosts(problem, plan)
    stages = [stage for stage in plan.stages if costs.needs_standby(plan, stage)]
    short = room_to_retain(plan, costs) if plan.task == "train" else None
    if short is not None:
        bare = msgspec.structs.replace(plan, standbys=(), snapshot_every=0)
        reason = f"the memory of {short} has no room to retain what a replay needs."
        reasons = (Excluded(peer=short, reason=reason),)
        without_standby = tuple(WithoutStandby(stage.stage, reasons) for stage in stages)
        return StandbyAssignment(bare, snapshot_interval(bare, problem), without_standby)
    placed = {stage.peer for stage in plan.stages} | {plan.feed}
    spares = [costs.profiles[peer] for peer in sorted(set(plan.spares) - placed) if peer in costs.profiles]
    watch = _Watch(plan, costs, stages, spares)
    standbys = watch.assigned()
    assigned = msgspec.structs.replace(plan, standbys=standbys)
    interval = snapshot_interval(assigned, problem)
    assigned = msgspec.structs.replace(assigned, snapshot_every=interval.every)
    without_standby = tuple(
        WithoutStandby(stage.stage, tuple(watch.refusals(stage)))
        for stage in stages
        if stage.stage not in {standby.stage for standby in standbys}
    )
    return StandbyAssignment(assigned, interval, without_standby)


def may_stand_by(plan: Plan, problem: Problem, stage: StagePlacement, peer: str) -> bool:
    """Return whether `peer`, if it stood by for `stage` only, has the numerics, the memory and the link for it."""
    costs = StageCosts(problem, plan)
    watch = _Watch(plan, costs, [stage], [costs.profiles[peer]])
    return watch.refusal(stage, peer, exact=problem.takeover == "exact") is None


def without_standbys(plan: Plan, lost: Iterable[str]) -> Plan:
    """`plan` without the standbys and spares among `lost`. The version stays: the broker need not grant a plan that
    only has fewer machines."""
    gone = frozenset(lost)
    standbys = tuple(standby for standby in plan.standbys if standby.peer not in gone)
    return msgspec.structs.replace(
        plan,
        standbys=standbys,
        spares=tuple(peer for peer in plan.spares if peer not in gone),
        snapshot_every=plan.snapshot_every if standbys else 0,
    )


class _Watch:
    """State of an assignment: the stages, the spares, and the standbys chosen so far."""

    def __init__(self, plan: Plan, costs: StageCosts, stages: list[StagePlacement], spares: list[PeerProfile]) -> None:
        self.plan = plan
        self.costs = costs
        # Costly stages choose first, so that they get the fast spares.
        self.stages = sorted(stages, key=lambda s: (-s.compute_s, -costs.state_bytes(s), s.stage))
        self.spares = {spare.peer: spare for spare in spares}
        self.standby_of: dict[int, Standby] = {}
        self.stages_of: defaultdict[str, list[StagePlacement]] = defaultdict(list)

    def assigned(self) -> tuple[Standby, ...]:
        """Assign all standbys; returns them in order of stages."""
        known = {stage.stage: stage for stage in self.stages}
        kept = [standby for standby in self.plan.standbys if standby.stage in known and standby.peer in self.spares]
        for beside in (False, True):
            for exact in (True, False):
                for standby in kept:
                    stage = known[standby.stage]
                    if stage.stage not in self.standby_of and self._is(standby, stage, exact=exact, beside=beside):
                        self._give(stage, standby.peer, exact=exact)
                if exact or self.costs.problem.takeover == "tolerant":
                    self._spread(exact=exact, beside=beside)
        return tuple(sorted(self.standby_of.values(), key=lambda standby: standby.stage))

    def refusals(self, stage: StagePlacement) -> list[Excluded]:
        return [
            Excluded(peer=peer, reason=reason)
            for peer in self.spares
            if (reason := self.refusal(stage, peer, exact=self.costs.problem.takeover == "exact"))
        ]

    def _is(self, standby: Standby, stage: StagePlacement, *, exact: bool, beside: bool) -> bool:
        return standby.exact == exact and self.costs.beside(stage, standby.peer) == beside

    def _spread(self, *, exact: bool, beside: bool) -> None:
        """Give as many idle spares as possible one stage each, then the remaining stages to spares with room. `beside`:
        stages get other devices of their machines, or devices of other machines only."""

        def suits(stage: StagePlacement, peer: str) -> bool:
            return self.costs.beside(stage, peer) == beside and self.refusal(stage, peer, exact=exact) is None

        missing = [stage for stage in self.stages if stage.stage not in self.standby_of]
        idle = [peer for peer in self.spares if not self.stages_of[peer]]
        choices = [self._ranked(stage, idle, suits) for stage in missing]
        for index, peer in matched(choices).items():
            self._give(missing[index], peer, exact=exact)
        for stage in missing:
            if stage.stage not in self.standby_of:
                for peer in self._ranked(stage, list(self.spares), suits)[:1]:
                    self._give(stage, peer, exact=exact)

    def _ranked(
        self, stage: StagePlacement, peers: list[str], suits: Callable[[StagePlacement, str], bool]
    ) -> list[str]:
        """The peers that may stand by for `stage`, best first."""

        def key(peer: str) -> tuple[bool, bool, int, float, float, str]:
            stages = self.stages_of[peer]
            return (
                any(self.plan.is_next(stage, other) for other in stages),
                not self.costs.exact(stage, self.spares[peer]),
                len(stages),
                self.costs.compute_s(stage, peer),
                self._needed_bytes([*stages, stage]) / self.spares[peer].memory_bytes,
                peer,
            )

        return sorted((peer for peer in peers if suits(stage, peer)), key=key)

    def _give(self, stage: StagePlacement, peer: str, *, exact: bool) -> None:
        given = self.costs.standby(stage, peer)
        self.standby_of[stage.stage] = msgspec.structs.replace(given, exact=exact or given.exact)
        self.stages_of[peer].append(stage)

    def refusal(self, stage: StagePlacement, peer: str, *, exact: bool) -> str | None:
        """The reason why `peer` can't stand by for `stage` besides the stages it has already; None if it can."""
        spare, costs = self.spares[peer], self.costs
        if (reason := costs.refusal(stage, spare, exact=exact)) is not None:
            return reason
        runs = costs.profiles.get(stage.peer)
        if runs is not None and runs.divided_device is not None and runs.divided_device == spare.divided_device:
            return "it is another part of the device that runs the stage."
        stages = [*self.stages_of[peer], stage]
        needed = self._needed_bytes(stages)
        if needed > spare.memory_bytes:
            beside = "" if len(stages) == 1 else f" beside what it keeps of {len(stages) - 1} other stages"
            lent = format_bytes(spare.memory_bytes)
            return f"it lends {lent}; standing by for the stage{beside} takes {format_bytes(needed)}."
        if self.plan.task == "serve":  # Weights are sent only once, while the stages work.
            return None
        arriving_s = sum(costs.snapshot_s(other, peer) for other in stages)
        if arriving_s > MOST_STEPS * self.plan.step_time_s:
            return (
                f"its link is too slow: a snapshot takes {format_seconds(arriving_s)}, "
                f"{MOST_STEPS} steps {format_seconds(MOST_STEPS * self.plan.step_time_s)}."
            )
        return None

    def _needed_bytes(self, stages: list[StagePlacement]) -> float:
        state = sum(self.costs.state_bytes(stage) for stage in stages)
        running = max(stage.memory_bytes for stage in stages)
        if self.plan.task == "serve":
            # The weights of all stages, and the caches of the one stage that is taken over.
            return state + max(stage.memory_bytes - self.costs.state_bytes(stage) for stage in stages)
        return max(ARRIVING * state, running + KEPT * state)


def matched(choices: Sequence[Sequence[str]], taken: Mapping[int, str] | None = None) -> dict[int, str]:
    """Assign to as many of `choices` as possible one of its entries, each entry once; `choices[i]` best first. Returns
    index -> entry. `taken`: initial pairs. An index in `taken` stays matched, though possibly to another entry."""
    holder = {entry: index for index, entry in (taken or {}).items()}
    placed = set(holder.values())

    def place(index: int, tried: set[str]) -> bool:
        free = [entry for entry in choices[index] if entry not in holder and entry not in tried]
        for entry in (*free[:1], *choices[index]):
            if entry in tried:
                continue
            tried.add(entry)
            if entry not in holder or place(holder[entry], tried):
                holder[entry] = index
                return True
        return False

    for index in range(len(choices)):
        if index not in placed:
            place(index, set())
    return {index: entry for entry, index in sorted(holder.items(), key=lambda pair: pair[1])}
