"""A greedy completion computed across the pool's stages, the whole sequence anew for each token.

Decides the next token: the one with the largest logit, the first of equals, as `generate(do_sample=False)` does. The
sampling role is the job owner's: logits come to it, token ids leave only to the first stage.

Neighbours: `training.driver` runs the stages; serving with caches is another package's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.training.driver import Driver


async def greedy(driver: Driver, prompt: Sequence[int], new_tokens: int, *, end_id: int | None) -> tuple[int, ...]:
    """At most `new_tokens` tokens after `prompt`; ends after `end_id`."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < new_tokens:
        length = len(tokens)
        outputs = await driver.infer({"input_ids": _row(tokens), "position_ids": _row(range(length))})
        logits = outputs["logits"]
        scores = np.frombuffer(logits.data, np.float32).reshape(logits.shape)
        tokens.append(int(scores[0, -1].argmax()))
        if tokens[-1] == end_id:
            break
    return tuple(tokens[len(prompt) :])


def _row(values: Sequence[int]) -> HostTensor:
    return host_tensor("int64", (1, len(values)), np.asarray(values, dtype=np.int64).tobytes())
