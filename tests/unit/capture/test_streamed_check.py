"""Modules too large for memory are compared with their graphs all the same, parameters in a file.

The limit is an argument, so that small modules go that way here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusionai.capture.capture import Captured, capture
from fusionai.capture.self_check import SelfCheck, self_check
from fusionai.capture.source import FactorySource
from fusionai.ir.schema import Node
from fusionai.primitives.errors import ModelError


class Square(torch.autograd.Function):
    """A gradient of its own, the one that is derived."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0]


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gate = nn.Parameter(torch.full((width,), 0.1))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = self.norm(x)
        split = [made(read).unflatten(-1, (2, -1)).transpose(1, 2) for made in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*split, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.drop(mixed)
        noisy = x + 0.1 if self.training else x
        return x + self.drop(self.down(F.gelu(self.up(noisy)))) + self.gate * Square.apply(x)


class Model(nn.Module):
    """Tied embeddings, several equal layers, dropout, a gradient of its own, another branch in evaluation."""

    def __init__(self, width: int = 16, layers: int = 3, vocabulary: int = 37) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def model() -> Captured:
    return capture(FactorySource(Model), sequence=(1, 16))


def streamed(captured: Captured) -> SelfCheck:
    return self_check(captured, memory_bytes=0)


def changed(captured: Captured, change: Callable[[Node], Node]) -> Captured:
    nodes = tuple(map(change, captured.graph.nodes))
    return dataclasses.replace(captured, graph=msgspec.structs.replace(captured.graph, nodes=nodes))


def test_a_module_is_compared_with_its_parameters_in_a_file(model: Captured) -> None:
    result = streamed(model)
    assert (result.streamed, result.reduced, result.parameters) == (True, False, model.n_parameters)
    assert (result.forward_diff, result.gradient_diff, result.evaluation_diff) == (0.0, 0.0, 0.0)
    assert not result.notes


def test_in_memory_the_same_is_found(model: Captured) -> None:
    result = self_check(model)
    assert not result.streamed
    assert (result.forward_diff, result.gradient_diff, result.evaluation_diff) == (0.0, 0.0, 0.0)


def _other_scale(node: Node) -> Node:
    if node.op == "fusion.attention" and node.path.startswith("layers.1"):
        return msgspec.structs.replace(node, kwargs={**node.kwargs, "scale": 1.0})
    return node


def _other_activation(node: Node) -> Node:
    return msgspec.structs.replace(node, kwargs={"approximate": "tanh"}) if node.op == "aten.gelu.default" else node


def _always_training(node: Node) -> Node:
    if node.op != "fusion.in_training":
        return node
    return msgspec.structs.replace(node, op="aten.alias.default", args=node.args[:1])


@pytest.mark.parametrize("change", [_other_scale, _other_activation, _always_training])
def test_a_wrong_operator_is_found(model: Captured, change: Callable[[Node], Node]) -> None:
    with pytest.raises(ModelError, match="differs from the module"):
        streamed(changed(model, change))
