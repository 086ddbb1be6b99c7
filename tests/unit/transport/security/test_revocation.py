"""The list of evicted members: signed, only newer ones count, kept on the disk, and it ends open connections."""

from __future__ import annotations

import gc
import stat
from pathlib import Path

import pytest

from fusionai.primitives.errors import StorageError, TrustError
from fusionai.primitives.ids import PeerId
from fusionai.transport.security.revocation import REVOCATIONS_FILE, RevocationList, RevokedPeers, sign_revocations
from harness.credentials import CertifiedPool

A, B = PeerId("a" * 52), PeerId("b" * 52)


class Line:
    """An open connection."""

    ended = False

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def pool(tmp_path: Path) -> CertifiedPool:
    return CertifiedPool(tmp_path / "pool")


def signed(pool: CertifiedPool, version: int, *peers: PeerId) -> bytes:
    return sign_revocations(RevocationList(version, peers), pool.authority.key)


def test_a_list_counts_at_once_and_ends_what_is_open(pool: CertifiedPool) -> None:
    known, evicted, other = RevokedPeers(), Line(), Line()
    known.watch(A, evicted.end)
    known.watch(B, other.end)
    known.check(A)
    known.take(signed(pool, 1, A), pool.authority.public_key)
    assert (evicted.ended, other.ended) == (True, False)
    assert (A in known, B in known, known.version) == (True, False, 1)
    with pytest.raises(TrustError, match="aaaaaaaa, which was evicted from it"):
        known.check(A)
    known.check(B)


def test_connections_that_are_gone_are_not_kept(pool: CertifiedPool) -> None:
    known = RevokedPeers()
    for _ in range(100):
        known.watch(A, Line().end)
    gc.collect()
    assert not known._open
    known.take(signed(pool, 1, A), pool.authority.public_key)


def test_only_newer_lists_of_the_authority_count(pool: CertifiedPool, tmp_path: Path) -> None:
    known, key = RevokedPeers(), pool.authority.public_key
    known.take(signed(pool, 5, A), key)
    for older in (signed(pool, 4), signed(pool, 5, B)):
        known.take(older, key)
        assert (A in known, B in known, known.version) == (True, False, 5)
    stranger = CertifiedPool(tmp_path / "other")
    with pytest.raises(TrustError, match="expected a list of evicted members signed by this pool's authority"):
        known.take(signed(stranger, 9), key)
    forged = bytearray(signed(pool, 9, B))
    forged[-1] ^= 1
    with pytest.raises(TrustError):
        known.take(bytes(forged), key)
    with pytest.raises(TrustError, match="bytes"):
        known.take(bytes(10**6), key)
    assert known.version == 5


def test_it_is_kept_for_the_next_start(pool: CertifiedPool, tmp_path: Path) -> None:
    key = pool.authority.public_key
    first = RevokedPeers()
    first.keep_at(tmp_path, key)
    first.take(signed(pool, 3, A), key)
    path = tmp_path / REVOCATIONS_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    second = RevokedPeers()
    second.keep_at(tmp_path, key)
    assert (A in second, second.version) == (True, 3)
    path.write_bytes(b"x" * 100)
    first.take(signed(pool, 4, A, B), key)
    third = RevokedPeers()
    third.keep_at(tmp_path, key)
    assert third.version == 4, "a damaged list is replaced"
    path.write_bytes(b"x" * 100)
    with pytest.raises(StorageError, match=r"revoked\.list: expected a list") as damaged:
        RevokedPeers().keep_at(tmp_path, key)
    assert damaged.value.hint is not None
    assert "Delete the file" in damaged.value.hint


def test_a_newer_list_of_another_process_is_neither_overwritten_nor_ignored(
    pool: CertifiedPool, tmp_path: Path
) -> None:
    key = pool.authority.public_key
    one, other = RevokedPeers(), RevokedPeers()
    for process in (one, other):
        process.keep_at(tmp_path, key)
    one.take(signed(pool, 9, A, B), key)
    other.take(signed(pool, 5, A), key)
    assert (other.version, B in other) == (9, True)
    third = RevokedPeers()
    third.keep_at(tmp_path, key)
    assert third.version == 9


def test_a_list_that_can_not_be_written_counts_all_the_same(
    pool: CertifiedPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, line = RevokedPeers(), Line()
    known.keep_at(tmp_path, pool.authority.public_key)
    known.watch(A, line.end)

    def full(path: Path, data: bytes) -> None:
        raise StorageError("the disk is full.")

    monkeypatch.setattr("fusionai.transport.security.revocation.write_private", full)
    known.take(signed(pool, 1, A), pool.authority.public_key)
    assert (line.ended, A in known) == (True, True)
