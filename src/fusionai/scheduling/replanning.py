"""A coverage layout kept good while peers come, go and slow down. Decides who loads other blocks, and that most don't.

Whoever comes takes the interval that helps most. For every block lost with a peer, `ALLOWANCE` blocks may be loaded by
peers that stay, now or later: what is not used is kept, up to the size of the model, for events that need more. Moving
has a price besides, so that a layout that is as good as even stays where it is. Microbatches are routed by what a
change returns once its peers have loaded; a running step keeps the routes it began with.

Deterministic: the same events give the same layouts. Neighbours: `coverage` makes the first layout, `coverage_kernels`
has the loops, `coverage_bound` the certificate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from fusionai.scheduling.compiled import compiled
from fusionai.scheduling.coverage import solve
from fusionai.scheduling.coverage_bound import Proof
from fusionai.scheduling.coverage_kernels import Integers, Layout, Swarm, mend, rate, recount, take
from fusionai.scheduling.swarm import chosen, idle, stretches

ALLOWANCE: Final = 2
"""Blocks that peers which stay may load per block lost."""
ROUNDS: Final = 8000
WORK: Final = 4_000_000
"""Intervals looked at per event, about."""
MANY: Final = 500
"""Peers from which on fewer rounds are needed: each counts for less."""
TRIES: Final = 3
"""Ways to mend that are compared after an event, in pools of fewer than `MANY`: what is found differs by chance."""
CREW: Final = 3
PRICE: Final = 0.02
"""Of a block moved, in the potential's logarithm: with `SHARPNESS` 28, less than a tenth of a percent of the least
cover."""
FEW: Final = 75
"""Peers from which on it falls: of many, each brings less, and would never move for the price among few."""
SHARPNESS: Final = 28.0
PROOF_ROUNDS: Final = 40


@dataclass(frozen=True, slots=True)
class Change:
    """What an event does. `intervals`: the new ones, by peer; start and end are equal for who holds nothing now."""

    intervals: dict[int, tuple[int, int]]
    lost: int
    """Blocks held by who left."""
    brought: int
    """Blocks that a newcomer loads."""
    moved: int
    """Blocks that the others load."""


class Keeper:
    """`swarm` knows everybody who may come; `present` are there. Peers are rows of the swarm."""

    def __init__(self, swarm: Swarm, present: Iterable[int], *, seed: int = 0) -> None:
        self.swarm = swarm
        self._present = {int(peer) for peer in present}
        self._seed = seed
        self._events = 0
        self.credit = 0
        """Blocks that may still be moved."""
        rows = self._rows()
        solved = solve(chosen(swarm, rows), seed=seed)
        self.layout = idle(swarm)
        for row, peer in enumerate(rows):
            self.layout.start[peer] = solved.layout.start[row]
            self.layout.end[peer] = solved.layout.end[row]
            self.layout.rate[peer] = solved.layout.rate[row]
        recount(self.layout)
        self.home = self._widest(rows)
        """[N, 2]: what each peer has loaded, around what it holds: within it, an interval moves for nothing."""

    @property
    def cover(self) -> float:
        """Microbatches a second."""
        return float(self.layout.cover.min())

    def know(self, swarm: Swarm) -> None:
        """The same peers and more behind them, who may come from now on."""
        more = len(swarm.speed) - len(self.swarm.speed)
        if more < 0 or swarm.reach.shape[1] != self.swarm.reach.shape[1]:
            raise ValueError("expected the peers known so far, of the same model, and more behind them")
        empty = idle(chosen(swarm, np.arange(more, dtype=np.int64)))
        self.layout = Layout(
            np.concatenate([self.layout.start, empty.start]),
            np.concatenate([self.layout.end, empty.end]),
            np.concatenate([self.layout.rate, empty.rate]),
            self.layout.cover,
        )
        self.swarm = swarm
        self.home = np.concatenate([self.home, np.zeros((more, 2), dtype=np.int64)])

    def join(self, peer: int) -> Change:
        """`peer` has come."""
        if peer in self._present:
            raise ValueError(f"peer {peer} is there already")
        self._present.add(peer)
        return self._mended(newcomer=peer)

    def leave(self, peer: int) -> Change:
        """`peer` has gone, with what it held."""
        if peer not in self._present:
            raise ValueError(f"peer {peer} is not there")
        self._present.discard(peer)
        lost = int(self.layout.end[peer] - self.layout.start[peer])
        take(self.layout, peer)
        self.credit = min(self.credit + ALLOWANCE * lost, ALLOWANCE * self.swarm.reach.shape[1])
        return self._mended(lost=lost)

    def slow(self, peer: int, flops_per_s: float) -> Change:
        """`peer` computes at another speed from now on. What it holds beyond that may move as if it were lost."""
        before = float(self.layout.rate[peer])
        self.swarm.speed[peer] = flops_per_s
        start, end = int(self.layout.start[peer]), int(self.layout.end[peer])
        if start < end:
            now = rate(self.swarm, peer, start, end)
            self.layout.rate[peer] = now
            part = max(0.0, 1 - now / before)
            self.credit = min(
                self.credit + round(ALLOWANCE * part * (end - start)), ALLOWANCE * self.swarm.reach.shape[1]
            )
        return self._mended()

    def prove(self, rounds: int = PROOF_ROUNDS) -> float:
        """Microbatches a second that no layout of the present peers exceeds."""
        rows = self._rows()
        proof = Proof(chosen(self.swarm, rows))
        layout = Layout(self.layout.start[rows], self.layout.end[rows], self.layout.rate[rows], self.layout.cover)
        proof.sharpen(layout, rounds, 0.0)
        return proof.bound

    def _mended(self, *, newcomer: int | None = None, lost: int = 0) -> Change:
        layout, rows = self.layout, self._rows()
        recount(layout)
        if len(rows) == 0:
            return Change({}, lost, 0, 0)
        self._events += 1
        before = np.stack([layout.start, layout.end], axis=1)
        home = self.home
        length = self.swarm.reach.shape[1]
        if newcomer is not None:
            # It loads whatever it gets: no interval is farther away than another.
            home[newcomer] = (0, length)
            self._mend(np.array([newcomer], dtype=np.int64), home, rounds=1, crew=1)
        each = max(1, int(stretches(self.swarm)[rows[0]].sum()))
        rounds = min(ROUNDS, WORK // (2 * each)) * MANY // max(MANY, len(rows))
        tries = TRIES if len(rows) < MANY else 1
        moved = self._mend(rows, home, rounds=max(20, rounds), crew=min(CREW, len(rows)), tries=tries)
        layout = self.layout
        self.credit -= moved
        after = np.stack([layout.start, layout.end], axis=1)
        changed = [int(peer) for peer in np.flatnonzero((after != before).any(axis=1))]
        if newcomer is not None:
            home[newcomer] = self._widest(np.array([newcomer], dtype=np.int64))[newcomer]
        for peer in changed:
            self._loaded(peer)
        brought = 0 if newcomer is None else int(after[newcomer, 1] - after[newcomer, 0])
        intervals = {peer: (int(after[peer, 0]), int(after[peer, 1])) for peer in changed}
        return Change(intervals, lost, brought, moved)

    def _mend(self, rows: Integers, home: Integers, *, rounds: int, crew: int, tries: int = 1) -> int:
        """The best of so many tries: least in potential and price together. Returns the blocks moved."""
        begun = _copied(self.layout)
        best, best_moved, least = self.layout, 0, np.inf
        level = 0.0
        price = PRICE * FEW / max(FEW, len(self._present))
        for turn in range(tries):
            layout = _copied(begun)
            moved = int(
                compiled(mend)(
                    self.swarm, layout, rows, home, SHARPNESS, price, self.credit, rounds, crew,
                    self._seed + 7919 * self._events + 104_729 * turn,
                )
            )  # fmt: skip
            # One measure for all of them.
            level = level or max(float(layout.cover.min()), float(layout.cover.mean()) / 4, 1e-300)
            uneven = float(np.exp(-SHARPNESS * np.clip(layout.cover / level - 1, -20, None)).sum())
            cost = np.log(uneven) + price * moved
            if cost < least:
                best, best_moved, least = layout, moved, cost
        self.layout = best
        return best_moved

    def _widest(self, rows: Integers) -> Integers:
        """[N, 2]: intervals of `rows` widened by what their memory holds besides, to both sides alike."""
        home = np.stack([self.layout.start, self.layout.end], axis=1)
        length = self.swarm.reach.shape[1]
        for peer in rows:
            start, end = int(home[peer, 0]), int(home[peer, 1])
            if start == end:
                continue
            grown = True
            while grown:
                grown = False
                if end < length and self.swarm.reach[peer, start] > end:
                    end, grown = end + 1, True
                if start > 0 and self.swarm.reach[peer, start - 1] >= end:
                    start, grown = start - 1, True
            home[peer] = (start, end)
        return home

    def _loaded(self, peer: int) -> None:
        """After a move: the new blocks, and of the old ones what memory still holds next to them."""
        start, end = int(self.layout.start[peer]), int(self.layout.end[peer])
        old_start, old_end = int(self.home[peer, 0]), int(self.home[peer, 1])
        if start == end or (old_start <= start and end <= old_end):
            return
        if end < old_start or old_end < start:
            old_start, old_end = start, end
        first, last = min(start, old_start), max(end, old_end)
        while last > end and self.swarm.reach[peer, start] < last:
            last -= 1
        while first < start and self.swarm.reach[peer, first] < last:
            first += 1
        self.home[peer] = (first, last)

    def _rows(self) -> Integers:
        return np.array(sorted(self._present), dtype=np.int64)


def _copied(layout: Layout) -> Layout:
    return Layout(layout.start.copy(), layout.end.copy(), layout.rate.copy(), layout.cover.copy())
