"""SketchReport about a text against a verifier's: who is contradicted, what is within rounding, what says nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fusionai.coordination.round.verification import Opinion
from fusionai.execution.tensors import SIZE
from fusionai.primitives.tensors import host_tensor
from fusionai.serving.inspection import (
    Neighbours,
    SketchReport,
    SketchTolerance,
    limits,
    measured,
    opinion,
    sketches_of,
)
from fusionai.wire.messages import ServeOptions

AROUND = Neighbours(before="a", after="c")
LIMITS = SketchTolerance(1e-3, 1e-3)
OPTIONS = ServeOptions(pages=4, sessions=2, pass_tokens=8)


def drawn(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((20, SIZE)).astype(np.float32)


HONEST = SketchReport(got=drawn(0), gave=drawn(1), seen=drawn(2))


def off(sketches: np.ndarray, by: float, rows: int = 20) -> np.ndarray:
    changed = sketches.copy()
    changed[:rows] *= np.float32(1 + by)
    return changed


def judged(
    said: SketchReport, again: SketchReport = HONEST, *, selected: bool = False, within: SketchTolerance = LIMITS
) -> Opinion:
    return opinion(said, again, within, AROUND, selected=selected)


def test_rounding_is_nobodys_fault():
    near = SketchReport(got=off(HONEST.got, 1e-5), gave=off(HONEST.gave, 5e-4), seen=off(HONEST.seen, 5e-4))
    assert judged(near) == Opinion()
    far = measured(near, HONEST)
    assert (
        far.row
        == pytest.approx(far.text, rel=1e-2)
        == pytest.approx(far.gain, rel=1e-2)
        == pytest.approx(5e-4, rel=1e-2)
    )


@pytest.mark.parametrize("rows", [1, 4, 20])
def test_wrong_rows_are_the_stages_fault_by_its_own_word_and_by_its_neighbours(rows: int):
    found = judged(replace(HONEST, gave=off(HONEST.gave, 0.01, rows), seen=off(HONEST.seen, 0.01, rows)))
    assert (found.inputs, found.links) == (frozenset(), {"c"})
    assert found.own.startswith(f"activations of {rows} of 20 positions differ by up to 0.01")


def test_who_says_it_gave_what_is_right_stands_against_who_got_something_else():
    assert judged(replace(HONEST, seen=off(HONEST.seen, 0.01))) == Opinion(links=frozenset({"c"}))


def test_other_inputs_are_between_the_stage_and_the_one_before():
    found = judged(replace(HONEST, got=off(HONEST.got, 0.01), gave=off(HONEST.gave, 0.5)))
    assert found.inputs == {"a"}
    assert not found.links


def test_a_stage_that_says_nothing_is_not_believed():
    nothing = np.full_like(HONEST.got, np.nan)
    assert judged(replace(HONEST, got=nothing, gave=nothing)).own
    assert judged(replace(HONEST, gave=nothing)).own


def test_without_a_word_of_who_got_the_rows_nothing_follows():
    silent = HONEST.seen.copy()
    silent[3] = np.nan
    assert judged(replace(HONEST, seen=silent)).void
    assert judged(replace(HONEST, seen=np.full_like(silent, np.nan)), selected=True).void


def test_of_a_selection_the_rows_that_left_count():
    seen, gave = np.full_like(HONEST.seen, np.nan), np.full_like(HONEST.gave, np.nan)
    seen[[4, 19]], gave[[4, 19]] = HONEST.seen[[4, 19]], HONEST.gave[[4, 19]]
    said = replace(HONEST, gave=gave, seen=seen)
    assert judged(said, selected=True) == Opinion()
    wrong = replace(said, gave=off(gave, 0.01, 5), seen=off(seen, 0.01, 5))
    assert judged(wrong, selected=True).own.startswith("activations of 1 of 2 positions")


def test_a_row_that_left_a_selection_counts_although_the_stage_says_nothing_of_it():
    """It was read anew in between, or the stage hides it: then it stands against who got it."""
    silent = replace(HONEST, gave=np.full_like(HONEST.gave, np.nan))
    assert judged(silent, selected=True) == Opinion()
    assert judged(replace(silent, seen=off(HONEST.seen, 0.01, 1)), selected=True) == Opinion(links=frozenset({"c"}))


def test_what_is_no_number_for_both_is_the_same():
    infinite = HONEST.gave.copy()
    infinite[2] = np.inf
    again = replace(HONEST, gave=infinite)
    assert judged(replace(HONEST, gave=infinite.copy()), again) == Opinion()
    assert "missing or not finite" in judged(HONEST, again).own


def test_where_rounding_chooses_a_few_rows_may_be_others():
    some = replace(HONEST, gave=off(HONEST.gave, 0.5, 1), seen=off(HONEST.seen, 0.5, 1))
    assert judged(some).own
    assert judged(some, within=SketchTolerance(1e-3, 1e-3, odd_rows=0.05)) == Opinion()


def test_what_no_row_tells_all_rows_together_may():
    rough = SketchTolerance(0.15, 5e-2, 5e-3)
    draw = np.random.default_rng(9)
    rounded, packed = (
        (HONEST.gave * (1 + by * draw.standard_normal(HONEST.gave.shape))).astype(np.float32) for by in (1e-2, 8e-2)
    )
    assert judged(replace(HONEST, gave=rounded), within=rough) == Opinion()
    assert "20 positions together differ by 0.0" in judged(replace(HONEST, gave=packed), within=rough).own
    longer = judged(replace(HONEST, gave=off(rounded, 0.01)), within=rough).own
    assert "20 positions together are 1.0" in longer
    few = {"got": HONEST.got[:9], "seen": HONEST.seen[:9]}
    said = SketchReport(**few, gave=off(HONEST.gave[:9], 0.01))
    assert judged(said, SketchReport(**few, gave=HONEST.gave[:9]), within=rough) == Opinion()


def test_limits_follow_the_formats_and_how_far_a_stage_moves_rows():
    assert limits(OPTIONS, chooses=False) == SketchTolerance(1e-3, 1e-3)
    rough = limits(ServeOptions(pages=4, sessions=2, pass_tokens=8, weights="bf16", cache="bf16"), chooses=True)
    assert rough.row > 1e-2
    assert rough.odd_rows > 0
    assert rough.of(0.5).text == rough.text / 2
    assert rough.of(0.0).text == limits(OPTIONS, chooses=False).of(0.1).text == 1e-3
    assert limits(ServeOptions(pages=4, sessions=2, pass_tokens=8, cache="bf16"), chooses=False).row < 1e-2


def test_marks_are_as_many_as_positions():
    tensor = host_tensor("float32", (20, SIZE), HONEST.got.tobytes())
    found = sketches_of(tensor, 20)
    assert found is not None
    assert np.array_equal(found, HONEST.got)
    assert sketches_of(tensor, 19) is None
    assert sketches_of(None, 20) is None
    assert sketches_of(host_tensor("int32", (20, SIZE), HONEST.got.tobytes()), 20) is None
