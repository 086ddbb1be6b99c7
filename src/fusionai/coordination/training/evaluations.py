"""Decides from evaluation losses which state is the best and whether the job should end.

Pure functions of journalled losses, so that a restarted driver decides the same. Neighbours: `storage.commits` keeps
evaluations, `coordination.training.driver` acts on the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec


class Evaluation(msgspec.Struct, frozen=True):
    """Mean loss over the evaluation data, for the state after `step` steps."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class Standing:
    """`best`: the evaluation with the lowest loss, the first of equal ones; None if no loss is a number. `improved`:
    the last improvement. `since`: number of evaluations after it."""

    best: Evaluation | None
    improved: Evaluation | None
    since: int

    def enough(self, patience: int | None) -> str | None:
        """Return why the job may end, or None. It may end after `patience` evaluations without an improvement."""
        if patience is None or self.since < patience:
            return None
        if self.improved is None:
            return f"{self.since} evaluations gave no number"
        return f"{self.since} evaluations without an improvement since step {self.improved.step}"


def standing(evaluations: Sequence[Evaluation], minimum_improvement: float = 0.0) -> Standing:
    """Return the standing after these evaluations. An evaluation is an improvement if its loss is at least
    `minimum_improvement` lower than that of the last improvement. A loss that is not a number never is."""
    best = improved = None
    since = 0
    for evaluation in evaluations:
        loss = evaluation.loss
        if loss == loss and (best is None or loss < best.loss):
            best = evaluation
        gain = 0.0 if improved is None else improved.loss - loss
        if (improved is None and loss == loss) or (gain > 0 and gain >= minimum_improvement):
            improved, since = evaluation, 0
        else:
            since += 1
    return Standing(best, improved, since)
