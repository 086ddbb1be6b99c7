"""Whatever is said to a relay, it refuses in order; only a token as it was signed is taken."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from fusionai.primitives.errors import TrustError, WireError
from fusionai.transport.routes.relay import HEADER_BYTES, bytes_to_come, greeting
from fusionai.transport.security.identity import peer_of, public_bytes
from fusionai.transport.security.signed import (
    MAX_TOKEN_BYTES,
    SIGNATURE_BYTES,
    PairingToken,
    check_holder,
    prove_holding,
    sign_pairing,
    verify_pairing,
)

KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(3)]
AUTHORITY, MINE, OTHER = KEYS
PUBLIC = [public_bytes(key.public_key()) for key in KEYS]
TOKEN = sign_pairing(PairingToken(b"m" * 16, peer_of(PUBLIC[1]), peer_of(PUBLIC[2]), "dials", 100.0), AUTHORITY)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_no_header_asks_for_more_than_the_cap(header: bytes):
    try:
        assert bytes_to_come(header) <= MAX_TOKEN_BYTES + SIGNATURE_BYTES
    except WireError:
        return


@given(st.binary(max_size=700))
def test_other_bytes_are_no_token(data: bytes):
    with pytest.raises(TrustError):
        verify_pairing(data, PUBLIC[0], now_wall_s=0.0)


@given(st.integers(0, len(TOKEN) - 1), st.integers(1, 255))
def test_a_token_with_any_byte_changed_is_none(at: int, change: int):
    data = bytearray(TOKEN)
    data[at] ^= change
    with pytest.raises(TrustError):
        verify_pairing(bytes(data), PUBLIC[0], now_wall_s=0.0)


@given(st.binary(max_size=100))
def test_only_the_named_peer_proves_that_it_holds_it(proof: bytes):
    with pytest.raises(TrustError):
        check_holder(TOKEN, proof, PUBLIC[1])


def test_the_token_as_it_was_signed_is_taken():
    token = verify_pairing(TOKEN, PUBLIC[0], now_wall_s=99.0)
    assert (token.peer, token.side) == (peer_of(PUBLIC[1]), "dials")
    proof = prove_holding(TOKEN, MINE)
    check_holder(TOKEN, proof, PUBLIC[1])
    with pytest.raises(TrustError):
        check_holder(TOKEN, prove_holding(TOKEN, OTHER), PUBLIC[1])
    with pytest.raises(TrustError, match="expired"):
        verify_pairing(TOKEN, PUBLIC[0], now_wall_s=100.0)
    data = greeting(TOKEN, proof)
    assert bytes_to_come(data[:HEADER_BYTES]) == len(data) - HEADER_BYTES
