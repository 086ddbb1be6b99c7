"""Log-probabilities of tokens, of the distribution as the model gave it. Decides which of the others are told.

Neighbours: the engine calls it with the logits `sampling` chose from, before anything changed them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fusionai.serving.interface import TokenLogprob


def token_logprob(logits: NDArray[np.float32], token: int, top: int) -> TokenLogprob:
    """Of `token` and the `top` best ones, best first, ties by the smaller id. `logits`: [vocabulary].

    Sums in float64. The value of a token the model rules out is -inf."""
    best = float(logits.max())
    weights = logits.astype(np.float64)
    weights -= best
    np.exp(weights, out=weights)
    level = best + float(np.log(weights.sum()))
    ids = _best(logits, min(top, len(logits)))
    return TokenLogprob(token, float(logits[token]) - level, tuple((n, float(logits[n]) - level) for n in ids))


def _best(logits: NDArray[np.float32], count: int) -> list[int]:
    if count <= 0:
        return []
    place = len(logits) - count
    border = np.partition(logits, place)[place]
    # All that are as good as the last one: which of them the partition put first says nothing.
    ids = np.flatnonzero(logits >= border)
    return ids[np.argsort(-logits[ids], kind="stable")][:count].tolist()
