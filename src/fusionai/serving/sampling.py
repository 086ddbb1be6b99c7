"""Choose the next token from a row of logits, reproducibly: batch, clock and machine have no influence.

A draw is a pure function of (seed, position). Tokens are laid along [0, 1) in order of their ids, so that a difference
in the last bits of logits moves the borders a little and reorders nothing. Neighbours: `interface.Sampling` has the
options; `generating` draws tokens and verifies proposals with this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from fusionai.primitives.errors import ExecutionError
from fusionai.serving.images import FIRST_TOKEN
from fusionai.serving.interface import Sampling

_ROOM = 64


class TokenHistory:
    """Distinct tokens of prompt and answer, without rows of images. Adding a token takes constant time, whatever the
    text's length."""

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        distinct = np.unique(np.asarray(prompt, dtype=np.int64))
        distinct = distinct[distinct < FIRST_TOKEN]
        self._slots = {int(token): slot for slot, token in enumerate(distinct)}
        self._ids = np.concatenate([distinct, np.zeros(_ROOM, dtype=np.int64)])
        self._counts = np.zeros(len(self._ids), dtype=np.int64)
        self.generated_tokens = 0

    def add(self, token: int) -> None:
        """Add a token of the answer."""
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        self._counts[slot] += 1
        self.generated_tokens += 1

    @property
    def seen(self) -> NDArray[np.int64]:
        """Distinct tokens of prompt and answer, in order of first occurrence; a view."""
        return self._ids[: len(self._slots)]

    @property
    def generated_counts(self) -> NDArray[np.int64]:
        """How often each token of `seen` is in the answer; a view."""
        return self._counts[: len(self._slots)]


_WORD: Final = 2**64
_BLOCK: Final = 1024
"""Entries in a block of the two-level running sum."""


def choose(
    logits: NDArray[np.float32],
    sampling: Sampling,
    history: TokenHistory,
    position: int,
    mask: memoryview | None = None,
) -> int:
    """Return the token for `position` (any number that counts up with the answer's tokens). `logits`: [vocabulary].
    `mask`: as `Constraint.allowed`; tokens beyond its end are forbidden. Raises `ExecutionError` if logits are not
    finite, a biased token is outside the vocabulary, or every token is forbidden."""
    _check(logits, int(logits.argmax()))
    scores = _adjusted(logits, sampling, history, mask)
    best = int(scores.argmax())
    if scores[best] == -np.inf:
        raise ExecutionError("every token is forbidden: expected logits or a constraint that leave at least one.")
    if sampling.temperature == 0:
        return best
    ids, weights = _weights(scores, best, sampling)
    place = _drawn(weights, uniform(sampling.seed, position))
    return place if ids is None else int(ids[place])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends only on (seed, position): 53 bits of Philox4x64-10 (Salmon et al. 2011)."""
    key = np.array([seed % _WORD, position % _WORD], dtype=np.uint64)
    return (int(np.random.Philox(key=key).random_raw()) >> 11) * 2.0**-53


def _penalises(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def _check(logits: NDArray[np.float32], best: int) -> None:
    """Raise `ExecutionError` for unusable logits. `best`: numpy's argmax; argmax finds a NaN, so one look is enough."""
    value = float(logits[best])
    if np.isnan(value) or value == np.inf:
        raise ExecutionError(
            f"logits of the next token: expected numbers, got {value} at token {best}.",
            hint="The model overflows in this precision: serve it in bf16 or fp32.",
        )
    if value == -np.inf:
        raise ExecutionError("logits of the next token: expected numbers, got -inf for every token.")


def _adjusted(
    logits: NDArray[np.float32], sampling: Sampling, history: TokenHistory, mask: memoryview | None
) -> NDArray[np.float32]:
    """Scores with bias, penalties and mask applied; a copy if anything changes."""
    if not sampling.logit_bias and not _penalises(sampling) and mask is None:
        return logits
    scores = logits.astype(np.float32, copy=True)
    for token, bias in sampling.logit_bias:
        if not 0 <= token < len(scores):
            raise ExecutionError(f"logit bias: expected tokens below {len(scores)}, got {token}.")
        scores[token] += np.float32(bias)
    if _penalises(sampling):
        _penalise(scores, sampling, history)
    if mask is not None:
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=len(scores), bitorder="little")
        scores[bits == 0] = -np.inf
    return scores


def _penalise(scores: NDArray[np.float32], sampling: Sampling, history: TokenHistory) -> None:
    """The repetition penalty (Keskar et al. 2019) counts the prompt too; presence and frequency only the answer."""
    known = history.seen < len(scores)
    seen = history.seen[known]
    counts = history.generated_counts[known]
    values = scores[seen].astype(np.float64)
    penalty = sampling.repetition_penalty
    values = np.where(values > 0, values / penalty, values * penalty)
    values -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    scores[seen] = values.astype(np.float32)


def _weights(
    scores: NDArray[np.float32], best: int, sampling: Sampling
) -> tuple[NDArray[np.int64] | None, NDArray[np.float64]]:
    """Unnormalised probabilities after temperature, top_k, min_p and top_p: 1 for the best token, 0 for excluded ones.
    Returns (token ids ascending, their weights); ids None: one weight for each token."""
    ids = None
    kept = scores
    if 0 < sampling.top_k < len(scores):
        place = len(scores) - sampling.top_k
        ids = np.flatnonzero(_within(scores, np.partition(scores, place)[place], sampling.top_k))
        kept = scores[ids]
    # In place, because for a whole vocabulary allocation takes as long as the computation.
    weights = kept.astype(np.float64)
    weights -= float(scores[best])
    with np.errstate(over="ignore"):  # overflows at the smallest temperatures, where only the best token remains
        weights /= sampling.temperature
    np.exp(weights, out=weights)
    if sampling.min_p > 0:
        # Limited to 1, so that the best token always remains.
        weights *= weights >= min(sampling.min_p, 1.0)
    if sampling.top_p < 1:
        weights *= _heaviest(weights, sampling.top_p)
    return ids, weights


def _heaviest(weights: NDArray[np.float64], share: float) -> NDArray[np.bool_]:
    """Mask of the smallest set of entries with at least `share` of the total weight; at least one entry."""
    total = float(weights.sum())
    # Entries below this bound are not needed, because even all of them together weigh too little. They are removed
    # before sorting only if few remain; otherwise the removal would take longer than sorting everything.
    needed = weights >= max(0.0, 1 - share) * total / len(weights)
    ordered = np.sort(weights[needed] if np.count_nonzero(needed) * 8 < len(weights) else weights)
    descending = np.ascontiguousarray(ordered[::-1])
    count = min(_reached(descending, share * total, "left") + 1, len(descending))
    return _within(weights, descending[count - 1], count)


def _within(values: NDArray[np.float32] | NDArray[np.float64], border: np.floating, count: int) -> NDArray[np.bool_]:
    """Mask of the `count` largest entries, of which `border` is the smallest; among equal entries the first ones."""
    chosen = values >= border
    surplus = int(np.count_nonzero(chosen)) - count
    if surplus > 0:
        chosen[np.flatnonzero(values == border)[-surplus:]] = False
    return chosen


def _drawn(weights: NDArray[np.float64], draw: float) -> int:
    """The entry in which `draw` falls if weights are laid end to end; never an entry with weight 0."""
    place = _reached(weights, draw * float(weights.sum()), "right")
    if place < len(weights) and weights[place] > 0:
        return place
    # Rounding: summed in another order, the total can be a little larger than here.
    return int(np.flatnonzero(weights[: place + 1])[-1])


def _reached(values: NDArray[np.float64], target: float, side: Literal["left", "right"]) -> int:
    """Index of the first entry at which the running sum reaches `target` (`right`: exceeds it); the length if none."""
    # Find the block first: a running sum over a hundred thousand numbers would take the most time.
    starts = np.arange(0, len(values), _BLOCK)
    ends = np.cumsum(np.add.reduceat(values, starts))
    block = int(np.searchsorted(ends, target, side))
    if block == len(ends):
        return len(values)
    before = ends[block - 1] if block else 0.0
    inside = values[block * _BLOCK : (block + 1) * _BLOCK]
    place = int(np.searchsorted(np.cumsum(inside), target - before, side))
    return block * _BLOCK + min(place, len(inside) - 1)
