"""Writes a solved pipeline as a `Plan`: predictions, memory, bottleneck, spares.

`planner` calls it last; `pipeline` has the formulas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from fusionai.primitives.units import format_seconds
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import Certificate, Excluded, PeerProfile, Plan, Problem, StagePlacement
from fusionai.scheduling.training.machines import fastest_first
from fusionai.scheduling.training.pipeline import EMPTY_HEAD, Pipeline, Suffix
from fusionai.wire.codecs import Codec


def written_out(
    problem: Problem,
    pipeline: Pipeline,
    best: Suffix,
    *,
    codecs: tuple[Codec, ...],
    certificate: Certificate,
    feed_at_owner: bool,
    refused: tuple[Excluded, ...],
    warnings: tuple[str, ...],
    usable: Sequence[PeerProfile],
) -> Plan:
    """Return the complete plan of `best`; peers of `usable` without a stage become spares."""
    stages = tuple(_stages(pipeline, best, feed_at_owner))
    # The owner's machine, if it is also a peer, can be a spare although it computes the loss.
    used = {stage.peer for stage in stages if "stage" in stage.roles}
    used |= {pipeline.peers[pipeline.front].peer} if pipeline.front is not None else set()
    step_s = pipeline.step_s(best)
    found = Plan(
        task=problem.task,
        graph_hash=problem.graph_hash,
        stages=stages,
        feed=_owner_id(pipeline) if feed_at_owner else stages[0].peer,
        spares=tuple(peer.peer for peer in fastest_first(usable) if peer.peer not in used),
        microbatches=problem.microbatches,
        step_time_s=step_s,
        tokens_per_s=problem.microbatches * problem.microbatch_tokens / step_s,
        commit_s=pipeline.machines[best.head].commit_s,
        bottleneck=_bottleneck(problem, pipeline, best),
        codecs=codecs,
        excluded=refused,
        warnings=warnings,
        certificate=certificate,
    )
    if not any(pipeline.variants[stage.variant].names for stage in pipeline.pool_stages(best)):
        return found
    variants = {number: pipeline.variants[stage.variant] for number, stage in enumerate(pipeline.pool_stages(best))}
    costs = StageCosts(problem, found)
    with_costs = (
        costs.with_savings(stage, variants[stage.stage])
        if stage.stage in variants and variants[stage.stage].names
        else stage
        for stage in stages
    )
    return msgspec.structs.replace(found, stages=tuple(with_costs))


def _stages(pipeline: Pipeline, best: Suffix, feed_at_owner: bool) -> Iterator[StagePlacement]:
    chain = pipeline.chain
    pool = list(pipeline.pool_stages(best))
    credit = pipeline.in_flight(best)
    for number, stage in enumerate(pool):
        end = chain.length if stage.rest is None else stage.rest.start
        in_flight = credit[number]
        head = EMPTY_HEAD if stage.rest is None else stage.rest.head
        loss_here = number == len(pool) - 1 and pipeline.loss is None
        yield StagePlacement(
            stage=number,
            peer=pipeline.peers[stage.head].peer,
            blocks=chain.numbers(stage.start, end),
            roles=(
                *(("feed",) if number == 0 and not feed_at_owner else ()),
                "stage",
                *(("loss",) if loss_here else ()),
            )
            if stage.head != pipeline.front
            else ("feed",),
            in_flight=in_flight,
            compute_s=stage.compute_s,
            send_s=0.0 if head == EMPTY_HEAD else pipeline.hop_costs(stage.head, head, end).transfer_s,
            memory_bytes=_whole(pipeline.stage_bytes(stage.start, end, stage.variant, in_flight)),
            memory_limit_bytes=pipeline.peers[stage.head].memory_bytes,
            in_flight_bytes=_whole(pipeline.flight_bytes(stage.start, end, stage.variant)),
            fingerprint="" if stage.head == pipeline.front else pipeline.peers[stage.head].fingerprint,
        )
    if pipeline.loss is not None:
        tail = pipeline.tail
        in_flight = credit[-1]
        yield StagePlacement(
            stage=len(pool),
            peer=_owner_id(pipeline),
            blocks=pipeline.loss.numbers(0, pipeline.loss.length),
            roles=("loss",),
            in_flight=in_flight,
            compute_s=tail.compute_s,
            memory_bytes=_whole(pipeline.loss_bytes(in_flight)),
            memory_limit_bytes=pipeline.machines[pipeline.owner].profile.memory_bytes,
        )


def _bottleneck(problem: Problem, pipeline: Pipeline, best: Suffix) -> str:
    """Describe what limits the pipeline's speed."""
    causes: list[tuple[float, str]] = []
    pool = list(pipeline.pool_stages(best))
    for number, stage in enumerate(pool):
        name = problem.name_of(pipeline.peers[stage.head].peer)
        causes.append((stage.compute_s, f"compute of stage {number} on {name}"))
        if stage.rest is not None and stage.rest.head != EMPTY_HEAD:
            seconds = pipeline.hop_costs(stage.head, stage.rest.head, stage.rest.start).transfer_s
            causes.append((seconds, f"link from stage {number} on {name} to stage {number + 1}"))
    if pipeline.loss is not None:
        name = problem.name_of(_owner_id(pipeline))
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


def _owner_id(pipeline: Pipeline) -> str:
    assert pipeline.owner_id is not None, "roles with the owner were checked to have one"
    return pipeline.owner_id


def _whole(size_bytes: float) -> int:
    return round(size_bytes)
