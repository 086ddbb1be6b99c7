"""Describes in sentences how a plan's stages fit into little memory.

`levers` has the costs, `pipeline` the ways of a stage; `cli` shows `savings`.
"""

from __future__ import annotations

from collections.abc import Iterator

from fusionai.primitives.units import format_bytes, format_seconds
from fusionai.scheduling.problem.types import Plan


def savings(plan: Plan) -> Iterator[str]:
    """Yield a sentence per lever and stage: what it does, what it saves and what it costs."""
    for stage in plan.stages:
        if stage.recompute:
            times = stage.compute_s / (stage.compute_s - stage.recompute_s) - 1 if stage.recompute_s else 0.0
            yield (
                f"Stage {stage.stage} makes activations again in backward: saves "
                f"{format_bytes(stage.recompute_saves_bytes)}, costs {times:.0%} more compute."
            )
        if stage.offload:
            yield (
                f"Stage {stage.stage} has its optimizer's state in a file: saves "
                f"{format_bytes(stage.offload_saves_bytes)}, costs {format_seconds(stage.offload_s)} a step."
            )
        if stage.offload_weights:
            yield (
                f"Stage {stage.stage} has its weights away until a block needs them: saves "
                f"{format_bytes(stage.offload_weights_saves_bytes)}, costs "
                f"{format_seconds(stage.offload_weights_s)} a step."
            )
