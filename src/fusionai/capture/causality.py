"""Test whether a captured language model is causal, by running a small copy of it.

If a graph's attention is not recognised, the graph does not show which positions a position sees. So the same
configuration with few layers and a small vocabulary runs on two texts that differ after some position; the logits
before it must not change. Neighbours: `client.serving.model` asks before it serves such a model; `backends.torch` runs
the copy.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from fusionai.backends.interface import Call
from fusionai.backends.tolerance import numbers
from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import Captured, capture
from fusionai.capture.shrinking import reduced
from fusionai.capture.source import ConfigSource
from fusionai.ir.serving import LOGITS
from fusionai.primitives.errors import FusionError, ModelError
from fusionai.primitives.tensors import host_tensor
from fusionai.wire.messages import StageOptions

LAYERS: Final = 4
"""Layers of the copy. Hybrid models repeat their pattern of layers after about this many."""
TOKENS: Final = 24
"""Length of each text (chosen)."""
SEEN: Final = 15
"""Positions at the start that both texts share."""
LIMIT: Final = 1e-4
"""Smallest change of a logit that counts as a change, relative to the largest logit (chosen)."""


def require_causal(captured: Captured) -> None:
    """Raise `ModelError` unless a position's logits depend only on the tokens up to it."""
    name, source = captured.graph.name, captured.source.built.huggingface
    if captured.config is None or source is None:
        raise ModelError(f"{name} has no configuration, so a small copy to test whether it is causal can't be made.")
    try:
        small = capture(
            ConfigSource(reduced(captured.config, LAYERS), source.architecture),
            batch=(1, 2),
            sequence=(1, TOKENS),
            train=False,
        )
    except FusionError as error:
        raise ModelError(f"no small copy of {name} to test whether it is causal: {error.message}") from error
    first = np.arange(TOKENS) % 7 + 3
    second = np.where(np.arange(TOKENS) < SEEN, first, first + 11)
    before, after = _logits(small, first), _logits(small, second)
    moved = np.abs(before - after).max(axis=-1)
    largest = float(np.abs(before).max())
    if moved[:SEEN].max() > LIMIT * largest:
        raise ModelError(
            f"{name} is not causal: later tokens change the logits of a position.",
            hint="Serve a causal language model.",
        )
    if moved[SEEN:].max() <= LIMIT * largest:
        raise ModelError(f"{name}: different tokens give the same logits, so the test of causality is inconclusive.")


def _logits(captured: Captured, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the logits, [positions, vocabulary]."""
    program = TorchBackend("cpu").load(captured.graph, grad_inputs=(), options=StageOptions())
    program.initialise()
    program.import_state((f"model/{key}", tensor) for key, tensor in captured.state(captured.owed))
    given = {"input_ids": tokens, "position_ids": np.arange(TOKENS), "labels": np.zeros_like(tokens)}
    inputs = {
        name: host_tensor("int64", (1, TOKENS), given[name].astype(np.int64).tobytes())
        for name in captured.graph.inputs
        if name in given
    }
    return numbers(program.forward(Call("eval", step=0, microbatch=0), inputs, [LOGITS])[LOGITS])[0]
