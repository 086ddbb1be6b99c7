"""Linear layers whose weight gradient waits: backward gives the input gradient at once and leaves the rest for later.

Decides which linear layers may (no bias, a trainable weight that no other node reads) and how the parts are computed:
by the very products autograd would use, on the same layouts, so that the sums have the same bits. The split of backward
into an input and a weight half is that of zero-bubble pipelines (arXiv 2401.10241, section 2); unlike there, the order
of accumulation over microbatches is kept.

Neighbours: `interpreter` binds `deferrable_linear`, `program` runs what was left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fusionai.ir.graph import consumers
from fusionai.ir.schema import Graph, Ref

LINEAR = "aten.linear.default"


@dataclass(slots=True)
class Lagging:
    """A layer whose weight gradient is still to be computed from its input and the gradient of its output. `begun`: the
    sum of what other stages contribute to it, which goes first."""

    weight: torch.Tensor
    x: torch.Tensor
    gradient: torch.Tensor
    begun: torch.Tensor | None = None


Left = list[Lagging]


def deferrable(graph: Graph, kept: Collection[str] = ()) -> frozenset[int]:
    """Node ids of the linear layers whose weight gradient may be computed after backward. `kept`: values of weights
    whose gradients backward itself must give."""
    read_by = consumers(graph)
    found: set[int] = set()
    for node in graph.nodes:
        if node.op != LINEAR or len(node.args) != 2 or node.kwargs:
            continue
        weight = node.args[1]
        spec = graph.params.get(weight.name) if isinstance(weight, Ref) and weight.name not in kept else None
        if spec is not None and spec.trainable and isinstance(weight, Ref) and len(read_by[weight.name]) == 1:
            found.add(node.id)
    return frozenset(found)


def deferrable_linear(left: Left | None, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`F.linear(x, weight)`; with a list, its backward puts the weight's share there instead of computing it."""
    if left is None or not torch.is_grad_enabled() or x.numel() == 0:
        return F.linear(x, weight)
    apply: Callable[..., Any] = _DeferredLinear.apply
    return apply(x, weight, left)


def finish(left: Left) -> None:
    """Add the weight gradients that were left, as autograd would have."""
    with torch.no_grad():
        for one in left:
            product = _rows(one.gradient).t().mm(_rows(one.x))
            add_to(one.weight, product if one.begun is None else one.begun + product)
    left.clear()


def add_to(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """One microbatch's gradient to the parameter's sum, as autograd adds it."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, left: Left) -> torch.Tensor:
        ctx.save_for_backward(x)
        # Itself, not as saved: what comes back from there may be another tensor, whose `.grad` nobody reads.
        ctx.weight = weight
        ctx.left = left
        # A linear layer whose operands need gradients folds its leading dimensions: one product of matrices.
        return _rows(x).mm(weight.t()).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        (gradient,) = gradients
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        ctx.left.append(Lagging(weight, x, gradient))
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return _rows(gradient).mm(weight).view(x.shape), None, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])
