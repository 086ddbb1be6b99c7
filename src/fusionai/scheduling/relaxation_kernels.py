"""Loops of the certificate: the cheapest chain of stages in which a machine may come again, at a price. Know no names.

Kinds of equal machines are nodes: `room` says how many machines there are of each. `arcs` prices every stage of every
kind as far as it fits a period and an update, in the cheapest way to fit the memory. `priced` finds the cheapest chain
of such stages, each use of a kind costing its price, and moves prices until the bound they prove stops rising. `before`
and `through` say what the rest costs from a stage's point of view.

Neighbours: `relaxation` fills `Ground` and reads the results.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_FAR = 1 << 40
_SLACK = 1 + 1e-9
"""What is compared with a limit may differ from it by rounding."""


class Ground(NamedTuple):
    """N kinds, L blocks, W ways."""

    flops: Floats
    """[W, L, L + 1], as the next five: see `stage_tables`."""
    read_bytes: Floats
    slot_bytes: Floats
    trained_bytes: Floats
    stage_bytes: Floats
    flight_bytes: Floats
    needless: Integers
    able: npt.NDArray[np.bool_]
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
    """[N]: bytes per second of the access link that are left for a stage's own transfers."""
    hop_up: Floats
    hop_down: Floats
    """[N]: bytes per second of one transfer at most; inf where some pair has a link of its own."""
    latency_s: Floats
    """[N]: of uplink and downlink together; 0 where some pair has a link of its own and kinds are many."""
    plain: npt.NDArray[np.bool_]
    """[N]: every transfer takes the machine's access link."""
    paired: npt.NDArray[np.bool_]
    """[N]: some pair of the machine has a link of its own."""
    room: Integers
    """[N]: machines of the kind."""
    bandwidth: Floats
    """[N, N], or empty: then hops cost what access links say at least."""
    hop_latency_s: Floats
    """[N, N]: there and back, or empty."""
    last_there_s: Floats
    """[N]: transfer to the job owner's last stage; 0 where there is none."""
    last_back_s: Floats
    last_latency_s: Floats
    """There and back."""
    forward_bytes: Floats
    """[L + 1]: over each cut; 0 at the ends that nothing crosses."""
    gradient_bytes: Floats
    pinned: Integers
    """[L]: the kind that must hold the block, -1 for most, -2 where it is not among these; empty: no pins."""
    only: int
    only_blocks: int
    tails: int
    """1: the job owner has the last stage."""
    tail_s: float
    """Its compute."""


def arcs(ground: Ground, microbatches: int, period_s: float, update_s: float) -> Floats:
    """[N, L, L + 1]: least compute of each stage within a period and an update, inf where it can't be.

    A stage whose memory holds fewer microbatches than there are must get one back within so many periods: what lies
    behind it is taken at its least.
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
    """Fill `behind_s[:, cut]`: least transit behind a stage that ends at `cut`, hop included. `first_s[kind]`: of the
    suffix that begins there with `kind`."""
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
    # Each transfer takes at least what either end's line takes: the best of each choice of ends.
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
    """Fill `before_s[:, cut]`: least transit before a stage that begins at `cut`, hop included. `ending_s[kind]`: of
    the stages up to `cut`, the last with `kind`."""
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
    """[N, L + 1] each: least of the suffix that begins at a cut with a kind, and of all behind a stage of the kind that
    ends there. Uses of a kind cost its price."""
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
    """[N, L + 1]: least of all before a stage of the kind that begins at a cut."""
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
    """[N]: least of a whole chain that uses the kind."""
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
    """The cheapest chain itself into `path` and `starts`, by the sums that made it; returns its stages. Where hops are
    only bounded, the next kind is one of those with the least."""
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
    required: npt.NDArray[np.bool_],
    prices_s: Floats,
    target_s: float,
    rounds: int,
) -> tuple[float, int, Integers, Integers]:
    """The highest bound on transit that `rounds` changes of prices prove, no higher than it takes to reach `target_s`.

    A chain that uses a kind more often than there are machines, or stages fewer or more than there may be, raises that
    price. `prices_s` [N + 1], the last one per stage, begins as it is and ends as the best. Also the last chain's
    stages: their number, kinds and starts.
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
            # A part of the last direction stays: chains jump between machines that are nearly equal.
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
