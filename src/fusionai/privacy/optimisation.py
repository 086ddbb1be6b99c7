"""Inversion by optimisation (A-4): fits input embeddings until the model reproduces the seen boundary.

Each fitted embedding is then replaced by the nearest token. No pass over the vocabulary is needed. This follows prompt
inversion (arXiv 2503.09022) and similar work: continuous relaxation, then projection. Here the projection happens once
in the middle and once at the end, because a fit that starts from real tokens' embeddings makes better progress than one
that starts between them. `subject` differentiates, `audit` provides the boundary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusionai.privacy.subject import AttackedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class FitBudget:
    """Budget of a fit: `steps` of Adam for all texts together, in two halves."""

    steps: int = 120
    learning_rate: float = 0.1
    """Learning rate relative to the embeddings' RMS."""


def fitted(attacked: AttackedModel, seen: Tensor, known: Tensor, depth: int, budget: FitBudget) -> Tensor:
    """Return the recovered tokens, [texts, tokens - known].

    `seen` [texts, tokens, width] is the boundary at `depth`; `known` [texts, tokens] are the first tokens of the texts.
    """
    table = attacked.embedding.detach().float()
    fixed = table[known]
    rest = seen.shape[1] - known.shape[1]
    scale = float(table.square().mean().sqrt())
    size = seen.float().square().mean(-1, keepdim=True) + 1e-12
    free = table.mean(0).repeat(len(seen), rest, 1).requires_grad_(True)
    for half in range(2):
        if half:
            free = table[_nearest(free, table)].requires_grad_(True)
        steps = budget.steps // 2
        optimizer = torch.optim.Adam([free], lr=budget.learning_rate * scale)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            made = attacked.boundary_of(torch.cat([fixed, free], dim=1), depth)
            # Relative to each row's size, because the row of an attention sink would dominate all others.
            loss = ((made.float() - seen.float()).square() / size).mean()
            optimizer.zero_grad()
            (gradient,) = torch.autograd.grad(loss, [free])
            free.grad = gradient
            optimizer.step()
            schedule.step()
    return _nearest(free, table)


def _nearest(free: Tensor, table: Tensor) -> Tensor:
    return torch.cdist(free.detach().flatten(0, 1), table).argmin(-1).reshape(free.shape[:2])
