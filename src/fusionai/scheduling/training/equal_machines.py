"""Leaves out surplus machines of a kind, that is machines with exactly the same costs, before planning.

A chain uses at most as many machines of a kind as it has stages. `planner` calls this module before it plans;
`relaxation` and `search` treat machines of a kind as interchangeable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fusionai.scheduling.problem.pins import must_use
from fusionai.scheduling.problem.types import PeerProfile, Problem


def without_surplus(problem: Problem, peers: Sequence[PeerProfile], most: int) -> list[PeerProfile]:
    """At most `most` of `peers` of each kind, which is enough for the best pipeline of `most` stages. Peers that a
    setting or a link of the problem names all stay, and peers of the running plan are preferred."""
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
    """Peers that no other can replace: required or pinned ones, those with links of their own, and the job owner's."""
    owner = set[str]() if problem.owner is None else {problem.owner.peer}
    return owner | must_use(problem) | {end for key in problem.links for end in key.split(">")}
