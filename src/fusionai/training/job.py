"""What a training job is, whoever runs it: frozen, complete, and enough to start its driver again.

Neighbours: `client` builds it from a recipe, `training.deployment` says who runs which part, `training.driver` drives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from fusionai.coordination.driver import JobShape
from fusionai.ir.schema import Graph
from fusionai.primitives.ids import JobId, PeerId
from fusionai.primitives.tensors import HostTensor
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
    """What never changes in a job; who runs it is a `Deployment`."""

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
    """What spot checks are drawn and marked with; no peer may know it. Empty: nothing is checked."""

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
