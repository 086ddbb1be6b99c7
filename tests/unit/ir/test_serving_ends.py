from __future__ import annotations

import pytest
import torch
from torch import nn

from fusionai.capture.capture import capture
from fusionai.capture.models.source import FactorySource
from fusionai.ir.partition import ends
from fusionai.ir.serving import serving_graph
from fusionai.primitives.errors import GraphError
from harness.small_llama import captured_llama

pytestmark = pytest.mark.slow


def test_ends_of_a_language_model() -> None:
    graph = captured_llama().graph
    training = "loss" in graph.outputs
    blocks = 1 + max(node.block for node in graph.nodes)
    first, last = ends(graph, training=training)
    assert (first, last) == (1, 2 if training else 1)
    assert ends(graph, first_layers=1, training=training) == (2, last)
    with pytest.raises(GraphError, match="nothing is left for the pool"):
        ends(graph, first_layers=blocks, training=training)
    assert ends(serving_graph(graph), training=False) == (1, 1)


class Reader(nn.Module):
    """Its layers look at the input again, as a decoder with its own embedding does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        for layer in self.layers:
            y = torch.relu(layer(y)) * x
        return self.last(y)


def test_a_model_whose_layers_read_the_data_is_refused() -> None:
    source = FactorySource(lambda: (Reader(), {"x": torch.zeros(2, 4)}), "Reader")
    graph = capture(source, task="classification", batch=(1, 4)).graph
    with pytest.raises(GraphError, match="layers between the model's ends read x of the job's data"):
        ends(graph)
