"""A machine that was lost counts as back after a while that grows with losses in a row."""

from __future__ import annotations

from fusionai.scheduling.standby.takeover import (
    LONGEST_RETRY_S,
    LONGEST_SETTLE_S,
    SETTLE_S,
    STEADY_S,
    Loss,
    lost,
    sound,
)

HOUR_S = 3600.0


def row(times: int) -> Loss:
    known = lost(None, 100.0)
    for _ in range(times - 1):
        known = lost(known, 100.0)
    return known


def test_it_is_back_when_it_was_heard_long_enough_after_its_loss() -> None:
    once = lost(None, 100.0)
    assert not once.is_over(100.0 + SETTLE_S - 0.01, rejoined=False)
    assert once.is_over(100.0 + SETTLE_S, rejoined=False)


def test_each_loss_in_a_row_doubles_the_time_up_to_a_limit() -> None:
    waits = [row(times).wait_s(rejoined=True) for times in range(1, 9)]
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
    assert LONGEST_SETTLE_S == 30


def test_a_process_that_fails_again_and_again_is_asked_ever_more_seldom() -> None:
    waits = [row(times).wait_s(rejoined=False) for times in (5, 6, 7, 12, 13, 14, 5000)]
    assert waits == [16, 32, 64, 2048, HOUR_S, HOUR_S, HOUR_S]
    assert LONGEST_RETRY_S == HOUR_S


def test_in_a_day_such_a_process_is_asked_a_few_dozen_times() -> None:
    """Each time it fails five minutes later, for another reason; without a limit that grew it was asked at once."""
    known: Loss | None = None
    now_s, attempts = 0.0, 0
    while now_s < 24 * HOUR_S:
        known = lost(known, now_s + 300.0)
        now_s = known.at_s + known.wait_s(rejoined=False)
        attempts += 1
    assert attempts < 40


def test_losses_do_not_add_up_where_it_did_its_work_between_them() -> None:
    worked = sound(lost(None, 100.0), 110.0)
    assert sound(worked, 150.0) == worked, "since it began"
    assert lost(worked, 110.0 + STEADY_S).times == 2
    assert lost(worked, 110.1 + STEADY_S).times == 1
    assert lost(lost(None, 100.0), 1e6).times == 2, "it has done nothing since"


def test_that_it_is_given_up_for_longer_is_said_once_in_a_row() -> None:
    assert [times for times in range(1, 200) if row(times).is_given_up] == [6]


def test_however_often_it_was_lost_it_is_there_for_who_waits_for_it() -> None:
    known = row(8)
    assert not known.is_there(100.0 + SETTLE_S - 0.01)
    assert known.is_there(100.0 + SETTLE_S)
    assert not known.is_over(100.0 + SETTLE_S, rejoined=True)
