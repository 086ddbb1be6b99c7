"""The commit journal, which makes a step official. Ensures that every step is there once, in order and unchanged.

It holds the driver's durable state of the recovery protocol: incarnation, adopted plan, commit records; the results
of evaluations, which may end a job; and which machines ran the steps, for the pool's ledger. Each change is on the disk
when the call returns (SQLite, write-ahead log, synchronous=FULL). The hash of each commit and evaluation covers the row
before it. Records are kept for the job's whole life, because a replay may need any of them since the newest complete
checkpoint. Only the steps of a faulty peer are removed, with their evaluations (recovery rule 26).

The driver appends before it sends a commit; `checkpoint` holds the state on which the records are replayed.
"""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec

from fusionai.coordination.training.evaluations import Evaluation
from fusionai.primitives.errors import StorageError
from fusionai.storage.atomic import JobLock, storage_errors
from fusionai.wire.messages import CommitRecord

_LAYOUT: Final = 3
"""Version of the database schema. Older versions only lack tables."""
_ROOT_HASH: Final = hashlib.sha256(b"fusionai.commits/1").digest()
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS commits (step INTEGER PRIMARY KEY, record BLOB NOT NULL, hash BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS evaluations (step INTEGER PRIMARY KEY, record BLOB NOT NULL, hash BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS work (step INTEGER NOT NULL, record BLOB NOT NULL, hash BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS driver (
    one INTEGER PRIMARY KEY CHECK (one = 1), incarnation INTEGER NOT NULL,
    plan_version INTEGER, plan BLOB, hash BLOB NOT NULL
);
"""
_Row = TypeVar("_Row")
_EVALUATION: Final = msgspec.msgpack.Decoder(Evaluation)


class _Written(CommitRecord, frozen=True, forbid_unknown_fields=False, kw_only=True):
    """A record as an earlier version may have written it, with fields that are no more."""


_RECORD: Final = msgspec.msgpack.Decoder(_Written)


class RunBegun(msgspec.Struct, frozen=True, tag="run"):
    """The journal's run has this name, drawn at its first start."""

    name: str


class StagePlace(msgspec.Struct, frozen=True, array_like=True):
    """A stage, blocks `first` to `below` - 1 of one copy of the pipeline, and the peer that runs it."""

    peer: str
    first: int
    below: int
    replica: int = 0


class StepPlaces(msgspec.Struct, frozen=True, tag="places"):
    """From `step` on, the stages were in these places."""

    step: int
    places: tuple[StagePlace, ...]


class DisputedSteps(msgspec.Struct, frozen=True, tag="disputed"):
    """These peers contradict each other about steps `first` to `below` - 1."""

    first: int
    below: int
    peers: tuple[str, ...]


JournalledWork = RunBegun | StepPlaces | DisputedSteps
_WORK: Final[msgspec.msgpack.Decoder[JournalledWork]] = msgspec.msgpack.Decoder(JournalledWork)


class AdoptedPlan(msgspec.Struct, frozen=True):
    """The plan in force. `plan` is JSON of the caller."""

    version: int
    plan: bytes


class CommitJournal:
    """Holds the job's lock from construction to `close`. Thread-safe; every change blocks on the disk.

    `last`: the newest commit, None before the first. `evaluations`: all of them, in order. `incarnation`: the driver's,
    0 before its first start. `plan`: the plan in force, None before the first. `work`: which peers ran the steps, and
    which steps are disputed, in the order of writing."""

    def __init__(self, path: Path) -> None:
        """Open or create the journal and check every row. Raises `StorageError` if it is in use, damaged or of a newer
        layout."""
        self._path = path
        self._mutex = threading.Lock()
        self._lock = JobLock(path.with_name(path.name + ".lock"))
        try:
            with storage_errors(path), self._sqlite_errors():
                self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
                try:
                    self._prepare()
                    self.last, self._last_hash = self._checked()
                    self.evaluations, self._evaluations_hash = self._checked_evaluations()
                    self.incarnation, self.plan = self._checked_driver()
                    self.work = self._checked_work()
                except BaseException:
                    self._database.close()
                    raise
        except BaseException:
            self._lock.release()
            raise

    @property
    def committed(self) -> int:
        """Number of journalled commits: steps 0 to `committed - 1` are official."""
        return 0 if self.last is None else self.last.step + 1

    @property
    def run(self) -> str:
        """Name of the run; empty before the driver's first start."""
        return next((one.name for one in self.work if isinstance(one, RunBegun)), "")

    def start_incarnation(self) -> int:
        """Increment the driver's incarnation, durably; at the first one name the run. Call at each driver start, before
        the first attach."""
        if not self.run:
            with self._transaction():
                self._add_work(-1, RunBegun(secrets.token_hex(8)))
        self._write_driver(self.incarnation + 1, self.plan)
        return self.incarnation

    def adopt_plan(self, version: int, plan: bytes) -> None:
        """Put a plan in force. The same plan again changes nothing. Raises `StorageError` for an older version and for
        another plan under the same version, because plans are immutable."""
        present = self.plan
        if present is not None:
            if version == present.version and plan == present.plan:
                return
            if version <= present.version:
                raise StorageError(
                    f"{self._path}: plan version {version} can't follow version {present.version}: versions only grow "
                    "and a plan never changes."
                )
        self._write_driver(self.incarnation, AdoptedPlan(version, plan))

    def append(self, record: CommitRecord, places: tuple[StagePlace, ...] = ()) -> None:
        """Make `record.step` official, run in these places (empty: not known). Raises `StorageError`, and writes
        nothing, unless it is the next step."""
        expected = self.committed
        if record.step < expected:
            raise StorageError(f"{self._path}: step {record.step} is committed already; the next is {expected}.")
        if record.step > expected:
            raise StorageError(f"{self._path}: step {record.step} can't be committed before step {expected}.")
        content = msgspec.msgpack.encode(record)
        digest = _chained(self._last_hash, content)
        with self._transaction():
            self._database.execute("INSERT INTO commits VALUES (?, ?, ?)", (record.step, content, digest))
            known = next((one.places for one in reversed(self.work) if isinstance(one, StepPlaces)), ())
            if places and places != known:
                self._add_work(record.step, StepPlaces(record.step, places))
        self.last, self._last_hash = record, digest

    def dispute(self, first: int, below: int, peers: tuple[str, ...]) -> None:
        """Note that these peers contradict each other about committed steps."""
        with self._transaction():
            self._add_work(below - 1, DisputedSteps(first, below, peers))

    def _add_work(self, step: int, record: JournalledWork) -> None:
        content = msgspec.msgpack.encode(record)
        self._database.execute("INSERT INTO work VALUES (?, ?, ?)", (step, content, _chained(_ROOT_HASH, content)))
        self.work = (*self.work, record)

    def take_back(self, step: int) -> None:
        """Remove the commits from `step` on, because the results they were made of are wrong. Evaluations of their
        states are removed too. The next commit is `step` again."""
        with self._transaction():
            self._database.execute("DELETE FROM commits WHERE step >= ?", (step,))
            self._database.execute("DELETE FROM evaluations WHERE step > ?", (step,))
            self._database.execute("DELETE FROM work WHERE step >= ?", (step,))
        with self._mutex, self._sqlite_errors():
            self.last, self._last_hash = self._checked()
            self.evaluations, self._evaluations_hash = self._checked_evaluations()
            self.work = self._checked_work()

    def records(self, from_step: int = 0) -> Iterator[CommitRecord]:
        """Yield the commits from this step on, in order."""
        with self._mutex, self._sqlite_errors():
            rows = self._database.execute(
                "SELECT record FROM commits WHERE step >= ? ORDER BY step", (from_step,)
            ).fetchall()
        return (_record(content) for (content,) in rows)

    def append_evaluation(self, evaluation: Evaluation) -> Evaluation:
        """Store an evaluation and return the one kept for its step, which is the first that came. An evaluation of a
        state that was removed meanwhile is not stored. Raises `StorageError` for a step before the last one's."""
        known = next((one for one in self.evaluations if one.step == evaluation.step), None)
        if known is not None:
            return known
        if self.evaluations and evaluation.step < self.evaluations[-1].step:
            raise StorageError(
                f"{self._path}: step {evaluation.step} can't be evaluated after step {self.evaluations[-1].step}."
            )
        content = msgspec.msgpack.encode(evaluation)
        digest = _chained(self._evaluations_hash, content)
        with self._transaction():
            kept = self._database.execute(
                "INSERT INTO evaluations SELECT ?, ?, ? WHERE (SELECT COUNT(*) FROM commits) >= ?",
                (evaluation.step, content, digest, evaluation.step),
            ).rowcount
        if kept:
            self.evaluations, self._evaluations_hash = (*self.evaluations, evaluation), digest
        return evaluation

    def close(self) -> None:
        """Close the database and release the lock. Idempotent."""
        self._database.close()
        self._lock.release()

    def __enter__(self) -> CommitJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self) -> None:
        run = self._database.execute
        run("PRAGMA journal_mode=WAL")
        run("PRAGMA synchronous=FULL")
        (layout,) = run("PRAGMA user_version").fetchone()
        if layout not in range(_LAYOUT + 1):
            raise StorageError(
                f"{self._path}: expected at most layout {_LAYOUT}, got {layout}.",
                hint="A newer version of FusionAI wrote it: update this machine.",
            )
        if layout < _LAYOUT:  # older layouts only lack tables
            self._database.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version={_LAYOUT}; COMMIT;")

    def _checked(self) -> tuple[CommitRecord | None, bytes]:
        """Return the last record and its hash, after checking the whole chain."""
        last: CommitRecord | None = None
        digest = _ROOT_HASH
        for step, record, chained in self._chain("commits", "commit", _record):
            if record.step != step:
                raise self._damaged(f"the commit of step {step} says step {record.step}")
            last, digest = record, chained
        return last, digest

    def _checked_evaluations(self) -> tuple[tuple[Evaluation, ...], bytes]:
        """Return all evaluations and the last hash, after checking the whole chain."""
        found: list[Evaluation] = []
        digest = _ROOT_HASH
        for _, evaluation, chained in self._chain("evaluations", "evaluation", _EVALUATION.decode):
            found.append(evaluation)
            digest = chained
        return tuple(found), digest

    def _chain(
        self, table: Literal["commits", "evaluations"], noun: str, decode: Callable[[bytes], _Row]
    ) -> Iterator[tuple[int, _Row, bytes]]:
        """Yield (step, content, hash) of each row, after checking its hash, which covers the rows before it."""
        digest = _ROOT_HASH
        rows = self._database.execute(f"SELECT step, record, hash FROM {table} ORDER BY step")
        for expected, (step, content, stored) in enumerate(rows):
            if table == "commits" and step != expected:
                raise self._damaged(f"the commit of step {expected} is missing")
            digest = _chained(digest, content)
            if stored != digest:
                raise self._damaged(f"the {noun} of step {step} does not match its hash")
            try:
                decoded = decode(content)
            except msgspec.DecodeError as problem:
                raise self._damaged(f"the {noun} of step {step} can't be decoded ({problem})") from None
            yield step, decoded, digest

    def _checked_work(self) -> tuple[JournalledWork, ...]:
        found: list[JournalledWork] = []
        for step, content, stored in self._database.execute("SELECT step, record, hash FROM work ORDER BY rowid"):
            if stored != _chained(_ROOT_HASH, content):
                raise self._damaged(f"the places of step {step} do not match their hash")
            found.append(_WORK.decode(content))
        return tuple(found)

    def _checked_driver(self) -> tuple[int, AdoptedPlan | None]:
        row = self._database.execute("SELECT incarnation, plan_version, plan, hash FROM driver").fetchone()
        if row is None:
            return 0, None
        incarnation, version, content, stored = row
        plan = None if version is None else AdoptedPlan(version, content)
        if stored != _driver_hash(incarnation, plan):
            raise self._damaged("the incarnation or plan does not match its hash")
        return incarnation, plan

    def _write_driver(self, incarnation: int, plan: AdoptedPlan | None) -> None:
        version, content = (None, None) if plan is None else (plan.version, plan.plan)
        with self._transaction():
            self._database.execute(
                "INSERT OR REPLACE INTO driver VALUES (1, ?, ?, ?, ?)",
                (incarnation, version, content, _driver_hash(incarnation, plan)),
            )
        self.incarnation, self.plan = incarnation, plan

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """A transaction that is on the disk when the block ends, or has no effect."""
        with self._mutex, self._sqlite_errors():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                # SQLite has already rolled back after some errors, such as a full disk.
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    @contextmanager
    def _sqlite_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError:
            raise
        except sqlite3.Error as problem:
            code = getattr(problem, "sqlite_errorcode", None)
            if code is not None and code & 0xFF == sqlite3.SQLITE_FULL:
                raise StorageError(
                    f"no space left on the disk of {self._path}.",
                    hint="Free some space and start again: every committed step is safe.",
                ) from problem
            if code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise self._damaged(str(problem)) from problem
            raise StorageError(f"{self._path}: {problem}.") from problem

    def _damaged(self, what: str) -> StorageError:
        return StorageError(
            f"{self._path} is damaged: {what}.", hint="Start the job in a new directory from its last checkpoint."
        )


def _record(content: bytes) -> CommitRecord:
    """Raises `msgspec.DecodeError`."""
    return CommitRecord(**msgspec.structs.asdict(_RECORD.decode(content)))


def read_commits(path: Path) -> tuple[CommitRecord, ...]:
    """Read the commits on the disk without writing, even while another process holds the journal and appends to it.
    Raises `StorageError` if it can't be read."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            rows = database.execute("SELECT record FROM commits ORDER BY step").fetchall()
    except sqlite3.Error as problem:
        raise StorageError(f"{path} can't be read: {problem}.") from problem
    return tuple(_record(content) for (content,) in rows)


def _chained(previous: bytes, content: bytes) -> bytes:
    return hashlib.sha256(previous + content).digest()


def _driver_hash(incarnation: int, plan: AdoptedPlan | None) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode((incarnation, plan))).digest()
