"""Cost of a graph in generation: bytes kept and read per block, cache bytes per token, boundary bytes per position.

Decides the counting rules; measures nothing. A decode pass reads every matrix once, however few positions it has, but
only some rows of an embedding table. Matrices of products are counted in the requested format, everything else in its
own. Layers with an attention window keep a ring buffer of the window plus one pass per session; the caches of other
layers grow with the tokens.

`ir.cost` counts operations, `ir.serving` makes the graph, `scheduling` turns records into `BlockCost`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, inf, prod
from typing import Final, Literal

import msgspec

from fusionai.ir.cost import block_costs
from fusionai.ir.graph import reads
from fusionai.ir.schema import Graph, Node, Ref
from fusionai.ir.serving import SEQUENCE
from fusionai.ir.shapes import evaluate
from fusionai.primitives.tensors import ITEMSIZE_BYTES

WeightFormat = Literal["fp32", "bf16", "fp16", "int8", "int4"]
CacheFormat = Literal["fp32", "bf16", "fp16"]

FLOAT_BYTES: Final[Mapping[str, int]] = {"fp32": 4, "bf16": 2, "fp16": 2}
INT8_SCALE_BYTES: Final = 4
"""Bytes of the scale of each row."""
INT4_SCALE_BYTES: Final = 4
"""Bytes of the scale and middle of each group."""
INT4_GROUP: Final = 32
"""Weights per group of the 4-bit format."""
PRODUCTS: Final = frozenset({"aten.linear.default", "aten.addmm.default", "aten.mm.default", "aten.matmul.default"})
EMBEDDING: Final = "aten.embedding.default"
ATTENTION: Final = "fusion.attention"
BESIDE: Final = 2
"""Factor from the largest result of one operator to the memory of a pass, including values that are read later."""
LENGTH: Final = 256
"""Length of the text, in tokens, from which the costs that grow with length are determined."""


class ServingCostRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Cost of one block. Fields and meaning as in `scheduling.types.BlockCost`, for one position of one pass."""

    block: int
    forward_flops: float
    parameter_bytes: int
    looked_up_bytes: int
    workspace_bytes: int
    output_bytes: int
    cache_token_bytes: int
    cache_session_bytes: int
    attended_flops: float
    ops: tuple[str, ...]


def serving_costs(
    graph: Graph, *, weights: WeightFormat, cache: CacheFormat, pass_tokens: int, whole_tokens: int | None = None
) -> tuple[ServingCostRecord, ...]:
    """Return the cost of every block of a validated serving graph; index: block number.

    `whole_tokens`: number of positions that are recomputed for each new token (cacheless recompute); the block's inputs
    are then kept for each of them, in case a stage begins there.
    """
    symbols = dict.fromkeys(graph.symbols, 1)
    records = block_costs(graph, symbols, training=False)
    whole = None if whole_tokens is None else block_costs(graph, {**symbols, SEQUENCE: whole_tokens}, training=False)
    longer = records
    if whole is None and SEQUENCE in symbols:
        longer = block_costs(graph, {**symbols, SEQUENCE: LENGTH}, training=False)
    nodes: dict[int, list[Node]] = {record.block: [] for record in records}
    for node in graph.nodes:
        nodes[node.block].append(node)
    item_bytes = FLOAT_BYTES[cache]
    found: list[ServingCostRecord] = []
    for record, long in zip(records, longer, strict=True):
        kept, looked_up = _weight_bytes(graph, nodes[record.block], weights)
        growing, ring = 0, 0
        for node in nodes[record.block]:
            if node.op == ATTENTION and whole is None:
                token_bytes = item_bytes * _cached_elements(graph, node, symbols)
                window = node.kwargs.get("window")
                if isinstance(window, int):
                    ring += token_bytes * (window + pass_tokens)
                else:
                    growing += token_bytes
        if whole is not None and record.block > 0:
            growing = records[record.block - 1].output_bytes
        found.append(
            ServingCostRecord(
                block=record.block,
                forward_flops=(record if whole is None else whole[record.block]).forward_flops,
                parameter_bytes=kept,
                looked_up_bytes=looked_up,
                workspace_bytes=BESIDE * record.workspace_bytes * pass_tokens
                + _unpacked_bytes(graph, nodes[record.block]),
                output_bytes=record.output_bytes,
                cache_token_bytes=growing,
                cache_session_bytes=ring,
                attended_flops=_attended_flops(record.forward_flops, long.forward_flops) if growing else 0.0,
                ops=record.ops,
            )
        )
    return tuple(found)


def _attended_flops(alone: float, long: float) -> float:
    """Return the operations per position and attended position: the extra cost of a text of `LENGTH` over single
    positions.
    """
    return max(0.0, long - LENGTH * alone) / (LENGTH * (LENGTH - 1))


def balance_tokens(graph: Graph) -> float:
    """Return how many positions attention must read until one position takes twice the operations.

    Infinity if no cost grows with the text.
    """
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
        case "fp32" | "bf16" | "fp16":
            return rows * columns * FLOAT_BYTES[weights]
        case "int8":
            return rows * columns + INT8_SCALE_BYTES * rows
        case "int4":
            return ceil(rows * columns / 2) + INT4_SCALE_BYTES * ceil(rows * columns / INT4_GROUP)


def _weight_bytes(graph: Graph, nodes: list[Node], weights: WeightFormat) -> tuple[int, int]:
    """Return (bytes kept, bytes of these that are only looked up by rows).

    Matrices that only products read are packed, all others are kept as they are.
    """
    packed: set[str] = set()
    tables: set[str] = set()
    plain: set[str] = set()
    for node in nodes:
        for value in reads(node):
            if value in graph.params:
                is_matrix = len(graph.params[value].shape) == 2
                if node.op == EMBEDDING and value == next(reads(node)):
                    tables.add(value)
                elif node.op in PRODUCTS and is_matrix:
                    packed.add(value)
                else:
                    plain.add(value)
    tables -= plain
    looked_up = sum(_plain_bytes(graph, value) for value in tables)
    kept = looked_up + sum(_plain_bytes(graph, value) for value in plain)
    for value in packed:
        rows, columns = graph.params[value].shape
        kept += matrix_bytes(rows, columns, weights)
    return kept, looked_up


def _unpacked_bytes(graph: Graph, nodes: list[Node]) -> int:
    """Size of the largest parameter in float32, which is in memory while it is packed."""
    return max(
        (4 * prod(graph.params[value].shape) for node in nodes for value in reads(node) if value in graph.params),
        default=0,
    )


def _plain_bytes(graph: Graph, value: str) -> int:
    spec = graph.params[value]
    return prod(spec.shape) * ITEMSIZE_BYTES[spec.dtype]


def _cached_elements(graph: Graph, node: Node, symbols: Mapping[str, int]) -> int:
    """Number of elements of keys and values [b, heads, s, d] together, for one position."""
    elements = 0
    for arg in node.args[1:3]:
        if isinstance(arg, Ref):
            _, heads, _, width = (evaluate(dim, symbols) for dim in graph.values[arg.name].shape)
            elements += heads * width
    return elements
