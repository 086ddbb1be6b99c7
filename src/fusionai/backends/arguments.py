"""Arguments of operators, evaluated and normalised once for all frameworks that define torch's operators anew.

Also what the arguments of `fusion.attention` mean on every backend: how scores are made from products, and which keys a
query sees. Framework-free. Neighbours: `jax.tracing` and `onnxruntime.building` evaluate arguments, their operator
modules compute. `serving.parted` and `torch.paged_attention` compute attention over caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from fusionai.ir.schema import Arg, DeviceArg, DTypeArg, FloatArg, ListArg, MemoryFormatArg, Ref

Sizes = int | Sequence[int]


def argument(arg: Arg, known: Callable[[str], Any], dtype: Callable[[str], Any]) -> Any:
    """Return an argument of a node as an operator takes it. Devices and memory formats do not matter to frameworks that
    compile. `known`: value name -> value; `dtype`: dtype name -> dtype."""
    match arg:
        case Ref(name):
            return known(name)
        case DTypeArg(name):
            return dtype(name)
        case DeviceArg() | MemoryFormatArg():
            return None
        case FloatArg(name):
            return float(name)
        case ListArg(items):
            return [argument(item, known, dtype) for item in items]
        case _:
            return arg


def by_name(compute: Callable[..., Any], names: Sequence[str], *, behind: int, **fixed: Any) -> Callable[..., Any]:
    """Return `compute` for an operator that takes the arguments `names`, in this order, after the first `behind`."""
    return lambda *args, **options: compute(
        *args[:behind], **dict(zip(names, args[behind:], strict=False)), **options, **fixed
    )


CONV: Final = ("stride", "padding", "dilation", "groups")
"""Arguments of a convolution after input, weight and bias."""
CONV_TRANSPOSE: Final = ("stride", "padding", "output_padding", "groups", "dilation")
"""Arguments of a transposed convolution after input, weight and bias."""


def many(value: Sizes, count: int) -> tuple[int, ...]:
    """Return one size per dimension; a single size is that of every dimension."""
    given = (value,) if isinstance(value, int) else tuple(value)
    return given * count if len(given) == 1 else given


def conv_pads(kernel: Sequence[int], dilation: Sequence[int], padding: Sizes | str) -> list[tuple[int, int]]:
    """Return the padding before and after each dimension of a convolution; `padding` may be "valid" or "same"."""
    if not isinstance(padding, str):
        return [(one, one) for one in many(padding, len(kernel))]
    reach = [0 if padding == "valid" else step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
    return [(one // 2, one - one // 2) for one in reach]


def pad_widths(pad: Sequence[int], rank: int) -> list[tuple[int, int]]:
    """Return the padding before and after each dimension. `pad`: pairs for the last dimension, then for the one before,
    and so on."""
    pairs = list(zip(pad[::2], pad[1::2], strict=True))
    return [(0, 0)] * (rank - len(pairs)) + pairs[::-1]


def slice_bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Return the half-open bounds of a slice, counted from the front and clamped."""
    first, last, _ = slice(start, end).indices(size)
    return first, max(first, last)


def adaptive_windows(size: int, count: int) -> list[tuple[int, int]]:
    """Return the inputs of each output of an adaptive pool: floor(i * size / count) to ceil((i + 1) * size / count)."""
    return [(index * size // count, -(-(index + 1) * size // count)) for index in range(count)]


class Scores(NamedTuple):
    """How attention with a cache weighs its keys. A score is the product of a query and a key times `scale`, then
    `softcap` * tanh(score / `softcap`). `sinks` [query heads]: one extra score per head, which takes weight but adds no
    value."""

    scale: float
    softcap: float | None = None
    sinks: Any = None


def visible_keys(queries: Any, keys: Any, *, causal: bool, window: int | None) -> Any:
    """Return True where a query at position `queries` sees a key at position `keys` (arrays of one framework,
    broadcast); None if every query sees every key. A causal query sees itself and the `window - 1` positions before it.
    A query that is not causal sees up to `window` positions on either side. These are transformers' two conventions."""
    if not causal:
        return None if window is None else abs(keys - queries) <= window
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)
