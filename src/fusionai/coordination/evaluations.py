"""What a job's evaluations say: which state is the best, and whether it is time to end.

Pure, of journalled losses alone: a driver that starts again decides the same. Neighbours: `storage.commits` keeps
evaluations, `coordination.driver` acts on what they say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec


class Evaluation(msgspec.Struct, frozen=True):
    """Mean loss over the evaluation part, of the state after `step` steps."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class Standing:
    """`best`: the lowest loss, the first of equal ones; None without any that is a number. `since`: evaluations after
    the last one that was an improvement; `improved`: that one."""

    best: Evaluation | None
    improved: Evaluation | None
    since: int

    def enough(self, patience: int | None) -> str | None:
        """Why there are enough steps: so many evaluations have brought nothing."""
        if patience is None or self.since < patience:
            return None
        if self.improved is None:
            return f"{self.since} evaluations gave no number"
        return f"{self.since} evaluations without an improvement since step {self.improved.step}"


def standing(evaluations: Sequence[Evaluation], minimum_improvement: float = 0.0) -> Standing:
    """An evaluation is an improvement when its loss is lower than that of the last improvement, by at least the
    minimum. A loss that is not a number never is."""
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
