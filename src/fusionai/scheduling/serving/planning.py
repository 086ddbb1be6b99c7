"""Plans generation: which peer holds which blocks so that a token takes the least time, and the number of cache pages.

The fastest pipeline of stages that fits into memory is found by exact search (`serving.search`). Memory must hold the
requested cache. If it can't, half of that cache is tried, then a quarter and so on down to one whole context. Most of
the memory that is then left becomes further pages, up to every session's whole context. One more page is reserved for
the probe. The first block (embedding) and the last (final norm, head) belong to the job owner if the roles `feed` and
`loss` are placed there, which is the default. Tokens and logits then never leave that process. For several sessions,
cuts are then evened out at a small cost for a single session.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import ceil, inf
from typing import Final

import msgspec

from fusionai.primitives.errors import PlanError
from fusionai.primitives.units import format_bytes, format_speed
from fusionai.scheduling.problem.calibration import paced
from fusionai.scheduling.problem.constraints import check_pins, check_settings, eligible, limits_among, stage_limits
from fusionai.scheduling.problem.embedding_and_head import embedding_and_head_of, middle, place_of
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import (
    PROMPT_TOKENS,
    Certificate,
    Excluded,
    PeerProfile,
    Plan,
    Problem,
    ServingNeeds,
    ServingSizes,
    StagePlacement,
    hop,
)
from fusionai.scheduling.serving.pipeline import (
    ServingPipeline,
    block_s,
    context_pages,
    least_tokens,
    retained_bytes,
    ring_bytes,
    stage_bytes,
    token_bytes,
)
from fusionai.scheduling.serving.prediction import first_token_s, predict_serving, together
from fusionai.scheduling.serving.search import (
    FoundPipeline,
    PartialPipeline,
    ServingLimits,
    evened,
    fastest_pipeline,
    shortlist,
    with_fastest,
)
from fusionai.scheduling.standby.assignment import with_standbys
from fusionai.scheduling.training.prediction import against_one

SEARCH_BUDGET: Final = 100_000
"""Search budget, in extensions, if all usable peers are searched; chosen."""
LISTED_BUDGET: Final = 20_000
"""Search budget over a shortlist in a large pool, where more peers would gain more than more search."""
MOST_ROOM: Final = 4
"""Factor on the shortlist's length if the peers of the usual one can't hold the model."""
MOST_PAGES: Final = 1_048_576
"""Upper limit on cache pages."""
ROUNDING: Final = 1e-9
"""Relative difference of two times that counts as rounding."""
_CONTEXTS: Final = 4
"""Contexts that are longer than needed fit into the cache this many times, if there are as many sessions; chosen."""
_STEP_TOKENS: Final = 1024
"""Contexts that fill the cache are multiples of this; chosen."""
FILLED: Final = 0.75
"""Fraction of the memory beyond the wanted cache that becomes pages. The rest lets a spare hold the weights of more
stages than it will run."""


def serving_plan(problem: Problem, budget: int | None = None, *, compared: bool = True) -> Plan:
    """Return the plan with the least predicted seconds per token. Raises `PlanError` that names the tightest
    constraint. If `budget` is given, the search ends there, whatever it has proven. `compared`: add a comparison with
    one machine alone."""
    problem = paced(problem)
    needs = _checked(problem)
    usable, refused = _usable(problem, needs)
    pipeline, found, cache_tokens = _found_in_pool(problem, needs, usable, budget)
    assert found.best is not None, "a pipeline was found"
    best = found.best
    if needs.sessions > 1:
        single = _single(pipeline, _limits(problem, pipeline, cache_tokens), needs)
        most_s = inf if single is None else max(single[0], found.seconds)
        best = best._replace(cuts=evened(pipeline, best, found.seconds, cache_tokens, most_s=most_s))
    alone = _alone(problem, usable, needs)
    plan = msgspec.structs.replace(
        _written(problem, needs, pipeline, found, best, cache_tokens, usable),
        excluded=tuple(refused),
        single_peer_tokens_per_s=None if alone is None else 1 / alone[1],
    )
    if alone is not None and compared:
        sentence = against_one(problem, plan, alone[0], 1 / alone[1], lambda open_: serving_plan(open_, compared=False))
        if sentence is not None:
            plan = msgspec.structs.replace(plan, warnings=(sentence, *plan.warnings))
    return with_standbys(plan, problem)


def _usable(problem: Problem, needs: ServingNeeds) -> tuple[list[PeerProfile], list[Excluded]]:
    """Return the usable and the refused peers. Raises `PlanError` if no peer can be used."""
    pool_blocks = middle(problem)
    check_pins(problem, pool_blocks)
    smallest = min(
        stage_bytes([block], needs, retained_bytes(problem.blocks, end, needs), least_tokens(needs))
        for end, block in enumerate(pool_blocks, embedding_and_head_of(problem).first + 1)
    )
    usable, refused = eligible(problem, pool_blocks, smallest)
    return usable, refused


def _written(
    problem: Problem,
    needs: ServingNeeds,
    pipeline: ServingPipeline,
    found: FoundPipeline,
    best: PartialPipeline,
    cache_tokens: int,
    usable: list[PeerProfile],
) -> Plan:
    """Return the plan of `best`, which is the pipeline of `found` with evened cuts. The caller adds the refused peers
    and the speed of one machine."""
    pages = _pages(pipeline, best, needs, cache_tokens)
    stages = _stages(pipeline, best, needs, pages * needs.page_tokens)
    costs = StageCosts(problem)
    prediction = predict_serving(stages, costs)
    passes, together_per_s = together(stages, costs, needs)
    prompt_tokens = min(PROMPT_TOKENS, needs.context_tokens)
    warnings = _warnings(problem, pipeline, needs, found, cache_tokens, pages)
    used = {stage.peer for stage in stages if "stage" in stage.roles}
    bound = max(1 / found.bound_s, 1 / prediction.step_s)
    gap = bound * prediction.step_s - 1
    exact = found.proven and gap < ROUNDING
    return Plan(
        task="serve",
        graph_hash=problem.graph_hash,
        stages=tuple(msgspec.structs.replace(stage, in_flight=passes) for stage in stages),
        feed=stages[0].peer if problem.owner is None else problem.owner.peer,
        spares=tuple(sorted(peer.peer for peer in usable if peer.peer not in used)),
        microbatches=1,
        step_time_s=prediction.step_s,
        tokens_per_s=1 / prediction.step_s,
        bottleneck=prediction.bottleneck,
        warnings=tuple(warnings),
        certificate=Certificate(
            method="best-first search over peers, order and cuts"
            + ("" if found.proven else ", cut off")
            + ("" if found.best is not None and best.cuts == found.best.cuts else "; stages evened out"),
            exact=exact,
            bound_tokens_per_s=bound,
            optimality_gap=0.0 if exact else gap,
            explored=found.explored,
        ),
        serving=ServingSizes(
            weights=needs.weights,
            cache=needs.cache,
            page_tokens=needs.page_tokens,
            pages=pages,
            sessions=needs.sessions,
            context_tokens=_context(needs, pages),
            pass_tokens=needs.pass_tokens,
            passes_in_flight=passes,
            tokens_per_s_together=together_per_s,
            prompt_tokens_per_s=0.0
            if needs.text_tokens
            else prompt_tokens / first_token_s(stages, costs, prompt_tokens, needs.pass_tokens),
            text_tokens=needs.text_tokens,
        ),
    )


def _context(needs: ServingNeeds, pages: int) -> int:
    """Return the longest context. One that is longer than needed leaves room for others, so that the job can go on with
    fewer machines."""
    room = (pages - 1) * needs.page_tokens // min(needs.sessions, _CONTEXTS)
    longest = needs.longest_tokens if room >= needs.longest_tokens else room // _STEP_TOKENS * _STEP_TOKENS
    return max(needs.context_tokens, longest)


def _found_in_pool(
    problem: Problem,
    needs: ServingNeeds,
    usable: list[PeerProfile],
    budget: int | None,
    *,
    room: int = 1,
) -> tuple[ServingPipeline, FoundPipeline, int]:
    """Return the costs, the pipeline that was found and the cache tokens it has room for. In large pools only a
    shortlist is searched, but the bound covers all usable peers."""
    listed = shortlist(problem, needs, usable, middle(problem), room=room)
    pipeline = ServingPipeline(problem, needs, with_fastest(problem, needs, usable, listed.peers))
    _check_owner(pipeline, needs)
    if pipeline.count == len(usable):
        return pipeline, *_found(problem, pipeline, needs, budget, SEARCH_BUDGET)
    try:
        found, cache_tokens = _found(problem, pipeline, needs, budget, LISTED_BUDGET)
    except PlanError:
        if room == MOST_ROOM:
            raise
        # If memory is short, peers outside the shortlist may hold what the listed ones can't.
        return _found_in_pool(problem, needs, usable, budget, room=MOST_ROOM)
    return pipeline, replace(found, bound_s=min(found.bound_s, listed.bound_s + pipeline.ends_s)), cache_tokens


def _found(
    problem: Problem, pipeline: ServingPipeline, needs: ServingNeeds, budget: int | None, usual: int
) -> tuple[FoundPipeline, int]:
    """Return the fastest pipeline with room for as much wanted cache as possible, and the cache's tokens."""
    fewest_tokens = least_tokens(needs)
    wanted_pages = -(-needs.cache_tokens // needs.page_tokens) + 1
    cache_tokens = max(wanted_pages * needs.page_tokens, fewest_tokens)
    while pipeline.owner is not None and pipeline.owner_bytes(cache_tokens) > pipeline.owner.memory_bytes:
        cache_tokens = _halved(cache_tokens, needs)  # `_check_owner` made sure that the least fits
    fastest = partial(fastest_pipeline, pipeline, budget=usual if budget is None else budget, settle=budget is None)
    limits = _limits(problem, pipeline, cache_tokens)
    while True:
        found = fastest(limits)
        if found.best is not None:
            single = _single(pipeline, limits, needs)
            if single is None or single[0] >= found.seconds * (1 - ROUNDING):
                return found, limits.cache_tokens
            # One machine alone with a smaller cache is faster: then allow all pipelines that smaller cache.
            limits = _limits(problem, pipeline, single[1])
            again = fastest(limits)
            assert again.best is not None, "one machine holds it"
            return again, limits.cache_tokens
        if limits.cache_tokens <= fewest_tokens:
            raise _infeasible(pipeline, limits)
        limits = _limits(problem, pipeline, _halved(limits.cache_tokens, needs))


def _halved(cache_tokens: int, needs: ServingNeeds) -> int:
    """Return the tokens of half the pages, at least `least_tokens`."""
    return max(cache_tokens // needs.page_tokens // 2 * needs.page_tokens, least_tokens(needs))


def _single(pipeline: ServingPipeline, limits: ServingLimits, needs: ServingNeeds) -> tuple[float, int] | None:
    """Return seconds per token and cache tokens of the fastest pipeline with one pool stage that holds a whole context.
    The cache has at most the wanted tokens. Returns None if there is no such pipeline."""
    if limits.fewest > 1 or limits.required.bit_count() > 1:
        return None
    best: tuple[float, int] | None = None
    fewest_tokens = least_tokens(needs)
    for peer in range(pipeline.count):
        if limits.required & ~(1 << peer) or not pipeline.allowed(peer, 0, pipeline.length):
            continue
        tokens = limits.cache_tokens
        while tokens > fewest_tokens and pipeline.bytes(0, pipeline.length, tokens) > pipeline.lent_bytes(peer, tokens):
            tokens = _halved(tokens, needs)
        if pipeline.bytes(0, pipeline.length, tokens) > pipeline.lent_bytes(peer, tokens):
            continue
        seconds = single_s(pipeline, peer)
        if best is None or (seconds, -tokens) < (best[0], -best[1]):
            best = (seconds, tokens)
    return best


def single_s(pipeline: ServingPipeline, peer: int) -> float:
    """Return the seconds per token of the pipeline with one pool stage, on `peer`."""
    return (
        pipeline.enter_s(peer) + pipeline.compute_s(peer, 0, pipeline.length) + pipeline.leave_s(peer) + pipeline.ends_s
    )


def _limits(problem: Problem, pipeline: ServingPipeline, cache_tokens: int) -> ServingLimits:
    limits = limits_among(problem, pipeline.peers, stage_limits(problem, pipeline.count, pipeline.length))
    return ServingLimits(fewest=limits.fewest, most=limits.most, cache_tokens=cache_tokens, required=limits.required)


def _pages(pipeline: ServingPipeline, best: PartialPipeline, needs: ServingNeeds, cache_tokens: int) -> int:
    """Return the number of pages: those the pipeline was found with, and a part of the remaining room. The room is that
    of every machine, the job owner's included. The pages never exceed all sessions' whole contexts, or the longest
    ones."""
    longest = needs.longest_tokens * min(needs.sessions, _CONTEXTS) / FILLED / needs.page_tokens
    pages = min(max(needs.sessions * context_pages(needs), ceil(longest)) + 1, MOST_PAGES)
    rooms = [
        (pipeline.lent_bytes(peer, 0) - pipeline.bytes(a, b, 0), pipeline.token_bytes(a, b))
        for peer, a, b in _placed(best)
    ]
    if pipeline.owner is not None:
        free_bytes = pipeline.owner.memory_bytes - pipeline.owner_bytes(0)
        each = pipeline.owner_bytes(1) - pipeline.owner_bytes(0)
        rooms.append((free_bytes, each))
        for index, (peer, a, b) in enumerate(_placed(best)):
            if pipeline.peers[peer].peer == pipeline.owner.peer:
                rooms[index] = (free_bytes - pipeline.bytes(a, b, 0), each + pipeline.token_bytes(a, b))
    most = min([pages, *(room // (each * needs.page_tokens) for room, each in rooms if each)])
    sure = min(cache_tokens // needs.page_tokens, most)
    return sure + int((most - sure) * FILLED)


def _placed(best: PartialPipeline) -> list[tuple[int, int, int]]:
    return [(peer, best.cuts[k], best.cuts[k + 1]) for k, peer in enumerate(best.order)]


def _stages(
    pipeline: ServingPipeline, best: PartialPipeline, needs: ServingNeeds, cache_tokens: int
) -> list[StagePlacement]:
    owner, first = pipeline.owner, pipeline.first
    end = first + pipeline.length
    parts: list[tuple[PeerProfile, int, int, tuple[str, ...]]] = []
    for k, (peer, a, b) in enumerate(_placed(best)):
        whole = first + b == len(pipeline.blocks)
        roles = (*(("feed",) if k == 0 and not first else ()), "stage", *(("loss",) if whole else ()))
        parts.append((pipeline.peers[peer], first + a, first + b, roles))
    if owner is not None and first:
        parts.insert(0, (owner, 0, first, ("feed",)))
    if owner is not None and end < len(pipeline.blocks):
        parts.append((owner, end, len(pipeline.blocks), ("loss",)))
    return [_stage(pipeline, needs, number, *part, cache_tokens) for number, part in enumerate(parts)]


def _stage(
    pipeline: ServingPipeline,
    needs: ServingNeeds,
    number: int,
    profile: PeerProfile,
    start: int,
    end: int,
    roles: tuple[str, ...],
    cache_tokens: int,
) -> StagePlacement:
    blocks = pipeline.blocks[start:end]
    sent = retained_bytes(pipeline.blocks, end, needs)
    last = end == len(pipeline.blocks)
    return msgspec.structs.replace(
        StagePlacement(stage=number, peer=profile.peer, blocks=(blocks[0].block, blocks[-1].block + 1)),
        roles=roles,
        compute_s=sum(block_s(block, profile) for block in blocks),
        send_s=(needs.result_bytes if last else blocks[-1].output_bytes) / profile.uplink.bandwidth_bytes_per_s,
        memory_bytes=stage_bytes(blocks, needs, sent, cache_tokens),
        memory_limit_bytes=profile.memory_bytes,
        weight_bytes=sum(block.parameter_bytes for block in blocks),
        cache_bytes=cache_tokens * token_bytes(blocks, sent) + ring_bytes(blocks, needs),
        fingerprint=profile.fingerprint,
    )


def _alone(problem: Problem, usable: list[PeerProfile], needs: ServingNeeds) -> tuple[str, float] | None:
    """Return the fastest single machine that holds the whole model and one context, and its seconds per token. For a
    machine of the pool the time includes the way from the job owner and back."""
    owner = problem.owner
    machines = [*usable, *([] if owner is None else [owner])]
    operators = {op for block in problem.blocks for op in block.ops}
    needed = stage_bytes(problem.blocks, needs, 0, least_tokens(needs))

    def token_s(machine: PeerProfile) -> float:
        seconds = sum(block_s(block, machine) for block in problem.blocks)
        if owner is None:
            return seconds
        into, back = hop(owner, machine, problem.links), hop(machine, owner, problem.links)
        return seconds + into.latency_s + needs.result_bytes / back.bandwidth_bytes_per_s + back.latency_s

    fitting = [
        (token_s(machine), machine.peer)
        for machine in machines
        if machine.memory_bytes >= needed
        and machine.effective_flops_per_s > 0
        and not operators & set(machine.unsupported_ops)
    ]
    if not fitting:
        return None
    seconds, peer = min(fitting)
    return peer, max(seconds, 1e-12)


def _warnings(
    problem: Problem,
    pipeline: ServingPipeline,
    needs: ServingNeeds,
    found: FoundPipeline,
    cache_tokens: int,
    pages: int,
) -> list[str]:
    warnings: list[str] = []
    held = (pages - 1) * needs.page_tokens
    if held < needs.cache_tokens:
        warnings.append(
            f"Memory is short: the cache holds {held} tokens of the {needs.cache_tokens} wanted, "
            f"{held // needs.context_tokens} whole contexts of {needs.context_tokens} at a time."
        )
    if problem.stages is not None and problem.stages > 1:
        free = msgspec.structs.replace(problem, stages=None)
        wider = _limits(free, pipeline, cache_tokens)
        fewest = min(wider.fewest, problem.stages - 1)
        fewer = fastest_pipeline(pipeline, replace(wider, fewest=fewest, most=problem.stages - 1), budget=SEARCH_BUDGET)
        if fewer.best is not None and fewer.seconds < found.seconds:
            count = len(fewer.best.order)
            warnings.append(
                f"{count} {'stage' if count == 1 else 'stages'} would be faster than the {problem.stages} asked for: "
                f"{format_speed(1 / fewer.seconds)} {problem.unit}/s instead of {format_speed(1 / found.seconds)}."
            )
    return warnings


def _infeasible(pipeline: ServingPipeline, limits: ServingLimits) -> PlanError:
    """Return the error for a problem without a pipeline; memory is the only constraint that was not checked before."""
    largest = max(peer.memory_bytes for peer in pipeline.peers)
    needed, block = max((pipeline.bytes(b, b + 1, limits.cache_tokens), b) for b in range(pipeline.length))
    hint = "Use another weight format or a shorter context, let providers lend more memory, or let more peers join."
    context = f"with a cache of {limits.cache_tokens} tokens"
    if needed > largest:
        return PlanError(
            f"block {pipeline.numbers(block, block + 1)[0]} alone needs {format_bytes(needed)} {context}, the largest "
            f"peer lends {format_bytes(largest)}: {format_bytes(needed - largest)} are missing.",
            hint=hint,
        )
    whole = pipeline.bytes(0, pipeline.length, limits.cache_tokens)
    lent = sum(sorted((peer.memory_bytes for peer in pipeline.peers), reverse=True)[: limits.most])
    peers = "1 peer" if limits.most == 1 else f"{limits.most} peers"
    if whole > lent:
        return PlanError(
            f"the model needs {format_bytes(whole)} {context}, the largest {peers} that may hold it lend "
            f"{format_bytes(lent)}: {format_bytes(whole - lent)} are missing.",
            hint=hint,
        )
    return PlanError(
        f"no cut was found that fits {peers} into the {format_bytes(lent)} they lend {context}; the largest block "
        f"takes {format_bytes(needed)}.",
        hint=hint,
    )


def _checked(problem: Problem) -> ServingNeeds:
    needs = problem.serving
    if needs is None:
        raise PlanError("expected a serving problem to say what it needs (`serving`), got nothing.")
    for name in ("context_tokens", "sessions", "page_tokens", "pass_tokens"):
        if (count := getattr(needs, name)) < 1:
            raise PlanError(f"expected {name} of at least 1, got {count}.")
    if len(problem.blocks) < 3:
        raise PlanError(f"expected an embedding, layers and a head to serve, got {len(problem.blocks)} blocks.")
    check_settings(problem)
    for role in ("feed", "loss"):
        if place_of(problem, role) == "owner" and problem.owner is None:
            raise PlanError(
                "an end of the model is placed with the job owner, but the problem has no owner's profile.",
                hint="Give the owner's profile, or place the ends with the pool.",
            )
    middle(problem)
    return needs


def _check_owner(pipeline: ServingPipeline, needs: ServingNeeds) -> None:
    owner = pipeline.owner
    mine = pipeline.owner_blocks
    if owner is None or not mine:
        return
    missing = sorted({op for block in mine for op in block.ops} & set(owner.unsupported_ops))
    if missing:
        raise PlanError(f"the job owner's backend {owner.backend!r} can't run {', '.join(missing)} of its ends.")
    if not owner.effective_flops_per_s > 0:
        raise PlanError(f"the job owner's measured speed is {owner.effective_flops_per_s} FLOP/s.")
    needed = pipeline.owner_bytes(least_tokens(needs))
    if needed > owner.memory_bytes:
        raise PlanError(
            f"the model's ends need {format_bytes(needed)} with the job owner, who has "
            f"{format_bytes(owner.memory_bytes)}: {format_bytes(needed - owner.memory_bytes)} are missing.",
            hint="Use another weight format, or place the ends with the pool (`--privacy encrypted --ends pool`).",
        )
