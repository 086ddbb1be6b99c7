"""Compiled loops of `relaxation`: the cheapest chain of stages if a machine may appear repeatedly, at a price.

Kinds of equal machines are the nodes; `room` is the number of machines of each kind. `arcs` computes the cost of every
stage on every kind if it fits a period and an update, in the cheapest way to fit the memory. `priced` finds the
cheapest chain of such stages, where each use of a kind costs its price, and updates prices until the proven bound stops
rising. `before` and `through` return the cost of the rest of a chain as seen from one stage.

`relaxation` fills `Ground` and reads the results. The loops know machines by number alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fusionai.scheduling.kernels.compiled import Flags, Floats, Integers

_FAR = 1 << 40
_SLACK = 1 + 1e-9
"""Factor on limits, because compared values may differ from them by rounding."""


class Ground(NamedTuple):
    """Input of the loops, for N kinds of machines, L blocks and W ways."""

    flops: Floats
    """[W, L, L + 1], like the next five fields: see `problem.chain`."""
    read_bytes: Floats
    slot_bytes: Floats
    trained_bytes: Floats
    stage_bytes: Floats
    flight_bytes: Floats
    needless: Integers
    able: Flags
    """[N, W]"""
    speed: Floats
    """[N, W]"""
    away_bytes_per_s: Floats
    file_bytes_per_s: Floats
    memory_bytes: Floats
    busy_s: Floats
    commit_s: Floats
    up: Floats
    down: Floats
    """[N]: bytes per second of the access link that are available to a stage's own transfers."""
    hop_up: Floats
    hop_down: Floats
    """[N]: highest bytes per second of one transfer; inf if some pair has a link of its own."""
    latency_s: Floats
    """[N]: latency of uplink plus downlink; 0 if some pair has a link of its own and there are more than `PAIRED`
    kinds."""
    plain: Flags
    """[N]: whether every transfer uses the machine's access link."""
    paired: Flags
    """[N]: whether some pair with the machine has a link of its own."""
    room: Integers
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
    pinned: Integers
    """[L]: the kind that must hold the block, -1 if any may, -2 if that kind is not among these. Empty without pins."""
    only: int
    only_blocks: int
    tails: int
    """1 if the job owner has the last stage, else 0."""
    tail_s: float
    """Compute seconds of the job owner's last stage."""


def arcs(ground: Ground, microbatches: int, period_s: float, update_s: float) -> Floats:
    """Return [N, L, L + 1]: least compute of each stage within a period and an update, inf where it doesn't fit.

    If a stage's memory holds fewer microbatches than there are, its round trip must fit into as many periods as it
    holds microbatches. The least possible time is assumed for everything behind it.
    """
    kinds = ground.speed.shape[0]
    length = ground.flops.shape[1]
    ways = ground.flops.shape[0]
    cost = np.full((kinds, length, length + 1), np.inf)
    behind_s = np.full((kinds, length + 1), np.inf)
    first_s = np.full(kinds, np.inf)
    stages = np.full(length + 1, _FAR, dtype=np.int64)
    stages[length] = ground.tails
    limit_s = period_s * _SLACK
    after(ground, length, limit_s, first_s, behind_s)
    for start in range(length - 1, -1, -1):
        fewest = _FAR
        for kind in range(kinds):
            first_s[kind] = np.inf
            for end in range(start + 1, length + 1):
                if ground.flops[0, start, end] / ground.speed[kind, 0] > limit_s:
                    break
                rest_s: float = behind_s[kind, end]
                if rest_s == np.inf or not fits_pins(ground, kind, start, end):
                    continue
                if ground.plain[kind]:
                    up_s = (ground.gradient_bytes[start] + ground.forward_bytes[end]) / ground.up[kind]
                    down_s = (ground.forward_bytes[start] + ground.gradient_bytes[end]) / ground.down[kind]
                    if max(up_s, down_s) > limit_s:
                        continue
                needless = 0
                best_s = np.inf
                for way in range(ways):
                    if needless >> way & 1 or not ground.able[kind, way]:
                        continue
                    free = ground.memory_bytes[kind] - ground.stage_bytes[way, start, end]
                    if free < 0:
                        continue
                    flight = ground.flight_bytes[way, start, end]
                    held = microbatches if flight * microbatches <= free else int(np.floor(free / flight))
                    if held < min(microbatches, stages[end] + 1):
                        continue
                    if held >= microbatches:
                        needless |= ground.needless[way]
                    seconds = ground.flops[way, start, end] / ground.speed[kind, way]
                    if ground.read_bytes[way, start, end] > 0:
                        seconds += ground.read_bytes[way, start, end] / ground.away_bytes_per_s[kind]
                    if seconds + ground.busy_s[kind] > limit_s:
                        continue
                    if held < microbatches and seconds + rest_s > held * limit_s:
                        continue
                    later_s = ground.slot_bytes[way, start, end] / ground.file_bytes_per_s[kind]
                    later_s += ground.trained_bytes[way, start, end] / ground.away_bytes_per_s[kind]
                    if later_s > update_s * _SLACK:
                        continue
                    best_s = min(best_s, seconds)
                if best_s < np.inf:
                    cost[kind, start, end] = best_s
                    first_s[kind] = min(first_s[kind], best_s + rest_s)
                    fewest = min(fewest, stages[end] + 1)
        stages[start] = fewest
        after(ground, start, limit_s, first_s, behind_s)
    return cost


def fits_pins(ground: Ground, kind: int, start: int, end: int) -> bool:
    if ground.pinned.shape[0] == 0:
        return True
    if kind == ground.only and end - start != ground.only_blocks:
        return False
    for block in range(ground.pinned.shape[0]):
        if ground.pinned[block] != -1 and (start <= block < end) != (ground.pinned[block] == kind):
            return False
    return True


def after(ground: Ground, cut: int, limit_s: float, first_s: Floats, behind_s: Floats) -> None:
    """Fill `behind_s[:, cut]`: least transit behind a stage that ends at `cut`, hop included.

    `first_s[kind]`: transit of the suffix that begins at `cut` with `kind`.
    """
    kinds = ground.speed.shape[0]
    length = ground.flops.shape[1]
    if cut == length:
        for kind in range(kinds):
            there_s, back_s = ground.last_there_s[kind], ground.last_back_s[kind]
            if max(there_s, back_s) <= limit_s:
                behind_s[kind, cut] = there_s + back_s + ground.last_latency_s[kind] + ground.tail_s
        return
    there = ground.forward_bytes[cut]
    back = ground.gradient_bytes[cut]
    if ground.bandwidth.shape[0] > 0:
        for kind in range(kinds):
            best_s = np.inf
            for other in range(kinds):
                if first_s[other] >= best_s or (kind == other and ground.room[kind] < 2):
                    continue
                there_s = there / ground.bandwidth[kind, other]
                back_s = back / ground.bandwidth[other, kind]
                if max(there_s, back_s) <= limit_s:
                    best_s = min(best_s, there_s + back_s + ground.hop_latency_s[kind, other] + first_s[other])
            behind_s[kind, cut] = best_s
        return
    # Each transfer takes at least as long as on either end's line: take the best of each choice of ends.
    neither = up = down = both = np.inf
    for other in range(kinds):
        if first_s[other] == np.inf:
            continue
        far_s = first_s[other] + ground.latency_s[other]
        up_s, down_s = back / ground.hop_up[other], there / ground.hop_down[other]
        if max(up_s, down_s) > limit_s:
            continue
        neither, up = min(neither, far_s), min(up, far_s + up_s)
        down, both = min(down, far_s + down_s), min(both, far_s + up_s + down_s)
    for kind in range(kinds):
        up_s, down_s = there / ground.hop_up[kind], back / ground.hop_down[kind]
        if max(up_s, down_s) <= limit_s:
            least_s = max(max(neither + up_s + down_s, up + up_s), max(down + down_s, both))
            behind_s[kind, cut] = least_s + ground.latency_s[kind]


def ahead(ground: Ground, cut: int, limit_s: float, ending_s: Floats, before_s: Floats) -> None:
    """Fill `before_s[:, cut]`: least transit before a stage that begins at `cut`, hop included.

    `ending_s[kind]`: transit of the stages up to `cut`, the last of them on `kind`.
    """
    kinds = ground.speed.shape[0]
    there = ground.forward_bytes[cut]
    back = ground.gradient_bytes[cut]
    if ground.bandwidth.shape[0] > 0:
        for kind in range(kinds):
            best_s = np.inf
            for other in range(kinds):
                if ending_s[other] >= best_s or (kind == other and ground.room[kind] < 2):
                    continue
                there_s = there / ground.bandwidth[other, kind]
                back_s = back / ground.bandwidth[kind, other]
                if max(there_s, back_s) <= limit_s:
                    best_s = min(best_s, there_s + back_s + ground.hop_latency_s[kind, other] + ending_s[other])
            before_s[kind, cut] = best_s
        return
    neither = up = down = both = np.inf
    for other in range(kinds):
        if ending_s[other] == np.inf:
            continue
        far_s = ending_s[other] + ground.latency_s[other]
        up_s, down_s = there / ground.hop_up[other], back / ground.hop_down[other]
        if max(up_s, down_s) > limit_s:
            continue
        neither, up = min(neither, far_s), min(up, far_s + up_s)
        down, both = min(down, far_s + down_s), min(both, far_s + up_s + down_s)
    for kind in range(kinds):
        up_s, down_s = back / ground.hop_up[kind], there / ground.hop_down[kind]
        if max(up_s, down_s) <= limit_s:
            least_s = max(max(neither + up_s + down_s, up + up_s), max(down + down_s, both))
            before_s[kind, cut] = least_s + ground.latency_s[kind]


def suffixes(ground: Ground, cost: Floats, limit_s: float, prices_s: Floats) -> tuple[Floats, Floats]:
    """Return two [N, L + 1] arrays: the least cost of the suffix that begins at a cut with a kind, and of everything
    behind a stage of the kind that ends at the cut. Each use of a kind costs its price."""
    kinds = ground.speed.shape[0]
    length = ground.flops.shape[1]
    begun_s = np.full((kinds, length + 1), np.inf)
    behind_s = np.full((kinds, length + 1), np.inf)
    first_s = np.full(kinds, np.inf)
    after(ground, length, limit_s, first_s, behind_s)
    for start in range(length - 1, -1, -1):
        for kind in range(kinds):
            best_s = np.inf
            for end in range(start + 1, length + 1):
                best_s = min(best_s, cost[kind, start, end] + behind_s[kind, end])
            first_s[kind] = best_s + prices_s[kind]
            begun_s[kind, start] = first_s[kind]
        after(ground, start, limit_s, first_s, behind_s)
    return begun_s, behind_s


def before(ground: Ground, cost: Floats, period_s: float, prices_s: Floats) -> Floats:
    """Return [N, L + 1]: least cost of everything before a stage of the kind that begins at a cut."""
    kinds = ground.speed.shape[0]
    length = ground.flops.shape[1]
    limit_s = period_s * _SLACK
    before_s = np.full((kinds, length + 1), np.inf)
    before_s[:, 0] = ground.commit_s
    ending_s = np.full(kinds, np.inf)
    for end in range(1, length):
        for kind in range(kinds):
            best_s = np.inf
            for start in range(end):
                best_s = min(best_s, before_s[kind, start] + cost[kind, start, end])
            ending_s[kind] = best_s + prices_s[kind]
        ahead(ground, end, limit_s, ending_s, before_s)
    return before_s


def through(ground: Ground, cost: Floats, period_s: float, prices_s: Floats) -> Floats:
    """Return [N]: least cost of a whole chain that uses the kind."""
    kinds = ground.speed.shape[0]
    length = ground.flops.shape[1]
    before_s = before(ground, cost, period_s, prices_s)
    begun_s, _ = suffixes(ground, cost, period_s * _SLACK, prices_s)
    found = np.full(kinds, np.inf)
    for kind in range(kinds):
        for start in range(length):
            found[kind] = min(found[kind], before_s[kind, start] + begun_s[kind, start])
    return found


def traced(
    ground: Ground,
    cost: Floats,
    limit_s: float,
    begun_s: Floats,
    behind_s: Floats,
    path: Integers,
    starts: Integers,
) -> int:
    """Write the cheapest chain into `path` and `starts`, reconstructed from the sums; return its number of stages.

    If hops are only bounded from below, the next kind is one of those with the least bound.
    """
    kinds = ground.speed.shape[0]
    length = ground.flops.shape[1]
    count = 0
    kind = 0
    least_s = np.inf
    for one in range(kinds):
        if begun_s[one, 0] + ground.commit_s[one] < least_s:
            least_s = begun_s[one, 0] + ground.commit_s[one]
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
            there, back = ground.forward_bytes[end], ground.gradient_bytes[end]
            best_s = np.inf
            following = kind
            for other in range(kinds):
                if begun_s[other, end] >= best_s:
                    continue
                if ground.bandwidth.shape[0] > 0:
                    if kind == other and ground.room[kind] < 2:
                        continue
                    there_s, back_s = there / ground.bandwidth[kind, other], back / ground.bandwidth[other, kind]
                    latency_s = ground.hop_latency_s[kind, other]
                else:
                    there_s = max(there / ground.hop_up[kind], there / ground.hop_down[other])
                    back_s = max(back / ground.hop_up[other], back / ground.hop_down[kind])
                    latency_s = ground.latency_s[other]
                if max(there_s, back_s) > limit_s:
                    continue
                if there_s + back_s + latency_s + begun_s[other, end] < best_s:
                    best_s = there_s + back_s + latency_s + begun_s[other, end]
                    following = other
            kind = following
        start = end
    return count


def priced(
    ground: Ground,
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
    kinds = ground.speed.shape[0]
    length = ground.flops.shape[1]
    limit_s = period_s * _SLACK
    now_s = prices_s.copy()
    slope = np.zeros(kinds + 1)
    smooth = np.zeros(kinds + 1)
    uses = np.zeros(kinds, dtype=np.int64)
    path = np.zeros(length, dtype=np.int64)
    starts = np.zeros(length, dtype=np.int64)
    count = 0
    best_s = -np.inf
    pace = 1.0
    stale = 0
    for step in range(rounds + 1):
        each_s = now_s[:kinds] + now_s[kinds]
        begun_s, behind_s = suffixes(ground, cost, limit_s, each_s)
        value_s = np.inf
        for kind in range(kinds):
            value_s = min(value_s, float(begun_s[kind, 0] + ground.commit_s[kind]))
        if value_s == np.inf:
            return np.inf, 0, path, starts
        for kind in range(kinds):
            value_s -= float(now_s[kind] * ground.room[kind])
        value_s -= float(now_s[kinds] * (most if now_s[kinds] > 0 else fewest))
        count = traced(ground, cost, limit_s, begun_s, behind_s, path, starts)
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
        uses[:] = 0
        for place in range(count):
            uses[path[place]] += 1
        norm = 0.0
        for kind in range(kinds):
            slope[kind] = uses[kind] - ground.room[kind]
            if slope[kind] < 0 and now_s[kind] <= 0 and not required[kind]:
                slope[kind] = 0.0
        slope[kinds] = 0.0
        if count > most or (now_s[kinds] > 0 and count < most):
            slope[kinds] = count - most
        elif count < fewest or (now_s[kinds] < 0 and count > fewest):
            slope[kinds] = count - fewest
        for kind in range(kinds + 1):
            # Keep part of the last direction, because chains alternate between machines that are nearly equal.
            smooth[kind] = slope[kind] + 0.5 * smooth[kind]
            norm += smooth[kind] * smooth[kind]
        if norm == 0:
            break
        length_s = pace * max(target_s - value_s, 1e-3 * abs(target_s)) / norm
        for kind in range(kinds):
            now_s[kind] += length_s * smooth[kind]
            if not required[kind]:
                now_s[kind] = max(0.0, now_s[kind])
        now_s[kinds] += length_s * smooth[kinds]
    return best_s, count, path, starts
