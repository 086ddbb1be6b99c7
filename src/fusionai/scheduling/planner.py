"""`plan(problem) -> Plan`: chooses which peer holds which blocks. Pure and deterministic; starts nothing.

The same problem gives the same plan, in whatever order its peers are listed. Plans made here have one replica and one
stage per peer. `training.solving` finds the pipeline and its bound, `training.prediction` what one machine would reach;
`training.replicated` plans several replicas, `serving.planning` generation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from fusionai.primitives.errors import PlanError
from fusionai.primitives.units import format_seconds, format_speed
from fusionai.scheduling.problem import constraints
from fusionai.scheduling.problem.calibration import paced
from fusionai.scheduling.problem.chain import Chain, check_blocks, logits_block, stage_tables
from fusionai.scheduling.problem.embedding_and_head import (
    check_owners_memory,
    embedding_and_head_of,
    middle,
    owners_blocks,
    place_of,
    with_front,
)
from fusionai.scheduling.problem.memory_savings import inability, savings_choices
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import BlockCost, Certificate, PeerProfile, Plan, Problem, StagePlacement
from fusionai.scheduling.serving.planning import serving_plan
from fusionai.scheduling.standby.assignment import with_standbys
from fusionai.scheduling.training.compression import lightened
from fusionai.scheduling.training.cut_bits import dependence
from fusionai.scheduling.training.pipeline import EMPTY_HEAD, Pipeline, Suffix, fastest_first
from fusionai.scheduling.training.prediction import against_one, fastest_alone
from fusionai.scheduling.training.solving import Solved, solved
from fusionai.wire.codecs import Codec, gently


def plan(problem: Problem) -> Plan:
    """Return the plan with the shortest predicted step. Raises `PlanError` that names the tightest constraint."""
    if problem.task == "serve":
        return serving_plan(problem)
    problem = paced(problem)
    return with_standbys(_against_one(problem, _chain_plan(problem)), problem)


def _chain_plan(problem: Problem) -> Plan:
    """Return the plan without standbys and without the comparison with one machine alone."""
    _check(problem)
    pool_blocks = middle(problem)
    constraints.check_pins(problem, pool_blocks)
    smallest, unfit = _smallest(problem, pool_blocks)
    usable, refused = constraints.eligible(problem, pool_blocks, smallest, unfit)
    limits = constraints.stage_limits(problem, len(usable), len(pool_blocks))
    asked, problem = problem, with_front(problem)
    if problem is not asked:
        usable = [*(one for one in usable if one.peer != problem.peers[-1].peer), problem.peers[-1]]
        limits = constraints.PipelineLimits(fewest=limits.fewest + 1, most=limits.most + 1)
    rivals = without_surplus(problem, usable, limits.most)
    found = solved(problem, rivals, limits)
    certificate = _certificate(problem, found)
    warnings = _warnings(problem, rivals, found)
    pipeline, best, codecs = found.pipeline, found.best, _uniform(problem, found.best)
    if problem.compression == "adaptive":
        pipeline, best, codecs = lightened(pipeline, best)
        certificate = _with_codecs(certificate, problem, pipeline, best)
    plan = _written(problem, pipeline, best, codecs, certificate, usable)
    return msgspec.structs.replace(plan, excluded=tuple(refused), warnings=tuple(warnings))


def _against_one(problem: Problem, found: Plan) -> Plan:
    """Return `found` with the speed of the fastest machine alone, and a first warning if that is faster."""
    usable, _ = constraints.eligible(problem, middle(problem), 0.0)
    known = {peer.peer for peer in usable}
    machines = [*usable, *(() if problem.owner is None or problem.owner.peer in known else (problem.owner,))]
    alone = fastest_alone(problem, machines)
    warnings = (*found.warnings, *dependence(found, problem))
    if alone is None:
        return msgspec.structs.replace(found, warnings=warnings)
    sentence = against_one(problem, found, alone.peer.peer, alone.tokens_per_s, _chain_plan)
    warnings = warnings if sentence is None else (sentence, *warnings)
    return msgspec.structs.replace(found, single_peer_tokens_per_s=alone.tokens_per_s, warnings=warnings)


def _uniform(problem: Problem, best: Suffix) -> tuple[Codec, ...]:
    """Return the codecs of all boundaries if the job sets one for all; empty if nothing is packed."""
    if problem.compression in ("none", "adaptive"):
        return ()
    between = (problem.compression,) * (best.stages - 1)
    return between if logits_block(problem) is None else (*between[:-1], gently(problem.compression))


def _certificate(problem: Problem, found: Solved) -> Certificate:
    tokens = problem.microbatches * problem.microbatch_tokens
    speed = tokens / found.pipeline.step_s(found.best)
    bound_per_s = speed if found.exact else tokens / found.least_s
    return Certificate.of(found.method, speed, bound_per_s, exact=found.exact, explored=found.explored)


def _with_codecs(certificate: Certificate, problem: Problem, pipeline: Pipeline, best: Suffix) -> Certificate:
    """Return the certificate, made for the smallest codecs, for a pipeline with codecs that lose less."""
    speed = problem.microbatches * problem.microbatch_tokens / pipeline.step_s(best)
    gap = max(0.0, certificate.bound_tokens_per_s / speed - 1)
    return msgspec.structs.replace(certificate, exact=certificate.exact and gap == 0.0, optimality_gap=gap)


def _warnings(problem: Problem, peers: Sequence[PeerProfile], found: Solved) -> list[str]:
    """Return a warning if fewer stages than requested would be faster."""
    own = 0 if found.pipeline.front is None else 1
    if problem.stages is None or problem.stages == 1 + own:
        return []
    fewer = constraints.PipelineLimits(fewest=max(1, len(constraints.must_use(problem))), most=problem.stages - 1)
    if fewer.most < fewer.fewest:
        return []
    try:
        other = solved(problem, peers, fewer)
    except PlanError:
        return []
    asked_s, fewer_s = found.pipeline.step_s(found.best), other.pipeline.step_s(other.best)
    if fewer_s >= asked_s:
        return []
    count = sum(1 for _ in other.pipeline.pool_stages(other.best)) - own
    tokens = problem.microbatches * problem.microbatch_tokens
    return [
        f"{count} {'stage' if count == 1 else 'stages'} would be faster than the {problem.stages - own} asked for: "
        f"{format_speed(tokens / fewer_s)} tokens/s instead of {format_speed(tokens / asked_s)}."
    ]


def _smallest(problem: Problem, blocks: tuple[BlockCost, ...]) -> tuple[float, Callable[[PeerProfile], str | None]]:
    """Return the least memory of any stage in any variant, and a function that returns why a peer can hold no stage, or
    None. A peer can hold none if its backend supports none of the variants that fit its memory."""
    variants = savings_choices(problem)
    tables = stage_tables(Chain(problem, blocks), variants)
    needed = tables.resident_bytes + tables.flight_bytes
    least = [min(float(needed[variant, b, b + 1]) for b in range(len(blocks))) for variant in range(len(variants))]

    def unfit(peer: PeerProfile) -> str | None:
        lacks = [
            lack
            for variant, size in zip(variants, least, strict=True)
            if size <= peer.memory_bytes and (lack := inability(variant, peer)) is not None
        ]
        fits = sum(size <= peer.memory_bytes for size in least)
        return f"{lacks[0]}, which its memory would ask for." if lacks and len(lacks) == fits else None

    return min(least), unfit


def _check(problem: Problem) -> None:
    check_blocks(problem.blocks)
    constraints.check_settings(problem)
    if problem.replicas != 1:
        raise PlanError(
            f"expected 1 replica, got {problem.replicas}.",
            hint="Several replicas of a training job are planned by `scheduling.training.replicated`.",
        )
    if problem.microbatches < 1 or problem.microbatch_tokens < 1:
        raise PlanError(
            f"expected at least one microbatch of at least one token, "
            f"got {problem.microbatches} of {problem.microbatch_tokens}."
        )
    roles = [r.role for r in problem.roles]
    if len(set(roles)) != len(roles):
        raise PlanError(f"expected each role once, got {', '.join(roles)}.")
    _check_owner(problem)


def _check_owner(problem: Problem) -> None:
    owner = problem.owner
    for role in ("feed", "loss"):
        if place_of(problem, role) == "owner" and owner is None:
            raise PlanError(
                f"the {role} is placed with the job owner, but the problem has no owner's profile.",
                hint=f"Give the owner's profile, or place the {role} with the pool.",
            )
    ends = embedding_and_head_of(problem)
    if owner is None or not (ends.first or ends.last):
        return
    if len(problem.blocks) < 2:
        raise PlanError("the loss is placed with the job owner, so at least two blocks are needed; got one.")
    middle(problem)
    missing = sorted({op for block in owners_blocks(problem) for op in block.ops} & set(owner.unsupported_ops))
    if missing:
        what = "the model's ends" if ends.first or ends.last > 1 else "the loss"
        raise PlanError(f"the job owner's backend {owner.backend!r} can't run {', '.join(missing)} of {what}.")
    if not owner.effective_flops_per_s > 0:
        raise PlanError(f"the job owner's measured speed is {owner.effective_flops_per_s} FLOP/s.")
    check_owners_memory(problem)


def without_surplus(problem: Problem, peers: Sequence[PeerProfile], most: int) -> list[PeerProfile]:
    """At most `most` of `peers` of each kind, which is enough for the best pipeline of `most` stages. Peers that a
    setting or a link of the problem names all stay, and peers of the running plan are preferred."""
    named = _named(problem)
    running = {stage.peer for stage in problem.incumbent.stages} if problem.incumbent is not None else set[str]()
    counts: Counter[tuple[object, ...]] = Counter()
    kept: list[PeerProfile] = []
    for peer in sorted(peers, key=lambda p: (p.peer not in running, p.peer)):
        if peer.peer not in named:
            link = (peer.uplink, peer.downlink, peer.scratch_bytes_per_s, peer.host_copy_bytes_per_s)
            kind = (peer.effective_flops_per_s, peer.memory_bytes, peer.device == "cpu", *peer.savings, *link)
            if counts[kind] >= most:
                continue
            counts[kind] += 1
        kept.append(peer)
    return sorted(kept, key=lambda p: p.peer)


def _named(problem: Problem) -> set[str]:
    """Peers that no other can replace: required or pinned ones, those with links of their own, and the job owner's."""
    return {problem.owner_id} | constraints.must_use(problem) | problem.linked


def _written(
    problem: Problem,
    pipeline: Pipeline,
    best: Suffix,
    codecs: tuple[Codec, ...],
    certificate: Certificate,
    usable: Sequence[PeerProfile],
) -> Plan:
    """Return the plan of `best`, without warnings and refused peers; `usable` peers without a stage become spares."""
    pool, feed_at_owner = list(pipeline.pool_stages(best)), place_of(problem, "feed") == "owner"
    stages = _placements(pipeline, best, pool, feed_at_owner)
    # The owner's machine, if it is also a peer, can be a spare although it computes the loss.
    used = {stage.peer for stage in stages if "stage" in stage.roles}
    used |= {pipeline.peers[pipeline.front].peer} if pipeline.front is not None else set()
    step_s = pipeline.step_s(best)
    found = Plan(
        task=problem.task,
        graph_hash=problem.graph_hash,
        stages=tuple(stages),
        feed=problem.owner_id if feed_at_owner else stages[0].peer,
        spares=tuple(peer.peer for peer in fastest_first(usable) if peer.peer not in used),
        microbatches=problem.microbatches,
        step_time_s=step_s,
        tokens_per_s=problem.microbatches * problem.microbatch_tokens / step_s,
        commit_s=pipeline.machines[best.head].commit_s,
        bottleneck=_bottleneck(problem, pipeline, best, pool),
        codecs=codecs,
        certificate=certificate,
    )
    variants = [pipeline.variants[stage.variant] for stage in pool]
    if not any(variant.names for variant in variants):
        return found
    costs = StageCosts(problem, found)
    for number, variant in enumerate(variants):
        if variant.names:
            stages[number] = costs.with_savings(stages[number], variant)
    return msgspec.structs.replace(found, stages=tuple(stages))


def _placements(pipeline: Pipeline, best: Suffix, pool: list[Suffix], feed_at_owner: bool) -> list[StagePlacement]:
    credit, placed = pipeline.in_flight(best), list[StagePlacement]()
    for number, (stage, rest) in enumerate(pairwise((*pool, pipeline.tail))):
        roles: list[Literal["feed", "loss", "stage"]] = ["stage"]
        if stage.head == pipeline.front:
            roles = ["feed"]
        elif number == 0 and not feed_at_owner:
            roles.insert(0, "feed")
        if stage.head != pipeline.front and rest.head == EMPTY_HEAD:
            roles.append("loss")
        hop_s = 0.0 if rest.head == EMPTY_HEAD else pipeline.hop_costs(stage.head, rest.head, rest.start).transfer_s
        size_bytes = pipeline.stage_bytes(stage.start, rest.start, stage.variant, credit[number])
        placed.append(
            StagePlacement(
                stage=number,
                peer=pipeline.peers[stage.head].peer,
                blocks=pipeline.chain.numbers(stage.start, rest.start),
                roles=tuple(roles),
                in_flight=credit[number],
                compute_s=stage.compute_s,
                send_s=hop_s,
                memory_bytes=round(size_bytes),
                memory_limit_bytes=pipeline.peers[stage.head].memory_bytes,
                in_flight_bytes=round(float(pipeline.tables.flight_bytes[stage.variant, stage.start, rest.start])),
                fingerprint="" if stage.head == pipeline.front else pipeline.peers[stage.head].fingerprint,
            )
        )
    if pipeline.loss is not None:
        placed.append(
            StagePlacement(
                stage=len(pool),
                peer=pipeline.problem.owner_id,
                blocks=pipeline.loss.numbers(0, pipeline.loss.length),
                roles=("loss",),
                in_flight=credit[-1],
                compute_s=pipeline.tail.compute_s,
                memory_bytes=round(pipeline.loss_bytes(credit[-1])),
                memory_limit_bytes=pipeline.machines[pipeline.owner].profile.memory_bytes,
            )
        )
    return placed


def _bottleneck(problem: Problem, pipeline: Pipeline, best: Suffix, pool: list[Suffix]) -> str:
    """Describe what limits the pipeline's speed."""
    causes: list[tuple[float, str]] = []
    for number, (stage, rest) in enumerate(pairwise((*pool, pipeline.tail))):
        name = problem.name_of(pipeline.peers[stage.head].peer)
        causes.append((stage.compute_s, f"compute of stage {number} on {name}"))
        if rest.head != EMPTY_HEAD:
            seconds = pipeline.hop_costs(stage.head, rest.head, rest.start).transfer_s
            causes.append((seconds, f"link from stage {number} on {name} to stage {number + 1}"))
    if pipeline.loss is not None:
        name = problem.name_of(problem.owner_id)
        what = "the loss" if pipeline.loss.length == 1 else "the last blocks"
        causes.append((pipeline.tail.compute_s, f"compute of {what} on {name}"))
        if pipeline.front is not None:
            causes.append((pool[0].compute_s + pipeline.tail.compute_s, f"compute of both ends on {name}"))
    seconds, cause = max(causes, key=lambda c: c[0])
    # Access link occupancy and scarce memory belong to several stages or links at once.
    if best.period_s > seconds * (1 + 1e-9):
        return _shared_cause(problem, pipeline, best, pool)
    return f"{cause} ({format_seconds(seconds)} per microbatch)"


def _shared_cause(problem: Problem, pipeline: Pipeline, best: Suffix, pool: list[Suffix]) -> str:
    number, stage = next((n, s) for n, s in reversed(list(enumerate(pool))) if s.period_s >= best.period_s)
    name = problem.name_of(pipeline.peers[stage.head].peer)
    period = format_seconds(best.period_s)
    trip_s = stage.transit_s - (0.0 if stage.start else pipeline.machines[stage.head].commit_s)
    # Adding and subtracting the commit may leave a slightly smaller value.
    if stage.held < pipeline.microbatches and trip_s / stage.held >= best.period_s * (1 - 1e-9):
        return f"memory of {name}: it holds {stage.held} microbatches of stage {number} in flight ({period} each)"
    return f"access links around stage {number} on {name} ({period} per microbatch)"
