"""Compute mixtures of experts as grouped matrix products in graphs that train, through transformers' experts interface.

Everything except the products with experts' weights is plain operators, in the order of transformers' own batched form.
That form gathers the weights of each token's experts. It suits serving, where rows are few and each row's bits must not
depend on the others, but for thousands of tokens the copies do not fit in memory.

Phi's mixtures choose experts by SparseMixer (arXiv 2409.12136): in training by random draws, with a gradient that an
`autograd.Function` defines. The routers here (`derived_routers`) give the same numbers and have this gradient by
automatic differentiation. In evaluation nothing is drawn.

Neighbours: `capture.capture` chooses between the two forms, `capture.graph.lowering` turns the operator into the IR's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Final, cast

import torch
from torch import nn

from fusionai.backends.torch.semantic import expert_linear as by_groups
from fusionai.capture.tracing.by_mode import in_training
from fusionai.capture.tracing.recurrence import replaced_functions
from fusionai.primitives.errors import ModelError

EXPERTS: Final = "fusion"
"""Name under which our function is registered with the interface."""


@torch.library.custom_op("fusion::expert_linear", mutates_args=())
def expert_linear(x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor, transposed: bool) -> torch.Tensor:
    return by_groups(x, weight, experts, transposed=transposed)


@expert_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor, transposed: bool) -> torch.Tensor:  # noqa: ARG001
    return x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])


def experts_forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Transformers' experts function: hidden_states [s, d], top_k_index and top_k_weights [s, k]; returns [s, d]."""
    layer = cast(Any, self)
    if layer._is_expert_parallel:
        raise ModelError(f"{type(self).__name__} is distributed over processes, which a graph can't express.")
    chosen = top_k_index.shape[-1]
    experts = top_k_index.reshape(-1)
    rows = hidden_states.repeat_interleave(chosen, dim=0)
    name = "gate_up_proj" if layer.has_gate else "up_proj"
    wide = _product(layer, name, rows, experts)
    inner = layer._apply_gate(wide) if layer.has_gate else layer.act_fn(wide)
    made = _product(layer, "down_proj", inner, experts)
    if layer.has_post_expert_norm:
        made = layer.post_expert_norm(made)
    weighted = made * top_k_weights.reshape(-1).unsqueeze(-1)
    return weighted.view(hidden_states.shape[0], chosen, -1).sum(dim=1).to(hidden_states.dtype)


def _product(layer: Any, name: str, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    made = expert_linear(rows, getattr(layer, name), experts, bool(layer.is_transposed))
    return made + getattr(layer, f"{name}_bias")[experts] if layer.has_bias else made


def by_products(module: nn.Module) -> None:
    """Make the replaceable experts layers of `module` trace as grouped products, if it has any."""
    _register()
    choose = getattr(module, "set_experts_implementation", None)
    config = getattr(module, "config", None)
    if choose is not None and getattr(config, "_experts_implementation", None) is not None:
        choose(EXPERTS)


@cache
def _register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)


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


def derived_routers(module: nn.Module) -> AbstractContextManager[None]:
    """While open, routers of `module` have gradients that automatic differentiation derives."""
    return replaced_functions(module, {"sparsemixer": _sparse_mixer})
