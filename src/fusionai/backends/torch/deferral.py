"""Linear layers with a deferred weight gradient: backward computes the input gradient at once and leaves the rest for
later.

A linear layer may be deferred if it has no bias and a trainable weight that no other node reads. The parts are computed
by the same products that autograd would use, on the same layouts, so the sums have the same bits. The split of backward
into an input half and a weight half is that of zero-bubble pipelines (arXiv 2401.10241, section 2); unlike there, the
order of accumulation over microbatches is kept.

Neighbours: `interpreter` binds `deferrable_linear`, `program` runs what was deferred.
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
    """A deferred weight gradient: the layer's input and the gradient of its output. `begun`: sum of the contributions
    of other stages, which is added first."""

    weight: torch.Tensor
    x: torch.Tensor
    gradient: torch.Tensor
    begun: torch.Tensor | None = None


Left = list[Lagging]


def deferrable(graph: Graph, kept: Collection[str] = ()) -> frozenset[int]:
    """Return the ids of linear nodes whose weight gradient may be deferred. `kept`: values of weights whose gradients
    backward itself must return."""
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
    """Return `F.linear(x, weight)`. If `left` is a list, backward appends the weight's part to it instead of computing
    it."""
    if left is None or not torch.is_grad_enabled() or x.numel() == 0:
        return F.linear(x, weight)
    apply: Callable[..., Any] = _DeferredLinear.apply
    return apply(x, weight, left)


def finish(left: Left) -> None:
    """Add the deferred weight gradients, as autograd would have done."""
    with torch.no_grad():
        for one in left:
            product = _rows(one.gradient).t().mm(_rows(one.x))
            add_to(one.weight, product if one.begun is None else one.begun + product)
    left.clear()


def add_to(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add one microbatch's gradient to the parameter's sum, as autograd does."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, left: Left) -> torch.Tensor:
        ctx.save_for_backward(x)
        # The weight itself, not a saved tensor: unpacking a saved tensor may give another object, whose `.grad` is
        # never read.
        ctx.weight = weight
        ctx.left = left
        # A linear layer whose operands need gradients folds its leading dimensions into a single matrix product.
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
