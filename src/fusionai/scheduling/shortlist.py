"""Who of a large pool can matter for one pipeline. Decides whom the search looks at, and keeps the bound of everybody.

A pipeline has few stages; of thousands of peers the search gets those that hold most within the periods at which the
bound is lowest, some that are fast or large, those that must be used, and whom the running plan uses. The certificate
counts those left out as well.

Neighbours: `planner` asks, `bound` ranks; `serving_shortlist` does the same for generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from fusionai.scheduling.bound import Bound, around_of, ground_of
from fusionai.scheduling.chain import Chain
from fusionai.scheduling.ends import ends_of, tail_chain
from fusionai.scheduling.pins import must_use
from fusionai.scheduling.pipeline import fastest_first
from fusionai.scheduling.types import PeerProfile, Problem

LARGE: Final = 72
"""Peers up to which the search looks at everybody."""
LISTED: Final = 40
"""By what they hold within the period; a quarter as many by speed and by memory besides."""


def shortlist(
    problem: Problem, chain: Chain, usable: Sequence[PeerProfile], most_stages: int
) -> tuple[list[PeerProfile], Bound | None]:
    """Of `usable`, and the bound of all of them; None where everybody is listed."""
    if len(usable) <= LARGE:
        return list(usable), None
    peers = fastest_first(usable)
    loss_elsewhere = ends_of(problem).last > 0
    ground = ground_of(problem, chain, peers, [p.memory_bytes for p in peers], loss_elsewhere=loss_elsewhere)
    around = around_of(problem, chain, peers, _tail_s(problem), loss_elsewhere)
    bound = Bound(ground, around)
    count = max(LISTED, 2 * (problem.stages or 0))
    needed = must_use(problem)
    running = {stage.peer for stage in problem.incumbent.stages} if problem.incumbent is not None else set[str]()
    owner = problem.owner.peer if problem.owner is not None else ""
    chosen = set(bound.suited(most_stages, count))
    chosen |= set(range(count // 4))
    chosen |= {int(i) for i in np.argsort(-ground.memory_bytes, kind="stable")[: count // 4]}
    chosen |= {i for i, p in enumerate(peers) if p.peer in needed or p.peer in running or p.peer == owner}
    return [peers[i] for i in sorted(chosen)], bound


def _tail_s(problem: Problem) -> float:
    """Of the job owner's last stage, per microbatch."""
    owner, tail = problem.owner, tail_chain(problem)
    if owner is None or tail is None:
        return 0.0
    return tail.flops(0, tail.length) / owner.effective_flops_per_s
