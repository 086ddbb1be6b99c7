"""The cost model of generation: the time of one token through the stages, and the stages' memory.

    token = first block's seconds + sum over stages (compute + hop into it) + hop to the head + the head's seconds
    compute = sum over blocks of max(operations / speed, streamed weight bytes / memory bandwidth)
    hop     = boundary bytes of one position / link + latency, one way; the result goes back to the job owner
    memory  = weights as kept + cached tokens * (keys, values, retained boundary) + rings of all sessions and of the
              probe + workspace

The first block and the head belong to the job owner or to the chain. Predictions are for short contexts: the time of
reading the cache is not included.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf

from fusionai.scheduling.problem.constraints import Pins
from fusionai.scheduling.problem.embedding_and_head import embedding_and_head_of, owners_blocks
from fusionai.scheduling.problem.types import BlockCost, DirectedLink, PeerProfile, Problem, ServingNeeds, hop


def block_s(block: BlockCost, profile: PeerProfile, positions: int = 1) -> float:
    """Return the seconds of one pass of `positions` positions through `block`. Without a measured memory bandwidth,
    operations alone determine the time."""
    seconds = positions * block.forward_flops / profile.effective_flops_per_s
    bandwidth = profile.memory_bandwidth_bytes_per_s * profile.share
    return max(seconds, (block.parameter_bytes - block.looked_up_bytes) / bandwidth) if bandwidth > 0 else seconds


def stage_bytes(blocks: Sequence[BlockCost], needs: ServingNeeds, sent_bytes: int, cache_tokens: int) -> int:
    """Return a stage's memory. `sent_bytes`: bytes retained per token, 0 if no later stage could need them."""
    weights = sum(block.parameter_bytes for block in blocks)
    workspace = max(block.workspace_bytes for block in blocks)
    return weights + ring_bytes(blocks, needs) + workspace + cache_tokens * token_bytes(blocks, sent_bytes)


def token_bytes(blocks: Sequence[BlockCost], sent_bytes: int) -> int:
    """Return the bytes per token of the cache and of the retained boundary."""
    return sent_bytes + sum(block.cache_token_bytes for block in blocks)


def ring_bytes(blocks: Sequence[BlockCost], needs: ServingNeeds) -> int:
    """Return the bytes of the layers that keep a window, for every session and for the probe."""
    return (needs.sessions + 1) * sum(block.cache_session_bytes for block in blocks)


def retained_bytes(blocks: Sequence[BlockCost], end: int, needs: ServingNeeds) -> int:
    """Return the bytes per token retained of the boundary before position `end`; 0 unless a cache lies behind it, or
    more of an encoder, whose texts may be checked."""
    behind = any(needs.text_tokens or block.cache_token_bytes or block.cache_session_bytes for block in blocks[end:])
    return row_bytes(blocks[end - 1], needs) if needs.retain and behind else 0


def row_bytes(block: BlockCost, needs: ServingNeeds) -> int:
    """Return the bytes that a block sends on for one position."""
    return block.output_bytes // max(1, needs.text_tokens)


class ServingPipeline:
    """Costs of a serving problem on the usable peers, in an order that does not depend on how they were listed.
    Positions count from the chain's first block: the first block that the owner does not keep."""

    def __init__(self, problem: Problem, needs: ServingNeeds, peers: Sequence[PeerProfile]) -> None:
        ends = embedding_and_head_of(problem)
        self.needs = needs
        self.blocks = problem.blocks
        self.first = ends.first
        self.length = len(problem.blocks) - ends.first - ends.last
        self.owner = problem.owner
        self.peers = sorted(peers, key=lambda p: (block_s(self.blocks[self.first], p), p.peer))
        self.count = len(self.peers)
        self._pins = Pins(problem.pinned, self.blocks[self.first : self.first + self.length], self.peers)
        self._sums = [
            [0.0, *accumulate(block_s(block, peer) for block in self.blocks[self.first : self.first + self.length])]
            for peer in self.peers
        ]
        owner, links = problem.owner, problem.links
        free = DirectedLink(bandwidth_bytes_per_s=inf, latency_s=0.0, shared=False)
        self._enter = [free if owner is None else hop(owner, peer, links) for peer in self.peers]
        self._leave = [free if owner is None else hop(peer, owner, links) for peer in self.peers]
        self._hops = [[hop(one, other, links) for other in self.peers] for one in self.peers]
        self.owner_blocks = owners_blocks(problem)
        self.ends_s = sum(block_s(block, owner) for block in self.owner_blocks) if owner is not None else 0.0
        self._result_bytes = self._sent(self.length) if ends.last else needs.result_bytes

    def compute_s(self, peer: int, start: int, end: int) -> float:
        return self._sums[peer][end] - self._sums[peer][start]

    def enter_s(self, peer: int) -> float:
        """Return the seconds from the job owner to the first stage, for token ids or the first block's result."""
        return _seconds(self._enter[peer], self._sent(0))

    def hop_s(self, sender: int, receiver: int, cut: int) -> float:
        return _seconds(self._hops[sender][receiver], self._sent(cut))

    def leave_s(self, peer: int) -> float:
        """Return the seconds from the last stage to the job owner, for one row for the head or one row of logits."""
        return _seconds(self._leave[peer], self._result_bytes)

    def allowed(self, peer: int, start: int, end: int) -> bool:
        """Return whether the pins allow `peer` to hold [start, end)."""
        return self._pins.allow(peer, start, end)

    def bytes(self, start: int, end: int, cache_tokens: int) -> int:
        placed = self.blocks[self.first + start : self.first + end]
        return stage_bytes(placed, self.needs, retained_bytes(self.blocks, self.first + end, self.needs), cache_tokens)

    def token_bytes(self, start: int, end: int) -> int:
        placed = self.blocks[self.first + start : self.first + end]
        return token_bytes(placed, retained_bytes(self.blocks, self.first + end, self.needs))

    def numbers(self, start: int, end: int) -> tuple[int, int]:
        """Return the half-open range of block numbers for a range of positions."""
        return self.blocks[self.first + start].block, self.blocks[self.first + end - 1].block + 1

    def alike(self, one: int, other: int) -> bool:
        """Return whether two peers can be exchanged without changing any cost or pin."""
        a, b = self.peers[one], self.peers[other]
        alike = (a.memory_bytes, a.uplink, a.downlink) == (b.memory_bytes, b.uplink, b.downlink)
        alike = alike and self._sums[one] == self._sums[other]
        alike = alike and (self._enter[one], self._leave[one]) == (self._enter[other], self._leave[other])
        return alike and self._plain(one) and self._plain(other) and not self._pins.peers & {one, other}

    def lent_bytes(self, peer: int, cache_tokens: int) -> int:
        """Return the memory for a stage; on the owner's machine, less what the model ends kept there take."""
        profile, owner = self.peers[peer], self.owner
        if owner is None or owner.peer != profile.peer:
            return profile.memory_bytes
        return profile.memory_bytes - self.owner_bytes(cache_tokens)

    def owner_bytes(self, cache_tokens: int) -> int:
        """Return the memory of the model ends at the owner, the first one's retained boundary included."""
        head = self.first + self.length
        size = stage_bytes(self.blocks[head:], self.needs, 0, cache_tokens) if head < len(self.blocks) else 0
        if self.first:
            sent = retained_bytes(self.blocks, self.first, self.needs)
            size += stage_bytes(self.blocks[: self.first], self.needs, sent, cache_tokens)
        return size

    def _plain(self, peer: int) -> bool:
        """Return whether every hop of the peer uses its access link, whichever machine is its neighbour."""
        others = [i for i in range(self.count) if i != peer]
        return all(self._hops[peer][i].shared and self._hops[i][peer].shared for i in others)

    def _sent(self, cut: int) -> int:
        position = self.first + cut
        return self.blocks[position - 1].output_bytes if position else 0


def _seconds(link: DirectedLink, size_bytes: int) -> float:
    return size_bytes / link.bandwidth_bytes_per_s + link.latency_s


def context_pages(needs: ServingNeeds) -> int:
    """Return the cache pages of one whole context."""
    return -(-needs.context_tokens // needs.page_tokens)


def least_tokens(needs: ServingNeeds) -> int:
    """Return the tokens of the smallest cache: one whole context in pages, plus the probe's page."""
    return (context_pages(needs) + 1) * needs.page_tokens
