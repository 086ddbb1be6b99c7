"""Sessions that begin as copies of others or are kept as copies: where they may, and what is refused unchanged."""

from __future__ import annotations

import pytest

from fusionai.backends.serving.page_table import SessionTable
from fusionai.primitives.errors import ExecutionError
from fusionai.wire.serving import Segment, ServeOptions

OPTIONS = ServeOptions(page_tokens=4, pages=16, sessions=3, pass_tokens=8)
COPY = 2**61


def table(*, paged: bool = True) -> SessionTable:
    """Session 1 has 8 positions, and is kept as a copy there."""
    made = SessionTable(OPTIONS, paged=paged, windows={6: 16}, states=True)
    (span,) = made.place([Segment(1, 0, 8, 0, (0, 1), 0, 0, COPY)])
    ((source, target),) = made.computed([span])
    assert source == span.ring != target
    return made


def test_a_session_begins_where_the_copy_was_taken() -> None:
    made = table()
    made.computed(made.place([Segment(1, 8, 4, 2, (2,))]))
    (span,) = made.place([Segment(2, 8, 4, 0, (0, 1, 3), 0, COPY)])
    assert span.source >= 0
    assert len({span.source, span.ring}) == 2
    assert span.state // 2 == span.ring, "its own place has the state, once the copy is there"
    assert made.computed([span]) == []
    assert made.cached == {1: 12, 2: 12, COPY: 8}
    made.forget([COPY])
    assert made.cached == {1: 12, 2: 12}


def test_without_rings_and_states_nothing_is_copied() -> None:
    made = SessionTable(OPTIONS, paged=True, windows={})
    assert made.computed(made.place([Segment(1, 0, 8, 0, (0, 1), 0, 0, COPY)])) == []
    (span,) = made.place([Segment(2, 8, 4, 0, (0, 1, 3), 0, COPY)])
    assert span.source == -1


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([Segment(2, 8, 4, 0, (0, 1, 3), 0, 99)], "copy of 99, which is not here"),
        ([Segment(2, 0, 4, 0, (3,), 0, 99)], "copy of 99, which is not here"),
        ([Segment(2, 8, 4, 0, (0, 1, 3), 0, 1), Segment(1, 8, 1, 2, (2,))], "copied and changed"),
        ([Segment(2, 8, 4, 0, (0, 1, 3), 0, 2)], "copy of 2, which is not here"),
        ([Segment(1, 8, 1, 2, (2,), 0, 0, 1)], "session 1 has two segments"),
        ([Segment(1, 8, 1, 2, (2,), 0, 0, 7), Segment(2, 0, 4, 0, (3,), 0, 0, 7)], "session 7 has two segments"),
        ([Segment(2, 4, 4, 0, (0, 3), 0, COPY)], "its states are those after 8"),
        ([Segment(2, 12, 4, 0, (0, 1, 2, 3), 0, COPY)], "its states are those after 8"),
        ([Segment(2, 8, 4, 0, (4, 5, 6), 0, COPY)], "starts at position 8, but 0 are cached"),
        ([Segment(1, 8, 1, 2, (2,), 0, 0, 7), Segment(2, 0, 4, 0, (3,))], "the limit is 3"),
    ],
)
def test_what_can_not_be_copied_is_refused_and_changes_nothing(segments: list[Segment], message: str) -> None:
    made = table()
    before = made.cached
    with pytest.raises(ExecutionError, match=message):
        made.place(segments)
    assert made.cached == before
