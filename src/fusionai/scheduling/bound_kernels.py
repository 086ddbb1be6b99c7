"""Loops of the certificate, on arrays. Compute what each peer can hold within a period; know no names.

Neighbours: `bound` fills `Ground` and reads the results.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class Ground(NamedTuple):
    """N peers, L blocks."""

    work: Floats
    """[L + 1]: FLOPs of the blocks before each cut."""
    forward_bytes: Floats
    """[L + 1]: over each cut; 0 at the ends that nothing crosses."""
    gradient_bytes: Floats
    needed_bytes: Floats
    """[L, L + 1]: of blocks [a, b) with one microbatch in flight."""
    speed: Floats
    memory_bytes: Floats
    up: Floats
    down: Floats
    latency_s: Floats
    """[N]: of uplink and downlink."""
    plain: npt.NDArray[np.bool_]
    """[N]: whoever is next, every transfer takes the peer's access link."""
    pinned: Integers
    """[L]: the peer that must hold the block; -1 for most."""
    pins: int
    """How many."""


def period_s(ground: Ground, peer: int, start: int, end: int) -> float:
    """The least period with blocks [start, end) on `peer`; inf where memory or a pin is in the way."""
    if ground.needed_bytes[start, end] > ground.memory_bytes[peer]:
        return np.inf
    if ground.pins > 0:
        for block in range(ground.pinned.shape[0]):
            if ground.pinned[block] >= 0 and (start <= block < end) != (ground.pinned[block] == peer):
                return np.inf
    seconds = (ground.work[end] - ground.work[start]) / ground.speed[peer]
    if ground.plain[peer]:
        up_s = (ground.gradient_bytes[start] + ground.forward_bytes[end]) / ground.up[peer]
        down_s = (ground.forward_bytes[start] + ground.gradient_bytes[end]) / ground.down[peer]
        seconds = max(seconds, up_s, down_s)
    return seconds


def extremes(ground: Ground) -> tuple[Floats, float]:
    """For each block the least period of any range of any peer that contains it, and the longest period of any."""
    length = ground.pinned.shape[0]
    least = np.full(length, np.inf)
    longest = 0.0
    highest = np.inf
    for peer in range(ground.speed.shape[0]):
        for start in range(length):
            for end in range(start + 1, length + 1):
                seconds = period_s(ground, peer, start, end)
                if seconds == np.inf:
                    continue
                longest = max(longest, seconds)
                if seconds >= highest:
                    continue
                for block in range(start, end):
                    least[block] = min(least[block], seconds)
                highest = least.max()
    return least, longest


def reaches(ground: Ground, periods: Floats) -> tuple[Floats, Integers]:
    """[N, K] each: most FLOPs and most blocks of one range that a peer passes within each of the ascending periods."""
    length = ground.pinned.shape[0]
    peers = ground.speed.shape[0]
    count = periods.shape[0]
    flops = np.zeros((peers, count), dtype=np.float64)
    blocks = np.zeros((peers, count), dtype=np.int64)
    for peer in range(peers):
        for start in range(length):
            for end in range(start + 1, length + 1):
                seconds = period_s(ground, peer, start, end)
                if seconds > periods[count - 1]:
                    continue
                place = int(np.searchsorted(periods, seconds))
                flops[peer, place] = max(flops[peer, place], ground.work[end] - ground.work[start])
                blocks[peer, place] = max(blocks[peer, place], end - start)
        for place in range(1, count):
            flops[peer, place] = max(flops[peer, place], flops[peer, place - 1])
            blocks[peer, place] = max(blocks[peer, place], blocks[peer, place - 1])
    return flops, blocks
