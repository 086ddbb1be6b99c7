"""What no serving lines of a pool exceed, however they are laid, tokens a second. Proves; places nothing.

The least of these:

- Work: a machine that passes r tokens a second through its blocks works at least t of each second per token and block:
  the block's operations, or its weights read once for as many sessions as memory has room for. Whatever weights y the
  blocks are given, tokens * sum y <= sum over machines of the most y / t of any block.
- Rounds: parts of the model that machines hold add up to one per line, and so do their seconds (each with its
  hop), which no round undercuts and which are at most the longest allowed. A line's n sessions get n / round; between
  the soonest and the longest round, that is below the chord. With a price on the seconds each machine's part may be
  chosen by itself (the Lagrangian of the limit), so every price gives a bound, and the best one counts.
- The job owner's ends see every token.

Neighbours: `many_lines` prints the gap to it, `coverage_bound` does the like for training.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from fusionai.scheduling.coverage_kernels import Floats
from fusionai.scheduling.ends import ends_of, middle
from fusionai.scheduling.line_load import session_tokens, stage_room
from fusionai.scheduling.serving_line import block_s
from fusionai.scheduling.types import BlockCost, PeerProfile, Plan, Problem, ServingNeeds

CELLS: Final = 40
"""Into which the parts that a machine may hold are divided."""
PRICES: Final = 30


def bound_tokens_per_s(problem: Problem, chain_plan: Plan, most_sessions: int, most_s: float) -> float:
    """`chain_plan`: of the fastest line, with its certificate; at most `most_sessions` per line, each of which gets its
    next token within `most_s`."""
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
    # A hair above, so that rounding can't push it below what is attained.
    return min(bounds) * (1 + 1e-9)


def _working(peers: list[PeerProfile], blocks: tuple[BlockCost, ...], needs: ServingNeeds, most_sessions: int) -> float:
    """By what machines compute and read."""
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
    """By memory, and by what rounds allow."""
    most_s = max(most_s, soonest_s)
    # Parts are counted in blocks that keep a cache; the others (a table, a head) are let through for nothing.
    counted = [block for block in blocks if block.cache_token_bytes or block.cache_session_bytes] or list(blocks)
    count = len(counted)
    tokens = session_tokens(needs)
    weights = count * float(min(block.parameter_bytes for block in counted))
    each = count * float(min(tokens * block.cache_token_bytes + block.cache_session_bytes for block in counted))
    memory = np.array([float(peer.memory_bytes) for peer in peers])
    seconds = np.array([count * min(block_s(block, peer) for block in counted) for peer in peers])
    # A machine holds at least one block of those counted, at most what memory holds beside a session.
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
        # The first stage of a line has no hop into it: so much is given back to every line.
        hops_s = np.minimum(hop_s, cap_s)
        # Below the chord of 1 / seconds: what a session on so much of the model is worth.
        worth = 1 / soonest_s + 1 / most_s - (seconds + hops_s / high - cap_s) / (soonest_s * most_s)
        value = held * np.clip(worth, 0.0, 1 / soonest_s)
        spare_s = most_s + cap_s - seconds
        left_s = np.maximum(spare_s * low, spare_s * high) - hops_s
        for price in (0.0, *np.geomspace(1e-3, 1e2, PRICES)):
            scaled = price * most_sessions / (soonest_s * most_s)
            best = min(best, float(np.maximum((value + scaled * left_s).max(axis=1), 0.0).sum()))
    return best


def _most_rate(peer: PeerProfile, blocks: list[BlockCost]) -> float:
    """Parts of the model a second by arithmetic alone."""
    return peer.effective_flops_per_s / max(len(blocks) * min(block.forward_flops for block in blocks), 1e-9)


def _hops(problem: Problem, peers: list[PeerProfile], blocks: tuple[BlockCost, ...]) -> Floats:
    """[N]: least seconds of a hop into each; 0 for those with links of their own."""
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
