"""`plan(problem) -> Plan`: pure and deterministic. Decides which peer holds which blocks; starts nothing.

Small pools are searched exactly (`search`), and larger ones of few kinds of machines (`likeness`); others
heuristically (`annealing`) with a proven bound (`bound`); of very large ones only peers that can matter are looked at
(`shortlist`), while the bound counts everybody. The plan says which, and how far from the bound it can be. The same
problem gives the same plan, in whatever order its peers are listed. One replica and one stage per peer: `many_holders`
says what more of them would bring.

Neighbours: `replicated` plans several replicas, `serving` for generation. `eligibility` (who may be used), `pipeline`
(what a step costs), `alone` (one machine instead), `small_memory` (what stages do to fit), `placement` (the plan
written out), `guards` (which spare guards which stage), `infeasible` (why there is none).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from fusionai.primitives.errors import PlanError
from fusionai.primitives.units import format_speed
from fusionai.scheduling import likeness
from fusionai.scheduling.alone import fastest_alone
from fusionai.scheduling.annealing import ROUNDS, annealed
from fusionai.scheduling.bound import Bound, step_time_bound_s
from fusionai.scheduling.chain import Chain, check_blocks, logits_block
from fusionai.scheduling.compression import lightened
from fusionai.scheduling.eligibility import check_names, eligible
from fusionai.scheduling.ends import check_owners_memory, ends_of, middle, place_of, with_front
from fusionai.scheduling.guards import with_guards
from fusionai.scheduling.improvement import improve
from fusionai.scheduling.infeasible import infeasible
from fusionai.scheduling.likeness import few_states, limits_among, nearly, without_surplus
from fusionai.scheduling.links import check_access, check_links
from fusionai.scheduling.pace import paced
from fusionai.scheduling.pins import check_pins, must_use
from fusionai.scheduling.pipeline import Pipeline, Suffix
from fusionai.scheduling.placement import pool_name, written_out
from fusionai.scheduling.search import MOST_PEERS, Limits, search
from fusionai.scheduling.serving import serving_plan
from fusionai.scheduling.shortlist import shortlist
from fusionai.scheduling.small_memory import fitted, saving
from fusionai.scheduling.types import Certificate, PeerProfile, Plan, Problem
from fusionai.wire.codecs import Codec, gently

EXACT_PEERS: Final = 12
"""Up to here the exact search is given its full budget: it nearly always ends."""
HOPEFUL_PEERS: Final = 20
"""Up to here it is tried with a smaller one: it ends where few stages are needed."""
SEARCH_BUDGET: Final = 8_000_000
HOPEFUL_BUDGET: Final = 2_000_000
START_BUDGET: Final = 2_000
"""Of local search where the exact search comes after it."""
CLOSE: Final = 1.004
"""A step by its bound: where machines hardly differ, one that is as close is not worth more effort."""
FEW_ROUNDS: Final = ROUNDS // 8
"""Of annealing, from what machines taken as equal give."""


def plan(problem: Problem) -> Plan:
    """The plan with the shortest predicted step. Raises `PlanError` naming the tightest constraint if there is none."""
    if problem.task == "serve":
        return serving_plan(problem)
    problem = paced(problem)
    found = fitted(problem, _chain_plan)
    return with_guards(_against_one(problem, found), problem)


def _chain_plan(problem: Problem) -> Plan:
    """Without guards, and not yet held against one machine alone."""
    _check(problem)
    pool_blocks = middle(problem)
    check_pins(problem, pool_blocks)
    pools = Chain(problem, pool_blocks)
    smallest = min(pools.resident_bytes(b, b + 1) + pools.in_flight_bytes(b, b + 1) for b in range(pools.length))
    usable, refused = eligible(problem, pool_blocks, smallest)
    if not usable:
        reasons = "; ".join(f"{pool_name(problem, e.peer)}: {e.reason.rstrip('.')}" for e in refused)
        raise PlanError(
            f"no peer of the pool can be used ({reasons or 'the pool is empty'}).",
            hint="Let more peers join, or mend what stands in the way.",
        )
    limits_of_all = _limits(problem, usable, pools.length)
    asked, problem = problem, with_front(problem)
    if problem is not asked:
        usable = [*(one for one in usable if one.peer != problem.peers[-1].peer), problem.peers[-1]]
        limits_of_all = Limits(fewest=limits_of_all.fewest + 1, most=limits_of_all.most + 1)
    chain = Chain(problem, problem.blocks[: len(problem.blocks) - ends_of(problem).last])
    rivals = without_surplus(problem, usable, limits_of_all.most)
    listed, bound = shortlist(problem, chain, rivals, limits_of_all.most)
    pipeline = Pipeline(problem, listed)
    limits = limits_among(problem, pipeline, limits_of_all)
    solved = _solve(problem, pipeline, rivals, limits, bound)
    warnings = _warnings(problem, pipeline, limits, solved)
    best, codecs = solved.best, _uniform(problem, solved.best)
    if problem.compression == "adaptive":
        pipeline, best, codecs = lightened(pipeline, best)
        solved = _with_codecs(solved, problem, pipeline, best)
    placed = written_out(
        problem,
        pipeline,
        best,
        codecs=codecs,
        certificate=solved.certificate,
        feed_at_owner=place_of(problem, "feed") == "owner",
        refused=tuple(refused),
        warnings=tuple(warnings),
        usable=usable,
    )
    return saving(problem, placed)


def _against_one(problem: Problem, found: Plan) -> Plan:
    """With the speed of the fastest machine alone, and a warning first of all where that is the faster way."""
    usable, _ = eligible(problem, middle(problem), 0.0)
    alone = fastest_alone(problem, _machines(problem, usable))
    if alone is None:
        return found
    warnings = found.warnings
    if alone.tokens_per_s > found.tokens_per_s:
        sentence = (
            f"One machine alone would be faster: {pool_name(problem, alone.peer.peer)} reaches "
            f"{format_speed(alone.tokens_per_s)} tokens/s by itself, this plan {format_speed(found.tokens_per_s)}."
        )
        warnings = (sentence, *warnings)
    return msgspec.structs.replace(found, single_peer_tokens_per_s=alone.tokens_per_s, warnings=warnings)


def _uniform(problem: Problem, best: Suffix) -> tuple[Codec, ...]:
    """Of all boundaries, where the job says it; empty where nothing is packed."""
    if problem.compression in ("none", "adaptive"):
        return ()
    between = (problem.compression,) * (best.stages - 1)
    return between if logits_block(problem) is None else (*between[:-1], gently(problem.compression))


def _with_codecs(solved: _Solved, problem: Problem, pipeline: Pipeline, best: Suffix) -> _Solved:
    """The certificate, which was of the smallest codecs, against what those that lose less pass."""
    speed = problem.microbatches * problem.microbatch_tokens / pipeline.step_s(best)
    gap = max(0.0, solved.certificate.bound_tokens_per_s / speed - 1)
    certificate = msgspec.structs.replace(
        solved.certificate, exact=solved.certificate.exact and gap == 0.0, optimality_gap=gap
    )
    return _Solved(best, certificate)


@dataclass(frozen=True, slots=True)
class _Solved:
    best: Suffix
    certificate: Certificate


def _solve(
    problem: Problem, pipeline: Pipeline, rivals: Sequence[PeerProfile], limits: Limits, bound: Bound | None
) -> _Solved:
    known = _incumbent(problem, pipeline, limits)
    explored = 0
    tokens = problem.microbatches * problem.microbatch_tokens
    alike = pipeline.owner > HOPEFUL_PEERS and bound is None and few_states(pipeline, limits.required)
    if alike or pipeline.owner <= HOPEFUL_PEERS:
        improved, explored = improve(pipeline, limits, budget=START_BUDGET)
        known = _faster(pipeline, known, improved)
        if alike:
            found = search(pipeline, limits, known=known, budget=likeness.BUDGET, glance=likeness.GLANCE)
        else:
            found = search(pipeline, limits, known=known, budget=_budget(pipeline))
        explored += found.explored
        known = found.best
        if found.complete:
            if known is None:
                raise infeasible(problem, pipeline, limits, proven=True)
            speed = tokens / pipeline.step_s(known)
            certificate = Certificate(
                method="exact search over peers, order and cuts",
                exact=True,
                bound_tokens_per_s=speed,
                optimality_gap=0.0,
                explored=explored,
            )
            return _Solved(known, certificate)
    method = "exact search, machines that hardly differ taken as equal"
    near = nearly(problem, pipeline, rivals, limits)
    least_s = 0.0
    if near is not None:
        known, least_s = _faster(pipeline, known, near.best), near.least_s
        explored += near.explored
    if near is None or not _close(pipeline, known, least_s):
        # A shortlist was drawn up with the bound of all peers; one of those listed would prove nothing about the
        # others.
        capacity_s = (
            step_time_bound_s(pipeline, limits.most, limits.fewest)
            if bound is None
            else bound.step_s(limits.most, limits.fewest)
        )
        least_s = max(least_s, capacity_s)
    if near is None or not _close(pipeline, known, least_s):
        method = "annealing, capacity bound"
        # What machines taken as equal give is nearly as good as it gets, unless it leaves many out.
        begun = near is not None and near.best is not None and pipeline.owner <= MOST_PEERS
        known, tried = annealed(pipeline, limits, known=known, rounds=FEW_ROUNDS if begun else ROUNDS)
        explored += tried
    if known is None:
        raise infeasible(problem, pipeline, limits, proven=False)
    speed = tokens / pipeline.step_s(known)
    bound_per_s = max(tokens / least_s, speed)
    certificate = Certificate(
        method=method,
        exact=False,
        bound_tokens_per_s=bound_per_s,
        optimality_gap=bound_per_s / speed - 1,
        explored=explored,
    )
    return _Solved(known, certificate)


def _close(pipeline: Pipeline, known: Suffix | None, least_s: float) -> bool:
    return known is not None and pipeline.step_s(known) <= least_s * CLOSE


def _budget(pipeline: Pipeline) -> int:
    return SEARCH_BUDGET if pipeline.owner <= EXACT_PEERS else HOPEFUL_BUDGET


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


def _faster(pipeline: Pipeline, first: Suffix | None, second: Suffix | None) -> Suffix | None:
    """The first on a tie."""
    if first is None or second is None:
        return second if first is None else first
    return second if pipeline.step_s(second) < pipeline.step_s(first) else first


def _warnings(problem: Problem, pipeline: Pipeline, limits: Limits, solved: _Solved) -> list[str]:
    """Say so when fewer stages than asked for would be faster."""
    own = 0 if pipeline.front is None else 1
    if problem.stages is None or problem.stages == 1 + own:
        return []
    fewer = Limits(fewest=max(1, limits.required.bit_count()), most=problem.stages - 1, required=limits.required)
    if fewer.most < fewer.fewest:
        return []
    if pipeline.owner <= HOPEFUL_PEERS:
        known, _ = improve(pipeline, fewer, budget=START_BUDGET)
        known = search(pipeline, fewer, known=known, budget=_budget(pipeline)).best
    else:
        known, _ = annealed(pipeline, fewer)
    if known is None or pipeline.step_s(known) >= pipeline.step_s(solved.best):
        return []
    count = sum(1 for _ in pipeline.pool_stages(known)) - own
    tokens = problem.microbatches * problem.microbatch_tokens
    return [
        f"{count} {'stage' if count == 1 else 'stages'} would be faster than the {problem.stages - own} asked for: "
        f"{format_speed(tokens / pipeline.step_s(known))} tokens/s instead of "
        f"{format_speed(tokens / pipeline.step_s(solved.best))}."
    ]


def _limits(problem: Problem, peers: Sequence[PeerProfile], blocks: int) -> Limits:
    """Without the mask of required peers, which depends on who is listed."""
    usable, required = len(peers), len(must_use(problem))
    reserved = problem.spares_wanted or 0
    most = min(usable - reserved, blocks)
    wanted = problem.stages or max(1, required)
    if most < wanted:
        if wanted > blocks:
            raise PlanError(
                f"{wanted} stages need {wanted} blocks, the model has {blocks} to place.",
                hint=f"Ask for at most {blocks} stages.",
            )
        spare = f" with {reserved} kept as spares" if reserved else ""
        raise PlanError(
            f"{wanted} stages need {wanted} peers{spare}, but {usable} of {len(problem.peers)} peers can be used.",
            hint="Ask for fewer stages or spares, or let more peers join.",
        )
    if problem.stages is not None and required > problem.stages:
        raise PlanError(
            f"{required} peers are required, but only {problem.stages} stages were asked for.",
            hint="Require fewer peers or ask for more stages.",
        )
    return Limits(fewest=wanted, most=problem.stages or most)


def _machines(problem: Problem, usable: list[PeerProfile]) -> list[PeerProfile]:
    owner = problem.owner
    if owner is None or any(peer.peer == owner.peer for peer in usable):
        return usable
    return [*usable, owner]


def _check(problem: Problem) -> None:
    check_blocks(problem.blocks)
    check_names(problem)
    if problem.replicas != 1:
        raise PlanError(
            f"expected 1 replica, got {problem.replicas}.",
            hint="Several replicas of a training job are planned by `scheduling.replicated`.",
        )
    if problem.microbatches < 1 or problem.microbatch_tokens < 1:
        raise PlanError(
            f"expected at least one microbatch of at least one token, "
            f"got {problem.microbatches} of {problem.microbatch_tokens}."
        )
    if problem.stages is not None and problem.stages < 1:
        raise PlanError(f"expected at least 1 stage, got {problem.stages}.")
    if problem.spares_wanted is not None and problem.spares_wanted < 0:
        raise PlanError(f"expected at least 0 spares, got {problem.spares_wanted}.")
    roles = [r.role for r in problem.roles]
    if len(set(roles)) != len(roles):
        raise PlanError(f"expected each role once, got {', '.join(roles)}.")
    everyone = [*problem.peers, *([] if problem.owner is None else [problem.owner])]
    check_links(problem.links, (p.peer for p in everyone))
    for peer in everyone:
        check_access(peer)
    _check_owner(problem)


def _check_owner(problem: Problem) -> None:
    owner = problem.owner
    for role in ("feed", "loss"):
        if place_of(problem, role) == "owner" and owner is None:
            raise PlanError(
                f"the {role} is placed with the job owner, but the problem has no owner's profile.",
                hint=f"Give the owner's profile, or place the {role} with the pool.",
            )
    ends = ends_of(problem)
    if owner is None or not (ends.first or ends.last):
        return
    if len(problem.blocks) < 2:
        raise PlanError("the loss is placed with the job owner, so at least two blocks are needed; got one.")
    middle(problem)
    own = (*problem.blocks[: ends.first], *problem.blocks[len(problem.blocks) - ends.last :])
    missing = sorted({op for block in own for op in block.ops} & set(owner.unsupported_ops))
    if missing:
        what = "the model's ends" if ends.first or ends.last > 1 else "the loss"
        raise PlanError(f"the job owner's backend {owner.backend!r} can't run {', '.join(missing)} of {what}.")
    if not owner.effective_flops_per_s > 0:
        raise PlanError(f"the job owner's measured speed is {owner.effective_flops_per_s} FLOP/s.")
    check_owners_memory(problem)
