"""Proves an upper bound on the tokens a second of all pipelines that a pool could have, however it is divided.

The bound is the least of three, and each is proven for the predictions of `serving.prediction.LoadedPipeline`:

- Work: per token and block a machine needs at least t seconds, for the block's operations or for reading its weights
  once for as many sessions as memory has room for. For any weights y of the blocks, tokens * sum y <= sum over machines
  of the largest y / t of any block.
- Embedding and head with the job owner process every token.
- Classes of pipelines, as follows.

A filled pipeline has p passes of r rows, a round of T seconds, and v = r p / T tokens a second. It is in the class q
whose intervals contain r, p and T. Let C be the number of blocks that keep a cache, b_i the number of them on machine
i, t_i the least seconds of one of them with the class's fewest rows, and h_i the least seconds of a hop into i. Every
pipeline of the class satisfies

    sum b_i = C,    1 <= b_i <= c_i,    sum (b_i t_i + h_i) <= T_q,    v <= v_q,

where c_i blocks fit beside the class's fewest sessions and take at most the longest round for its fewest passes, v_q is
the most sessions divided by the shortest round, and T_q is the longest round without the owner's part, plus one hop
unless the owner's machine sends to the first stage. There are two bounds over classes:

- Sets, for few machines: in a set of machines the least sum of seconds is found by giving each machine one block and
  the others to the fastest machines. U(S) is the largest v_q that S can have, and the best sum of U over disjoint sets
  bounds every division.
- Prices, for more machines (Lagrangian relaxation, Geoffrion 1974): for any y_q >= 0, let

      price_i = max(0, max over q and 1 <= b <= c_i of  b v_q / C + y_q (b T_q / C - b t_i - h_i)).

  The prices of a pipeline's machines add up to at least v_q + y_q (T_q - sum (b_i t_i + h_i)) >= v_q >= v. Pipelines
  share no machine, so no division exceeds the sum of all prices. The expression is linear in b, so b = 1 and b = c_i
  suffice. Any y gives a bound; subgradient steps (Polyak 1969) look for a good one, on some machines of a large pool.

`serving.parallel` states the bound beside the division that it found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log
from typing import Final

import numpy as np

from fusionai.scheduling.kernels.compiled import Flags, Floats, Integers
from fusionai.scheduling.problem.embedding_and_head import middle, owners_blocks
from fusionai.scheduling.problem.types import BlockCost, PeerProfile, Plan, Problem, ServingNeeds
from fusionai.scheduling.serving.pipeline import block_s
from fusionai.scheduling.serving.prediction import room_of

BY_SETS: Final = 8
"""Most machines whose sets are all bounded (chosen): 255 sets, some tenths of a second."""
SETS_STEP: Final = 1.005
"""Ratio of a class's longest round to its shortest in the bound by sets (chosen)."""
PRICES_STEP: Final = 1.03
"""The same in the bound by prices (chosen): classes number ten times fewer."""
EXACT_ROWS: Final = 24
"""Up to this number of rows or passes, each number has classes of its own (chosen)."""
ROWS_STEP: Final = 1.05
"""Ratio of the most rows or passes of a class to the fewest above that (chosen)."""
MOST_CELLS: Final = 6_000_000
"""Most classes times machines; if there are more, classes are wider (chosen): some seconds for 5,000 machines."""
SAMPLE: Final = 96
"""Machines on which prices are improved in a larger pool (chosen)."""
STEPS: Final = 150
"""Subgradient steps (chosen)."""
NEAR: Final = 0.7
"""Part of a machine's price that a class must reach with the first weights for its weight to be improved (chosen)."""
PATIENCE: Final = 12
"""Steps without a gain after which steps are halved (chosen)."""
AIM: Final = 0.5
"""Part of the bound that the first steps aim to remove (chosen)."""
FIRST_WEIGHTS: Final = 13
"""Weights that are tried for all classes alike, before steps improve them one by one (chosen)."""
CELLS_AT_ONCE: Final = 2_000_000
"""Classes times machines that are computed at a time (chosen): 16 MB for each intermediate result."""
ROUNDING: Final = 1e-9
"""Every comparison allows for this rounding, in the direction that raises the bound."""


def bound_tokens_per_s(problem: Problem, chain_plan: Plan, most_sessions: int, most_s: float) -> float:
    """Upper bound for pipelines with at most `most_sessions` sessions each and rounds of at most `most_s`.
    `chain_plan`: plan of the fastest pipeline, which says what machines are usable."""
    needs = problem.needs
    blocks = middle(problem)
    usable = {*chain_plan.spares, *(stage.peer for stage in chain_plan.stages if "stage" in stage.roles)}
    # Sorted, so that sums are rounded alike in whatever order the machines are listed.
    peers = sorted((peer for peer in problem.peers if peer.peer in usable), key=lambda peer: peer.peer)
    few = len(peers) <= BY_SETS
    machines = _machines(problem, peers, blocks)
    soonest_s = _soonest_s(machines, most_s)
    most_s = max(most_s, soonest_s) * (1 + ROUNDING)
    classes = _classes(machines, most_sessions, soonest_s, most_s, SETS_STEP if few else PRICES_STEP)
    bounds = [
        _bound_by_work(peers, blocks, needs, most_sessions),
        _bound_by_sets(machines, classes) if few else _bound_by_prices(machines, classes),
        _bound_by_owner(problem, needs, owners_blocks(problem), most_sessions),
    ]
    # Raised by 1e-9, so that rounding can't put the bound below a speed that pipelines reach.
    return min(bounds) * (1 + ROUNDING)


@dataclass(frozen=True, slots=True)
class _Machines:
    """What N machines need at least for one of the `count` blocks that keep a cache; the other blocks count as free.
    Arrays have shape [N]."""

    count: int
    memory: Floats
    """Bytes for weights and caches."""
    weights: float
    each: float
    """Bytes of a block's weights, and of a session's cache in it."""
    flops_s: Floats
    read_s: Floats
    """Seconds of a row's operations, and of reading the weights."""
    hop_row_s: Floats
    hop_s: Floats
    """Seconds of a hop into the machine: for each row, and once."""
    owner_flops_s: Floats
    owner_read_s: Floats
    """[blocks]: the same for the model's ends with the job owner."""
    most_stages: int
    fed: bool
    """True if the owner's machine sends to the first stage, so that each machine has a hop into it."""

    def chosen(self, places: Integers) -> _Machines:
        """Return some of the machines."""
        arrays = (self.memory, self.flops_s, self.read_s, self.hop_row_s, self.hop_s)
        memory, flops_s, read_s, hop_row_s, hop_s = (array[places] for array in arrays)
        return replace(self, memory=memory, flops_s=flops_s, read_s=read_s, hop_row_s=hop_row_s, hop_s=hop_s)


def _machines(problem: Problem, peers: Sequence[PeerProfile], blocks: tuple[BlockCost, ...]) -> _Machines:
    counted = [block for block in blocks if block.cache_token_bytes or block.cache_session_bytes] or list(blocks)
    rooms = [room_of([block], (), problem.needs) for block in counted]
    least_workspace = min(block.workspace_bytes for block in counted)
    flops = min(block.forward_flops for block in counted)
    read = float(min(block.parameter_bytes - block.looked_up_bytes for block in counted))
    speed = np.array([peer.effective_flops_per_s for peer in peers])
    reading = np.array([peer.memory_bandwidth_bytes_per_s * peer.share for peer in peers])
    owner, ends = problem.owner, owners_blocks(problem)
    hop_row_s, hop_s = _hops(problem, peers)
    owner_reading = 0.0 if owner is None else owner.memory_bandwidth_bytes_per_s * owner.share
    return _Machines(
        count=len(counted),
        memory=np.array([float(peer.memory_bytes) for peer in peers]) - least_workspace,
        weights=float(min(room.fixed - block.workspace_bytes for room, block in zip(rooms, counted, strict=True))),
        each=float(min(room.each for room in rooms)),
        flops_s=flops / speed,
        read_s=np.where(reading > 0, read / np.where(reading > 0, reading, 1.0), 0.0),
        hop_row_s=hop_row_s,
        hop_s=hop_s,
        owner_flops_s=np.array([] if owner is None else [b.forward_flops / owner.effective_flops_per_s for b in ends]),
        owner_read_s=np.array(
            [(b.parameter_bytes - b.looked_up_bytes) / owner_reading if owner_reading else 0.0 for b in ends]
        ),
        most_stages=min(len(peers), len(blocks)) + 2,
        fed=owner is not None and bool(ends) and ends[0] is problem.blocks[0],
    )


def _hops(problem: Problem, peers: Sequence[PeerProfile]) -> tuple[Floats, Floats]:
    """[N], [N]: least seconds of a hop into each peer, for each row and once; 0 for the owner's machine and peers with
    links of their own."""
    crossing = min((block.output_bytes for block in problem.blocks[:-1]), default=0)
    senders = [*peers, *([] if problem.owner is None else [problem.owner])]
    up = max(sender.uplink.bandwidth_bytes_per_s for sender in senders)
    latency_s = min(sender.uplink.latency_s for sender in senders)
    shared = np.array([float(peer.peer not in problem.linked | {problem.owner_id}) for peer in peers])
    row_s = np.array([crossing / min(up, peer.downlink.bandwidth_bytes_per_s) for peer in peers])
    return shared * row_s, shared * np.array([latency_s + peer.downlink.latency_s for peer in peers])


@dataclass(frozen=True, slots=True)
class _Classes:
    """Q classes of pipelines. Arrays have shape [Q]: the ends of each class's intervals that count."""

    rows: Floats
    passes: Floats
    sessions: Floats
    """Fewest rows of a pass, passes and sessions."""
    longest_s: Floats
    tokens_per_s: Floats
    """Longest round; most sessions in the shortest round."""

    def chosen(self, places: Flags | slice) -> _Classes:
        """Return some of the classes."""
        return _Classes(
            rows=self.rows[places],
            passes=self.passes[places],
            sessions=self.sessions[places],
            longest_s=self.longest_s[places],
            tokens_per_s=self.tokens_per_s[places],
        )


def _classes(machines: _Machines, most_sessions: int, soonest_s: float, most_s: float, step: float) -> _Classes:
    """Return classes that contain every pipeline with rounds from `soonest_s` to `most_s`."""
    rows_low, rows_high = _intervals(most_sessions)
    passes_low, passes_high = _intervals(min(most_sessions, 2 * machines.most_stages))
    places = np.argwhere(rows_low[:, None] * passes_low[None, :] <= most_sessions)
    rows, passes = places[:, 0], places[:, 1]
    most = np.minimum(rows_high[rows] * passes_high[passes], most_sessions)
    whole = _Classes(
        rows=rows_low[rows],
        passes=passes_low[passes],
        sessions=rows_low[rows] * passes_low[passes],
        longest_s=np.full(len(places), most_s),
        tokens_per_s=most / soonest_s,
    )
    # Only the classes that are possible at all are divided by the length of their rounds.
    whole = whole.chosen(_able(machines, whole))
    wanted = max(1, ceil(log(most_s / soonest_s) / log(step)))
    rounds = max(1, min(wanted, MOST_CELLS // max(1, len(whole.rows) * len(machines.memory))))
    ends = (most_s / soonest_s) ** (np.arange(rounds + 1) / rounds)
    times = len(whole.rows)
    return _Classes(
        rows=np.repeat(whole.rows, rounds),
        passes=np.repeat(whole.passes, rounds),
        sessions=np.repeat(whole.sessions, rounds),
        longest_s=np.tile(soonest_s * ends[1:], times) * (1 + ROUNDING),
        tokens_per_s=np.repeat(whole.tokens_per_s, rounds) / np.tile(ends[:-1], times),
    )


def _intervals(most: int) -> tuple[Floats, Floats]:
    """Return the lowest and the highest number of each interval of the numbers from 1 to `most`."""
    low = [1]
    while low[-1] < most:
        low.append(low[-1] + 1 if low[-1] < EXACT_ROWS else max(low[-1] + 1, int(low[-1] * ROWS_STEP)))
    low = [number for number in low if number <= most]
    return np.array(low, dtype=np.float64), np.array([*(number - 1.0 for number in low[1:]), float(most)])


@dataclass(frozen=True, slots=True)
class _Parts:
    """What machines can hold in pipelines of classes. Arrays have shape [Q, N]."""

    most: Floats
    """Most blocks."""
    block_s: Floats
    hop_s: Floats
    left_s: Floats
    """[Q]: longest round without the owner's part."""


def _parts(machines: _Machines, classes: _Classes) -> _Parts:
    rows = classes.rows[:, None]
    seconds = np.maximum(np.maximum(rows * machines.flops_s, machines.read_s), 1e-15)
    hop_s = rows * machines.hop_row_s + machines.hop_s
    held = machines.memory / np.maximum(machines.weights + classes.sessions[:, None] * machines.each, 1e-9)
    in_time = classes.longest_s[:, None] / (classes.passes[:, None] * seconds)
    most = np.floor(np.minimum(held, in_time) * (1 + ROUNDING) + ROUNDING)
    owner_s = np.maximum(rows * machines.owner_flops_s, machines.owner_read_s).sum(axis=1)
    return _Parts(np.clip(most, 0.0, machines.count), seconds, hop_s, classes.longest_s - owner_s)


def _bound_by_sets(machines: _Machines, classes: _Classes) -> float:
    """The bound by sets of machines."""
    parts = _parts(machines, classes)
    number = len(machines.memory)
    values = [0.0] * (1 << number)
    for members in range(1, 1 << number):
        places = [place for place in range(number) if members >> place & 1]
        if len(places) <= machines.count:
            values[members] = _most_of_set(machines, classes, parts, places)
    best = [0.0] * (1 << number)
    for left in range(1, 1 << number):
        first = left & -left
        rest = left ^ first
        best[left] = best[rest]
        # Every set of the machines that are left, with the first of them.
        others = rest
        while True:
            best[left] = max(best[left], values[first | others] + best[rest ^ others])
            if others == 0:
                break
            others = (others - 1) & rest
    return best[-1]


def _most_of_set(machines: _Machines, classes: _Classes, parts: _Parts, places: list[int]) -> float:
    """Return the most tokens a second of any class that a pipeline of all these machines can have."""
    most, block_s, hop_s = parts.most[:, places], parts.block_s[:, places], parts.hop_s[:, places]
    seconds = (block_s + hop_s).sum(axis=1)
    if not machines.fed:
        seconds -= hop_s.max(axis=1)
    fastest_first = np.argsort(block_s, axis=1, kind="stable")
    left = np.full(len(most), float(machines.count - len(places)))
    for place in fastest_first.T[:, :, None]:
        added = np.minimum(left, np.take_along_axis(most, place, axis=1)[:, 0] - 1)
        seconds += added * np.take_along_axis(block_s, place, axis=1)[:, 0]
        left -= added
    able = (most >= 1).all(axis=1) & (left <= 0) & (seconds <= parts.left_s * (1 + ROUNDING) + 1e-12)
    return float(classes.tokens_per_s[able].max(initial=0.0))


def _bound_by_prices(machines: _Machines, classes: _Classes) -> float:
    """The bound by prices of machines."""
    if not len(classes.rows):
        return 0.0
    classes = classes.chosen(_able(machines, classes))
    if not len(classes.rows):
        return 0.0
    number = len(machines.memory)
    fastest_first = np.argsort(machines.flops_s + machines.read_s, kind="stable")
    sample = fastest_first[np.linspace(0, number - 1, min(number, SAMPLE)).astype(np.int64)]
    starts: list[_Start] = []
    for cap in (1.0,) if machines.fed else (0.0, 0.2, 0.5, 1.0):
        # A hop counts up to a limit. The first stage has none, so every pipeline gets back one hop of that length.
        cap_row_s = float(np.quantile(machines.hop_row_s, cap))
        cap_s = float(np.quantile(machines.hop_s, cap))
        hop_row_s, hop_s = np.minimum(machines.hop_row_s, cap_row_s), np.minimum(machines.hop_s, cap_s)
        back_s = np.zeros(len(classes.rows)) if machines.fed else classes.rows * cap_row_s + cap_s
        starts.append(_start(replace(machines, hop_row_s=hop_row_s, hop_s=hop_s), sample, classes, back_s))
    start = min(starts, key=lambda start: start.total)
    weights = start.weights.copy()
    weights[start.near] = _better_weights(
        *_offers(start.machines.chosen(sample), classes.chosen(start.near), start.back_s[start.near]),
        weights[start.near],
    )
    return min(
        _sum_of_prices(start.machines, classes, start.back_s, start.weights),
        _sum_of_prices(start.machines, classes, start.back_s, weights),
    )


def _chunks(machines: _Machines, classes: _Classes) -> list[slice]:
    size = max(1, CELLS_AT_ONCE // len(machines.memory))
    return [slice(start, start + size) for start in range(0, len(classes.rows), size)]


def _soonest_s(machines: _Machines, most_s: float) -> float:
    """Return a lower bound on the round of any pipeline that takes at most `most_s`; infinity becomes `most_s`. The
    certificate of the fastest plan says less: pipelines with smaller caches may have shorter rounds."""
    one = np.ones(1)
    parts = _parts(machines, _Classes(one, one, one, np.array([most_s * (1 + ROUNDING)]), one))
    owner_s = most_s * (1 + ROUNDING) - float(parts.left_s[0])
    least_s = float(_least_s(parts, machines.count)[0]) + owner_s
    return min(least_s, most_s) * (1 - 2 * ROUNDING)


def _least_s(parts: _Parts, count: int) -> Floats:
    """[Q]: least seconds of `count` blocks, hops aside: as many as fit on the fastest machines. Infinity where the
    machines together can't hold them."""
    fastest_first = np.argsort(parts.block_s, axis=1, kind="stable")
    most = np.take_along_axis(parts.most, fastest_first, axis=1)
    before = np.cumsum(most, axis=1) - most
    taken = np.clip(count - before, 0.0, most)
    seconds = (taken * np.take_along_axis(parts.block_s, fastest_first, axis=1)).sum(axis=1)
    return np.where(parts.most.sum(axis=1) >= count, seconds, np.inf)


def _able(machines: _Machines, classes: _Classes) -> Flags:
    """[Q]: True unless the machines together can't hold the model, or are too slow."""
    able: list[Flags] = []
    for chunk in _chunks(machines, classes):
        parts = _parts(machines, classes.chosen(chunk))
        able.append(_least_s(parts, machines.count) <= parts.left_s * (1 + ROUNDING))
    return np.concatenate(able)


def _offers(machines: _Machines, classes: _Classes, back_s: Floats) -> tuple[Floats, Floats]:
    """[2, Q, N], [2, Q, N]: a machine's part of the tokens a second, with c_i blocks and with one; its part of the time
    that is left, so scaled that weights of the order of one are good."""
    parts = _parts(machines, classes)
    whole_s = parts.left_s + back_s
    blocks = np.stack([parts.most, np.minimum(parts.most, 1.0)])
    tokens = blocks * (classes.tokens_per_s / machines.count)[:, None]
    left_s = blocks * ((whole_s / machines.count)[:, None] - parts.block_s) - parts.hop_s
    scale = classes.tokens_per_s / np.maximum(whole_s, 1e-15)
    return tokens, np.where(blocks >= 1, left_s, 0.0) * scale[:, None]


@dataclass(frozen=True, slots=True)
class _Start:
    """Weights of the classes' time that follow one formula, with hops up to one limit."""

    machines: _Machines
    back_s: Floats
    """[Q]: hop that every pipeline gets back."""
    weights: Floats
    near: Flags
    """[Q]: True for the classes that nearly set the price of a machine."""
    total: float
    """Sum of the prices of the sample."""


def _start(machines: _Machines, sample: Integers, classes: _Classes, back_s: Floats) -> _Start:
    """Return the best of some simple weights for the machines of the sample."""
    tokens, left = _offers(machines.chosen(sample), classes, back_s)
    best, total = np.zeros(len(classes.rows)), float("inf")
    for form in (np.ones(len(classes.rows)), (back_s + classes.longest_s) / classes.tokens_per_s):
        for scale in np.geomspace(1e-2, 1e2, FIRST_WEIGHTS) / form.mean():
            found = float(np.maximum((tokens + (scale * form)[:, None] * left).max(axis=(0, 1)), 0.0).sum())
            if found < total:
                best, total = scale * form, found
    offers = (tokens + best[:, None] * left).max(axis=0)
    near = (offers >= NEAR * np.maximum(offers.max(axis=0), 0.0)).any(axis=1)
    return _Start(machines, back_s, best, near, total)


def _better_weights(tokens: Floats, left: Floats, weights: Floats) -> Floats:
    """Return weights of the classes, [Q], with which the sum of the machines' prices is lower."""
    number = np.arange(tokens.shape[-1], dtype=np.int64)
    best_weights, best = weights, float("inf")
    failures, aim = 0, AIM
    for _ in range(STEPS):
        offers = tokens + weights[:, None] * left
        amounts = offers.argmax(axis=0)
        highest = np.take_along_axis(offers, amounts[None], axis=0)[0]
        chosen = highest.argmax(axis=0)
        prices = np.maximum(highest[chosen, number], 0.0)
        total = float(prices.sum())
        failures = 0 if total < best * (1 - 1e-5) else failures + 1
        if total < best:
            best, best_weights = total, weights
        if failures >= PATIENCE:
            weights, failures, aim = best_weights, 0, aim / 2
            continue
        slope = np.zeros(len(weights))
        np.add.at(slope, chosen, np.where(prices > 0, left[amounts[chosen, number], chosen, number], 0.0))
        steepness = float((slope**2).sum())
        if steepness <= 0:
            break
        weights = np.maximum(weights - aim * total / steepness * slope, 0.0)
    return best_weights


def _sum_of_prices(machines: _Machines, classes: _Classes, back_s: Floats, weights: Floats) -> float:
    """Return the sum of the prices of all machines."""
    prices = np.zeros(len(machines.memory))
    for chunk in _chunks(machines, classes):
        tokens, left = _offers(machines, classes.chosen(chunk), back_s[chunk])
        prices = np.maximum(prices, (tokens + weights[chunk, None] * left).max(axis=(0, 1)))
    return float(prices.sum())


def _bound_by_work(
    peers: list[PeerProfile], blocks: tuple[BlockCost, ...], needs: ServingNeeds, most_sessions: int
) -> float:
    """The bound by work: operations and reading of weights."""
    speed = np.array([peer.effective_flops_per_s for peer in peers])[:, None]
    reading = np.array([peer.memory_bandwidth_bytes_per_s * peer.share for peer in peers])[:, None]
    memory = np.array([float(peer.memory_bytes) for peer in peers])[:, None]
    rooms = [room_of([block], (), needs) for block in blocks]
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


def _bound_by_owner(problem: Problem, needs: ServingNeeds, ends: tuple[BlockCost, ...], most_sessions: int) -> float:
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
