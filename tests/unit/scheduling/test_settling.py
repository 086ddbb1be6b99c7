"""A machine that was lost counts as back after a while that grows with losses in a row."""

from __future__ import annotations

from fusionai.scheduling.settling import LONGEST_SETTLE_S, SETTLE_S, STEADY_S, Loss, lost


def test_it_is_back_when_it_was_heard_long_enough_after_its_loss() -> None:
    once = lost(None, 100.0)
    assert not once.is_over(100.0 + SETTLE_S - 0.01)
    assert once.is_over(100.0 + SETTLE_S)


def test_each_loss_in_a_row_doubles_the_time_up_to_a_limit() -> None:
    known: Loss | None = None
    waits: list[float] = []
    for time in range(8):
        now_s = 100.0 + 10 * time
        known = lost(known, now_s)
        waits.append(next(wait for wait in (1, 2, 4, 8, 16, 30) if known.is_over(now_s + wait)))
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
    assert LONGEST_SETTLE_S == 30


def test_losses_far_apart_do_not_add_up() -> None:
    once = lost(None, 100.0)
    assert lost(once, 100.0 + STEADY_S).times == 2
    assert lost(once, 100.1 + STEADY_S).times == 1


def test_however_often_it_was_lost_it_is_there_for_who_waits_for_it() -> None:
    known: Loss | None = None
    for time in range(8):
        known = lost(known, 100.0 + time)
    assert known is not None
    assert not known.is_there(107.0 + SETTLE_S - 0.01)
    assert known.is_there(107.0 + SETTLE_S)
    assert not known.is_over(107.0 + SETTLE_S)
