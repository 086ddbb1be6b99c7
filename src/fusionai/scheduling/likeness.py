"""Machines that are alike: pools of many equal ones have few different pipelines. Decides which count as equal, and
finds the best pipeline where that leaves little to look at.

Machines that cost exactly the same need no exchanging: a chain uses at most so many of a kind as it has stages
(`without_surplus`), and the exact search tries one order of each kind only. Where all numbers of machines per kind make
few states (`few_states`), it ends soon in pools of any size.

Measured machines of one model differ by what measuring varies. `nearly` takes machines within `SAME` of each other as
one kind twice: all of them as poor as the poorest in every respect, whose best pipeline fits the real ones and is no
slower there, and all as good as the best, whose best pipeline no real one beats. What lies between is the gap.

Neighbours: `planner` asks; `search` looks for the pipelines, `improvement` starts and ends it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import msgspec

from fusionai.scheduling.improvement import Layout, descend, improve
from fusionai.scheduling.pins import must_use
from fusionai.scheduling.pipeline import Pipeline, Suffix, fastest_first
from fusionai.scheduling.limits import Limits
from fusionai.scheduling.search import MOST_PEERS, search, twins
from fusionai.scheduling.types import Link, PeerProfile, Problem

SAME: Final = 1.03
"""The larger of two speeds or memories by the smaller one."""
SAME_LINK: Final = 1.10
"""Likewise of two bandwidths."""
SAME_LATENCY_S: Final = 5e-4
STATES: Final = 1_500_000
"""Peers used of each kind x first peer's kind x first block: up to here the search is tried."""
BUDGET: Final = 600_000
GLANCE: Final = 3_000
START_BUDGET: Final = 2_000


@dataclass(frozen=True, slots=True)
class Nearly:
    """`best`: of the real machines; None if the poorer ones hold no pipeline. No pipeline takes less than `least_s`."""

    best: Suffix | None
    least_s: float
    explored: int


def without_surplus(problem: Problem, peers: Sequence[PeerProfile], most: int) -> list[PeerProfile]:
    """Of `peers`, at most `most` of each kind: the best pipeline of `most` stages is among them. Those that a wish, a
    link or the running plan names all stay."""
    named = _named(problem)
    running = {stage.peer for stage in problem.incumbent.stages} if problem.incumbent is not None else set[str]()
    counts: Counter[tuple[object, ...]] = Counter()
    kept: list[PeerProfile] = []
    for peer in sorted(peers, key=lambda p: (p.peer not in running, p.peer)):
        if peer.peer not in named:
            link = (peer.uplink, peer.downlink, peer.scratch_bytes_per_s)
            kind = (peer.effective_flops_per_s, peer.memory_bytes, peer.device == "cpu", *peer.savings, *link)
            if counts[kind] >= most:
                continue
            counts[kind] += 1
        kept.append(peer)
    return sorted(kept, key=lambda p: p.peer)


def few_states(pipeline: Pipeline, required: int) -> bool:
    """Whether the exact search has little to look at."""
    if pipeline.owner > MOST_PEERS:
        return False
    kinds = Counter((mask | 1 << peer) & -(mask | 1 << peer) for peer, mask in enumerate(twins(pipeline, required)))
    return prod(count + 1 for count in kinds.values()) * len(kinds) * pipeline.chain.length <= STATES


def nearly(problem: Problem, real: Pipeline, peers: Sequence[PeerProfile], limits: Limits) -> Nearly | None:
    """The best pipeline of machines taken as equal, and the bound; None where that leaves too much to look at. `peers`:
    all that may be used, of whom `real` may know only some."""
    kinds = _kinds(problem, peers)
    if len(kinds) == len(peers):
        return None
    # As if both halves could be had by looking at one kind at a time: before any pipeline is built.
    if prod(min(len(kind), limits.most) + 1 for kind in kinds) * len(kinds) * real.chain.length > STATES:
        return None
    poor = _levelled(problem, kinds, limits.most, poorest=True)
    good = _levelled(problem, kinds, limits.most, poorest=False)
    if poor is None or good is None:
        return None
    poor_limits = limits_among(problem, poor, limits)
    start, explored = improve(poor, poor_limits, budget=START_BUDGET)
    found = search(poor, poor_limits, known=start, budget=BUDGET, glance=GLANCE)
    explored += found.explored
    if not found.complete:
        return None
    best: Suffix | None = None
    known: Suffix | None = None
    if found.best is not None:
        layout = _layout(poor, found.best)
        best, tried = _among_real(real, poor, layout, kinds, limits_among(problem, real, limits))
        explored += tried
        known = _carried(good, poor, layout)
    proof = search(good, limits_among(problem, good, limits), known=known, budget=BUDGET, glance=GLANCE)
    if not proof.complete:
        return None
    # Both are sums of the same numbers in the same order; a hair below all the same.
    least_s = float("inf") if proof.best is None else good.step_s(proof.best) * (1 - 1e-12)
    return Nearly(best, least_s, explored + proof.explored)


def _named(problem: Problem) -> set[str]:
    """Who can't be exchanged for another: wishes, links of their own, and the job owner's machine."""
    owner = set[str]() if problem.owner is None else {problem.owner.peer}
    return owner | must_use(problem) | {end for key in problem.links for end in key.split(">")}


def _kinds(problem: Problem, peers: Sequence[PeerProfile]) -> list[list[PeerProfile]]:
    """Machines alike in every respect, each kind led by its fastest."""
    named = _named(problem)
    kinds: list[list[PeerProfile]] = []
    for peer in fastest_first(peers):
        kind = None
        if peer.peer not in named:
            kind = next((one for one in kinds if one[0].peer not in named and _alike(one[0], peer)), None)
        if kind is None:
            kinds.append([peer])
        else:
            kind.append(peer)
    return kinds


def _alike(one: PeerProfile, other: PeerProfile) -> bool:
    return (
        _within(one.effective_flops_per_s, other.effective_flops_per_s, SAME)
        and _within(one.memory_bytes, other.memory_bytes, SAME)
        and _alike_links(one.uplink, other.uplink)
        and _alike_links(one.downlink, other.downlink)
    )


def _alike_links(one: Link, other: Link) -> bool:
    near = abs(one.latency_s - other.latency_s) <= SAME_LATENCY_S
    return near and _within(one.bandwidth_bytes_per_s, other.bandwidth_bytes_per_s, SAME_LINK)


def _within(one: float, other: float, ratio: float) -> bool:
    return max(one, other) <= ratio * min(one, other)


def _levelled(problem: Problem, kinds: Sequence[Sequence[PeerProfile]], most: int, *, poorest: bool) -> Pipeline | None:
    """The pipeline of these machines, of each kind at most `most` and all alike; None if they are too many."""
    peers = [peer for kind in kinds for peer in _level(kind[:most], kind, poorest)]
    if len(peers) > MOST_PEERS:
        return None
    others = {peer.peer for peer in peers}
    pool = (*peers, *(peer for peer in problem.peers if peer.peer not in others))
    return Pipeline(msgspec.structs.replace(problem, peers=pool), peers)


def _level(some: Sequence[PeerProfile], kind: Sequence[PeerProfile], poorest: bool) -> Iterable[PeerProfile]:
    if len(kind) == 1:
        return kind
    least, most = (min, max) if poorest else (max, min)

    def link(links: list[Link]) -> Link:
        bandwidth = least(one.bandwidth_bytes_per_s for one in links)
        return Link(bandwidth_bytes_per_s=bandwidth, latency_s=most(one.latency_s for one in links))

    # Of a kind that is cut off, only those that stay are levelled down, but all of them up.
    counted = some if poorest else kind
    speed = least(peer.effective_flops_per_s for peer in counted)
    memory = least(peer.memory_bytes for peer in counted)
    up, down = link([peer.uplink for peer in counted]), link([peer.downlink for peer in counted])
    return [
        msgspec.structs.replace(peer, flops_per_s=speed, share=1.0, memory_bytes=memory, uplink=up, downlink=down)
        for peer in some
    ]


def _layout(pipeline: Pipeline, suffix: Suffix) -> Layout:
    stages = list(pipeline.pool_stages(suffix))
    return tuple(stage.head for stage in stages), (*(stage.start for stage in stages), pipeline.chain.length)


def _carried(to: Pipeline, of: Pipeline, layout: Layout) -> Suffix | None:
    """The same machines and cuts in another pipeline; None if it does not know one of them."""
    index = {peer.peer: number for number, peer in enumerate(to.peers)}
    order = [index.get(of.peers[peer].peer, -1) for peer in layout[0]]
    return None if -1 in order else to.fold(order, layout[1])


def _among_real(
    real: Pipeline, poor: Pipeline, layout: Layout, kinds: Sequence[Sequence[PeerProfile]], limits: Limits
) -> tuple[Suffix | None, int]:
    """Of each kind the fastest take the longest stages; then changed a little while the step gets shorter."""
    order, cuts = layout
    index = {peer.peer: number for number, peer in enumerate(real.peers)}
    taken = [0] * len(order)
    for kind in kinds:
        names = {peer.peer for peer in kind}
        places = [place for place, peer in enumerate(order) if poor.peers[peer].peer in names]
        places.sort(key=lambda place: -poor.chain.flops(cuts[place], cuts[place + 1]))
        for place, peer in zip(places, kind, strict=False):
            taken[place] = index.get(peer.peer, -1)
    if -1 in taken or real.fold(taken, cuts) is None:
        return None, 0
    best, _, tried = descend(real, (tuple(taken), cuts), limits, START_BUDGET)
    return real.fold(*best), tried
