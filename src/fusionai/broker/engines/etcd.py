"""A pool's journal in etcd: keys under one prefix, changed by transactions that compare the head.

    head                     the head, with the pool's term
    lease                    session of the broker that decides; it ends with that broker's lease
    base                     the history's base
    rows/<first>             rows of one append
    parts/<digest>/<n>       parts of a base or of rows that do not fit into one request

An append is one transaction: if `head` has the expected value, the new head and the rows are put together. Content over
`INLINE_BYTES` is put in parts first. No part counts before a transaction refers to it, and a part proves itself by the
digest in its key. Parts that nothing refers to are deleted after a compaction, by transactions that compare the head
too: another broker's new parts can't be among them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

import msgspec

from fusionai.broker.engines.etcd_client import (
    AnswerTooLarge,
    EtcdAddress,
    EtcdClient,
    EtcdFull,
    KeyValue,
    prefix_end,
    text,
)
from fusionai.broker.engines.interface import (
    MAX_APPEND_BYTES,
    MAX_STATE_BYTES,
    EngineCopy,
    EngineHead,
    EngineLease,
    identity_of,
)
from fusionai.broker.history import Base, PoolHistory, Row
from fusionai.primitives.errors import StorageError

_Kind = TypeVar("_Kind")
INLINE_BYTES: Final = 512 * 2**10
"""Most bytes of a value. etcd takes requests of 1.5 MiB."""
_SLACK_BYTES: Final = 2**20
"""What encoding adds to an append or a state."""
_PAGE_KEYS: Final = 512
_ROWS_OF_A_KEY: Final = 200
"""Rows that a copied journal has in one key."""


class _Stored(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Content of a key: in it, or in parts with its digest."""

    size: int
    digest: bytes
    inline: bytes = b""


class EtcdEngine:
    """The keys under one prefix of an etcd cluster."""

    def __init__(self, address: EtcdAddress, prefix: str, shown: str) -> None:
        self._shown = shown
        self._prefix = prefix.encode() + b"/"
        self._client = EtcdClient(address, shown)
        self._lease = 0
        """This session's lease in etcd."""

    @property
    def name(self) -> str:
        return self._shown

    @property
    def restoring(self) -> str:
        return (
            "Restore the cluster from a snapshot; or name another prefix in the URL: the pool is empty then and "
            "everybody joins anew."
        )

    def connect(self) -> None:
        self._client.connect(self._key(b"head"))

    def head(self) -> EngineHead | None:
        found = self._value(b"head")
        if found is None:
            return None
        if (head := _decoded(found.value, EngineHead)) is None:
            raise StorageError(f"{self._shown} is damaged: its head is not as it was written.", hint=self.restoring)
        return head

    def lease(self) -> EngineLease | None:
        found = self._value(b"lease")
        if found is None:
            return None
        # A key that another program put has no lease, and would never end.
        lasts_s = self._client.lasts_s(found.lease) if found.lease else float("inf")
        return EngineLease(found.value.decode(errors="replace"), lasts_s)

    def create(self, head: EngineHead, history: PoolHistory) -> bool:
        if self._value(b"head") is not None:
            return False
        rows = self._key(b"rows/")
        # What a copy left that was broken off. Without a head nothing here counts.
        self._client.transact([self._absent(b"head")], [_delete(rows, prefix_end(rows))])
        for at in range(0, len(history.rows), _ROWS_OF_A_KEY):
            batch = history.rows[at : at + _ROWS_OF_A_KEY]
            self._client.put(self._rows_key(batch[0].sequence), self._stored(msgspec.msgpack.encode(batch)))
        base = self._stored(msgspec.msgpack.encode(history.base))
        done = [self._put(b"head", msgspec.msgpack.encode(head)), self._put(b"base", base)]
        return self._replace(head, [self._absent(b"head")], done)

    def take(self, old: EngineHead, new: EngineHead, lease_s: float) -> bool:
        held = self._value(b"lease")
        if held is not None and identity_of(held.value.decode(errors="replace")) != identity_of(
            old.owner if lease_s == 0 else new.owner
        ):
            return False
        unchanged = self._absent(b"lease") if held is None else self._equals(b"lease", held.value)
        head = self._put(b"head", msgspec.msgpack.encode(new))
        if lease_s == 0:
            return self._replace(new, [self._is(old), unchanged], [head, _delete(self._key(b"lease"))])
        lease = self._client.grant(lease_s)
        taken = self._replace(
            new, [self._is(old), unchanged], [head, self._put(b"lease", new.owner.encode(), lease=lease)]
        )
        if taken:
            self._lease = lease
        return taken

    def append(self, old: EngineHead, new: EngineHead, rows: Sequence[Row]) -> bool:
        stored = self._stored(msgspec.msgpack.encode(list(rows)))
        done = [
            self._put(b"head", msgspec.msgpack.encode(new)),
            _put(self._rows_key(rows[0].sequence), stored),
        ]
        return self._replace(new, [self._is(old)], done)

    def rebase(self, head: EngineHead, base: Base) -> bool:
        stored = self._stored(msgspec.msgpack.encode(base))
        rows = _delete(self._key(b"rows/"), self._rows_key(base.sequence + 1))
        if not self._client.transact([self._is(head)], [self._put(b"base", stored), rows]):
            return False
        kept = msgspec.msgpack.decode(stored, type=_Stored)
        self._delete_parts(head, keep=kept.digest.hex().encode())
        return True

    def read(self) -> EngineCopy:
        head, damaged = self.head(), ""
        found = self._value(b"base")
        base = None if found is None else self._content(found, MAX_STATE_BYTES, Base)
        if base is None:
            damaged = "its base is missing or not as it was written"
        rows: dict[int, Row] = {}
        first = self._key(b"rows/")
        for one in self._all(first, prefix_end(first)):
            batch = self._content(one, MAX_APPEND_BYTES, list[Row])
            if batch is None:
                damaged = damaged or f"{one.key.decode(errors='replace')} is not as it was written"
            else:
                rows |= {row.sequence: row for row in batch}
        newest = 0 if head is None else head.sequence
        return EngineCopy(bases=() if base is None else (base,), rows=rows, newest=newest, head=head, damaged=damaged)

    def renew(self, head: EngineHead, lease_s: float) -> bool:
        if self._lease and self._client.keep_alive(self._lease):
            return self._client.transact([self._is(head)], [])
        lease = self._client.grant(lease_s)
        if not self._client.transact([self._is(head)], [self._put(b"lease", head.owner.encode(), lease=lease)]):
            return False
        self._lease = lease
        return True

    def release(self, head: EngineHead) -> None:
        self._client.transact([self._is(head)], [_delete(self._key(b"lease"))])
        if self._lease:
            self._client.revoke(self._lease)
            self._lease = 0

    def close(self) -> None:
        self._client.close()

    def _replace(self, new: EngineHead, compare: list[dict[str, object]], done: list[dict[str, Any]]) -> bool:
        """Run a transaction that replaces the head. If etcd answers that it is full, the head shows whether the
        transaction was done."""
        try:
            return self._client.transact(compare, done)
        except EtcdFull:
            if self.head() == new:
                return True
            raise

    def _delete_parts(self, head: EngineHead, keep: bytes) -> None:
        """Delete the parts that nothing refers to, unless the head has changed."""
        first = self._key(b"parts/")
        keys, _ = self._client.range(first, prefix_end(first), limit=_PAGE_KEYS, keys_only=True)
        digests = {one.key.removeprefix(first).partition(b"/")[0] for one in keys} - {keep}
        for digest in sorted(digests):
            parts = first + digest + b"/"
            self._client.transact([self._is(head)], [_delete(parts, prefix_end(parts))])

    def _stored(self, data: bytes) -> bytes:
        """Return the value of a key for `data`, whose parts have been put if it is large."""
        if len(data) > MAX_STATE_BYTES:
            raise StorageError(f"expected at most {MAX_STATE_BYTES} bytes for {self._shown}, got {len(data)}.")
        digest = hashlib.sha256(data).digest()
        if len(data) <= INLINE_BYTES:
            return msgspec.msgpack.encode(_Stored(len(data), digest, data))
        for number, at in enumerate(range(0, len(data), INLINE_BYTES)):
            self._client.put(self._part_key(digest, number), data[at : at + INLINE_BYTES])
        return msgspec.msgpack.encode(_Stored(len(data), digest))

    def _content(self, found: KeyValue, limit_bytes: int, kind: type[_Kind]) -> _Kind | None:
        """Return what a key refers to; None if it is not as it was written. The size is checked first."""
        stored = _decoded(found.value, _Stored)
        if stored is None or not 0 <= stored.size <= limit_bytes + _SLACK_BYTES:
            return None
        data = stored.inline
        if not data:
            first = self._key(b"parts/") + stored.digest.hex().encode() + b"/"
            data = bytearray()
            for part in self._all(first, prefix_end(first)):
                data += part.value
                if len(data) > stored.size:
                    return None
        if hashlib.sha256(data).digest() != stored.digest:
            return None
        return _decoded(bytes(data), kind)

    def _all(self, first: bytes, end: bytes) -> Iterator[KeyValue]:
        """Yield the keys of a range in pages, which become smaller where an answer is too large."""
        limit = _PAGE_KEYS
        more = True
        while more:
            try:
                keys, more = self._client.range(first, end, limit=limit)
            except AnswerTooLarge:
                if limit == 1:
                    raise
                limit = max(1, limit // 8)
                continue
            if not keys:
                return
            yield from keys
            first = keys[-1].key + b"\0"

    def _value(self, name: bytes) -> KeyValue | None:
        keys, _ = self._client.range(self._key(name))
        return keys[0] if keys else None

    def _key(self, name: bytes) -> bytes:
        return self._prefix + name

    def _rows_key(self, first: int) -> bytes:
        return self._key(b"rows/%020d" % first)

    def _part_key(self, digest: bytes, number: int) -> bytes:
        return self._key(b"parts/%s/%08d" % (digest.hex().encode(), number))

    def _put(self, name: bytes, value: bytes, *, lease: int = 0) -> dict[str, Any]:
        return _put(self._key(name), value, lease=lease)

    def _is(self, head: EngineHead) -> dict[str, object]:
        return self._equals(b"head", msgspec.msgpack.encode(head))

    def _equals(self, name: bytes, value: bytes) -> dict[str, object]:
        return {"key": text(self._key(name)), "target": "VALUE", "result": "EQUAL", "value": text(value)}

    def _absent(self, name: bytes) -> dict[str, object]:
        return {"key": text(self._key(name)), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}


def _put(key: bytes, value: bytes, *, lease: int = 0) -> dict[str, Any]:
    named = {"key": text(key), "value": text(value)}
    return {"request_put": {**named, "lease": str(lease)} if lease else named}


def _delete(first: bytes, end: bytes = b"") -> dict[str, Any]:
    named = {"key": text(first)}
    return {"request_delete_range": {**named, "range_end": text(end)} if end else named}


def _decoded(data: bytes, kind: type[_Kind]) -> _Kind | None:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
