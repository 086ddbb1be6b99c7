"""A process that ends is started again, later each time, and given up when it ends too often."""

from __future__ import annotations

from fusionai.client.pool.local_pool import MOST, WINDOW_S, Restarts


def test_each_start_waits_twice_as_long_until_it_is_given_up() -> None:
    one = Restarts()
    assert [one.ended(float(number)) for number in range(MOST + 1)] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, None]


def test_what_ended_long_ago_does_not_count() -> None:
    one = Restarts()
    assert [one.ended(number * WINDOW_S) for number in range(20)] == [1.0] * 20
