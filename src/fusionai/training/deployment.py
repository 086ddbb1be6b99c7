"""What follows from a plan's block ranges and is kept while they stay: graphs, boundaries, state entries.

Decides nothing. Neighbours: `execution.deployment` is the plan made real, `training.driver` runs it,
`coordination.roles` is the machine's view of one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from fusionai.backends.state import StateEntry, saved_entries, state_entries
from fusionai.coordination.roles import Roles
from fusionai.execution.boundary import FEED, Boundary, replicated
from fusionai.ir import schema
from fusionai.ir.partition import Partition, cut_blocks, is_passed_on
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import PlanError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.scheduling.types import Plan, StagePlacement
from fusionai.training.job import TrainingJob
from fusionai.wire.codecs import Codec
from fusionai.wire.messages import StageOptions


@dataclass(frozen=True, slots=True)
class CutStage:
    """One stage of a cut. `encoded`: its graph as it travels, named by `graph_hash`."""

    graph: Graph
    encoded: HostTensor
    graph_hash: str
    boundary: Boundary
    entries: Mapping[str, StateEntry]
    saved: Mapping[str, StateEntry]
    """Those a checkpoint is made of."""

    @property
    def trainable(self) -> dict[str, tuple[int, ...]]:
        """Key -> shape of the parameters that it updates."""
        return {spec.key: spec.shape for spec in self.graph.params.values() if spec.trainable}


@dataclass(frozen=True, slots=True)
class Cut:
    """`name` differs where stages or their snapshots would. `ranges`: replica and blocks of each stage."""

    name: str
    ranges: tuple[tuple[int, tuple[int, int]], ...]
    codecs: tuple[Codec, ...]
    stages: tuple[CutStage, ...]
    together: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Key and holders of the parameters whose gradients travel with each microbatch only because one machine has all
    their stages."""

    def holds(self, plan: Plan) -> bool:
        """Whether `plan` has these stages, and those together that must be."""
        peers = [placement.peer for placement in plan.stages]
        same = (ranges_of(plan), plan.codecs) == (self.ranges, self.codecs)
        return same and all(len({peers[stage] for stage in stages}) == 1 for _, stages in self.together)

    @property
    def replicas(self) -> int:
        return self.stages[0].boundary.replicas

    def saves(self, stage: int) -> bool:
        """Whether a checkpoint has this stage's state from it: other replicas have the same."""
        return self.stages[stage].boundary.replica == 0

    def roles(self, plan: Plan, owner: PeerId) -> Roles:
        """The machine's view of `plan`, whose block ranges are this cut's."""
        return Roles(
            version=plan.version,
            owner=owner,
            places={placement.stage: placement.peer for placement in plan.stages},
            guards={guard.stage: guard.peer for guard in plan.guards},
            snapshot_every=plan.snapshot_every,
            feed_window=self.replicas * (max(placement.in_flight for placement in plan.stages) + 1),
            neighbours={number: stage.boundary.others for number, stage in enumerate(self.stages)},
            fed=frozenset(
                number
                for number, stage in enumerate(self.stages)
                if any(port.other == FEED for port in stage.boundary.receives)
            ),
            stateless=frozenset(number for number, stage in enumerate(self.stages) if not stage.entries),
            partition=self.name,
        )


def ranges_of(plan: Plan) -> tuple[tuple[int, tuple[int, int]], ...]:
    return tuple((placement.replica, placement.blocks) for placement in plan.stages)


def cut(job: TrainingJob, plan: Plan) -> Cut:
    """Raises `GraphError` or `PlanError` where the plan's ranges are no cut of the job's graph."""
    ranges = ranges_of(plan)
    if len(plan.codecs) not in (0, len(ranges) - 1):
        raise PlanError(f"the plan has {len(ranges)} stages and {len(plan.codecs)} codecs, expected one fewer or none.")
    peers = [placement.peer for placement in plan.stages]
    partitions: list[Partition] = []
    together: list[tuple[str, tuple[int, ...]]] = []
    for blocks in _by_replica(ranges):
        first = sum(len(partition.stages) for partition in partitions)
        partition = cut_blocks(job.graph, blocks, peers[first : first + len(blocks)])
        large = [one for one in partition.shared if not one.summed and not is_passed_on(job.graph, one.key)]
        together += [(one.key, tuple(first + stage for stage in one.stages)) for one in large]
        partitions.append(partition)
    graphs = [stage.graph for partition in partitions for stage in partition.stages]
    stages: list[CutStage] = []
    for graph, boundary in zip(graphs, replicated(partitions), strict=True):
        encoded = schema.encode(graph)
        stages.append(
            CutStage(
                graph=graph,
                encoded=host_tensor("uint8", (len(encoded),), encoded),
                graph_hash=schema.content_hash(graph),
                boundary=boundary,
                entries=state_entries(graph, job.options.optimizer),
                saved=saved_entries(graph, job.options),
            )
        )
    digest = hashlib.sha256(
        msgspec.msgpack.encode(
            [
                len(partitions),
                *((stage.boundary.replica, stage.graph_hash) for stage in stages),
                *plan.codecs,
                *together,
            ]
        )
    )
    return Cut(digest.hexdigest(), ranges, plan.codecs, tuple(stages), tuple(together))


def _by_replica(ranges: Sequence[tuple[int, tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    grouped: list[list[tuple[int, int]]] = []
    for stage, (replica, blocks) in enumerate(ranges):
        if replica == len(grouped):
            grouped.append([])
        if replica != len(grouped) - 1:
            raise PlanError(f"stage {stage} is of replica {replica}; replicas follow each other, one after the other.")
        grouped[replica].append(blocks)
    return grouped


def stage_options(options: StageOptions, plan: Plan, stage: int) -> StageOptions:
    """What a stage of `plan` is told; `options` are the job's."""
    placement = plan.stages[stage]
    return msgspec.structs.replace(
        options,
        in_flight=placement.in_flight,
        weight_lag=_weight_lag(placement, plan.microbatches_of(placement)),
        recompute=placement.recompute,
        offload=placement.offload,
        offload_weights=placement.offload_weights,
        codecs=plan.codecs,
    )


def _weight_lag(placement: StagePlacement, microbatches: int) -> int:
    """As many microbatches as are in flight may lag with their weight gradients, if the peer's memory holds them with
    room to spare (the plan's bytes are predictions). The loss alone has no weights. Where activations are made again,
    those that lag would have to be kept after all."""
    if "stage" not in placement.roles or placement.recompute:
        return 0
    spare_bytes = (placement.memory_limit_bytes - placement.memory_bytes) // 2
    affordable = spare_bytes // placement.in_flight_bytes if placement.in_flight_bytes > 0 else 0
    return max(0, min(placement.in_flight, microbatches - 1, affordable))
