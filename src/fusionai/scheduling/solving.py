"""The pipeline with the shortest step among the machines that may be used, and how good it is. Decides stages, peers,
cuts and what each stage does to fit.

A first pipeline is constructed and changed while that helps; a relaxation then proves a bound and says which machines
a shorter step could still use. Where those are few, a search among them ends with the best of all pipelines; else they
are annealed, and the bound is the certificate.

Neighbours: `planner` asks; `improvement` and `annealing` find, `relaxation` proves, `search` does both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np

from fusionai.scheduling.annealing import ROUNDS, annealed
from fusionai.scheduling.improvement import Layout, improve
from fusionai.scheduling.infeasible import infeasible
from fusionai.scheduling.limits import Limits, limits_among
from fusionai.scheduling.pipeline import Pipeline, Suffix
from fusionai.scheduling.relaxation import Relaxation
from fusionai.scheduling.search import GLANCE_BUDGET, MOST_PEERS, search
from fusionai.scheduling.types import PeerProfile, Problem

EXACT_PEERS: Final = 12
"""Up to here the search is given its full budget: it nearly always ends."""
SEARCH_BUDGET: Final = 8_000_000
HOPEFUL_BUDGET: Final = 400_000
"""In larger pools, where the search ends if few machines can matter."""
START_BUDGET: Final = 2_000
"""Of local search where the exact search comes after it."""
LISTED: Final = 72
"""Peers among which a pipeline is annealed."""
FIRST_ROUNDS: Final = 20_000
"""Of annealing, before a relaxation says what matters."""
CHAINS: Final = 12
"""Of a relaxation, from which annealing goes on."""
TURNS: Final = 3
"""Of proving, with annealing between them where both still gain."""
GOAL: Final = 0.002
"""Gap at which large pools are not looked at any further."""
EXACT: Final = 1e-9
SEARCHED: Final = "exact search over peers, order, cuts and what stages do to fit"
RELAXED: Final = "search among the machines that can matter, bound by relaxation"


@dataclass(frozen=True, slots=True)
class Solved:
    """No step on these machines is shorter than `least_s`."""

    pipeline: Pipeline
    best: Suffix
    least_s: float
    explored: int
    method: str

    @property
    def exact(self) -> bool:
        return self.pipeline.step_s(self.best) <= self.least_s * (1 + EXACT)


def solved(problem: Problem, peers: Sequence[PeerProfile], limits: Limits) -> Solved:
    """Among `peers`. Raises `PlanError` where there is no pipeline, or none was found."""
    return _Solving(problem, peers, limits).run()


class _Solving:
    def __init__(self, problem: Problem, peers: Sequence[PeerProfile], limits: Limits) -> None:
        self.problem = problem
        self.whole = Pipeline(problem, peers)
        self.asked = limits
        self.limits = limits_among(problem, self.whole.peers, limits)
        self.best = _incumbent(problem, self.whole, self.limits)
        self.explored = 0

    def run(self) -> Solved:
        if self.whole.owner <= EXACT_PEERS:
            improved, tried = improve(self.whole, self.limits, budget=START_BUDGET)
            self.explored += tried
            self._offer(improved)
            found = search(self.whole, self.limits, known=self.best, budget=GLANCE_BUDGET)
            self.explored += found.explored
            self._offer(found.best)
            if found.complete:
                return self._done(self._known_s, SEARCHED)
        else:
            self._offer_alone()
            self._anneal(self._promising())
        relaxation = Relaxation(self.whole, self.limits)
        small = self.whole.owner <= EXACT_PEERS
        for turn in range(TURNS):
            proven_s = relaxation.bound_s if turn else 0.0
            relaxation.narrow(self._known_s, goal=0.0 if small else GOAL)
            if relaxation.bound_s >= self._known_s * (1 - EXACT):
                break
            before_s = self._known_s
            matter = relaxation.matter()
            if len(matter) <= MOST_PEERS and self._search(
                relaxation, matter, SEARCH_BUDGET if small else HOPEFUL_BUDGET
            ):
                return self._done(self._known_s, SEARCHED)
            if not small and before_s > relaxation.bound_s * (1 + GOAL) and turn < TURNS - 1:
                self._anneal(matter, relaxation)
            proves = relaxation.bound_s > proven_s * (1 + GOAL)
            if turn > 0 and not proves and not self._known_s < before_s * (1 - EXACT):
                break
        return self._done(relaxation.bound_s, RELAXED)

    @property
    def _known_s(self) -> float:
        return inf if self.best is None else self.whole.step_s(self.best)

    def _done(self, least_s: float, method: str) -> Solved:
        if self.best is None:
            raise infeasible(self.problem, self.whole, self.limits, proven=least_s == inf)
        return Solved(self.whole, self.best, min(least_s, self._known_s), self.explored, method)

    def _offer(self, found: Suffix | None) -> None:
        """A pipeline of `whole`."""
        if found is not None and self.whole.step_s(found) < self._known_s:
            self.best = found

    def _offer_from(self, pipeline: Pipeline, found: Suffix | None) -> None:
        if found is not None:
            self._offer(_carried(self.whole, pipeline, _layout(pipeline, found)))

    def _offer_alone(self) -> None:
        """The whole chain on one machine, whichever it is."""
        if self.limits.fewest > 1 or self.limits.required.bit_count() > 1 or self.whole.front is not None:
            return
        for peer in range(self.whole.owner):
            if not self.limits.required & ~(1 << peer):
                self._offer(self.whole.fold((peer,), (0, self.whole.chain.length)))

    def _promising(self) -> list[int]:
        """Peers for a first pipeline in a large pool: the fastest, the largest, the best connected of the fast, those
        that must be used and those of the running plan."""
        whole = self.whole
        if whole.owner <= LISTED:
            return list(range(whole.owner))
        speed = np.array(whole.speed[: whole.owner])
        memory = np.array(whole.memory_bytes[: whole.owner])
        access = np.minimum(np.array(whole.up[: whole.owner]), np.array(whole.down[: whole.owner]))
        keys = (-speed, -memory, -np.minimum(speed / np.median(speed), access / np.median(access)), -speed * memory)
        named = {i for i, one in enumerate(whole.peers) if self.limits.required >> i & 1 or one.peer == whole.owner_id}
        if self.best is not None:
            named |= {stage.head for stage in whole.pool_stages(self.best)}
        found = dict.fromkeys(sorted(named))
        for ranks in zip(*(np.argsort(key, kind="stable") for key in keys), strict=True):
            if len(found) >= LISTED:
                break
            found |= dict.fromkeys(int(peer) for peer in ranks)
        return list(found)

    def _anneal(self, peers: Sequence[int], relaxation: Relaxation | None = None) -> None:
        """Among `peers`; with a relaxation, from its chains, without whom it uses twice."""
        chains = [] if relaxation is None else self._mended(relaxation)
        running = [] if self.best is None else [stage.head for stage in self.whole.pool_stages(self.best)]
        named = dict.fromkeys([*running, *(stage.head for one in chains for stage in self.whole.pool_stages(one))])
        listed = [*named, *(peer for peer in peers if peer not in named)][: max(LISTED, len(named))]
        pipeline, limits, known = self._among(listed)
        others = [one for chain in chains if (one := _carried(pipeline, self.whole, _layout(self.whole, chain)))]
        rounds = FIRST_ROUNDS if relaxation is None else ROUNDS
        found, tried = annealed(pipeline, limits, known=known, others=others, afresh=relaxation is None, rounds=rounds)
        self.explored += tried
        self._offer_from(pipeline, found)

    def _mended(self, relaxation: Relaxation) -> list[Suffix]:
        """The relaxation's chains with other machines where one comes again, as far as they fit."""
        found: list[Suffix] = []
        for chain in relaxation.chains(CHAINS):
            cuts = [*(start for _, start in chain), self.whole.chain.length]
            order: list[int] = []
            for place, (peer, start) in enumerate(chain):
                order.append(peer if peer not in order else self._stand_in(order, chain, start, cuts[place + 1]))
            whole = None if -1 in order else self.whole.fold(order, cuts)
            if whole is not None and not self.limits.required & ~sum(1 << peer for peer in order):
                found.append(whole)
        return found

    def _stand_in(self, order: Sequence[int], chain: Sequence[tuple[int, int]], start: int, end: int) -> int:
        """The fastest machine that is not in the chain and has room for the stage with some in flight; -1: none."""
        taken = {*order, *(peer for peer, _ in chain)}
        needed, _ = self.whole.least_bytes(start, end, min(self.whole.microbatches, len(chain)))
        return next(
            (peer for peer in range(self.whole.owner) if peer not in taken and self.whole.memory_bytes[peer] >= needed),
            -1,
        )

    def _search(self, relaxation: Relaxation, matter: Sequence[int], budget: int) -> bool:
        """Whether it ended."""
        pipeline, limits, known = self._among(matter)
        places = [next(i for i, p in enumerate(self.whole.peers) if p.peer == one.peer) for one in pipeline.peers]
        before = relaxation.before(places)
        # What is known may use a machine that no longer matters.
        below_s = self._known_s if known is None else inf
        found = search(pipeline, limits, known=known, budget=budget, glance=0, before=before, below_s=below_s)
        self.explored += found.explored
        self._offer_from(pipeline, found.best)
        return found.complete

    def _among(self, peers: Sequence[int]) -> tuple[Pipeline, Limits, Suffix | None]:
        """The pipeline of some peers, its limits, and what is known where it uses no others."""
        pipeline = Pipeline(self.problem, [self.whole.peers[peer] for peer in sorted(set(peers) | self._must())])
        limits = limits_among(self.problem, pipeline.peers, self.asked)
        known = None if self.best is None else _carried(pipeline, self.whole, _layout(self.whole, self.best))
        return pipeline, limits, known

    def _must(self) -> set[int]:
        required = self.limits.required
        found = {peer for peer in range(self.whole.owner) if required >> peer & 1}
        return found if self.whole.front is None else found | {self.whole.front}


def _layout(pipeline: Pipeline, suffix: Suffix) -> Layout:
    stages = list(pipeline.pool_stages(suffix))
    return tuple(stage.head for stage in stages), (*(stage.start for stage in stages), pipeline.chain.length)


def _carried(to: Pipeline, of: Pipeline, layout: Layout) -> Suffix | None:
    """The same machines and cuts in another pipeline; None if it does not know one of them."""
    index = {peer.peer: number for number, peer in enumerate(to.peers)}
    order = [index.get(of.peers[peer].peer, -1) for peer in layout[0]]
    return None if -1 in order else to.fold(order, layout[1])


def _incumbent(problem: Problem, pipeline: Pipeline, limits: Limits) -> Suffix | None:
    """The running plan as a pipeline of this problem, if it still is one: kept where nothing is faster."""
    running = problem.incumbent
    if running is None or running.graph_hash != problem.graph_hash:
        return None
    index = {peer.peer: i for i, peer in enumerate(pipeline.peers)}
    first = pipeline.chain.blocks[0].block
    stages = [stage for stage in running.stages if stage.blocks[0] < first + pipeline.chain.length]
    order = [index.get(stage.peer) for stage in stages]
    cuts = [0, *(stage.blocks[1] - first for stage in stages)]
    chosen = [peer for peer in order if peer is not None]
    fits = len(chosen) == len(order) == len(set(chosen)) and limits.fewest <= len(order) <= limits.most
    if not fits or cuts[-1] != pipeline.chain.length or limits.required & ~sum(1 << peer for peer in chosen):
        return None
    if (
        any(stage.blocks[0] - first != cut for stage, cut in zip(stages, cuts, strict=False))
        or sorted(set(cuts)) != cuts
    ):
        return None
    return pipeline.fold(chosen, cuts)
