"""What serving a stage takes, found before anything is allocated. Decides whether it fits a limit.

Four parts: weights as kept, caches, the memory of programs for single rows, and the values of the largest pass
(`sizes.measure` runs it without memory). A session's keys may be gathered from scattered pages, once more at a time.
Neighbours: `serving` asks at load.
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
    """Raise `ExecutionError` when weights, caches, programs for single rows (`rows_bytes`) and the largest pass exceed
    the limit, or when a value's size is not what the graph declares."""
    weights_bytes = weight_bytes(graph, options.weights, in_blocks=in_blocks)
    cache_bytes = sum(shape.nbytes(options) for shape in layers)
    held_bytes = weights_bytes + cache_bytes + rows_bytes + _import_bytes(graph, joined)
    if memory_limit_bytes is not None and held_bytes > memory_limit_bytes:
        raise ExecutionError(
            f"the stage takes {weights_bytes} bytes of weights as {options.weights}, {cache_bytes} of caches and "
            f"{rows_bytes} for decoding, {held_bytes} while weights come in; the limit is {memory_limit_bytes}.",
            hint="Take fewer pages or sessions, a smaller weight format or fewer blocks here, or lend more memory.",
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
    """Of all parameters as they are kept: packed for products, plain for what else reads them."""
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
    """The largest tensor, here unpacked while it is packed; one that is stacked of parts, besides its parts."""
    alone = max((prod(spec.shape) * 4 for spec in graph.params.values()), default=0)
    return max(alone, *(2 * 4 * prod(joined.graph.params[name].shape) for name in joined.parts), 0)
