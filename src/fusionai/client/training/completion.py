"""A greedy completion across the stages of a training job. It recomputes the whole sequence for each token.

The next token is that with the largest logit, the first of equal ones, as in `generate(do_sample=False)`. The job owner
samples: logits come to it, and token ids go only to the first stage. `training.driver` runs the stages; generation with
KV caches is in `serving`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.training.driver import Driver


@dataclass(frozen=True, slots=True)
class Completion:
    """New token ids, and the float32 logits of the first new token."""

    tokens: tuple[int, ...]
    logits: tuple[float, ...]


async def greedy(driver: Driver, prompt: Sequence[int], new_tokens: int, *, end_id: int | None) -> Completion:
    """Return at most `new_tokens` tokens after `prompt`, ending after `end_id`."""
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
