"""Which samples a microbatch has, and how they become rows: pure functions of (seed, step, microbatch).

Samples form an endless sequence: the whole training part in a shuffled order, then the whole part in another order, and
so on. Position n belongs to data epoch n // samples. `cursor(step)` is the number of samples in all steps before
`step`. `corpus.source` and `corpus.chat_source` fetch the samples."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from fusionai.corpus.recipe import Recipe
from fusionai.primitives.errors import DataError

_ROUNDS: Final = 6
_MASK_64: Final = 2**64 - 1


def derived_key(seed: int, *parts: int | str) -> int:
    """64 bits derived from the seed and the given purpose."""
    text = ":".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def mix(value: int) -> int:
    """The 64-bit finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection that scatters its input."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


class Permutation:
    """`at(0), ..., at(size - 1)` are 0..size-1 in an order determined by (seed, parts)."""

    def __init__(self, size: int, seed: int, *parts: int | str) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs at least one element, got {size}")
        self._size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        self._keys = tuple(derived_key(seed, *parts, "round", number) for number in range(_ROUNDS))

    def at(self, index: int) -> int:
        """Element `index` of the order. Raises `IndexError` outside range(size)."""
        if not 0 <= index < self._size:
            raise IndexError(f"index {index} is outside 0..{self._size - 1}")
        value = self._encrypt(index)
        # The domain is less than four times the size, so this takes under four turns on average. It always ends,
        # because the cycle of an element in range returns into the range.
        while value >= self._size:
            value = self._encrypt(value)
        return value

    def _encrypt(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._half_mask
        for key in self._keys:
            left, right = right, left ^ (mix(right ^ key) & self._half_mask)
        return (left << self._half_bits) | right


@dataclass(frozen=True, slots=True)
class Deal:
    """Assigns steps of the sample sequence to replicas in turn, so that no two replicas get the same samples. A replica
    that starts late skips its first `first` steps, because other replicas have moved on by then."""

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
        self._shuffle = shuffle
        # One step can have samples of two epochs.
        self._permutation = lru_cache(maxsize=2)(lambda epoch: Permutation(samples, seed, "epoch", epoch))

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
        places = (divmod(position, self._samples) for position in range(first, first + self.microbatch_size))
        return [self._permutation(epoch).at(index) if self._shuffle else index for epoch, index in places]


def evaluation_samples(samples: int, microbatch_size: int, seed: int, index: int) -> list[int]:
    """Samples of evaluation microbatch `index`, drawn from the whole part; the same at each evaluation."""
    first = index * microbatch_size
    if index < 0 or first + microbatch_size > samples:
        raise IndexError(f"the evaluation part has {samples // microbatch_size} microbatches, got number {index}")
    permutation = Permutation(samples, seed, "evaluation")
    return [permutation.at(position) for position in range(first, first + microbatch_size)]


class SampledSource:
    """What every input of a job has: samples in an order, for training and for evaluation."""

    def __init__(
        self, recipe: Recipe, *, samples: int, evaluation_samples: int, shuffle: bool, unit: str = "rows"
    ) -> None:
        """`unit`: what a sample is called in messages. Raises `DataError` if the recipe evaluates and the evaluation
        part has fewer samples than a microbatch."""
        train = recipe.train
        self._seed = recipe.job.seed
        self._deal = ALONE
        self._samples, self._evaluation_samples = samples, evaluation_samples
        self._evaluation_batches = 0
        if recipe.evaluation is not None:
            available = evaluation_samples // train.microbatch_size
            if not available:
                raise DataError(
                    f"the evaluation part has {evaluation_samples} {unit}, fewer than a microbatch of "
                    f"{train.microbatch_size}.",
                    hint="Raise evaluation_fraction, or give more data.",
                )
            self._evaluation_batches = min(recipe.evaluation.batches, available)
        self._order = SampleOrder(
            samples=samples,
            batch_size=train.batch_size,
            microbatches=train.microbatches,
            seed=self._seed,
            shuffle=shuffle,
        )

    @property
    def samples(self) -> int:
        """Samples of the training part."""
        return self._samples

    @property
    def evaluation_batches(self) -> int:
        """Microbatches `evaluation` can give: as many as the recipe asks for, or all there are; 0 without a part."""
        return self._evaluation_batches

    def dealt(self, deal: Deal) -> Self:
        """The same data for one of several replicas: only the steps that `deal` assigns to it."""
        share = copy.copy(self)
        share._deal = deal
        return share

    def _evaluation_of(self, index: int) -> list[int]:
        """Samples of evaluation microbatch `index`."""
        return evaluation_samples(self._evaluation_samples, self._order.microbatch_size, self._seed, index)


_ONE: Final = 2**32


class Split:
    """Decides for each piece. A fraction of 0 keeps nothing for evaluation."""

    def __init__(self, fraction: float, seed: int) -> None:
        if not 0 <= fraction < 1:
            raise ValueError(f"expected a fraction in [0, 1), got {fraction}")
        self._rate = round(fraction * _ONE)
        self._phase = derived_key(seed, "split") % _ONE

    def is_evaluation(self, index: int) -> bool:
        """True for floor(n x fraction) or one more of any n consecutive pieces."""
        return (self._phase + index * self._rate) % _ONE + self._rate >= _ONE


IGNORED: Final = -100
"""The label that every loss ignores."""


def mask_rows(
    tokens: npt.NDArray[np.int64], *, key: int, fraction: float, mask_id: int, end_id: int, vocabulary: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`tokens` [rows, length] -> (input_ids, labels), both of that shape. Labels are `IGNORED` where no token is
    masked. End-of-document tokens are never masked; at least one token is, so that the loss is defined."""
    counters = np.arange(tokens.size, dtype=np.uint64).reshape(tokens.shape)
    chance, kind, replacement = (_draws(counters, key, stream) for stream in range(3))
    allowed = tokens != end_id
    chosen = allowed & (chance < np.uint64(int(fraction * 2**64)))
    if not chosen.any():
        # Mask the position closest to being chosen; in rows of nothing but end tokens, any position.
        ranked = np.where(allowed, chance, np.uint64(2**64 - 1)) if allowed.any() else chance
        chosen.flat[int(np.argmin(ranked))] = True
    share = kind % np.uint64(10)
    inputs = np.where(chosen & (share < 8), np.int64(mask_id), tokens)
    inputs = np.where(chosen & (share == 8), (replacement % np.uint64(vocabulary)).astype(np.int64), inputs)
    return inputs, np.where(chosen, tokens, np.int64(IGNORED))


def _draws(counters: npt.NDArray[np.uint64], key: int, stream: int) -> npt.NDArray[np.uint64]:
    """64 random bits per counter: SplitMix64 of (key, stream, counter), like `permutation.mix` on arrays."""
    with np.errstate(over="ignore"):
        value = counters * np.uint64(3) + np.uint64(stream) + np.uint64(key)
        value = value * np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))


def packed(lengths: npt.NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Rows of indices into `lengths` (each length 1 to `capacity`), ascending within a row; rows by first index."""
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    rooms = 0
    """Bit r is set if some row has room for exactly r more tokens."""
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        enough = rooms >> length
        if enough:
            room = length + ((enough & -enough).bit_length() - 1)
            row = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        if left := room - length:
            with_room.setdefault(left, []).append(row)
            rooms |= 1 << left
    return sorted(sorted(row) for row in rows)
