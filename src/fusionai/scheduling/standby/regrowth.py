"""Decides when a served model is divided anew because the pool offers more machines than before.

A new division makes every stage load again and every session be recomputed. It therefore waits until no session runs
and the pool has been unchanged for a while, and the new plan must be faster by the factor `GAIN`. After each move the
next one waits longer, so that a machine that comes and goes causes at most one move per hour.

Training jobs use `continuation.widened` instead, which counts in steps. `client.serving.watch` observes the pool and
calls this module; `serving` plans, `serving.prediction` predicts both plans' speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Final

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import PeerProfile, Plan, Problem
from fusionai.scheduling.serving.prediction import predict_serving, together
from fusionai.scheduling.standby.continuation import Otherwise, keeps_bits, recut, served_with
from fusionai.scheduling.standby.takeover import offered, with_profiles

GAIN: Final = 1.2
"""Least predicted gain in speed, as a factor: the geometric mean over one session and over all of them together."""
IDLE_S: Final = 5.0
"""How long no session must have run, in seconds: clients that talk back and forth leave gaps of a second or two."""
STEADY_S: Final = 30.0
"""How long the same machines must have been there, in seconds: one that has just joined may leave at once."""
REST_S: Final = 300.0
"""Pause after a move, in seconds; doubles with each further move."""
LONGEST_REST_S: Final = 3600.0
"""Longest pause after a move, in seconds. After a further pause of this length without a move, pauses start at `REST_S`
again."""


@dataclass(frozen=True, slots=True)
class Regrowth:
    """Observations of a job and its pool so far. `seen` adds an observation, `moved` a plan change."""

    there: frozenset[str] = frozenset()
    """Machines that were usable at the last observation."""
    there_since_s: float = 0.0
    idle_since_s: float | None = None
    """Time since which no session has run; None while one runs."""
    moved_s: float | None = None
    moves: int = 0
    """Consecutive moves."""

    def seen(self, now_s: float, *, idle: bool, there: frozenset[str]) -> Regrowth:
        since_s = (now_s if self.idle_since_s is None else self.idle_since_s) if idle else None
        if there == self.there:
            return replace(self, idle_since_s=since_s)
        return replace(self, idle_since_s=since_s, there=there, there_since_s=now_s)

    def is_due(self, now_s: float) -> bool:
        """Return whether a new plan may be searched for and switched to now."""
        if self.idle_since_s is None or now_s - self.idle_since_s < IDLE_S or now_s - self.there_since_s < STEADY_S:
            return False
        return self.moved_s is None or now_s - self.moved_s >= self.rest_s

    @property
    def rest_s(self) -> float:
        """Pause after the last move, in seconds."""
        return min(LONGEST_REST_S, REST_S * 2.0 ** min(self.moves - 1, 16))

    def moved(self, now_s: float) -> Regrowth:
        calm = self.moved_s is not None and now_s - self.moved_s > self.rest_s + LONGEST_REST_S
        return replace(self, moved_s=now_s, moves=1 if calm else self.moves + 1)


def regrown(plan: Plan, problem: Problem, candidates: Sequence[PeerProfile]) -> Otherwise | None:
    """Return the plan (version 0) over all `candidates` if it is faster than `plan` by the factor `GAIN`, else None. It
    has as many stages as the problem requests, if such a plan is fast enough. If `plan` itself has another number of
    stages, any number is allowed."""
    known = with_profiles(problem, candidates)
    least = GAIN * _speed(plan, known)
    found = _as_asked(plan, known, candidates)
    if found is None or _speed(found, known) < least:
        asked = known.stages in (None, sum("stage" in stage.roles for stage in plan.stages))
        cut = None if asked else recut(plan, problem, candidates)
        found = cut.plan if isinstance(cut, Otherwise) else None
    if found is None or _speed(found, known) < least:
        return None
    kept = {(stage.blocks, stage.peer) for stage in plan.stages}
    takers = frozenset(stage.peer for stage in found.stages if (stage.blocks, stage.peer) not in kept) - {found.feed}
    same = [stage.blocks for stage in plan.stages] == [stage.blocks for stage in found.stages]
    return Otherwise(found, exact=keeps_bits(plan, found, problem), recut=not same, takers=takers)


def _as_asked(plan: Plan, known: Problem, candidates: Sequence[PeerProfile]) -> Plan | None:
    posed = offered(known, candidates)
    try:
        return served_with(plan, posed)
    except PlanError:
        return None


def _speed(plan: Plan, known: Problem) -> float:
    """Return tokens per second: the geometric mean of one session's speed and the speed of all sessions together."""
    costs, needs = StageCosts(known, plan), known.serving
    assert needs is not None, "a serving problem has its needs"
    _, together_per_s = together(plan.stages, costs, needs)
    return sqrt(together_per_s / predict_serving(plan.stages, costs).step_s)
