"""What evaluations say: the best state, and when more steps bring nothing."""

from __future__ import annotations

import pytest

from fusionai.coordination.training.evaluations import Evaluation, standing

NAN = float("nan")


def found(*losses: float) -> tuple[Evaluation, ...]:
    return tuple(Evaluation(10 * number, loss) for number, loss in enumerate(losses, start=1))


@pytest.mark.parametrize(
    ("losses", "minimum", "best", "improved", "since"),
    [
        ((), 0.0, None, None, 0),
        ((3.0,), 0.0, 10, 10, 0),
        ((3.0, 2.0, 2.5), 0.0, 20, 20, 1),
        ((3.0, 3.0, 3.0), 0.0, 10, 10, 2),
        ((3.0, 2.9, 2.8, 2.7), 0.25, 40, 40, 0),
        ((3.0, 2.9, 2.8), 0.25, 30, 10, 2),
        ((3.0, 4.0, 3.5), 0.0, 10, 10, 2),
        ((NAN, NAN), 0.0, None, None, 2),
        ((NAN, 5.0, NAN), 0.0, 20, 20, 1),
        ((float("inf"), 5.0), 0.0, 20, 20, 0),
    ],
)
def test_the_best_and_the_last_improvement(
    losses: tuple[float, ...], minimum: float, best: int | None, improved: int | None, since: int
) -> None:
    told = standing(found(*losses), minimum)
    assert (None if told.best is None else told.best.step) == best
    assert (None if told.improved is None else told.improved.step) == improved
    assert told.since == since


def test_enough() -> None:
    told = standing(found(3.0, 2.0, 2.5, 2.4))
    assert told.enough(None) is None
    assert told.enough(3) is None
    assert told.enough(2) == "2 evaluations without an improvement since step 20"
    assert standing(found(NAN)).enough(1) == "1 evaluations gave no number"
