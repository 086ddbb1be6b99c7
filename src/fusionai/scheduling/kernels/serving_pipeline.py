"""Exact search for the serving pipeline (pipeline) that a token crosses soonest, on arrays: peers, order and cuts.

Dynamic programming over (set of peers used, last peer, blocks placed), one level per stage: of two partial pipelines
with the same state only the faster one is kept. The time still to come is bounded by spreading the remaining blocks
over the fastest unused peers.

`serving.search` fills `LineTables` and reads the result; `compiled` makes machine code.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fusionai.scheduling.kernels.compiled import Flags, Floats, Integers


class LineTables(NamedTuple):
    """Costs of a token on P peers and L blocks."""

    seconds: Floats
    """[P, L + 1]: seconds of the blocks before each cut."""
    fits: Flags
    """[P, L, L + 1]: True if the peer can hold blocks [start, end)."""
    enter_s: Floats
    leave_s: Floats
    hop_s: Floats
    """[P, P, L + 1]: seconds from row to column over each cut."""
    twins: Integers
    """[P]: mask of peers with equal costs, which must be used before this peer."""
    ranked: Integers
    """[L + 1, P]: peers by `each_s` of the position."""
    each_s: Floats
    """[L + 1, P]: least seconds per block after the position, including the block's share of the hop."""
    most: Integers
    """[L + 1, P]: blocks after the position that the peer could hold."""
    back_s: float
    """Least seconds from the last stage back to the job owner."""


class Steps(NamedTuple):
    """Partial pipelines from the first block on; number 0 is the empty one. Each array has shape [budget + 2]."""

    mask: Integers
    last: Integers
    end: Integers
    seconds: Floats
    before: Integers
    first: Integers
    """[slots]: hash table with the number of each state, 0 for a free slot."""


def cross(
    tables: LineTables, steps: Steps, fewest: int, most: int, required: int, best_s: float, budget: int
) -> tuple[int, int, bool, int]:
    """Find the fastest pipeline under `best_s`. Returns its partial pipeline without the last stage and the peer of
    that stage (-1: none), whether the search was complete, and the number of extensions."""
    peers = tables.twins.shape[0]
    length = tables.fits.shape[1]
    slots = steps.first.shape[0]
    best_step = -1
    best_peer = -1
    explored = 0
    begin = 0
    end = 1
    for depth in range(1, most + 1):
        count = end
        for step in range(begin, end):
            mask: int = steps.mask[step]
            last: int = steps.last[step]
            start: int = steps.end[step]
            so_far: float = steps.seconds[step]
            if so_far + poured_s(tables, mask, start) >= best_s:
                continue
            for peer in range(peers):
                if mask >> peer & 1 or tables.twins[peer] & ~mask:
                    continue
                used = mask | (1 << peer)
                missing = 0
                wish = required & ~used
                while wish:
                    wish &= wish - 1
                    missing += 1
                if missing > most - depth:
                    continue
                into_s = tables.enter_s[peer] if depth == 1 else tables.hop_s[last, peer, start]
                still = max(missing, fewest - depth, 1)
                for stop in range(start + 1, length + 1):
                    if not tables.fits[peer, start, stop]:
                        continue
                    explored += 1
                    seconds: float = so_far + into_s + (tables.seconds[peer, stop] - tables.seconds[peer, start])
                    if stop == length:
                        if missing == 0 and depth >= fewest and seconds + tables.leave_s[peer] < best_s:
                            best_s = seconds + tables.leave_s[peer]
                            best_step = step
                            best_peer = peer
                        continue
                    if depth == most or stop > length - still:
                        continue
                    if seconds + poured_s(tables, used, stop) >= best_s:
                        continue
                    slot = ((used % slots) * peers * (length + 1) + peer * (length + 1) + stop) % slots
                    known = int(steps.first[slot])
                    while known > 0:
                        if steps.mask[known] == used and steps.last[known] == peer and steps.end[known] == stop:
                            break
                        slot = (slot + 1) % slots
                        known = int(steps.first[slot])
                    if known > 0:
                        if steps.seconds[known] <= seconds:
                            continue
                    else:
                        if count > budget:
                            return best_step, best_peer, False, explored
                        known = count
                        count += 1
                        steps.first[slot] = known
                        steps.mask[known] = used
                        steps.last[known] = peer
                        steps.end[known] = stop
                    steps.seconds[known] = seconds
                    steps.before[known] = step
        begin, end = end, count
        if begin == end:
            break
    return best_step, best_peer, True, explored


def poured_s(tables: LineTables, used: int, start: int) -> float:
    """Lower bound on the seconds for the blocks after `start` on unused peers, each with as many blocks as it can hold,
    and for the hop back."""
    left = tables.fits.shape[1] - start
    total = tables.back_s
    for place in range(tables.twins.shape[0]):
        if left == 0:
            break
        peer: int = tables.ranked[start, place]
        if used >> peer & 1:
            continue
        taken = min(left, tables.most[start, peer])
        total += taken * tables.each_s[start, peer]
        left -= taken
    # Lowered by 1e-12, so that rounding can't put the bound above a time that a pipeline reaches.
    return np.inf if left > 0 else total * (1 - 1e-12)
