"""An invitation: one line of text a pool's owner hands to a friend. Decides its spelling and its checks.

`fusion1-` + base64url of (msgpack of the fields + the first four bytes of its SHA-256). The checksum finds slips of
copying; trust comes from the authority's public key inside, against which the broker proves itself.
Whoever has the text may join: it is a secret.
Neighbours: the broker makes and honours tokens, `enrolment` uses the text.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from fusionai.primitives.errors import UsageError

PREFIX: Final = "fusion1-"
MAX_LENGTH: Final = 4096
_CHECKSUM_BYTES: Final = 4
_HINT: Final = "Copy the whole line again, or ask the pool's owner for a new one."


class Invitation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`addresses` are the brokers'; `authority_key` is the raw Ed25519 key; `token` is known to the broker only."""

    pool: Annotated[str, Meta(min_length=1, max_length=64)]
    addresses: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(min_length=1, max_length=32)]
    authority_key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    token: Annotated[bytes, Meta(min_length=16, max_length=64)]

    def __repr__(self) -> str:
        return f"Invitation(pool={self.pool!r}, addresses={self.addresses!r}, token=hidden)"


def format_invitation(invitation: Invitation) -> str:
    data = msgspec.msgpack.encode(invitation)
    return PREFIX + base64.urlsafe_b64encode(data + _checksum(data)).decode().rstrip("=")


def parse_invitation(text: str) -> Invitation:
    """Raises `UsageError` saying what is wrong with the text; the message never repeats it, as it is a secret."""
    line = text.strip()
    if not line.startswith(PREFIX):
        raise UsageError(f"expected an invitation starting with {PREFIX!r}, got another text.", hint=_HINT)
    if len(line) > MAX_LENGTH:
        raise UsageError(f"expected an invitation of at most {MAX_LENGTH} characters, got {len(line)}.", hint=_HINT)
    body = line.removeprefix(PREFIX)
    try:
        data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError("the invitation is cut off or holds foreign characters.", hint=_HINT) from error
    content, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if _checksum(content) != checksum:
        raise UsageError("the invitation is cut off or misspelt: its checksum does not match.", hint=_HINT)
    try:
        return msgspec.msgpack.decode(content, type=Invitation)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"the invitation does not hold what it should: {error}.", hint=_HINT) from error


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_CHECKSUM_BYTES]
