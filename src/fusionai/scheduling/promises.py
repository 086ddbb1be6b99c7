"""Whether moves brought what they promised. Decides how far the next promise is trusted; moves nothing.

A move is promised from predictions, and predictions know nothing of what machines share: cores, a line, a room's heat.
So a job holds what it was promised against its own clock: the median step before the move and after it, both of steps
that lay on the same machines. The trust in the next promise is what was brought over what was promised, as if
`BENEFIT` had been promised and brought before, so that a small promise says little and no promise says nothing. What
was found is forgotten after `FORGOTTEN_S`: machines change.

Neighbours: `promotion` promises, `client.pool_watch` feeds the steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from fusionai.scheduling.types import Plan

ENOUGH: Final = 16
"""Steps that make a median."""
SETTLING: Final = 4
"""First steps after a move: replays and snapshots are in them."""
BENEFIT: Final = 0.05
"""Of a step's time: what is taken as promised and brought before anything is measured."""
FORGOTTEN_S: Final = 600.0

Placement = tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Measured at `at_s`. `promised`, `brought`: parts of a step's time, 0 <= brought <= promised."""

    at_s: float
    promised: float
    brought: float


@dataclass(frozen=True, slots=True)
class _Promise:
    placement: Placement
    gain: float
    before_s: float


@dataclass(frozen=True, slots=True)
class Promises:
    """One job's. `steps_s`: the last steps on `placement`, oldest first."""

    placement: Placement = ()
    steps_s: tuple[float, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    pending: _Promise | None = None

    def trust(self, now_s: float) -> float:
        """Which part of a promise is believed, in (0, 1]."""
        known = [one for one in self.outcomes if now_s - one.at_s < FORGOTTEN_S]
        promised = BENEFIT + sum(one.promised for one in known)
        return (BENEFIT + sum(one.brought for one in known)) / promised


def promised(promises: Promises, plan: Plan, gain: float) -> Promises:
    """`plan` will take `gain` (part of a step's time) less than the one in force, says who offers it. Where too few
    steps were seen before, nothing will be compared."""
    if len(promises.steps_s) < ENOUGH or gain <= 0:
        return replace(promises, pending=None)
    return replace(promises, pending=_Promise(placement(plan), gain, median(promises.steps_s)))


def stepped(promises: Promises, plan: Plan, step_s: float, now_s: float) -> Promises:
    """A step of `step_s` was committed under `plan`. A placement that nobody promised ends what was being compared."""
    here, pending = placement(plan), promises.pending
    if here != promises.placement:
        pending = pending if pending is not None and pending.placement == here else None
        promises = replace(promises, placement=here, steps_s=(), pending=pending)
    promises = replace(promises, steps_s=(*promises.steps_s, step_s)[-(SETTLING + ENOUGH) :])
    if pending is None or pending.placement != here or len(promises.steps_s) < SETTLING + ENOUGH:
        return promises
    brought = 1 - median(promises.steps_s[SETTLING:]) / pending.before_s
    outcome = Outcome(now_s, pending.gain, min(max(brought, 0.0), pending.gain))
    kept = tuple(one for one in promises.outcomes if now_s - one.at_s < FORGOTTEN_S)
    return replace(promises, outcomes=(*kept, outcome), pending=None)


def placement(plan: Plan) -> Placement:
    return tuple((stage.stage, stage.peer) for stage in plan.stages)
