"""The table from operator names to torch calls: what this backend can run. Resolves no name that it receives.

Every name comes from the hand-written list `ir.operators.OPERATORS`; a graph can only pick entries of the finished
table. Operators that depend on the mode or on counters get the run's `TorchContext` and the node's id as first
arguments.

A linear layer may defer its weight gradient if it has no bias and a trainable weight that no other node reads: backward
computes the input gradient at once and leaves the rest for later. The parts are computed by the same products that
autograd would use, on the same layouts, so the sums have the same bits. The split is that of zero-bubble pipelines
(arXiv 2401.10241, section 2); unlike there, the order of accumulation over microbatches is kept. Neighbours:
`interpreter` binds operators to a graph's values, `semantic` implements semantic operators, `program` finishes what was
deferred.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionai.backends.binding import SIZES
from fusionai.backends.operands import RULES
from fusionai.backends.semantics import DropoutKey
from fusionai.backends.torch.semantic import attention, dropout, expert_linear, linear_attention, linear_scan, uniform
from fusionai.ir.graph import consumers
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Graph, Ref
from fusionai.primitives.errors import ExecutionError

LINEAR = "aten.linear.default"


@dataclass(slots=True)
class Lagging:
    """A deferred weight gradient: the layer's input and the gradient of its output. `begun`: sum of the contributions
    of other stages, which is added first."""

    weight: Tensor
    x: Tensor
    gradient: Tensor
    begun: Tensor | None = None


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


def deferrable_linear(left: Left | None, x: Tensor, weight: Tensor) -> Tensor:
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


def add_to(parameter: Tensor, gradient: Tensor) -> None:
    """Add one microbatch's gradient to the parameter's sum, as autograd does."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, left: Left) -> Tensor:
        ctx.save_for_backward(x)
        # The weight itself, not a saved tensor: unpacking a saved tensor may give another object, whose `.grad` is
        # never read.
        ctx.weight = weight
        ctx.left = left
        # A linear layer whose operands need gradients folds its leading dimensions into a single matrix product.
        return _rows(x).mm(weight.t()).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        (gradient,) = gradients
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        ctx.left.append(Lagging(weight, x, gradient))
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return _rows(gradient).mm(weight).view(x.shape), None, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


@dataclass(frozen=True, slots=True)
class TorchContext:
    """Properties of a run that some operators depend on."""

    training: bool
    key: DropoutKey
    left: Left | None = None
    """List to which linear layers append deferred weight gradients; None: backward computes them."""
    repeats_keys: bool = False
    """Whether attention repeats key heads that several queries share, because no fused kernel of the device takes
    shared ones at this precision."""


def repeats_keys(device: torch.device, *, half_floats: bool) -> bool:
    """Return whether attention on the device should repeat shared key heads: in float32, not every version of PyTorch's
    fused kernel for cards takes shared ones, and it would fall back to a kernel that keeps every weight, queries times
    keys."""
    if device.type != "cuda" or half_floats:
        return False
    q, shared = (torch.empty((1, heads, 64, 64), device=device) for heads in (8, 2))
    asked = torch.backends.cuda.SDPAParams(q, shared, shared, None, 0.0, True, True)
    return not torch.backends.cuda.can_use_efficient_attention(asked)


def _zeros_for_empty(size: list[int], **options: Any) -> Tensor:
    # Uninitialised memory could show a graph what this process held before.
    options.pop("memory_format", None)
    return torch.ops.aten.zeros.default(size, **options)


def _attention(
    context: TorchContext, node: int, q: Tensor, k: Tensor, v: Tensor, *, dropout: float = 0.0, **options: Any
) -> Tensor:
    return attention(
        q,
        k,
        v,
        dropout=dropout if context.training else 0.0,
        key=context.key,
        node=node,
        repeats_keys=context.repeats_keys,
        **options,
    )


def _dropout(context: TorchContext, node: int, x: Tensor, *, p: float) -> Tensor:
    return dropout(x, p, context.key, node) if context.training and p > 0.0 else x


def _batch_norm_functional(context: TorchContext, _node: int, *args: Any) -> tuple[Tensor, ...]:
    """Return (y, saved mean, saved inverse deviation, new running mean, new running variance); the last two are
    unchanged outside training. `args`: x, weight, bias, mean, variance, whether it trains, momentum, eps."""
    *given, trains, momentum, eps = args
    if context.training and trains:
        return torch.ops.aten._native_batch_norm_legit_functional.default(*given, True, momentum, eps)
    made = torch.ops.aten._native_batch_norm_legit_no_training.default(*given, momentum, eps)
    return (*made, *given[3:])


def _batch_norm(context: TorchContext, _node: int, *args: Any) -> Tensor:
    """`args`: x, weight, bias, mean, variance, whether it trains, momentum, eps, and whether cuDNN may be used."""
    mean, trains = args[3], args[5]
    if trains and context.training and mean is not None:
        raise ExecutionError(
            "aten.batch_norm.default would change its running statistics in place.",
            hint="Capture the model functionalised (aten._native_batch_norm_legit_functional.default).",
        )
    return torch.ops.aten.batch_norm.default(*args[:5], mean is None, *args[6:8], *(args[8:] or (True,)))


def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    *,
    mode: int,
    weights: Tensor | None = None,
    by_frequency: bool = False,
    last_offset: bool = False,
    padding: int = -1,
) -> Tensor:
    """Return sums (mode 0), means (1) or maxima (2) of bags of rows: indices [n], `offsets` [bags] with each bag's
    first index."""
    if not offsets.is_meta and bool((offsets[0] != 0) | (offsets.diff() < 0).any()):
        # The kernel would leave rows of the result as the allocator gave them.
        raise ExecutionError("expected offsets of bags that begin at 0 and never fall.")
    return torch.ops.aten._embedding_bag.default(
        weight, indices, offsets, by_frequency, mode, False, weights, last_offset, padding
    )[0]


_OWN: Final[Mapping[str, Callable[..., Any]]] = {
    "aten.empty.memory_format": _zeros_for_empty,
    "aten.empty_like.default": lambda x, **options: torch.ops.aten.zeros_like.default(x, **options),
    "fusion.embedding_bag": _embedding_bag,
    "fusion.expert_linear": expert_linear,
    "fusion.linear_attention": linear_attention,
    "fusion.linear_scan": linear_scan,
}
_DIRECT: Final[Mapping[str, Callable[..., Any]]] = {
    "aten.add.Tensor": torch.add,
    "aten.cat.default": torch.cat,
    "aten.cos.default": torch.cos,
    "aten.mean.dim": torch.mean,
    "aten.mul.Tensor": torch.mul,
    "aten.neg.default": torch.neg,
    "aten.pow.Tensor_Scalar": torch.pow,
    "aten.reshape.default": torch.reshape,
    "aten.rsqrt.default": torch.rsqrt,
    "aten.silu.default": torch.nn.functional.silu,
    "aten.sin.default": torch.sin,
    "aten.sub.Tensor": torch.sub,
    "aten.transpose.int": torch.transpose,
    "aten.unsqueeze.default": torch.unsqueeze,
}
"""Faster entry points of the same kernels: with one token, starting an operator costs more than running it."""

CONTEXTUAL: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "fusion.attention": _attention,
        "fusion.dropout": _dropout,
        "fusion.in_training": lambda context, _node, trained, otherwise: trained if context.training else otherwise,
        "fusion.uniform": lambda context, node, x: uniform(x, context.key, node),
        "aten._native_batch_norm_legit_functional.default": _batch_norm_functional,
        "aten.batch_norm.default": _batch_norm,
    }
)
"""Operators called as `f(context, node id, *args, **kwargs)`."""


def _resolve() -> dict[str, Callable[..., Any]]:
    table: dict[str, Callable[..., Any]] = {**SIZES, **_OWN, **_DIRECT}
    for name in OPERATORS:
        if name in table or name in CONTEXTUAL or not name.startswith("aten."):
            continue
        _, packet_name, overload_name = name.split(".")
        packet = getattr(torch.ops.aten, packet_name, None)
        overload = getattr(packet, overload_name, None)
        # An older or newer torch may lack an operator: then it is unsupported here, and `Backend.unsupported` reports
        # it.
        if overload is not None:
            table[name] = overload
    return table


PLAIN: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(_resolve())
"""Operators called as `f(*args, **kwargs)`."""


Lookup = tuple[Tensor, int, int, int | None]
"""Indices, first allowed index, end of the allowed range (exclusive), and one more index that is allowed (or None)."""


def _rows_of(table: Tensor, indices: Tensor, *_: Any, **__: Any) -> list[Lookup]:
    return [(indices, 0, table.shape[0], None)]


def _along(x: Tensor, dim: int, indices: Tensor, *_: Any, **__: Any) -> list[Lookup]:
    return [(indices, 0, x.shape[dim] if x.dim() else 1, None)]


def _from_either_end(x: Tensor, indices: list[Tensor | None], *_: Any) -> list[Lookup]:
    return [
        (index, -size, size, None)
        for index, size in zip(indices, x.shape, strict=False)
        if index is not None and index.dtype != torch.bool
    ]


def _class_lookups(
    x: Tensor, target: Tensor, _weight: Any = None, _reduction: int = 1, ignore_index: int = -100, *_: Any, **__: Any
) -> list[Lookup]:
    if target.is_floating_point():
        return []
    return [(target, 0, x.shape[1 if x.dim() > 1 else 0], ignore_index)]


LOOKUPS: Final[Mapping[str, Callable[..., list[Lookup]]]] = MappingProxyType(
    {
        "aten.embedding.default": _rows_of,
        "fusion.expert_linear": lambda _x, weight, experts, **_: _rows_of(weight, experts),
        "fusion.embedding_bag": lambda weight, indices, offsets, **_: [
            *_rows_of(weight, indices),
            (offsets, 0, indices.shape[0] + 1, None),
        ],
        **{
            f"aten.{name}.default": _along
            for name in ("index_select", "gather", "scatter_add", "index_add", "index_copy")
        },
        **dict.fromkeys(("aten.scatter.value", "aten.scatter.src", "aten.scatter_reduce.two"), _along),
        "aten.index_fill.int_Scalar": lambda x, dim, indices, *_: [
            (indices, -size, size, None) for size in (x.shape[dim] if x.dim() else 1,)
        ],
        **dict.fromkeys(("aten.index.Tensor", "aten.index_put.default"), _from_either_end),
        "aten.max_unpool2d.default": lambda _x, indices, output_size: [(indices, 0, prod(output_size), None)],
        **{f"aten.{name}.default": _class_lookups for name in ("nll_loss_forward", "nll_loss", "nll_loss_nd")},
        "aten.cross_entropy_loss.default": _class_lookups,
    }
)
"""Which operands hold indices. On a device without bounds checks (CUDA), an index out of range ends the whole
process."""


def checked(name: str, compute: Callable[..., Any], *, leading: int = 0) -> Callable[..., Any]:
    """Return `compute` behind the checks of its operands: the operator's rule, and that every index is in range. The
    result raises `ExecutionError` before a kernel sees operands that break them. `leading`: arguments before the
    operator's own. An operator that needs no checks gets `compute` itself."""
    rule, lookups = RULES.get(name), LOOKUPS.get(name)
    if rule is None and lookups is None:
        return compute

    def run(*args: Any, **kwargs: Any) -> Any:
        if rule is not None:
            rule(*args[leading:], **kwargs)
        for indices, low, high, ignored in lookups(*args[leading:], **kwargs) if lookups is not None else ():
            if indices.device.type == "meta" or indices.numel() == 0:
                continue
            outside = (indices < low) | (indices >= high)
            if ignored is not None:
                outside &= indices != ignored
            if bool(outside.any()):
                wrong = int(indices[outside].flatten()[0])
                raise ExecutionError(f"expected indices from {low} to {high - 1}, got {wrong}.")
        return compute(*args, **kwargs)

    return run
