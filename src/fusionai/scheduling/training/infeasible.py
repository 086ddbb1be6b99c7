"""Words the error for a problem without a plan: the tightest constraint in a sentence, and what to do about it.

`planner` raises the error that this module returns.
"""

from __future__ import annotations

from fusionai.primitives.errors import PlanError
from fusionai.primitives.units import format_bytes
from fusionai.scheduling.problem.limits import Limits
from fusionai.scheduling.problem.types import Problem
from fusionai.scheduling.training.pipeline import Pipeline

_MORE = "Use smaller microbatches or fewer of them, let providers lend more memory, or let more peers join."


def infeasible(problem: Problem, pipeline: Pipeline, limits: Limits, *, proven: bool) -> PlanError:
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
    first = next(end for end in range(1, pipeline.chain.length + 1) if pipeline.allowed(front, 0, end))
    # The stage itself, one stage of the pool and the owner's last stage.
    in_flight = min(pipeline.microbatches, 2 + pipeline.tail.stages)
    needed, _ = pipeline.least_bytes(0, first, in_flight)
    room = pipeline.memory_bytes[front]
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
    largest = max(pipeline.memory_bytes[: pipeline.owner])
    needs = [(*_least(pipeline, b, b + 1), b) for b in range(chain.length)]
    needed, however, block = max(needs)
    if needed <= largest:
        return None
    return PlanError(
        f"block {chain.blocks[block].block} alone needs {format_bytes(needed)}{however}, the largest peer "
        f"lends {format_bytes(largest)}: {format_bytes(needed - largest)} are missing.",
        hint=_MORE,
    )


def _total(pipeline: Pipeline, limits: Limits) -> PlanError | None:
    """The usable peers together lend too little."""
    needed, however = _least(pipeline, 0, pipeline.chain.length)
    lent = sum(sorted(pipeline.memory_bytes[: pipeline.owner], reverse=True)[: limits.most])
    if needed <= lent:
        return None
    peers = "1 peer" if limits.most == 1 else f"{limits.most} peers"
    return PlanError(
        f"the model needs at least {format_bytes(needed)}{however}, the largest {peers} that may hold it "
        f"lend {format_bytes(lent)}: {format_bytes(needed - lent)} are missing.",
        hint=_MORE,
    )


def _division(problem: Problem, pipeline: Pipeline, limits: Limits, proven: bool) -> PlanError:
    """The sum of the memory suffices, but no division into whole blocks with microbatches in flight fits."""
    chain = pipeline.chain
    # The way that saves most memory for the whole model; a single block may need less in another way.
    _, way = pipeline.least_bytes(0, chain.length)
    size, block = max((pipeline.stage_bytes(b, b + 1, way, 1), b) for b in range(chain.length))
    lent = sum(sorted(pipeline.memory_bytes[: pipeline.owner], reverse=True)[: limits.most])
    stages = f"{limits.most} stages" if problem.stages is not None else f"up to {limits.most} stages"
    verdict = "no cut fits" if proven else "no cut was found that fits"
    own = None if pipeline.front is None else pipeline.owner_id
    wished = {block: peer for block, peer in problem.pinned.items() if peer != own}
    if wished:
        pins = ", ".join(f"block {block} to {peer!r}" for block, peer in sorted(wished.items()))
        return PlanError(
            f"{verdict} {stages} with {pins} pinned into the {format_bytes(lent)} the peers lend.",
            hint="Pin fewer blocks, or blocks of one peer that lie together.",
        )
    return PlanError(
        f"{verdict} {stages} with their microbatches in flight into the {format_bytes(lent)} the peers lend; "
        f"the largest block is {chain.blocks[block].block} with {format_bytes(size)}{pipeline.ways[way].words()}.",
        hint=_MORE,
    )


def _least(pipeline: Pipeline, start: int, end: int) -> tuple[float, str]:
    """Least memory with one microbatch in flight, and the words for the levers that reach it."""
    needed, way = pipeline.least_bytes(start, end)
    return needed, pipeline.ways[way].words()
