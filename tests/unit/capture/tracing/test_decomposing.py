"""Replacing operators one by one gives the graph that tracing the whole program gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import ExportedProgram

from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource, FactorySource
from fusionai.capture.tracing import export
from fusionai.ir.schema import encode

pytestmark = pytest.mark.slow
LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


class Net(nn.Module):
    """A layer with parameters on both sides of `between`."""

    def __init__(self, between: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.inner = nn.LSTM(8, 8, batch_first=True)
        self._between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self._between(self, self.first(x))).square().mean()


def _without_gradient(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = net.last(x).mean(-1, keepdim=True).to(torch.float64).reshape(x.shape[0], 5, 1)
    return x * scale.to(x.dtype)


def _in_place(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, 0] = 1.0
    return y.mul_(2.0)


MODULES: dict[str, tuple[Callable[[nn.Module, torch.Tensor], torch.Tensor], bool]] = {
    "composite operators": (lambda _, x: F.cosine_similarity(x, x.exp(), dim=-1)[..., None] + F.gelu(x), False),
    "sizes of results": (lambda _, x: torch.einsum("bsd,btd->bst", x, x.tanh()) @ x, True),
    "a region without gradients": (_without_gradient, True),
    "changes in place": (_in_place, False),
    "an LSTM": (lambda net, x: net.inner(x)[0], False),
    "a whole cross-entropy": (lambda _, x: x + F.cross_entropy(x.flatten(0, 1), x.flatten(0, 1).argmax(-1)), True),
}
"""Name -> (what is between the layers, whether its operators can be replaced one by one)."""


def both(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Captured]) -> tuple[Captured, Captured, int]:
    """Capture with operators replaced one by one, and as a whole; and how many of the first were traced as a whole."""
    traced, run = [0], ExportedProgram.run_decompositions

    def counted(program: ExportedProgram, table: Any) -> ExportedProgram:
        traced[0] += 1
        return run(program, table)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", counted)
    quick, count = make(), traced[0]
    monkeypatch.setattr(export, "decomposed", lambda program, table, mode: program.run_decompositions(dict(table)))
    return quick, make(), count


@pytest.mark.parametrize("name", MODULES)
def test_the_graph_is_that_of_tracing_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    between, is_quick = MODULES[name]
    example = {"x": torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))}

    def make() -> Captured:
        source = FactorySource(lambda: Net(between))
        return capture(source, task="module_loss", batch=(1, 8), example_inputs=example)

    quick, whole, count = both(monkeypatch, make)
    assert encode(quick.graph) == encode(whole.graph)
    assert (count == 0) == is_quick


@pytest.mark.parametrize("trains", [True, False])
def test_a_language_model_is_never_traced_as_a_whole(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make = lambda: capture(ConfigSource(LLAMA), sequence=(1, 16), train=trains)  # noqa: E731
    quick, whole, count = both(monkeypatch, make)
    assert encode(quick.graph) == encode(whole.graph)
    assert count == 0
