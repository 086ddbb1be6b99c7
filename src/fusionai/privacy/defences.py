"""Changes to a boundary before a peer sees it: none, fewer bits, noise.

The caller passes in the codecs that peers use, because they belong to a higher layer. `subject` computes the
boundaries, `secret_prefix` is the defence that changes the model instead, `audit` runs all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fusionai.privacy.subject import AttackedModel, Change, descend, text_loss

Packed = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]
"""Packs and unpacks a boundary [texts, tokens, width]; returns the result."""
NOISES: Final = (0.3, 1.0, 3.0)
"""Default sizes of the noise, relative to each row's RMS."""


@dataclass(frozen=True, slots=True)
class Defence:
    """A named defence. If `change` is random, it draws new numbers at each call."""

    name: str
    change: Change


def defences(packings: Mapping[str, Packed], noises: tuple[float, ...] = NOISES, seed: int = 0) -> tuple[Defence, ...]:
    """Return the defences: clean, bf16, the packings by name, and noise of these sizes relative to each row's RMS."""
    return (
        Defence("clean", lambda boundary: boundary),
        Defence("bf16", lambda boundary: boundary.to(torch.bfloat16).to(boundary.dtype)),
        *(Defence(name, _packed(packing)) for name, packing in packings.items()),
        *(Defence(f"noise {size:g}", gaussian(size, seed)) for size in noises),
    )


def gaussian(size: float, seed: int) -> Change:
    """Return a change that adds normal noise of `size` times each row's RMS."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(boundary: Tensor) -> Tensor:
        scale = boundary.square().mean(-1, keepdim=True).sqrt() * size
        return boundary + scale * torch.randn(boundary.shape, generator=generator).to(boundary)

    return noisy


def _packed(packing: Packed) -> Change:
    def through(boundary: Tensor) -> Tensor:
        rows: npt.NDArray[Any] = boundary.detach().float().cpu().contiguous().numpy()
        return torch.from_numpy(np.array(packing(rows))).to(boundary)

    return through


def secret_prefix(
    public: AttackedModel,
    batches: Iterator[Tensor],
    *,
    blocks: int,
    distance: float,
    steps: int,
    learning_rate: float,
    seed: int,
    on_step: Callable[[int], None],
) -> AttackedModel:
    """Return a copy of `public` whose first `blocks` blocks were moved and trained for `steps` of `batches` [rows,
    tokens]."""
    secret = AttackedModel(copy.deepcopy(public.model))
    generator = torch.Generator().manual_seed(seed)
    trained: list[nn.Parameter] = []
    for block in secret.blocks[:blocks]:
        for parameter in block.parameters():
            parameter.requires_grad_(True)
            trained.append(parameter)
            if parameter.ndim > 1:
                fresh = torch.randn(parameter.shape, generator=generator).to(parameter) * parameter.detach().std()
                parameter.data.mul_(1 - distance).add_(distance * fresh)
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0)
    for step in range(steps):
        descend(optimizer, text_loss(secret.model, next(batches)))
        on_step(step + 1)
    return AttackedModel(secret.model)
