"""Stacked recurrent layers drop between the layers as PyTorch's own do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import capture
from fusionai.capture.checking.self_check import self_check
from fusionai.capture.models.source import FactorySource
from harness.cut_training import SEED, Problem, Stages, cuts, plain_gradients

pytestmark = pytest.mark.slow


class _Net(nn.Module):
    def __init__(self, kind: type[nn.GRU | nn.LSTM | nn.RNN], directions: int, *, batch_first: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(16 * directions, 1)
        self.rnn = kind(8, 16, num_layers=2, dropout=0.25, batch_first=batch_first, bidirectional=directions == 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(x)
        made, state = self.rnn(x if self.rnn.batch_first else x.transpose(0, 1))
        first = state[0] if isinstance(state, tuple) else state
        return {"loss": self.last(made).square().mean() + first.square().mean()}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("kind", "directions"), [(nn.GRU, 1), (nn.LSTM, 2), (nn.RNN, 1)])
def test_dropout_between_layers_is_in_the_graph(
    kind: type[nn.GRU | nn.LSTM | nn.RNN], directions: int, batch_first: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    batches = tuple({"x": torch.randn(4, 3, 8, generator=generator)} for _ in range(2))
    source = FactorySource(lambda: _Net(kind, directions, batch_first=batch_first))
    captured = capture(source, task="module_loss", batch=(1, 8), seed=SEED, example_inputs=batches[0])
    assert [node.kwargs["p"] for node in captured.graph.nodes if node.op == "fusion.dropout"] == [0.25]
    self_check(captured)
    # Asserts that the module draws exactly the graph's masks.
    problem = Problem(captured, batches)
    losses, gradients = plain_gradients(problem)
    for stages in (1, 2):
        for _, partition in cuts(captured.graph, stages, scattered=0):
            found_losses, found = Stages(problem, partition, [TorchBackend("cpu", threads=1)]).step()
            assert found_losses == pytest.approx(losses, rel=1e-6)
            # PyTorch's fused steps add a gradient's terms in another order.
            torch.testing.assert_close(found, gradients, rtol=1e-5, atol=1e-7)
