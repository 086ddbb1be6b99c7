"""Layout and size limits of the bytes exchanged with a relay before it copies. Pure functions.

    offset  size  field, from the peer
    0       2     magic b"FR": differs from the first byte of a TLS connection, so both can share one port
    2       1     version
    3       1     reserved, 0
    4       2     token_length, little-endian
    6             the pairing token, then a signature of 64 bytes that proves that the peer is the token's holder

The relay answers with one byte: `JOINED` once the other side is connected, or a refusal. All later bytes come from the
other side. `relay` reads this format, `relay_dialling` writes it.
"""

from __future__ import annotations

import struct
from typing import Final

from fusionai.primitives.errors import WireError
from fusionai.transport.pairing import MAX_TOKEN_BYTES
from fusionai.transport.signed import SIGNATURE_BYTES

MAGIC: Final = b"FR"
VERSION: Final = 1
HEADER_BYTES: Final = 6
_HEADER: Final = struct.Struct("<2sBBH")

JOINED: Final = 0
REFUSALS: Final = {
    1: "it does not support this version of the relay greeting.",
    2: "the pairing token is invalid or was used before.",
    3: "it has no room for another pair now.",
    4: "the other side did not connect in time.",
}
"""Reason of each refusal, keyed by the byte that the relay sends."""
BAD_GREETING, BAD_TOKEN, FULL, ALONE = REFUSALS


def greeting(token: bytes, proof: bytes) -> bytes:
    return _HEADER.pack(MAGIC, VERSION, 0, len(token)) + token + proof


def bytes_to_come(header: bytes) -> int:
    """Return how many bytes follow the header. Raises `WireError` before anything is allocated for them."""
    magic, version, reserved, token_length = _HEADER.unpack(header)
    if magic != MAGIC or version != VERSION or reserved:
        raise WireError("expected a greeting for a relay of this version, got other bytes.")
    if not SIGNATURE_BYTES < token_length <= MAX_TOKEN_BYTES:
        raise WireError(f"expected a pairing token of at most {MAX_TOKEN_BYTES} bytes, got {token_length}.")
    return token_length + SIGNATURE_BYTES
