"""Says when a journal has grown enough that a new base saves more time at start-up than it costs.

The embedded journal and the journals on engines count with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from fusionai.broker.history import PoolHistory, Row

COMPACT_ROWS: Final = 2_000
COMPACT_BYTES: Final = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Growth:
    """Rows and bytes written since the base, and the numbers from which compaction is due."""

    rows: int
    fact_bytes: int
    base_bytes: int
    due_rows: int
    due_bytes: int

    @classmethod
    def after(cls, history: PoolHistory) -> Growth:
        """Return the growth of a history. A large base makes compaction due later, because it costs more."""
        base_bytes = len(history.base.state)
        return cls(
            rows=len(history.rows),
            fact_bytes=_bytes(history.rows),
            base_bytes=base_bytes,
            due_rows=COMPACT_ROWS,
            due_bytes=max(COMPACT_BYTES, 2 * base_bytes),
        )

    @property
    def is_due(self) -> bool:
        return self.rows >= self.due_rows or self.fact_bytes >= self.due_bytes

    def plus(self, rows: Sequence[Row]) -> Growth:
        return replace(self, rows=self.rows + len(rows), fact_bytes=self.fact_bytes + _bytes(rows))

    def postponed(self) -> Growth:
        """Make compaction due again after as many further rows or bytes as after a new base."""
        further = max(COMPACT_BYTES, 2 * self.base_bytes)
        return replace(self, due_rows=self.rows + COMPACT_ROWS, due_bytes=self.fact_bytes + further)


def _bytes(rows: Sequence[Row]) -> int:
    return sum(len(row.fact) for row in rows)
