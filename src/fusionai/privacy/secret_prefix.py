"""A secret client-side prefix: the first blocks retrained at home, so that peers' public weights no longer fit.

Decides how far the copy goes from the public model: `distance` 0 is an ordinary fine-tune, 1 begins the blocks from
nothing (fresh weights of the same spread). The other blocks stay the public ones, for peers run them. Whether that
hides anything is for the attacks to say. Neighbours: `subject`, `audit`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from fusionai.privacy.subject import AttackedModel


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
    """A copy of `public` whose first `blocks` blocks were moved and trained for `steps` of `batches` [rows, tokens]."""
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
        ids = next(batches)
        logits = secret.model(input_ids=ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        on_step(step + 1)
    return AttackedModel(secret.model)
