"""The broker's memory on disk: every fact of the pool, in order, in one SQLite file. Decides what counts as written.

`append(expected_sequence, facts)` is all or nothing and on disk (WAL, synchronous=FULL) when it returns; the broker
acknowledges nothing before. Each start takes a new *term*; a row of an older term is refused, so that two brokers can
never write alternately. Each row carries a hash over itself and the row before: a changed, missing or foreign row is
found at the next start. The file is locked for one process.

Never interprets a fact. Neighbours: `coordination.events` spells facts, `broker.service` appends them.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from fusionai.coordination.events import Fact, decode, encode
from fusionai.primitives.errors import StorageError, UsageError

FORMAT: Final = 1
_SMALLEST_BYTES: Final = 512
_SCHEMA: Final = """
CREATE TABLE journal (sequence INTEGER PRIMARY KEY, term INTEGER NOT NULL, fact BLOB NOT NULL, chain BLOB NOT NULL)
    STRICT;
CREATE TABLE head (one INTEGER PRIMARY KEY CHECK (one = 1), format INTEGER NOT NULL, pool TEXT NOT NULL,
    term INTEGER NOT NULL, sequence INTEGER NOT NULL, chain BLOB NOT NULL) STRICT;
"""
_RESTORE: Final = (
    "Restore the file from a backup; or move it and its -wal file away and start the broker again: the pool is empty "
    "then and everybody joins anew."
)


class Superseded(StorageError):
    """Another broker has taken this journal over: this one must stop."""


class Journal:
    """An open journal. Not for use by several threads."""

    def __init__(self, path: Path, pool: str, connection: sqlite3.Connection, term: int) -> None:
        self.path = path
        self.pool = pool
        self.term = term
        self._connection = connection

    @classmethod
    def open(cls, path: Path, pool: str) -> Journal:
        """Open or create, lock, and begin a new term.

        Raises `UsageError` when another process has it open or it is another pool's, `StorageError` when it is damaged
        or can't be written.
        """
        with _errors(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # SQLite gives its -wal file the mode of the file itself.
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            # SQLite takes a file shorter than its header for a new database and would overwrite it.
            if 0 < path.stat().st_size < _SMALLEST_BYTES:
                raise StorageError(f"{path} is damaged: it is cut off.", hint=_RESTORE)
            connection = sqlite3.connect(path, timeout=0.2, isolation_level=None)
        try:
            with _errors(path):
                connection.execute("PRAGMA locking_mode=EXCLUSIVE")
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=FULL")
                term = _begin_term(connection, path, pool)
        except BaseException:
            connection.close()
            raise
        return cls(path, pool, connection, term)

    def append(self, expected_sequence: int, facts: Sequence[Fact]) -> int:
        """Write `facts` after row `expected_sequence`; the new last sequence number. On any error nothing is written.

        Raises `Superseded` when this broker's term is over, `StorageError` on a full or failing disk.
        """
        with _errors(self.path), _transaction(self._connection):
            term, sequence, chain = self._connection.execute("SELECT term, sequence, chain FROM head").fetchone()
            if (term, sequence) != (self.term, expected_sequence):
                raise Superseded(
                    f"expected {self.path} at term {self.term}, row {expected_sequence}, found term {term}, row "
                    f"{sequence}: another broker has written to it.",
                    hint="Stop this broker; only one may keep a pool.",
                )
            for fact in facts:
                sequence += 1
                data = encode(fact)
                # A row that could not be read back would keep the broker from ever starting again.
                decode(data)
                chain = _link(chain, sequence, self.term, data)
                self._connection.execute("INSERT INTO journal VALUES (?, ?, ?, ?)", (sequence, self.term, data, chain))
            self._connection.execute("UPDATE head SET sequence = ?, chain = ?", (sequence, chain))
        return sequence

    def load(self) -> tuple[int, tuple[Fact, ...]]:
        """(last sequence number, all facts in order), every row checked. Raises `StorageError` naming a bad row."""
        facts: list[Fact] = []
        with _errors(self.path):
            last, head = self._connection.execute("SELECT sequence, chain FROM head").fetchone()
            chain = _seed(self.pool)
            rows = self._connection.execute("SELECT sequence, term, fact, chain FROM journal ORDER BY sequence")
            for expected, (sequence, term, data, kept) in enumerate(rows, start=1):
                chain = _link(chain, sequence, term, data)
                if sequence != expected or chain != kept:
                    raise StorageError(
                        f"{self.path} is damaged: row {expected} is missing or not as it was written.", hint=_RESTORE
                    )
                try:
                    facts.append(decode(data))
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise StorageError(
                        f"{self.path}: row {sequence} is no fact this version knows ({error}).",
                        hint="Was it written by a newer version? Update this one.",
                    ) from error
            if (last, head) != (len(facts), chain):
                raise StorageError(
                    f"{self.path} is damaged: expected {last} rows, found {len(facts)} that hang together.",
                    hint=_RESTORE,
                )
        return last, tuple(facts)

    def close(self) -> None:
        self._connection.close()


def _begin_term(connection: sqlite3.Connection, path: Path, pool: str) -> int:
    with _transaction(connection):
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute("INSERT INTO head VALUES (1, ?, ?, 0, 0, ?)", (FORMAT, pool, _seed(pool)))
        elif tables != {"journal", "head"}:
            raise StorageError(f"{path} is a database, but no broker's journal.", hint="Choose another directory.")
        row = connection.execute("SELECT format, pool, term FROM head").fetchone()
        if row is None:
            raise StorageError(f"{path} is damaged: its head is missing.", hint=_RESTORE)
        kept_format, kept_pool, term = row
        if kept_format != FORMAT:
            raise StorageError(f"expected journal format {FORMAT} in {path}, found {kept_format}.", hint="Update.")
        if kept_pool != pool:
            raise UsageError(
                f"expected the journal of pool {pool!r} in {path}, found that of {kept_pool!r}.",
                hint="Use that pool name, or another directory for the new pool.",
            )
        connection.execute("UPDATE head SET term = ?", (term + 1,))
    return term + 1


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Generator[None, None, None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # SQLite has rolled back by itself on some errors (a full disk).
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextmanager
def _errors(path: Path) -> Generator[None, None, None]:
    """SQLite's errors as ours, each with what to do about it."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            raise UsageError(
                f"another broker is running on {path.parent}.",
                hint="Stop it first, or give this one a directory of its own.",
            ) from error
        if name.startswith("SQLITE_FULL"):
            raise StorageError(
                f"the disk is full: {path} can't grow; what was asked has not been done.",
                hint="Free some space and ask again.",
            ) from error
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_FORMAT")):
            raise StorageError(f"{path} is damaged ({error}).", hint=_RESTORE) from error
        raise StorageError(f"could not use {path}: {error}.", hint="Check that it may be written.") from error
    except OSError as error:
        raise StorageError(f"could not use {path}: {error.strerror}.", hint="Check that it may be written.") from error


def _seed(pool: str) -> bytes:
    return hashlib.sha256(b"fusionai journal\0" + pool.encode()).digest()


def _link(chain: bytes, sequence: int, term: int, data: bytes) -> bytes:
    return hashlib.sha256(chain + sequence.to_bytes(8, "little") + term.to_bytes(8, "little") + data).digest()
