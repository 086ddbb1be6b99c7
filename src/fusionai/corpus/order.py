"""Which samples a microbatch has: a pure function of (seed, step, microbatch).

Samples form an endless sequence: the whole training part in a shuffled order, then the whole part in another order, and
so on. Position n belongs to data epoch n // samples. `cursor(step)` is the position of the first sample of `step`, that
is, the number of samples in all steps before. Neighbours: `source` and `tensors` fetch the samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from fusionai.corpus.permutation import Permutation


@dataclass(frozen=True, slots=True)
class Deal:
    """Assigns steps of the sample sequence to replicas in turn, so that no two replicas get the same samples.

    A replica that starts late skips its first `first` steps, because other replicas have moved on by then.
    """

    replica: int = 0
    replicas: int = 1
    first: int = 0

    def step(self, step: int) -> int:
        """Number of the replica's own `step` in the sequence of all replicas' steps."""
        return (self.first + step) * self.replicas + self.replica


ALONE: Final = Deal()
"""The deal of a job with one replica."""


class SampleOrder:
    """Order of `samples` training samples, with `batch_size` samples per step in `microbatches` equal parts."""

    def __init__(self, *, samples: int, batch_size: int, microbatches: int, seed: int, shuffle: bool) -> None:
        self._samples = samples
        self._batch_size = batch_size
        self._microbatches = microbatches
        self._seed = seed
        self._shuffle = shuffle
        # One step can have samples of two epochs.
        self._permutation = lru_cache(maxsize=2)(self._permutation_of)

    @property
    def microbatch_size(self) -> int:
        return self._batch_size // self._microbatches

    def cursor(self, step: int) -> int:
        """Number of samples in all steps before `step`."""
        return step * self._batch_size

    def microbatch(self, step: int, microbatch: int) -> list[int]:
        """Sample numbers of a microbatch. Raises `IndexError` if the step does not have it."""
        if step < 0 or not 0 <= microbatch < self._microbatches:
            raise IndexError(f"step {step} has microbatches 0..{self._microbatches - 1}, got {microbatch}")
        first = self.cursor(step) + microbatch * self.microbatch_size
        return [self._sample(position) for position in range(first, first + self.microbatch_size)]

    def _sample(self, position: int) -> int:
        epoch, index = divmod(position, self._samples)
        return self._permutation(epoch).at(index) if self._shuffle else index

    def _permutation_of(self, epoch: int) -> Permutation:
        return Permutation(self._samples, self._seed, "epoch", epoch)


def evaluation_samples(samples: int, microbatch_size: int, seed: int, index: int) -> list[int]:
    """Samples of evaluation microbatch `index`, drawn from the whole part; the same at each evaluation."""
    first = index * microbatch_size
    if index < 0 or first + microbatch_size > samples:
        raise IndexError(f"the evaluation part has {samples // microbatch_size} microbatches, got number {index}")
    permutation = Permutation(samples, seed, "evaluation")
    return [permutation.at(position) for position in range(first, first + microbatch_size)]
