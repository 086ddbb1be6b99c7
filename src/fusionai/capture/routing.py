"""Replace transformers' routers whose gradient differs from the derivative of their forward.

Phi's mixtures choose experts by SparseMixer (arXiv 2409.12136): in training by random draws, with a gradient that an
`autograd.Function` defines. The operators here give the same numbers and have this gradient by automatic
differentiation. In evaluation nothing is drawn.

Neighbours: `capture.capture` traces within `derived_routers`, `capture.by_mode` selects by the mode, `capture.draws`
expresses the draws by counters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fusionai.capture.by_mode import in_training
from fusionai.capture.recurrence import replaced_functions


def _sparse_mixer(
    scores: torch.Tensor,
    jitter_eps: float,
    training: bool,
    top_k: int = 2,  # noqa: ARG001 - as transformers', which chooses two
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and indices [tokens, 2] of the two experts of each token, like transformers' `sparsemixer`."""
    first, expert = _chosen(scores, scores, jitter_eps, training)
    others = torch.scatter(scores, -1, expert, float("-inf"))
    second, other = _chosen(scores, others, jitter_eps, training)
    return torch.concat((first, second), dim=-1), torch.concat((expert, other), dim=-1)


def _chosen(
    scores: torch.Tensor, left: torch.Tensor, jitter_eps: float, training: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one expert of those `left`, and its weight among the experts whose score is close to the best."""
    seen, known = scores.detach(), left.detach()
    best, calm = known.max(dim=-1, keepdim=True)
    far = ((best - seen) / seen.abs().clamp(min=best)) > 2 * jitter_eps
    near = left.masked_fill(far, float("-inf"))
    gates = torch.softmax(near, dim=-1)
    weight = gates.gather(dim=-1, index=calm)
    if not training:
        return weight, calm
    noise = torch.empty_like(known).exponential_().log()
    drawn = (near.detach() - noise).masked_fill(far, float("-inf")).max(dim=-1)[1].unsqueeze(-1)
    largest, middle = gates.detach().max(dim=-1, keepdim=True)
    # The same draws as transformers: for the second expert it draws twice.
    share = torch.rand_like(largest) if left is scores else torch.rand_like(largest).uniform_()
    whole = torch.logical_or(drawn == middle, share > 0.75)
    factor = torch.add(0.3333, whole, alpha=0.6667).type_as(gates)
    own = gates.gather(dim=-1, index=drawn)
    # The factor applies to the value, not to the gradient.
    trained = own.detach() * factor + (own - own.detach())
    return in_training(trained, weight), in_training(drawn, calm)


@contextmanager
def derived_routers(module: nn.Module) -> Iterator[None]:
    """While open, routers of `module` have gradients that automatic differentiation derives."""
    with replaced_functions(module, {"sparsemixer": _sparse_mixer}):
        yield
