"""Plans several serving pipelines for pools larger than the model needs, and compares them to a single one.

Pipelines share no machine except the job owner's. Each serves its own sessions: as many as its memory holds and as get
a token within `SLOWER` times the seconds that the plan predicts for a single session. The objective is the tokens a
second of all pipelines under that limit. The plan's pipeline is the first. Further pipelines copy a known pipeline on
similar machines, the least capable ones that suffice. If there are none left, the fastest pipeline of the remaining
machines becomes a new pattern. Then `scheduling.serving.partition` divides the machines anew, as long as that helps.

A running job opens its pipelines one after the other, each with the best plan for the machines that are free then
(`further_pipeline`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import PeerProfile, Plan, Problem, ServingNeeds, StagePlacement
from fusionai.scheduling.serving.bound import bound_tokens_per_s
from fusionai.scheduling.serving.partition import divided
from fusionai.scheduling.serving.pipeline import block_s
from fusionai.scheduling.serving.planning import serving_plan
from fusionai.scheduling.serving.prediction import LoadedPipeline, PipelineLoad, shared_round_s, stage_room

METHOD: Final = (
    "pipelines like the fastest, one after the other, then divided anew; bound by work and prices of machines"
)
WORTH_A_WORD: Final = 1.05
"""Least ratio of throughputs, all pipelines to one pipeline, for the pipelines to be reported; chosen."""
SLOWER: Final = 2.0
"""Most seconds per token of a session on a filled pipeline, relative to the plan's prediction for a single session."""
MUCH_SLOWER: Final = 8.0
"""The same where only throughput counts (chosen): a slow pipeline gets texts while the fast ones are busy."""
PATTERNS: Final = 10
"""Most pipelines that are searched for; all others copy one of them."""
BUDGET: Final = 5_000
"""Budget of each search for a pipeline."""
ROOMS: Final = (1, 4)
"""Multiples of the wanted cache for which searched pipelines have room: longer pipelines are slower and hold more
sessions. Both are tried and the better one counts."""
DIVIDING_PLANS: Final = 400
"""Pipelines planned for that (chosen): about a second."""
LIKE: Final = 1.15
"""Largest ratio of a stage's seconds to those on the machine that it replaces in a pattern. Its room for sessions may
be smaller by the same factor."""
NEAR_S: Final = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPipeline:
    """One pipeline, filled with sessions."""

    stages: tuple[StagePlacement, ...]
    sessions: int
    passes: int
    tokens_per_s: float
    """Speed of all its sessions together."""
    session_tokens_per_s: float
    """Speed of each session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPipelines:
    """Several pipelines, compared with the single pipeline of a plan."""

    pipelines: tuple[PlacedPipeline, ...]
    """The pipelines, in no particular order."""
    idle: tuple[str, ...]
    """Usable peers that are in no pipeline."""
    sessions: int
    tokens_per_s: float
    slowest_session_tokens_per_s: float
    least_tokens_per_s: float
    """Required speed of each session."""
    chain_sessions: int
    chain_tokens_per_s: float
    """Speed of the plan's pipeline, filled in the same way."""
    over_one_chain: float
    asked_pipelines: int
    """Number of pipelines that serve the problem's number of sessions fastest."""
    asked_tokens_per_s: float
    owner_bound: bool
    """True if the job owner's machine or access link, which all pipelines share, limits the speed."""
    bound_tokens_per_s: float
    optimality_gap: float


def serving_pipelines(
    problem: Problem, chain_plan: Plan, most_sessions: int, least_tokens_per_s: float | None = None
) -> ServingPipelines | None:
    """Return the comparison for a serving job, with at most `most_sessions` sessions per pipeline.

    `least_tokens_per_s`: required speed of each session; None takes half of the plan's prediction for a single session.
    Returns None for training, if one pipeline is as good, if the plan's pipeline can't reach that speed, or if the
    problem sets stages, spares, required or pinned peers, which only a single pipeline can have."""
    needs = problem.serving
    wishes = problem.stages is not None or problem.spares_wanted or problem.required or problem.pinned
    if problem.task != "serve" or needs is None or wishes:
        return None
    costs = StageCosts(problem)
    most_s = SLOWER * chain_plan.step_time_s if least_tokens_per_s is None else 1 / least_tokens_per_s
    best: _Filled | None = None
    for room in ROOMS:
        filled = _Filled(problem, needs, costs, most_sessions, most_s)
        pool = _Free(problem, chain_plan, costs, needs)
        if not filled.add(chain_plan.stages):
            return None
        _fill(problem, filled, pool, chain_plan.stages, room)
        if best is None or filled.tokens_per_s > best.tokens_per_s:
            best = filled
    assert best is not None, "there is at least one way to look for pipelines"
    filled = _divided_anew(problem, chain_plan, best, most_sessions, most_s)
    return _compared(problem, chain_plan, filled, best.placed[0][2], most_sessions, most_s)


def further_pipeline(problem: Problem, first: Plan, owner_busy: float, *, fastest: bool = True) -> Plan | None:
    """Return the plan of one more pipeline on the machines of `problem`, None if it would not pay.

    It pays if the job owner's machine, of which the present pipelines use the fraction `owner_busy`, has time left, and
    if a single session gets a token within `SLOWER` times the seconds that `first`, the plan of the first pipeline,
    predicts. It is the pipeline with the fastest token, or, if not `fastest`, one of a division of the machines for
    throughput (`throughput_plan`), which may be `MUCH_SLOWER`. Raises nothing if no plan fits."""
    if not problem.peers or owner_busy >= 1:
        return None
    most_s = (SLOWER if fastest else MUCH_SLOWER) * first.step_time_s
    try:
        found = serving_plan(problem) if fastest else throughput_plan(problem, most_s)
    except PlanError:
        return None
    return None if found.step_time_s > most_s else found


def throughput_plan(problem: Problem, most_s: float | None = None) -> Plan:
    """Return the plan of the pipeline with the highest throughput among those that give the most together. `most_s`:
    longest time of a token in any of them, in seconds; None: `MUCH_SLOWER` times that of the fastest pipeline. Raises
    `PlanError` if no pipeline fits."""
    chain = serving_plan(problem)
    found = serving_pipelines(problem, chain, problem.needs.sessions, 1 / (most_s or MUCH_SLOWER * chain.step_time_s))
    if found is None:
        return chain
    best = max(found.pipelines, key=lambda pipeline: pipeline.tokens_per_s)
    used = {stage.peer for stage in best.stages if "stage" in stage.roles}
    peers = tuple(peer for peer in problem.peers if peer.peer in used)
    links = problem.links_among({problem.owner_id, *used})
    return serving_plan(msgspec.structs.replace(problem, peers=peers, links=links, stages=len(peers)))


def owner_busy(stages: Sequence[StagePlacement], problem: Problem) -> float:
    """Fraction of the job owner's machine that a pipeline uses when it is filled with the problem's sessions."""
    load = LoadedPipeline(stages, StageCosts(problem), problem.needs).filled(problem.needs.sessions)
    return 0.0 if load is None else load.owner_busy


def pace_figures(found: Plan, problem: Problem) -> tuple[tuple[float, ...], float]:
    """Return a plan's predicted seconds between two tokens of a session, with one session, two, and so on up to all
    places, and its seconds for a token of a prompt. `problem`: with all machines of the plan."""
    sizes = found.serving
    assert sizes is not None, "the plan is of a serving job"
    costs = StageCosts(problem)
    token_s = tuple(shared_round_s(found.stages, costs, sessions) for sessions in range(1, sizes.sessions + 1))
    return token_s, 1 / sizes.prompt_tokens_per_s if sizes.prompt_tokens_per_s else 0.0


def _fill(problem: Problem, filled: _Filled, pool: _Free, pattern: Sequence[StagePlacement], room: int) -> None:
    """Add pipelines like `pattern`, then like the fastest pipeline of the remaining peers. `room`: multiple of the
    wanted cache that searched pipelines must hold."""
    if room > 1:
        wanted = _fastest(problem, pool.left(), room)
        if wanted is None or not filled.add(wanted):
            return
        pool.take(wanted)
        pattern = wanted
    for _ in range(PATTERNS):
        load = filled.last
        while not filled.full and (stages := pool.like(pattern, load)) is not None:
            if not filled.add(stages):
                break
            pool.take(stages)
        found = None if filled.full else _fastest(problem, pool.left(), room)
        if found is None or not filled.add(found):
            break
        pool.take(found)
        pattern = found


class _Filled:
    """The pipelines so far, and how much of the job owner's machine they use."""

    def __init__(
        self, problem: Problem, needs: ServingNeeds, costs: StageCosts, most_sessions: int, most_s: float
    ) -> None:
        self._needs, self._costs = needs, costs
        self._most_sessions, self._most_s = most_sessions, most_s
        self._owner = problem.owner
        self.placed: list[tuple[Sequence[StagePlacement], LoadedPipeline, PipelineLoad]] = []
        self._owner_bytes = 0
        self.owner_busy = 0.0
        """Fraction of the owner's machine or access link in use; above 1, all pipelines are slowed by this factor."""

    def emptied(self) -> _Filled:
        """Return the same without pipelines."""
        return _Filled(self._costs.problem, self._needs, self._costs, self._most_sessions, self._most_s)

    @property
    def last(self) -> PipelineLoad:
        return self.placed[-1][2]

    @property
    def tokens_per_s(self) -> float:
        return sum(load.tokens_per_s for _, _, load in self.placed) / max(1.0, self.owner_busy)

    @property
    def full(self) -> bool:
        return self.owner_busy >= 1

    def add(self, stages: Sequence[StagePlacement]) -> bool:
        """Add a pipeline of `stages`. Returns False if it can't serve a single session within the limit."""
        pipeline = LoadedPipeline(stages, self._costs, self._needs)
        load = pipeline.filled(self._room(pipeline), self._most_s)
        if load is None:
            return False
        self.placed.append((stages, pipeline, load))
        self._owner_bytes = max(self._owner_bytes, pipeline.owner_room.fixed) + load.sessions * pipeline.owner_room.each
        self.owner_busy += max(load.owner_busy, self._link_busy(stages, load.tokens_per_s))
        return True

    def _room(self, pipeline: LoadedPipeline) -> int:
        """Sessions that the owner's memory leaves room for."""
        owner, room = self._owner, pipeline.owner_room
        if owner is None or not room.each:
            return self._most_sessions
        taken = max(self._owner_bytes, room.fixed)
        return min(self._most_sessions, (owner.memory_bytes - taken) // room.each)

    def _link_busy(self, stages: Sequence[StagePlacement], tokens_per_s: float) -> float:
        owner = self._owner
        if owner is None:
            return 0.0
        mine = [stage.peer == owner.peer for stage in stages]
        up = self._costs.forward_bytes(stages[0]) if mine[0] else 0.0
        down = (
            self._costs.forward_bytes(stages[-2]) if mine[-1] and len(stages) > 1 else float(self._needs.result_bytes)
        )
        return tokens_per_s * max(up / owner.uplink.bandwidth_bytes_per_s, down / owner.downlink.bandwidth_bytes_per_s)


class _Free:
    """Machines that are in no pipeline, as arrays."""

    def __init__(self, problem: Problem, chain_plan: Plan, costs: StageCosts, needs: ServingNeeds) -> None:
        self._own = problem.owner_id
        standing_by = set(chain_plan.spares) - {self._own}
        peers = [peer for peer in problem.peers if peer.peer in standing_by]
        peers.sort(key=lambda peer: peer.peer)
        self._peers = peers
        self._costs, self._needs = costs, needs
        self._here = np.ones(len(peers), dtype=np.bool_)
        self._place = {peer.peer: place for place, peer in enumerate(peers)}
        self._speed = np.array([peer.effective_flops_per_s for peer in peers])
        reading = np.array([peer.memory_bandwidth_bytes_per_s * peer.share for peer in peers])
        self._reading = np.where(reading > 0, reading, np.inf)
        self._memory = np.array([float(peer.memory_bytes) for peer in peers])
        self._up = np.array([peer.uplink.bandwidth_bytes_per_s for peer in peers])
        self._down = np.array([peer.downlink.bandwidth_bytes_per_s for peer in peers])
        self._latency_s = np.array([peer.uplink.latency_s + peer.downlink.latency_s for peer in peers])
        # The least capable machine that suffices goes first; better ones may be needed elsewhere.
        self._least_first = np.lexsort((self._speed, self._memory))

    def left(self) -> list[PeerProfile]:
        return [peer for peer, here in zip(self._peers, self._here, strict=True) if here]

    def take(self, stages: Sequence[StagePlacement]) -> None:
        for stage in stages:
            if stage.peer in self._place:
                self._here[self._place[stage.peer]] = False

    def like(self, pattern: Sequence[StagePlacement], load: PipelineLoad) -> list[StagePlacement] | None:
        """The stages of `pattern` on free machines like its own; None if there is none for one of the stages."""
        here = self._here.copy()
        stages: list[StagePlacement] = []
        for stage in pattern:
            if stage.peer == self._own:
                # All pipelines share the owner's ends, but each pipeline needs its own stages of the pool.
                if "stage" in stage.roles:
                    return None
                stages.append(stage)
                continue
            suits = here & self._suits(stage, load)
            chosen = next((int(place) for place in self._least_first if suits[place]), None)
            if chosen is None:
                return None
            here[chosen] = False
            stages.append(self._moved(stage, self._peers[chosen]))
        return stages

    def _suits(self, stage: StagePlacement, load: PipelineLoad) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        problem = self._costs.problem
        start, blocks = stage.blocks[0] - problem.blocks[0].block, problem.blocks_of(stage)
        rows = max(1, load.sessions // load.passes)
        like = self._costs.profiles[stage.peer]
        seconds = np.zeros(len(self._peers))
        for block in blocks:
            read_s = (block.parameter_bytes - block.looked_up_bytes) / self._reading
            seconds += np.maximum(rows * block.forward_flops / self._speed, read_s)
        mine_s = sum(block_s(block, like, rows) for block in blocks)
        room = stage_room(problem, stage)
        sessions = max(1.0, load.sessions / LIKE)
        suits = (seconds <= LIKE * mine_s) & (self._memory >= room.fixed + sessions * room.each)
        sent = rows * self._costs.forward_bytes(stage)
        came = rows * float(problem.blocks[start - 1].output_bytes) if start else 0.0
        hop_s = sent / self._up + came / self._down + self._latency_s
        like_s = sent / like.uplink.bandwidth_bytes_per_s + came / like.downlink.bandwidth_bytes_per_s
        like_s += like.uplink.latency_s + like.downlink.latency_s
        return suits & (hop_s <= LIKE * like_s + NEAR_S)

    def _moved(self, stage: StagePlacement, peer: PeerProfile) -> StagePlacement:
        return msgspec.structs.replace(
            stage,
            peer=peer.peer,
            compute_s=self._costs.decode_s(stage, peer.peer, 1),
            send_s=stage.send_s
            * self._costs.profiles[stage.peer].uplink.bandwidth_bytes_per_s
            / peer.uplink.bandwidth_bytes_per_s,
            memory_limit_bytes=peer.memory_bytes,
            fingerprint=peer.fingerprint,
        )


def _fastest(problem: Problem, left: Sequence[PeerProfile], room: int) -> tuple[StagePlacement, ...] | None:
    """The pipeline of the remaining peers that a token crosses soonest, with `room` times the wanted cache, or None."""
    needs = problem.needs
    needs = msgspec.structs.replace(needs, cache_tokens=room * max(needs.cache_tokens, needs.context_tokens))
    links = problem.links_among({problem.owner_id, *(peer.peer for peer in left)})
    posed = msgspec.structs.replace(problem, peers=tuple(left), links=links, excluded=(), incumbent=None, serving=needs)
    try:
        return serving_plan(posed, BUDGET).stages if left else None
    except PlanError:
        return None


def _divided_anew(problem: Problem, chain_plan: Plan, filled: _Filled, most_sessions: int, most_s: float) -> _Filled:
    """Return pipelines of a better division of the machines than that of `filled`, else `filled`."""
    usable = _usable(problem, chain_plan)
    if filled.full:
        return filled
    links = problem.links_among({problem.owner_id, *usable})
    peers = tuple(peer for peer in problem.peers if peer.peer in usable)
    posed = msgspec.structs.replace(problem, peers=peers, links=links, excluded=(), incumbent=None)
    start = [{stage.peer for stage in stages} & usable for stages, _, _ in filled.placed]
    found = divided(posed, most_sessions, most_s, start, DIVIDING_PLANS)
    better = filled.emptied()
    for plan in found.plans:
        better.add(plan.stages)
    return better if better.tokens_per_s > filled.tokens_per_s * (1 + 1e-9) else filled


def _usable(problem: Problem, chain_plan: Plan) -> set[str]:
    """Peers that pipelines may use."""
    return {*chain_plan.spares, *(stage.peer for stage in chain_plan.stages)} - {problem.owner_id}


def _compared(
    problem: Problem,
    chain_plan: Plan,
    filled: _Filled,
    chain_load: PipelineLoad,
    most_sessions: int,
    most_s: float,
) -> ServingPipelines | None:
    slowed = max(1.0, filled.owner_busy)
    pipelines = tuple(_served(problem, stages, load, slowed) for stages, _, load in filled.placed)
    used = {stage.peer for pipeline in pipelines for stage in pipeline.stages}
    usable = _usable(problem, chain_plan)
    is_chain = len(pipelines) == 1 and filled.placed[0][2] is chain_load
    chain_speed = pipelines[0].tokens_per_s if is_chain else chain_load.tokens_per_s
    together = sum(pipeline.tokens_per_s for pipeline in pipelines)
    if together < WORTH_A_WORD * chain_speed:
        return None
    asked = list(_asked(filled, problem))
    asked_lines, asked_speed = max(asked, key=lambda entry: entry[1])
    bound = max(bound_tokens_per_s(problem, chain_plan, most_sessions, most_s), together)
    return ServingPipelines(
        least_tokens_per_s=1 / most_s,
        pipelines=pipelines,
        idle=tuple(sorted(usable - used)),
        sessions=sum(pipeline.sessions for pipeline in pipelines),
        tokens_per_s=together,
        slowest_session_tokens_per_s=min(pipeline.session_tokens_per_s for pipeline in pipelines),
        chain_sessions=chain_load.sessions,
        chain_tokens_per_s=chain_speed,
        over_one_chain=together / chain_speed,
        asked_pipelines=asked_lines,
        asked_tokens_per_s=asked_speed,
        owner_bound=slowed > 1,
        bound_tokens_per_s=bound,
        optimality_gap=bound / together - 1,
    )


def _asked(filled: _Filled, problem: Problem) -> Iterator[tuple[int, float]]:
    """(pipelines, tokens per second) if the problem's sessions are spread evenly over the first pipelines."""
    needs = problem.needs
    for count in range(1, min(len(filled.placed), needs.sessions) + 1):
        speed = 0.0
        for number, (_, pipeline, _) in enumerate(filled.placed[:count]):
            share = needs.sessions // count + (number < needs.sessions % count)
            load = pipeline.filled(share)
            speed += 0.0 if load is None else load.tokens_per_s
        yield count, speed


def _served(problem: Problem, stages: Sequence[StagePlacement], load: PipelineLoad, slowed: float) -> PlacedPipeline:
    """The pipeline with the memory of its own sessions instead of the plan's."""
    placed: list[StagePlacement] = []
    for number, stage in enumerate(stages):
        blocks = problem.blocks_of(stage)
        room = stage_room(problem, stage)
        placed.append(
            msgspec.structs.replace(
                stage,
                stage=number,
                memory_bytes=room.fixed + load.sessions * room.each,
                weight_bytes=sum(block.parameter_bytes for block in blocks),
                cache_bytes=load.sessions * room.each,
            )
        )
    return PlacedPipeline(
        stages=tuple(placed),
        sessions=load.sessions,
        passes=load.passes,
        tokens_per_s=load.tokens_per_s / slowed,
        session_tokens_per_s=1 / load.round_s / slowed,
    )
