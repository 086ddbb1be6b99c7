"""The journal's first copy: an SQLite database, its schema, and how a damaged one is read.

With a write-ahead log and synchronous=FULL a transaction is on disk when its commit returns. The database is locked for
one process as long as it is open. It stores its *term*: each start takes a new one, and rows of an older term are
refused. `history` decides which rows are true; `journal` writes both copies and repairs one from the other.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from fusionai.broker.history import Base, Copy, PoolHistory, Row
from fusionai.primitives.errors import StorageError, UsageError
from fusionai.storage.atomic import sync_directory

_Kind = TypeVar("_Kind", "Head", Base, Row)
FORMAT: Final = 2
_FIRST_FORMAT: Final = 1
"""Format without a base: its first row is the pool's first fact."""
_SMALLEST_BYTES: Final = 512
_BASE_TABLE: Final = """CREATE TABLE base (one INTEGER PRIMARY KEY CHECK (one = 1), sequence INTEGER NOT NULL,
    chain BLOB NOT NULL, state BLOB NOT NULL, seal BLOB NOT NULL) STRICT"""
_SCHEMA: Final = (
    """CREATE TABLE journal (sequence INTEGER PRIMARY KEY, term INTEGER NOT NULL, fact BLOB NOT NULL,
    chain BLOB NOT NULL) STRICT""",
    """CREATE TABLE head (one INTEGER PRIMARY KEY CHECK (one = 1), format INTEGER NOT NULL, pool TEXT NOT NULL,
    term INTEGER NOT NULL, sequence INTEGER NOT NULL, chain BLOB NOT NULL) STRICT""",
    _BASE_TABLE,
)
_TABLES: Final = {"journal", "head", "base"}
_ROWS: Final = "SELECT sequence, term, fact, chain FROM journal ORDER BY sequence"
_UNREADABLE: Final = (sqlite3.DatabaseError, UnicodeDecodeError)
"""Errors of a damaged file. UnicodeDecodeError: the message of SQLite quotes bytes that are not text."""
_NOT_DAMAGE: Final = (
    "SQLITE_BUSY",
    "SQLITE_LOCKED",
    "SQLITE_FULL",
    "SQLITE_CANTOPEN",
    "SQLITE_PERM",
    "SQLITE_AUTH",
    "SQLITE_READONLY",
    "SQLITE_NOMEM",
)


class Head(msgspec.Struct, frozen=True, array_like=True):
    format: int
    pool: str
    term: int
    sequence: int
    chain: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCopy(Copy):
    head: Head | None = None
    damaged: str = ""
    """Description of the damage; empty: none that shows without the history."""
    foreign: bool = False
    """The file is an intact database, but not a journal."""


class JournalDatabase:
    """The open, locked database. `open_table` creates it for a file that was read without damage."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self.connection = connection

    def head(self) -> Head:
        found = _head(self.connection)
        if found is None:
            raise StorageError(f"{self.path} is damaged: its head is missing.")
        return found

    def read(self) -> TableCopy:
        """Return everything that can be read."""
        return _read(self.connection)

    def insert(self, rows: Sequence[Row]) -> None:
        self.connection.executemany(
            "INSERT INTO journal VALUES (?, ?, ?, ?)", [msgspec.structs.astuple(row) for row in rows]
        )
        self.connection.execute("UPDATE head SET sequence = ?, chain = ?", (rows[-1].sequence, rows[-1].chain))

    def rebase(self, base: Base) -> None:
        """Start the history at `base` and delete the rows before it."""
        self.connection.execute("INSERT OR REPLACE INTO base VALUES (1, ?, ?, ?, ?)", msgspec.structs.astuple(base))
        self.connection.execute("DELETE FROM journal WHERE sequence <= ?", (base.sequence,))

    def set_term(self, term: int) -> None:
        self.connection.execute("UPDATE head SET term = ?", (term,))

    @contextmanager
    def transaction(self) -> Generator[None, None, None]:
        """Run the block in a transaction: committed at its end, rolled back on an error."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.connection.execute("COMMIT")
        except BaseException:
            # SQLite has rolled back by itself on some errors (a full disk).
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise

    def close(self) -> None:
        self.connection.close()


def open_table(path: Path) -> JournalDatabase:
    connection = sqlite3.connect(path, timeout=0.2, isolation_level=None)
    try:
        # First, so that SQLite needs no shared-memory file and no other process can open the database.
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        with JournalDatabase(path, connection).transaction():
            pass
    except BaseException:
        connection.close()
        raise
    return JournalDatabase(path, connection)


def read_table(path: Path) -> TableCopy:
    """Return everything that can be read from the file. Raises `sqlite3.Error` for errors other than damage (a
    lock)."""
    if not path.exists():
        return TableCopy(present=False)
    # SQLite takes a file shorter than its header for a new database and would overwrite it.
    if path.stat().st_size < _SMALLEST_BYTES:
        return TableCopy(damaged="it is cut off")
    try:
        table = open_table(path)
    except _UNREADABLE as error:
        return TableCopy(damaged=_damage(error))
    try:
        return table.read()
    finally:
        table.close()


def write_table(path: Path, pool: str, history: PoolHistory, term: int) -> None:
    """Write the database anew. An old one is kept beside it as `.damaged` until the next repair."""
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    os.close(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    connection = sqlite3.connect(fresh, isolation_level=None)
    try:
        connection.execute("PRAGMA synchronous=FULL")
        table = JournalDatabase(fresh, connection)
        with table.transaction():
            for statement in _SCHEMA:
                connection.execute(statement)
            head = (FORMAT, pool, term, history.base.sequence, history.base.chain)
            connection.execute("INSERT INTO head VALUES (1, ?, ?, ?, ?, ?)", head)
            table.rebase(history.base)
            if history.rows:
                table.insert(history.rows)
    finally:
        connection.close()
    # The log of the old database must never meet the new one: both go before the new one gets its name.
    for old in (path, _wal(path), path.with_name(path.name + "-shm")):
        with suppress(FileNotFoundError):
            os.replace(old, old.with_name(f"{old.name}.damaged"))
    sync_directory(path.parent)
    os.replace(fresh, path)
    sync_directory(path.parent)


def upgrade_table(table: JournalDatabase, base: Base) -> None:
    """Convert a database of the first format to the present one."""
    with table.transaction():
        if table.head().format == _FIRST_FORMAT:
            table.connection.execute(_BASE_TABLE)
            table.rebase(base)
            table.connection.execute("UPDATE head SET format = ?", (FORMAT,))


def is_consistent(reading: TableCopy) -> bool:
    """Return whether the row numbers of head, base and rows fit together."""
    head = reading.head
    if head is None or not knows_format(head) or len(reading.bases) != (head.format == FORMAT):
        return False
    first = reading.bases[0].sequence if reading.bases else 0
    return head.sequence - first == len(reading.rows) and all(first < row <= head.sequence for row in reading.rows)


def knows_format(head: Head) -> bool:
    return head.format in (_FIRST_FORMAT, FORMAT)


@contextmanager
def table_errors(path: Path, hint: str) -> Generator[None, None, None]:
    """Convert errors of SQLite and the file system to `FusionError`s with hints."""
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
            raise disk_full(path) from error
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_FORMAT")):
            raise StorageError(f"{path} is damaged ({error}).", hint=hint) from error
        raise StorageError(f"could not use {path}: {error}.", hint="Check that it may be written.") from error
    except OSError as error:
        raise StorageError(f"could not use {path}: {error.strerror}.", hint="Check that it may be written.") from error


def disk_full(path: Path) -> StorageError:
    return StorageError(
        f"the disk is full: {path} can't grow; what was asked has not been done.",
        hint="Free some space and ask again.",
    )


def _read(connection: sqlite3.Connection) -> TableCopy:
    problem = ""
    head: Head | None = None
    bases: tuple[Base, ...] = ()
    rows: dict[int, Row] = {}
    try:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables & _TABLES:
            return TableCopy(foreign=bool(tables), damaged="" if tables else "it is empty")
        checked = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        problem = "" if checked == "ok" else str(checked)
        head = _head(connection)
        bases = _bases(connection) if "base" in tables else ()
    except _UNREADABLE as error:
        problem = _damage(error)
    # Read from both ends, to get the rows behind a damaged page too.
    for order in ("ASC", "DESC"):
        try:
            for found in connection.execute(f"{_ROWS} {order}"):
                if (row := _typed(found, Row)) is not None:
                    rows[row.sequence] = row
            break
        except _UNREADABLE as error:
            problem = _damage(error)
    if head is None:
        problem = problem or "its head is missing"
    return TableCopy(bases=bases, rows=rows, newest=_newest(head, bases, rows), head=head, damaged=problem)


def _newest(head: Head | None, bases: Sequence[Base], rows: dict[int, Row]) -> int:
    """Return the last row that the file had. Pages have no checksums, so a number counts only if a second confirms
    it."""
    if head is None:
        return max((sequence for sequence in rows if sequence - 1 in rows), default=0)
    return min(head.sequence, max([*rows, *(base.sequence for base in bases)], default=0))


def _head(connection: sqlite3.Connection) -> Head | None:
    return _typed(connection.execute("SELECT format, pool, term, sequence, chain FROM head").fetchone(), Head)


def _bases(connection: sqlite3.Connection) -> tuple[Base, ...]:
    found = connection.execute("SELECT sequence, chain, state, seal FROM base")
    return tuple(base for row in found if (base := _typed(row, Base)) is not None)


def _typed(row: object, kind: type[_Kind]) -> _Kind | None:
    """Return the row as a record, None if its values have other types: those of a damaged page may have any."""
    try:
        return msgspec.convert(row, kind)
    except msgspec.ValidationError:
        return None


def _damage(error: Exception) -> str:
    """Return a description of the damage. Raises the error again if the file is not its cause."""
    if getattr(error, "sqlite_errorname", "").startswith(_NOT_DAMAGE):
        raise error
    return str(error)


def _wal(path: Path) -> Path:
    return path.with_name(path.name + "-wal")
