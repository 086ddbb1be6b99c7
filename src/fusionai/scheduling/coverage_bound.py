"""Computes an upper bound on the least cover R that any layout of the blocks over these peers can reach.

Any weights w over blocks that add up to 1 give R = min cover <= sum over blocks of w * cover <= sum over peers of the
largest rate * w of an interval. For equal blocks and weights in proportion to work this is
R <= (1/L) sum min(1/t_i, cap_i/net_i). Two refinements make the bound tighter:

- If a holder passes more than R, only R counts for the least cover. So R <= sum of the largest min(rate, R) * w. The
  largest R that fulfils this is approached from above by inserting the bound into its own right side; each round gives
  a valid bound.
- The weights may be chosen: lower where intervals crowd, higher where they are rare (the dual of the linear
  relaxation).

`coverage_kernels.ceiling` computes one round; `coverage` reports the gap.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from fusionai.scheduling.kernels.compiled import compiled
from fusionai.scheduling.kernels.coverage import Floats, Integers, Layout, Swarm, ceiling

_ROUNDS: Final = 40
_CLOSE: Final = 1e-5
_STEP: Final = 0.3


class Proof:
    """The lowest bound found so far, in microbatches a second, and the weights that gave it."""

    def __init__(self, swarm: Swarm) -> None:
        peers, length = swarm.reach.shape
        self._swarm = swarm
        self._intervals: Integers = np.zeros((peers, 2), dtype=np.int64)
        work = np.diff(swarm.work)
        whole = float(work.sum())
        self.weights: Floats = work / whole if whole > 0 else np.ones(length, dtype=np.float64) / length
        self._bound = np.inf
        self._fix(self.weights)

    @property
    def bound(self) -> float:
        """The lowest bound, raised by 1e-12 so that rounding can't put it below a cover that a layout reaches."""
        return self._bound * (1 + 1e-12)

    def close(self, layout: Layout, goal: float) -> bool:
        return float(layout.cover.min()) >= self._bound * (1 - goal)

    def try_cover(self, cover: Floats, sharpness: float) -> None:
        """Try weights derived from a layout's cover: the scarcer a block, the higher its weight."""
        weights = np.exp(-sharpness / max(self._bound, 1e-300) * (cover - cover.min()))
        self._offer(weights / weights.sum())

    def sharpen(self, layout: Layout, rounds: int, goal: float) -> None:
        """Search for better weights, lower where the peers' best intervals crowd and higher where they are rare. Ends
        after `rounds`, or as soon as `layout` is within `goal` of the bound."""
        for sharpness in (1.0, 3.0, 10.0, 30.0, 100.0, 300.0):
            self.try_cover(layout.cover, sharpness)
        weights = self.weights
        mean = np.zeros_like(weights)
        for turn in range(rounds):
            if self.close(layout, goal):
                return
            self._offer(weights)
            crowd = _crowd(self._swarm, self._intervals, self._bound)
            mean += weights
            weights = weights * np.exp(-_STEP / (1 + turn) ** 0.5 * (crowd / max(float(crowd.max()), 1e-300)))
            weights = weights / weights.sum()
            if turn % 10 == 9:
                self._offer(mean / mean.sum())
        self._fix(self.weights)

    def _offer(self, weights: Floats) -> None:
        bound = float(compiled(ceiling)(self._swarm, weights, min(self._bound, 1e300), self._intervals))
        if bound < self._bound:
            self._bound, self.weights = bound, weights

    def _fix(self, weights: Floats) -> None:
        """Insert the bound into its own right side until it falls by less than `_CLOSE`."""
        for _ in range(_ROUNDS):
            before = self._bound
            self._offer(weights)
            if self._bound >= before * (1 - _CLOSE):
                return


def _crowd(swarm: Swarm, intervals: Integers, cap: float) -> Floats:
    """[L]: cover if each peer had its interval of `intervals`, with rates of at most `cap`."""
    start, end = intervals[:, 0], intervals[:, 1]
    busy_s = (swarm.work[end] - swarm.work[start]) / swarm.speed
    up_s = (swarm.gradient_bytes[start] + swarm.forward_bytes[end]) / swarm.up
    down_s = (swarm.forward_bytes[start] + swarm.gradient_bytes[end]) / swarm.down
    rate = np.minimum(1.0 / np.maximum.reduce([busy_s, up_s, down_s, np.full(len(start), 1e-12)]), cap)
    rate = np.where(start < end, rate, 0.0)
    steps = np.zeros(swarm.reach.shape[1] + 1)
    np.add.at(steps, start, rate)
    np.add.at(steps, end, -rate)
    return np.cumsum(steps)[:-1]
