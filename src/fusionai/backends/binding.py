"""Checks a stage's inputs against what its graph declares, and derives the sizes of the graph's symbols.

Framework-free and shared by all backends; called before anything is allocated. Neighbours: `ir.shapes` evaluates the
expressions.

Also here: `check_indices`, because compiled code returns NaN for an index outside a table instead of an error; how
errors name nodes; which operators mixed precision concerns; and operators on sizes (plain
integers), the same on every backend, with an upper limit on every size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np

from fusionai.ir.schema import Graph, Node, Ref
from fusionai.ir.serving import SEQUENCE
from fusionai.ir.shapes import bounds, evaluate, symbols_of
from fusionai.primitives.errors import ExecutionError, nearest
from fusionai.primitives.tensors import HostTensor


def bind_symbols(
    graph: Graph, inputs: Mapping[str, HostTensor], needed: Collection[str], *, half_floats: bool = False
) -> dict[str, int]:
    """Return symbol name -> size, derived from the shapes of `inputs`. With `half_floats`, a float32 input may come as
    bfloat16. Raises `ExecutionError` on a missing or unknown input, a wrong dtype or rank, a size outside its symbol's
    range, or sizes that contradict each other."""
    for name in inputs:
        if name not in graph.inputs:
            raise ExecutionError(f"the stage has no input {name!r}; {nearest(name, graph.inputs)}")
    for name in needed:
        if name not in inputs:
            raise ExecutionError(f"expected input {name!r}, got only {', '.join(sorted(inputs)) or 'none'}.")
    symbols: dict[str, int] = {}
    for name, tensor in inputs.items():
        spec = graph.values[name]
        declared = "int64" if spec.dtype == "symint" else spec.dtype
        if tensor.dtype != declared and not (half_floats and declared == "float32" and tensor.dtype == "bfloat16"):
            raise ExecutionError(f"expected input {name!r} as {declared}, got {tensor.dtype}.")
        if len(tensor.shape) != len(spec.shape):
            raise ExecutionError(f"expected input {name!r} of shape {list(spec.shape)}, got {list(tensor.shape)}.")
        for dim, size in zip(spec.shape, tensor.shape, strict=True):
            if isinstance(dim, str) and dim in graph.symbols:
                _bind(graph, symbols, name, dim, size)
    for name, tensor in inputs.items():
        for dim, size in zip(graph.values[name].shape, tensor.shape, strict=True):
            _check(graph, symbols, name, dim, size)
    return symbols


def largest(graph: Graph) -> dict[str, int]:
    """Return every symbol at its largest value."""
    return {name: high for name, (_, high) in graph.symbols.items()}


def shape_of(graph: Graph, value: str, symbols: Mapping[str, int]) -> tuple[int, ...]:
    """Return the declared shape of a value at these sizes of the symbols."""
    return tuple(evaluate(dim, symbols) for dim in graph.values[value].shape)


def with_rows(graph: Graph, rows: int) -> dict[str, int]:
    """Return the sizes of the symbols in a pass of `rows` rows."""
    return {**dict.fromkeys(graph.symbols, 1), SEQUENCE: rows}


def describe(node: Node) -> str:
    """Return how error messages name a node."""
    return f"node {node.id} ({node.op}{' of ' + node.path if node.path else ''})"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text: frameworks append their own stack after it."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


OPERATOR_FAILURES: Final = (
    RuntimeError,
    IndexError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
)
"""Errors that frameworks raise on operands that do not fit."""
IN_FLOAT32: Final = frozenset({"reduce", "norm", "softmax", "scan", "loss"})
"""Categories of operators that run in float32 under bf16 precision."""


def _bind(graph: Graph, symbols: dict[str, int], name: str, symbol: str, size: int) -> None:
    low, high = graph.symbols[symbol]
    if not low <= size <= high:
        raise ExecutionError(f"input {name!r} has size {size} where {symbol!r} must be from {low} to {high}.")
    if symbols.setdefault(symbol, size) != size:
        raise ExecutionError(f"input {name!r} has size {size} where {symbol!r} is {symbols[symbol]} elsewhere.")


def _check(graph: Graph, symbols: Mapping[str, int], name: str, dim: int | str, size: int) -> None:
    if symbols_of(dim) <= symbols.keys():
        expected = evaluate(dim, symbols)
        if size != expected:
            raise ExecutionError(f"input {name!r} has size {size} where {dim} = {expected} is expected.")
        return
    # No input gives this symbol's value directly, but the expression can still be bounded.
    low, high = bounds(dim, graph.symbols)
    if not low <= size <= high:
        raise ExecutionError(f"input {name!r} has size {size} where {dim} must be from {low} to {high}.")


TABLES: Final = {
    "aten.embedding.default": (0, 1),
    "aten.index_select.default": (0, 2),
    "fusion.expert_linear": (1, 2),
}
"""Operator -> positions of its table and of its indices among the arguments. Indices refer to the table's first
dimension, or to dimension `args[1]` of index_select."""


def check_indices(graph: Graph, nodes: Sequence[Node], inputs: Mapping[str, HostTensor]) -> None:
    """Raise `ExecutionError` naming the node and the first index out of range."""
    for node in nodes:
        places = TABLES.get(node.op)
        if places is None or len(node.args) <= max(places):
            continue
        table, indices = node.args[places[0]], node.args[places[1]]
        if not isinstance(table, Ref) or not isinstance(indices, Ref) or indices.name not in inputs:
            continue
        dim = node.args[1] if node.op == "aten.index_select.default" else 0
        shape = graph.values[table.name].shape
        size = shape[dim] if isinstance(dim, int) and -len(shape) <= dim < len(shape) else None
        given = inputs[indices.name]
        if not isinstance(size, int) or not given.nbytes or given.dtype not in ("int64", "int32"):
            continue
        values = np.frombuffer(given.data, given.dtype)
        outside = values[(values < 0) | (values >= size)]
        if outside.size:
            raise ExecutionError(f"{describe(node)}: expected indices from 0 to {size - 1}, got {int(outside[0])}.")


MAX_SIZE: Final = 2**48
"""Upper limit on a size computed in a graph; chosen. Without it, repeated products could fill the memory with a single
integer."""


def _bounded(compute: Callable[..., int]) -> Callable[..., int]:
    def run(*sizes: int) -> int:
        size = compute(*sizes)
        if abs(size) > MAX_SIZE:
            raise ExecutionError(f"a size computed in the graph is above {MAX_SIZE}.")
        return size

    return run


SIZES: Final[Mapping[str, Callable[..., int]]] = MappingProxyType(
    {
        "sym.add": _bounded(operator.add),
        "sym.sub": _bounded(operator.sub),
        "sym.mul": _bounded(operator.mul),
        "sym.floordiv": _bounded(operator.floordiv),
        "sym.mod": _bounded(operator.mod),
        "sym.neg": _bounded(lambda size: -size),
        "sym.max": _bounded(max),
        "sym.min": _bounded(min),
        "aten.sym_size.int": lambda x, dim: x.shape[dim],
    }
)
