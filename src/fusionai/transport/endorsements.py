"""Endorsements: "I trust this member's key", signed by a signing key that people keep, not by the pool's authority.

After Tailnet Lock: the broker certifies whoever comes with an invitation, and could certify a key of its own; what it
can't do is sign with a key that the job owner trusts. It only carries these statements. Decides their fields, their
one spelling as bytes, and what must hold for one to be believed. Time and trusted keys are arguments.

Neighbours: `circle` keeps the trusted keys, a peer's profile carries its endorsements, `placements` says who has which
stage.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from fusionai.primitives.errors import TrustError, UsageError
from fusionai.primitives.ids import PEER_ID_LENGTH, PeerId, short
from fusionai.transport.authority import CLOCK_SKEW_S
from fusionai.transport.identity import parse_private_pem, peer_of, private_pem, public_bytes, public_key_of
from fusionai.transport.private_files import create_private, read_private
from fusionai.transport.signed import SIGNATURE_BYTES, content_of, signed

SIGNING_KEY_FILE: Final = "trust.pem"
MAX_ENDORSEMENT_BYTES: Final = 512
_DOMAIN: Final = b"fusionai endorsement 1\x00"
_KEY_PREFIX: Final = "signing-"
_LINE_PREFIX: Final = "endorsement-1:"
MAX_LINE_LENGTH: Final = len(_LINE_PREFIX) + 4 * MAX_ENDORSEMENT_BYTES // 3 + 4

Seconds = Annotated[int, Meta(ge=0, le=10**12)]


class Endorsement(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`signer` is a public key of 32 bytes, `peer` the member's id. `purpose`: what the member may do. Whole seconds
    since 1970. `serial` tells endorsements apart."""

    version: Literal[1]
    signer: Annotated[bytes, Meta(min_length=32, max_length=32)]
    peer: Annotated[str, Meta(min_length=PEER_ID_LENGTH, max_length=PEER_ID_LENGTH)]
    purpose: Literal["lend"]
    name: Annotated[str, Meta(max_length=64)]
    not_before_s: Seconds
    not_after_s: Seconds
    serial: Annotated[bytes, Meta(min_length=16, max_length=16)]


_DECODER: Final = msgspec.msgpack.Decoder(Endorsement)


def endorse(
    key: Ed25519PrivateKey, peer: PeerId, *, name: str, now_wall_s: float, lifetime_s: int, serial: bytes
) -> bytes:
    """The signed statement. Raises `TrustError` for what is no peer id or a lifetime that is none."""
    public_key_of(peer)
    if lifetime_s <= 0:
        raise TrustError(f"expected an endorsement to hold for at least a second, got {lifetime_s} s.")
    statement = Endorsement(
        version=1,
        signer=public_bytes(key.public_key()),
        peer=peer,
        purpose="lend",
        name=name[:64],
        not_before_s=int(now_wall_s),
        not_after_s=int(now_wall_s) + lifetime_s,
        serial=serial,
    )
    return signed(msgspec.msgpack.encode(statement), _DOMAIN, key)


def verify_endorsement(
    data: bytes, signers: Collection[bytes], *, peer: PeerId | None, now_wall_s: float
) -> Endorsement:
    """The statement, if one of `signers` (32 raw bytes each) signed it, it is in date and about `peer`.

    Raises `TrustError` saying what failed."""
    statement = read_endorsement(data)
    if statement.signer not in signers:
        raise TrustError(f"its endorsement is signed by {key_text(statement.signer)}, which is not a key trusted here.")
    content_of(
        data,
        _DOMAIN,
        statement.signer,
        what="endorsement",
        by=f"by {key_text(statement.signer)}",
        max_bytes=MAX_ENDORSEMENT_BYTES,
    )
    if peer is not None and statement.peer != peer:
        raise TrustError(f"it shows the endorsement of another key, {short(PeerId(statement.peer))}.")
    if now_wall_s < statement.not_before_s - CLOCK_SKEW_S:
        raise TrustError("its endorsement is not valid yet; check this machine's clock.")
    if now_wall_s >= statement.not_after_s:
        raise TrustError(f"its endorsement expired {(now_wall_s - statement.not_after_s) / 86_400:.0f} days ago.")
    return statement


def read_endorsement(data: bytes) -> Endorsement:
    """What it says, whoever signed it: proves nothing. Raises `TrustError` for what is no endorsement, or one that is
    spelt in another way than this module spells it."""
    if not SIGNATURE_BYTES < len(data) <= MAX_ENDORSEMENT_BYTES:
        raise TrustError(
            f"expected an endorsement of {SIGNATURE_BYTES + 1} to {MAX_ENDORSEMENT_BYTES} bytes, got {len(data)}."
        )
    content = data[SIGNATURE_BYTES:]
    try:
        statement = _DECODER.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TrustError(f"expected an endorsement of version 1, got another content: {error}.") from error
    if msgspec.msgpack.encode(statement) != content:
        raise TrustError("expected an endorsement in its one spelling, got another.")
    public_key_of(statement.peer)
    return statement


def key_text(public_key: bytes) -> str:
    """How people write a signing key: never to be taken for a peer's id."""
    return _KEY_PREFIX + peer_of(public_key)


def parse_key(text: str) -> bytes:
    """The 32 bytes. Raises `UsageError` for anything but a signing key."""
    try:
        if not text.startswith(_KEY_PREFIX):
            raise TrustError("")
        return public_key_of(text[len(_KEY_PREFIX) :])
    except TrustError as error:
        raise UsageError(
            f"expected a signing key ({_KEY_PREFIX} and {PEER_ID_LENGTH} characters), got {text[:80]!r}.",
            hint="`fusion trust key` prints a machine's own.",
        ) from error


def line_of(data: bytes) -> str:
    """An endorsement as one line of text, to hand over by any channel: it is no secret."""
    return _LINE_PREFIX + base64.urlsafe_b64encode(data).decode().rstrip("=")


def parse_line(line: str) -> bytes:
    """Raises `UsageError` for what is no endorsement."""
    text = line.strip()
    try:
        if len(text) > MAX_LINE_LENGTH or not text.startswith(_LINE_PREFIX):
            raise ValueError
        encoded = text[len(_LINE_PREFIX) :]
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        read_endorsement(data)
    except (ValueError, binascii.Error, TrustError) as error:
        raise UsageError(
            f"expected a line that begins with {_LINE_PREFIX}, got {text[:40]!r}.",
            hint="`fusion trust sign` prints it; copy the whole line.",
        ) from error
    return data


def signing_key(home: Path, *, make: bool) -> Ed25519PrivateKey | None:
    """This machine's signing key, in `home/trust.pem` (mode 0600); where there is none, one is made if `make`.

    Raises `TrustError` when the file is open to others or no key, `StorageError` when it can't be kept."""
    path = home / SIGNING_KEY_FILE
    data = read_private(path)
    if data is None and make:
        create_private(path, private_pem(Ed25519PrivateKey.generate()))
        # Read back: another process may have been first.
        data = read_private(path) or b""
    return None if data is None else parse_private_pem(data, path)
