"""When a served model is cut anew because the pool offers more than it did: machines are back, or new ones have come.

Another cut makes every stage load and every session be read again, so it waits for a moment without sessions and for a
pool that has not changed for a while, and the plan must be faster by `GAIN`. After each such move the next one waits
longer: a machine that comes and goes costs a round every hour at most.

Training jobs have `going_on.widened` instead, which counts in steps. Neighbours: `client.serving_watch` looks at the
pool and asks; `serving` plans, `serving_prediction` prices both plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Final

import msgspec

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.going_on import Otherwise, keeps_bits, recut, served_with
from fusionai.scheduling.serving_prediction import predict_serving, together
from fusionai.scheduling.stage_costs import StageCosts
from fusionai.scheduling.takeover import told
from fusionai.scheduling.types import PeerProfile, Plan, Problem

GAIN: Final = 1.2
"""Least predicted gain in speed, as a factor: the geometric mean over one session and over all of them together."""
IDLE_S: Final = 5.0
"""How long no session must have run, in seconds: clients that talk back and forth leave gaps of a second or two."""
STEADY_S: Final = 30.0
"""How long the same machines must have been there, in seconds: one that has just joined may leave at once."""
REST_S: Final = 300.0
"""Pause after a move, in seconds; doubles with each further move."""
LONGEST_REST_S: Final = 3600.0
"""Longest pause after a move. After another one like it without a move the pauses begin anew."""


@dataclass(frozen=True, slots=True)
class Regrowth:
    """What the looks at the job and its pool have shown so far. `seen` takes a look, `moved` another plan."""

    there: frozenset[str] = frozenset()
    """Machines that could be used at the last look."""
    there_since_s: float = 0.0
    idle_since_s: float | None = None
    """Since when no session has run; None while one does."""
    moved_s: float | None = None
    moves: int = 0
    """Moves in a row."""

    def seen(self, now_s: float, *, idle: bool, there: frozenset[str]) -> Regrowth:
        since_s = (now_s if self.idle_since_s is None else self.idle_since_s) if idle else None
        if there == self.there:
            return replace(self, idle_since_s=since_s)
        return replace(self, idle_since_s=since_s, there=there, there_since_s=now_s)

    def is_due(self, now_s: float) -> bool:
        """Whether a plan may be looked for and gone over to now."""
        if self.idle_since_s is None or now_s - self.idle_since_s < IDLE_S or now_s - self.there_since_s < STEADY_S:
            return False
        return self.moved_s is None or now_s - self.moved_s >= self.rest_s

    @property
    def rest_s(self) -> float:
        """Pause after the last move."""
        return min(LONGEST_REST_S, REST_S * 2.0 ** min(self.moves - 1, 16))

    def moved(self, now_s: float) -> Regrowth:
        calm = self.moved_s is not None and now_s - self.moved_s > self.rest_s + LONGEST_REST_S
        return replace(self, moved_s=now_s, moves=1 if calm else self.moves + 1)


def regrown(plan: Plan, problem: Problem, candidates: Sequence[PeerProfile]) -> Otherwise | None:
    """The plan (version 0) over all `candidates` if it is faster than `plan` by `GAIN`. With as many stages as the
    problem asks for, if such a plan is; where `plan` has another number of stages itself, with any number."""
    known = told(problem, candidates)
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
    there = {peer.peer for peer in candidates}
    posed = msgspec.structs.replace(
        known,
        peers=tuple(peer for peer in known.peers if peer.peer in there),
        excluded=tuple(peer for peer in known.excluded if peer in there),
        incumbent=None,
    )
    try:
        return served_with(plan, posed)
    except PlanError:
        return None


def _speed(plan: Plan, known: Problem) -> float:
    """Tokens per second, the geometric mean over one session and all of them. Both plans are priced alike."""
    costs, needs = StageCosts(known, plan), known.serving
    assert needs is not None, "a serving problem has its needs"
    _, together_per_s = together(plan.stages, costs, needs)
    return sqrt(together_per_s / predict_serving(plan.stages, costs).step_s)
