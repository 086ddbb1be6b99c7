"""Searches over chains of stages, on arrays: exact (`grow`), and at random with noise that dies down (`anneal`).
Decides which pipeline has the shortest step; knows no names.

The costs are those of `pipeline.Pipeline.extend`, operation by operation, so that both give the same bits. Runs as it
stands or compiled (`compiled`): nothing here but loops over numbers. Random numbers come from a seed.

Neighbours: `pipeline` (the formulas), `search` (fills `Tables`, calls `grow`), `annealing` (calls `fill`, `anneal`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_MODULUS = 2147483647
_FACTOR = 48271


class Tables(NamedTuple):
    """What the loops look up: P peers (index P: the job owner), L blocks."""

    flops: Floats
    """[L, L + 1]: of blocks [a, b)."""
    held: Integers
    """[P, L, L + 1]: microbatches that fit beside the stage; negative where the stage itself does not."""
    speed: Floats
    busy_s: Floats
    """[P]: the owner's loss stage on the same machine."""
    commit_s: Floats
    """[P]: of a pipeline that begins there."""
    bandwidth: Floats
    """[P + 1, P + 1], bytes per second from row to column."""
    latency_s: Floats
    shared: npt.NDArray[np.bool_]
    """Whether the hop occupies both access links."""
    up: Floats
    down: Floats
    forward_bytes: Floats
    """[L + 1]: over each cut."""
    gradient_bytes: Floats
    resident_bytes: Floats
    """[L + 1]: of blocks [0, b)."""
    memory_bytes: Floats
    """[P]"""
    roomiest: Integers
    """[P]: peers by memory, the largest first."""
    twins: Integers
    """[P]: mask of earlier peers that cost the same and must be used before."""
    hop_s: float
    """The cheapest between two peers."""


class Labels(NamedTuple):
    """Suffixes in the order they were found; number 0 is the tail. [budget + 2] each."""

    mask: Integers
    head: Integers
    start: Integers
    period_s: Floats
    transit_s: Floats
    up_s: Floats
    down_s: Floats
    rest: Integers
    """The suffix without its first stage."""
    after: Integers
    """The next one of the same state; 0 at the end."""
    beaten: npt.NDArray[np.bool_]
    first: Integers
    """[slots]: per state its first suffix, 0 for a free slot (the tail is in none). A state lies in the first free
    slot from its key on."""


def extend(
    tables: Tables,
    microbatches: int,
    stages: int,
    suffix: tuple[int, int, float, float, float, float],
    peer: int,
    start: int,
) -> tuple[int, float, float, float, float]:
    """Put [start, end) on `peer` before a suffix (end, head, period, transit, up, down) of so many stages.

    Returns held, period, transit, up, down of the longer suffix; held < 0: memory can't hold it.
    """
    end, head, period_s, transit_s, head_up_s, head_down_s = suffix
    held = tables.held[peer, start, end]
    if held < min(microbatches, stages + 1):
        return -1, 0.0, 0.0, 0.0, 0.0
    compute_s = tables.flops[start, end] / tables.speed[peer]
    transit_s = transit_s + compute_s
    period_s = max(period_s, compute_s + tables.busy_s[peer])
    up_s = 0.0
    down_s = 0.0
    if head >= 0:
        forward_bytes = tables.forward_bytes[end]
        gradient_bytes = tables.gradient_bytes[end]
        forward_s = forward_bytes / tables.bandwidth[peer, head]
        backward_s = gradient_bytes / tables.bandwidth[head, peer]
        transit_s += forward_s + backward_s + tables.latency_s[peer, head] + tables.latency_s[head, peer]
        if tables.shared[peer, head]:
            up_s = forward_bytes / tables.up[peer]
            head_down_s += forward_bytes / tables.down[head]
        if tables.shared[head, peer]:
            down_s = gradient_bytes / tables.down[peer]
            head_up_s += gradient_bytes / tables.up[head]
        period_s = max(period_s, forward_s, backward_s, up_s, down_s, head_up_s, head_down_s)
    if held < microbatches:
        period_s = max(period_s, transit_s / held)
    if start == 0:
        transit_s += tables.commit_s[peer]
    return held, period_s, transit_s, up_s, down_s


def rest_s(tables: Tables, rounds: int, used: int, left: int, flops: float, period_s: float) -> float:
    """Least `rounds * T + transit of what is left` over periods T from `period_s` on; `left` peers may still come.

    The FLOPs are poured over the fastest free peers, T's worth each, every one of them a hop away. Between two values
    of T that fill whole numbers of peers the sum is linear in T, so only those values and `period_s` itself count.
    """
    # A hair below, so that rounding can't push the bound above a step that is attained.
    flops = flops * (1 - 1e-12)
    least = np.inf
    total = 0.0
    count = 0
    for peer in range(tables.busy_s.shape[0]):
        if count == left:
            break
        if used >> peer & 1:
            continue
        speed: float = tables.speed[peer]
        if total > 0:
            exact_s = flops / total
            if exact_s <= period_s:
                break
            least = min(least, rounds * exact_s + count * (exact_s + tables.hop_s))
        if total + speed > 0 and flops <= period_s * (total + speed):
            # With this one, `period_s` is enough for everybody: the rest of it is what the others leave.
            part_s = max(0.0, flops - period_s * total) / speed
            return min(least, rounds * period_s + count * period_s + part_s + (count + 1) * tables.hop_s)
        total += speed
        count += 1
    if total > 0:
        exact_s = flops / total
        least = min(least, rounds * exact_s + count * (exact_s + tables.hop_s))
    return least


def grow(
    tables: Tables,
    labels: Labels,
    microbatches: int,
    tail_stages: int,
    fewest: int,
    most: int,
    required: int,
    best_s: float,
    budget: int,
) -> tuple[int, int, float, int, bool]:
    """Lengthen label 0, the tail, to whole pipelines of fewer than `best_s` seconds, at most `budget` extensions.

    Returns the label and the peer put before it of the best one (-1 if none beats `best_s`), its seconds, the number of
    extensions, and whether everything was looked at.
    """
    peers = tables.busy_s.shape[0]
    length = tables.flops.shape[0]
    slots = labels.first.shape[0]
    rounds = microbatches - 1
    best_rest = -1
    best_peer = -1
    explored = 0
    begin = 0
    end = 1
    order = np.zeros(1, dtype=np.int64)
    for depth in range(1, most + 1):
        left = most - depth
        count = end
        for place in range(order.shape[0]):
            label: int = order[place]
            if labels.beaten[label]:
                continue
            mask: int = labels.mask[label]
            stop: int = labels.start[label]
            suffix = (
                stop,
                labels.head[label],
                labels.period_s[label],
                labels.transit_s[label],
                labels.up_s[label],
                labels.down_s[label],
            )
            for peer in range(peers):
                if mask >> peer & 1 or tables.twins[peer] & ~mask:
                    continue
                used = mask | (1 << peer)
                missing = ones(required & ~used)
                if missing > left:
                    continue
                for start in range(stop - 1, max(missing, fewest - depth, 0) - 1, -1):
                    compute_s: float = tables.flops[start, stop] / tables.speed[peer]
                    if rounds * max(suffix[2], compute_s) + suffix[3] + compute_s >= best_s:
                        break
                    if start > 0 and left == 0:
                        continue
                    explored += 1
                    held, period_s, transit_s, up_s, down_s = extend(
                        tables, microbatches, tail_stages + depth - 1, suffix, peer, start
                    )
                    if held < 0:
                        continue
                    if start == 0:
                        if missing == 0 and rounds * period_s + transit_s < best_s:
                            best_s = rounds * period_s + transit_s
                            best_rest = label
                            best_peer = peer
                        continue
                    if room_bytes(tables, used, left) < tables.resident_bytes[start] * (1 - 1e-12):
                        continue
                    rest = rest_s(tables, rounds, used, left, tables.flops[0, start], period_s)
                    if transit_s + rest >= best_s:
                        continue
                    # The state's suffixes hang together; whatever beats the new one, or is beaten by it, is among them.
                    slot = ((used * peers + peer) * (length + 1) + start) % slots
                    while labels.first[slot] > 0:
                        other = labels.first[slot]
                        if labels.mask[other] == used and labels.head[other] == peer and labels.start[other] == start:
                            break
                        slot = (slot + 1) % slots
                    worse = False
                    other = labels.first[slot]
                    before = 0
                    while other > 0:
                        if (
                            labels.period_s[other] <= period_s
                            and labels.transit_s[other] <= transit_s
                            and labels.up_s[other] <= up_s
                            and labels.down_s[other] <= down_s
                        ):
                            worse = True
                            break
                        following = labels.after[other]
                        if (
                            period_s <= labels.period_s[other]
                            and transit_s <= labels.transit_s[other]
                            and up_s <= labels.up_s[other]
                            and down_s <= labels.down_s[other]
                        ):
                            labels.beaten[other] = True
                            if before > 0:
                                labels.after[before] = following
                            else:
                                labels.first[slot] = following
                        else:
                            before = other
                        other = following
                    if worse:
                        continue
                    labels.mask[count] = used
                    labels.head[count] = peer
                    labels.start[count] = start
                    labels.period_s[count] = period_s
                    labels.transit_s[count] = transit_s
                    labels.up_s[count] = up_s
                    labels.down_s[count] = down_s
                    labels.rest[count] = label
                    labels.beaten[count] = False
                    labels.after[count] = labels.first[slot]
                    labels.first[slot] = count
                    count += 1
                if explored > budget:
                    return best_rest, best_peer, best_s, explored, False
        begin, end = end, count
        if begin == end:
            break
        order = by_start(labels.start, begin, end, length)
    return best_rest, best_peer, best_s, explored, True


def by_start(starts: Integers, begin: int, end: int, length: int) -> Integers:
    """Labels from `begin` to `end`, those with the least before them first: what they lead to prunes the others."""
    places = np.zeros(length + 2, dtype=np.int64)
    for label in range(begin, end):
        places[starts[label] + 1] += 1
    for start in range(1, length + 2):
        places[start] += places[start - 1]
    order = np.zeros(end - begin, dtype=np.int64)
    for label in range(begin, end):
        order[places[starts[label]]] = label
        places[starts[label]] += 1
    return order


def room_bytes(tables: Tables, used: int, left: int) -> float:
    """What the `left` largest free peers lend."""
    room = 0.0
    count = 0
    for place in range(tables.roomiest.shape[0]):
        if count == left:
            break
        peer: int = tables.roomiest[place]
        if used >> peer & 1:
            continue
        room += tables.memory_bytes[peer]
        count += 1
    return room


def ones(mask: int) -> int:
    count = 0
    while mask:
        mask &= mask - 1
        count += 1
    return count


def step_s(
    tables: Tables,
    tail: tuple[int, int, float, float, float, float],
    microbatches: int,
    tail_stages: int,
    order: Integers,
    cuts: Integers,
    count: int,
    limit_s: float,
) -> float:
    """Of the pipeline of `order[k]` holding [cuts[k], cuts[k + 1]) for k < count before `tail`; inf if it doesn't fit
    or takes `limit_s` or longer."""
    suffix = tail
    for place in range(count - 1, -1, -1):
        start: int = cuts[place]
        peer: int = order[place]
        stages = tail_stages + count - 1 - place
        held, period_s, transit_s, up_s, down_s = extend(tables, microbatches, stages, suffix, peer, start)
        if held < 0 or (microbatches - 1) * period_s + transit_s >= limit_s:
            return np.inf
        suffix = (start, peer, period_s, transit_s, up_s, down_s)
    return (microbatches - 1) * suffix[2] + suffix[3]


def fill(
    tables: Tables,
    tail: tuple[int, int, float, float, float, float],
    microbatches: int,
    tail_stages: int,
    ranked: Integers,
    period_s: float,
    most: int,
    order: Integers,
    cuts: Integers,
) -> int:
    """Stages of at most `period_s`, the last first, by the peers as they are ranked, each as long as it can be; into
    `order` and `cuts`. Returns how many; 0 if they end before the first block."""
    suffix = tail
    count = 0
    for place in range(ranked.shape[0]):
        if suffix[0] == 0 or count == most:
            break
        peer: int = ranked[place]
        # From the longest stage the period allows to the shortest, until one fits.
        for start in range(suffix[0]):
            if tables.flops[start, suffix[0]] / tables.speed[peer] > period_s:
                continue
            held, slowest_s, transit_s, up_s, down_s = extend(
                tables, microbatches, tail_stages + count, suffix, peer, start
            )
            if held >= 0 and slowest_s <= max(period_s, suffix[2]):
                suffix = (start, peer, slowest_s, transit_s, up_s, down_s)
                order[count] = peer
                cuts[count] = start
                count += 1
                break
    if suffix[0] > 0:
        return 0
    order[:count] = order[:count][::-1].copy()
    cuts[:count] = cuts[:count][::-1].copy()
    cuts[count] = tail[0]
    return count


def anneal(
    tables: Tables,
    tail: tuple[int, int, float, float, float, float],
    microbatches: int,
    tail_stages: int,
    fewest: int,
    most: int,
    required: npt.NDArray[np.bool_],
    order: Integers,
    cuts: Integers,
    count: int,
    rounds: int,
    heat: float,
    seed: int,
) -> tuple[int, float]:
    """Change the pipeline at random, `rounds` times: cuts move, stages change places or peers, come and go. What is no
    slower is kept, and at first also what is slower by about `heat` of a step.

    Leaves the fastest pipeline seen in `order` [P] and `cuts` [P + 1]; returns its stages and seconds.
    """
    peers = tables.busy_s.shape[0]
    length = tables.flops.shape[0]
    now_s = step_s(tables, tail, microbatches, tail_stages, order, cuts, count, np.inf)
    best_s = now_s
    best_count = count
    best_order = order.copy()
    best_cuts = cuts.copy()
    # All peers: those of the pipeline first, in its order; behind them whoever is free.
    line = np.zeros(peers, dtype=np.int64)
    line[:count] = order[:count]
    place = count
    for peer in range(peers):
        free = True
        for used in range(count):
            if order[used] == peer:
                free = False
        if free:
            line[place] = peer
            place += 1
    bounds = cuts.copy()
    old_line = line.copy()
    old_bounds = bounds.copy()
    state = seed % (_MODULUS - 1) + 1
    for step in range(rounds):
        old_count = count
        old_line[:] = line
        old_bounds[:] = bounds
        state = state * _FACTOR % _MODULUS
        move = state % 8
        state = state * _FACTOR % _MODULUS
        one = state % count
        state = state * _FACTOR % _MODULUS
        other = state % count
        state = state * _FACTOR % _MODULUS
        draw = state
        if move <= 2:
            # A block or two from one stage to another: every cut between them moves.
            first, last = min(one, other), max(one, other)
            if move == 0:
                last = min(first + 1, count - 1)
            shift = (1 + draw // 2 % 2) * (1 if draw % 2 else -1)
            for cut in range(first + 1, last + 1):
                bounds[cut] += shift
        elif move == 3:
            # Two stages change places; every other time their lengths go along.
            line[one], line[other] = line[other], line[one]
            if draw % 2:
                first, last = min(one, other), max(one, other)
                shift = (bounds[last + 1] - bounds[last]) - (bounds[first + 1] - bounds[first])
                for cut in range(first + 1, last + 1):
                    bounds[cut] += shift
        elif move == 4:
            # A stage goes elsewhere with its length.
            peer = line[one]
            while one < other:
                line[one] = line[one + 1]
                bounds[one + 1] = bounds[one] + bounds[one + 2] - bounds[one + 1]
                one += 1
            while one > other:
                line[one] = line[one - 1]
                bounds[one] = bounds[one + 1] - (bounds[one] - bounds[one - 1])
                one -= 1
            line[one] = peer
        elif move == 5:
            # Another peer for a stage.
            if count == peers:
                continue
            free_at = count + draw % (peers - count)
            line[one], line[free_at] = line[free_at], line[one]
        elif move == 6:
            # One stage fewer: its blocks go to both neighbours.
            if count <= max(fewest, 1) or count == 1:
                continue
            size = bounds[one + 1] - bounds[one]
            cut = bounds[one] + draw % (size + 1)
            if one == 0:
                cut = bounds[0]
            elif one == count - 1:
                cut = bounds[count]
            peer = line[one]
            for behind in range(one, count - 1):
                line[behind] = line[behind + 1]
            line[count - 1] = peer
            bounds[one] = cut
            for behind in range(one + 1, count):
                bounds[behind] = bounds[behind + 1]
            count -= 1
        else:
            # One stage more: somebody free takes part of a stage, before or after it.
            size = bounds[one + 1] - bounds[one]
            if count >= most or count == peers or size < 2:
                continue
            free_at = count + draw % (peers - count)
            peer = line[free_at]
            line[free_at] = line[count]
            cut = bounds[one] + 1 + draw // 2 % (size - 1)
            at = one + draw % 2
            for behind in range(count, at, -1):
                line[behind] = line[behind - 1]
            line[at] = peer
            for behind in range(count, one, -1):
                bounds[behind + 1] = bounds[behind]
            bounds[one + 1] = cut
            count += 1
        sound = True
        for cut in range(count):
            if bounds[cut] >= bounds[cut + 1] or bounds[cut + 1] > length:
                sound = False
        for behind in range(count, peers):
            if required[line[behind]]:
                sound = False
        state = state * _FACTOR % _MODULUS
        allowed_s = now_s * (1.0 - heat * (1.0 - step / rounds) * np.log((state + 1) / (_MODULUS + 1)))
        then_s = np.inf
        if sound:
            then_s = step_s(tables, tail, microbatches, tail_stages, line, bounds, count, allowed_s)
        if then_s < allowed_s:
            now_s = then_s
            if now_s < best_s:
                best_s = now_s
                best_count = count
                best_order[:count] = line[:count]
                best_cuts[: count + 1] = bounds[: count + 1]
        else:
            count = old_count
            line[:] = old_line
            bounds[:] = old_bounds
    order[:best_count] = best_order[:best_count]
    cuts[: best_count + 1] = best_cuts[: best_count + 1]
    return best_count, best_s
