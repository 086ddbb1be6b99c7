"""Cost of a serving graph: operations and bytes per block when it generates, by weight and cache format.

In generation, a decode pass reads every matrix once, however few positions it has, but only some rows of an embedding
table, and only the chosen experts. Matrices of products are counted in the requested format, everything else in its
own. Layers with an attention window keep a ring buffer of the window plus one pass per session, nodes that carry a
state two states; the caches of other layers grow with the tokens.

`ir.cost` counts operators, `ir.serving` makes the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, inf, prod
from typing import Final, Literal

import msgspec

from fusionai.ir.cost import BlockCost, block_costs
from fusionai.ir.graph import nodes_by_block, reads
from fusionai.ir.levels import LevelLayout, level_layout
from fusionai.ir.packed import packed_bytes
from fusionai.ir.schema import Graph, Node, ParamSpec, Ref
from fusionai.ir.serving import ATTENTION, EXPERT_PRODUCT, PRODUCTS, SEQUENCE
from fusionai.ir.shapes import evaluate
from fusionai.ir.states import state_shapes
from fusionai.primitives.errors import GraphError
from fusionai.primitives.tensors import tensor_bytes

WeightFormat = Literal["fp32", "bf16", "fp16", "int8", "int4", "packed"]
CacheFormat = Literal["fp32", "bf16", "fp16", "int8"]

FLOAT_BYTES: Final[Mapping[str, int]] = {"fp32": 4, "bf16": 2, "fp16": 2, "packed": 4}
"""Bytes of a number. `packed`: of a matrix that the files don't hold packed."""
INT8_SCALE_BYTES: Final = 4
"""Bytes of the scale of each row of a matrix, and of each cached key or value."""
INT4_SCALE_BYTES: Final = 4
"""Bytes of the scale and middle of each group."""
INT4_GROUP: Final = 32
"""Weights per group of the 4-bit format."""
EMBEDDING: Final = "aten.embedding.default"
BESIDE: Final = 2
"""Factor from the largest result of one operator to the memory of a pass, including values that are read later."""
DECODING_BYTES: Final = 8 * 2**20
"""Memory of programs for single tokens and of attention's scratch (measured on processors: 1 to 8 MB, the more the
longer the lines and the more threads)."""
STACKED_BYTES: Final = 64 * 2**20
"""Bytes, as float32, up to which backends stack matrices that multiply the same value; chosen. Larger ones would gain
nothing and be in memory twice while they are stacked."""
LENGTH: Final = 256
"""Length of the text, in tokens, from which the costs that grow with length are determined."""


def serving_costs(
    graph: Graph,
    *,
    weights: WeightFormat,
    cache: CacheFormat,
    pass_tokens: int,
    whole_tokens: int | None = None,
) -> tuple[BlockCost, ...]:
    """Return the cost of every block of a validated serving graph; index: block number. `whole_tokens`: number of
    positions that are recomputed for each new token (cacheless recompute); the block's inputs are then kept for each of
    them, in case a stage begins there."""
    symbols = dict.fromkeys(graph.symbols, 1)
    records = block_costs(graph, symbols, training=False)
    whole = None if whole_tokens is None else block_costs(graph, {**symbols, SEQUENCE: whole_tokens}, training=False)
    longer = records
    if whole is None and SEQUENCE in symbols:
        longer = block_costs(graph, {**symbols, SEQUENCE: LENGTH}, training=False)
    states = {} if whole is not None else _state_bytes(graph)
    found: list[BlockCost] = []
    for record, long, members in zip(records, longer, nodes_by_block(graph), strict=True):
        kept, looked_up = _weight_bytes(graph, members, weights, symbols)
        growing, ring = 0, 0
        for node in members:
            if node.op == ATTENTION and whole is None:
                token_bytes = _cached_bytes(graph, node, symbols, cache)
                window = node.kwargs.get("window")
                if isinstance(window, int):
                    ring += token_bytes * (window + pass_tokens)
                else:
                    growing += token_bytes
        ring += sum(states.get(node.id, 0) for node in members)
        if whole is not None and record.block > 0:
            growing = records[record.block - 1].output_bytes
        found.append(
            BlockCost(
                block=record.block,
                forward_flops=(record if whole is None else whole[record.block]).forward_flops,
                backward_flops=0.0,
                parameter_bytes=kept,
                trainable_bytes=0,
                activation_bytes=0,
                workspace_bytes=max(
                    BESIDE * record.workspace_bytes * pass_tokens, _unpacked_bytes(graph, members, weights)
                )
                + DECODING_BYTES,
                output_bytes=record.output_bytes,
                gradient_bytes=0,
                ops=record.ops,
                looked_up_bytes=looked_up,
                cache_token_bytes=growing,
                cache_session_bytes=ring,
                attended_flops=_attended_flops(record.forward_flops, long.forward_flops) if growing else 0.0,
            )
        )
    return tuple(found)


def text_costs(graph: Graph, *, text_tokens: int, longest_tokens: int) -> tuple[BlockCost, ...]:
    """Return the cost of every block of an encoder for one text of `text_tokens`, with room for one of
    `longest_tokens`. Nothing is cached, and weights are kept in float32."""
    symbols = dict.fromkeys(graph.symbols, 1)
    texts = block_costs(graph, {**symbols, SEQUENCE: text_tokens}, training=False)
    longest = block_costs(graph, {**symbols, SEQUENCE: longest_tokens}, training=False)
    found: list[BlockCost] = []
    for record, long, members in zip(texts, longest, nodes_by_block(graph), strict=True):
        kept, looked_up = _weight_bytes(graph, members, "fp32", {**symbols, SEQUENCE: text_tokens})
        found.append(
            msgspec.structs.replace(
                record,
                parameter_bytes=kept,
                trainable_bytes=0,
                workspace_bytes=BESIDE * long.workspace_bytes,
                looked_up_bytes=looked_up,
                calls=0,
                moved_bytes=0.0,
            )
        )
    return tuple(found)


def _state_bytes(graph: Graph) -> dict[int, int]:
    """Return node -> bytes of the states it keeps for one session; none for a graph that can't be continued."""
    try:
        return {state.node: state.session_bytes for state in state_shapes(graph)}
    except GraphError:
        return {}


def _attended_flops(alone: float, long: float) -> float:
    """Return the operations per position and attended position: the extra cost of `LENGTH` positions at once."""
    return max(0.0, long - LENGTH * alone) / (LENGTH * (LENGTH - 1))


def balance_tokens(graph: Graph) -> float:
    """Return how many positions attention must read until one position takes twice the operations; infinity if no cost
    grows with the text."""
    symbols = dict.fromkeys(graph.symbols, 1)
    if SEQUENCE not in symbols:
        return inf

    def flops(length: int) -> float:
        records = block_costs(graph, {**symbols, SEQUENCE: length}, training=False)
        return sum(record.forward_flops for record in records)

    alone = flops(1)
    growing = _attended_flops(alone, flops(LENGTH))
    return alone / growing if growing > 0 else inf


def matrix_bytes(rows: int, columns: int, weights: WeightFormat) -> int:
    """Size in bytes of a matrix [rows, columns] as a stage keeps it for products."""
    match weights:
        case "fp32" | "bf16" | "fp16" | "packed":
            return rows * columns * FLOAT_BYTES[weights]
        case "int8":
            return rows * columns + INT8_SCALE_BYTES * rows
        case "int4":
            return ceil(rows * columns / 2) + INT4_SCALE_BYTES * ceil(rows * columns / INT4_GROUP)


def _weight_bytes(
    graph: Graph, nodes: list[Node], weights: WeightFormat, symbols: Mapping[str, int]
) -> tuple[int, int]:
    """Return (bytes kept, bytes of these that a pass of one position does not read). Matrices that only products read
    are packed, all others are kept as they are."""
    packed: dict[str, bool] = {}
    """Matrices, and whether products read them as [in, out]."""
    experts: dict[str, int] = {}
    """Stacks of experts' matrices, and how many a position chooses."""
    tables: set[str] = set()
    plain: set[str] = set()
    for node in nodes:
        for value in reads(node):
            if value in graph.params:
                dimensions = len(graph.params[value].shape)
                if node.op == EMBEDDING and value == next(reads(node)):
                    tables.add(value)
                elif node.op in PRODUCTS and dimensions == 2:
                    packed[value] = packed.get(value, False) or _by_columns(node)
                elif node.op == EXPERT_PRODUCT and dimensions == 3:
                    packed[value] = _by_columns(node)
                    experts[value] = evaluate(graph.values[next(reads(node))].shape[0], symbols)
                else:
                    plain.add(value)
    tables -= plain
    looked_up = sum(_table_bytes(graph, value, weights) for value in tables)
    kept = looked_up + sum(_plain_bytes(graph, value) for value in plain)
    for value, transposed in packed.items():
        matrix_count = graph.params[value].shape[0] if value in experts else 1
        held_bytes = matrix_count * _product_bytes(graph.params[value], weights, transposed=transposed)
        kept += held_bytes
        if value in experts:
            looked_up += held_bytes - held_bytes * min(matrix_count, experts[value]) // matrix_count
    return kept, looked_up


def _product_bytes(spec: ParamSpec, weights: WeightFormat, *, transposed: bool) -> int:
    """Return the bytes of a product's matrix, or of each of a stack."""
    rows, columns = spec.shape[-2:]
    layout = _kept_layout(spec, weights, transposed=transposed)
    if layout is None:
        return matrix_bytes(*((columns, rows) if transposed else (rows, columns)), weights)
    return rows * columns // layout.shared * layout.shared_bytes


def _kept_layout(spec: ParamSpec, weights: WeightFormat, *, transposed: bool) -> LevelLayout | None:
    """Return the layout in which a product's weight stays as its file holds it. Quantised files share scales within
    rows, so a product of a matrix's columns needs the numbers; experts' files are turned with their matrices."""
    if weights != "packed" or (transposed and len(spec.shape) == 2):
        return None
    return level_layout(spec, transposed=transposed)


def _unpacked_bytes(graph: Graph, nodes: list[Node], weights: WeightFormat) -> int:
    """Size of what is in memory in float32 while it is packed: the largest parameter, or matrices that are stacked
    together with their stack. What stays as its file holds it is not counted."""
    largest, stacks = 0, dict[str, list[int]]()
    for node in nodes:
        for value in reads(node):
            spec = graph.params.get(value)
            if spec is None or _kept_layout(spec, weights, transposed=_by_columns(node)) is not None:
                continue
            size_bytes = 4 * prod(spec.shape)
            largest = max(largest, size_bytes)
            if node.op == "aten.linear.default" and isinstance(node.args[0], Ref) and node.args[0].name != value:
                stacks.setdefault(node.args[0].name, []).append(size_bytes)
    stacked = (2 * sum(sizes) for sizes in stacks.values() if len(sizes) > 1 and sum(sizes) <= STACKED_BYTES)
    return max(largest, *stacked, 0)


def _by_columns(node: Node) -> bool:
    """Return whether a node multiplies by matrices [in, out]."""
    if node.op == EXPERT_PRODUCT:
        return node.kwargs.get("transposed") is True
    return node.op in PRODUCTS and node.op != "aten.linear.default"


def _table_bytes(graph: Graph, value: str, weights: WeightFormat) -> int:
    spec = graph.params[value]
    packed = weights == "packed" and level_layout(spec) is not None
    return packed_bytes(spec.packed) if packed else tensor_bytes(spec.dtype, spec.shape)


def _plain_bytes(graph: Graph, value: str) -> int:
    spec = graph.params[value]
    return tensor_bytes(spec.dtype, spec.shape)


def _cached_bytes(graph: Graph, node: Node, symbols: Mapping[str, int], cache: CacheFormat) -> int:
    """Size of keys and values [b, heads, s, d] together, for one position."""
    total_bytes = 0
    for arg in node.args[1:3]:
        if isinstance(arg, Ref):
            _, heads, _, width = (evaluate(dim, symbols) for dim in graph.values[arg.name].shape)
            total_bytes += heads * vector_bytes(width, cache)
    return total_bytes


def vector_bytes(width: int, cache: CacheFormat) -> int:
    """Size of one head's key or value as a cache keeps it: in `int8`, with a scale in float32 behind its levels."""
    return width + INT8_SCALE_BYTES if cache == "int8" else width * FLOAT_BYTES[cache]
