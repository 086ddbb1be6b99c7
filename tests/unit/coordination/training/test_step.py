"""Which work a stage does next within a step, and what it forgets at the end of one."""

from __future__ import annotations

import pytest

from fusionai.coordination.training.stage_interface import ForwardArrived, SharedArrived, StageWork
from fusionai.coordination.training.step import Microbatches, SharedSums, StageShape
from fusionai.wire.messages import Mode


def shape(**changes: object) -> StageShape:
    fields: dict[str, object] = {
        "stage": 1,
        "microbatches": 3,
        "in_flight": 3,
        "producers": {"train": frozenset({0}), "eval": frozenset({0}), "infer": frozenset({0})},
        "consumers": frozenset({2}),
        "weight_lag": 1,
    }
    return StageShape(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def midway(forwarded: int, returned: int, weighted: int, *arrived: tuple[Mode, int]) -> Microbatches:
    """A step that is so far, and whose last work was a forward. `arrived`: inputs, by mode and microbatch."""
    found = Microbatches(shape(), forwarded=forwarded, returned=returned, weighted=weighted)
    for mode, microbatch in arrived:
        found.keep(ForwardArrived(mode, 0, microbatch, 0))
    return found


def test_a_microbatch_before_the_first_one_crosses_no_stage():
    assert [shape(replicas=2, replica=1).local_index(number) for number in (-1, 0, 1, 3, 5, 7)] == [
        None, None, 0, 1, 2, None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("step", "kind", "microbatch"),
    [
        (midway(2, 1, 0, ("train", 2)), "forward", 2),  # as many weight gradients are postponed as may be
        (midway(2, 2, 0, ("train", 2)), "weights", 0),  # one more than may be
        (midway(3, 3, 2, ("eval", 9)), "weights", 2),  # all microbatches are back
        (midway(3, 3, 3, ("eval", 9)), "forward", 9),  # and none are postponed
        (midway(2, 1, 0), "weights", 0),  # there is nothing else to do
    ],
)
def test_postponed_weight_gradients_wait_until_they_must_not(step: Microbatches, kind: str, microbatch: int):
    work = step.next_work(0)
    assert work is not None
    assert (work.kind, work.microbatch) == (kind, microbatch)


def test_gradients_of_applied_steps_are_forgotten_and_no_others():
    step = Microbatches(shape(), gradients={(number, 0): {2} for number in range(4)})
    step.forget_gradients(2)
    assert step.gradients.keys() == {(2, 0), (3, 0)}


def test_a_part_is_wanted_once_and_until_its_sum_is_made():
    sums = SharedSums(shape(sums_of=frozenset({2}), totals_to=frozenset({2})))
    part = SharedArrived(5, 2, "partial")
    assert sums.lacks(part)
    assert sums.next_work(5) is None
    sums.keep(part)
    assert not sums.lacks(part)
    assert sums.next_work(5) == StageWork("total", step=5)
    sums.partials.clear()
    sums.totals[5] = {1}
    assert not sums.lacks(part), "the sum is made"


def test_sums_of_earlier_steps_are_forgotten_and_no_others():
    sums = SharedSums(shape(), partials={at: {2} for at in range(4)}, totals={at: {2} for at in range(4)})
    sums.begin(2, keep_sums=False)
    assert sums.partials.keys() == sums.totals.keys() == {2, 3}
