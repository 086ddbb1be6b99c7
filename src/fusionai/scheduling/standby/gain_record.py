"""Compares predicted gains of moves with measured ones and derives how far to trust the next prediction.

Predictions don't know what machines share, such as cores, a line or cooling. A job therefore compares each predicted
gain with its own step times: the median before the move with the median after it, each over steps with unchanged
placement. The trust is the ratio of measured to predicted gains. An additional gain of `BENEFIT` counts as predicted
and measured, so that a small prediction has little weight and the trust without any prediction is 1. Outcomes are
dropped after `FORGOTTEN_S`, because machines change.

`promotion` makes the predictions; `client.pool.watch` reports the steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from fusionai.scheduling.problem.types import Plan

ENOUGH: Final = 16
"""Number of steps over which a median is taken; chosen."""
SETTLING: Final = 4
"""Steps after a move that are left out, because they contain replays and snapshots; chosen."""
BENEFIT: Final = 0.05
"""Gain that counts as predicted and measured before the first outcome, as a fraction of a step's time; chosen."""
FORGOTTEN_S: Final = 600.0
"""Seconds for which an outcome counts; chosen."""

Placement = tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one move, measured at `at_s`.

    `promised` and `brought` are the predicted and the measured gain as fractions of a step's time, with 0 <= brought <=
    promised.
    """

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
    """State of one job. `steps_s`: the last step times under `placement`, oldest first."""

    placement: Placement = ()
    steps_s: tuple[float, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    pending: _Promise | None = None

    def trust(self, now_s: float) -> float:
        """Return the fraction of a predicted gain to count on, in (0, 1]."""
        known = [one for one in self.outcomes if now_s - one.at_s < FORGOTTEN_S]
        promised = BENEFIT + sum(one.promised for one in known)
        return (BENEFIT + sum(one.brought for one in known)) / promised


def promised(promises: Promises, plan: Plan, gain: float) -> Promises:
    """Record that a step of `plan` is predicted to be shorter by `gain`, a fraction of the current step's time.

    If fewer than `ENOUGH` steps were measured before, the prediction is not compared.
    """
    if len(promises.steps_s) < ENOUGH or gain <= 0:
        return replace(promises, pending=None)
    return replace(promises, pending=_Promise(placement(plan), gain, median(promises.steps_s)))


def stepped(promises: Promises, plan: Plan, step_s: float, now_s: float) -> Promises:
    """Record a step of `step_s` committed under `plan`; a placement other than the predicted one ends a pending
    comparison."""
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
