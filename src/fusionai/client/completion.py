"""A greedy completion computed across the pool's stages, the whole sequence anew for each token.

Decides the next token: the one with the largest logit, the first of equals, as `generate(do_sample=False)` does. The
sampling role is the job owner's: logits come to it, token ids leave only to the first stage.

Neighbours: `training.driver` runs the stages; serving with caches is another package's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.training.driver import Driver


@dataclass(frozen=True, slots=True)
class Completion:
    """`logits`: of the first new token, float32 values."""

    tokens: tuple[int, ...]
    logits: tuple[float, ...]


async def greedy(driver: Driver, prompt: Sequence[int], new_tokens: int, *, end_id: int | None) -> Completion:
    """At most `new_tokens` tokens after `prompt`; ends after `end_id`."""
    tokens = list(prompt)
    first: tuple[float, ...] = ()
    while len(tokens) - len(prompt) < new_tokens:
        length = len(tokens)
        outputs = await driver.infer({"input_ids": _row(tokens), "position_ids": _row(range(length))})
        logits = outputs["logits"]
        scores = np.frombuffer(logits.data, np.float32).reshape(logits.shape)
        first = first or tuple(scores[0, -1].tolist())
        tokens.append(int(scores[0, -1].argmax()))
        if tokens[-1] == end_id:
            break
    return Completion(tuple(tokens[len(prompt) :]), first)


def _row(values: Sequence[int]) -> HostTensor:
    return host_tensor("int64", (1, len(values)), np.asarray(values, dtype=np.int64).tobytes())
