"""A machine whose owner works is not lent, with patience both ways."""

from __future__ import annotations

import pytest

from fusionai.peer.lending import BUSY_AFTER_S, BUSY_SHARE, QUIET_AFTER_S, QUIET_SHARE, BusyWatch


def told(watch: BusyWatch, *measured: tuple[float, float]) -> list[bool]:
    """(now_s, share) -> busy after each."""
    return [watch.measured(share, now_s) for now_s, share in measured]


def test_work_that_goes_on_is_noticed_and_a_moment_is_not() -> None:
    watch = BusyWatch()
    assert told(watch, (0, 0.9), (4, 0.9), (5, 0.0), (6, 0.9), (13.9, 0.9)) == [False] * 5
    assert told(watch, (6 + BUSY_AFTER_S, 0.9)) == [True]


def test_lending_goes_on_after_a_long_rest_only() -> None:
    watch = BusyWatch()
    told(watch, (0, 1.0), (BUSY_AFTER_S, 1.0))
    assert watch.busy
    assert told(watch, (20, 0.0), (100, 0.0), (110, 0.5), (120, 0.0), (239, 0.0)) == [True] * 5
    assert told(watch, (120 + QUIET_AFTER_S, 0.0)) == [False]


@pytest.mark.parametrize("share", [QUIET_SHARE, (QUIET_SHARE + BUSY_SHARE) / 2, BUSY_SHARE])
def test_between_the_two_nothing_changes(share: float) -> None:
    idle, working = BusyWatch(), BusyWatch(busy=True)
    assert told(idle, (0, share), (1000, share)) == [False, False]
    assert told(working, (0, share), (1000, share)) == [True, True]
