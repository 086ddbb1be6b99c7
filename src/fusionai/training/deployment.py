"""The definition of a training job, and its cut: the graphs, boundaries and state entries of a plan's stages.

A `TrainingJob` is independent of the machines that run it: immutable, and sufficient to restart its driver. A `Cut`
follows from a plan's block ranges and stays the same as long as the ranges do.

`client` builds jobs from recipes and `training.driver` runs them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from fusionai.backends.state import StateEntry, saved_entries, state_entries
from fusionai.coordination.training.interface import Roles
from fusionai.coordination.training.state import JobShape
from fusionai.execution.training.boundary import FEED, Boundary, replicated
from fusionai.ir import schema
from fusionai.ir.partition import Partition, cut_blocks, is_passed_on
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import PlanError
from fusionai.primitives.ids import JobId, PeerId
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.scheduling.problem.types import Plan, StagePlacement
from fusionai.wire.codecs import Codec
from fusionai.wire.messages import StageOptions


@dataclass(frozen=True, slots=True)
class CutStage:
    """One stage of a cut. `encoded`: its graph as sent to peers, uint8; `graph_hash` is its hash."""

    graph: Graph
    encoded: HostTensor
    graph_hash: str
    boundary: Boundary
    entries: Mapping[str, StateEntry]
    saved: Mapping[str, StateEntry]
    """The entries that a checkpoint contains."""

    @property
    def trainable(self) -> dict[str, tuple[int, ...]]:
        """Key -> shape of the parameters that this stage updates."""
        return {spec.key: spec.shape for spec in self.graph.params.values() if spec.trainable}


@dataclass(frozen=True, slots=True)
class Cut:
    """A model cut into stages. `name`: hash that differs whenever stages or their snapshots would. `ranges`: (replica,
    blocks) of each stage."""

    name: str
    ranges: tuple[tuple[int, tuple[int, int]], ...]
    codecs: tuple[Codec, ...]
    stages: tuple[CutStage, ...]
    together: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(key, stages that hold it) for parameters whose gradients travel with each microbatch only because one machine
    runs all of these stages."""

    def holds(self, plan: Plan) -> bool:
        """Return whether `plan` has these stages, and keeps on one machine those that must be."""
        peers = [placement.peer for placement in plan.stages]
        same = (plan.ranges, plan.codecs) == (self.ranges, self.codecs)
        return same and all(len({peers[stage] for stage in stages}) == 1 for _, stages in self.together)

    @property
    def replicas(self) -> int:
        return self.stages[0].boundary.replicas

    def saves(self, stage: int) -> bool:
        """Return whether a checkpoint takes this stage's state. Other replicas hold the same state."""
        return self.stages[stage].boundary.replica == 0

    def roles(self, plan: Plan, owner: PeerId) -> Roles:
        """Return the driver machine's view of `plan`, which must have this cut's block ranges."""
        return Roles(
            version=plan.version,
            owner=owner,
            places={placement.stage: placement.peer for placement in plan.stages},
            standbys={standby.stage: standby.peer for standby in plan.standbys},
            beside=plan.standbys_beside,
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


def cut(job: TrainingJob, plan: Plan) -> Cut:
    """Cut the job's graph. Raises `GraphError` or `PlanError` if the plan's ranges do not fit the graph."""
    ranges = plan.ranges
    if len(plan.codecs) not in (0, len(ranges) - 1):
        raise PlanError(
            f"the plan has {len(ranges)} stages and {len(plan.codecs)} codecs, expected one codec fewer, or none."
        )
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
            raise PlanError(f"stage {stage} belongs to replica {replica}; expected all stages of a replica in a row.")
        grouped[replica].append(blocks)
    return grouped


def stage_options(options: StageOptions, plan: Plan, stage: int) -> StageOptions:
    """Return the options of one stage of `plan`, made from the job's `options`."""
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
    """Return how many microbatches may delay their weight gradients. It is the number in flight, as far as half of the
    peer's spare memory holds them (the plan's bytes are predictions). It is 0 for a stage without weights (loss only),
    and with recomputation, which would then have to keep the activations."""
    if "stage" not in placement.roles or placement.recompute:
        return 0
    spare_bytes = (placement.memory_limit_bytes - placement.memory_bytes) // 2
    affordable = spare_bytes // placement.in_flight_bytes if placement.in_flight_bytes > 0 else 0
    return max(0, min(placement.in_flight, microbatches - 1, affordable))


Batch = dict[str, HostTensor]
"""Graph input name -> tensor."""


class BatchSource(Protocol):
    """Random access to the data. The same arguments always return the same batch."""

    def microbatch(self, step: int, microbatch: int) -> Batch: ...

    def evaluation(self, index: int) -> Batch: ...


class StateSource(Protocol):
    """Yields values that stages can't make themselves: weights of a pretrained model, buffers, constants."""

    def __call__(self, keys: Iterable[str]) -> Iterator[tuple[str, HostTensor]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """Everything that never changes in a job. The machines are in a `Deployment`."""

    job: JobId
    owner: PeerId
    graph: Graph
    options: StageOptions
    steps: int
    learning_rate: Callable[[int], float]
    clip_norm: float | None
    data: BatchSource
    state: StateSource
    checkpoint_every: int = 0
    save_base: bool = False
    evaluate_every: int = 0
    evaluation_batches: int = 0
    keep_best: bool = False
    patience: int | None = None
    minimum_improvement: float = 0.0
    tokens_per_microbatch: int = 0
    secret: bytes = b""
    """Secret for drawing spot checks and deriving sketch keys; peers must not know it. Empty: nothing is checked."""

    def shape(self) -> JobShape:
        trainable = [spec for spec in self.graph.params.values() if spec.trainable]
        return JobShape(
            steps=self.steps,
            microbatches=self.options.microbatches,
            canonical_order=tuple(spec.key for spec in sorted(trainable, key=lambda spec: spec.order)),
            checkpoint_every=self.checkpoint_every,
            save_base=self.save_base,
            evaluate_every=self.evaluate_every,
            keep_best=self.keep_best,
            patience=self.patience,
            minimum_improvement=self.minimum_improvement,
            takeover=self.options.takeover,
        )

    @property
    def tokens_per_step(self) -> int:
        return self.tokens_per_microbatch * self.options.microbatches
