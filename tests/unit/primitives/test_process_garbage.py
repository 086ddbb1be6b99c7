from __future__ import annotations

import gc
import sys
import weakref
from types import ModuleType

import pytest

from fusionai.primitives.process import loading


class Circle:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def set_aside(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many modules there were each time something would have been: really so, other tests' circles would stay."""
    times: list[int] = []
    monkeypatch.setattr(gc, "freeze", lambda: times.append(len(sys.modules)))
    return times


def test_nothing_is_collected_and_what_came_is_set_aside(set_aside: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with loading():
        assert not gc.isenabled()
        monkeypatch.setitem(sys.modules, "quite_new", ModuleType("quite_new"))
        assert not set_aside
    assert gc.isenabled()
    assert len(set_aside) == 1


def test_where_nothing_was_imported_circles_are_still_found(set_aside: list[int]) -> None:
    with loading():
        one = Circle()
    assert not set_aside
    known = weakref.ref(one)
    del one
    gc.collect()
    assert known() is None


def test_an_import_that_fails_leaves_the_collector_as_it_was(set_aside: list[int]) -> None:
    with pytest.raises(ModuleNotFoundError), loading():
        import there_is_no_such_module  # noqa: F401 # pyright: ignore[reportMissingImports]
    assert gc.isenabled()
    gc.disable()
    try:
        with loading():
            pass
        assert not gc.isenabled(), "who had switched it off wants it so"
    finally:
        gc.enable()
    assert not set_aside
