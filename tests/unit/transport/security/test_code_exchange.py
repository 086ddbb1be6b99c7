"""The key from a code: equal only for equal codes, pools and TLS keys; one guess for each exchange."""

from __future__ import annotations

import pytest

from fusionai.primitives.errors import TrustError
from fusionai.transport.security.code_exchange import BrokerExchange, CodeKey, NewcomerExchange, draw_code
from fusionai.transport.security.identity import peer_of

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
BROKER, OTHER = peer_of(bytes([7]) * 32), peer_of(bytes([8]) * 32)


def keys(newcomer: NewcomerExchange, broker: BrokerExchange) -> tuple[CodeKey, CodeKey]:
    return newcomer.key(broker.share), broker.key(newcomer.share)


def test_both_sides_of_one_code_have_one_key():
    ours, theirs = keys(NewcomerExchange("123456", KEY, BROKER), BrokerExchange("123456", KEY, BROKER))
    assert theirs.is_proof(ours.proof())
    sealed = theirs.seal(b"an invitation")
    assert b"invitation" not in sealed
    assert ours.unseal(sealed) == b"an invitation"
    with pytest.raises(TrustError, match="does not know the code"):
        ours.unseal(sealed[:-1] + bytes([sealed[-1] ^ 1]))


@pytest.mark.parametrize(
    "broker", [("123457", KEY, BROKER), ("123456", OTHER_KEY, BROKER), ("123456", KEY, OTHER)], ids=str
)
def test_another_code_pool_or_tls_key_gives_another_key(broker: tuple):
    ours, theirs = keys(NewcomerExchange("123456", KEY, BROKER), BrokerExchange(*broker))
    assert not theirs.is_proof(ours.proof())
    with pytest.raises(TrustError):
        ours.unseal(theirs.seal(b"an invitation"))


def test_shares_differ_each_time_and_have_the_size_of_their_message():
    shares = {NewcomerExchange("123456", KEY, BROKER).share for _ in range(3)}
    assert len(shares) == 3
    assert {len(share) for share in shares} == {33}


def test_a_share_that_is_none_is_refused():
    ours = NewcomerExchange("123456", KEY, BROKER)
    zero = b"B" + bytes([1]) + bytes(31)
    low_order = b"B" + bytes(32)
    for share in (ours.share, b"B" + b"\xff" * 32, b"B" + bytes([2]) + bytes(31), zero, low_order):
        exchange = NewcomerExchange("123456", KEY, BROKER)
        with pytest.raises(TrustError, match="expected the other side's share"):
            exchange.key(share)


def test_a_drawn_code_has_six_digits():
    assert all(len(code) == 6 and code.isdigit() for code in (draw_code() for _ in range(200)))
