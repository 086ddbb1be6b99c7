"""Which stages of a partition hold which state."""

from __future__ import annotations

from fusionai.ir.partition import Partition


def holders(partition: Partition) -> dict[str, tuple[int, ...]]:
    """State key -> the stages that hold it, home first, buffers and frozen parameters included."""
    found: dict[str, list[int]] = {}
    for stage in partition.stages:
        for spec in stage.graph.params.values():
            found.setdefault(spec.key, []).append(stage.stage)
    return {key: tuple(stages) for key, stages in found.items()}
