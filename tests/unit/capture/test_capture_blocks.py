"""Modules that a small Sequential, or no container at all, must not make one block of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fusionai.capture.capture import capture
from fusionai.capture.models.source import FactorySource
from fusionai.ir.graph import cheap_nodes
from fusionai.ir.partition import cut_blocks
from fusionai.ir.schema import Graph

pytestmark = pytest.mark.slow


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.relu(self.a(self.norm(x))))


class Named(nn.Module):
    """No container but a small head."""

    def __init__(self, head: bool) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = Gate(), Gate(), Gate(), Gate()
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)) if head else nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.four(self.three(self.two(self.one(x)))))


class Stem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.layers = nn.ModuleList(Gate() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Functional(nn.Module):
    """Weights of its own and no submodule but a small head."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(8, 8)) for _ in range(8))
        self.head = nn.Sequential(nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight) + x
        return self.head(x)


def nested() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(*(Gate() for _ in range(4))), nn.Linear(8, 2))


def convolutions() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(4)))


@pytest.mark.parametrize(
    ("factory", "shape"),
    [
        (lambda: Named(head=True), (2, 8)),
        (lambda: Named(head=False), (2, 8)),
        (Stem, (2, 8)),
        (Functional, (2, 8)),
        (nested, (2, 8)),
        (convolutions, (2, 8, 4)),
    ],
    ids=["small head", "no container", "stem and layers", "functional", "nested", "convolutions"],
)
def test_no_block_holds_most_of_a_module(factory: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    name = "x" if not isinstance(factory(), nn.Sequential) else "input"
    made = capture(FactorySource(factory), task="none", batch=(1, 8), example_inputs={name: torch.zeros(shape)})
    sizes = _sizes(made.graph)
    assert len(sizes) >= 4, sizes
    assert max(sizes) <= sum(sizes) / 2, sizes
    assert len(cut_blocks(made.graph, [(block, block + 1) for block in range(len(sizes))]).stages) == len(sizes)


def _sizes(graph: Graph) -> list[int]:
    cheap = cheap_nodes(graph)
    counted = Counter(node.block for node in graph.nodes if node.id not in cheap)
    return [counted[block] for block in range(1 + max(counted))]
