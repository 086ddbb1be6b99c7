"""Loops that search for the pipeline with the shortest step, on arrays: exact (`grow`) and simulated annealing.

The costs repeat `pipeline.Pipeline.extend` operation by operation, so that both give the same bits. The functions run
as plain Python or as machine code (`compiled`), so they contain only loops over numbers. Random numbers come from a
seed.

`pipeline` has the formulas, `search` fills `Tables` and calls `grow`, `annealing` calls `fill` and `anneal`. A "way" is
an index into `Pipeline.ways`: one combination of `levers.Levers` by which a stage saves memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fusionai.scheduling.kernels.compiled import Flags, Floats, Integers

_MODULUS = 2147483647
_FACTOR = 48271


class Tables(NamedTuple):
    """Costs for the loops: P peers (index P: the job owner), L blocks, W ways to save memory."""

    flops: Floats
    """[W, L, L + 1]: FLOPs of blocks [a, b) in each way; the next five arrays have the same shape."""
    read_bytes: Floats
    slot_bytes: Floats
    trained_bytes: Floats
    stage_bytes: Floats
    """Memory of the stage with nothing in flight."""
    flight_bytes: Floats
    """Memory of one microbatch in flight."""
    needless: Integers
    """[W]: mask of the ways that are no better if this way has room for all microbatches."""
    able: Flags
    """[P, W]: True if the peer's backend supports the way."""
    pinned: Integers
    """[L]: the peer that must hold the block, -1 if none must. Empty: no pins."""
    only: int
    """The peer that holds its pinned blocks and nothing else, or -1."""
    only_blocks: int
    speed: Floats
    """[P, W]: FLOP/s."""
    away_bytes_per_s: Floats
    """[P]: speed of reading offloaded weights."""
    file_bytes_per_s: Floats
    """[P]: speed of reading or writing optimizer state in a file."""
    busy_s: Floats
    """[P]: seconds per microbatch that the owner's loss stage takes on the same machine."""
    commit_s: Floats
    """[P]: round trip to the job owner, once per step, of a pipeline whose first stage is on the peer."""
    bandwidth: Floats
    """[P + 1, P + 1], bytes per second from row to column."""
    latency_s: Floats
    shared: Flags
    """[P + 1, P + 1]: True if the hop occupies both access links."""
    up: Floats
    down: Floats
    forward_bytes: Floats
    """[L + 1]: bytes over each cut, per microbatch."""
    gradient_bytes: Floats
    least_bytes: Floats
    """[L + 1]: memory of blocks [0, b) in the way that takes least."""
    memory_bytes: Floats
    """[P]: memory that the peer lends."""
    roomiest: Integers
    """[P]: peers by memory, the largest first."""
    twins: Integers
    """[P]: mask of earlier peers with equal costs, which must be used before this peer."""
    periods: Floats
    """[K + 1]: ascending bounds of K intervals of the period; `before_s` has one entry per interval."""
    before_s: Floats
    """[K, P, L + 1]: least transit of all stages before one that begins at this cut, including the prices of the peers
    used; inf if no stages lead there."""
    prices_s: Floats
    """[K, P]: price of using a peer (Lagrange multiplier)."""
    all_s: Floats
    """[K]: sum of the prices of all peers."""


class Labels(NamedTuple):
    """Suffixes of pipelines in the order they were found; number 0 is the tail. Each array has shape [budget + 2]."""

    mask: Integers
    head: Integers
    start: Integers
    period_s: Floats
    transit_s: Floats
    up_s: Floats
    down_s: Floats
    update_s: Floats
    rest: Integers
    """Number of the suffix without its first stage."""
    after: Integers
    """Number of the next suffix of the same state; 0 at the end of the list."""
    beaten: Flags
    first: Integers
    """[slots]: hash table with the first suffix of each state, 0 for a free slot (the tail is not in it). A state lies
    in the first free slot from its key on."""


Suffix = tuple[int, int, float, float, float, float, float]
"""Start, head, period, transit, up, down, update."""


def held(tables: Tables, microbatches: int, peer: int, start: int, end: int, way: int) -> int:
    """Microbatches that fit in memory beside the stage, at most `microbatches`; -1 if the stage itself does not fit."""
    free = tables.memory_bytes[peer] - tables.stage_bytes[way, start, end]
    if free < 0 or not tables.able[peer, way]:
        return -1
    flight = tables.flight_bytes[way, start, end]
    if flight * microbatches <= free:
        return microbatches
    return int(np.floor(free / flight))


def allowed(tables: Tables, peer: int, start: int, end: int) -> bool:
    """Return whether the pins allow blocks [start, end) on `peer`."""
    if tables.pinned.shape[0] == 0:
        return True
    if peer == tables.only and end - start != tables.only_blocks:
        return False
    for block in range(tables.pinned.shape[0]):
        if tables.pinned[block] >= 0 and (start <= block < end) != (tables.pinned[block] == peer):
            return False
    return True


def compute_s(tables: Tables, peer: int, start: int, end: int, way: int) -> float:
    """Seconds of one microbatch's forward and backward pass."""
    seconds: float = tables.flops[way, start, end] / tables.speed[peer, way]
    if tables.read_bytes[way, start, end] > 0:
        seconds += tables.read_bytes[way, start, end] / tables.away_bytes_per_s[peer]
    return seconds


def update_s(tables: Tables, peer: int, start: int, end: int, way: int) -> float:
    """Seconds that reading and writing offloaded state adds to an optimizer update."""
    seconds: float = tables.slot_bytes[way, start, end] / tables.file_bytes_per_s[peer]
    return seconds + tables.trained_bytes[way, start, end] / tables.away_bytes_per_s[peer]


def extend(
    tables: Tables, microbatches: int, stages: int, suffix: Suffix, peer: int, start: int, way: int
) -> tuple[int, Suffix]:
    """Put blocks [start, end) on `peer`, in this way, before a suffix of `stages` stages. Pins are not checked.

    Returns the number of microbatches that fit and the longer suffix; -1 if memory is too small.
    """
    end, head, period_s, transit_s, head_up_s, head_down_s, longest_s = suffix
    room = held(tables, microbatches, peer, start, end, way)
    if room < min(microbatches, stages + 1):
        return -1, suffix
    seconds = compute_s(tables, peer, start, end, way)
    transit_s = transit_s + seconds
    period_s = max(period_s, seconds + tables.busy_s[peer])
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
    if room < microbatches:
        period_s = max(period_s, transit_s / room)
    if start == 0:
        transit_s += tables.commit_s[peer]
    longest_s = max(longest_s, update_s(tables, peer, start, end, way))
    return room, (start, peer, period_s, transit_s, up_s, down_s, longest_s)


def longer(
    tables: Tables, microbatches: int, stages: int, suffix: Suffix, peer: int, start: int
) -> tuple[int, Suffix, int]:
    """Like `extend`, in the way with the shortest step so far. Also returns that way; -1 if none fits."""
    best = suffix
    best_room = best_way = -1
    best_s = np.inf
    if not allowed(tables, peer, start, suffix[0]):
        return -1, suffix, -1
    needless = 0
    for way in range(tables.flops.shape[0]):
        if needless >> way & 1:
            continue
        room, found = extend(tables, microbatches, stages, suffix, peer, start, way)
        if room < 0:
            continue
        if room >= microbatches:
            needless |= tables.needless[way]
        seconds = (microbatches - 1) * found[2] + found[3] + found[6]
        if seconds < best_s:
            best_s = seconds
            best, best_room, best_way = found, room, way
    return best_room, best, best_way


def rest_s(tables: Tables, rounds: int, mask: int, peer: int, start: int, period_s: float) -> float:
    """Lower bound on `rounds` periods plus the transit before a stage on `peer` that begins at `start`, for a suffix
    with period `period_s`.

    For each interval of periods the transit is at least the priced transit less the prices of all peers outside the
    suffix `mask`: a Lagrangian bound, valid for any prices. Peers of the suffix can't be used again, so their prices
    are not subtracted.
    """
    least = np.inf
    for place in range(tables.before_s.shape[0]):
        if tables.periods[place + 1] < period_s:
            continue
        before_s: float = tables.before_s[place, peer, start]
        if before_s == np.inf:
            continue
        unused_s: float = tables.all_s[place]
        used = mask
        while used:
            lowest = used & -used
            unused_s -= tables.prices_s[place, bit(lowest)]
            used ^= lowest
        low_s = max(period_s, tables.periods[place])
        if rounds * low_s >= least:
            break
        least = min(least, rounds * low_s + before_s - unused_s)
    return least


def bit(power: int) -> int:
    """Base-2 logarithm of a power of two."""
    place = 0
    while power > 1:
        power >>= 1
        place += 1
    return place


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
    """Extend label 0, the tail, to whole pipelines of fewer than `best_s` seconds, with at most `budget` extensions.

    Returns the label of the best pipeline without its first stage and the peer of that stage (-1 if no pipeline beats
    `best_s`), the step in seconds, the number of extensions, and whether the search was complete.
    """
    peers = tables.busy_s.shape[0]
    ways = tables.flops.shape[0]
    length = tables.flops.shape[1]
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
                labels.update_s[label],
            )
            for peer in range(peers):
                if mask >> peer & 1 or tables.twins[peer] & ~mask:
                    continue
                used = mask | (1 << peer)
                missing = ones(required & ~used)
                if missing > left:
                    continue
                for start in range(stop - 1, max(missing, fewest - depth, 0) - 1, -1):
                    least_s: float = tables.flops[0, start, stop] / tables.speed[peer, 0]
                    if rounds * max(suffix[2], least_s) + suffix[3] + least_s >= best_s:
                        break
                    if (start > 0 and left == 0) or not allowed(tables, peer, start, stop):
                        continue
                    if start > 0 and room_bytes(tables, used, left) < tables.least_bytes[start] * (1 - 1e-12):
                        continue
                    needless = 0
                    for way in range(ways):
                        if needless >> way & 1:
                            continue
                        explored += 1
                        room, found = extend(tables, microbatches, tail_stages + depth - 1, suffix, peer, start, way)
                        if room < 0:
                            continue
                        if room >= microbatches:
                            needless |= tables.needless[way]
                        _, _, period_s, transit_s, up_s, down_s, longest_s = found
                        if start == 0:
                            if missing == 0 and rounds * period_s + transit_s + longest_s < best_s:
                                best_s = rounds * period_s + transit_s + longest_s
                                best_rest = label
                                best_peer = peer
                            continue
                        before_s = rest_s(tables, rounds, used, peer, start, period_s)
                        if transit_s + longest_s + before_s >= best_s:
                            continue
                        # Suffixes of one state form a list; only they can dominate the new one or be dominated by it.
                        slot = ((used * peers + peer) * (length + 1) + start) % slots
                        while labels.first[slot] > 0:
                            other = labels.first[slot]
                            if (
                                labels.mask[other] == used
                                and labels.head[other] == peer
                                and labels.start[other] == start
                            ):
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
                                and labels.update_s[other] <= longest_s
                            ):
                                worse = True
                                break
                            following = labels.after[other]
                            if (
                                period_s <= labels.period_s[other]
                                and transit_s <= labels.transit_s[other]
                                and up_s <= labels.up_s[other]
                                and down_s <= labels.down_s[other]
                                and longest_s <= labels.update_s[other]
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
                        labels.update_s[count] = longest_s
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
    """Labels from `begin` to `end`, sorted by first block: those with the fewest blocks left come first, because the
    pipelines they lead to prune the others."""
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
    """Memory that the `left` largest unused peers lend."""
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
    tail: Suffix,
    microbatches: int,
    tail_stages: int,
    order: Integers,
    cuts: Integers,
    count: int,
    limit_s: float,
) -> float:
    """Step time of the pipeline in which `order[k]` holds blocks [cuts[k], cuts[k + 1]) for k < count, before `tail`.
    Each stage takes the way that is best with the stages after it. Returns inf if the pipeline doesn't fit, violates a
    pin, or takes `limit_s` or longer."""
    suffix = tail
    for place in range(count - 1, -1, -1):
        stages = tail_stages + count - 1 - place
        room, suffix, _ = longer(tables, microbatches, stages, suffix, order[place], cuts[place])
        if room < 0 or (microbatches - 1) * suffix[2] + suffix[3] + suffix[6] >= limit_s:
            return np.inf
    return (microbatches - 1) * suffix[2] + suffix[3] + suffix[6]


def fill(
    tables: Tables,
    tail: Suffix,
    microbatches: int,
    tail_stages: int,
    ranked: Integers,
    period_s: float,
    most: int,
    order: Integers,
    cuts: Integers,
) -> int:
    """Fill stages from the last to the first with the peers of `ranked` in turn, each stage as long as `period_s` and
    memory allow. Writes `order` and `cuts`; returns the number of stages, 0 if they don't reach the first block."""
    suffix = tail
    count = 0
    for place in range(ranked.shape[0]):
        if suffix[0] == 0 or count == most:
            break
        peer: int = ranked[place]
        # From the longest stage the period allows to the shortest, until one fits.
        for start in range(suffix[0]):
            if tables.flops[0, start, suffix[0]] / tables.speed[peer, 0] > period_s:
                continue
            room, found, _ = longer(tables, microbatches, tail_stages + count, suffix, peer, start)
            if room >= 0 and found[2] <= max(period_s, suffix[2]):
                suffix = found
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
    tail: Suffix,
    microbatches: int,
    tail_stages: int,
    fewest: int,
    most: int,
    required: Flags,
    order: Integers,
    cuts: Integers,
    count: int,
    rounds: int,
    heat: float,
    seed: int,
) -> tuple[int, float]:
    """Change the pipeline at random, `rounds` times: move cuts, exchange stages or peers, add and drop stages. A change
    is kept if the step gets no longer, and at first also if it gets longer by about the fraction `heat`.

    Leaves the fastest pipeline seen in `order` [P] and `cuts` [P + 1]; returns its stages and seconds.
    """
    peers = tables.busy_s.shape[0]
    length = tables.flops.shape[1]
    now_s = step_s(tables, tail, microbatches, tail_stages, order, cuts, count, np.inf)
    best_s = now_s
    best_count = count
    best_order = order.copy()
    best_cuts = cuts.copy()
    # All peers: first those of the pipeline in its order, then the unused ones.
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
            # Move a block or two from one stage to another: every cut between them moves.
            first, last = min(one, other), max(one, other)
            if move == 0:
                last = min(first + 1, count - 1)
            shift = (1 + draw // 2 % 2) * (1 if draw % 2 else -1)
            for cut in range(first + 1, last + 1):
                bounds[cut] += shift
        elif move == 3:
            # Two stages exchange their peers; every other time also their lengths.
            line[one], line[other] = line[other], line[one]
            if draw % 2:
                first, last = min(one, other), max(one, other)
                shift = (bounds[last + 1] - bounds[last]) - (bounds[first + 1] - bounds[first])
                for cut in range(first + 1, last + 1):
                    bounds[cut] += shift
        elif move == 4:
            # A peer moves to another place in the pipeline and keeps its length.
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
            # An unused peer replaces the peer of a stage.
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
            # One stage more: an unused peer takes part of a stage, before or after it.
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
