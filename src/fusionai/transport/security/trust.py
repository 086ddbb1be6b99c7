"""The trust list of this machine, and endorsements: "I trust this member's key", signed by a signing key.

`home/trust.json`, which only its owner may read or write, says which signing keys the owner believes and which members
it has endorsed or revoked. Trust fails closed: without the file, or if it can't be read or breaks its schema, no member
is trusted. `client` plans with trusted members alone if a job demands it, `broker` can admit trusted members only,
`cli` edits the file."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from fusionai.primitives.errors import FusionError, StorageError, TrustError, UsageError
from fusionai.primitives.ids import PEER_ID_LENGTH, PeerId, short
from fusionai.transport.security.certificates import CLOCK_SKEW_S
from fusionai.transport.security.identity import (
    load_key,
    peer_of,
    public_bytes,
    public_key_of,
    read_private_json,
    write_private_json,
)
from fusionai.transport.security.signed import StatementKind

SIGNING_KEY_FILE: Final = "trust.pem"
MAX_ENDORSEMENT_BYTES: Final = 512
_KEY_PREFIX: Final = "signing-"
_TEXT_PREFIX: Final = "endorsement-1:"
MAX_TEXT_LENGTH: Final = len(_TEXT_PREFIX) + 4 * MAX_ENDORSEMENT_BYTES // 3 + 4

Seconds = Annotated[int, Meta(ge=0, le=10**12)]


class Endorsement(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Endorsement of one member's key. `signer` is a public key of 32 bytes, `peer` the member's id, `purpose` what the
    member may do. Times are whole seconds since 1970. `serial` makes each endorsement unique."""

    version: Literal[1]
    signer: Annotated[bytes, Meta(min_length=32, max_length=32)]
    peer: Annotated[str, Meta(min_length=PEER_ID_LENGTH, max_length=PEER_ID_LENGTH)]
    purpose: Literal["lend"]
    name: Annotated[str, Meta(max_length=64)]
    not_before_s: Seconds
    not_after_s: Seconds
    serial: Annotated[bytes, Meta(min_length=16, max_length=16)]


_ENDORSEMENT: Final = StatementKind(
    "endorsement", Endorsement, b"fusionai endorsement 1\x00", MAX_ENDORSEMENT_BYTES, canonical=True
)


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
    return _ENDORSEMENT.sign(statement, key)


def verify_endorsement(
    data: bytes, signers: Collection[bytes], *, peer: PeerId | None, now_wall_s: float
) -> Endorsement:
    """Return the endorsement if one of `signers` (32 raw bytes each) signed it, it is valid now and it names `peer`.
    Raises `TrustError` saying which check failed."""
    statement = read_endorsement(data)
    if statement.signer not in signers:
        raise TrustError(f"its endorsement is signed by {key_text(statement.signer)}, which is not a key trusted here.")
    _ENDORSEMENT.verify(data, statement.signer, by=f"by {key_text(statement.signer)}")
    if peer is not None and statement.peer != peer:
        raise TrustError(f"the endorsement it shows is for another key, {short(PeerId(statement.peer))}.")
    if now_wall_s < statement.not_before_s - CLOCK_SKEW_S:
        raise TrustError("its endorsement is not valid yet; check this machine's clock.")
    if now_wall_s >= statement.not_after_s:
        raise TrustError(f"its endorsement expired {(now_wall_s - statement.not_after_s) / 86_400:.0f} days ago.")
    return statement


def read_endorsement(data: bytes) -> Endorsement:
    """Decode an endorsement without checking its signature. Raises `TrustError` for anything that is no endorsement in
    its canonical encoding."""
    statement = _ENDORSEMENT.read(data)
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


def format_endorsement(data: bytes) -> str:
    """Return the endorsement as one line of text. It is not secret and may be sent over any channel."""
    return _TEXT_PREFIX + base64.urlsafe_b64encode(data).decode().rstrip("=")


def parse_endorsement(line: str) -> bytes:
    """Inverse of `format_endorsement`. Raises `UsageError` if the line holds no endorsement."""
    text = line.strip()
    try:
        if len(text) > MAX_TEXT_LENGTH or not text.startswith(_TEXT_PREFIX):
            raise ValueError
        encoded = text[len(_TEXT_PREFIX) :]
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        read_endorsement(data)
    except (ValueError, binascii.Error, TrustError) as error:
        raise UsageError(
            f"expected a line that begins with {_TEXT_PREFIX}, got {text[:40]!r}.",
            hint="`fusion trust sign` prints the line; copy all of it.",
        ) from error
    return data


def signing_key(home: Path, *, make: bool) -> Ed25519PrivateKey | None:
    """Return this machine's signing key from `home/trust.pem` (mode 0600), created there first if `make`; None without
    one. Raises `TrustError` if others may read the file or it holds no key, `StorageError` if it can't be written."""
    path = home / SIGNING_KEY_FILE
    return load_key(path) if make or path.exists() else None


TRUST_FILE: Final = "trust.json"
CARRIED_FILE: Final = "endorsements.json"
MAX_CARRIED: Final = 16
"""Upper limit on the endorsements that one member carries."""
MAX_KEPT: Final = 4096
"""Upper limit on the signers, the endorsements and the revocations in a trust list, each. Chosen."""
MAX_FILE_BYTES: Final = 8 * 2**20

Statement = Annotated[bytes, Meta(max_length=MAX_ENDORSEMENT_BYTES)]


class Signer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A signing key whose endorsements count on this machine."""

    key: Annotated[str, Meta(max_length=128)]
    name: Annotated[str, Meta(max_length=64)] = ""


class Revoked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A revoked member's key: endorsements of it no longer count."""

    peer: Annotated[str, Meta(min_length=PEER_ID_LENGTH, max_length=PEER_ID_LENGTH)]
    at_s: Annotated[int, Meta(ge=0, le=10**12)]


class TrustList(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The trust list. `endorsements` are those kept on this machine; members also show their own."""

    schema: Literal["fusionai.trust/1"] = "fusionai.trust/1"
    signers: Annotated[tuple[Signer, ...], Meta(max_length=MAX_KEPT)] = ()
    endorsements: Annotated[tuple[Statement, ...], Meta(max_length=MAX_KEPT)] = ()
    revoked: Annotated[tuple[Revoked, ...], Meta(max_length=MAX_KEPT)] = ()

    @property
    def keys(self) -> frozenset[bytes]:
        return frozenset(parse_key(signer.key) for signer in self.signers)

    def name_of(self, key: bytes) -> str:
        text = key_text(key)
        return next((signer.name for signer in self.signers if signer.key == text and signer.name), text)

    def endorsement_of(self, peer: PeerId, carried: Sequence[bytes], now_wall_s: float) -> Endorsement:
        """Return the first valid endorsement among those kept here and those the member shows (`carried`). Raises
        `TrustError` with the reason if `peer` is not trusted."""
        if any(one.peer == peer for one in self.revoked):
            raise TrustError("its key is revoked in this machine's trust file.")
        keys = self.keys
        if not keys:
            raise TrustError("this machine trusts no signing key.", hint="Run `fusion trust key` to create its own.")
        kept = [data for data in self.endorsements if read_endorsement(data).peer == peer]
        reasons: list[str] = []
        for data in (*kept, *carried[:MAX_CARRIED]):
            try:
                return verify_endorsement(data, keys, peer=peer, now_wall_s=now_wall_s)
            except TrustError as error:
                reasons.append(error.message)
        why = reasons[0] if reasons else "no key that this machine trusts has endorsed it."
        raise TrustError(why, hint=f"Run `fusion trust sign {peer}` on a machine whose signing key is trusted.")


def load_trust_list(path: Path) -> TrustList:
    """Read the trust list. Raises `TrustError` if the file is missing or readable by others, `StorageError` if it is
    broken."""
    hint = "Restore it from a backup, or delete it and create a new trust list; until then no key is trusted."
    trust_list = read_private_json(path, TrustList, what="a trust file", hint=hint, limit_bytes=MAX_FILE_BYTES)
    if trust_list is None:
        raise TrustError(
            f"this machine has no trust list yet (there is no {path}).",
            hint="Create a trust list with `fusion trust key` and `fusion trust sign`.",
        )
    try:
        _ = trust_list.keys, [read_endorsement(one) for one in trust_list.endorsements]
    except FusionError as error:
        raise StorageError(f"expected a trust file in {path}, got something else: {error}.", hint=hint) from error
    return trust_list


def save_trust_list(path: Path, trust_list: TrustList) -> None:
    """Write the trust list. Raises `StorageError`."""
    write_private_json(path, trust_list)


@dataclass(slots=True)
class TrustListFile:
    """Rereads the trust list when its file has changed, so that a revocation counts at once. `wall_s`: the clock."""

    path: Path
    wall_s: Callable[[], float]
    _seen: tuple[int, int, int, int] | None = field(default=None, init=False)
    _list: TrustList | None = field(default=None, init=False)

    def check(self, peer: PeerId, carried: Sequence[bytes]) -> Endorsement:
        """Return the endorsement of `peer`. Raises `TrustError` if it is not trusted or the file can't be read."""
        try:
            trust_list = self._read()
        except TrustError:
            raise
        except FusionError as error:
            raise TrustError(error.message, hint=error.hint) from error
        return trust_list.endorsement_of(peer, carried, self.wall_s())

    def _read(self) -> TrustList:
        try:
            status = self.path.stat()
        except OSError:
            self._list = None
            return load_trust_list(self.path)  # raises the error that describes the problem
        seen = (status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode)
        if self._list is None or seen != self._seen:
            self._list = None
            self._list, self._seen = load_trust_list(self.path), seen
        return self._list


class _Carried(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: Literal["fusionai.endorsements/1"]
    endorsements: Annotated[tuple[Statement, ...], Meta(max_length=MAX_CARRIED)]


def carried_endorsements(home: Path) -> tuple[bytes, ...]:
    """Return the endorsements that this machine shows when it lends. Raises `StorageError` for a broken file,
    `TrustError` for one that others may read."""
    hint = "Delete the file and add them again with `fusion trust carry`."
    kept = read_private_json(home / CARRIED_FILE, _Carried, what="this machine's endorsements", hint=hint)
    return () if kept is None else kept.endorsements


def carry(home: Path, data: bytes, peer: PeerId) -> None:
    """Store an endorsement of this machine's own key, newest first. Raises `TrustError` for another key's."""
    statement = read_endorsement(data)
    if statement.peer != peer:
        raise TrustError(
            f"this endorsement is for {short(PeerId(statement.peer))}, this machine lends as {short(peer)}.",
            hint=f"Ask for an endorsement of {peer} instead.",
        )
    known = [one for one in carried_endorsements(home) if one != data]
    kept = _Carried("fusionai.endorsements/1", (data, *known)[:MAX_CARRIED])
    write_private_json(home / CARRIED_FILE, kept)
