"""The definition of a training job, independent of the machines that run it: immutable, and sufficient to restart its
driver.

`client` builds it from a recipe, `training.deployment` assigns stages, `training.driver` drives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from fusionai.coordination.training.driver import JobShape
from fusionai.ir.schema import Graph
from fusionai.primitives.ids import JobId, PeerId
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.messages import StageOptions

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
    """Secret for drawing spot checks and deriving mark keys; peers must not know it. Empty: nothing is checked."""

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
