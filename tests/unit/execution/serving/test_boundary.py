"""What was sent on is given back by page, and never what other positions have overwritten."""

from __future__ import annotations

import numpy as np
import pytest

from fusionai.execution.serving.boundary import RetainedRows, RowSpec
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.messages import Segment, ServeOptions
from harness.pool import array, tensor

SPEC = RowSpec("h", "float32", (2,))


def retaining(page_tokens: int) -> RetainedRows:
    return RetainedRows([SPEC], ServeOptions(pages=16, sessions=4, pass_tokens=64, page_tokens=page_tokens))


def rows(*values: float) -> dict[str, HostTensor]:
    return {"h": tensor(np.array([[[value, -value] for value in values]], np.float32))}


def got(retained: RetainedRows, session: int, start: int, length: int) -> list[float]:
    return array(retained.rows([Segment(session, start, length, 0)])["h"])[0, :, 0].tolist()


def test_rows_of_packed_sessions_come_back_across_pages():
    retained = retaining(2)
    retained.keep([Segment(1, 0, 3, 0, (5, 7)), Segment(2, 0, 1, 0, (6,))], rows(1, 2, 3, 9))
    retained.keep([Segment(1, 3, 2, 2, (8,)), Segment(2, 1, 1, 1)], rows(4, 5, 10))
    assert got(retained, 1, 0, 5) == [1, 2, 3, 4, 5]
    assert got(retained, 1, 2, 2) == [3, 4]
    assert got(retained, 2, 0, 2) == [9, 10]
    assert retained.held_bytes == 4 * 2 * SPEC.row_bytes


def test_a_session_that_begins_on_shared_pages_has_what_the_other_sent():
    retained = retaining(2)
    retained.keep([Segment(1, 0, 2, 0, (5,))], rows(1, 2))
    retained.keep([Segment(2, 2, 1, 0, (5, 6))], rows(3))
    retained.forget([1])
    assert got(retained, 2, 0, 3) == [1, 2, 3]


def test_what_was_overwritten_or_cut_off_is_not_given_out():
    retained = retaining(4)
    retained.keep([Segment(1, 0, 4, 0, (5,))], rows(1, 2, 3, 4))
    retained.keep([Segment(1, 1, 1, 1)], rows(8))
    assert got(retained, 1, 0, 2) == [1, 8]
    with pytest.raises(ExecutionError, match="position 0 of session 1 is not retained"):
        retained.rows([Segment(1, 0, 3, 0)])
    retained.keep([Segment(2, 1, 1, 0, (5,))], rows(9))
    retained.keep([Segment(3, 3, 1, 0, (5,))], rows(9))
    with pytest.raises(ExecutionError, match="not retained"):
        retained.rows([Segment(1, 0, 1, 0)])


def test_positions_without_a_page_are_refused():
    retained = retaining(2)
    with pytest.raises(ExecutionError, match="has no page for position 2"):
        retained.keep([Segment(1, 0, 3, 0, (5,))], rows(1, 2, 3))
    with pytest.raises(ExecutionError, match="has 0 pages here"):
        retained.keep([Segment(2, 0, 1, 1, (6,))], rows(1))
    retained.clear()
    with pytest.raises(ExecutionError, match="has no page"):
        retained.rows([Segment(1, 0, 1, 0)])


def test_the_most_that_is_kept_is_known_beforehand():
    assert RetainedRows.capacity_bytes([SPEC, RowSpec("ids", "int64")], pages=3, page_tokens=4) == 3 * 4 * (8 + 8)


def test_a_text_that_is_over_is_given_back_by_its_pages_while_a_pass_of_it_is_under_way():
    retained = retaining(2)
    retained.keep([Segment(1, 0, 3, 0, (5, 7))], rows(1, 2, 3))
    assert array(retained.rows([Segment(1, 0, 3, 0)], (5, 7))["h"])[0, :, 0].tolist() == [1, 2, 3]
    retained.keep([Segment(1, 3, 2, 2, (8,))], rows(4, 5))
    retained.forget([1])
    assert array(retained.rows([Segment(1, 1, 4, 0)], (5, 7, 8))["h"])[0, :, 0].tolist() == [2, 3, 4, 5]
    with pytest.raises(ExecutionError, match="not retained"):
        retained.rows([Segment(1, 0, 2, 0)], (6,))


@pytest.mark.parametrize(
    ("segment", "said"),
    [
        (Segment(1, 0, 1, 0, (0,) * 17), "session 1 would have 17, up to number 0"),
        (Segment(1, 0, 1, 0, (16,)), "session 1 would have 1, up to number 16"),
    ],
)
def test_pages_that_the_stage_does_not_have_are_refused(segment: Segment, said: str):
    retained = retaining(2)
    with pytest.raises(ExecutionError, match=said):
        retained.place(segment)
    with pytest.raises(ExecutionError, match=said):
        retained.rows([segment], segment.pages)


def test_page_tables_are_limited_and_counted():
    retained = retaining(2)
    for session in range(2 * 4 + 64):
        retained.place(Segment(session, 0, 1, 0, (0, 1)))
    assert retained.tables_bytes == 72 * 2 * 4
    with pytest.raises(ExecutionError, match="the rows of 72 sessions are retained here"):
        retained.place(Segment(99, 0, 1, 0, (0,)))
    retained.place(Segment(3, 0, 1, 1, ()))
    retained.forget([5, 1000])
    assert retained.tables_bytes == (71 * 2 - 1) * 4
    retained.place(Segment(99, 0, 1, 0, (0,)))
    retained.clear()
    assert retained.tables_bytes == 0
