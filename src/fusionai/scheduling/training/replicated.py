"""Plans a training job with any number of replicas whose gradients are summed at every step.

This module chooses which machines form which replica, which replica's stages are the homes of the sums and, if it is
not given, the number of replicas. A step's microbatches are dealt to the replicas, each of which is a pipeline of its
own group of machines (`replica_groups`, `planner`). What the replicas share (the job owner's process and line, the
sums) is predicted here for the whole plan. All replicas belong to one plan, with one journal and one commit: a stage of
any replica has a standby and is taken over like any other.

The bound of such a plan assumes that all machines compute all the time.

`planner` plans one chain, which is all that serving and a single replica need; `reduction` has the cost of the sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import fsum
from typing import Final

import msgspec

from fusionai.primitives.errors import PlanError
from fusionai.primitives.units import format_bytes, format_speed
from fusionai.scheduling.planner import plan as one_chain
from fusionai.scheduling.problem.calibration import paced
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import Certificate, Plan, Problem, StagePlacement
from fusionai.scheduling.standby.assignment import with_standbys
from fusionai.scheduling.training.cut_bits import dependence
from fusionai.scheduling.training.prediction import held_per_byte, predict, reduction_s
from fusionai.scheduling.training.replica_groups import COUNTS, Group, divide
from fusionai.wire.codecs import FOR_PLANS, LADDER, Codec

WORTH: Final = 1.25
"""Least speedup over the next larger codec of the result for a codec to be listed, chosen."""


def plan(problem: Problem) -> Plan:
    """Return the plan; pure and deterministic. Raises `PlanError` if no plan with the requested number of replicas
    exists; with `auto`, if not even one replica fits."""
    problem = paced(problem)
    match problem.replicas:
        case 1:
            return one_chain(problem)
        case "auto":
            return _fastest(problem)
        case count:
            return _of(problem, count, _chained(problem))


def with_replicas(problem: Problem, count: int) -> Problem:
    """Return the problem with `count` replicas and the memory a stage then needs for the others' gradients."""
    return msgspec.structs.replace(problem, replicas=count, reduction_bytes_per_trainable_byte=held_per_byte(count))


def _fastest(problem: Problem) -> Plan:
    """Return the fastest plan over `COUNTS`; of equal ones that with the fewest replicas."""
    best = chained = one_chain(with_replicas(problem, 1))
    for count in COUNTS:
        if count > min(len(problem.peers), problem.microbatches):
            break
        try:
            found = _of(problem, count, chained)
        except PlanError:
            break  # larger numbers don't fit either
        if found.tokens_per_s > best.tokens_per_s:
            best = found
    return best


def _chained(problem: Problem) -> Plan | None:
    """Return the plan of a single chain, or None if it does not fit."""
    try:
        return one_chain(with_replicas(problem, 1))
    except PlanError:
        return None


def _of(problem: Problem, count: int, chained: Plan | None) -> Plan:
    """Return the plan with `count` replicas. `chained`: the plan of one replica, for comparison."""
    if problem.task != "train":
        raise PlanError(f"expected one chain of stages for serving, got {count} replicas.")
    if problem.microbatches < count:
        raise PlanError(
            f"{count} replicas need a microbatch each in every step, got {problem.microbatches}.",
            hint="Raise microbatches, or ask for fewer replicas.",
        )
    whole = with_replicas(problem, count)
    groups = divide(
        msgspec.structs.replace(whole, replicas=1, microbatches=-(-problem.microbatches // count), incumbent=None),
        count,
    )
    if len(groups) < count:
        there = f"{len(groups)} {'is' if len(groups) == 1 else 'are'}"
        raise PlanError(
            f"the pool has no machines for {count} replicas: {there} all that fits.",
            hint="Ask for fewer replicas, or let more machines join.",
        )
    found = _joined(whole, groups)
    _check_owner(whole, found)
    found = msgspec.structs.replace(found, warnings=dependence(found, whole))
    return with_standbys(_against(found, chained), whole)


def _joined(problem: Problem, groups: Sequence[Group]) -> Plan:
    """Join the groups' plans into one, with the homes where the sums take the least time."""
    orders = [(groups[place], *groups[:place], *groups[place + 1 :]) for place in range(len(groups))]
    pure = StageCosts(problem)
    order = min(orders, key=lambda order: reduction_s(_numbered(order), pure))
    first = order[0].plan
    stages, codecs = _numbered(order), _codecs(order)
    bare = msgspec.structs.replace(first, stages=stages, codecs=codecs, microbatches=problem.microbatches)
    prediction = predict(stages, StageCosts(problem, bare))
    tokens = problem.microbatches * problem.microbatch_tokens
    speed = tokens / prediction.step_s
    bound = max(speed, _bound_tokens_per_s(problem))
    used = {stage.peer for stage in stages if "stage" in stage.roles}
    refused = tuple(chain.from_iterable(group.plan.excluded for group in order))
    kept_out = {*problem.excluded, *(one.peer for one in refused)}
    return msgspec.structs.replace(
        bare,
        spares=tuple(sorted(one.peer for one in problem.peers if one.peer not in used | kept_out)),
        standbys=(),
        snapshot_every=0,
        step_time_s=prediction.step_s,
        tokens_per_s=speed,
        single_peer_tokens_per_s=None,
        warnings=(),
        bottleneck=prediction.bottleneck,
        reduction_s=prediction.reduction_s,
        commit_s=prediction.commit_s,
        excluded=refused,
        certificate=Certificate(
            method=f"machines divided into {len(groups)} groups, each planned; bound of all computing all the time",
            exact=False,
            bound_tokens_per_s=bound,
            optimality_gap=bound / speed - 1,
            explored=sum(group.plan.certificate.explored for group in groups),
        ),
    )


def _numbered(groups: Iterable[Group]) -> tuple[StagePlacement, ...]:
    stages: list[StagePlacement] = []
    for replica, group in enumerate(groups):
        first = len(stages)
        stages += [
            msgspec.structs.replace(stage, stage=first + stage.stage, replica=replica) for stage in group.plan.stages
        ]
    return tuple(stages)


def _codecs(groups: Sequence[Group]) -> tuple[Codec, ...]:
    if not any(group.plan.codecs for group in groups):
        return ()
    codecs: list[Codec] = []
    for group in groups:
        codecs += group.plan.codecs or ("none",) * (len(group.plan.stages) - 1)
        codecs.append("none")
    return tuple(codecs[:-1])


def _bound_tokens_per_s(problem: Problem) -> float:
    """Return the tokens per second if every machine computed all the time and links took no time."""
    flops = sum(block.forward_flops + block.backward_flops for block in problem.blocks)
    flops_per_s = fsum(one.effective_flops_per_s for one in problem.everyone)
    return problem.microbatch_tokens * flops_per_s / flops if flops > 0 else 0.0


def _check_owner(problem: Problem, found: Plan) -> None:
    """Raise `PlanError` if the model ends of all replicas don't fit the job owner's memory; its process computes them
    all."""
    if problem.owner is None:
        return
    needed = sum(stage.memory_bytes for stage in found.stages if stage.peer == found.feed)
    if needed > problem.owner.memory_bytes:
        raise PlanError(
            f"what stays with the job owner of {found.replicas} replicas takes {format_bytes(needed)} of a machine "
            f"that has {format_bytes(problem.owner.memory_bytes)}.",
            hint="Ask for fewer replicas or smaller microbatches, or let less stay with the owner.",
        )


def _against(found: Plan, chained: Plan | None) -> Plan:
    """Return `found` with the speed of the fastest machine alone, and a warning if one machine or one chain is
    faster."""
    if chained is None:
        return found
    speed, alone = found.tokens_per_s, chained.single_peer_tokens_per_s
    warnings: list[str] = []
    if alone is not None and alone > speed:
        warnings.append(
            f"One machine alone would be faster: {format_speed(alone)} tokens/s, this plan {format_speed(speed)}."
        )
    if chained.tokens_per_s > speed:
        warnings.append(
            f"One chain of stages would be faster than {found.replicas} replicas: "
            f"{format_speed(chained.tokens_per_s)} tokens/s instead of {format_speed(speed)}."
        )
    return msgspec.structs.replace(found, single_peer_tokens_per_s=alone, warnings=(*warnings, *found.warnings))


@dataclass(frozen=True, slots=True)
class Lighter:
    """A smaller codec and a lower limit of the speed with it."""

    compression: Codec
    tokens_per_s: float


def lighter(problem: Problem, found: Plan) -> tuple[Lighter, ...]:
    """Return the codecs smaller than that of `problem` which each speed the job up by `WORTH`. `found`: the plan
    without them. Codecs are planned among its machines only; other machines, of which there may be thousands, could
    make the gain larger."""
    if problem.task != "train" or problem.compression not in LADDER:
        return ()
    compute_s = found.microbatches * max(stage.compute_s for stage in found.stages)
    if found.step_time_s < WORTH * compute_s:
        return ()  # Computing limits the step, so a smaller codec can't reach WORTH.
    used = {stage.peer for stage in found.stages}
    posed = msgspec.structs.replace(
        problem,
        peers=tuple(peer for peer in problem.peers if peer.peer in used),
        links={pair: link for pair, link in problem.links.items() if used.issuperset(pair.split(">"))},
        excluded=(),
        spares_wanted=None,
    )
    worth: list[Lighter] = []
    best = found.tokens_per_s
    for codec in FOR_PLANS[LADDER.index(problem.compression) + 1 :]:
        speed = plan(msgspec.structs.replace(posed, compression=codec)).tokens_per_s
        if speed >= WORTH * best:
            worth.append(Lighter(codec, speed))
            best = speed
    return tuple(worth)
