"""The history of a pool that the copies of its journal prove. Pure functions.

A history is a *base* (the pool folded up to some row, or nothing) and the rows after it. Each row carries a hash over
its content and the previous row's hash; each base carries a seal over its content. Every piece can therefore be checked
wherever it was found, and one history can be assembled from two damaged copies. If a copy shows that it once had rows
that no copy has now (`newest`), the history is refused. `journal` and `mirror` read and write the copies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fusionai.primitives.errors import FusionError


class IncompleteHistory(FusionError):
    """Row `expected` is intact in no copy, although it or a later row was written."""

    def __init__(self, expected: int, newest: int) -> None:
        super().__init__(f"expected rows up to {newest}, found none that follows row {expected - 1}.")
        self.expected = expected
        self.newest = newest


@dataclass(frozen=True, slots=True)
class Row:
    """One fact as bytes. `chain` is the hash over everything up to and including this row."""

    sequence: int
    term: int
    fact: bytes
    chain: bytes


@dataclass(frozen=True, slots=True)
class Base:
    """The pool after the rows up to `sequence`. `state`: the encoded pool, empty for a new pool."""

    sequence: int
    chain: bytes
    state: bytes
    seal: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Content that could be read from one file, unchecked."""

    bases: tuple[Base, ...] = ()
    rows: Mapping[int, Row] = field(default_factory=dict[int, Row])
    newest: int = 0
    """Number of the last row that the file had, as far as it can be determined."""


@dataclass(frozen=True, slots=True)
class PoolHistory:
    base: Base
    rows: tuple[Row, ...]

    @property
    def sequence(self) -> int:
        return self.rows[-1].sequence if self.rows else self.base.sequence

    @property
    def chain(self) -> bytes:
        return self.rows[-1].chain if self.rows else self.base.chain

    @property
    def term(self) -> int:
        """Last term in which a row was written."""
        return max((row.term for row in self.rows), default=0)


def merge(pool: str, copies: Sequence[Copy]) -> PoolHistory:
    """Return the longest history that the copies prove. Raises `IncompleteHistory` if one of them had later rows."""
    sound = [base for copy in copies for base in copy.bases if base.seal == _seal(pool, base)]
    base = max(sound, key=lambda one: one.sequence, default=origin(pool))
    rows: list[Row] = []
    last, chain = base.sequence, base.chain
    while (row := _next(copies, last, chain)) is not None:
        rows.append(row)
        last, chain = row.sequence, row.chain
    newest = max((copy.newest for copy in copies), default=0)
    if newest > last:
        raise IncompleteHistory(last + 1, newest)
    return PoolHistory(base, tuple(rows))


def origin(pool: str) -> Base:
    """Return the base before the first fact."""
    return make_base(pool, 0, hashlib.sha256(b"fusionai journal\0" + pool.encode()).digest(), b"")


def make_base(pool: str, sequence: int, chain: bytes, state: bytes) -> Base:
    unsealed = Base(sequence, chain, state, b"")
    return Base(sequence, chain, state, _seal(pool, unsealed))


def make_row(chain: bytes, sequence: int, term: int, fact: bytes) -> Row:
    """Return the row. `chain`: hash of the previous row."""
    return Row(sequence, term, fact, _link(chain, sequence, term, fact))


def _next(copies: Sequence[Copy], last: int, chain: bytes) -> Row | None:
    for copy in copies:
        row = copy.rows.get(last + 1)
        if row is not None and row.chain == _link(chain, row.sequence, row.term, row.fact):
            return row
    return None


def _link(chain: bytes, sequence: int, term: int, fact: bytes) -> bytes:
    return hashlib.sha256(chain + _number(sequence) + _number(term) + fact).digest()


def _seal(pool: str, base: Base) -> bytes:
    name = pool.encode()
    head = b"fusionai base\0" + _number(len(name)) + name + _number(base.sequence) + _number(len(base.chain))
    return hashlib.sha256(head + base.chain + base.state).digest()


def _number(value: int) -> bytes:
    """Encode any integer, because damaged files may hold any. Only those in range can match a valid hash."""
    return value.to_bytes(8, "little") if 0 <= value < 2**64 else repr(value).encode()
