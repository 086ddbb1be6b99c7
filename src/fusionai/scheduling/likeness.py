"""Machines that cost exactly the same need no exchanging. Decides which of many equal ones can be left out.

A chain uses at most as many machines of a kind as it has stages. Neighbours: `planner` asks before it plans;
`relaxation` and `search` treat those of a kind as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fusionai.scheduling.pins import must_use
from fusionai.scheduling.types import PeerProfile, Problem


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


def _named(problem: Problem) -> set[str]:
    """Who can't be exchanged for another: wishes, links of their own, and the job owner's machine."""
    owner = set[str]() if problem.owner is None else {problem.owner.peer}
    return owner | must_use(problem) | {end for key in problem.links for end in key.split(">")}
