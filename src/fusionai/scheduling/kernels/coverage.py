"""Loops of the coverage planner, on arrays: they choose the interval of blocks that each peer takes.

Peer i holds [a, b) and passes `rate(i, a, b)` microbatches a second through all of it. A block's cover is the sum of
the rates of its holders, a plan's throughput the least cover of any block. The loops minimise a potential, the sum over
blocks of exp(-sharpness * cover), which is low if the cover is even. With all other peers fixed, prefix sums give the
best of all intervals of one peer (`best_interval`). Random numbers come from a seed that is an argument.

`coverage` fills `Swarm` and reads the result; `coverage_bound` uses `ceiling`; `compiled` makes machine code.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_MODULUS = 2147483647
_FACTOR = 48271


class Swarm(NamedTuple):
    """Costs of L blocks and capacities of N peers."""

    work: Floats
    """[L + 1]: FLOPs of the blocks before each cut."""
    speed: Floats
    """[N]: FLOP/s"""
    up: Floats
    """[N]: bytes per second"""
    down: Floats
    forward_bytes: Floats
    """[L + 1]: bytes over each cut, 0 at the model's ends if nothing crosses there."""
    gradient_bytes: Floats
    reach: Integers
    """[N, L]: last cut that the peer's memory reaches with an interval from each block on; the block itself if it can't
    hold that block."""


class Layout(NamedTuple):
    """Interval and rate of each peer, [N] each; `start == end`: idle. Changed in place."""

    start: Integers
    end: Integers
    rate: Floats
    cover: Floats
    """[L]: sum of the rates of each block's holders."""


def rate(swarm: Swarm, peer: int, start: int, end: int) -> float:
    """Microbatches a second that pass through `peer` with blocks [start, end)."""
    busy_s = (swarm.work[end] - swarm.work[start]) / swarm.speed[peer]
    up_s = (swarm.gradient_bytes[start] + swarm.forward_bytes[end]) / swarm.up[peer]
    down_s = (swarm.forward_bytes[start] + swarm.gradient_bytes[end]) / swarm.down[peer]
    return 1.0 / max(busy_s, up_s, down_s, 1e-12)


def best_interval(
    swarm: Swarm, sums: Floats, peer: int, sharpness: float, noise: float, state: int
) -> tuple[int, int, int]:
    """The interval that lowers the potential most (`sums`: its prefix sums), or 0, 0 if the peer can hold none.

    `noise`: largest fraction by which a random factor per start lowers the gains. Returns start, end and the random
    state.
    """
    best_gain = 0.0
    best_start = 0
    best_end = 0
    length = swarm.work.shape[0] - 1
    speed = swarm.speed[peer]
    up = swarm.up[peer]
    down = swarm.down[peer]
    for start in range(length):
        factor = 1.0
        if noise > 0.0:
            state = state * _FACTOR % _MODULUS
            factor = 1.0 - noise * state / _MODULUS
        for end in range(start + 1, swarm.reach[peer, start] + 1):
            here = sums[end] - sums[start]
            # 1 - exp(-x) is at most 1.
            if here * factor <= best_gain:
                continue
            busy_s = (swarm.work[end] - swarm.work[start]) / speed
            up_s = (swarm.gradient_bytes[start] + swarm.forward_bytes[end]) / up
            down_s = (swarm.forward_bytes[start] + swarm.gradient_bytes[end]) / down
            x = sharpness / max(busy_s, up_s, down_s, 1e-12)
            # 1 - exp(-x) is at most x.
            if here * factor * x <= best_gain:
                continue
            gain = here * factor * (1.0 - np.exp(-x))
            if gain > best_gain:
                best_gain = gain
                best_start = start
                best_end = end
    return best_start, best_end, state


def take(layout: Layout, peer: int) -> None:
    """Take the peer's interval away."""
    for block in range(layout.start[peer], layout.end[peer]):
        layout.cover[block] -= layout.rate[peer]
    layout.end[peer] = layout.start[peer]
    layout.rate[peer] = 0.0


def give(swarm: Swarm, layout: Layout, peer: int, start: int, end: int) -> None:
    """Give [start, end) to an idle peer."""
    layout.start[peer] = start
    layout.end[peer] = end
    if start < end:
        layout.rate[peer] = rate(swarm, peer, start, end)
        for block in range(start, end):
            layout.cover[block] += layout.rate[peer]


def prefix(cover: Floats, sharpness: float, least: float, sums: Floats) -> None:
    """Write prefix sums of the potential, relative to a cover of `least`, to `sums`."""
    total = 0.0
    for block in range(cover.shape[0]):
        sums[block] = total
        total += np.exp(-sharpness * (cover[block] - least))
    sums[cover.shape[0]] = total


def sweep(swarm: Swarm, layout: Layout, order: Integers, sharpness: float) -> int:
    """Let each peer in turn take its best interval. Returns the number of peers that moved."""
    sums = np.zeros(swarm.work.shape[0], dtype=np.float64)
    moved = 0
    for place in range(order.shape[0]):
        peer: int = order[place]
        old_start = layout.start[peer]
        old_end = layout.end[peer]
        take(layout, peer)
        prefix(layout.cover, sharpness, layout.cover.min(), sums)
        start, end, _ = best_interval(swarm, sums, peer, sharpness, 0.0, 1)
        give(swarm, layout, peer, start, end)
        if start != old_start or end != old_end:
            moved += 1
    return moved


def recount(layout: Layout) -> None:
    """Compute the cover from the rates again: sums that were changed often carry rounding errors."""
    layout.cover[:] = 0.0
    for peer in range(layout.start.shape[0]):
        for block in range(layout.start[peer], layout.end[peer]):
            layout.cover[block] += layout.rate[peer]


def shake(
    swarm: Swarm,
    layout: Layout,
    movable: Integers,
    rounds: int,
    sharpness: float,
    last_sharpness: float,
    noise: float,
    heat: float,
    crew: int,
    goal: float,
    seed: int,
) -> tuple[float, int]:
    """Simulated annealing: in each round remove up to `crew` of the `movable` peers and place them again, and keep the
    result if it is no worse.

    `heat`, which falls to 0 linearly, is about the rise of the potential's logarithm that is still accepted; `noise` of
    `best_interval` falls likewise. `sharpness` (divided by the least cover) grows to `last_sharpness`. Ends early at a
    least cover of `goal`. Leaves the best layout seen in `layout`; returns its least cover and the rounds done.
    """
    length = swarm.work.shape[0] - 1
    count = movable.shape[0]
    sums = np.zeros(length + 1, dtype=np.float64)
    best_start = layout.start.copy()
    best_end = layout.end.copy()
    recount(layout)
    best = layout.cover.min()
    state = seed % (_MODULUS - 1) + 1
    chosen = np.zeros(crew, dtype=np.int64)
    old_start = np.zeros(crew, dtype=np.int64)
    old_end = np.zeros(crew, dtype=np.int64)
    done = 0
    for step in range(rounds):
        if best >= goal or count == 0:
            break
        done += 1
        part = step / rounds
        level = max(best, 1e-300)
        sharp = sharpness * (last_sharpness / sharpness) ** part / level
        least = layout.cover.min()
        prefix(layout.cover, sharp, least, sums)
        before = np.log(sums[length]) - sharp * least
        state = state * _FACTOR % _MODULUS
        size = 1 + state % crew
        taken = 0
        for _ in range(4 * size):
            if taken == size:
                break
            state = state * _FACTOR % _MODULUS
            peer = int(movable[state % count])
            known = False
            for other in range(taken):
                if chosen[other] == peer:
                    known = True
            if known:
                continue
            chosen[taken] = peer
            old_start[taken] = layout.start[peer]
            old_end[taken] = layout.end[peer]
            take(layout, peer)
            taken += 1
        cool = noise * (1.0 - part)
        for place in range(taken):
            peer = chosen[place]
            prefix(layout.cover, sharp, layout.cover.min(), sums)
            start, end, state = best_interval(swarm, sums, peer, sharp, cool, state)
            give(swarm, layout, peer, start, end)
        least = layout.cover.min()
        prefix(layout.cover, sharp, least, sums)
        after = np.log(sums[length]) - sharp * least
        state = state * _FACTOR % _MODULUS
        if after > before - heat * (1.0 - part) * np.log((state + 1) / (_MODULUS + 1)):
            for place in range(taken):
                take(layout, chosen[place])
            for place in range(taken):
                give(swarm, layout, chosen[place], old_start[place], old_end[place])
        elif least > best:
            best = least
            best_start[:] = layout.start
            best_end[:] = layout.end
        if step % 1024 == 1023:
            recount(layout)
    for peer in range(layout.start.shape[0]):
        layout.start[peer] = best_start[peer]
        layout.end[peer] = best_end[peer]
        idle = best_start[peer] == best_end[peer]
        layout.rate[peer] = 0.0 if idle else rate(swarm, peer, best_start[peer], best_end[peer])
    recount(layout)
    return layout.cover.min(), done


def ceiling(swarm: Swarm, weights: Floats, cap: float, reached: Integers) -> float:
    """Sum over peers of the largest min(rate, cap) * weight of an interval. If the weights add up to 1, no throughput
    of at most `cap` exceeds it. Writes each peer's best interval to `reached` [N, 2]."""
    length = swarm.work.shape[0] - 1
    sums = np.zeros(length + 1, dtype=np.float64)
    for block in range(length):
        sums[block + 1] = sums[block] + weights[block]
    total = 0.0
    for peer in range(swarm.speed.shape[0]):
        best = 0.0
        reached[peer, 0] = 0
        reached[peer, 1] = 0
        for start in range(length):
            for end in range(start + 1, swarm.reach[peer, start] + 1):
                here = sums[end] - sums[start]
                if here * cap <= best:
                    continue
                value = here * min(rate(swarm, peer, start, end), cap)
                if value > best:
                    best = value
                    reached[peer, 0] = start
                    reached[peer, 1] = end
        total += best
    return total


def petals(swarm: Swarm, layout: Layout, room: Integers, moves: int) -> None:
    """Peers join in order, each with as many blocks as it can hold at the window with the lowest cover. Then up to
    `moves` rounds follow, in which a peer moves if that raises the least cover."""
    length = swarm.work.shape[0] - 1
    peers = swarm.speed.shape[0]
    for turn in range(moves + 1):
        moved = False
        for peer in range(peers):
            if room[peer] == 0:
                continue
            old_start = layout.start[peer]
            old_end = layout.end[peer]
            before = layout.cover.min()
            take(layout, peer)
            count: int = room[peer]
            chosen = -1
            lowest = np.zeros(count, dtype=np.float64)
            for start in range(length - count + 1):
                if swarm.reach[peer, start] < start + count:
                    continue
                window = np.sort(layout.cover[start : start + count])
                lower = chosen < 0
                if not lower:
                    for place in range(count):
                        if window[place] != lowest[place]:
                            lower = window[place] < lowest[place]
                            break
                if lower:
                    chosen = start
                    lowest[:] = window
            if chosen < 0:
                give(swarm, layout, peer, old_start, old_end)
                continue
            give(swarm, layout, peer, chosen, chosen + count)
            if turn == 0 or chosen == old_start:
                continue
            if layout.cover.min() > before * (1.0 + 1e-9):
                moved = True
            else:
                take(layout, peer)
                give(swarm, layout, peer, old_start, old_end)
        if turn > 0 and not moved:
            break
    recount(layout)
