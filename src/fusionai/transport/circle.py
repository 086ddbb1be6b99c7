"""The trust list of this machine: which signing keys its owner believes, and which members it has endorsed or revoked.

Kept in `home/trust.json`, which only its owner may read or write. Decides which members are trusted, and fails closed:
without a file, or with one that can't be read or breaks its schema, no member is. Asks nothing over the network.

`endorsements` defines the statements; `client` plans with trusted members alone if a job demands it, `broker` can
admit trusted members only, `cli` edits the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from fusionai.primitives.errors import FusionError, StorageError, TrustError
from fusionai.primitives.ids import PEER_ID_LENGTH, PeerId, short
from fusionai.transport.endorsements import (
    MAX_ENDORSEMENT_BYTES,
    Endorsement,
    key_text,
    parse_key,
    read_endorsement,
    verify_endorsement,
)
from fusionai.transport.private_files import read_private, write_private

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


class Circle(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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
        """Return the first valid endorsement among those kept here and those the member shows (`carried`).

        Raises `TrustError` with the reason if `peer` is not trusted.
        """
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


def load_circle(path: Path) -> Circle:
    """Read the trust list.

    Raises `TrustError` if the file is missing or readable by others, `StorageError` if it is broken.
    """
    data = read_private(path, limit_bytes=MAX_FILE_BYTES)
    if data is None:
        raise TrustError(
            f"this machine has no trust list yet (there is no {path}).",
            hint="Create a trust list with `fusion trust key` and `fusion trust sign`.",
        )
    try:
        circle = msgspec.json.decode(data, type=Circle)
        _ = circle.keys, [read_endorsement(one) for one in circle.endorsements]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, FusionError) as error:
        raise StorageError(
            f"expected a trust file in {path}, got something else: {error}.",
            hint="Restore it from a backup, or delete it and create a new trust list; until then no key is trusted.",
        ) from error
    return circle


def keep_circle(path: Path, circle: Circle) -> None:
    """Write the trust list. Raises `StorageError`."""
    write_private(path, msgspec.json.format(msgspec.json.encode(circle)))


@dataclass(slots=True)
class CircleFile:
    """Rereads the trust list when its file has changed, so that a revocation counts at once. `wall_s`: the clock."""

    path: Path
    wall_s: Callable[[], float]
    _seen: tuple[int, int, int, int] | None = field(default=None, init=False)
    _circle: Circle | None = field(default=None, init=False)

    def check(self, peer: PeerId, carried: Sequence[bytes]) -> Endorsement:
        """Return the endorsement of `peer`. Raises `TrustError` if it is not trusted or the file can't be read."""
        try:
            circle = self._read()
        except TrustError:
            raise
        except FusionError as error:
            raise TrustError(error.message, hint=error.hint) from error
        return circle.endorsement_of(peer, carried, self.wall_s())

    def _read(self) -> Circle:
        try:
            status = self.path.stat()
        except OSError:
            self._circle = None
            return load_circle(self.path)  # raises the error that describes the problem
        seen = (status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode)
        if self._circle is None or seen != self._seen:
            self._circle = None
            self._circle, self._seen = load_circle(self.path), seen
        return self._circle


class _Carried(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: Literal["fusionai.endorsements/1"]
    endorsements: Annotated[tuple[Statement, ...], Meta(max_length=MAX_CARRIED)]


def carried_endorsements(home: Path) -> tuple[bytes, ...]:
    """Return the endorsements that this machine shows when it lends.

    Raises `StorageError` for a broken file, `TrustError` for one that others may read.
    """
    path = home / CARRIED_FILE
    data = read_private(path)
    if data is None:
        return ()
    try:
        return msgspec.json.decode(data, type=_Carried).endorsements
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StorageError(
            f"expected this machine's endorsements in {path}, got something else: {error}.",
            hint="Delete the file and add them again with `fusion trust carry`.",
        ) from error


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
    write_private(home / CARRIED_FILE, msgspec.json.format(msgspec.json.encode(kept)))
