"""A join code: a few tries, one use, ten minutes, whatever comes in whichever order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionai.coordination.broker.join_code import (
    CODE_LIFETIME_S,
    JOIN_CODE,
    MAX_EXCHANGES,
    MAX_TRIES,
    CodeReplaced,
    ExchangeBegun,
    JoinCode,
    ProofShown,
    made_code,
)
from fusionai.coordination.machine import ForbiddenTransition

CODE = made_code(100.0)


def after(*events: object) -> JoinCode:
    code = CODE
    for event in events:
        code = JOIN_CODE.advance(code, event)
    return code


def test_a_right_proof_uses_the_code_and_nothing_follows():
    used = after(ExchangeBegun(101.0), ProofShown(102.0, right=True))
    assert used.phase == "used"
    for event in (ExchangeBegun(103.0), ProofShown(103.0, right=True), CodeReplaced()):
        with pytest.raises(ForbiddenTransition):
            JOIN_CODE.advance(used, event)


def test_the_third_wrong_proof_is_the_last():
    wrong = ProofShown(101.0, right=False)
    assert [after(*[wrong] * tries).phase for tries in range(MAX_TRIES + 1)] == ["open", "open", "open", "dead"]


@pytest.mark.parametrize("event", [ExchangeBegun(100.0 + CODE_LIFETIME_S), ProofShown(100.0 + CODE_LIFETIME_S, True)])
def test_an_expired_code_takes_neither_a_share_nor_a_right_proof(event: object):
    assert after(event).phase == "expired"


def test_exchanges_without_a_proof_are_limited_too():
    begun = [ExchangeBegun(101.0)] * MAX_EXCHANGES
    assert after(*begun).phase == "open"
    assert after(*begun, ExchangeBegun(101.0)).phase == "dead"


_EVENTS = st.one_of(
    st.builds(ExchangeBegun, st.floats(0, 1000)),
    st.builds(ProofShown, st.floats(0, 1000), st.booleans()),
    st.just(CodeReplaced()),
)


@given(st.lists(_EVENTS, max_size=40))
def test_no_order_of_events_gives_a_fourth_try_or_a_second_use(events: list[object]):
    code, wrong, used = CODE, 0, 0
    for event in events:
        try:
            moved = JOIN_CODE.advance(code, event)
        except ForbiddenTransition:
            assert code.phase != "open"
            continue
        assert code.phase == "open"
        if isinstance(event, ProofShown):
            in_time = event.now_s < code.expires_at_s
            wrong += in_time and not event.right
            used += moved.phase == "used"
            assert (moved.phase == "used") == (in_time and event.right)
        code = moved
    assert wrong <= MAX_TRIES
    assert used <= 1
    assert (code.phase == "dead") <= (wrong == MAX_TRIES or not code.exchanges_left)
