"""Endorsements: "I trust this member's key", signed by a signing key that a person keeps, not by the pool's authority.

Modelled on Tailnet Lock. The broker certifies every machine that comes with an invitation, and could certify a key of
its own. It can't sign with a key that the job owner trusts; it only carries endorsements. Decides their fields, their
canonical encoding, and what a valid one must satisfy. Time and trusted keys are arguments.

`circle` keeps the trusted keys, a peer's profile carries its endorsements, `placements` says which peer holds which
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
    """Endorsement of one member's key.

    `signer` is a public key of 32 bytes, `peer` the member's id, `purpose` what the member may do. Times are whole
    seconds since 1970. `serial` makes each endorsement unique.
    """

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
    """Return the signed statement. Raises `TrustError` if `peer` is no peer id or `lifetime_s` is not positive."""
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
    """Return the endorsement if one of `signers` (32 raw bytes each) signed it, it is valid now and it names `peer`.

    Raises `TrustError` saying which check failed.
    """
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
        raise TrustError(f"the endorsement it shows is for another key, {short(PeerId(statement.peer))}.")
    if now_wall_s < statement.not_before_s - CLOCK_SKEW_S:
        raise TrustError("its endorsement is not valid yet; check this machine's clock.")
    if now_wall_s >= statement.not_after_s:
        raise TrustError(f"its endorsement expired {(now_wall_s - statement.not_after_s) / 86_400:.0f} days ago.")
    return statement


def read_endorsement(data: bytes) -> Endorsement:
    """Decode an endorsement without checking its signature.

    Raises `TrustError` for anything that is no endorsement in its canonical encoding.
    """
    if not SIGNATURE_BYTES < len(data) <= MAX_ENDORSEMENT_BYTES:
        raise TrustError(
            f"expected an endorsement of {SIGNATURE_BYTES + 1} to {MAX_ENDORSEMENT_BYTES} bytes, got {len(data)}."
        )
    content = data[SIGNATURE_BYTES:]
    try:
        statement = _DECODER.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TrustError(
            f"expected an endorsement of version 1, got content that can't be decoded: {error}."
        ) from error
    if msgspec.msgpack.encode(statement) != content:
        raise TrustError("expected an endorsement in its canonical encoding, got another encoding.")
    public_key_of(statement.peer)
    return statement


def key_text(public_key: bytes) -> str:
    """Text form of a signing key; its prefix distinguishes it from a peer id."""
    return _KEY_PREFIX + peer_of(public_key)


def parse_key(text: str) -> bytes:
    """Return the 32 bytes of a signing key. Raises `UsageError` for any other text."""
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
    """Return the endorsement as one line of text. It is not secret and may be sent over any channel."""
    return _LINE_PREFIX + base64.urlsafe_b64encode(data).decode().rstrip("=")


def parse_line(line: str) -> bytes:
    """Inverse of `line_of`. Raises `UsageError` if the line holds no endorsement."""
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
            hint="`fusion trust sign` prints the line; copy all of it.",
        ) from error
    return data


def signing_key(home: Path, *, make: bool) -> Ed25519PrivateKey | None:
    """Return this machine's signing key from `home/trust.pem` (mode 0600), created there first if `make`; None without
    one.

    Raises `TrustError` if others may read the file or it holds no key, `StorageError` if it can't be written.
    """
    path = home / SIGNING_KEY_FILE
    data = read_private(path)
    if data is None and make:
        create_private(path, private_pem(Ed25519PrivateKey.generate()))
        # Read back, because another process may have created the file first.
        data = read_private(path) or b""
    return None if data is None else parse_private_pem(data, path)
