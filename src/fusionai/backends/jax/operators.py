"""The table from operator names to JAX functions: what this backend can run. Resolves no name that it receives.

Every name is in `ir.operators.OPERATORS`. Functions take the arguments of torch's operators, with sizes as plain
numbers. Operators that depend on the mode or on counters get the run's `JaxContext` and the node's id as first
arguments. Neighbours: `tracing` binds these to a graph's values; the other modules of this package implement the
functions by kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from jax import Array

from fusionai.backends.binding import SIZES
from fusionai.backends.jax.elementwise import ELEMENTWISE
from fusionai.backends.jax.lookups import LOOKUPS
from fusionai.backends.jax.norms import LOSSES, NORMS, batch_norm, batch_norm_functional
from fusionai.backends.jax.products import PRODUCTS
from fusionai.backends.jax.reductions import REDUCTIONS
from fusionai.backends.jax.semantic import SCANS, attention, dropout, uniform
from fusionai.backends.jax.shaping import SHAPING


@dataclass(frozen=True, slots=True)
class JaxContext:
    """Properties of a run. `keys`: node that draws random numbers -> its two folds, uint32 [2]."""

    training: bool
    keys: Mapping[int, Array]


def _attention(
    context: JaxContext, node: int, q: Array, k: Array, v: Array, *, scale: float, dropout: float = 0.0, **options: Any
) -> Array:
    drops = context.training and dropout > 0.0
    return attention(
        q, k, v, scale=scale, dropout=dropout if drops else 0.0, key=context.keys[node] if drops else None, **options
    )


def _dropout(context: JaxContext, node: int, x: Array, *, p: float) -> Array:
    return dropout(x, p, context.keys[node]) if context.training and p > 0.0 else x


CONTEXTUAL: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "fusion.attention": _attention,
        "fusion.dropout": _dropout,
        "fusion.in_training": lambda context, _node, trained, otherwise: trained if context.training else otherwise,
        "fusion.uniform": lambda context, node, x: uniform(x, context.keys[node]),
        "aten._native_batch_norm_legit_functional.default": (
            lambda context, _node, *args: batch_norm_functional(context.training, *args)
        ),
        "aten.batch_norm.default": lambda context, _node, *args: batch_norm(context.training, *args),
    }
)
"""Operators called as `f(context, node id, *args, **kwargs)`."""
PLAIN: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {**SIZES, **ELEMENTWISE, **SHAPING, **REDUCTIONS, **PRODUCTS, **NORMS, **LOSSES, **LOOKUPS, **SCANS}
)
"""Operators called as `f(*args, **kwargs)`."""
