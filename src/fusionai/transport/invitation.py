"""An invitation: one line of text that a pool's owner gives to a new member. Decides its encoding and its checks.

The text is `fusion1-` + base64url of (msgpack of the fields + the first four bytes of its SHA-256). The checksum
detects copying errors; trust comes from the authority's public key inside, with which the broker proves its identity.
The text is a secret: anyone who has it may join. The broker issues and checks tokens, `enrolment` uses the text.
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
    """Content of an invitation.

    `addresses` are the brokers' addresses, `authority_key` is the raw Ed25519 key of the pool's authority, `token` is
    the secret that the broker issued.
    """

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
    """Decode an invitation.

    Raises `UsageError` with the reason; the message never repeats the text, which is a secret.
    """
    line = text.strip()
    if not line.startswith(PREFIX):
        raise UsageError(f"expected an invitation starting with {PREFIX!r}, got another text.", hint=_HINT)
    if len(line) > MAX_LENGTH:
        raise UsageError(f"expected an invitation of at most {MAX_LENGTH} characters, got {len(line)}.", hint=_HINT)
    body = line.removeprefix(PREFIX)
    try:
        data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError("the invitation is cut off or holds characters that are not base64url.", hint=_HINT) from error
    content, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if _checksum(content) != checksum:
        raise UsageError("the invitation is cut off or mistyped: its checksum does not match.", hint=_HINT)
    try:
        return msgspec.msgpack.decode(content, type=Invitation)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"the invitation's content can't be decoded: {error}.", hint=_HINT) from error


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_CHECKSUM_BYTES]
