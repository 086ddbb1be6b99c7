"""Whether a captured language model is causal, found out by trying. Decides how small a copy is tried.

A graph whose attention is not recognised says nothing of what a position sees, so the same configuration with few
layers and a small vocabulary is run twice, on texts that differ behind some position: what stands before must not
change. Neighbours: `client.serving_model` asks before it serves such a model; `backends.torch` runs the copy.
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
"""Hybrids repeat after so many."""
TOKENS: Final = 24
SEEN: Final = 15
"""Positions that both texts have in common."""
LIMIT: Final = 1e-4
"""Of the largest logit."""


def require_causal(captured: Captured) -> None:
    """Raise `ModelError` unless a position's logits depend on what stands before it only."""
    name, source = captured.graph.name, captured.source.built.huggingface
    if captured.config is None or source is None:
        raise ModelError(f"{name} has no configuration: whether it is causal can't be tried.")
    try:
        small = capture(
            ConfigSource(reduced(captured.config, LAYERS), source.architecture),
            batch=(1, 2),
            sequence=(1, TOKENS),
            train=False,
        )
    except FusionError as error:
        raise ModelError(f"{name} can't be made small to try whether it is causal: {error.message}") from error
    first = np.arange(TOKENS) % 7 + 3
    second = np.where(np.arange(TOKENS) < SEEN, first, first + 11)
    before, after = _logits(small, first), _logits(small, second)
    moved = np.abs(before - after).max(axis=-1)
    largest = float(np.abs(before).max())
    if moved[:SEEN].max() > LIMIT * largest:
        raise ModelError(
            f"{name} is not causal: what stands behind a position changes its logits.",
            hint="Serve a causal language model.",
        )
    if moved[SEEN:].max() <= LIMIT * largest:
        raise ModelError(f"{name}: other tokens do not change its logits, so nothing can be told from trying.")


def _logits(captured: Captured, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[positions, vocabulary]"""
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
