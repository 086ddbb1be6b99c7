"""Pairing tokens: short-lived statements of the pool, "these two peers may meet at the relay, and this one dials".

The broker gives each side its own token. A relay verifies a token offline. The peer that shows it also proves that it
holds the named key, and each token is good for one connection. Decides the fields and the checks; time is an argument.

The broker signs, `relay` verifies, `relay_dialling` shows. `tickets` are the equivalent for jobs.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from fusionai.primitives.errors import TrustError
from fusionai.primitives.ids import PEER_ID_LENGTH
from fusionai.transport.signed import SIGNATURE_BYTES, content_of, holds, signed

MAX_TOKEN_BYTES: Final = 512
MEETING_BYTES: Final = 16
LIFETIME_S: Final = 30.0
"""Lifetime of a token: covers the time from the broker's answer to the connection at the relay. Chosen."""
_DOMAIN: Final = b"fusionai pairing 1\x00"
_PROOF_DOMAIN: Final = b"fusionai pairing proof 1\x00"

Side = Literal["dials", "answers"]
_Peer = Annotated[str, Meta(min_length=PEER_ID_LENGTH, max_length=PEER_ID_LENGTH)]


class PairingToken(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Permission for `peer` to meet `other`.

    `meeting` is drawn by the broker for the two peers. `expires_at_s` is in seconds since 1970.
    """

    meeting: Annotated[bytes, Meta(min_length=MEETING_BYTES, max_length=MEETING_BYTES)]
    peer: _Peer
    other: _Peer
    side: Side
    expires_at_s: Annotated[float, Meta(ge=0, le=1e12)]


_DECODER: Final = msgspec.msgpack.Decoder(PairingToken)


def sign_pairing(token: PairingToken, authority_key: Ed25519PrivateKey) -> bytes:
    return signed(msgspec.msgpack.encode(token), _DOMAIN, authority_key)


def verify_pairing(data: bytes, authority_key: bytes, *, now_wall_s: float) -> PairingToken:
    """Return the token if `authority_key` (32 raw bytes) signed it and it has not expired. Raises `TrustError`."""
    content = content_of(data, _DOMAIN, authority_key, what="pairing token", max_bytes=MAX_TOKEN_BYTES)
    try:
        token = _DECODER.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TrustError(
            f"expected a pairing token of this version, got content that can't be decoded: {error}."
        ) from error
    if token.peer == token.other:
        raise TrustError("expected a pairing token for two peers, got one for a peer with itself.")
    if now_wall_s >= token.expires_at_s:
        raise TrustError(
            f"expected a valid pairing token, got one that expired {now_wall_s - token.expires_at_s:.0f} s ago."
        )
    return token


def prove_holding(data: bytes, own_key: Ed25519PrivateKey) -> bytes:
    """Return a signature over the token by the peer it is for."""
    return own_key.sign(_PROOF_DOMAIN + data)


def check_holder(data: bytes, proof: bytes, public_key: bytes) -> None:
    """Raises `TrustError` unless the peer with `public_key` made `proof` over the token."""
    if len(proof) != SIGNATURE_BYTES or not holds(proof, _PROOF_DOMAIN + data, public_key):
        raise TrustError("expected a pairing token shown by the peer it is for, got one shown by another.")
