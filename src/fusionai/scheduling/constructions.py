"""Simple layouts of a model over many peers, priced by the planner's cost function: first guesses and baselines.

equal           stages of equal length, in the number that covers best; each peer joins the weakest stage it can hold
memory          chains whose peers hold blocks in proportion to memory (exo's ring)
speed           chains whose peers hold blocks in proportion to speed, as far as memory goes
greedy          each peer takes the window whose sorted throughputs are lexicographically lowest, then moves while that
                helps (Petals' servers)
filled          short chains, in the number that covers best; each peer joins the chain with the least room, blocks in
                proportion to speed (Parallax)
clustered       chains of peers with similar bandwidth, blocks in proportion to speed (OP-Fence)

Each peer of a chain counts with its own rate, not the chain's: the slowest peer of a chain does not slow down the
others here, which overrates all chains. `coverage` starts from the best layout, `benchmarks/planner.py` compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np

from fusionai.scheduling.kernels.compiled import compiled
from fusionai.scheduling.kernels.coverage import Floats, Integers, Layout, Swarm, give, petals, recount
from fusionai.scheduling.swarm import idle, stretches


def equal(swarm: Swarm) -> Layout:
    """Stages of equal length; the number of stages with the highest least cover."""
    length = swarm.reach.shape[1]
    return _best(swarm, (_stages(swarm, count) for count in range(1, length + 1)))


def memory_proportional(swarm: Swarm) -> Layout:
    room = _room(swarm)
    return _chains(swarm, list(range(len(room))), room.astype(np.float64))


def speed_proportional(swarm: Swarm) -> Layout:
    return _chains(swarm, list(range(len(swarm.speed))), swarm.speed)


def greedy(swarm: Swarm) -> Layout:
    layout = idle(swarm)
    compiled(petals)(swarm, layout, _room(swarm), 3)
    return layout


def filled(swarm: Swarm) -> Layout:
    """Chains filled with the roomiest peers first, so that chains are short; the number of chains that covers best."""
    order = [int(p) for p in np.lexsort((-swarm.speed, -_room(swarm)))]
    room = _room(swarm)
    length = swarm.reach.shape[1]
    most = max(1, int(room.sum()) // length)
    counts = sorted({max(1, round(most * part / 12)) for part in range(1, 13)})
    return _best(swarm, (_dealt(swarm, order, count) for count in counts))


def clustered(swarm: Swarm) -> Layout:
    order = [int(p) for p in np.argsort(-np.minimum(swarm.up, swarm.down), kind="stable")]
    return _chains(swarm, order, swarm.speed)


CONSTRUCTIONS: Final[dict[str, Callable[[Swarm], Layout]]] = {
    "equal": equal,
    "memory": memory_proportional,
    "speed": speed_proportional,
    "greedy": greedy,
    "filled": filled,
    "clustered": clustered,
}


def _room(swarm: Swarm) -> Integers:
    """[N]: the most consecutive blocks that a peer can hold."""
    return stretches(swarm).max(axis=1)


def _best(swarm: Swarm, layouts: Iterable[Layout]) -> Layout:
    best = idle(swarm)
    for layout in layouts:
        if layout.cover.min() > best.cover.min():
            best = layout
    return best


def _stages(swarm: Swarm, count: int) -> Layout:
    """`count` equal stages; each peer in turn joins the weakest stage it can hold."""
    layout = idle(swarm)
    length = swarm.reach.shape[1]
    cuts = [round(length * k / count) for k in range(count + 1)]
    starts, ends = cuts[:-1], cuts[1:]
    fits = swarm.reach[:, starts] >= np.array(ends)
    strength = np.zeros(count)
    for peer in np.flatnonzero(fits.any(axis=1)):
        stage = int(np.argmin(np.where(fits[peer], strength, np.inf)))
        give(swarm, layout, int(peer), starts[stage], ends[stage])
        strength[stage] += layout.rate[peer]
    return layout


def _chains(swarm: Swarm, order: Sequence[int], weights: Floats) -> Layout:
    """Chains of peers in this order, each as long as needed to hold the model; blocks in proportion to `weights`."""
    layout = idle(swarm)
    length = swarm.reach.shape[1]
    room = _room(swarm)
    held = 0
    chain: list[int] = []
    for peer in order:
        if room[peer] == 0:
            continue
        chain.append(peer)
        held += int(room[peer])
        if held >= length and _lay(swarm, layout, chain, room, weights):
            chain, held = [], 0
    recount(layout)
    return layout


def _dealt(swarm: Swarm, order: Sequence[int], count: int) -> Layout:
    """`count` chains; each peer joins the chain with the least room so far; blocks in proportion to speed."""
    layout = idle(swarm)
    room = _room(swarm)
    held = np.zeros(count)
    chains: list[list[int]] = [[] for _ in range(count)]
    for peer in order:
        if room[peer] > 0:
            chain = int(np.argmin(held))
            chains[chain].append(peer)
            held[chain] += room[peer]
    for chain in chains:
        _lay(swarm, layout, chain, room, swarm.speed)
    recount(layout)
    return layout


def _lay(swarm: Swarm, layout: Layout, chain: Sequence[int], room: Integers, weights: Floats) -> bool:
    """Give the chain's peers blocks in proportion to `weights`, as far as memory allows. Returns False and changes
    nothing if the chain can't hold the model."""
    length = swarm.reach.shape[1]
    rest = float(sum(weights[peer] for peer in chain))
    later = int(sum(room[peer] for peer in chain))
    start = 0
    taken: list[tuple[int, int, int]] = []
    for peer in chain:
        later -= int(room[peer])
        wanted = round((length - start) * float(weights[peer]) / rest) if rest > 0 else length - start
        # This peer must take the blocks that the peers after it can't hold.
        wanted = max(wanted, length - start - later)
        end = min(start + wanted, int(swarm.reach[peer, start]) if start < length else length)
        if end > start:
            taken.append((peer, start, end))
        start = max(start, end)
        rest -= float(weights[peer])
    if start < length:
        return False
    for peer, first, last in taken:
        give(swarm, layout, peer, first, last)
    return True
