"""Random numbers in a forward: the same in every run and at every cut, and none where evaluation draws none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusionai.backends.interface import Call
from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import Captured, capture
from fusionai.capture.checking.comparison import from_host
from fusionai.capture.checking.self_check import reference_module, self_check
from fusionai.capture.models.source import FactorySource
from fusionai.capture.models.state import to_host
from fusionai.capture.tracing.draws import draws
from fusionai.wire.messages import StageOptions
from harness.cut_training import Problem, Stages, cuts, plain_gradients

pytestmark = pytest.mark.slow

ATEN = torch.ops.aten
Body = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Noise(nn.Module):
    """As many write it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.randn_like(x) if self.training else x


class DropPath(nn.Module):
    """As timm has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        return x * x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.6).div_(0.6)


class Noisy(nn.Module):
    """A leaf with parameters of its own (arXiv 1706.10295)."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.full((4, 4), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.mean + self.spread * torch.randn(4, 4) if self.training else self.mean
        return torch.einsum("bcij,dc->bdij", x, weight)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "noise": Noise,
    "stochastic depth": DropPath,
    "noisy weights": Noisy,
    "Dropout2d": lambda: nn.Dropout2d(0.4),
    "AlphaDropout": lambda: nn.AlphaDropout(0.3),
    "FeatureAlphaDropout": lambda: nn.FeatureAlphaDropout(0.3),
}
IN_EVERY_MODE: dict[str, Body] = {
    "rand": lambda _, x: x * torch.rand(x.shape[0], 1, 1, 1),
    "normal": lambda _, x: x + torch.normal(x, 0.5),
    "uniform_": lambda _, x: x + torch.empty_like(x).uniform_(-1, 2),
    "exponential_": lambda _, x: x + torch.empty_like(x).exponential_(2.0),
    "gumbel": lambda _, x: F.gumbel_softmax(x, dim=1, hard=True),
    "randint": lambda _, x: x * torch.randint(-2, 3, x.shape),
    "randperm": lambda _, x: x[:, torch.randperm(4)],
    "multinomial": lambda _, x: x * torch.multinomial(x.flatten(1).softmax(-1), 1)[:, :, None, None],
}


SAMPLE = {"noise", "stochastic depth", "rand", "gumbel"}
"""One of every kind. `make test-long` runs the others, which vary these."""


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.long) for name in names]


class Net(nn.Module):
    def __init__(self, inner: nn.Module | Body) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)
        self.dropout = nn.Dropout(0.2)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.dropout(torch.tanh(self.first(x)))
        x = self.inner(x) if isinstance(self.inner, nn.Module) else self.inner(self, x)
        return {"loss": self.last(self.dropout(x)).square().mean()}


@cache
def captured_of(name: str) -> Captured:
    def made() -> nn.Module:
        return Net(MODULES[name]() if name in MODULES else IN_EVERY_MODE[name])

    generator = torch.Generator().manual_seed(2)
    example = {"x": torch.randn(4, 3, 5, 6, generator=generator)}
    return capture(FactorySource(made), task="module_loss", batch=(1, 8), seed=5, example_inputs=example)


@pytest.mark.parametrize("name", marked((*MODULES, *IN_EVERY_MODE)))
def test_draws_are_the_same_at_every_cut(name: str) -> None:
    """Losses and gradients have the bits of the module that draws the same numbers, in one process and in stages."""
    captured = captured_of(name)
    assert any(node.op == "fusion.uniform" for node in captured.graph.nodes)
    assert self_check(captured).gradient_diff == 0.0
    generator = torch.Generator().manual_seed(3)
    problem = Problem(captured, tuple({"x": torch.randn(4, 3, 5, 6, generator=generator)} for _ in range(2)))
    losses, gradients = plain_gradients(problem)
    assert len(set(losses)) == 2
    for stages in (1, 2):
        for _, partition in cuts(captured.graph, stages, scattered=1):
            found_losses, found = Stages(problem, partition, [TorchBackend("cpu", threads=1)]).step()
            assert found_losses == losses
            assert found.keys() == gradients.keys()
            assert all(torch.equal(found[key], gradient) for key, gradient in gradients.items())


@pytest.mark.parametrize("name", marked(MODULES))
def test_evaluation_is_the_modules_own(name: str) -> None:
    captured = captured_of(name)
    assert not [note for note in captured.notes if "evaluation" in note]
    x = torch.randn(3, 3, 5, 6, generator=torch.Generator().manual_seed(4))
    program = TorchBackend("cpu").load(captured.graph, grad_inputs=(), options=StageOptions(seed=5))
    program.initialise()
    program.import_state((f"model/{key}", tensor) for key, tensor in captured.state(captured.owed))
    found = from_host(program.forward(Call("eval", 0, 0), {"x": to_host(x)})["loss"], torch.float32)
    with torch.no_grad():
        assert torch.equal(found, reference_module(captured, 5).eval()(x)["loss"])


def test_draws_of_evaluation_are_told() -> None:
    captured = captured_of("rand")
    assert [note for note in captured.notes if "in evaluation" in note]


def test_distributions() -> None:
    """Of 200,000 draws, moments within five standard errors, and no draw outside of what torch draws."""
    generator = torch.Generator().manual_seed(0)
    table = draws(lambda like: torch.rand(like.shape, dtype=like.dtype, generator=generator))
    count = 200_000
    x = torch.zeros(count)

    def near(found: torch.Tensor, mean: float, std: float) -> None:
        values = found.double()
        assert abs(float(values.mean()) - mean) < 5 * std / math.sqrt(count)
        assert abs(float(values.std()) - std) < 0.02 * std

    near(table[ATEN.rand.default]([count]), 0.5, 12**-0.5)
    near(table[ATEN.randn_like.default](x), 0.0, 1.0)
    near(table[ATEN.normal_functional.default](x, 2.0, 3.0), 2.0, 3.0)
    near(table[ATEN.exponential.default](x, 4.0), 0.25, 0.25)
    near(table[ATEN.bernoulli.p](x, 0.2), 0.2, 0.4)
    near(table[ATEN.uniform.default](x, -1.0, 3.0), 1.0, 4 * 12**-0.5)
    whole = table[ATEN.randint.low](-2, 3, [count])
    near(whole, 0.0, 2**0.5)
    assert (int(whole.min()), int(whole.max())) == (-2, 2)
    assert torch.equal(table[ATEN.randperm.default](50).sort().values, torch.arange(50))
    weights = torch.tensor([0.1, 0.0, 0.6, 0.3]).expand(count, 4)
    for replacement in (False, True):
        chosen = table[ATEN.multinomial.default](weights, 2, replacement)
        assert chosen.shape == (count, 2)
        shares = torch.bincount(chosen[:, 0], minlength=4) / count
        torch.testing.assert_close(shares, weights[0], atol=0.006, rtol=0)
        assert bool((chosen[:, 0] == chosen[:, 1]).any()) == replacement
