"""Inversion by optimisation (A-4): input embeddings are fitted until the model makes the seen boundary of them; each is
then the token it lies nearest to. Needs no pass over the vocabulary; decides nothing but tokens.

The idea of prompt inversion (arXiv 2503.09022) and its kin: continuous relaxation, then projection, here once in the
middle and once at the end, as a fit from real tokens' embeddings goes on better than one from between them. Neighbours:
`subject` differentiates, `audit` says what was seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusionai.privacy.subject import AttackedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class FitBudget:
    """`steps` of Adam for all texts together, in two halves."""

    steps: int = 120
    learning_rate: float = 0.1
    """Relative to the embeddings' RMS."""


def fitted(attacked: AttackedModel, seen: Tensor, known: Tensor, depth: int, budget: FitBudget) -> Tensor:
    """[texts, tokens - known]: of the boundary `seen` [texts, tokens, width] at `depth`; `known` [texts, tokens] are
    at the beginning."""
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
            # Relative to each row's size: an attention sink's row would rule all others.
            loss = ((made.float() - seen.float()).square() / size).mean()
            optimizer.zero_grad()
            (gradient,) = torch.autograd.grad(loss, [free])
            free.grad = gradient
            optimizer.step()
            schedule.step()
    return _nearest(free, table)


def _nearest(free: Tensor, table: Tensor) -> Tensor:
    return torch.cdist(free.detach().flatten(0, 1), table).argmin(-1).reshape(free.shape[:2])
