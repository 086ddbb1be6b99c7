"""Pinned blocks: which ranges of blocks a peer may hold when some blocks must be placed on a certain peer.

A pin acts like a memory limit: a range that violates a pin can't be held. Every search that asks whether a range fits
therefore respects pins, and its bounds stay valid. `pipeline` and `serving_line` use this module; `eligibility` checks
the peers' names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.problem.types import BlockCost, PeerProfile, Problem


class Pins:
    """The pins of a problem, by position and peer index.

    `blocks`: the blocks to place, in order. `peers`: the peers in index order. `only`: index of a peer that holds its
    pinned blocks and no others.
    """

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
        """Return the pins as arrays: the required peer per position, the exclusive peer, and its number of blocks.

        The list has -1 for a position without a pin, and is empty if there are no pins. The exclusive peer, which holds
        its pinned blocks and no others, is -1 if there is none.
        """
        if not self._pins:
            return [], -1, 0
        peers = [-1] * blocks
        for position, peer in self._pins:
            peers[position] = peer
        return peers, -1 if self._only is None else self._only, self._only_count

    def allow(self, peer: int, start: int, end: int) -> bool:
        """Return whether `peer` may hold [start, end): all blocks pinned to it are inside, and none pinned to another
        peer."""
        if peer == self._only and end - start != self._only_count:
            return False
        return all((start <= position < end) == (peer == owner) for position, owner in self._pins)


def must_use(problem: Problem) -> frozenset[str]:
    """Return the peers that must be used: the required ones and those with a pinned block."""
    return frozenset((*problem.required, *problem.pinned.values()))


def check_pins(problem: Problem, placeable: Sequence[BlockCost]) -> None:
    """Raise `PlanError` if a pinned block is not among the blocks that the pool places."""
    known = [block.block for block in placeable]
    for block, peer in problem.pinned.items():
        if block not in known:
            raise PlanError(
                f"block {block} is pinned to peer {peer!r}, but the pool is given blocks {known[0]} to {known[-1]}.",
                hint="Pin a block of those, or place the model's ends with the pool.",
            )
