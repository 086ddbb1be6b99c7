"""What was sent on is given back by page, and never what other positions have overwritten."""

from __future__ import annotations

import numpy as np
import pytest

from fusionai.execution.serving.boundary import RetainedRows, RowSpec
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.messages import Segment
from harness.pool import array, tensor

SPEC = RowSpec("h", "float32", (2,))


def rows(*values: float) -> dict[str, HostTensor]:
    return {"h": tensor(np.array([[[value, -value] for value in values]], np.float32))}


def got(retained: RetainedRows, session: int, start: int, length: int) -> list[float]:
    return array(retained.rows([Segment(session, start, length, 0)])["h"])[0, :, 0].tolist()


def test_rows_of_packed_sessions_come_back_across_pages():
    retained = RetainedRows([SPEC], page_tokens=2)
    retained.keep([Segment(1, 0, 3, 0, (5, 7)), Segment(2, 0, 1, 0, (6,))], rows(1, 2, 3, 9))
    retained.keep([Segment(1, 3, 2, 2, (8,)), Segment(2, 1, 1, 1)], rows(4, 5, 10))
    assert got(retained, 1, 0, 5) == [1, 2, 3, 4, 5]
    assert got(retained, 1, 2, 2) == [3, 4]
    assert got(retained, 2, 0, 2) == [9, 10]
    assert retained.held_bytes == 4 * 2 * SPEC.row_bytes


def test_a_session_that_begins_on_shared_pages_has_what_the_other_sent():
    retained = RetainedRows([SPEC], page_tokens=2)
    retained.keep([Segment(1, 0, 2, 0, (5,))], rows(1, 2))
    retained.keep([Segment(2, 2, 1, 0, (5, 6))], rows(3))
    retained.forget([1])
    assert got(retained, 2, 0, 3) == [1, 2, 3]


def test_what_was_overwritten_or_cut_off_is_not_given_out():
    retained = RetainedRows([SPEC], page_tokens=4)
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
    retained = RetainedRows([SPEC], page_tokens=2)
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
    retained = RetainedRows([SPEC], page_tokens=2)
    retained.keep([Segment(1, 0, 3, 0, (5, 7))], rows(1, 2, 3))
    assert array(retained.rows([Segment(1, 0, 3, 0)], (5, 7))["h"])[0, :, 0].tolist() == [1, 2, 3]
    retained.keep([Segment(1, 3, 2, 2, (8,))], rows(4, 5))
    retained.forget([1])
    assert array(retained.rows([Segment(1, 1, 4, 0)], (5, 7, 8))["h"])[0, :, 0].tolist() == [2, 3, 4, 5]
    with pytest.raises(ExecutionError, match="not retained"):
        retained.rows([Segment(1, 0, 2, 0)], (6,))
