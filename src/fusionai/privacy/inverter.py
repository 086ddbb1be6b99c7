"""Learned inverters (A-2), which the attacker trains on its own text to read tokens from boundaries.

`ridge` maps a boundary to the token's embedding in closed form; `train_inverter` trains a small causal transformer.
What they miss may still be recoverable, so their figures are shown only beside the white-box one. Also contains the
simplest attack, `nearest` (A-1): the most similar embedding. See `subject`, `audit`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from fusionai.privacy.subject import AttackedModel, descend
from fusionai.privacy.white_box import regression

HEADS: Final = 4
ROWS: Final = 16
"""Texts per training batch of the small transformer."""
_RIDGE: Final = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class InverterBudget:
    """Shape of the small transformer and its training: steps of 16 texts."""

    steps: int = 60
    width: int = 96
    blocks: int = 1
    learning_rate: float = 2e-3


def nearest(boundary: Tensor, embedding: Tensor) -> Tensor:
    """Return the token whose embedding [vocabulary, width] has the smallest angle to each row, [texts, tokens]."""
    rows = nn.functional.normalize(boundary.float(), dim=-1)
    return (rows @ nn.functional.normalize(embedding.float(), dim=-1).T).argmax(-1)


def ridge(seen: Tensor, tokens: Tensor, embedding: Tensor) -> Callable[[Tensor], Tensor]:
    """Fit on boundaries [texts, tokens, width] of known `tokens` [texts, tokens]; return a map from boundaries to
    tokens."""
    x = seen.flatten(0, 1).double()
    mean, spread = x.mean(0), x.std(0) + 1e-9
    x = (x - mean) / spread
    y = embedding.double()[tokens.flatten()]
    centre = y.mean(0)
    weights = regression(x, y - centre, _RIDGE * len(x))

    def read(boundary: Tensor) -> Tensor:
        guessed = ((boundary.double() - mean) / spread) @ weights + centre
        return nearest(guessed, embedding)

    return read


class _Inverter(nn.Module):
    def __init__(self, width: int, vocabulary: int, budget: InverterBudget) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.into = nn.Linear(width, budget.width)
        layer = nn.TransformerEncoderLayer(
            budget.width, HEADS, 4 * budget.width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, budget.blocks, enable_nested_tensor=False)
        self.out = nn.Linear(budget.width, vocabulary)

    def forward(self, boundary: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(boundary.shape[1], device=boundary.device)
        return self.out(self.blocks(self.into(self.norm(boundary)), mask=mask, is_causal=True))


def train_inverter(
    seen: Tensor, tokens: Tensor, vocabulary: int, budget: InverterBudget, seed: int
) -> Callable[[Tensor], Tensor]:
    """Train on boundaries [texts, tokens, width] of known `tokens` [texts, tokens]; return a map from boundaries to
    tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inverter = _Inverter(seen.shape[-1], vocabulary, budget).to(seen.device)
    generator = torch.Generator().manual_seed(seed)
    spread = seen.flatten(0, 1).std(0) + 1e-9
    optimizer = torch.optim.AdamW(inverter.parameters(), lr=budget.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, budget.steps)
    for _ in range(budget.steps):
        rows = torch.randint(len(tokens), (ROWS,), generator=generator).to(seen.device)
        logits = inverter(seen[rows].float() / spread)
        descend(optimizer, nn.functional.cross_entropy(logits.flatten(0, 1), tokens[rows].flatten()))
        schedule.step()
    inverter.eval().requires_grad_(False)
    return lambda boundary: inverter(boundary.float() / spread).argmax(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitBudget:
    """Budget of a fit: `steps` of Adam for all texts together, in two halves."""

    steps: int = 120
    learning_rate: float = 0.1
    """Learning rate relative to the embeddings' RMS."""


def fitted(attacked: AttackedModel, seen: Tensor, known: Tensor, depth: int, budget: FitBudget) -> Tensor:
    """Return the recovered tokens, [texts, tokens - known]. `seen` [texts, tokens, width] is the boundary at `depth`;
    `known` [texts, tokens] are the first tokens of the texts."""
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
