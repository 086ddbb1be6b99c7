"""Computes the memory that serving a stage needs before anything is allocated, and checks it against the limit.

The sum has four parts: weights as kept, caches, programs for single rows, and the values of the largest pass
(`sizes.measure` runs it without memory). A session's keys may also be gathered from scattered pages, one session at a
time. Neighbours: `serving` calls this at load.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fusionai.backends.binding import largest
from fusionai.backends.counters import DropoutKey
from fusionai.backends.layer_shapes import LayerShape
from fusionai.backends.torch.interpreter import compile_graph
from fusionai.backends.torch.operators import Context
from fusionai.backends.torch.packed_graph import only_packed, products
from fusionai.backends.torch.packed_linear import packed_bytes
from fusionai.backends.torch.packed_siblings import Joined
from fusionai.backends.torch.sizes import META, input_shapes, measure
from fusionai.ir.schema import Graph
from fusionai.ir.serving import BATCH, SEQUENCE
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import tensor_bytes
from fusionai.wire.serving import ServeOptions, WeightFormat


def check_sizes(
    graph: Graph,
    joined: Joined,
    options: ServeOptions,
    layers: Sequence[LayerShape],
    rows_bytes: int,
    memory_limit_bytes: int | None,
    *,
    in_blocks: bool,
) -> None:
    """Raise `ExecutionError` if weights, caches, programs for single rows (`rows_bytes`) and the largest pass exceed
    the limit, or if a value's size differs from the graph's declaration."""
    weights_bytes = weight_bytes(graph, options.weights, in_blocks=in_blocks)
    cache_bytes = sum(shape.nbytes(options) for shape in layers)
    held_bytes = weights_bytes + cache_bytes + rows_bytes + _import_bytes(graph, joined)
    if memory_limit_bytes is not None and held_bytes > memory_limit_bytes:
        raise ExecutionError(
            f"the stage takes {weights_bytes} bytes of weights as {options.weights}, {cache_bytes} of caches and "
            f"{rows_bytes} for decoding, {held_bytes} during the import of weights; the limit is {memory_limit_bytes}.",
            hint="Use fewer pages or sessions, a smaller weight format or fewer blocks here, or lend more memory.",
        )
    symbols = largest(graph)
    if SEQUENCE in symbols:
        symbols[SEQUENCE] = max(graph.symbols[SEQUENCE][0], min(symbols[SEQUENCE], options.pass_tokens))
    if BATCH in symbols:
        symbols[BATCH] = graph.symbols[BATCH][0]
    measure(
        graph,
        compile_graph(graph, frozenset(graph.outputs), with_state_writes=False, device=META),
        input_shapes(graph, symbols),
        symbols,
        Context(training=False, key=DropoutKey(0, 0, 0)),
        grad_inputs=frozenset(),
        limit_bytes=None if memory_limit_bytes is None else memory_limit_bytes - held_bytes,
    )


def weight_bytes(graph: Graph, form: WeightFormat, *, in_blocks: bool = False) -> int:
    """Return the bytes of all parameters as they are kept: packed for products, plain for other readers."""
    uses = products(graph)
    plainless = only_packed(graph, uses)
    total_bytes = 0
    for name, spec in graph.params.items():
        orientations = {use.transposed for use in uses.values() if use.weight == name}
        for transposed in orientations:
            rows, columns = reversed(spec.shape) if transposed else spec.shape
            total_bytes += packed_bytes(rows, columns, form, in_blocks=in_blocks)
        if not orientations or name not in plainless:
            total_bytes += tensor_bytes(spec.dtype, spec.shape)
    return total_bytes


def _import_bytes(graph: Graph, joined: Joined) -> int:
    """Return the bytes of the largest tensor, which exists unpacked while it is packed; a stacked one exists together
    with its parts."""
    alone = max((prod(spec.shape) * 4 for spec in graph.params.values()), default=0)
    return max(alone, *(2 * 4 * prod(joined.graph.params[name].shape) for name in joined.parts), 0)
