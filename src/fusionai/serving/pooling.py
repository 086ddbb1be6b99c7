"""How a text's vector is made of the hidden states of its positions: the pooling of sentence-transformers, and the
layers behind it.

A collector adds up a text's rows as they come. Neighbours: `serving.sentences` reads a model's pooling from its files,
`serving.generating` feeds collectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
"""The first position, the largest of each number, the mean, the sum over the root of the length, the mean weighted by
the position, the last position. The names are those of sentence-transformers."""
MODES: Final[tuple[PoolingMode, ...]] = get_args(PoolingMode)
_SINGLE: Final = frozenset({"cls", "lasttoken"})
"""Modes that need one row only."""
Vector = NDArray[np.float64]
Rows = NDArray[np.float32]


def _gelu(x: Vector) -> Vector:
    return x * 0.5 * (1.0 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2.0)))


ACTIVATIONS: Final[Mapping[str, Callable[[Vector], Vector]]] = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": np.tanh,
    "torch.nn.modules.activation.ReLU": lambda x: np.maximum(x, 0.0),
    "torch.nn.modules.activation.Sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "torch.nn.modules.activation.GELU": _gelu,
}


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """A linear layer behind the pooling. `weight`: [out, in]."""

    weight: Rows
    bias: Rows | None
    activation: str

    def __call__(self, vector: Vector) -> Vector:
        made = self.weight.astype(np.float64) @ vector
        return ACTIVATIONS[self.activation](made if self.bias is None else made + self.bias)


@dataclass(frozen=True, slots=True)
class Pooling:
    """`modes`: their vectors are joined in this order. `steps`: what follows, in order; `normalise` scales to length
    1."""

    modes: tuple[PoolingMode, ...] = ("mean",)
    steps: tuple[Dense | Literal["normalise"], ...] = ("normalise",)
    excludes_prompt: bool = False
    """The positions of a prompt before the text are not pooled."""

    @property
    def single(self) -> PoolingMode | None:
        """The mode, if one row is enough for it."""
        return self.modes[0] if len(self.modes) == 1 and self.modes[0] in _SINGLE else None

    @property
    def normalises(self) -> bool:
        """Whether vectors have length 1."""
        return "normalise" in self.steps


MEAN: Final = Pooling()


class Collector:
    """Makes one text's vector of its rows. Sums are in float64."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._count = 0
        self._first: Rows | None = None
        self._last: Rows | None = None
        self._most: Rows | None = None
        self._sum: Vector | None = None
        self._weighted: Vector | None = None

    def add(self, rows: Rows) -> None:
        """Add rows; they come in order of the text's positions, each once."""
        if not len(rows):
            return
        first = self._count
        self._count += len(rows)
        self._first = rows[0].copy() if self._first is None else self._first
        self._last = rows[-1].copy()
        modes = self._pooling.modes
        if "max" in modes:
            most = rows.max(axis=0)
            self._most = most if self._most is None else np.maximum(self._most, most)
        if "mean" in modes or "mean_sqrt_len_tokens" in modes:
            added = rows.sum(axis=0, dtype=np.float64)
            self._sum = added if self._sum is None else self._sum + added
        if "weightedmean" in modes:
            weighted = np.arange(first + 1, self._count + 1, dtype=np.float64) @ rows
            self._weighted = weighted if self._weighted is None else self._weighted + weighted

    def vector(self) -> list[float]:
        """Return the vector of all rows added."""
        vector = np.concatenate([self._of(mode) for mode in self._pooling.modes])
        for step in self._pooling.steps:
            if isinstance(step, Dense):
                vector = step(vector)
            elif length := float(np.linalg.norm(vector)):
                vector = vector / length
        return vector.tolist()

    def _of(self, mode: PoolingMode) -> Vector:
        count = self._count
        match mode:
            case "cls":
                made, scale = self._first, 1.0
            case "lasttoken":
                made, scale = self._last, 1.0
            case "max":
                made, scale = self._most, 1.0
            case "mean":
                made, scale = self._sum, float(count)
            case "mean_sqrt_len_tokens":
                made, scale = self._sum, math.sqrt(count)
            case "weightedmean":
                made, scale = self._weighted, count * (count + 1) / 2
        return np.asarray(made, np.float64) / scale
