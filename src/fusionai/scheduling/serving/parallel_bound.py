"""Computes an upper bound on the tokens a second of all serving pipelines (lines) that a pool could have.

The bound is the least of these:

- Work: per token and block a machine needs at least t seconds, for the block's operations or for reading its weights
  once for as many sessions as memory has room for. For any weights y of the blocks, tokens * sum y <= sum over machines
  of the largest y / t of any block.
- Rounds: the parts of the model that a line's machines hold add up to one, and their seconds (each with its hop) add up
  to at most the round, which may not exceed the longest round allowed. A line's n sessions get n / round, which lies
  below the chord between the shortest and the longest round. With a price on the seconds, each machine's part can be
  chosen separately (Lagrangian relaxation), so every price gives a bound, and the lowest bound counts.
- The job owner's ends process every token.

`parallel` reports the gap to this bound.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from fusionai.scheduling.kernels.compiled import Floats
from fusionai.scheduling.problem.embedding_and_head import ends_of, middle
from fusionai.scheduling.problem.types import BlockCost, PeerProfile, Plan, Problem, ServingNeeds
from fusionai.scheduling.serving.load import session_tokens, stage_room
from fusionai.scheduling.serving.pipeline import block_s

CELLS: Final = 40
"""Cells of the grid over the parts of the model that a machine may hold."""
PRICES: Final = 30


def bound_tokens_per_s(problem: Problem, chain_plan: Plan, most_sessions: int, most_s: float) -> float:
    """Upper bound for lines with at most `most_sessions` sessions each and rounds of at most `most_s`. `chain_plan`:
    plan of the fastest line, whose certificate bounds the shortest round."""
    needs = problem.serving
    assert needs is not None, "a serving problem says what it needs"
    ends = ends_of(problem)
    first, last = ends.first, len(problem.blocks) - ends.last
    blocks = middle(problem)
    usable = {*chain_plan.spares, *(stage.peer for stage in chain_plan.stages if "stage" in stage.roles)}
    peers = [peer for peer in problem.peers if peer.peer in usable]
    soonest_s = 1 / chain_plan.certificate.bound_tokens_per_s
    bounds = [
        _working(peers, blocks, needs, most_sessions),
        _rounds(problem, peers, blocks, needs, most_sessions, soonest_s, most_s),
        _owner_per_s(problem, needs, [*problem.blocks[:first], *problem.blocks[last:]], most_sessions),
    ]
    # Raised by 1e-9, so that rounding can't put the bound below a speed that lines reach.
    return min(bounds) * (1 + 1e-9)


def _working(peers: list[PeerProfile], blocks: tuple[BlockCost, ...], needs: ServingNeeds, most_sessions: int) -> float:
    """The bound by work: operations and reading of weights."""
    speed = np.array([peer.effective_flops_per_s for peer in peers])[:, None]
    reading = np.array([peer.memory_bandwidth_bytes_per_s * peer.share for peer in peers])[:, None]
    memory = np.array([float(peer.memory_bytes) for peer in peers])[:, None]
    rooms = [stage_room([block], (), needs) for block in blocks]
    fixed = np.array([float(room.fixed) for room in rooms])
    each = np.array([float(room.each) for room in rooms])
    flops = np.array([block.forward_flops for block in blocks])
    read = np.array([float(block.parameter_bytes - block.looked_up_bytes) for block in blocks])
    rows = np.where(each > 0, np.floor((memory - fixed) / np.where(each > 0, each, 1.0)), float(most_sessions))
    rows = np.where(memory >= fixed, np.minimum(rows, most_sessions), 0.0)
    read_s = np.where(reading > 0, read / np.where(reading > 0, reading, 1.0), 0.0)
    seconds = np.maximum(np.maximum(flops / speed, read_s / np.maximum(rows, 1.0)), 1e-15)
    able = rows >= 1
    if not able.any(axis=0).all():
        return 0.0
    typical = np.median(np.where(able, seconds, np.inf), axis=0)
    best = np.inf
    for given in (flops, read, seconds.min(axis=0), np.where(np.isfinite(typical), typical, 0.0)):
        if given.sum() > 0:
            most = np.where(able, given / seconds, 0.0).max(axis=1)
            best = min(best, float(most.sum() / given.sum()))
    return best


def _rounds(
    problem: Problem,
    peers: list[PeerProfile],
    blocks: tuple[BlockCost, ...],
    needs: ServingNeeds,
    most_sessions: int,
    soonest_s: float,
    most_s: float,
) -> float:
    """The bound by rounds, with the sessions that memory holds."""
    most_s = max(most_s, soonest_s)
    # Parts are counted in blocks that keep a cache; the others (a table, a head) count as free.
    counted = [block for block in blocks if block.cache_token_bytes or block.cache_session_bytes] or list(blocks)
    count = len(counted)
    tokens = session_tokens(needs)
    weights = count * float(min(block.parameter_bytes for block in counted))
    each = count * float(min(tokens * block.cache_token_bytes + block.cache_session_bytes for block in counted))
    memory = np.array([float(peer.memory_bytes) for peer in peers])
    seconds = np.array([count * min(block_s(block, peer) for block in counted) for peer in peers])
    # A machine holds at least one of the counted blocks, and at most as many as fit beside one session.
    most_part = np.minimum(1.0, memory / max(weights + each, 1e-9))
    able = most_part * count >= 1 - 1e-9
    if not able.any():
        return 0.0
    memory, seconds, most_part = memory[able, None], seconds[able, None], most_part[able, None]
    shares = most_s * np.array([_most_rate(peer, counted) for peer in peers])[able, None]
    hop_s = _hops(problem, peers, blocks)[able, None]
    grid = np.linspace(0.0, 1.0, CELLS + 1)[None, :]
    parts = 1 / count + (most_part - 1 / count) * grid
    low, high = parts[:, :-1], parts[:, 1:]
    room = (memory - low * weights) / each if each > 0 else np.full(low.shape, np.inf)
    held = np.maximum(np.minimum(np.minimum(most_sessions * high, room), shares), 0.0)
    best = np.inf
    for cap_s in np.quantile(hop_s, (0.0, 0.2, 1.0)):
        # The first stage of a line has no hop into it, so every line gets one hop (`cap_s`) back.
        hops_s = np.minimum(hop_s, cap_s)
        # Tokens a second of a session, from the chord of 1 / seconds, credited to a machine by its part of the model.
        worth = 1 / soonest_s + 1 / most_s - (seconds + hops_s / high - cap_s) / (soonest_s * most_s)
        value = held * np.clip(worth, 0.0, 1 / soonest_s)
        spare_s = most_s + cap_s - seconds
        left_s = np.maximum(spare_s * low, spare_s * high) - hops_s
        for price in (0.0, *np.geomspace(1e-3, 1e2, PRICES)):
            scaled = price * most_sessions / (soonest_s * most_s)
            best = min(best, float(np.maximum((value + scaled * left_s).max(axis=1), 0.0).sum()))
    return best


def _most_rate(peer: PeerProfile, blocks: list[BlockCost]) -> float:
    """Models (all counted blocks) a second that `peer` computes, by arithmetic alone."""
    return peer.effective_flops_per_s / max(len(blocks) * min(block.forward_flops for block in blocks), 1e-9)


def _hops(problem: Problem, peers: list[PeerProfile], blocks: tuple[BlockCost, ...]) -> Floats:
    """[N]: least seconds of a hop into each peer; 0 for the owner's machine and peers with links of their own."""
    crossing = min((block.output_bytes for block in blocks[:-1]), default=0)
    up = max(peer.uplink.bandwidth_bytes_per_s for peer in peers)
    latency_s = min(peer.uplink.latency_s for peer in peers)
    special = {end for key in problem.links for end in key.split(">")}
    special |= set[str]() if problem.owner is None else {problem.owner.peer}
    return np.array(
        [
            0.0
            if peer.peer in special
            else crossing / min(up, peer.downlink.bandwidth_bytes_per_s) + latency_s + peer.downlink.latency_s
            for peer in peers
        ]
    )


def _owner_per_s(problem: Problem, needs: ServingNeeds, ends: list[BlockCost], most_sessions: int) -> float:
    owner = problem.owner
    if owner is None:
        return float("inf")
    seconds = sum(block_s(block, owner, most_sessions) for block in ends) / most_sessions
    down = float(needs.result_bytes)
    if ends and ends[-1] is problem.blocks[-1]:
        down = float(problem.blocks[-2].output_bytes)
    seconds = max(seconds, down / owner.downlink.bandwidth_bytes_per_s)
    if ends and ends[0] is problem.blocks[0]:
        seconds = max(seconds, problem.blocks[0].output_bytes / owner.uplink.bandwidth_bytes_per_s)
    return 1 / max(seconds, 1e-15)
