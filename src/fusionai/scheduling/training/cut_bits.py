"""Decides whether another cut of the same model gives the same bits, and words the warning for a plan if it does not.

At every cut, gradients of values that cross it are summed in the order of a single process (`ir.gradients`). Three
things still depend on the cut: large parameters shared by blocks on several machines, whose sums cross once per step;
boundaries packed by a codec; and backends that compile a whole stage (JAX), whose rounding depends on the stage.
"""

from __future__ import annotations

from typing import Final

from fusionai.ir.gradients import shared_uses
from fusionai.ir.partition import PASSED_ON_BYTES
from fusionai.ir.schema import Graph
from fusionai.primitives.units import format_bytes
from fusionai.scheduling.problem.types import Plan, Problem, SharedWeight

COMPILED_WHOLE: Final = frozenset({"jax"})
"""Backends that compile a stage as one program."""


def shared_weights(graph: Graph, microbatches: int, *, half_floats: bool) -> tuple[SharedWeight, ...]:
    """The shared parameters whose gradients depend on the cut, for `Problem.shared_weights`. With `half_floats` a
    single process casts a weight once for all its uses and adds their gradients in bfloat16; stages add in float32."""
    rounded = microbatches > 1
    return tuple(
        SharedWeight(key=one.key, nbytes=one.nbytes, blocks=one.blocks, interleaves=one.interleaves or half_floats)
        for one in shared_uses(graph)
        if one.interleaves or half_floats or (one.nbytes > PASSED_ON_BYTES and (rounded or len(one.blocks) > 2))
    )


Groups = tuple[tuple[int, ...], ...]


def same_sums(before: Plan, after: Plan, problem: Problem) -> bool:
    """Return whether both plans add all gradients in one order, pack boundaries alike and compile the same stages."""
    if any(_groups(before, weight) != _groups(after, weight) for weight in problem.shared_weights):
        return False
    if before.ranges == after.ranges:
        return before.codecs == after.codecs
    backends = {peer.peer: peer.backend for peer in (*problem.peers, *((problem.owner,) if problem.owner else ()))}
    compiled = {backends.get(stage.peer, "") for plan in (before, after) for stage in plan.stages} & COMPILED_WHOLE
    return not compiled and {*before.codecs, *after.codecs} <= {"none"}


def dependence(plan: Plan, problem: Problem) -> tuple[str, ...]:
    """One sentence per shared parameter whose gradient differs from one process's in the last bits."""
    split = [weight for weight in problem.shared_weights if _groups(plan, weight)]
    if not split:
        return ()
    names = ", ".join(
        f"{weight.key} ({format_bytes(weight.nbytes)}, blocks {_listed(weight.blocks)})" for weight in split[:3]
    )
    more = f" and {len(split) - 3} more" if len(split) > 3 else ""
    return (
        f"This model's bits depend on the cut: stages share {names}{more} and add their gradients once per step. "
        "Results differ from one process in the last bits; a later cut that adds otherwise is recorded as tolerant.",
    )


def _groups(plan: Plan, weight: SharedWeight) -> Groups:
    """The uses of a parameter, by block, that each stage sums separately. Empty if they are summed in the order of a
    single process: in one stage, or in stages of one machine unless the uses interleave."""
    found: list[tuple[int, ...]] = []
    for replica in range(plan.replicas):
        stages = [stage for stage in plan.stages if stage.replica == replica]
        held = [(stage, [b for b in weight.blocks if stage.blocks[0] <= b < stage.blocks[1]]) for stage in stages]
        holders = [(stage, blocks) for stage, blocks in held if blocks]
        if len({stage.peer for stage, _ in holders}) > 1 or (weight.interleaves and len(holders) > 1):
            found += (tuple(blocks) for _, blocks in holders)
    return tuple(found)


def _listed(blocks: tuple[int, ...]) -> str:
    distinct = sorted({*blocks})
    shown = ", ".join(map(str, distinct[:4]))
    return shown if len(distinct) <= 4 else f"{shown}, ..."
