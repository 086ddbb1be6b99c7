"""Which spare guards which stage. Decides the guards and, through `snapshots`, how often they get a snapshot.

A guard keeps the stage's newest snapshots and stands in when its peer is lost. Guarded are all stages with state that
do not run in the job owner's own process. Every spare takes one stage first, dear stages the fast spares; what is left
is stacked on spares with room, neighbours apart where possible, because two neighbours lost together need two
stand-ins. Exact guards (equal fingerprints) come before others, which only `takeover = "tolerant"` allows at all. A
guard that is there already stays, since it holds snapshots; only an exact one replaces an inexact one.

Room on a spare: three snapshots of each stage it guards while one arrives, and two of each beside any one of the
stages running there. In serving a guard holds the weights instead, and has room for one stage's caches. The same
inputs give the same guards, in whatever order spares are listed.

Neighbours: `planner` and `takeover` call `with_guards`; `snapshots` decides K; `stage_costs` has the prices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from fusionai.primitives.units import format_bytes, format_seconds
from fusionai.scheduling.eligibility import refusal
from fusionai.scheduling.levers import unable_to_save
from fusionai.scheduling.matching import matched
from fusionai.scheduling.snapshots import MOST_STEPS, SnapshotInterval, room_to_retain, snapshot_interval
from fusionai.scheduling.stage_costs import StageCosts
from fusionai.scheduling.types import Excluded, Guard, PeerProfile, Plan, Problem, StagePlacement

KEPT: Final = 2
"""Whole snapshots a guard keeps of a stage."""
ARRIVING: Final = KEPT + 1
"""While the next one arrives."""


@dataclass(frozen=True, slots=True)
class Unguarded:
    """A stage with state that nobody guards, and for every spare why not. Without spares `reasons` is empty."""

    stage: int
    reasons: tuple[Excluded, ...]


@dataclass(frozen=True, slots=True)
class Guarding:
    """`plan` with its guards and K, why K, and who is left without a guard."""

    plan: Plan
    interval: SnapshotInterval
    unguarded: tuple[Unguarded, ...]


def with_guards(plan: Plan, problem: Problem) -> Plan:
    """`plan` with `guards` and `snapshot_every`; nothing else changes. Candidates are `plan.spares`, described by
    `problem.peers`; a spare nobody describes is passed over."""
    return guarding(plan, problem).plan


def guarding(plan: Plan, problem: Problem) -> Guarding:
    """`with_guards` with its reasons."""
    costs = StageCosts(problem, plan)
    stages = [stage for stage in plan.stages if costs.guardable(plan, stage)]
    short = room_to_retain(plan, costs) if plan.task == "train" else None
    if short is not None:
        bare = msgspec.structs.replace(plan, guards=(), snapshot_every=0)
        reason = f"the memory of {short} has no room to retain what a replay needs."
        reasons = (Excluded(peer=short, reason=reason),)
        unguarded = tuple(Unguarded(stage.stage, reasons) for stage in stages)
        return Guarding(bare, snapshot_interval(bare, problem), unguarded)
    placed = {stage.peer for stage in plan.stages} | {plan.feed}
    spares = [costs.profiles[peer] for peer in sorted(set(plan.spares) - placed) if peer in costs.profiles]
    watch = _Watch(plan, costs, stages, spares)
    guards = watch.assigned()
    guarded = msgspec.structs.replace(plan, guards=guards)
    interval = snapshot_interval(guarded, problem)
    guarded = msgspec.structs.replace(guarded, snapshot_every=interval.every)
    unguarded = tuple(
        Unguarded(stage.stage, tuple(watch.refusals(stage)))
        for stage in stages
        if stage.stage not in {guard.stage for guard in guards}
    )
    return Guarding(guarded, interval, unguarded)


def may_guard(plan: Plan, problem: Problem, stage: StagePlacement, peer: str) -> bool:
    """Whether `peer`, guarding nothing else, has the numerics, the memory and the link for it."""
    costs = StageCosts(problem, plan)
    watch = _Watch(plan, costs, [stage], [costs.profiles[peer]])
    return watch.refusal(stage, peer, exact=problem.takeover == "exact") is None


def without_guards(plan: Plan, lost: Iterable[str]) -> Plan:
    """`plan` with the guards among `lost` struck out; the same version, for a smaller plan needs no new authority."""
    gone = frozenset(lost)
    guards = tuple(guard for guard in plan.guards if guard.peer not in gone)
    return msgspec.structs.replace(
        plan,
        guards=guards,
        spares=tuple(peer for peer in plan.spares if peer not in gone),
        snapshot_every=plan.snapshot_every if guards else 0,
    )


class _Watch:
    """Stages on the one side, spares on the other, and who has what so far."""

    def __init__(self, plan: Plan, costs: StageCosts, stages: list[StagePlacement], spares: list[PeerProfile]) -> None:
        self.plan = plan
        self.costs = costs
        # Dear stages choose first: the fast spares are for them.
        self.stages = sorted(stages, key=lambda s: (-s.compute_s, -costs.state_bytes(s), s.stage))
        self.spares = {spare.peer: spare for spare in spares}
        self.guard_of: dict[int, Guard] = {}
        self.guarded_by: defaultdict[str, list[StagePlacement]] = defaultdict(list)
        self._operators = {stage.stage: costs.operators(stage) for stage in stages}

    def assigned(self) -> tuple[Guard, ...]:
        """In order of stages."""
        known = {stage.stage: stage for stage in self.stages}
        kept = [guard for guard in self.plan.guards if guard.stage in known and guard.peer in self.spares]
        for guard in kept:
            if guard.exact:
                self._give(known[guard.stage], guard.peer, exact=True)
        self._spread(exact=True)
        for guard in kept:
            if guard.stage not in self.guard_of:
                self._give(known[guard.stage], guard.peer, exact=False)
        if self.costs.problem.takeover == "tolerant":
            self._spread(exact=False)
        return tuple(sorted(self.guard_of.values(), key=lambda guard: guard.stage))

    def refusals(self, stage: StagePlacement) -> list[Excluded]:
        return [
            Excluded(peer=peer, reason=reason)
            for peer in self.spares
            if (reason := self.refusal(stage, peer, exact=self.costs.problem.takeover == "exact"))
        ]

    def _spread(self, *, exact: bool) -> None:
        """Idle spares one stage each, as many as can be; then the rest where there is room."""

        def suits(stage: StagePlacement, peer: str) -> bool:
            return self.refusal(stage, peer, exact=exact) is None

        missing = [stage for stage in self.stages if stage.stage not in self.guard_of]
        idle = [peer for peer in self.spares if not self.guarded_by[peer]]
        choices = [self._ranked(stage, idle, suits) for stage in missing]
        for index, peer in matched(choices).items():
            self._give(missing[index], peer, exact=exact)
        for stage in missing:
            if stage.stage not in self.guard_of:
                for peer in self._ranked(stage, list(self.spares), suits)[:1]:
                    self._give(stage, peer, exact=exact)

    def _ranked(
        self, stage: StagePlacement, peers: list[str], suits: Callable[[StagePlacement, str], bool]
    ) -> list[str]:
        """Those of `peers` that may guard `stage`, best first."""

        def key(peer: str) -> tuple[bool, bool, int, float, float, str]:
            guarded = self.guarded_by[peer]
            return (
                any(self.plan.is_next(stage, other) for other in guarded),
                not self.costs.exact(stage, self.spares[peer]),
                len(guarded),
                self.costs.compute_s(stage, peer),
                self._needed_bytes([*guarded, stage]) / self.spares[peer].memory_bytes,
                peer,
            )

        return sorted((peer for peer in peers if suits(stage, peer)), key=key)

    def _give(self, stage: StagePlacement, peer: str, *, exact: bool) -> None:
        exact = exact or self.costs.exact(stage, self.spares[peer])
        self.guard_of[stage.stage] = Guard(stage=stage.stage, peer=peer, exact=exact)
        self.guarded_by[peer].append(stage)

    def refusal(self, stage: StagePlacement, peer: str, *, exact: bool) -> str | None:
        """Why `peer` does not guard `stage` besides what it guards; None if it can."""
        spare, costs = self.spares[peer], self.costs
        reason = refusal(costs.problem, spare, self._operators[stage.stage]) or unable_to_save(stage, spare)
        if reason is not None:
            return reason
        if exact and not costs.exact(stage, spare):
            return "it computes other bits (its fingerprint differs)."
        guarded = [*self.guarded_by[peer], stage]
        needed = self._needed_bytes(guarded)
        if needed > spare.memory_bytes:
            beside = "" if len(guarded) == 1 else f" beside what it keeps of {len(guarded) - 1} other stages"
            return (
                f"it lends {format_bytes(spare.memory_bytes)}; guarding the stage{beside} takes {format_bytes(needed)}."
            )
        if self.plan.task == "serve":  # weights come once, beside the work
            return None
        arriving_s = sum(costs.snapshot_s(other, peer) for other in guarded)
        if arriving_s > MOST_STEPS * self.plan.step_time_s:
            return (
                f"its link is too slow: a snapshot takes {format_seconds(arriving_s)}, "
                f"{MOST_STEPS} steps {format_seconds(MOST_STEPS * self.plan.step_time_s)}."
            )
        return None

    def _needed_bytes(self, guarded: list[StagePlacement]) -> float:
        state = sum(self.costs.state_bytes(stage) for stage in guarded)
        running = max(stage.memory_bytes for stage in guarded)
        if self.plan.task == "serve":
            # All the weights, and the caches of the one stage that is taken over.
            return state + max(stage.memory_bytes - self.costs.state_bytes(stage) for stage in guarded)
        return max(ARRIVING * state, running + KEPT * state)
