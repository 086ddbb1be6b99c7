"""Log-probabilities of tokens under the model's own distribution, and which other tokens are reported with them.

Neighbours: the engine calls it with the logits that `sampling` chose from, before sampling options change them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fusionai.serving.interface import TokenLogprob


def token_logprob(logits: NDArray[np.float32], token: int, top: int) -> TokenLogprob:
    """Log-probability of `token` and of the `top` best tokens, best first, ties by the smaller id. `logits`:
    [vocabulary].

    Sums in float64. A token that the model rules out has -inf.
    """
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
    # All tokens as good as the last one, because the order of equals in a partition is arbitrary.
    ids = np.flatnonzero(logits >= border)
    return ids[np.argsort(-logits[ids], kind="stable")][:count].tolist()
