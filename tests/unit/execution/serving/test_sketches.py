"""Marks of rows: the same for the same row wherever it is packed, another for another, under a key for each text."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from fusionai.execution.serving import sketches as serving_marks
from fusionai.execution.serving.boundary import RowSpec
from fusionai.execution.serving.sketches import TOGETHER, Projection, SketchBook, drawing_bytes, text_key
from fusionai.execution.tensors import SIZE
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire.messages import Segment

pytestmark = pytest.mark.levels

WIDTH = 24
SPECS = (RowSpec("h", "float32", (WIDTH,)), RowSpec("p", "int64"))
SECRET = b"s" * 32
DIGESTS = {1: "3e6e31475c05", 24: "0f5d48444ab6", 1000: "840df85b6d5b", 4096: "854af8afc718"}
"""Of marks of rows of these widths."""


def values(rows: int, seed: int = 0) -> dict[str, HostTensor]:
    hidden = np.random.default_rng(seed).standard_normal((1, rows, WIDTH)).astype(np.float32)
    return {"h": tensor(hidden), "p": tensor(np.arange(rows, dtype=np.int64).reshape(1, rows))}


def tensor(array: np.ndarray) -> HostTensor:
    return host_tensor(array.dtype.name, array.shape, array.tobytes())


def part(tensors: dict[str, HostTensor], rows: list[int]) -> dict[str, HostTensor]:
    arrays = {name: np.frombuffer(one.data, one.dtype).reshape(one.shape)[:, rows] for name, one in tensors.items()}
    return {name: tensor(array) for name, array in arrays.items()}


def sketches(tensors: dict[str, HostTensor], session: int = 1) -> np.ndarray:
    return Projection(SPECS, text_key(SECRET, session)).sketches(tensors)


def book(capacity: int = 1000) -> SketchBook:
    return SketchBook(SECRET, SPECS, SPECS[:1], capacity, room_bytes=lambda: 2**30)


@pytest.mark.slow
def test_the_distance_of_marks_is_that_of_rows_by_their_length():
    rows = values(500)
    scaled = {**rows, "h": tensor(np.frombuffer(rows["h"].data, np.float32).reshape(1, 500, WIDTH) * np.float32(1.01))}
    only = Projection(SPECS[:1], text_key(SECRET, 1))
    one, two = only.sketches(rows), only.sketches(scaled)
    apart = np.linalg.norm(two - one, axis=1) / np.linalg.norm(one, axis=1)
    assert apart == pytest.approx(np.full(500, 0.01), rel=1e-2)
    other = only.sketches(values(500, seed=1))
    unlike = np.linalg.norm(other - one, axis=1) / np.linalg.norm(one, axis=1)
    assert 0.5 < np.median(unlike) < 3


def test_each_text_has_a_key_of_its_own():
    rows = values(3)
    assert not np.allclose(sketches(rows, 1), sketches(rows, 2))
    assert np.array_equal(sketches(rows, 1), sketches(rows, 1))


def test_rows_are_marked_alike_whoever_they_are_packed_with():
    whole, of = values(7), book()
    of.add([Segment(1, 0, 4), Segment(2, 0, 3)], [], whole, part({"h": whole["h"]}, list(range(7))))
    got, gave = of.of_positions(1, 0, 4)
    assert np.array_equal(got, sketches(part(whole, [0, 1, 2, 3])))
    assert np.array_equal(of.of_positions(2, 1, 2)[0], sketches(part(whole, [5, 6]), 2))
    assert gave.shape == (4, SIZE)
    assert np.isfinite(gave).all()


def test_of_a_selection_only_what_was_wanted_is_known():
    whole, of = values(7), book()
    wanted = [3, 5, 6]
    of.add([Segment(1, 0, 4), Segment(2, 0, 3)], wanted, whole, part({"h": whole["h"]}, wanted))
    got, gave = of.of_positions(2, 0, 3)
    assert np.isfinite(got).all()
    assert np.isnan(gave[0]).all()
    only = Projection(SPECS[:1], text_key(SECRET, 2))
    assert np.array_equal(gave[1:], only.sketches(part({"h": whole["h"]}, [5, 6])))
    assert np.isfinite(of.of_positions(1, 3, 1)[1]).all()


def test_the_stage_behind_a_selection_gets_nothing_of_who_wants_nothing():
    of = book()
    of.add([Segment(1, 0, 4), Segment(2, 0, 3)], [6], values(1), {})
    assert np.isnan(of.of_positions(1, 0, 4)[0]).all()
    assert np.isnan(of.of_positions(2, 0, 2)[0]).all()
    assert np.isfinite(of.of_positions(2, 2, 1)[0]).all()


def test_what_is_computed_again_counts_and_nothing_behind_it_is_known():
    of = book()
    of.add([Segment(1, 0, 6)], [], values(6), {})
    again = values(2, seed=5)
    of.add([Segment(1, 3, 2)], [], again, {})
    got, _ = of.of_positions(1, 0, 7)
    assert np.array_equal(got[3:5], sketches(again))
    assert np.isfinite(got[:5]).all()
    assert np.isnan(got[5:]).all()


def test_the_text_that_was_not_added_to_for_longest_goes_first():
    of = book(capacity=10)
    for session in (1, 2):
        of.add([Segment(session, 0, 4)], [], values(4), {})
    of.add([Segment(1, 4, 1)], [], values(1), {})
    of.add([Segment(3, 0, 4)], [], values(4), {})
    assert np.isnan(of.of_positions(2, 0, 4)[0]).all()
    assert np.isfinite(of.of_positions(1, 0, 5)[0]).all()
    assert np.isfinite(of.of_positions(3, 0, 4)[0]).all()
    of.clear()
    assert np.isnan(of.of_positions(3, 0, 4)[0]).all()


def test_no_number_is_a_mark_that_is_none():
    rows = np.full((1, 1, WIDTH), np.inf, np.float32)
    only = Projection(SPECS[:1], text_key(SECRET, 1))
    assert not np.isfinite(only.sketches({"h": tensor(rows)})).any()


def test_a_text_that_grows_by_a_token_has_the_marks_of_its_rows():
    """Rows wait for others of their text; whoever asks in between, or computes some again, sees none of that."""
    of, whole = book(), values(50)
    for row in range(50):
        of.add(
            [Segment(1, row, 1), Segment(2, row, 1)], [], part(whole, [row, row]), part({"h": whole["h"]}, [row] * 2)
        )
        if row in (0, 7, 40):
            assert np.array_equal(of.of_positions(1, 0, row + 1)[0], sketches(part(whole, list(range(row + 1)))))
    only = Projection(SPECS[:1], text_key(SECRET, 2))
    assert np.array_equal(of.of_positions(2, 0, 50)[0], sketches(whole, 2))
    assert np.array_equal(of.of_positions(2, 0, 50)[1], only.sketches({"h": whole["h"]}))
    again = values(3, seed=9)
    for row in range(3):
        of.add([Segment(2, 48 + row, 1)], [], part(again, [row]), {})
    assert np.array_equal(of.of_positions(2, 48, 3)[0], sketches(again, 2))
    assert np.isnan(of.of_positions(2, 48, 3)[1]).all()


def test_of_many_short_texts_each_is_known():
    of = book(capacity=2 * TOGETHER)
    for session in range(TOGETHER + 5):
        of.add([Segment(session, 0, 1)], [], values(1, seed=session), {})
    for session in (0, 7, TOGETHER + 4):
        assert np.array_equal(of.of_positions(session, 0, 1)[0], sketches(values(1, seed=session), session))


@pytest.mark.parametrize("width", [1, 24, 1000, 4096])
@pytest.mark.parametrize("way", ["compiled", "plain"])
def test_a_row_s_marks_are_the_same_among_any_number(width: int, way: str, monkeypatch: pytest.MonkeyPatch):
    """Numbers of unlike sizes, so that another order of sums shows; the digest is the same on every processor."""
    generator = np.random.default_rng(4)
    whole = generator.integers(-(2**20), 2**20, (67, width)).astype(np.float32)
    rows = np.ldexp(whole, generator.integers(-12, 12, whole.shape, dtype=np.int32))
    of = Projection((RowSpec("h", "float32", (width,)),), text_key(SECRET, 1))
    expected = of.of({"h": rows})
    monkeypatch.setattr(serving_marks, "available", lambda: way == "compiled")
    for count in (1, 2, 3, 4, 5, 7, 8, 16, 33, 67):
        for start in (0, 67 - count):
            assert np.array_equal(of.of({"h": rows[start : start + count]}), expected[start : start + count]), count
    digest = hashlib.blake2b(expected.tobytes(), digest_size=6).hexdigest()
    assert digest == DIGESTS[width]


def test_what_has_no_room_is_not_sketched_and_older_texts_make_room():
    room = 2**20
    kept = SketchBook(SECRET, SPECS, SPECS[:1], 1000, room_bytes=lambda: room - kept.nbytes)

    def add(session: int) -> None:
        rows = values(1, seed=session)
        kept.add([Segment(session, 0, 1)], [], rows, {"h": rows["h"]})

    for session in (1, 2):
        add(session)
        known, _ = kept.of_positions(session, 0, 1)
        assert np.array_equal(known, sketches(values(1, seed=session), session))
    assert kept.nbytes > 2 * 2 * 64, "the signs count too"
    room = drawing_bytes(SPECS) + drawing_bytes(SPECS[:1]) + 128
    add(3)
    found = [np.isfinite(kept.of_positions(session, 0, 1)[0]).all() for session in (1, 2, 3)]
    assert found == [False, False, True]
    room = 0
    add(4)
    assert np.isnan(kept.of_positions(4, 0, 1)[0]).all()


def test_signs_that_were_dropped_are_drawn_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving_marks, "SIGNS_BYTES", 0)
    kept = book()
    for session in (1, 2, 1):
        rows = values(1, seed=session)
        kept.add([Segment(session, 0, 1)], [], rows, {"h": rows["h"]})
        found, _ = kept.of_positions(session, 0, 1)
        assert np.array_equal(found, sketches(rows, session))
        assert list(kept._projections) == [session]
