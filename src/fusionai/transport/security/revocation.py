"""The list of evicted members: signed by the pool's authority, kept by every member, checked at every door.

Every handshake and every open connection asks `RevokedPeers`, also while the broker is away, because the list is on
each member's disk. An older list never replaces a newer one. The broker signs (`broker.service`), members fetch the
list after a heartbeat or get it as a notice (`peer.registration`, `client.pool.session`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final
from weakref import WeakMethod

import msgspec
from msgspec import Meta

from fusionai.primitives.errors import StorageError, TrustError
from fusionai.primitives.ids import PEER_ID_LENGTH, PeerId, short
from fusionai.transport.security.identity import read_private, write_private
from fusionai.transport.security.signed import StatementKind

log = logging.getLogger(__name__)

REVOCATIONS_FILE: Final = "revoked.list"
MAX_LIST_BYTES: Final = 65_536
_Peer = Annotated[str, Meta(min_length=PEER_ID_LENGTH, max_length=PEER_ID_LENGTH)]


class RevocationList(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All evicted keys. `version` grows with every eviction."""

    version: Annotated[int, Meta(ge=1, le=2**40)]
    peers: Annotated[tuple[_Peer, ...], Meta(max_length=1_000)]


_LIST: Final = StatementKind("list of evicted members", RevocationList, b"fusionai revocations 1\x00", MAX_LIST_BYTES)
sign_revocations: Final = _LIST.sign


class RevokedPeers:
    """The newest list that this process knows, and the open connections that it applies to. Used from the event loop
    only."""

    def __init__(self) -> None:
        self.version = 0
        self._peers: frozenset[PeerId] = frozenset()
        self._path: Path | None = None
        self._open: dict[WeakMethod[Callable[[], None]], PeerId] = {}

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._peers

    def keep_at(self, home: Path, authority_key: bytes) -> None:
        """Read the list that `home` has, and keep newer ones there. Raises `StorageError` for a damaged list."""
        self._path = home / REVOCATIONS_FILE
        if (kept := self._kept(authority_key)) is not None:
            self._adopt(kept)

    def take(self, signed: bytes, authority_key: bytes) -> None:
        """Adopt a list that is newer than the known one, keep it on the disk, and end the open connections with
        members on it. One that can't be kept counts in this process all the same. Raises `TrustError` if the pool's
        authority did not sign it."""
        found, kept = _LIST.verify(signed, authority_key), None
        try:
            kept = self._kept(authority_key)
        except StorageError as error:
            log.warning("the kept list of evicted members is replaced: %s", error)
        # Another process of this home may have kept a newer one.
        newest = found if kept is None or kept.version < found.version else kept
        if newest.version <= self.version:
            return
        self._adopt(newest)
        for end, peer in list(self._open.items()):
            if peer in self._peers and (ending := end()) is not None:
                log.warning("the connection with %s ends: it was evicted from the pool", short(peer))
                ending()
        if self._path is not None and newest is found:
            try:
                write_private(self._path, signed)
            except StorageError as error:
                log.warning("the list of evicted members could not be kept: %s", error)

    def watch(self, peer: PeerId, end: Callable[[], None]) -> None:
        """Call the bound method `end` when `peer` is evicted, as long as its object lives."""
        self._open[WeakMethod(end, lambda gone: self._open.pop(gone, None))] = peer

    def check(self, peer: PeerId) -> None:
        """Raise `TrustError` for an evicted member."""
        if peer in self._peers:
            raise TrustError(f"expected a member of the pool, got {short(peer)}, which was evicted from it.")

    def _kept(self, authority_key: bytes) -> RevocationList | None:
        kept = None if self._path is None else read_private(self._path)
        if kept is None:
            return None
        try:
            return _LIST.verify(kept, authority_key)
        except TrustError as error:
            raise StorageError(
                f"{self._path}: {error.message}",
                hint="Delete the file while the broker runs: this machine fetches the list again.",
            ) from error

    def _adopt(self, found: RevocationList) -> None:
        self.version = found.version
        self._peers = frozenset(map(PeerId, found.peers))
