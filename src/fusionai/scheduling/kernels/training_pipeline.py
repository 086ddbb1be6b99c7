"""Loops over training pipelines, on arrays: exact search (`grow`), annealing (`anneal`) and relaxation (`priced`).

The costs repeat `training.pipeline.Pipeline.extend` operation by operation, so that both give the same bits. The
functions run as plain Python or as machine code (`compiled`), so they contain only loops over numbers. Random numbers
come from a seed. A "variant" is an index into `Pipeline.variants`: one `MemorySavings` by which a stage saves
memory.

The relaxation looks for the cheapest chain of stages in which a machine may appear repeatedly, at a price. Kinds of
equal machines are its nodes. `arcs` computes the cost of every stage on every kind if it fits a period and an update,
in the cheapest variant to fit the memory. `priced` finds the cheapest chain of such stages, where each use of a kind
costs its price, and updates prices until the proven bound stops rising. `before` and `through` return the cost of the
rest of a chain as seen from one stage.

`training.search` fills `PeerTables` and calls `grow`, `fill` and `anneal`. `training.bound` fills `KindTables` and
calls the functions of the relaxation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fusionai.scheduling.kernels.compiled import Flags, Floats, Integers

_MODULUS = 2147483647
_FACTOR = 48271
_FAR = 1 << 40
_SLACK = 1 + 1e-9
"""Factor on limits, because compared values may differ from them by rounding."""


class CostTables(NamedTuple):
    """Costs of stages on P machines (or kinds of equal machines) for L blocks and W variants to save memory."""

    flops: Floats
    """[W, L, L + 1]: FLOPs of blocks [a, b) in each variant; the next five arrays have the same shape."""
    read_bytes: Floats
    """Weights that one microbatch reads from a file or host memory."""
    slot_bytes: Floats
    """Optimizer state that an update reads and writes in a file."""
    trained_bytes: Floats
    """Weights that an update reads and writes in a file or host memory."""
    stage_bytes: Floats
    """Memory of the stage with nothing in flight."""
    flight_bytes: Floats
    """Memory of one microbatch in flight."""
    needless: Integers
    """[W]: mask of the variants that are no better if this variant has room for all microbatches."""
    able: Flags
    """[P, W]: True if the machine's backend supports the variant."""
    pinned: Integers
    """[L]: machine that must hold the block; -1: none must, -2: one that is not among these. Empty: no pins."""
    only: int
    """The machine that holds its pinned blocks and nothing else, or -1."""
    only_blocks: int
    speed: Floats
    """[P, W]: FLOP/s."""
    away_bytes_per_s: Floats
    """[P]: speed of reading offloaded weights."""
    file_bytes_per_s: Floats
    """[P]: speed of reading or writing optimizer state in a file."""
    memory_bytes: Floats
    """[P]: memory that the machine lends."""
    busy_s: Floats
    """[P]: seconds per microbatch that the owner's loss stage takes on the same machine."""
    commit_s: Floats
    """[P]: round trip to the job owner, once per step, of a pipeline whose first stage is on the machine."""
    microbatches: int
    tail_stages: int
    """1 if the job owner has the last stage, else 0."""


class Before(NamedTuple):
    """Least transit before a stage, for K period intervals and P peers; valid for steps shorter than a known one."""

    periods: Floats
    """[K + 1]: ascending bounds of the intervals."""
    before_s: Floats
    """[K, P, L + 1]: least transit of all stages before one that begins at this cut, including the prices of the peers
    used; inf if no stages lead there."""
    prices_s: Floats
    """[K, P]: price of using a peer (Lagrange multiplier)."""
    all_s: Floats
    """[K]: sum of the prices of all peers."""


class PeerTables(NamedTuple):
    """Costs of pipelines on P peers (index P: the job owner)."""

    costs: CostTables
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
    """[L + 1]: memory of blocks [0, b) in the variant that takes least."""
    roomiest: Integers
    """[P]: peers by memory, the largest first."""
    twins: Integers
    """[P]: mask of earlier peers with equal costs, which must be used before this peer."""
    before: Before
    tail: tuple[int, int, float, float, float, float, float]
    """The suffix that every pipeline ends with: the job owner's last stage, or nothing."""


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
    heads: int
    """Number of values of `head`, for the key of a state."""
    cuts: int
    """Number of values of `start`."""


Suffix = tuple[int, int, float, float, float, float, float]
"""Start, head, period, transit, up, down, update."""


def held(costs: CostTables, peer: int, start: int, end: int, variant: int) -> int:
    """Microbatches that fit in memory beside the stage, at most all; -1 if the stage itself does not fit."""
    free = costs.memory_bytes[peer] - costs.stage_bytes[variant, start, end]
    if free < 0 or not costs.able[peer, variant]:
        return -1
    flight = costs.flight_bytes[variant, start, end]
    if flight * costs.microbatches <= free:
        return costs.microbatches
    return int(np.floor(free / flight))


def allowed(costs: CostTables, peer: int, start: int, end: int) -> bool:
    """Return whether the pins allow blocks [start, end) on `peer`."""
    if costs.pinned.shape[0] == 0:
        return True
    if peer == costs.only and end - start != costs.only_blocks:
        return False
    for block in range(costs.pinned.shape[0]):
        if costs.pinned[block] != -1 and (start <= block < end) != (costs.pinned[block] == peer):
            return False
    return True


def compute_s(costs: CostTables, peer: int, start: int, end: int, variant: int) -> float:
    """Seconds of one microbatch's forward and backward pass."""
    seconds: float = costs.flops[variant, start, end] / costs.speed[peer, variant]
    if costs.read_bytes[variant, start, end] > 0:
        seconds += costs.read_bytes[variant, start, end] / costs.away_bytes_per_s[peer]
    return seconds


def update_s(costs: CostTables, peer: int, start: int, end: int, variant: int) -> float:
    """Seconds that reading and writing offloaded state adds to an optimizer update."""
    seconds: float = costs.slot_bytes[variant, start, end] / costs.file_bytes_per_s[peer]
    return seconds + costs.trained_bytes[variant, start, end] / costs.away_bytes_per_s[peer]


def extend(tables: PeerTables, stages: int, suffix: Suffix, peer: int, start: int, variant: int) -> tuple[int, Suffix]:
    """Put blocks [start, end) on `peer`, in this variant, before a suffix of `stages` stages. Pins are not checked.
    Returns the number of microbatches that fit and the longer suffix; -1 if memory is too small."""
    costs = tables.costs
    end, head, period_s, transit_s, head_up_s, head_down_s, longest_s = suffix
    room = held(costs, peer, start, end, variant)
    if room < min(costs.microbatches, stages + 1):
        return -1, suffix
    seconds = compute_s(costs, peer, start, end, variant)
    transit_s = transit_s + seconds
    period_s = max(period_s, seconds + costs.busy_s[peer])
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
    if room < costs.microbatches:
        period_s = max(period_s, transit_s / room)
    if start == 0:
        transit_s += costs.commit_s[peer]
    longest_s = max(longest_s, update_s(costs, peer, start, end, variant))
    return room, (start, peer, period_s, transit_s, up_s, down_s, longest_s)


def longer(tables: PeerTables, stages: int, suffix: Suffix, peer: int, start: int) -> tuple[bool, Suffix]:
    """Like `extend`, in the variant with the shortest step so far; False if none fits or a pin forbids the stage."""
    costs = tables.costs
    best = suffix
    best_s = np.inf
    if not allowed(costs, peer, start, suffix[0]):
        return False, suffix
    needless = 0
    for variant in range(costs.flops.shape[0]):
        if needless >> variant & 1:
            continue
        room, found = extend(tables, stages, suffix, peer, start, variant)
        if room < 0:
            continue
        if room >= costs.microbatches:
            needless |= costs.needless[variant]
        seconds = (costs.microbatches - 1) * found[2] + found[3] + found[6]
        if seconds < best_s:
            best_s = seconds
            best = found
    return best_s < np.inf, best


def rest_s(before: Before, rounds: int, mask: int, peer: int, start: int, period_s: float) -> float:
    """Lower bound on `rounds` periods plus the transit before a stage on `peer` that begins at `start`, for a suffix
    with period `period_s`.

    For each interval of periods the transit is at least the priced transit less the prices of all peers outside the
    suffix `mask`: a Lagrangian bound, valid for any prices. Peers of the suffix can't be used again, so their prices
    are not subtracted.
    """
    least = np.inf
    for place in range(before.before_s.shape[0]):
        if before.periods[place + 1] < period_s:
            continue
        before_s: float = before.before_s[place, peer, start]
        if before_s == np.inf:
            continue
        unused_s: float = before.all_s[place]
        used = mask
        while used:
            lowest = used & -used
            unused_s -= before.prices_s[place, bit(lowest)]
            used ^= lowest
        low_s = max(period_s, before.periods[place])
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
    tables: PeerTables, labels: Labels, fewest: int, most: int, required: int, best_s: float, budget: int
) -> tuple[int, int, float, int, bool]:
    """Extend label 0, the tail, to whole pipelines of fewer than `best_s` seconds, with at most `budget` extensions.
    Returns the label of the best pipeline without its first stage and the peer of that stage (-1 if no pipeline beats
    `best_s`), the step in seconds, the number of extensions, and whether the search was complete."""
    costs = tables.costs
    peers, variants = costs.able.shape
    length = costs.flops.shape[1]
    rounds = costs.microbatches - 1
    best_rest = best_peer = -1
    explored = begin = 0
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
            suffix = suffix_of(labels, label)
            for peer in range(peers):
                if mask >> peer & 1 or tables.twins[peer] & ~mask:
                    continue
                used = mask | (1 << peer)
                missing = ones(required & ~used)
                if missing > left:
                    continue
                for start in range(suffix[0] - 1, max(missing, fewest - depth, 0) - 1, -1):
                    least_s: float = costs.flops[0, start, suffix[0]] / costs.speed[peer, 0]
                    if rounds * max(suffix[2], least_s) + suffix[3] + least_s >= best_s:
                        break
                    if (start > 0 and left == 0) or not allowed(costs, peer, start, suffix[0]):
                        continue
                    if start > 0 and room_bytes(tables, used, left) < tables.least_bytes[start] * (1 - 1e-12):
                        continue
                    needless = 0
                    for variant in range(variants):
                        if needless >> variant & 1:
                            continue
                        explored += 1
                        room, found = extend(tables, costs.tail_stages + depth - 1, suffix, peer, start, variant)
                        if room < 0:
                            continue
                        if room >= costs.microbatches:
                            needless |= costs.needless[variant]
                        if start == 0:
                            seconds = rounds * found[2] + found[3] + found[6]
                            if missing == 0 and seconds < best_s:
                                best_s, best_rest, best_peer = seconds, label, peer
                            continue
                        before_s = rest_s(tables.before, rounds, used, peer, start, found[2])
                        if found[3] + found[6] + before_s < best_s and kept(labels, count, used, found, label):
                            count += 1
                if explored > budget:
                    return best_rest, best_peer, best_s, explored, False
        begin, end = end, count
        if begin == end:
            break
        order = by_start(labels.start, begin, end, length)
    return best_rest, best_peer, best_s, explored, True


def suffix_of(labels: Labels, label: int) -> Suffix:
    return (
        labels.start[label],
        labels.head[label],
        labels.period_s[label],
        labels.transit_s[label],
        labels.up_s[label],
        labels.down_s[label],
        labels.update_s[label],
    )


def kept(labels: Labels, number: int, mask: int, suffix: Suffix, rest: int) -> bool:
    """Store `suffix`, which uses the peers `mask` and is `rest` plus one stage, as label `number`. Returns False if
    another suffix of the same state is at least as good in everything. Suffixes that the new one beats leave the list
    of their state: only suffixes of one state can dominate each other."""
    start, head, period_s, transit_s, up_s, down_s, longest_s = suffix
    slot = slot_of(labels, mask, head, start)
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
            return False
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
    labels.mask[number] = mask
    labels.head[number] = head
    labels.start[number] = start
    labels.period_s[number] = period_s
    labels.transit_s[number] = transit_s
    labels.up_s[number] = up_s
    labels.down_s[number] = down_s
    labels.update_s[number] = longest_s
    labels.rest[number] = rest
    labels.beaten[number] = False
    labels.after[number] = labels.first[slot]
    labels.first[slot] = number
    return True


def slot_of(labels: Labels, mask: int, head: int, start: int) -> int:
    """Return the slot of a state in the hash table, a free one if the state has no suffix yet."""
    slots = labels.first.shape[0]
    slot = ((mask * labels.heads + head) * labels.cuts + start) % slots
    while labels.first[slot] > 0:
        other = labels.first[slot]
        if labels.mask[other] == mask and labels.head[other] == head and labels.start[other] == start:
            break
        slot = (slot + 1) % slots
    return slot


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


def room_bytes(tables: PeerTables, used: int, left: int) -> float:
    """Memory that the `left` largest unused peers lend."""
    room = 0.0
    count = 0
    for place in range(tables.roomiest.shape[0]):
        if count == left:
            break
        peer: int = tables.roomiest[place]
        if used >> peer & 1:
            continue
        room += tables.costs.memory_bytes[peer]
        count += 1
    return room


def ones(mask: int) -> int:
    count = 0
    while mask:
        mask &= mask - 1
        count += 1
    return count


def step_s(tables: PeerTables, order: Integers, cuts: Integers, count: int, limit_s: float) -> float:
    """Step time of the pipeline in which `order[k]` holds blocks [cuts[k], cuts[k + 1]) for k < count, before the tail.
    Each stage takes the variant that is best with the stages after it. Returns inf if the pipeline doesn't fit,
    violates a pin, or takes `limit_s` or longer."""
    suffix = tables.tail
    rounds = tables.costs.microbatches - 1
    for place in range(count - 1, -1, -1):
        stages = tables.costs.tail_stages + count - 1 - place
        fits, suffix = longer(tables, stages, suffix, order[place], cuts[place])
        if not fits or rounds * suffix[2] + suffix[3] + suffix[6] >= limit_s:
            return np.inf
    return rounds * suffix[2] + suffix[3] + suffix[6]


def fill(tables: PeerTables, ranked: Integers, period_s: float, most: int, order: Integers, cuts: Integers) -> int:
    """Fill stages from the last to the first with the peers of `ranked` in turn, each stage as long as `period_s` and
    memory allow. Writes `order` and `cuts`; returns the number of stages, 0 if they don't reach the first block."""
    suffix = tables.tail
    count = 0
    for place in range(ranked.shape[0]):
        if suffix[0] == 0 or count == most:
            break
        peer: int = ranked[place]
        # From the longest stage the period allows to the shortest, until one fits.
        for start in range(suffix[0]):
            if tables.costs.flops[0, start, suffix[0]] / tables.costs.speed[peer, 0] > period_s:
                continue
            fits, found = longer(tables, tables.costs.tail_stages + count, suffix, peer, start)
            if fits and found[2] <= max(period_s, suffix[2]):
                suffix = found
                order[count] = peer
                cuts[count] = start
                count += 1
                break
    if suffix[0] > 0:
        return 0
    order[:count] = order[:count][::-1].copy()
    cuts[:count] = cuts[:count][::-1].copy()
    cuts[count] = tables.tail[0]
    return count


def anneal(
    tables: PeerTables,
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
    """Change the pipeline at random, `rounds` times (`changed`). A change is kept if the step gets no longer, and at
    first also if it gets longer by about the fraction `heat`. Leaves the fastest pipeline seen in `order` [P] and
    `cuts` [P + 1]; returns its stages and seconds."""
    peers = tables.costs.busy_s.shape[0]
    now_s = best_s = step_s(tables, order, cuts, count, np.inf)
    best_count = count
    best_order = order.copy()
    best_cuts = cuts.copy()
    # All peers: first those of the pipeline in its order, then the unused ones.
    ranked = np.zeros(peers, dtype=np.int64)
    ranked[:count] = order[:count]
    place = count
    for peer in range(peers):
        if not (order[:count] == peer).any():
            ranked[place] = peer
            place += 1
    bounds = cuts.copy()
    old_ranked = ranked.copy()
    old_bounds = bounds.copy()
    draws = np.zeros(4, dtype=np.int64)
    state = seed % (_MODULUS - 1) + 1
    for step in range(rounds):
        old_ranked[:] = ranked
        old_bounds[:] = bounds
        for number in range(4):
            state = state * _FACTOR % _MODULUS
            draws[number] = state
        new_count = changed(ranked, bounds, count, fewest, most, draws)
        if new_count == 0:
            continue
        state = state * _FACTOR % _MODULUS
        limit_s = now_s * (1.0 - heat * (1.0 - step / rounds) * np.log((state + 1) / (_MODULUS + 1)))
        then_s = np.inf
        if is_pipeline(ranked, bounds, new_count, tables.costs.flops.shape[1], required):
            then_s = step_s(tables, ranked, bounds, new_count, limit_s)
        if then_s < limit_s:
            now_s = then_s
            count = new_count
            if now_s < best_s:
                best_s = now_s
                best_count = count
                best_order[:count] = ranked[:count]
                best_cuts[: count + 1] = bounds[: count + 1]
        else:
            ranked[:] = old_ranked
            bounds[:] = old_bounds
    order[:best_count] = best_order[:best_count]
    cuts[: best_count + 1] = best_cuts[: best_count + 1]
    return best_count, best_s


def is_pipeline(ranked: Integers, bounds: Integers, count: int, length: int, required: Flags) -> bool:
    """Return whether every stage has a block of the model, and every required peer has a stage."""
    for stage in range(count):
        if bounds[stage] >= bounds[stage + 1] or bounds[stage + 1] > length:
            return False
    return not required[ranked[count:]].any()


def changed(ranked: Integers, bounds: Integers, count: int, fewest: int, most: int, draws: Integers) -> int:
    """Change the pipeline of `count` stages in place: move cuts, exchange stages or peers, add or drop a stage.
    `ranked`: all peers, those of the stages first. `draws`: four random numbers. Returns the new number of stages, 0 if
    the change is impossible; then nothing has changed."""
    peers = ranked.shape[0]
    move = draws[0] % 8
    one = draws[1] % count
    other = draws[2] % count
    draw = draws[3]
    first, last = min(one, other), max(one, other)
    if move <= 2:
        # Move a block or two from one stage to another: every cut between them moves.
        if move == 0:
            last = min(first + 1, count - 1)
        shift = (1 + draw // 2 % 2) * (1 if draw % 2 else -1)
        bounds[first + 1 : last + 1] += shift
    elif move == 3:
        # Two stages exchange their peers; every other time also their lengths.
        ranked[one], ranked[other] = ranked[other], ranked[one]
        if draw % 2:
            shift = (bounds[last + 1] - bounds[last]) - (bounds[first + 1] - bounds[first])
            bounds[first + 1 : last + 1] += shift
    elif move == 4:
        # A peer moves to another place in the pipeline and keeps its length.
        peer = ranked[one]
        while one < other:
            ranked[one] = ranked[one + 1]
            bounds[one + 1] = bounds[one] + bounds[one + 2] - bounds[one + 1]
            one += 1
        while one > other:
            ranked[one] = ranked[one - 1]
            bounds[one] = bounds[one + 1] - (bounds[one] - bounds[one - 1])
            one -= 1
        ranked[one] = peer
    elif move == 5:
        # An unused peer replaces the peer of a stage.
        if count == peers:
            return 0
        free_at = count + draw % (peers - count)
        ranked[one], ranked[free_at] = ranked[free_at], ranked[one]
    elif move == 6:
        return dropped(ranked, bounds, count, fewest, one, draw)
    else:
        return added(ranked, bounds, count, most, one, draw)
    return count


def dropped(ranked: Integers, bounds: Integers, count: int, fewest: int, stage: int, draw: int) -> int:
    """Drop `stage`: its blocks go to both neighbours. Returns the new number of stages, 0 if impossible."""
    if count <= max(fewest, 1):
        return 0
    size = bounds[stage + 1] - bounds[stage]
    cut = bounds[stage] + draw % (size + 1)
    if stage == 0:
        cut = bounds[0]
    elif stage == count - 1:
        cut = bounds[count]
    peer = ranked[stage]
    for behind in range(stage, count - 1):
        ranked[behind] = ranked[behind + 1]
    ranked[count - 1] = peer
    bounds[stage] = cut
    for behind in range(stage + 1, count):
        bounds[behind] = bounds[behind + 1]
    return count - 1


def added(ranked: Integers, bounds: Integers, count: int, most: int, stage: int, draw: int) -> int:
    """Give the beginning or end of `stage` to an unused peer. Returns the new number of stages, 0 if impossible."""
    peers = ranked.shape[0]
    size = bounds[stage + 1] - bounds[stage]
    if count >= most or count == peers or size < 2:
        return 0
    free_at = count + draw % (peers - count)
    peer = ranked[free_at]
    ranked[free_at] = ranked[count]
    cut = bounds[stage] + 1 + draw // 2 % (size - 1)
    at = stage + draw % 2
    for behind in range(count, at, -1):
        ranked[behind] = ranked[behind - 1]
    ranked[at] = peer
    for behind in range(count, stage, -1):
        bounds[behind + 1] = bounds[behind]
    bounds[stage + 1] = cut
    return count + 1


class KindTables(NamedTuple):
    """Costs of chains on N kinds of equal machines."""

    costs: CostTables
    up: Floats
    down: Floats
    """[N]: bytes per second of the access link that are available to a stage's own transfers."""
    hop_up: Floats
    hop_down: Floats
    """[N]: highest bytes per second of one transfer; inf if some pair has a link of its own."""
    latency_s: Floats
    """[N]: latency of both links; 0 if some pair has its own link and there are more than `PAIRED` kinds."""
    plain: Flags
    """[N]: whether every transfer uses the machine's access link."""
    paired: Flags
    """[N]: whether some pair with the machine has a link of its own."""
    machines: Integers
    """[N]: number of machines of the kind."""
    bandwidth: Floats
    """[N, N] bytes per second of each hop. Empty: hops cost the least that access links allow."""
    hop_latency_s: Floats
    """[N, N]: latency there and back, or empty."""
    last_there_s: Floats
    """[N]: transfer seconds to the job owner's last stage; 0 if it has none."""
    last_back_s: Floats
    last_latency_s: Floats
    """[N]: latency of both directions."""
    forward_bytes: Floats
    """[L + 1]: bytes over each cut; 0 at the ends, which nothing crosses."""
    gradient_bytes: Floats
    tail_s: float
    """Compute seconds of the job owner's last stage."""


def arcs(tables: KindTables, most_period_s: float, most_update_s: float) -> Floats:
    """Return [N, L, L + 1]: least compute of each stage within a period and an update, inf where it doesn't fit. If a
    stage's memory holds fewer microbatches than there are, its round trip must fit into as many periods as it holds
    microbatches. The least possible time is assumed for everything behind it."""
    costs = tables.costs
    kinds = costs.speed.shape[0]
    length = costs.flops.shape[1]
    cost = np.full((kinds, length, length + 1), np.inf)
    behind_s = np.full((kinds, length + 1), np.inf)
    first_s = np.full(kinds, np.inf)
    stages = np.full(length + 1, _FAR, dtype=np.int64)
    stages[length] = costs.tail_stages
    limit_s = most_period_s * _SLACK
    behind_last(tables, limit_s, behind_s)
    for start in range(length - 1, -1, -1):
        for kind in range(kinds):
            first_s[kind] = np.inf
            for end in range(start + 1, length + 1):
                if costs.flops[0, start, end] / costs.speed[kind, 0] > limit_s:
                    break
                rest_s: float = behind_s[kind, end]
                if rest_s == np.inf or not allowed(costs, kind, start, end):
                    continue
                if tables.plain[kind]:
                    up_s = (tables.gradient_bytes[start] + tables.forward_bytes[end]) / tables.up[kind]
                    down_s = (tables.forward_bytes[start] + tables.gradient_bytes[end]) / tables.down[kind]
                    if max(up_s, down_s) > limit_s:
                        continue
                needless = 0
                best_s = np.inf
                for variant in range(costs.flops.shape[0]):
                    if needless >> variant & 1 or not costs.able[kind, variant]:
                        continue
                    # Repeats `held`, `compute_s` and `update_s`: calls with all arrays take four times as long.
                    free = costs.memory_bytes[kind] - costs.stage_bytes[variant, start, end]
                    if free < 0:
                        continue
                    flight = costs.flight_bytes[variant, start, end]
                    fits = flight * costs.microbatches <= free
                    room = costs.microbatches if fits else int(np.floor(free / flight))
                    if room < min(costs.microbatches, stages[end] + 1):
                        continue
                    if room >= costs.microbatches:
                        needless |= costs.needless[variant]
                    seconds = costs.flops[variant, start, end] / costs.speed[kind, variant]
                    if costs.read_bytes[variant, start, end] > 0:
                        seconds += costs.read_bytes[variant, start, end] / costs.away_bytes_per_s[kind]
                    if seconds + costs.busy_s[kind] > limit_s:
                        continue
                    if room < costs.microbatches and seconds + rest_s > room * limit_s:
                        continue
                    later_s = costs.slot_bytes[variant, start, end] / costs.file_bytes_per_s[kind]
                    later_s += costs.trained_bytes[variant, start, end] / costs.away_bytes_per_s[kind]
                    if later_s <= most_update_s * _SLACK:
                        best_s = min(best_s, seconds)
                if best_s < np.inf:
                    cost[kind, start, end] = best_s
                    first_s[kind] = min(first_s[kind], best_s + rest_s)
                    stages[start] = min(stages[start], stages[end] + 1)
        cross(tables, start, tables.forward_bytes[start], tables.gradient_bytes[start], limit_s, first_s, behind_s)
    return cost


def behind_last(tables: KindTables, limit_s: float, behind_s: Floats) -> None:
    """Fill the last column of `behind_s`: transit behind the pool's last stage, on each kind."""
    for kind in range(tables.costs.speed.shape[0]):
        there_s, back_s = tables.last_there_s[kind], tables.last_back_s[kind]
        if max(there_s, back_s) <= limit_s:
            behind_s[kind, -1] = there_s + back_s + tables.last_latency_s[kind] + tables.tail_s


def cross(
    tables: KindTables, cut: int, sent: float, received: float, limit_s: float, beyond_s: Floats, found_s: Floats
) -> None:
    """Fill `found_s[:, cut]`: least transit beyond `cut` as seen from a stage on each kind, hop included. `sent` and
    `received`: bytes that the stage sends and receives over the cut. `beyond_s[kind]`: transit of everything beyond the
    cut if the stage next to it is on `kind`."""
    kinds = tables.costs.speed.shape[0]
    if tables.bandwidth.shape[0] > 0:
        for kind in range(kinds):
            best_s = np.inf
            for other in range(kinds):
                if beyond_s[other] >= best_s or (kind == other and tables.machines[kind] < 2):
                    continue
                there_s = sent / tables.bandwidth[kind, other]
                back_s = received / tables.bandwidth[other, kind]
                if max(there_s, back_s) <= limit_s:
                    best_s = min(best_s, there_s + back_s + tables.hop_latency_s[kind, other] + beyond_s[other])
            found_s[kind, cut] = best_s
        return
    # Each transfer takes at least as long as on either end's access link: take the best of each choice of ends.
    neither = up = down = both = np.inf
    for other in range(kinds):
        if beyond_s[other] == np.inf:
            continue
        far_s = beyond_s[other] + tables.latency_s[other]
        up_s, down_s = received / tables.hop_up[other], sent / tables.hop_down[other]
        if max(up_s, down_s) > limit_s:
            continue
        neither, up = min(neither, far_s), min(up, far_s + up_s)
        down, both = min(down, far_s + down_s), min(both, far_s + up_s + down_s)
    for kind in range(kinds):
        up_s, down_s = sent / tables.hop_up[kind], received / tables.hop_down[kind]
        if max(up_s, down_s) <= limit_s:
            least_s = max(max(neither + up_s + down_s, up + up_s), max(down + down_s, both))
            found_s[kind, cut] = least_s + tables.latency_s[kind]


def suffixes(tables: KindTables, cost: Floats, limit_s: float, prices_s: Floats) -> tuple[Floats, Floats]:
    """Return two [N, L + 1] arrays: the least cost of the suffix that begins at a cut with a kind, and of everything
    behind a stage of the kind that ends at the cut. Each use of a kind costs its price."""
    kinds = tables.costs.speed.shape[0]
    length = tables.costs.flops.shape[1]
    begun_s = np.full((kinds, length + 1), np.inf)
    behind_s = np.full((kinds, length + 1), np.inf)
    first_s = np.full(kinds, np.inf)
    behind_last(tables, limit_s, behind_s)
    for start in range(length - 1, -1, -1):
        for kind in range(kinds):
            best_s = np.inf
            for end in range(start + 1, length + 1):
                best_s = min(best_s, cost[kind, start, end] + behind_s[kind, end])
            first_s[kind] = best_s + prices_s[kind]
            begun_s[kind, start] = first_s[kind]
        cross(tables, start, tables.forward_bytes[start], tables.gradient_bytes[start], limit_s, first_s, behind_s)
    return begun_s, behind_s


def before(tables: KindTables, cost: Floats, period_s: float, prices_s: Floats) -> Floats:
    """Return [N, L + 1]: least cost of everything before a stage of the kind that begins at a cut."""
    kinds = tables.costs.speed.shape[0]
    length = tables.costs.flops.shape[1]
    limit_s = period_s * _SLACK
    before_s = np.full((kinds, length + 1), np.inf)
    before_s[:, 0] = tables.costs.commit_s
    ending_s = np.full(kinds, np.inf)
    for end in range(1, length):
        for kind in range(kinds):
            best_s = np.inf
            for start in range(end):
                best_s = min(best_s, before_s[kind, start] + cost[kind, start, end])
            ending_s[kind] = best_s + prices_s[kind]
        cross(tables, end, tables.gradient_bytes[end], tables.forward_bytes[end], limit_s, ending_s, before_s)
    return before_s


def through(tables: KindTables, cost: Floats, period_s: float, prices_s: Floats) -> Floats:
    """Return [N]: least cost of a whole chain that uses the kind."""
    kinds = tables.costs.speed.shape[0]
    length = tables.costs.flops.shape[1]
    before_s = before(tables, cost, period_s, prices_s)
    begun_s, _ = suffixes(tables, cost, period_s * _SLACK, prices_s)
    found = np.full(kinds, np.inf)
    for kind in range(kinds):
        for start in range(length):
            found[kind] = min(found[kind], before_s[kind, start] + begun_s[kind, start])
    return found


def traced(
    tables: KindTables,
    cost: Floats,
    limit_s: float,
    begun_s: Floats,
    behind_s: Floats,
    path: Integers,
    starts: Integers,
) -> int:
    """Write the cheapest chain into `path` and `starts`, reconstructed from the sums; return its number of stages. If
    hops are only bounded from below, the next kind is one of those with the least bound."""
    kinds = tables.costs.speed.shape[0]
    length = tables.costs.flops.shape[1]
    count = 0
    kind = 0
    least_s = np.inf
    for one in range(kinds):
        if begun_s[one, 0] + tables.costs.commit_s[one] < least_s:
            least_s = begun_s[one, 0] + tables.costs.commit_s[one]
            kind = one
    start = 0
    while start < length:
        path[count] = kind
        starts[count] = start
        count += 1
        best_s = np.inf
        end = length
        for cut in range(start + 1, length + 1):
            seconds = cost[kind, start, cut] + behind_s[kind, cut]
            if seconds < best_s:
                best_s = seconds
                end = cut
        if end < length:
            there, back = tables.forward_bytes[end], tables.gradient_bytes[end]
            best_s = np.inf
            following = kind
            for other in range(kinds):
                if begun_s[other, end] >= best_s:
                    continue
                if tables.bandwidth.shape[0] > 0:
                    if kind == other and tables.machines[kind] < 2:
                        continue
                    there_s, back_s = there / tables.bandwidth[kind, other], back / tables.bandwidth[other, kind]
                    latency_s = tables.hop_latency_s[kind, other]
                else:
                    there_s = max(there / tables.hop_up[kind], there / tables.hop_down[other])
                    back_s = max(back / tables.hop_up[other], back / tables.hop_down[kind])
                    latency_s = tables.latency_s[other]
                if max(there_s, back_s) > limit_s:
                    continue
                if there_s + back_s + latency_s + begun_s[other, end] < best_s:
                    best_s = there_s + back_s + latency_s + begun_s[other, end]
                    following = other
            kind = following
        start = end
    return count


def priced(
    tables: KindTables,
    cost: Floats,
    period_s: float,
    fewest: int,
    most: int,
    required: Flags,
    prices_s: Floats,
    target_s: float,
    rounds: int,
) -> tuple[float, int, Integers, Integers]:
    """Return the highest bound on transit that `rounds` price updates prove; stop early once it reaches `target_s`.

    A price rises if a chain uses its kind more often than it has machines, or has a number of stages outside the
    limits. `prices_s` [N + 1] (the last price is per stage) is the starting point and is overwritten with the best
    prices. Also returns the last chain: its number of stages, their kinds and starts.
    """
    kinds = tables.costs.speed.shape[0]
    length = tables.costs.flops.shape[1]
    limit_s = period_s * _SLACK
    now_s = prices_s.copy()
    direction = np.zeros(kinds + 1)
    path = np.zeros(length, dtype=np.int64)
    starts = np.zeros(length, dtype=np.int64)
    count = 0
    best_s = -np.inf
    pace = 1.0
    stale = 0
    for step in range(rounds + 1):
        begun_s, behind_s = suffixes(tables, cost, limit_s, now_s[:kinds] + now_s[kinds])
        value_s = least_s(begun_s[:, 0] + tables.costs.commit_s, now_s, tables.machines, fewest, most)
        if value_s == np.inf:
            return np.inf, 0, path, starts
        count = traced(tables, cost, limit_s, begun_s, behind_s, path, starts)
        if value_s > best_s:
            if value_s > best_s + 1e-4 * abs(best_s):
                stale = 0
            best_s = value_s
            prices_s[:] = now_s
        else:
            stale += 1
            if stale >= 6:
                pace *= 0.6
                stale = 0
                now_s[:] = prices_s
        if best_s >= target_s or step == rounds or pace < 1e-3:
            break
        norm = turned(direction, now_s, path[:count], tables.machines, fewest, most, required)
        if norm == 0:
            break
        length_s = pace * max(target_s - value_s, 1e-3 * abs(target_s)) / norm
        for kind in range(kinds):
            now_s[kind] += length_s * direction[kind]
            if not required[kind]:
                now_s[kind] = max(0.0, now_s[kind])
        now_s[kinds] += length_s * direction[kinds]
    return best_s, count, path, starts


def least_s(chain_s: Floats, prices_s: Floats, machines: Integers, fewest: int, most: int) -> float:
    """Transit of the cheapest chain less the prices of all machines and stages: a lower bound; inf without a chain."""
    kinds = chain_s.shape[0]
    value_s = np.inf
    for kind in range(kinds):
        value_s = min(value_s, float(chain_s[kind]))
    if value_s == np.inf:
        return value_s
    for kind in range(kinds):
        value_s -= float(prices_s[kind] * machines[kind])
    return value_s - float(prices_s[kinds] * (most if prices_s[kinds] > 0 else fewest))


def turned(
    direction: Floats, prices_s: Floats, path: Integers, machines: Integers, fewest: int, most: int, required: Flags
) -> float:
    """Turn `direction` of price changes towards what `path` uses too often. Returns its length squared."""
    kinds = machines.shape[0]
    count = path.shape[0]
    slope = np.zeros(kinds + 1)
    for kind in path:
        slope[kind] += 1
    for kind in range(kinds):
        slope[kind] -= machines[kind]
        if slope[kind] < 0 and prices_s[kind] <= 0 and not required[kind]:
            slope[kind] = 0.0
    if count > most or (prices_s[kinds] > 0 and count < most):
        slope[kinds] = count - most
    elif count < fewest or (prices_s[kinds] < 0 and count > fewest):
        slope[kinds] = count - fewest
    norm = 0.0
    for kind in range(kinds + 1):
        # Keep part of the last direction, because chains alternate between machines that are nearly equal.
        direction[kind] = slope[kind] + 0.5 * direction[kind]
        norm += direction[kind] * direction[kind]
    return norm
