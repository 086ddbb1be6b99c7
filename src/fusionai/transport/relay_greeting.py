"""The few bytes exchanged with a relay before it copies: their layout and the sizes they may have. Pure.

    offset  size  field, from the peer
    0       2     magic b"FR": a TLS connection begins with another byte, so both may come to one port
    2       1     version
    3       1     reserved, 0
    4       2     token_length, little-endian
    6             the pairing token, then 64 bytes by which the peer proves that the token is its own

One byte comes back once the other side is there (`JOINED`) or when it will not be; everything after it is the other
side's. Neighbours: `relay` reads this, `relay_dialling` writes it.
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
    1: "it does not speak this version of the relay's greeting.",
    2: "the pairing token does not hold or was used before.",
    3: "it has no room for another pair now.",
    4: "the other side did not come.",
}
"""By the byte that comes back."""
BAD_GREETING, BAD_TOKEN, FULL, ALONE = REFUSALS


def greeting(token: bytes, proof: bytes) -> bytes:
    return _HEADER.pack(MAGIC, VERSION, 0, len(token)) + token + proof


def bytes_to_come(header: bytes) -> int:
    """How much of the greeting follows its header. Raises `WireError`, before anything is allocated for it."""
    magic, version, reserved, token_length = _HEADER.unpack(header)
    if magic != MAGIC or version != VERSION or reserved:
        raise WireError("expected a greeting for a relay of this version, got other bytes.")
    if not SIGNATURE_BYTES < token_length <= MAX_TOKEN_BYTES:
        raise WireError(f"expected a pairing token of at most {MAX_TOKEN_BYTES} bytes, got {token_length}.")
    return token_length + SIGNATURE_BYTES
