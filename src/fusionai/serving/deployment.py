"""What follows from a serving plan's block ranges, kept as long as they don't change: graphs, boundaries and weights of
each stage.

Neighbours: `execution.deployment` is a plan with tickets and addresses, `serving.driver` runs it,
`coordination.serving.roles` is the state machine's view of a plan.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import msgspec

from fusionai.coordination.serving.roles import ServingRoles
from fusionai.execution.serving.boundary import ServingBoundary, serving_boundaries
from fusionai.execution.serving.stage import keeps_positions
from fusionai.ir import schema
from fusionai.ir.partition import cut_blocks
from fusionai.ir.serving import FROM_SEGMENTS, HIDDEN, LOGITS, serving_graph
from fusionai.primitives.errors import PlanError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.scheduling.problem.types import Plan
from fusionai.serving.job import ServingJob
from fusionai.wire.messages import WeightSpec

CHOICES: Final = frozenset({"aten.topk.default", "aten.sort.default"})
"""Operators after which a rounding difference can change more than the last bits."""


@dataclass(frozen=True, slots=True)
class ServedCutStage:
    """One stage of a cut. `encoded`: its graph as sent over the wire, with hash `graph_hash`. `select`: no later stage
    has attention or needs to know which session a row belongs to, so only wanted rows are sent on."""

    encoded: HostTensor
    graph_hash: str
    boundary: ServingBoundary
    caches: bool
    select: bool
    weights: tuple[WeightSpec, ...]
    chooses: bool
    """True if values decide what is computed, as a router's values decide which expert computes a row."""


@dataclass(frozen=True, slots=True)
class ServedCut:
    """A model divided into stages. `name` is a hash of the stages' graphs."""

    name: str
    ranges: tuple[tuple[int, int], ...]
    stages: tuple[ServedCutStage, ...]

    @property
    def checkable(self) -> frozenset[int]:
        """Stages that can be spot-checked: their inputs are retained by the stage before (or come from the driver), and
        their outputs go to another stage. After a selection of rows nothing is retained, and only the driver gets the
        last stage's outputs."""
        return frozenset(
            number for number in range(len(self.stages) - 1) if number == 0 or not self.stages[number - 1].select
        )

    def roles(self, plan: Plan, owner: PeerId) -> ServingRoles:
        """The state machine's view of `plan`, whose block ranges are this cut's."""
        return ServingRoles(
            version=plan.version,
            owner=owner,
            places={placement.stage: placement.peer for placement in plan.stages},
            standbys={standby.stage: standby.peer for standby in plan.standbys},
            caching=frozenset(number for number, stage in enumerate(self.stages) if stage.caches),
            checkable=self.checkable,
            partition=self.name,
            predicted_s={placement.stage: placement.compute_s for placement in plan.stages},
        )


def ranges_of(plan: Plan) -> tuple[tuple[int, int], ...]:
    return tuple(placement.blocks for placement in plan.stages)


def cut(job: ServingJob, plan: Plan) -> ServedCut:
    """Cut the job's graph by the plan's ranges. Raises `GraphError` or `PlanError` if they are no valid cut of it."""
    ranges = ranges_of(plan)
    partition = cut_blocks(serving_graph(job.graph), ranges)
    boundaries = serving_boundaries(partition)
    if not {LOGITS, HIDDEN} <= {*boundaries[-1].outputs} or any(boundary.outputs for boundary in boundaries[:-1]):
        raise PlanError(
            "the logits and the hidden states that they are computed from must be outputs of the last stage."
        )
    specs = {spec.key: spec for spec in job.weights.specs}
    caching = [keeps_positions(stage.graph, job.options) for stage in partition.stages]
    placed = [
        caches or not FROM_SEGMENTS.isdisjoint(stage.graph.inputs)
        for caches, stage in zip(caching, partition.stages, strict=True)
    ]
    stages: list[ServedCutStage] = []
    for stage, boundary in zip(partition.stages, boundaries, strict=True):
        encoded = schema.encode(stage.graph)
        keys = sorted({spec.key for spec in stage.graph.params.values()})
        if lacking := [key for key in keys if key not in specs]:
            raise PlanError(
                f"the list of weights lacks {len(lacking)} entries of stage {stage.stage}, such as {lacking[0]}."
            )
        stages.append(
            ServedCutStage(
                encoded=host_tensor("uint8", (len(encoded),), encoded),
                graph_hash=schema.content_hash(stage.graph),
                boundary=boundary,
                caches=caching[stage.stage],
                select=not any(placed[stage.stage + 1 :]),
                weights=tuple(specs[key] for key in keys),
                chooses=any(node.op in CHOICES for node in stage.graph.nodes),
            )
        )
    digest = hashlib.sha256(msgspec.msgpack.encode([stage.graph_hash for stage in stages]))
    return ServedCut(digest.hexdigest(), ranges, tuple(stages))
