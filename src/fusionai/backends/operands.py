"""Rules on operands that frameworks' kernels do not check themselves, the same for every framework.

Some kernels take sizes from one operand and read another as far as these say: a running mean of one element is then
read, or written, beyond its end. Shape inference does not notice, because it broadcasts. A graph comes from another
machine, so `checked` lets a kernel run only on actual operands that fit its rule; at load the same rules see operands
without memory. What has no rule here is checked by the kernels of every backend;
`tests/conformance/test_operand_bounds.py` runs all operators on guarded memory and fails if that is not so.

Also here: `LOOKUPS`, the operands that hold indices. A kernel on a GPU ends its process at an index out of range, and
some on a CPU read beyond the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from fusionai.primitives.errors import ExecutionError

Rule = Callable[..., None]
"""Called as the operator is; raises `ExecutionError` for operands that its kernels must not see. An operand has
`shape` and `dtype`."""


def expect(holds: bool, expected: str, *found: Any) -> None:
    """Raise `ExecutionError` unless `holds`. `found`: operands, named by shape, or plain values."""
    if not holds:
        got = ", ".join(str(list(one.shape)) if hasattr(one, "shape") else repr(one) for one in found)
        raise ExecutionError(f"expected {expected}, got {got}.")


def _per_channel(x: Any, *vectors: Any) -> None:
    """Each of `vectors` that is given has one element per channel of x [batch, channels, ...]."""
    expect(len(x.shape) >= 2, "an operand of rank 2 or more [batch, channels, ...]", x)
    for vector in vectors:
        expect(vector is None or tuple(vector.shape) == (x.shape[1],), f"{x.shape[1]} channels", vector)


def _batch_norm(x: Any, weight: Any = None, bias: Any = None, mean: Any = None, variance: Any = None, *_: Any) -> None:
    _per_channel(x, weight, bias, mean, variance)
    expect(_product(x.shape) > 0, "at least one element per channel", x)
    expect((mean is None) == (variance is None), "a running mean and variance, or neither", mean, variance)
    expect(mean is None or mean.dtype == variance.dtype, "running statistics of one dtype", mean, variance)


def _batch_norm_without_statistics(x: Any, weight: Any = None, bias: Any = None, *_: Any) -> None:
    _per_channel(x, weight, bias)
    expect(_product(x.shape) > 0, "at least one element per channel", x)


def _layer_norm(x: Any, normalized: Sequence[int], weight: Any = None, bias: Any = None, *_: Any, **__: Any) -> None:
    sizes = tuple(normalized)
    expect(0 < len(sizes) <= len(x.shape) and tuple(x.shape[-len(sizes) :]) == sizes, f"last sizes {list(sizes)}", x)
    for one in (weight, bias):
        expect(one is None or tuple(one.shape) == sizes, f"weights of sizes {list(sizes)}", one)


def _native_group_norm(
    x: Any, weight: Any, bias: Any, batch: int, channels: int, positions: int, groups: int, *_: Any
) -> None:
    sizes = tuple(x.shape)
    fits = len(sizes) >= 2 and sizes[:2] == (batch, channels) and _product(sizes[2:]) == positions
    expect(fits, f"an operand of {batch} x {channels} x {positions} elements", x)
    expect(groups > 0 and channels % groups == 0, f"groups that divide {channels} channels", groups)
    _per_channel(x, weight, bias)


def _group_norm(x: Any, groups: int, weight: Any = None, bias: Any = None, *_: Any) -> None:
    _per_channel(x, weight, bias)
    expect(groups > 0 and x.shape[1] % groups == 0, f"groups that divide {x.shape[1]} channels", groups)


def _weight_norm(v: Any, g: Any, dim: int = 0) -> None:
    rank = len(v.shape)
    expect(rank > 0 and dim in (0, rank - 1), f"the first or last of {rank} dimensions", dim)
    expect(_product(v.shape) > 0, "at least one element", v)
    kept = tuple(size if place == dim else 1 for place, size in enumerate(v.shape))
    expect(tuple(g.shape) == kept and g.dtype == v.dtype, f"norms of sizes {list(kept)} in {v.dtype}", g)


def _attention(q: Any, k: Any, v: Any, *, sinks: Any = None, key_mask: Any = None, **_: Any) -> None:
    expect(all(len(one.shape) == 4 for one in (q, k, v)), "queries, keys and values of rank 4", q, k, v)
    expect(q.shape[0] == k.shape[0] == v.shape[0], "queries, keys and values of one batch", q, k, v)
    expect(tuple(k.shape[1:3]) == tuple(v.shape[1:3]), "as many values as keys", k, v)
    expect(q.shape[3] == k.shape[3], "keys as wide as queries", q, k)
    expect(k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0, "a multiple of the keys' heads as query heads", q, k)
    expect(sinks is None or tuple(sinks.shape) == (q.shape[1],), f"one sink per each of {q.shape[1]} heads", sinks)
    seen = (k.shape[0], k.shape[2])
    expect(key_mask is None or tuple(key_mask.shape) == seen, f"a key mask of sizes {list(seen)}", key_mask)


def _linear_attention(query: Any, key: Any, value: Any, *, decay: Any, beta: Any = None) -> None:
    expect(all(len(one.shape) == 4 for one in (query, key, value)), "operands of rank 4", query, key, value)
    expect(tuple(query.shape) == tuple(key.shape), "queries and keys of one shape", query, key)
    expect(tuple(value.shape[:3]) == tuple(key.shape[:3]), "a value for each key", key, value)
    rows = tuple(key.shape[:3])
    expect(tuple(decay.shape) in (rows, tuple(key.shape)), f"decays of sizes {list(rows)} or {list(key.shape)}", decay)
    expect(beta is None or tuple(beta.shape) == rows, f"shares of sizes {list(rows)}", beta)


def _adaptive_pool(_x: Any, sizes: int | Sequence[int], *_: Any, **__: Any) -> None:
    """Results are limited even if the operand is empty: a graph with a matrix for each dimension exhausts memory."""
    given = (sizes,) if isinstance(sizes, int) else sizes
    largest = max((size for size in given if isinstance(size, int)), default=0)
    expect(largest <= LARGEST_STRIDE, f"at most {LARGEST_STRIDE} places in each dimension", largest)


def _expert_linear(x: Any, weight: Any, experts: Any, *, transposed: bool = False) -> None:
    expect(len(x.shape) == 2 and len(weight.shape) == 3, "rows of rank 2 and weights of rank 3", x, weight)
    expect(x.shape[1] == weight.shape[1 if transposed else 2], "rows as wide as the experts take", x, weight)
    expect(tuple(experts.shape) == (x.shape[0],), f"an expert for each of {x.shape[0]} rows", experts)


def _embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    *,
    mode: int,
    weights: Any = None,
    last_offset: bool = False,
    padding: int = -1,
    **_: Any,
) -> None:
    expect(len(weight.shape) == 2, "a table of rank 2", weight)
    expect(len(indices.shape) == len(offsets.shape) == 1, "indices and offsets of rank 1", indices, offsets)
    expect(offsets.shape[0] > last_offset, "a bag", offsets)
    expect(mode in range(3), "mode 0 (sum), 1 (mean) or 2 (maximum)", mode)
    expect(weights is None or mode == 0, "weights in mode 0 only", mode)
    expect(weights is None or tuple(weights.shape) == tuple(indices.shape), "a weight for each index", weights)
    expect(weights is None or weights.dtype == weight.dtype, "weights and a table of one dtype", weights)
    expect(-1 <= padding < weight.shape[0], f"a padding index below {weight.shape[0]}, or -1", padding)


MOST_PIECES: Final = 4096
"""Limit on the pieces of one tensor, which is that on the results of a node; chosen."""
LARGEST_DIFFERENCE: Final = 64
"""How often differences may be taken. Chosen; each is an operator of its own."""
LARGEST_STRIDE: Final = 1 << 16
"""Upper limit on strides, paddings and dilations of convolutions. Chosen; kernels compute with 32 bits and divide by
what overflowed to zero."""


def _convolution(*given: Any, **named: Any) -> None:
    settings = (*given[3:], *named.values())
    spatial = len((*given, *named.values())[1].shape) - 2
    counts = [len(one) for one in settings if isinstance(one, Sequence) and not isinstance(one, str)]
    expect(all(count in (1, spatial) for count in counts), f"settings of 1 or {spatial} sizes", counts)
    numbers = [one for setting in settings for one in (setting if isinstance(setting, Sequence) else (setting,))]
    largest = max((abs(one) for one in numbers if isinstance(one, int)), default=0)
    expect(largest <= LARGEST_STRIDE, f"strides, paddings and dilations up to {LARGEST_STRIDE}", largest)


def _pad(_x: Any, widths: Sequence[int], mode: str = "constant", *_: Any, **__: Any) -> None:
    """A circular padding that cuts one end and extends the other leaves elements unwritten."""
    cuts = any(isinstance(width, int) and width < 0 for width in widths)
    expect(not (mode == "circular" and cuts), "circular padding of 0 or more", list(widths))


def _binary_cross_entropy(x: Any, target: Any, weight: Any = None, *_: Any, **__: Any) -> None:
    expect(tuple(target.shape) == tuple(x.shape), f"targets of sizes {list(x.shape)}", target)
    fits = weight is None or (
        len(weight.shape) <= len(x.shape)
        and all(a in (1, b) for a, b in zip(reversed(weight.shape), reversed(x.shape), strict=False))
    )
    expect(fits, f"weights that broadcast to {list(x.shape)}", weight)


def _diff(x: Any, n: int = 1, dim: int = -1, *_: Any, **__: Any) -> None:
    """More differences than elements are empty, and a graph with one node for each exhausts memory."""
    expect(len(x.shape) > 0 and -len(x.shape) <= dim < len(x.shape), "a dimension of the operand", dim, x)
    size = x.shape[dim]
    expect(0 <= n <= LARGEST_DIFFERENCE and (not isinstance(size, int) or n <= max(size, 1)), f"0 to {size} times", n)


def _chunk(_x: Any, pieces: int, *_: Any, **__: Any) -> None:
    """An operand without elements is cut into as many pieces as asked for, each of which takes memory."""
    expect(not isinstance(pieces, int) or pieces <= MOST_PIECES, f"at most {MOST_PIECES} pieces", pieces)


def _floating(x: Any, *_: Any, **__: Any) -> None:
    expect("float" in str(x.dtype), "a tensor of floating-point numbers", x.dtype)


def _grid_sampler(spatial: int, modes: int) -> Rule:
    def rule(x: Any, grid: Any, mode: int, padding: int, _align: bool) -> None:
        fits = len(x.shape) == len(grid.shape) == spatial + 2 and x.shape[0] == grid.shape[0]
        expect(fits and grid.shape[-1] == spatial, f"a grid of {spatial} coordinates per place", x, grid)
        expect(mode in range(modes) and padding in range(3), "a known interpolation and padding", mode, padding)
        expect(x.dtype == grid.dtype, "an input and a grid of one dtype", x.dtype, grid.dtype)

    return rule


def _product(sizes: Sequence[Any]) -> int:
    """Return the product of sizes; one that is not known yet counts as 1."""
    product = 1
    for size in sizes:
        product *= size if isinstance(size, int) else 1
    return product


RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "aten.batch_norm.default": _batch_norm,
        "aten._native_batch_norm_legit_functional.default": _batch_norm,
        "aten._native_batch_norm_legit_no_training.default": _batch_norm,
        "aten._native_batch_norm_legit.no_stats": _batch_norm_without_statistics,
        "aten.layer_norm.default": _layer_norm,
        "aten.native_layer_norm.default": _layer_norm,
        "aten.group_norm.default": _group_norm,
        "aten.native_group_norm.default": _native_group_norm,
        "aten._weight_norm_interface.default": _weight_norm,
        "aten.grid_sampler_2d.default": _grid_sampler(2, modes=3),
        "aten.grid_sampler_3d.default": _grid_sampler(3, modes=2),
        "fusion.attention": _attention,
        "fusion.linear_attention": _linear_attention,
        "fusion.embedding_bag": _embedding_bag,
        "fusion.expert_linear": _expert_linear,
        "fusion.uniform": _floating,
        "aten.logcumsumexp.default": _floating,
        "aten.pad.default": _pad,
        "aten.diff.default": _diff,
        "aten.chunk.default": _chunk,
        "aten.binary_cross_entropy.default": _binary_cross_entropy,
        **{
            f"aten.{name}.default": _adaptive_pool
            for name in (
                *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"),
                *("adaptive_max_pool2d", "adaptive_max_pool3d"),
            )
        },
        **{
            f"aten.{name}": _convolution
            for name in (
                *("conv1d.default", "conv2d.default", "conv1d.padding", "conv2d.padding", "convolution.default"),
                "conv_transpose2d.input",
            )
        },
    }
)
"""Operator -> what its operands must fulfil before a kernel sees them."""
