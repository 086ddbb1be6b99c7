"""A secret client-side prefix: the job owner retrains the first blocks, so that public weights do not match them.

`distance` sets how far the copy is from the public model: 0 is an ordinary fine-tune, 1 starts the blocks from new
random weights of the same spread. The other blocks keep the public weights, because peers run them. The attacks measure
whether this hides anything. See `subject`, `audit`.
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
    """Return a copy of `public` whose first `blocks` blocks were moved and trained for `steps` of `batches` [rows,
    tokens].
    """
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
