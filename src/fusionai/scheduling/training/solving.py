"""Finds the pipeline with the shortest step among the usable machines, and a bound on how good it is.

A first pipeline is constructed and improved by local changes. A relaxation (`bound`) then proves a bound and determines
which machines a shorter step could still use. If those are few, an exact `search` among them ends with the best
pipeline of all. Otherwise pipelines of them are improved by simulated annealing, and the bound is the certificate. If
there is no pipeline, `PlanError` names the tightest constraint and what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np

from fusionai.primitives.errors import PlanError
from fusionai.primitives.units import format_bytes
from fusionai.scheduling.problem.constraints import PipelineLimits, limits_among
from fusionai.scheduling.problem.types import PeerProfile, Problem
from fusionai.scheduling.training.bound import Relaxation
from fusionai.scheduling.training.pipeline import Pipeline, Suffix
from fusionai.scheduling.training.search import GLANCE_BUDGET, MOST_PEERS, ROUNDS, Layout, annealed, improve, search

EXACT_PEERS: Final = 12
"""Number of peers up to which the search gets its full budget; with so few it nearly always completes."""
SEARCH_BUDGET: Final = 8_000_000
"""Full search budget, in tried extensions."""
HOPEFUL_BUDGET: Final = 400_000
"""Search budget in larger pools, where the search completes if few machines can matter."""
START_BUDGET: Final = 2_000
"""Budget of the local search before an exact search."""
LISTED: Final = 72
"""Number of peers used for annealing."""
FIRST_ROUNDS: Final = 20_000
"""Annealing rounds before a relaxation determines which peers matter."""
CHAINS: Final = 12
"""Number of a relaxation's chains from which annealing continues."""
TURNS: Final = 3
"""Rounds of proving, with annealing in between if both still improve."""
GOAL: Final = 0.002
"""Relative gap at which the search in large pools stops."""
EXACT: Final = 1e-9
"""Relative gap up to which a pipeline counts as optimal."""
SEARCHED: Final = "exact search over peers, order, cuts and memory savings"
RELAXED: Final = "search among the machines that can matter, bound by relaxation"


@dataclass(frozen=True, slots=True)
class Solved:
    """A pipeline and its bound: no step on these machines is shorter than `least_s`."""

    pipeline: Pipeline
    best: Suffix
    least_s: float
    explored: int
    method: str

    @property
    def exact(self) -> bool:
        return self.pipeline.step_s(self.best) <= self.least_s * (1 + EXACT)


def solved(problem: Problem, peers: Sequence[PeerProfile], limits: PipelineLimits) -> Solved:
    """Return the best pipeline found among `peers`; raise `PlanError` if none exists or none was found."""
    return _Solving(problem, peers, limits).run()


class _Solving:
    def __init__(self, problem: Problem, peers: Sequence[PeerProfile], limits: PipelineLimits) -> None:
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
        """Keep `found`, a pipeline of `whole`, if it is faster than the best known one."""
        if found is not None and self.whole.step_s(found) < self._known_s:
            self.best = found

    def _offer_from(self, pipeline: Pipeline, found: Suffix | None) -> None:
        if found is not None:
            self._offer(_carried(self.whole, pipeline, _layout(pipeline, found)))

    def _offer_alone(self) -> None:
        """Offer the whole chain on each single machine."""
        if self.limits.fewest > 1 or self.limits.required.bit_count() > 1 or self.whole.front is not None:
            return
        for peer in range(self.whole.owner):
            if not self.limits.required & ~(1 << peer):
                self._offer(self.whole.fold((peer,), (0, self.whole.chain.length)))

    def _promising(self) -> list[int]:
        """Return the peers for a first pipeline in a large pool. These are the fastest, the largest and the best
        connected of the fast peers, the required ones and those of the running plan."""
        whole = self.whole
        if whole.owner <= LISTED:
            return list(range(whole.owner))
        machines = whole.machines[: whole.owner]
        speed = np.array([machine.flops_per_s for machine in machines])
        memory = np.array([machine.memory_bytes for machine in machines])
        access = np.array([min(machine.up, machine.down) for machine in machines])
        keys = (-speed, -memory, -np.minimum(speed / np.median(speed), access / np.median(access)), -speed * memory)
        named = {
            i
            for i, one in enumerate(whole.peers)
            if self.limits.required >> i & 1 or one.peer == whole.problem.owner_id
        }
        if self.best is not None:
            named |= {stage.head for stage in whole.pool_stages(self.best)}
        found = dict.fromkeys(sorted(named))
        for ranks in zip(*(np.argsort(key, kind="stable") for key in keys), strict=True):
            if len(found) >= LISTED:
                break
            found |= dict.fromkeys(int(peer) for peer in ranks)
        return list(found)

    def _anneal(self, peers: Sequence[int], relaxation: Relaxation | None = None) -> None:
        """Anneal pipelines among `peers`; with a relaxation, start from its chains with repeated machines replaced."""
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
        """Return the relaxation's chains, with other machines in place of repeated ones, as far as they fit."""
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
        """Return the fastest machine outside the chain with room for the stage and what is in flight; -1 if none."""
        taken = {*order, *(peer for peer, _ in chain)}
        needed, _ = self.whole.least_bytes(start, end, min(self.whole.microbatches, len(chain)))
        return next(
            (
                peer
                for peer in range(self.whole.owner)
                if peer not in taken and self.whole.machines[peer].memory_bytes >= needed
            ),
            -1,
        )

    def _search(self, relaxation: Relaxation, matter: Sequence[int], budget: int) -> bool:
        """Search exactly among `matter` and keep what is found; return whether the search was completed."""
        pipeline, limits, known = self._among(matter)
        places = [next(i for i, p in enumerate(self.whole.peers) if p.peer == one.peer) for one in pipeline.peers]
        before = relaxation.before(places)
        # The best known pipeline may use a machine that is not searched.
        below_s = self._known_s if known is None else inf
        found = search(pipeline, limits, known=known, budget=budget, glance=0, before=before, below_s=below_s)
        self.explored += found.explored
        self._offer_from(pipeline, found.best)
        return found.complete

    def _among(self, peers: Sequence[int]) -> tuple[Pipeline, PipelineLimits, Suffix | None]:
        """Return the pipeline of some peers, its limits, and the best known pipeline if it uses no other peers."""
        must = {peer for peer in range(self.whole.owner) if self.limits.required >> peer & 1}
        must |= set() if self.whole.front is None else {self.whole.front}
        pipeline = Pipeline(self.problem, [self.whole.peers[peer] for peer in sorted({*peers, *must})])
        limits = limits_among(self.problem, pipeline.peers, self.asked)
        known = None if self.best is None else _carried(pipeline, self.whole, _layout(self.whole, self.best))
        return pipeline, limits, known


def _layout(pipeline: Pipeline, suffix: Suffix) -> Layout:
    stages = list(pipeline.pool_stages(suffix))
    return tuple(stage.head for stage in stages), (*(stage.start for stage in stages), pipeline.chain.length)


def _carried(to: Pipeline, of: Pipeline, layout: Layout) -> Suffix | None:
    """Return the same machines and cuts in another pipeline; None if one of the machines is not in it."""
    index = {peer.peer: number for number, peer in enumerate(to.peers)}
    order = [index.get(of.peers[peer].peer, -1) for peer in layout[0]]
    return None if -1 in order else to.fold(order, layout[1])


def _incumbent(problem: Problem, pipeline: Pipeline, limits: PipelineLimits) -> Suffix | None:
    """Return the running plan as a pipeline, or None if it no longer fits; it stays unless another is faster."""
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


_MORE = "Use smaller microbatches or fewer of them, let providers lend more memory, or let more peers join."


def infeasible(problem: Problem, pipeline: Pipeline, limits: PipelineLimits, *, proven: bool) -> PlanError:
    """The error that names the tightest constraint. Names, counts and operators have been checked before, so memory
    (with pins) is the only constraint left. `proven`: an exact search found that no cut fits."""
    return (
        _owner(pipeline) or _block(pipeline) or _total(pipeline, limits) or _division(problem, pipeline, limits, proven)
    )


def _owner(pipeline: Pipeline) -> PlanError | None:
    """The owner's memory is too small for its first blocks with one microbatch in flight for each stage."""
    front = pipeline.front
    if front is None:
        return None
    first = next(end for end in range(1, pipeline.chain.length + 1) if pipeline.pins.allow(front, 0, end))
    # The stage itself, one stage of the pool and the owner's last stage.
    in_flight = min(pipeline.microbatches, 2 + pipeline.tail.stages)
    needed, _ = pipeline.least_bytes(0, first, in_flight)
    room = pipeline.machines[front].memory_bytes
    if needed <= room:
        return None
    return PlanError(
        f"the model's first {first} {'blocks need' if first > 1 else 'block needs'} {format_bytes(needed)} with the "
        f"job owner, who has {format_bytes(max(room, 0.0))} beside the last ones: {format_bytes(needed - room)} are "
        "missing.",
        hint="Choose the privacy level `encrypted`, train with fewer rows per microbatch, or raise the owner's memory.",
    )


def _block(pipeline: Pipeline) -> PlanError | None:
    """A single block is too large for any peer."""
    chain = pipeline.chain
    largest = max(machine.memory_bytes for machine in pipeline.machines[: pipeline.owner])
    needs = [(*_least(pipeline, b, b + 1), b) for b in range(chain.length)]
    needed, however, block = max(needs)
    if needed <= largest:
        return None
    return PlanError(
        f"block {chain.blocks[block].block} alone needs {format_bytes(needed)}{however}, the largest peer "
        f"lends {format_bytes(largest)}: {format_bytes(needed - largest)} are missing.",
        hint=_MORE,
    )


def _total(pipeline: Pipeline, limits: PipelineLimits) -> PlanError | None:
    """The usable peers together lend too little."""
    needed, however = _least(pipeline, 0, pipeline.chain.length)
    lent = _lent_bytes(pipeline, limits)
    if needed <= lent:
        return None
    peers = "1 peer" if limits.most == 1 else f"{limits.most} peers"
    return PlanError(
        f"the model needs at least {format_bytes(needed)}{however}, the largest {peers} that may hold it "
        f"lend {format_bytes(lent)}: {format_bytes(needed - lent)} are missing.",
        hint=_MORE,
    )


def _division(problem: Problem, pipeline: Pipeline, limits: PipelineLimits, proven: bool) -> PlanError:
    """The sum of the memory suffices, but no division into whole blocks with microbatches in flight fits."""
    chain = pipeline.chain
    # The variant that saves most memory for the whole model; a single block may need less in another variant.
    _, variant = pipeline.least_bytes(0, chain.length)
    size, block = max((pipeline.stage_bytes(b, b + 1, variant, 1), b) for b in range(chain.length))
    lent = _lent_bytes(pipeline, limits)
    stages = f"{limits.most} stages" if problem.stages is not None else f"up to {limits.most} stages"
    verdict = "no cut fits" if proven else "no cut was found that fits"
    own = None if pipeline.front is None else problem.owner_id
    wished = {block: peer for block, peer in problem.pinned.items() if peer != own}
    if wished:
        pins = ", ".join(f"block {block} to {peer!r}" for block, peer in sorted(wished.items()))
        return PlanError(
            f"{verdict} {stages} with {pins} pinned into the {format_bytes(lent)} the peers lend.",
            hint="Pin fewer blocks, or blocks of one peer that lie together.",
        )
    largest = f"{chain.blocks[block].block} with {format_bytes(size)}{pipeline.variants[variant].clause()}"
    return PlanError(
        f"{verdict} {stages} with their microbatches in flight into the {format_bytes(lent)} the peers lend; "
        f"the largest block is {largest}.",
        hint=_MORE,
    )


def _lent_bytes(pipeline: Pipeline, limits: PipelineLimits) -> float:
    """Memory of the largest peers, as many as there may be stages."""
    sizes = sorted((machine.memory_bytes for machine in pipeline.machines[: pipeline.owner]), reverse=True)
    return sum(sizes[: limits.most])


def _least(pipeline: Pipeline, start: int, end: int) -> tuple[float, str]:
    """Least memory with one microbatch in flight, and the words for the savings that reach it."""
    needed, variant = pipeline.least_bytes(start, end)
    return needed, pipeline.variants[variant].clause()
