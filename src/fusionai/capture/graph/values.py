"""Write torch's values in the IR's grammar: dtypes, sizes, specs of tensors, arguments of operators.

Sizes come from torch's tracer as sympy expressions over its own symbols; they become text in the grammar of
`ir.shapes`, over the graph's symbols. `capture.graph.lowering` converts the operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal

import torch

from fusionai.ir.graph import SYMINT
from fusionai.ir.schema import Arg, DeviceArg, DTypeArg, FloatArg, MemoryFormatArg, ValueSpec
from fusionai.primitives.tensors import ITEMSIZE_BYTES

_MEMORY_FORMATS: Final[Mapping[torch.memory_format, Literal["contiguous", "channels_last", "preserve"]]] = {
    torch.contiguous_format: "contiguous",
    torch.channels_last: "channels_last",
    torch.preserve_format: "preserve",
}


class Inexpressible(Exception):
    """An operation that the IR can't express; the message says why."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the IR's name of a dtype. Raises `Inexpressible` for one that it lacks."""
    name = str(dtype).removeprefix("torch.")
    if dtype.is_complex:
        raise Inexpressible("it is complex: store its parts in a last dimension of 2 and apply torch.view_as_complex")
    if name not in ITEMSIZE_BYTES:
        raise Inexpressible(f"it uses the dtype {name}")
    return name


def value_spec(value: Any, symbols: Mapping[str, str]) -> ValueSpec:
    """Return shape and dtype of a traced result over the graph's symbols. Raises `Inexpressible`."""
    match value:
        case torch.Tensor():
            if value.layout is not torch.strided:
                raise Inexpressible(f"it makes a tensor of layout {value.layout}")
            return ValueSpec(tuple(_dim(size, symbols) for size in value.shape), dtype_name(value.dtype))
        case torch.SymInt() | int():
            return ValueSpec((), SYMINT)
        case _:
            raise Inexpressible(f"it makes a {type(value).__name__}, not a tensor")


def plain_argument(value: Any) -> Arg:
    """Return an argument that is neither a traced value nor a list. Raises `Inexpressible`."""
    match value:
        case bool() | int() | str() | None:
            return value
        case float():
            if math.isnan(value):
                return FloatArg("nan")
            if math.isinf(value):
                return FloatArg("inf" if value > 0 else "-inf")
            return value
        case torch.dtype():
            return DTypeArg(dtype_name(value))
        case torch.device():
            return DeviceArg()
        case torch.memory_format():
            return MemoryFormatArg(_MEMORY_FORMATS[value])
        case _:
            raise Inexpressible(f"it has an argument of type {type(value).__name__}")


def _dim(size: int | torch.SymInt, symbols: Mapping[str, str]) -> int | str:
    if isinstance(size, int):
        return size
    try:
        return spell(size.node.expr, symbols)
    except ValueError as error:
        raise Inexpressible(f"the size of its result depends on the data ({error})") from None


def spell(expression: Any, symbols: Mapping[str, str]) -> int | str:
    """Return `expression` (sympy) over the graph's symbols. Raises `ValueError` on an unknown symbol (a size that
    depends on data) and on a function that the grammar lacks."""
    if expression.is_Integer:
        return int(expression)
    return _text(expression, symbols)


def _text(expression: Any, symbols: Mapping[str, str]) -> str:
    kind = type(expression).__name__
    if expression.is_Symbol:
        name = symbols.get(str(expression))
        if name is None:
            raise ValueError(f"unknown size {expression}")
        return name
    if expression.is_Integer:
        return str(int(expression)) if expression >= 0 else f"(0-{-int(expression)})"
    arguments = [_text(argument, symbols) for argument in expression.args]
    match kind:
        # Sorted, because sympy's order follows the tracer's symbol names.
        case "Add":
            return f"({'+'.join(sorted(arguments))})"
        case "Mul":
            return f"({'*'.join(sorted(arguments))})"
        case "Pow" if expression.exp.is_Integer and 0 < int(expression.exp) <= 4:
            return f"({'*'.join([arguments[0]] * int(expression.exp))})"
        case "FloorDiv" | "CleanDiv":
            return f"({arguments[0]}//{arguments[1]})"
        case "Mod" | "PythonMod":
            return f"({arguments[0]}%{arguments[1]})"
        case "Max" | "Min":
            arguments.sort()
            result = arguments[0]
            for argument in arguments[1:]:
                result = f"{kind.lower()}({result},{argument})"
            return result
        case _:
            raise ValueError(f"{kind} of {', '.join(arguments)}")
