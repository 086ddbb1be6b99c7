"""What the broker needs of a journal, and what a journal needs of an engine.

`PoolJournal` is what `broker.service` uses: `broker.journal` keeps it in files of the broker, `engine_journal` in an
engine that an operator runs. `JournalEngine` is what `engine_journal` needs of such a server: a head that is compared
and replaced together with the rows. Every call of an engine ends after a limited time, and its failure says what is
known:

    EngineUnreachable    nothing was sent, so nothing was written
    AnswerLost           it was sent, and it is not known whether it was written
    StorageError         the engine refused it, so nothing was written

`postgresql` and `etcd` are the engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from fusionai.broker.history import Base, Copy, PoolHistory, Row
from fusionai.coordination.broker.events import Fact
from fusionai.primitives.errors import FusionError, StorageError

CONNECT_S: Final = 2.0
"""Limit for one attempt to connect, in seconds (chosen): a dead server must not keep the next one waiting."""
OPERATION_S: Final = 3.0
"""Limit for one operation of an engine, in seconds (chosen): the broker answers nothing else meanwhile, and a member's
lease is 12 s."""
MAX_FACT_BYTES: Final = 32 * 2**20
"""Limit of one fact. A plan has at most 16 MiB."""
MAX_APPEND_BYTES: Final = 64 * 2**20
MAX_STATE_BYTES: Final = 512 * 2**20
"""Limit of a frozen pool: 1,000 members and plans of 16 MiB for 30 jobs."""


class JournalTaken(StorageError):
    """Another broker has taken over this journal; this broker must stop."""


class JournalAway(StorageError):
    """The journal can't be used at present, and nothing was written. The beginning of an outage is reported once, so
    that what is refused during it need not be."""


class JournalInDoubt(StorageError):
    """The engine's answer to an append was lost, and the engine can't be asked now whether it was written. Nothing else
    can be decided until `recover` knows."""


class JournalHeld(StorageError):
    """Another broker keeps the pool. `lasts_s`: time until its lease ends unless it renews it."""

    def __init__(self, message: str, lasts_s: float) -> None:
        super().__init__(message, hint="It can be taken over when that broker's lease ends.")
        self.lasts_s = lasts_s


class EngineUnreachable(StorageError):
    """No connection: nothing was sent, so nothing was written."""


class AnswerLost(FusionError):
    """The operation was sent, and no answer came: it may have been done or not, or may still be done."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """Content of the journal: `facts` follow `state`, a frozen pool; empty bytes stand for a new pool."""

    sequence: int
    state: bytes
    facts: tuple[Fact, ...]


class PoolJournal(Protocol):
    """The pool's facts in order. `append` is all or nothing, and durable when it returns."""

    healed: tuple[str, ...]
    """Human-readable list of repairs made while opening the journal."""

    @property
    def term(self) -> int:
        """Return the number of this broker's start or of its last connection: rows of an older term are refused."""
        ...

    @property
    def name(self) -> str:
        """Return where the journal is, without secrets."""
        ...

    @property
    def lapsed(self) -> bool:
        """Return whether another broker may keep the pool by now, because the lease could not be renewed in time."""
        ...

    @property
    def compaction_due(self) -> bool: ...

    def append(self, expected_sequence: int, facts: Sequence[Fact]) -> int:
        """Write `facts` after row `expected_sequence` and return the new last row. Raises `JournalTaken` when this
        broker's term is over, `JournalInDoubt`, and any other `StorageError` when nothing was written."""
        ...

    def load(self) -> Remembered: ...

    def history(self) -> PoolHistory:
        """Return all rows, checked. Raises `StorageError` naming a bad row."""
        ...

    def compact(self, state: bytes) -> None: ...

    def postpone_compaction(self) -> None: ...

    def retire(self, successor: str) -> None:
        """End this journal for good: the pool goes on in `successor`, and no broker may open it again."""
        ...

    def close(self) -> None: ...


class EngineHead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """End of the journal. Every write compares the whole head with what the broker knows, and replaces it."""

    format: int
    pool: str
    term: int
    sequence: int
    chain: bytes
    owner: str
    """Session that began the term, `<peer>/<random>`; or `MOVED` and the journal's successor."""
    authority: bytes
    """Public key of the pool, so that a broker without the pool's key can't take it over."""


MOVED: Final = "moved to "


@dataclass(frozen=True, slots=True)
class EngineLease:
    """Lease of the broker that decides."""

    owner: str
    lasts_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCopy(Copy):
    """Content of the engine, unchecked."""

    head: EngineHead | None = None
    damaged: str = ""


class JournalEngine(Protocol):
    """A server that keeps one journal. Not for use by several threads at once."""

    @property
    def name(self) -> str: ...

    @property
    def restoring(self) -> str:
        """Return what an operator does with damaged content."""
        ...

    def connect(self) -> None:
        """Connect anew, or for the first time. Raises `EngineUnreachable`; `UsageError` for a wrong password, right or
        certificate; `StorageError` for a server that does not keep what it acknowledges."""
        ...

    def head(self) -> EngineHead | None: ...

    def lease(self) -> EngineLease | None: ...

    def create(self, head: EngineHead, history: PoolHistory) -> bool:
        """Write a whole journal. Returns False if there is one."""
        ...

    def take(self, old: EngineHead, new: EngineHead, lease_s: float) -> bool:
        """Replace the head and take the lease. Returns False if the head is another one, or if a broker with another
        identity holds the lease."""
        ...

    def append(self, old: EngineHead, new: EngineHead, rows: Sequence[Row]) -> bool:
        """Write rows and head together. Returns False if the head is not `old`."""
        ...

    def rebase(self, head: EngineHead, base: Base) -> bool:
        """Start the history at `base` and delete the rows before it. Returns False if the head is not `head`."""
        ...

    def read(self) -> EngineCopy: ...

    def renew(self, head: EngineHead, lease_s: float) -> bool:
        """Hold the lease for another `lease_s`. Returns False if the head's owner or term is another one."""
        ...

    def release(self, head: EngineHead) -> None:
        """End the lease, so that another broker need not wait for its end."""
        ...

    def close(self) -> None: ...


def identity_of(owner: str) -> str:
    """Return the peer that opened a session: with the same key it is the same broker, started again."""
    return owner.partition("/")[0]
