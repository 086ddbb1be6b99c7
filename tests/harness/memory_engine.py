"""An engine of a pool's journal in memory, which fails on command: what a server could do, without one.

`lose` says what becomes of the next writes: done or not, without an answer. `down` refuses connections. Several engines
over one `store` are several brokers' connections. Neighbours: `harness.engine_servers` has real ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fusionai.broker.engines.interface import (
    AnswerLost,
    EngineCopy,
    EngineHead,
    EngineLease,
    EngineUnreachable,
    identity_of,
)
from fusionai.broker.history import Base, PoolHistory, Row

Loss = Literal["not done", "done", "unreachable"]


@dataclass
class Store:
    """Content of the server, and the owner of the lease, which never ends by itself."""

    head: EngineHead | None = None
    base: Base | None = None
    rows: dict[int, Row] = field(default_factory=dict[int, Row])
    lease: str = ""


class MemoryEngine:
    restoring = "Restore it."

    def __init__(self, store: Store | None = None, name: str = "memory") -> None:
        self.store = store or Store()
        self.name = name
        self.down = False
        self.connections = 0
        self.writes = 0
        """Appends that reached the server."""
        self.losses: deque[Loss] = deque()
        self.on_append: Callable[[], None] = lambda: None

    def lose(self, *losses: Loss) -> None:
        self.losses.extend(losses)

    def connect(self) -> None:
        if self.down:
            raise EngineUnreachable(f"{self.name} can't be reached.")
        self.connections += 1

    def head(self) -> EngineHead | None:
        self._check_up()
        return self.store.head

    def lease(self) -> EngineLease | None:
        return EngineLease(self.store.lease, 5.0) if self.store.lease else None

    def create(self, head: EngineHead, history: PoolHistory) -> bool:
        self._check_up()
        if self.store.head is not None:
            return False
        self.store.head, self.store.base = head, history.base
        self.store.rows = {row.sequence: row for row in history.rows}
        return True

    def take(self, old: EngineHead, new: EngineHead, lease_s: float) -> bool:
        self._check_up()
        mine = identity_of(old.owner if lease_s == 0 else new.owner)
        if self.store.head != old or (self.store.lease and identity_of(self.store.lease) != mine):
            return False
        self.store.head, self.store.lease = new, new.owner if lease_s else ""
        return True

    def append(self, old: EngineHead, new: EngineHead, rows: Sequence[Row]) -> bool:
        self._check_up()
        self.writes += 1
        self.on_append()
        loss = self.losses.popleft() if self.losses else None
        if loss == "unreachable":
            raise EngineUnreachable(f"{self.name}: there is no connection.")
        fits = self.store.head == old
        if fits and loss != "not done":
            self.store.head = new
            self.store.rows |= {row.sequence: row for row in rows}
        if loss is not None:
            raise AnswerLost(f"{self.name} gave no answer.")
        return fits

    def rebase(self, head: EngineHead, base: Base) -> bool:
        self._check_up()
        if self.store.head != head:
            return False
        self.store.base = base
        self.store.rows = {number: row for number, row in self.store.rows.items() if number > base.sequence}
        return True

    def read(self) -> EngineCopy:
        self._check_up()
        newest = 0 if self.store.head is None else self.store.head.sequence
        bases = () if self.store.base is None else (self.store.base,)
        return EngineCopy(bases=bases, rows=dict(self.store.rows), newest=newest, head=self.store.head)

    def renew(self, head: EngineHead, lease_s: float) -> bool:
        self._check_up()
        return self.store.head is not None and self.store.head.owner == head.owner

    def release(self, head: EngineHead) -> None:
        if self.store.head == head:
            self.store.lease = ""

    def close(self) -> None:
        pass

    def _check_up(self) -> None:
        if self.down:
            raise AnswerLost(f"{self.name} gave no answer.")
