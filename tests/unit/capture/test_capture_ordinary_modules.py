"""Modules as people write them: captured, and trained in stages with the bits of plain PyTorch.

Each stands between two layers with parameters, so that gradients go through it and a cut falls before and behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import MultivariateNormal, Normal, kl_divergence
from torch.nn.utils import parametrizations

from fusionai.backends.interface import Call
from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import Captured, capture
from fusionai.capture.checking.comparison import from_host
from fusionai.capture.checking.self_check import reference_module, self_check
from fusionai.capture.models.source import FactorySource
from fusionai.capture.models.state import to_host
from fusionai.wire.messages import OptimizerSpec, StageOptions
from harness.cut_training import SEED, Problem, Stages, cuts, plain_gradients
from harness.variants import all_but

pytestmark = pytest.mark.slow

Body = Callable[[nn.Module, torch.Tensor], torch.Tensor]
FLAT, ROWS, IMAGE, VOLUME = (4, 8), (4, 5, 8), (2, 4, 8, 8), (2, 4, 6, 6, 6)


@dataclass(frozen=True)
class Ordinary:
    """`make`: the module in the middle, or what is done there. `shape`: of its input."""

    make: Callable[[], nn.Module] | None
    shape: tuple[int, ...]
    body: Body = lambda inner, x: inner(x)


def does(body: Body, shape: tuple[int, ...] = FLAT) -> Ordinary:
    return Ordinary(None, shape, body)


class Net(nn.Module):
    def __init__(self, ordinary: Ordinary) -> None:
        super().__init__()
        width = ordinary.shape[1]
        self.first = nn.Linear(width, width)
        self.inner = nn.Identity() if ordinary.make is None else ordinary.make()
        self.last = nn.Linear(1, 3)
        self.body = ordinary.body

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(x.movedim(1, -1)).movedim(-1, 1)
        made = self.body(self.inner, x)
        return {"loss": self.last(made.reshape(-1, 1)).square().mean()}


def _tables(kind: str) -> Ordinary:
    """Bags of rows, whose numbers an input chooses."""
    return Ordinary(
        lambda: nn.EmbeddingBag(11, 6, mode=kind),
        FLAT,
        lambda inner, x: inner((x.detach().abs() * 3).long().clamp(max=10)) * x[:, :1],
    )


def _twice(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return inner(torch.relu(inner(x)))


def _put(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    x[:, torch.tensor([0, 2])] = 0.5
    x[x > 1] = 1.0
    return x


def _gathered(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    order = x.detach().argsort(-1)
    return torch.zeros_like(x).scatter(1, order, x.gather(1, order)) + x.scatter_add(1, order, x).cumprod(1)


def _variational(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    mean, log_variance = x.chunk(2, -1)
    latent = Normal(mean, (0.5 * log_variance).exp())
    prior = Normal(torch.zeros_like(mean), torch.ones_like(mean))
    return latent.rsample().tanh() + latent.log_prob(mean.tanh()) + kl_divergence(latent, prior)


def _per_row(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Losses of each row, weighted by another value of the row."""
    labels = (x.detach()[:, 0] > 0).long()
    weight = torch.tensor([1.0, 2.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0])
    likelihood = F.nll_loss(x.log_softmax(-1), labels, weight=weight, reduction="none", ignore_index=7)
    return likelihood * x[:, 1] + F.cross_entropy(x, labels, reduction="none").view(x.shape[0])


def _masked(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """By a buffer, by a constant and by a literal of true and false."""
    seen = torch.tril(torch.ones(5, 5, dtype=torch.bool))
    assert isinstance(inner.mask, torch.Tensor)
    scores = torch.where(seen, x @ x.transpose(1, 2), -1e9).masked_fill(~inner.mask[:, : x.shape[1]], float("-inf"))
    kept = torch.tensor([True, False, True, True, False])
    return scores.softmax(-1).masked_fill(kept & ~seen, 0.25) @ x


def _mask() -> nn.Module:
    module = nn.Module()
    module.register_buffer("mask", torch.ones(1, 5, 5, dtype=torch.bool).tril(2))
    return module


def _statement(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A module that writes in place, called for nothing else."""
    x = x * 1
    inner(x)
    return x


def _warped(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    grid = F.affine_grid(inner(x.flatten(1)).view(-1, 2, 3), list(x.shape), align_corners=False)
    ends = F.affine_grid(inner(x.flatten(1)).view(-1, 2, 3), [x.shape[0], 1, 3, 5], align_corners=True)
    return torch.cat([F.grid_sample(x, at, align_corners=False).flatten(1) for at in (grid, ends)], 1)


def _warped_volume(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    grid = F.affine_grid(inner(x.flatten(1)).view(-1, 3, 4), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def _chosen(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Pairs of features, each once, and values at places that an input chooses."""
    rows, columns = torch.tril_indices(8, 8, -1)
    pairs = (x[:, :, None] * x[:, None, :].tanh())[:, rows, columns]
    places = x.detach().argsort(1)
    return torch.cat([pairs, torch.take_along_dim(x, places[:, :3], 1), x.take_along_dim(places, dim=-1)], 1)


def _statistics(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    deviation, mean = torch.std_mean(x, -1)
    low, high = torch.aminmax(x, dim=1)
    along = deviation * mean + x.var(-1) + x.median(-1).values
    return torch.cat([along, low - high + x.kthvalue(2, 1).values * x.prod(1)], 1)


MODULES: dict[str, Ordinary] = {
    "Bilinear": Ordinary(lambda: nn.Bilinear(8, 8, 5), FLAT, lambda inner, x: inner(x, x.tanh())),
    "GLU": Ordinary(lambda: nn.GLU(), FLAT),
    "PReLU, CELU, SELU": Ordinary(lambda: nn.Sequential(nn.PReLU(8), nn.CELU(0.7), nn.SELU()), FLAT),
    # Widths of whole vectors: PyTorch's own cells write in place, row by row, and take what is over singly.
    "LSTMCell": Ordinary(lambda: nn.LSTMCell(8, 64), FLAT, lambda inner, x: torch.cat(inner(x), -1)),
    "GRUCell": Ordinary(lambda: nn.GRUCell(8, 64), FLAT, lambda inner, x: inner(x, x.tanh().repeat(1, 8))),
    "GRU": Ordinary(lambda: nn.GRU(8, 64, batch_first=True), ROWS, lambda inner, x: inner(x)[0]),
    "Conv1d, transposed": Ordinary(lambda: nn.ConvTranspose1d(5, 3, 3, stride=2), ROWS),
    "Conv3d": Ordinary(lambda: nn.Sequential(nn.Conv3d(4, 3, 3), nn.MaxPool3d(2), nn.AvgPool3d(2)), VOLUME),
    "ConvTranspose3d": Ordinary(lambda: nn.ConvTranspose3d(4, 2, 2, stride=2), VOLUME),
    "InstanceNorm2d": Ordinary(lambda: nn.InstanceNorm2d(4, affine=True), IMAGE),
    "LocalResponseNorm": Ordinary(lambda: nn.LocalResponseNorm(3), IMAGE),
    "AdaptiveMaxPool2d": Ordinary(lambda: nn.AdaptiveMaxPool2d(3), IMAGE),
    "MaxUnpool2d": does(lambda _, x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), [2, 2]), IMAGE),
    "Unfold, Fold": Ordinary(lambda: nn.Sequential(nn.Unfold(2), nn.Fold(8, 2, padding=0)), IMAGE),
    "PixelShuffle": Ordinary(lambda: nn.Sequential(nn.PixelShuffle(2), nn.PixelUnshuffle(4)), IMAGE),
    "ChannelShuffle": Ordinary(lambda: nn.ChannelShuffle(2), IMAGE),
    "grid_sample": does(lambda _, x: F.grid_sample(x, x[:, :2].tanh().movedim(1, -1), align_corners=False), IMAGE),
    "MultiheadAttention": Ordinary(lambda: nn.MultiheadAttention(8, 2), ROWS, lambda inner, x: inner(x, x, x)[0]),
    "EmbeddingBag sum": _tables("sum"),
    "EmbeddingBag mean": _tables("mean"),
    "EmbeddingBag max": _tables("max"),
    "sparse Embedding": Ordinary(
        lambda: nn.Embedding(4, 6, sparse=True), FLAT, lambda inner, x: inner((x > 0).long()).sum(1) * x[:, :1]
    ),
    "spectral_norm": Ordinary(lambda: parametrizations.spectral_norm(nn.Linear(8, 5)), FLAT),
    "spectral_norm of a convolution": Ordinary(lambda: parametrizations.spectral_norm(nn.Conv2d(4, 3, 3)), IMAGE),
    "spectral_norm by a hook": Ordinary(lambda: nn.utils.spectral_norm(nn.Linear(8, 5)), FLAT),
    "weight_norm": Ordinary(lambda: parametrizations.weight_norm(nn.Linear(8, 5)), FLAT),
    "BatchNorm2d twice": Ordinary(lambda: nn.BatchNorm2d(4), IMAGE, _twice),
    "BatchNorm2d, cumulative average": Ordinary(lambda: nn.BatchNorm2d(4, momentum=None), IMAGE),
    "RReLU": Ordinary(lambda: nn.RReLU(), FLAT),
    "RReLU in place": Ordinary(lambda: nn.RReLU(0.2, 0.4, inplace=True), FLAT, _statement),
    "Dropout in place": Ordinary(lambda: nn.Dropout(0.3, inplace=True), FLAT, _statement),
    "Dropout2d in place": Ordinary(lambda: nn.Dropout2d(0.3, inplace=True), IMAGE, _statement),
    "losses per row": does(_per_row),
    "masks of true and false": Ordinary(_mask, ROWS, _masked),
    "affine_grid": Ordinary(lambda: nn.Linear(256, 6), IMAGE, _warped),
    "affine_grid of volumes": Ordinary(lambda: nn.Linear(864, 12), VOLUME, _warped_volume),
    "tril_indices, take_along_dim": does(_chosen),
    "fill_diagonal_": does(lambda _, x: (x.T @ x).fill_diagonal_(0.5)),
    "gaussian_nll_loss": does(
        lambda _, x: F.gaussian_nll_loss(x[:, :2], x[:, 2:4], x[:, 4:6].exp(), full=True, reduction="none")
    ),
    "distributions": does(_variational),
    "einsum": does(lambda _, x: torch.einsum("bsd,btd->bst", x, x.tanh()), ROWS),
    "einsum of three": does(lambda _, x: torch.einsum("bi,bj,bk->bijk", x, x.tanh(), x[:, :3])),
    "kron, square of a size": does(lambda _, x: torch.kron(x, x.new_ones(2, 3).tril()).kron(x[0]) / x.shape[0] ** 2),
    "assignments": does(_put),
    "scatter and gather": does(_gathered),
    "statistics": does(_statistics, ROWS),
    "cosine_similarity": does(lambda _, x: F.cosine_similarity(x, x.exp()) + F.pairwise_distance(x, x.tanh())),
    "cdist": does(lambda _, x: torch.cdist(x, x.tanh()), ROWS),
    "addcmul, addcdiv, lerp": does(
        lambda _, x: torch.addcmul(x, x, x.tanh(), value=0.5).lerp(x.addcdiv(x, x.exp()), x.sigmoid())
    ),
    "rot90, diag_embed, unfold": does(lambda _, x: torch.rot90(torch.diag_embed(x.unfold(1, 3, 2), 1), 1, (1, 2))),
    "trigonometry": does(lambda _, x: torch.atan2(x.tan(), x.cosh()) + x.asinh() + torch.hypot(x, x.sinh()).erfc()),
}  # fmt: skip


def example_of(shape: tuple[int, ...], seed: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(shape, generator=torch.Generator().manual_seed(seed))}


def captured_of(name: str) -> Captured:
    ordinary = MODULES[name]
    source = FactorySource(lambda: Net(ordinary))
    return capture(source, task="module_loss", batch=(1, 8), seed=SEED, example_inputs=example_of(ordinary.shape, 2))


VARIANTS = (
    *("affine_grid of volumes", "GRUCell", "LSTMCell", "BatchNorm2d twice", "RReLU in place"),
    *("BatchNorm2d, cumulative average", "einsum", "spectral_norm of a convolution"),
)
"""Cases that differ little from another one."""


@pytest.mark.parametrize("name", all_but(MODULES, VARIANTS))
def test_a_module_trains_in_stages_with_the_bits_of_pytorch(name: str) -> None:
    captured = captured_of(name)
    check = self_check(captured)
    assert (check.forward_diff, check.gradient_diff) == (0.0, 0.0)
    problem = Problem(captured, tuple(example_of(MODULES[name].shape, seed) for seed in (3, 4)))
    losses, gradients = plain_gradients(problem)
    for stages in (1, 2):
        for _, partition in cuts(captured.graph, stages, scattered=0):
            found_losses, found = Stages(problem, partition, [TorchBackend("cpu", threads=1)]).step()
            assert found_losses == losses
            assert found.keys() == gradients.keys()
            for key, gradient in gradients.items():
                if gradient.is_sparse:  # PyTorch adds a sparse gradient's rows in another order
                    torch.testing.assert_close(found[key], gradient.to_dense(), rtol=1e-6, atol=1e-9)
                else:
                    assert torch.equal(found[key], gradient), key


@pytest.mark.parametrize("name", [name for name in MODULES if "spectral" in name or "twice" in name])
def test_buffers_move_with_a_forward_in_training_and_stand_still_in_evaluation(name: str) -> None:
    captured = captured_of(name)
    options = StageOptions(seed=SEED, optimizer=OptimizerSpec(kind="sgd"))
    program = TorchBackend("cpu", threads=1).load(captured.graph, grad_inputs=(), options=options)
    program.initialise()
    program.import_state((f"model/{key}", tensor) for key, tensor in captured.state(captured.owed))
    module = reference_module(captured, SEED)
    before = buffers_of(module)
    batch = example_of(MODULES[name].shape, 0)
    for step in range(2):
        batch = example_of(MODULES[name].shape, step)
        wanted = module.train()(**batch)["loss"]
        found = program.forward(Call("train", step, 0), {"x": to_host(batch["x"])})["loss"]
        assert torch.equal(from_host(found, torch.float32), wanted.detach())
        program.backward(Call("train", step, 0), {"loss": to_host(torch.ones(()))})
        program.apply(scale=0.0, learning_rate=0.0)
    moved = buffers_of(module)
    assert all(not torch.equal(moved[key], value) for key, value in before.items())
    with torch.no_grad():
        wanted = module.eval()(**batch)["loss"]
    found = program.forward(Call("eval", 2, 0), {"x": to_host(batch["x"])})["loss"]
    assert torch.equal(from_host(found, torch.float32), wanted)
    assert all(torch.equal(buffers_of(module)[key], value) for key, value in moved.items())
    state = {entry.removeprefix("model/"): tensor for entry, tensor in program.export_state(["model"])}
    for key, value in moved.items():
        assert torch.equal(from_host(state[key], value.dtype), value), key


def buffers_of(module: nn.Module) -> Mapping[str, torch.Tensor]:
    return {key: value.clone() for key, value in module.named_buffers()}


def test_a_triangular_system_is_solved_row_by_row() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raw = self.first(x)
            factor = raw[:, :16].view(-1, 4, 4).tril(-1) + torch.diag_embed(raw[:, 16:20].exp())
            solved = torch.linalg.solve_triangular(factor.mT, raw[:, None, 20:], upper=True, left=False)
            return solved.square().mean() - MultivariateNormal(raw[:, 20:], scale_tril=factor).log_prob(x[:, :4]).mean()

    example = example_of((4, 8), 1)
    captured = capture(FactorySource(Mixture), task="module_loss", batch=(1, 8), seed=SEED, example_inputs=example)
    self_check(captured)
