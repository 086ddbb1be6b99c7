"""What a training job is, once planned: frozen, complete, and enough to start its driver again.

Neighbours: `client` builds it from a recipe, `training.driver` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from fusionai.coordination.driver import JobShape
from fusionai.ir.partition import Partition, cut_blocks
from fusionai.ir.schema import Graph
from fusionai.primitives.ids import JobId, PeerId
from fusionai.primitives.tensors import HostTensor
from fusionai.scheduling.types import Plan, StagePlacement
from fusionai.wire import messages as wire
from fusionai.wire.messages import StageOptions

Batch = dict[str, HostTensor]
"""Graph input name -> tensor."""


class BatchSource(Protocol):
    """Random access to the data, pure in its arguments."""

    def microbatch(self, step: int, microbatch: int) -> Batch: ...

    def evaluation(self, index: int) -> Batch: ...


class StateSource(Protocol):
    """Values that stages can't make themselves: weights of a pretrained model, buffers, constants."""

    def __call__(self, keys: Iterable[str]) -> Iterator[tuple[str, HostTensor]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """`plan` carries the broker's version. `members`: where each peer of the plan listens (the owner's own: empty)."""

    job: JobId
    owner: PeerId
    plan: Plan
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
    tokens_per_microbatch: int = 0
    members: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tickets: dict[str, bytes] = field(default_factory=dict)

    def partition(self) -> Partition:
        return cut_blocks(self.graph, [placement.blocks for placement in self.plan.stages])

    def shape(self) -> JobShape:
        trainable = [spec for spec in self.graph.params.values() if spec.trainable]
        return JobShape(
            stages=tuple(placement.stage for placement in self.plan.stages),
            steps=self.steps,
            microbatches=self.options.microbatches,
            feed_window=max(placement.in_flight for placement in self.plan.stages) + 1,
            canonical_order=tuple(spec.key for spec in sorted(trainable, key=lambda spec: spec.order)),
            checkpoint_every=self.checkpoint_every,
            save_base=self.save_base,
            evaluate_every=self.evaluate_every,
            takeover=self.options.takeover,
        )

    def neighbours(self) -> tuple[wire.Neighbour, ...]:
        return tuple(
            wire.Neighbour(stage=p.stage, peer=p.peer, addresses=self.members.get(p.peer, ())) for p in self.plan.stages
        )

    def stage_options(self, stage: int) -> StageOptions:
        placement = self.plan.stages[stage]
        return msgspec.structs.replace(
            self.options, in_flight=placement.in_flight, weight_lag=_weight_lag(placement, self.options.microbatches)
        )


def _weight_lag(placement: StagePlacement, microbatches: int) -> int:
    """As many microbatches as are in flight may lag with their weight gradients, if the peer's memory holds them with
    room to spare (the plan's bytes are predictions). The loss alone has no weights."""
    if "stage" not in placement.roles:
        return 0
    spare_bytes = (placement.memory_limit_bytes - placement.memory_bytes) // 2
    affordable = spare_bytes // placement.in_flight_bytes if placement.in_flight_bytes > 0 else 0
    return max(0, min(placement.in_flight, microbatches - 1, affordable))
