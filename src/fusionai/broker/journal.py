"""The broker's journal on disk: every fact of the pool, in order, in two copies.

    journal.sqlite   a database (`table`)
    journal.mirror   an append-only file (`history`)

`append(expected_sequence, facts)` is all or nothing, and on disk in both copies when it returns; the broker
acknowledges nothing before. The mirror is written first. If the broker is killed in between, the facts in the mirror
count although they were never acknowledged. At each start both copies are read, `history` assembles the history that
they prove, and a copy that lacks part of it is written anew; `healed` reports that. If no complete history can be
assembled, the journal is refused.

Each start takes a new *term*, and rows of an older term are refused, so that two brokers can't write alternately. The
directory is locked for one process. `compact` starts the history anew from the folded pool, so that neither files nor
start-up times grow with the pool's age. This is the embedded journal; `engines` keeps one in a database server instead.
`coordination.broker.events` defines facts, `broker.service` appends them.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from fusionai.broker import history as histories
from fusionai.broker import table as tables
from fusionai.broker.engines.interface import JournalTaken, Remembered
from fusionai.broker.growth import Growth
from fusionai.broker.history import Copy, IncompleteHistory, Mirror, MirrorCopy, PoolHistory
from fusionai.broker.table import Head, JournalDatabase, TableCopy
from fusionai.coordination.broker.events import Fact, decode, encode
from fusionai.primitives.errors import StorageError, UsageError
from fusionai.storage.atomic import JobLock, sync_directory

MOVED_SUFFIX: Final = ".moved"
"""Suffix of the files of a journal whose pool goes on in another engine."""
_LOCK_SUFFIX: Final = ".lock"
_RESTORE: Final = (
    "Restore both journal files from a backup; or move journal.sqlite, its -wal file and journal.mirror away and start "
    "the broker again: the pool is empty then and everybody joins anew."
)
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LOG: Final = logging.getLogger(__name__)


class Journal:
    """An open journal. Not for use by several threads."""

    def __init__(
        self,
        path: Path,
        pool: str,
        lock: JobLock,
        table: JournalDatabase,
        mirror: Mirror,
        history: PoolHistory,
        healed: tuple[str, ...],
    ) -> None:
        self.path = path
        self.pool = pool
        self.healed = healed
        """Human-readable list of repairs made while opening the journal."""
        self._lock = lock
        self._table = table
        self._mirror = mirror
        self._unusable = ""
        self._growth = Growth.after(history)
        with table.transaction():
            self.term = max(table.head().term, history.term) + 1
            table.set_term(self.term)

    @classmethod
    def open(cls, path: Path, pool: str) -> Journal:
        """Open or create, lock, heal, and begin a new term. Raises `UsageError` when another process has it open or it
        is another pool's, `StorageError` when neither copy has all of it or nothing can be written."""
        with _errors(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with ExitStack() as opened:
            lock = lock_for(path)
            opened.callback(lock.release)
            with _errors(path):
                history, healed = _mend(path, pool)
                mirror = Mirror(mirror_path(path))
                opened.callback(mirror.close)
                table = tables.open_table(path)
                opened.callback(table.close)
                tables.upgrade_table(table, history.base)
                journal = cls(path, pool, lock, table, mirror, history, healed)
            opened.pop_all()
            return journal

    def append(self, expected_sequence: int, facts: Sequence[Fact]) -> int:
        """Write `facts` after row `expected_sequence` and return the new last row. On any error nothing is written.
        Raises `JournalTaken` when this broker's term is over, `StorageError` on a full or failing disk."""
        self._check_usable()
        mirrored = False
        try:
            with _errors(self.path), self._table.transaction():
                head = self._table.head()
                if (head.term, head.sequence) != (self.term, expected_sequence):
                    raise JournalTaken(
                        f"expected {self.path} at term {self.term}, row {expected_sequence}, found term {head.term}, "
                        f"row {head.sequence}: another broker has written to it.",
                        hint="Stop this broker; only one may keep a pool.",
                    )
                rows: list[histories.Row] = []
                chain = head.chain
                for sequence, fact in enumerate(facts, start=expected_sequence + 1):
                    data = encode(fact)
                    # A row that can't be decoded would prevent every later start of the broker.
                    decode(data)
                    rows.append(histories.make_row(chain, sequence, self.term, data))
                    chain = rows[-1].chain
                if not rows:
                    return expected_sequence
                self._table.insert(rows)
                self._write_mirror(rows)
                mirrored = True
        except BaseException:
            if mirrored:
                self._undo(self._mirror.take_back)
            raise
        self._growth = self._growth.plus(rows)
        return rows[-1].sequence

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def lapsed(self) -> bool:
        """Files are locked, so that no other broker can keep the pool."""
        return False

    def load(self) -> Remembered:
        """Read and check both copies. Raises `StorageError` naming a bad row or file."""
        kept = self.history()
        return Remembered(kept.sequence, kept.base.state, facts_of(self.name, kept))

    def history(self) -> PoolHistory:
        """Read and check both copies. Raises `StorageError` naming a bad row or file."""
        with _errors(self.path):
            reading = self._table.read()
            mirrored = histories.read_mirror(mirror_path(self.path))
            kept = _whole(self.path, self.pool, reading, reading.damaged)
            other = _whole(mirror_path(self.path), self.pool, mirrored, "frames" if mirrored.damaged else "")
            if not _is_end(kept, self._table.head()) or not _is_end(other, self._table.head()):
                raise StorageError(f"{self.path} and its mirror are damaged: they differ.", hint=_RESTORE)
        return kept

    @property
    def compaction_due(self) -> bool:
        """Whether enough was written since the base that a new base saves more time at start-up than it costs."""
        return self._growth.is_due

    def compact(self, state: bytes) -> None:
        """Start the history anew with `state`, the pool after the last row. An empty history stays unchanged. On
        `StorageError` nothing is lost."""
        self._check_usable()
        with _errors(self.path):
            head = self._table.head()
            if head.term != self.term:
                raise JournalTaken(f"{self.path} is at term {head.term}: another broker has written to it.")
            if head.sequence == 0:
                return
            base = histories.make_base(self.pool, head.sequence, head.chain, state)
            renewed = histories.replace_mirror(mirror_path(self.path), self.pool, PoolHistory(base, ()))
            self._mirror.close()
            self._mirror = renewed
            with self._table.transaction():
                self._table.rebase(base)
        self._growth = Growth.after(PoolHistory(base, ()))

    def postpone_compaction(self) -> None:
        """Make compaction due again after as many further rows or bytes as after a new base."""
        self._growth = self._growth.postponed()

    def retire(self, successor: str) -> None:
        """Close the journal and rename its files, so that no broker goes on with them."""
        self.close()
        _LOG.info("%s goes on in %s", self.path, successor)
        with _errors(self.path):
            for file in (self.path, mirror_path(self.path)):
                file.replace(file.with_name(file.name + MOVED_SUFFIX))
            sync_directory(self.path.parent)

    def close(self) -> None:
        self._table.close()
        self._mirror.close()
        self._lock.release()

    def _write_mirror(self, rows: Sequence[histories.Row]) -> None:
        try:
            self._mirror.append(rows)
        except OSError:
            self._undo(self._mirror.cut_back)
            raise

    def _undo(self, cut: Callable[[], None]) -> None:
        """Remove rows of a failed append from the mirror. If that fails, the journal takes no more rows, because the
        removed ones would come back at the next start."""
        try:
            cut()
        except OSError as error:
            self._unusable = f"{self._mirror.path} can't be cut back after a failed write ({error.strerror})"

    def _check_usable(self) -> None:
        if self._unusable:
            raise StorageError(f"{self._unusable}.", hint="Start the broker again when the disk is in order.")


def mirror_path(path: Path) -> Path:
    return path.with_suffix(histories.MIRROR_SUFFIX)


def _mend(path: Path, pool: str) -> tuple[PoolHistory, tuple[str, ...]]:
    """Read both copies, assemble the history, and write a copy anew that lacks part of it."""
    mirror = mirror_path(path)
    reading, mirrored = tables.read_table(path), histories.read_mirror(mirror)
    _check_belongs(path, pool, reading, mirrored)
    if not reading.present and not mirrored.present:
        history = PoolHistory(histories.origin(pool), ())
        histories.replace_mirror(mirror, pool, history).close()
        tables.write_table(path, pool, history, 0)
        return history, ()
    try:
        history = histories.merge(pool, (reading, mirrored))
    except IncompleteHistory as error:
        raise StorageError(
            f"{path} and {mirror.name} are both damaged: row {error.expected} of {error.newest} is missing or not as "
            f"it was written{f' ({reading.damaged})' if reading.damaged else ''}.",
            hint=_RESTORE,
        ) from error
    table_fault, mirror_fault = _table_fault(pool, reading, mirrored, history), _mirror_fault(pool, mirrored, history)
    # An unfinished frame alone is no damage. Beside a damaged database it may be an acknowledged one that was cut.
    if table_fault and (mirror_fault or mirrored.torn) and not _confirmed(history, reading, mirrored):
        raise StorageError(
            f"neither {path} nor {mirror.name} has all of the journal: the one {table_fault}, the other "
            f"{mirror_fault or 'ends within a frame'}; both are damaged.",
            hint=_RESTORE,
        )
    # The mirror first: the database is moved away only when the other copy is whole.
    if mirror_fault is not None:
        histories.replace_mirror(mirror, pool, history).close()
    if table_fault is not None:
        term = reading.head.term if reading.head is not None else 0
        tables.write_table(path, pool, history, max(term, history.term))
    faults = ((path, table_fault, mirror), (mirror, mirror_fault, path))
    healed = tuple(
        f"{broken.name} {fault}: written anew from "
        f"{'what was left of both' if table_fault and mirror_fault else other.name}, nothing is lost."
        for broken, fault, other in faults
        if fault
    )
    for repair in healed:
        _LOG.warning("%s", repair)
    return history, healed


def _confirmed(history: PoolHistory, reading: TableCopy, mirrored: MirrorCopy) -> bool:
    """Return whether one of two faulty copies confirms the end of the history."""
    head = reading.head
    by_table = head is not None and (head.sequence, head.chain) == (history.sequence, history.chain)
    return by_table or (mirrored.last_row == history.sequence and history.sequence > 0)


def _table_fault(pool: str, reading: TableCopy, mirrored: MirrorCopy, history: PoolHistory) -> str | None:
    """Return the fault of the database. None: intact. Empty: it must be written anew, but that is not reported."""
    if not reading.present:
        # Before the first fact the mirror may have been made and the broker killed.
        return "was missing" if history.sequence else ""
    if reading.damaged:
        return f"was damaged ({reading.damaged})"
    end = _end(pool, reading)
    head = reading.head
    if end is None or head is None or not _is_end(end, head) or head.pool != pool or not tables.is_consistent(reading):
        return "was damaged"
    if reading.bases and reading.bases[0] != end.base:
        return "was damaged"
    if end.sequence == history.sequence:
        return None
    # If a broker is killed between the two writes, only its last append is missing here.
    return "" if end.sequence + 1 == mirrored.last_append and not mirrored.damaged else "was cut off"


def _mirror_fault(pool: str, mirrored: MirrorCopy, history: PoolHistory) -> str | None:
    """Return the fault of the mirror. None: intact. Empty: it must be written anew, but that is not reported."""
    if not mirrored.present:
        return "was missing"
    end = _end(pool, mirrored)
    if mirrored.damaged or end is None:
        return "was damaged"
    if end.sequence < history.sequence:
        return "was cut off"
    return "" if mirrored.torn else None


def _is_end(end: PoolHistory | None, head: Head) -> bool:
    return end is not None and (end.sequence, end.chain) == (head.sequence, head.chain)


def _end(pool: str, copy: Copy) -> PoolHistory | None:
    try:
        return histories.merge(pool, (copy,))
    except IncompleteHistory:
        return None


def _check_belongs(path: Path, pool: str, reading: TableCopy, mirrored: MirrorCopy) -> None:
    """Files of another pool, program or version are left alone, unless the other copy proves that they are damaged."""
    ours = mirrored.pool == pool and mirrored.format == histories.MIRROR_FORMAT and not mirrored.damaged
    if mirrored.format is not None and mirrored.format != histories.MIRROR_FORMAT:
        raise StorageError(
            f"expected mirror format {histories.MIRROR_FORMAT} in {mirror_path(path)}, found {mirrored.format}.",
            hint="Update.",
        )
    head = reading.head
    if ours and (head is None or head.pool == pool or not _is_end(_end(head.pool, reading), head)):
        return
    if reading.foreign:
        raise StorageError(f"{path} is a database, but no broker's journal.", hint="Choose another directory.")
    if head is not None and not tables.knows_format(head):
        raise StorageError(f"expected journal format {tables.FORMAT} in {path}, found {head.format}.", hint="Update.")
    kept = head.pool if head is not None else mirrored.pool
    if kept is not None and kept != pool:
        raise UsageError(
            f"expected the journal of pool {pool!r} in {path}, found that of {kept!r}.",
            hint="Use that pool name, or another directory for the new pool.",
        )


def _whole(path: Path, pool: str, copy: Copy, damage: str) -> PoolHistory:
    try:
        found = histories.merge(pool, (copy,))
    except IncompleteHistory as error:
        raise StorageError(
            f"{path} is damaged: row {error.expected} is missing or not as it was written.", hint=_RESTORE
        ) from error
    if damage:
        raise StorageError(f"{path} is damaged ({damage}).", hint=_RESTORE)
    return found


def facts_of(name: str, history: PoolHistory) -> tuple[Fact, ...]:
    facts: list[Fact] = []
    for row in history.rows:
        try:
            facts.append(decode(row.fact))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StorageError(
                f"{name}: row {row.sequence} is no fact this version knows ({error}).",
                hint="Was it written by a newer version? Update this one.",
            ) from error
    return tuple(facts)


def lock_for(path: Path) -> JobLock:
    """Lock the directory of `path` for one broker. Raises `UsageError` while another one runs on it."""
    try:
        return JobLock(path.with_name(path.name + _LOCK_SUFFIX))
    except StorageError as error:
        if error.__cause__ is not None:
            raise  # the file itself could not be used
        raise UsageError(
            f"another broker is running on {path.parent}.",
            hint="Stop it first, or give this one a directory of its own.",
        ) from error


@contextmanager
def _errors(path: Path) -> Generator[None, None, None]:
    try:
        with tables.table_errors(path, _RESTORE):
            yield
    except StorageError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in _FULL:
            raise tables.disk_full(path) from cause
        raise
