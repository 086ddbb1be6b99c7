"""Determines which blocks at the model's ends stay with the job owner, and which are left for the pool.

In training the last block, the loss, stays with the owner unless it is placed with the pool. A job that splits its
model (`primitives.privacy`) keeps more on both sides: the blocks before the first layer and after the last. The owner's
first blocks are planned like a pinned stage: the owner becomes a peer for these blocks only, and its machine and access
link count for both ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from fusionai.primitives.errors import PlanError
from fusionai.primitives.units import format_bytes
from fusionai.scheduling.problem.chain import Chain
from fusionai.scheduling.problem.memory_savings import NO_SAVINGS
from fusionai.scheduling.problem.types import BlockCost, PeerProfile, Plan, Problem


@dataclass(frozen=True, slots=True)
class EmbeddingAndHead:
    """Number of blocks that the job owner keeps before and after the pool's blocks."""

    first: int
    last: int


def embedding_and_head_of(problem: Problem) -> EmbeddingAndHead:
    """Number of blocks that the owner keeps at each end. Raises `PlanError` if kept blocks are placed with the pool."""
    places = {role: place_of(problem, role) for role in ("feed", "loss")}
    for role, kept in (("feed", problem.kept_first), ("loss", problem.kept_last)):
        if kept and places[role] == "pool":
            raise PlanError(
                f"{kept} {'blocks' if kept > 1 else 'block'} at the {role}'s end must stay with the job owner, but the "
                f"{role} is placed with the pool.",
                hint=f"Leave the {role} with the job owner, or choose the privacy level `open` or `encrypted`.",
            )
    least = 1 if problem.task == "serve" else 0
    return EmbeddingAndHead(
        first=max(least, problem.kept_first) if places["feed"] == "owner" else 0,
        last=max(1, problem.kept_last) if places["loss"] == "owner" else 0,
    )


def place_of(problem: Problem, role: str) -> Literal["owner", "pool"]:
    for one in problem.roles:
        if one.role == role:
            return one.place
    return "owner"


def middle(problem: Problem) -> tuple[BlockCost, ...]:
    """The blocks that are left for the pool. Raises `PlanError` if there are none."""
    ends = embedding_and_head_of(problem)
    found = problem.blocks[ends.first : len(problem.blocks) - ends.last]
    if not found:
        raise PlanError(
            f"the model has {len(problem.blocks)} blocks, and {ends.first + ends.last} of them stay with the job owner:"
            " nothing is left for the pool.",
            hint="Keep fewer blocks, or choose the privacy level `encrypted`.",
        )
    return found


def owners_blocks(problem: Problem) -> tuple[BlockCost, ...]:
    """The blocks that stay with the job owner, of both ends."""
    ends = embedding_and_head_of(problem)
    return (*problem.blocks[: ends.first], *problem.blocks[len(problem.blocks) - ends.last :])


def with_front(problem: Problem) -> Problem:
    """The problem with the owner as a peer to which its first blocks are pinned; the same problem if the owner keeps
    none. If the owner's machine is in the pool as well, that peer is replaced."""
    first, owner = embedding_and_head_of(problem).first, problem.owner
    if problem.task == "serve" or not first or owner is None:
        return problem
    own = msgspec.structs.replace(owner, roles=("stage", "owner"))
    pins = {block.block: owner.peer for block in problem.blocks[:first]}
    return msgspec.structs.replace(
        problem,
        peers=(*(one for one in problem.peers if one.peer != owner.peer), own),
        pinned={**problem.pinned, **pins},
        stages=None if problem.stages is None else problem.stages + 1,
    )


def front_of(problem: Problem, peers: list[PeerProfile]) -> int | None:
    """Index of the peer that stands for the owner's machine with the first blocks; None if there is none."""
    if not embedding_and_head_of(problem).first or problem.owner is None:
        return None
    return next((index for index, one in enumerate(peers) if one.peer == problem.owner.peer), None)


def tail_chain(problem: Problem) -> Chain | None:
    """Costs of the owner's last blocks, which save no memory; None if the owner keeps none."""
    last = embedding_and_head_of(problem).last
    return Chain(problem, problem.blocks[-last:], savings=NO_SAVINGS) if last else None


def embedding_and_head_stay(plan: Plan, problem: Problem) -> bool:
    """Return whether `plan` places exactly those blocks with the owner that `problem` keeps there."""
    own = {block.block for block in owners_blocks(problem)}
    return all((stage.peer == plan.feed) == (number in own) for stage in plan.stages for number in range(*stage.blocks))


def check_embedding_and_head(plan: Plan, problem: Problem) -> None:
    """Raise `PlanError` if `plan` places a block elsewhere that must stay with the job owner. This also covers plans
    that were received from another machine."""
    owner, kept = problem.owner, {block.block for block in owners_blocks(problem)}
    for stage in plan.stages:
        if owner is not None and stage.peer != owner.peer and not kept.isdisjoint(range(*stage.blocks)):
            raise PlanError(
                f"plan {plan.version} has stage {stage.stage} (blocks {stage.blocks[0]} to {stage.blocks[1] - 1}) with "
                f"peer {stage.peer}, but blocks {', '.join(str(number) for number in sorted(kept))} stay with the job "
                "owner."
            )


class OwnersPart(msgspec.Struct, frozen=True, kw_only=True):
    """Load of the job owner's own blocks on its machine. `compute_s`: per step, in serving per token."""

    blocks: tuple[tuple[int, int], ...]
    memory_bytes: int
    limit_bytes: int
    compute_s: float


def owners_part(plan: Plan) -> OwnersPart | None:
    """Load of the owner's blocks in `plan`; None if the owner has none."""
    own = [stage for stage in plan.stages if stage.peer == plan.feed and "stage" not in stage.roles]
    if not own:
        return None
    times = [plan.microbatches_of(stage) if plan.task == "train" else 1 for stage in own]
    return OwnersPart(
        blocks=tuple(stage.blocks for stage in own),
        memory_bytes=sum(stage.memory_bytes for stage in own),
        limit_bytes=own[0].memory_limit_bytes,
        compute_s=sum(stage.compute_s * count for stage, count in zip(own, times, strict=True)),
    )


def owners_bytes(problem: Problem) -> float:
    """Memory of both ends on the owner's machine, with one microbatch in flight at each."""
    ends = embedding_and_head_of(problem)
    total = 0.0
    if ends.first:
        front = Chain(problem, problem.blocks[: ends.first])
        total += front.resident_bytes(0, ends.first) + front.in_flight_bytes(0, ends.first)
    tail = tail_chain(problem)
    if tail is not None:
        before = problem.blocks[len(problem.blocks) - ends.last - 1]
        total += tail.resident_bytes(0, ends.last) + tail.in_flight_bytes(0, ends.last)
        total += before.output_bytes + before.gradient_bytes
    return total


def check_owners_memory(problem: Problem) -> None:
    """Raise `PlanError` if the owner's memory can't hold its blocks; it names the missing bytes and a remedy."""
    owner, ends = problem.owner, embedding_and_head_of(problem)
    if owner is None or not (ends.first or ends.last):
        return
    needed = owners_bytes(problem)
    if needed <= owner.memory_bytes:
        return
    if ends.first or ends.last > 1:
        what = f"the model's ends ({ends.first} and {ends.last} blocks) need"
        remedy = "Choose the privacy level `encrypted` or `trusted`, train with fewer rows per microbatch, or raise"
        hint = f"{remedy} the owner's memory."
    else:
        what = "the loss needs"
        hint = "Use smaller microbatches, raise the owner's memory, or place the loss with the pool."
    raise PlanError(
        f"{what} {format_bytes(needed)} with the job owner, who has {format_bytes(owner.memory_bytes)}: "
        f"{format_bytes(needed - owner.memory_bytes)} are missing.",
        hint=hint,
    )
