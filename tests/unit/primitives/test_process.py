from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from fusionai.primitives.process import set_aside_what_stays

pytestmark = pytest.mark.slow


class Circle:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """As in a program that has just begun; afterwards what the tests had set aside is so again."""
    set_aside, every = gc.get_freeze_count() > 0, gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*every)
    if not set_aside:
        gc.unfreeze()


def test_what_stays_is_not_looked_at_again_and_what_does_not_is_gone():
    stays, gone = Circle(), Circle()
    known = weakref.ref(gone)
    del gone
    set_aside_what_stays()
    assert known() is None
    assert not any(one is stays for one in gc.get_objects())


def test_what_was_set_aside_and_is_of_no_use_any_more_goes_the_next_time():
    former = Circle()
    known = weakref.ref(former)
    set_aside_what_stays()
    del former
    gc.collect()
    assert known() is not None
    set_aside_what_stays()
    assert known() is None


def test_from_then_on_the_collector_comes_by_itself_before_long():
    stays = [[index] for index in range(1_000_000)]
    set_aside_what_stays()
    circle = Circle()
    known = weakref.ref(circle)
    gc.collect(1)  # it grows old
    del circle
    newer = [[index] for index in range(150_000)]  # less than the quarter of all that the collector would wait for
    assert known() is None
    del stays, newer
