"""A pool's journal in an engine: terms, lost answers, outages and damage, the same for every engine.

Rows and bases are those of `broker.history`, so that every row proves itself by its hash, whatever the engine says. A
write compares the engine's head (term, last row, its hash) with what this broker knows, so that of two brokers only one
can write.

When an answer is lost, the write may have been done, or may still be done by a connection that the server has not
noticed to be dead. `recover` therefore begins a new term first, which a late write no longer fits, and then reads
whether the head has the rows. Only then the append counts as written or not. Until the engine answers, the journal is
in an *outage*: everything is refused at once, and `watch` calls `recover` in a thread.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from fusionai.broker import history as histories
from fusionai.broker.engines.interface import (
    MAX_APPEND_BYTES,
    MAX_FACT_BYTES,
    MOVED,
    OPERATION_S,
    AnswerLost,
    EngineHead,
    EngineUnreachable,
    JournalAway,
    JournalEngine,
    JournalHeld,
    JournalInDoubt,
    JournalTaken,
    Remembered,
    identity_of,
)
from fusionai.broker.growth import Growth
from fusionai.broker.history import IncompleteHistory, PoolHistory, Row
from fusionai.broker.journal import facts_of
from fusionai.coordination.broker.events import Fact, decode, encode
from fusionai.primitives.clock import elapsed_s
from fusionai.primitives.errors import FusionError, StorageError, UsageError
from fusionai.primitives.ids import PeerId, short
from fusionai.storage.atomic import JobLock

T = TypeVar("T")
FORMAT: Final = 1
LEASE_S: Final = 6.0
"""Time after which another broker may take over from one that no longer renews its lease, in seconds (chosen: a
takeover within 10 s, and two renewals may fail)."""
RENEW_S: Final = 2.0
INLINE_S: Final = 1.0
"""An operation that failed within this time is resolved at once: the connection was dead, and a new one is made
quickly. The server of one that failed later is slow, and asked by `recover`, so as not to hold up the broker."""
_TRIES: Final = 3
"""Attempts to take a head that changes meanwhile: a late write of this broker may change it once."""
_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Doubt:
    """Heads before and after the append whose answer was lost."""

    before: EngineHead
    after: EngineHead


class EngineJournal:
    """An open journal. `append`, `compact` and `load` are for one thread; `renew` and `recover` may run in another."""

    healed: tuple[str, ...] = ()

    def __init__(
        self,
        engine: JournalEngine,
        owner: str,
        head: EngineHead,
        held_until_s: float,
        *,
        lock: JobLock | None = None,
        now_s: Callable[[], float] = elapsed_s,
    ) -> None:
        self._engine = engine
        self._owner = owner
        self._head = head
        self._lock = lock
        """Lock of the broker's home directory, released with the journal."""
        self._held_until_s = held_until_s
        """When the lease ends, by `now_s` of this machine. It is counted from before the engine was asked."""
        self._now_s = now_s
        self._turn = threading.Lock()
        self._doubt: _Doubt | None = None
        self._growth = Growth.after(PoolHistory(histories.origin(head.pool), ()))
        self.outage = ""
        """Why the engine can't be used now; empty if it can."""
        self.on_outage: Callable[[], object] = lambda: None

    @classmethod
    def open(
        cls,
        engine: JournalEngine,
        pool: str,
        identity: PeerId,
        authority_key: Callable[[bool], bytes],
        *,
        lock: JobLock | None = None,
        now_s: Callable[[], float] = elapsed_s,
    ) -> EngineJournal:
        """Connect, create the journal if there is none, take the lease and begin a new term. `authority_key(is_new)`
        returns the pool's public key. `now_s` is a clock that goes on while the machine sleeps. Raises `JournalHeld`
        while another broker holds the lease, `UsageError` for another pool's journal or a wrong password,
        `StorageError` for an engine that can't be reached or used."""
        owner = f"{identity}/{secrets.token_hex(8)}"
        engine.connect()
        try:
            for _ in range(_TRIES):
                until_s = now_s() + LEASE_S
                with suppress(AnswerLost):
                    if (head := _begun(engine, pool, owner, authority_key)) is not None:
                        return cls(engine, owner, head, until_s, lock=lock, now_s=now_s)
                    continue
                engine.connect()
        except BaseException:
            engine.close()
            raise
        engine.close()
        raise StorageError(
            f"{engine.name} does not answer, or changes while it is opened.", hint="Is another broker starting?"
        )

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def term(self) -> int:
        return self._head.term

    @property
    def lapsed(self) -> bool:
        """Return whether another broker may keep the pool by now, because the lease could not be renewed in time."""
        return self._now_s() > self._held_until_s

    def append(self, expected_sequence: int, facts: Sequence[Fact]) -> int:
        """Write `facts` after row `expected_sequence` and return the new last row. A lost answer is resolved before
        this returns. Raises `JournalTaken` when this broker's term is over, `JournalInDoubt` when the engine can't be
        asked, and any other `StorageError` when nothing was written."""
        self._check_usable()
        if expected_sequence != self._head.sequence:
            raise JournalTaken(f"expected {self.name} at row {expected_sequence}, found row {self._head.sequence}.")
        data = [_encoded(fact) for fact in facts]
        if sum(map(len, data)) > MAX_APPEND_BYTES:
            raise StorageError(f"expected at most {MAX_APPEND_BYTES} bytes in one append, got {sum(map(len, data))}.")
        if not data:
            return expected_sequence
        with self._engine_alone():
            # Twice, because a connection may have died unnoticed since the last append.
            for _ in range(2):
                rows, after = self._rows(data)
                began_s = self._now_s()
                try:
                    if not self._engine.append(self._head, after, rows):
                        raise self._taken()
                    self._head = after
                except (AnswerLost, EngineUnreachable) as lost:
                    self._doubt = _Doubt(self._head, after)
                    if not self._asked(lost, at_once=self._now_s() - began_s < INLINE_S):
                        continue
                self._growth = self._growth.plus(rows)
                return self._head.sequence
        self._lose(AnswerLost(f"{self.name} has ended the connection twice during a write."))
        raise StorageError(f"{self.outage}; what was asked has not been done.", hint="Ask again in a while.")

    def load(self) -> Remembered:
        """Read and check all rows, and renew the lease, because that may take long. Raises `StorageError` naming a bad
        row."""
        kept = self.history()
        self.renew()
        self._growth = Growth.after(kept)
        return Remembered(kept.sequence, kept.base.state, facts_of(self.name, kept))

    def history(self) -> PoolHistory:
        """Read and check all rows. Raises `StorageError` naming a bad row."""
        self._check_usable()
        return self._done(lambda: proven(self._engine, self._head))

    @property
    def compaction_due(self) -> bool:
        """Whether enough was written since the base that a new base saves more time at start-up than it costs."""
        return self._growth.is_due

    def compact(self, state: bytes) -> None:
        """Start the history anew with `state`, the pool after the last row. An empty history stays unchanged. On
        `StorageError` nothing is lost: the journal has the old base with its rows, or the new base."""
        self._check_usable()
        head = self._head
        if head.sequence == 0:
            return
        base = histories.make_base(head.pool, head.sequence, head.chain, state)
        if not self._done(lambda: self._engine.rebase(self._head, base)):
            raise self._taken()
        self._growth = Growth.after(PoolHistory(base, ()))

    def postpone_compaction(self) -> None:
        self._growth = self._growth.postponed()

    def renew(self) -> None:
        """Renew the lease of the deciding broker. Raises `JournalTaken` if another one has taken over, `StorageError`
        during an outage."""
        self._check_usable()
        until_s = self._now_s() + LEASE_S
        if not self._done(lambda: self._engine.renew(self._head, LEASE_S)):
            raise self._taken()
        self._held_until_s = max(until_s, self._held_until_s)

    def recover(self) -> bool | None:
        """Try once to end an outage. Returns whether the append in doubt was written, None if none was in doubt. Raises
        `JournalTaken`, and `StorageError` while the engine can't be used."""
        with self._turn:
            try:
                return self._resolve()
            except JournalTaken:
                raise
            except FusionError as error:
                self.outage = error.message.removesuffix(".")
                raise StorageError(error.message, hint=error.hint) from error

    def retire(self, successor: str) -> None:
        """End this journal for good: no broker opens it again."""
        self._check_usable()

        def end() -> bool:
            ended = msgspec.structs.replace(self._head, term=self._head.term + 1, owner=f"{MOVED}{successor}")
            return self._engine.take(self._head, ended, 0.0)

        if not self._done(end):
            raise self._taken()
        self.close()

    def close(self) -> None:
        with self._turn:
            if not self.outage:
                with suppress(FusionError):
                    self._engine.release(self._head)
            self._engine.close()
        if self._lock is not None:
            self._lock.release()

    def _rows(self, data: Sequence[bytes]) -> tuple[list[Row], EngineHead]:
        """Return rows of the present term, and the head after them."""
        head = self._head
        rows: list[Row] = []
        chain = head.chain
        for sequence, fact in enumerate(data, start=head.sequence + 1):
            rows.append(histories.make_row(chain, sequence, head.term, fact))
            chain = rows[-1].chain
        return rows, msgspec.structs.replace(head, sequence=rows[-1].sequence, chain=chain)

    def _asked(self, lost: FusionError, *, at_once: bool) -> bool:
        """Return whether the append in doubt was written. Raises `JournalInDoubt` if the engine can't be asked, or is
        not to be asked `at_once`."""
        try:
            if not at_once:
                raise lost
            return self._resolve() is True
        except JournalTaken:
            raise
        except FusionError as error:
            self._lose(lost)
            raise JournalInDoubt(
                f"{self.outage}; it is not known yet whether what was asked has been done.",
                hint="The broker finds out when the engine is back.",
            ) from error

    def _resolve(self) -> bool | None:
        """Connect, begin a new term, which no late write fits, and read what became of the append in doubt."""
        self._engine.connect()
        for _ in range(_TRIES):
            head = self._engine.head()
            if head is None or head.owner != self._owner:
                raise self._taken(head)
            renewed = msgspec.structs.replace(head, term=head.term + 1)
            until_s = self._now_s() + LEASE_S
            if self._engine.take(head, renewed, LEASE_S):
                self._held_until_s = until_s
                return self._settled(head, renewed)
        raise AnswerLost(f"{self.name} changes while this broker reads it.")

    def _settled(self, found: EngineHead, renewed: EngineHead) -> bool | None:
        doubt = self._doubt
        last = self._head if doubt is None else doubt.before
        end = (found.sequence, found.chain)
        written = doubt is not None and end == (doubt.after.sequence, doubt.after.chain)
        if not written and end != (last.sequence, last.chain):
            raise self._taken(found)
        self._head, self._doubt, self.outage = renewed, None, ""
        return None if doubt is None else written

    def _done(self, operation: Callable[[], T]) -> T:
        """Return the result of an operation that may be repeated, on a new connection if the old one is dead."""
        with self._engine_alone():
            try:
                try:
                    return operation()
                except (AnswerLost, EngineUnreachable):
                    self._resolve()
                    return operation()
            except (AnswerLost, EngineUnreachable) as error:
                self._lose(error)
                raise StorageError(f"{error.message}", hint="The broker tries again.") from error

    @contextmanager
    def _engine_alone(self) -> Generator[None]:
        """Wait for a renewal in the other thread. Raises `StorageError` during an outage, and if the renewal takes
        long because the engine is slow."""
        if not self._turn.acquire(timeout=OPERATION_S):
            raise StorageError(
                f"{self.name} is slow; what was asked has not been done.", hint="The broker tries again by itself."
            )
        try:
            self._check_usable()
            yield
        finally:
            self._turn.release()

    def _lose(self, error: FusionError) -> None:
        self.outage = error.message.removesuffix(".")
        _LOG.info("the journal is out of reach: %s", error.message)
        self.on_outage()

    def _check_usable(self) -> None:
        if self.outage:
            raise JournalAway(
                f"the pool's journal can't be used now: {self.outage}; what was asked has not been done.",
                hint="The broker tries again by itself.",
            )

    def _taken(self, found: EngineHead | None = None) -> JournalTaken:
        if found is None:
            with suppress(FusionError):
                found = self._engine.head()
        head = self._head
        there = "no journal" if found is None else f"term {found.term}, row {found.sequence}"
        expected = f"expected {self.name} at term {head.term}, row {head.sequence}, found {there}"
        if found is None or found.owner == self._owner:
            return JournalTaken(
                f"{expected}: it was set back, or changed by another program.",
                hint="Stop this broker and look at the engine: rows that were acknowledged may be missing.",
            )
        return JournalTaken(
            f"{expected}: another broker has taken over.", hint="Stop this broker; only one may keep a pool."
        )


def proven(engine: JournalEngine, head: EngineHead) -> PoolHistory:
    """Read the engine's content and return the history that it proves, which ends at `head`. Raises `StorageError` for
    content that is not as it was written."""
    copy = engine.read()
    try:
        found = histories.merge(head.pool, (copy,))
    except IncompleteHistory as error:
        damaged = f" ({copy.damaged})" if copy.damaged else ""
        raise StorageError(
            f"{engine.name} is damaged: row {error.expected} of {error.newest} is missing or not as it was written"
            f"{damaged}.",
            hint=engine.restoring,
        ) from error
    end = (found.sequence, found.chain)
    if copy.damaged or copy.head is None or end != (copy.head.sequence, copy.head.chain):
        raise StorageError(
            f"{engine.name} is damaged: {copy.damaged or 'its head does not fit its rows'}.", hint=engine.restoring
        )
    if end != (head.sequence, head.chain):
        raise JournalTaken(f"expected {engine.name} at row {head.sequence}, found row {found.sequence}.")
    return found


def _encoded(fact: Fact) -> bytes:
    data = encode(fact)
    # A row that can't be decoded would prevent every later start of the broker.
    decode(data)
    if len(data) > MAX_FACT_BYTES:
        raise StorageError(f"expected a fact of at most {MAX_FACT_BYTES} bytes, got {len(data)}.")
    return data


def _begun(engine: JournalEngine, pool: str, owner: str, authority_key: Callable[[bool], bytes]) -> EngineHead | None:
    """Take the journal, which is created if there is none. Returns None if it changed meanwhile."""
    head = engine.head()
    if head is None:
        history = PoolHistory(histories.origin(pool), ())
        engine.create(EngineHead(FORMAT, pool, 0, 0, history.chain, "", authority_key(True)), history)
        return None
    check_belongs(engine, head, pool, authority_key(False))
    taken = msgspec.structs.replace(head, term=head.term + 1, owner=owner)
    if engine.take(head, taken, LEASE_S):
        return taken
    lease = engine.lease()
    if lease is not None and identity_of(lease.owner) != identity_of(owner):
        raise JournalHeld(
            f"another broker ({short(PeerId(identity_of(lease.owner)))}) keeps pool {pool!r} in {engine.name}; its "
            f"lease ends in {max(lease.lasts_s, 0.0):.1f} s unless it renews it.",
            lease.lasts_s,
        )
    return None


def check_belongs(engine: JournalEngine, head: EngineHead, pool: str, authority_key: bytes) -> None:
    """Raise `UsageError` unless this broker may keep the journal."""
    if head.format != FORMAT:
        raise StorageError(f"expected journal format {FORMAT} in {engine.name}, found {head.format}.", hint="Update.")
    if head.owner.startswith(MOVED):
        raise UsageError(
            f"the journal in {engine.name} was {head.owner}.", hint="Start the broker with --journal of that place."
        )
    if head.pool != pool:
        raise UsageError(
            f"expected the journal of pool {pool!r} in {engine.name}, found that of {head.pool!r}.",
            hint="Use that pool name (--pool), or another schema or prefix in the URL for the new pool.",
        )
    if head.authority != authority_key:
        raise UsageError(
            f"this broker's home has not the key of pool {pool!r} in {engine.name}.",
            hint="Copy broker/authority.pem and broker/authority.der from the home of the pool's first broker.",
        )
