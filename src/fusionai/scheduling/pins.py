"""Blocks that must lie with a certain peer. Decides which ranges of blocks a peer may hold; places nothing.

A pin works like memory: a range that breaks one can't be held. So every search that asks what fits obeys pins, and its
bounds stay true. Neighbours: `pipeline` and `serving_line` ask; `eligibility` checks the names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.types import BlockCost, PeerProfile, Problem


class Pins:
    """`blocks`: those to be placed, in order; `peers`: by index. `only`: who holds its pins and nothing else."""

    def __init__(
        self,
        pinned: Mapping[int, str],
        blocks: Sequence[BlockCost],
        peers: Sequence[PeerProfile],
        only: int | None = None,
    ) -> None:
        positions = {block.block: position for position, block in enumerate(blocks)}
        index = {peer.peer: number for number, peer in enumerate(peers)}
        self._pins = [(positions[block], index[peer]) for block, peer in pinned.items()]
        self.peers = frozenset(peer for _, peer in self._pins)
        self._only = only
        self._only_count = sum(peer == only for _, peer in self._pins)

    def table(self, blocks: int) -> tuple[list[int], int, int]:
        """By position the peer that must hold it, -1 for most; who holds its pins and nothing else (-1: nobody), and
        how many those are. Without pins the list is empty."""
        if not self._pins:
            return [], -1, 0
        peers = [-1] * blocks
        for position, peer in self._pins:
            peers[position] = peer
        return peers, -1 if self._only is None else self._only, self._only_count

    def allow(self, peer: int, start: int, end: int) -> bool:
        """Whether `peer` may hold [start, end): all of its own pins, none of others'."""
        if peer == self._only and end - start != self._only_count:
            return False
        return all((start <= position < end) == (peer == owner) for position, owner in self._pins)


def must_use(problem: Problem) -> frozenset[str]:
    """Peers that must be used: the required ones, and whoever has a pin."""
    return frozenset((*problem.required, *problem.pinned.values()))


def check_pins(problem: Problem, placeable: Sequence[BlockCost]) -> None:
    """Raise `PlanError` on a pin of a block that is not to be placed with the pool."""
    known = [block.block for block in placeable]
    for block, peer in problem.pinned.items():
        if block not in known:
            raise PlanError(
                f"block {block} is pinned to peer {peer!r}, but the pool is given blocks {known[0]} to {known[-1]}.",
                hint="Pin a block of those, or place the model's ends with the pool.",
            )
