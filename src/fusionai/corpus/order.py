"""Which samples a microbatch takes: pure in (seed, step, microbatch), in any order. Reads nothing.

Samples form one endless sequence: all of the training part in a shuffled order, then all of it in another, and so on.
Position n of it belongs to data epoch n // samples. `cursor(step)` is the position of the first sample of `step`, that
is, how many samples all steps before it took. Neighbours: `source` and `tensors` fetch the samples it names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from fusionai.corpus.permutation import Permutation


@dataclass(frozen=True, slots=True)
class Deal:
    """How steps are dealt out among replicas, one to each in turn: nobody gets what another one gets.

    A replica that begins late has `first` of its own steps less: others have had those of their share by then."""

    replica: int = 0
    replicas: int = 1
    first: int = 0

    def step(self, step: int) -> int:
        """Which one of all replicas' steps the replica's own `step` is."""
        return (self.first + step) * self.replicas + self.replica


ALONE: Final = Deal()


class SampleOrder:
    """The order of `samples` training samples, `batch_size` a step in `microbatches` equal parts."""

    def __init__(self, *, samples: int, batch_size: int, microbatches: int, seed: int, shuffle: bool) -> None:
        self._samples = samples
        self._batch_size = batch_size
        self._microbatches = microbatches
        self._seed = seed
        self._shuffle = shuffle
        # Two epochs can meet in one step.
        self._permutation = lru_cache(maxsize=2)(self._permutation_of)

    @property
    def microbatch_size(self) -> int:
        return self._batch_size // self._microbatches

    def cursor(self, step: int) -> int:
        """Samples taken by all steps before `step`."""
        return step * self._batch_size

    def microbatch(self, step: int, microbatch: int) -> list[int]:
        """Sample numbers. Raises `IndexError` for a microbatch the step does not have."""
        if step < 0 or not 0 <= microbatch < self._microbatches:
            raise IndexError(f"step {step} has microbatches 0..{self._microbatches - 1}, asked for {microbatch}")
        first = self.cursor(step) + microbatch * self.microbatch_size
        return [self._sample(position) for position in range(first, first + self.microbatch_size)]

    def _sample(self, position: int) -> int:
        epoch, index = divmod(position, self._samples)
        return self._permutation(epoch).at(index) if self._shuffle else index

    def _permutation_of(self, epoch: int) -> Permutation:
        return Permutation(self._samples, self._seed, "epoch", epoch)


def evaluation_samples(samples: int, microbatch_size: int, seed: int, index: int) -> list[int]:
    """Samples of evaluation microbatch `index`: the same at each evaluation, drawn from all over the part."""
    first = index * microbatch_size
    if index < 0 or first + microbatch_size > samples:
        raise IndexError(f"the evaluation part has {samples // microbatch_size} microbatches, asked for {index}")
    permutation = Permutation(samples, seed, "evaluation")
    return [permutation.at(position) for position in range(first, first + microbatch_size)]
