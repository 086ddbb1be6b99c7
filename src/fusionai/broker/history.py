"""What the copies of a journal say, and what of it is true. Decides nothing about files.

A history is a *base* (the pool folded up to some row, or nothing) and the rows after it. Each row carries a hash over
itself and the row before, each base a seal over itself: so every piece can be checked wherever it was found, and a
history can be put together of two copies of which neither is whole. What a copy is known to have had and nobody can
show any more is found too (`newest`): a history is whole or it is refused.

Neighbours: `journal` and `mirror` read and write the two copies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fusionai.primitives.errors import FusionError


class IncompleteHistory(FusionError):
    """Row `expected` is in no copy as it was written, and it or a later one has been there."""

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
    """The pool as the rows up to `sequence` made it: `state` is it as bytes, empty for a new pool."""

    sequence: int
    chain: bytes
    state: bytes
    seal: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """What could be read of one file; nothing of it is checked yet."""

    bases: tuple[Base, ...] = ()
    rows: Mapping[int, Row] = field(default_factory=dict[int, Row])
    newest: int = 0
    """The last row this file had, as far as that can be known."""


@dataclass(frozen=True, slots=True)
class History:
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
        """The last term in which anything was written."""
        return max((row.term for row in self.rows), default=0)


def merge(pool: str, copies: Sequence[Copy]) -> History:
    """The longest history these copies prove. Raises `IncompleteHistory` when one of them knew of more."""
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
    return History(base, tuple(rows))


def origin(pool: str) -> Base:
    """Before the first fact."""
    return make_base(pool, 0, hashlib.sha256(b"fusionai journal\0" + pool.encode()).digest(), b"")


def make_base(pool: str, sequence: int, chain: bytes, state: bytes) -> Base:
    unsealed = Base(sequence, chain, state, b"")
    return Base(sequence, chain, state, _seal(pool, unsealed))


def make_row(chain: bytes, sequence: int, term: int, fact: bytes) -> Row:
    """`chain` is that of the row before."""
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
    """Damaged files hold any number: all of them have a spelling, and only those in range one that can fit."""
    return value.to_bytes(8, "little") if 0 <= value < 2**64 else repr(value).encode()
