"""Trace PyTorch's recurrent layers (`nn.LSTM`, `nn.GRU`, `nn.RNN`) step by step, with dropout between stacked layers.

PyTorch's own decomposition computes the steps of one layer at a time. It is not used for a whole stack, because it
omits the dropout between layers, so the graph would train a different model.

Neighbours: `capture.export` replaces PyTorch's operators by these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._C import DispatchKey


def recurrent_layers() -> dict[Any, Callable[..., Any]]:
    """Return operator -> its steps, which fix the length of the sequence."""
    aten = torch.ops.aten
    packets = (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu)
    steps = {packet.input: packet.input.py_kernels[DispatchKey.CompositeImplicitAutograd] for packet in packets}
    return {op: partial(_stacked, kernel) for op, kernel in steps.items()}


def _stacked(
    kernel: Callable[..., Any],
    x: torch.Tensor,
    states: torch.Tensor | Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """Return what the operator returns: the last layer's outputs, then the last states. `states`: of all layers,
    [layers * directions, batch, width]; the LSTM has two."""
    if layers == 1 or dropout == 0 or not training:
        return kernel(x, states, parameters, biases, layers, 0.0, training, bidirectional, batch_first)
    directions, per_layer = 2 if bidirectional else 1, len(parameters) // layers
    x = x.transpose(0, 1) if batch_first else x
    last: list[Sequence[torch.Tensor]] = []
    for layer in range(layers):
        if layer:
            x = torch.ops.aten.dropout.default(x, dropout, True)
        start = layer * directions
        if isinstance(states, torch.Tensor):
            own: Any = states[start : start + directions]
        else:
            own = [state[start : start + directions] for state in states]
        weights = parameters[layer * per_layer : (layer + 1) * per_layer]
        x, *left = kernel(x, own, weights, biases, 1, 0.0, training, bidirectional, False)
        last.append(left)
    return (x.transpose(0, 1) if batch_first else x, *(torch.cat(kind) for kind in zip(*last, strict=True)))
