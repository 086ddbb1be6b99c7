"""Modules that compute otherwise in evaluation: the graph does both, or says that it does not."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

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
from fusionai.wire.messages import StageOptions

pytestmark = pytest.mark.slow

SEED = 3


class _Net(nn.Module):
    """`branch`: what is done between two layers, with the module itself at hand."""

    def __init__(self, branch: Callable[[_Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.25)
        self.branch = branch

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.branch(self, torch.relu(self.first(x)))
        return {"loss": self.last(self.drop(self.norm(x))).square().mean()}


def _noise(net: _Net, x: torch.Tensor) -> torch.Tensor:
    if net.training:
        x = x + 0.5 * torch.randn_like(x)
    return net.middle(x)


def _scaled_draw(net: _Net, x: torch.Tensor) -> torch.Tensor:
    kept = torch.rand(x.shape[0], 1) + (0.5 if net.training else 1.0)
    return net.middle(x * kept.floor())


def _other_layer(net: _Net, x: torch.Tensor) -> torch.Tensor:
    return net.middle(x) if net.training else x * 3


def _evaluation_alone(net: _Net, x: torch.Tensor) -> torch.Tensor:
    return x * 3 if net.training else net.middle(x) * torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])


def _another_constant(net: _Net, x: torch.Tensor) -> torch.Tensor:
    return net.middle(x) * torch.tensor([0.5] if net.training else [2.0])


def _twice(net: _Net, x: torch.Tensor) -> torch.Tensor:
    """What evaluation changes is also read as it is."""
    shared = torch.tanh(net.middle(x))
    return (shared * 2 if net.training else shared) + shared.exp()


def _normalised(net: _Net, x: torch.Tensor) -> torch.Tensor:
    """The statistics are read behind the branch, too."""
    return net.norm(x + 1 if net.training else x)


def _sampled(net: _Net, x: torch.Tensor) -> torch.Tensor:
    """The latent of a variational autoencoder."""
    mean, log_variance = net.middle(x).chunk(2, -1)
    sampled = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance) if net.training else mean
    return F.pad(sampled, (0, 4))


BRANCHES = {
    branch.__name__: branch
    for branch in (
        _noise, _scaled_draw, _other_layer, _evaluation_alone, _another_constant, _twice, _normalised, _sampled
    )
}  # fmt: skip


@cache
def _captured(branch: Callable[[_Net, torch.Tensor], torch.Tensor]) -> Captured:
    examples = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(1))}
    return capture(
        FactorySource(lambda: _Net(branch)), task="module_loss", batch=(1, 8), seed=SEED, example_inputs=examples
    )


SAMPLE = {"_noise", "_evaluation_alone", "_normalised"}
"""A draw, a layer and a statistic on one side of the branch. `make test-long` runs the others, which vary these."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.long) for name in BRANCHES]
)
def test_a_branch_on_the_mode_is_taken_by_the_mode(name: str) -> None:
    captured = _captured(BRANCHES[name])
    assert captured.evaluates
    check = self_check(captured)
    assert (check.forward_diff, check.gradient_diff, check.evaluation_diff) == (0.0, 0.0, 0.0)


def test_only_the_branch_is_traced_twice() -> None:
    def operators(branch: Callable[[_Net, torch.Tensor], torch.Tensor]) -> list[str]:
        return [node.op for node in _captured(branch).graph.nodes]

    with_branch, without = operators(_noise), operators(lambda net, x: net.middle(x))
    for op in ("aten.linear.default", "fusion.dropout", "aten._native_batch_norm_legit_functional.default"):
        assert with_branch.count(op) == without.count(op)
    assert with_branch.count("fusion.in_training") == 1


def test_a_module_that_only_hands_its_mode_to_dropout_has_no_choice() -> None:
    captured = _captured(lambda net, x: F.dropout(net.middle(x), 0.5, net.training))
    assert all(node.op != "fusion.in_training" for node in captured.graph.nodes)
    assert self_check(captured).evaluation_diff == 0.0


def test_evaluation_of_another_shape_is_said_with_class_and_line() -> None:
    captured = _captured(lambda net, x: net.middle(x) if net.training else net.middle(x)[:, :1].expand(-1, 8).cumsum(1))
    assert captured.evaluates

    def pooled(net: _Net, x: torch.Tensor) -> torch.Tensor:
        if not net.training and x.sum() > 0:
            return x
        return net.middle(x)

    captured = _captured(pooled)
    assert not captured.evaluates
    (note,) = [note for note in captured.notes if note.startswith("Evaluation computes as training does")]
    assert "_Net at test_by_mode.py" in note
    assert "if not net.training and x.sum() > 0" in note
    assert self_check(captured).evaluation_diff is None


def test_gradients_and_evaluation_follow_the_module_while_it_trains() -> None:
    captured = _captured(_other_layer)
    program = TorchBackend("cpu", threads=1).load(captured.graph, grad_inputs=(), options=StageOptions(seed=SEED))
    program.initialise()
    program.import_state((f"model/{key}", tensor) for key, tensor in captured.state(captured.owed))
    module = reference_module(captured, SEED)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted = module.eval()(x)["loss"]
    found = program.forward(Call("eval", 0, 0), {"x": to_host(x)})["loss"]
    assert torch.equal(from_host(found, torch.float32), wanted)
