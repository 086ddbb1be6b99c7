"""Whole jobs of modules that do what language models don't: they end, with the losses of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusionai.capture.capture import capture
from fusionai.capture.models.source import FactorySource
from harness.one_process import assert_same_weights, plain
from harness.pool import Data, Run
from harness.strikes import struck_run

pytestmark = pytest.mark.slow

STEPS = 4


class Teacher(nn.Module):
    """A head that is trained behind one layer, and read behind another through a detached value only. The second
    layer's stage has no gradient to wait for, and may be a step ahead of the first layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.teacher.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.mse_loss(self.head(self.student(x)), self.head(self.teacher(x)).detach())}


class Averaged(nn.Module):
    """A mean of earlier results, assigned to its buffer, and a spectral norm in front of everything."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.second(self.first(x)))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(dim=0)
        return {"loss": self.third(hidden - self.mean).square().mean()}


class Noisy(nn.Module):
    """Draws in evaluation too: the probe before the first step must come back alike."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 12), nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        mean, spread = self.encoder(x).chunk(2, dim=-1)
        return {"loss": F.mse_loss(self.decoder(mean + spread.exp() * torch.randn_like(mean)), x)}


def made(step: int, microbatch: int) -> dict[str, np.ndarray]:
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    return {"x": torch.randn(4, 8, generator=generator).numpy()}


def run(directory: Path, make: Callable[[], nn.Module], *ranges: tuple[int, int]) -> Run:
    source = FactorySource(lambda: (make(), {"x": torch.from_numpy(made(0, 0)["x"])}), make.__name__)
    fields: dict[str, Any] = {"steps": STEPS, "microbatches": 2, "checkpoint_every": 1, "standbys": {}}
    fields |= {"ranges": ranges, "owned": frozenset({len(ranges) - 1}), "data": Data(made)}
    (done,) = struck_run(
        directory, capture(source, task="module_loss", batch=(1, 8), seed=3), (), peers=len(ranges) - 1, **fields
    )
    assert done.end is not None
    assert done.end.failed is None
    return done


@pytest.mark.parametrize(
    ("make", "ranges"), [(Teacher, ((0, 2), (2, 3), (3, 4))), (Averaged, ((0, 1), (1, 2), (2, 4)))]
)
def test_a_job_trains_as_one_process(
    make: Callable[[], nn.Module], ranges: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    done = run(tmp_path, make, *ranges)
    module = make()
    assert done.losses == plain(module, done, lambda module, batch: module(**batch)["loss"])
    assert_same_weights(module, done, STEPS)


def test_a_module_that_draws_in_evaluation_passes_the_probe(tmp_path: Path) -> None:
    assert len(run(tmp_path, Noisy, (0, 1), (1, 2), (2, 3)).losses) == STEPS
