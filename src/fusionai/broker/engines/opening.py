"""Opens the journal that a broker's home names, and moves a journal from one place to another.

    <home>/broker/journal.url    where the journal is, if it is not in files of the home

A home keeps the place of its journal, so that a broker started without a flag can't begin a second truth. For the same
reason a new place must be empty and filled by a move, or have this pool's journal already. A move copies base and rows
unchanged, reads the copy back, compares the hash of its last row, and only then ends the old journal for good.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fusionai.broker import history as histories
from fusionai.broker import table as tables
from fusionai.broker.engines.engine_journal import FORMAT, EngineJournal, proven
from fusionai.broker.engines.interface import AnswerLost, EngineHead, JournalEngine, PoolJournal
from fusionai.broker.engines.locations import EMBEDDED, engine_at
from fusionai.broker.history import PoolHistory
from fusionai.broker.journal import Journal, lock_for, mirror_path
from fusionai.primitives.errors import StorageError, UsageError
from fusionai.primitives.ids import PeerId
from fusionai.storage.atomic import JobLock
from fusionai.transport.security.identity import read_private, write_private

JOURNAL_FILE: Final = "journal.sqlite"
PLACE_FILE: Final = "journal.url"


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalHome:
    """A broker's directory, its pool, and its keys."""

    directory: Path
    pool: str
    identity: Callable[[], PeerId]
    authority_key: Callable[[bool], bytes]
    """Returns the pool's public key, which is made if the argument is true; empty if the home has none."""

    @property
    def file(self) -> Path:
        return self.directory / JOURNAL_FILE


def open_journal(
    home: JournalHome, place: str | None, source: str | None, notice: Callable[[str], None]
) -> PoolJournal:
    """Open the journal at `place` (None: where the home's journal is), after moving it there from `source`. Raises
    `UsageError` for a place that has no journal of this pool while another place has, and as `Journal.open` and
    `EngineJournal.open`."""
    kept = kept_place(home.directory)
    wanted = place or kept or EMBEDDED
    if source is not None and wanted != kept:
        notice(_move(home, source, wanted))
        kept = wanted
    elif source is not None:
        notice("The journal has been moved already; --journal-from has no effect.")
    if wanted == EMBEDDED:
        if kept is not None and kept != EMBEDDED:
            raise UsageError(
                f"the journal of this home is at {engine_at(kept).name}, not in files.",
                hint=f"Leave --journal out, or move it: --journal {EMBEDDED} --journal-from URL.",
            )
        return Journal.open(home.file, home.pool)
    return _open_engine(home, wanted, kept)


def kept_place(directory: Path) -> str | None:
    """Return where the journal of a home is; None if the home does not say so. Raises `TrustError`."""
    kept = read_private(directory / PLACE_FILE)
    return None if kept is None else kept.decode(errors="replace").strip()


def _open_engine(home: JournalHome, url: str, kept: str | None) -> EngineJournal:
    engine = engine_at(url)
    lock = lock_for(home.file)
    try:

        def authority_key(is_new: bool) -> bytes:
            if is_new and (kept is not None or _has_files(home.file)):
                old = home.file if kept is None or kept == EMBEDDED else engine_at(kept).name
                raise UsageError(
                    f"{engine.name} has no journal, and the one of this home is in {old}.",
                    hint="Move it with --journal-from: the URL, or sqlite for the files.",
                )
            return home.authority_key(is_new)

        journal = EngineJournal.open(engine, home.pool, home.identity(), authority_key, lock=lock)
        if url != kept:
            _keep_place(home.directory, url)
        return journal
    except BaseException:
        lock.release()
        raise


def _keep_place(directory: Path, url: str) -> None:
    write_private(directory / PLACE_FILE, url.encode() + b"\n")


def _has_files(file: Path) -> bool:
    """Return whether there is an embedded journal with facts, or one that can't be read."""
    if not file.exists():
        return mirror_path(file).exists()
    head = tables.read_table(file).head
    return head is None or head.sequence > 0


def _move(home: JournalHome, source: str, target: str) -> str:
    """Copy the journal, check the copy, and end the old journal. Returns a sentence about it. If it fails, the old
    journal stays in use."""
    if source == target:
        raise UsageError("expected two different places in --journal and --journal-from.")
    target_name = str(home.file) if target == EMBEDDED else engine_at(target).name
    lock: JobLock | None = None
    if source == EMBEDDED:
        if not home.file.exists():
            raise UsageError(f"there is no journal to move: {home.file} does not exist.")
        old: PoolJournal = Journal.open(home.file, home.pool)
    else:
        lock = lock_for(home.file)
        try:
            old = EngineJournal.open(
                engine_at(source), home.pool, home.identity(), lambda is_new: _existing(home, source, is_new)
            )
        except BaseException:
            lock.release()
            raise
    retired = False
    try:
        history = old.history()
        if target == EMBEDDED:
            _copy_to_files(home, history, old.term)
        else:
            _copy_to_engine(home, engine_at(target), history, old.term)
        _keep_place(home.directory, target)
        old.retire(target_name)
        retired = True
    finally:
        if not retired:
            old.close()
        if lock is not None:
            lock.release()
    return (
        f"Moved {len(history.rows)} rows from {old.name} to {target_name}: both end with row {history.sequence}, hash "
        f"{history.chain.hex()[:16]}."
    )


def _existing(home: JournalHome, source: str, is_new: bool) -> bytes:
    if is_new:
        raise UsageError(f"there is no journal to move: {engine_at(source).name} has none.")
    return home.authority_key(False)


def _copy_to_files(home: JournalHome, history: PoolHistory, term: int) -> None:
    mirror = mirror_path(home.file)
    if home.file.exists() or mirror.exists():
        raise UsageError(f"{home.file} exists.", hint="Move journal.sqlite and journal.mirror away first.")
    try:
        histories.replace_mirror(mirror, home.pool, history).close()
        tables.write_table(home.file, home.pool, history, term)
        for name, copy in ((home.file, tables.read_table(home.file)), (mirror, histories.read_mirror(mirror))):
            _compare(str(name), histories.merge(home.pool, (copy,)), history)
    except BaseException:
        for file in (home.file, mirror):
            file.unlink(missing_ok=True)
        raise


def _copy_to_engine(home: JournalHome, engine: JournalEngine, history: PoolHistory, term: int) -> None:
    authority = home.authority_key(False)
    if not authority:
        raise UsageError(
            f"{home.directory} has no key of the pool.", hint="Copy authority.pem and authority.der there."
        )
    engine.connect()
    try:
        head = EngineHead(FORMAT, home.pool, term, history.sequence, history.chain, "", authority)
        if not engine.create(head, history):
            raise UsageError(
                f"{engine.name} has a journal already.",
                hint="Name an empty schema or prefix in the URL, or delete what is there.",
            )
        _compare(engine.name, proven(engine, head), history)
    except AnswerLost as error:
        raise StorageError(
            f"{error.message} The journal has not been moved.",
            hint=f"Delete what was copied to {engine.name}, and try again.",
        ) from error
    finally:
        engine.close()


def _compare(name: str, copied: PoolHistory, history: PoolHistory) -> None:
    if copied != history:
        raise StorageError(
            f"the copy in {name} is not what was copied: it ends with row {copied.sequence}, the journal with row "
            f"{history.sequence}.",
            hint="The old journal stays in use. Delete the copy.",
        )
