"""Cost of a graph: floating-point operations and bytes per node and per block, from shapes alone.

Decides the counting rules; measures nothing. A multiply-add counts as two operations. Products, convolutions and
attention are counted exactly. Other operators are counted roughly (one per element; five for softmax and
normalisation), because memory bandwidth limits them; the bytes they read and write are counted separately. Backward: a
product costs its forward once per operand that needs a gradient, attention 2.5 times its forward (scores are
recomputed, as in FlashAttention, arXiv 2205.14135, section 3), other operators once their forward.

`ir.operators` names the rules, `ir.serving_cost` counts generation by these costs, `scheduling` turns costs into
seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Final

import msgspec

from fusionai.ir.graph import (
    cheap_nodes,
    consumers,
    copied_weights,
    copy_bytes,
    needing_gradient,
    nodes_by_block,
    reads,
)
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Graph, Node, Ref
from fusionai.ir.shapes import evaluate
from fusionai.ir.weights import stored_bytes
from fusionai.primitives.errors import GraphError
from fusionai.primitives.tensors import ITEMSIZE_BYTES

FLOPS_PER_ELEMENT: Final = 5
"""Operations per element of softmax, normalisation and losses: subtract, square or exponential, sum, divide, scale."""
ATTENTION_BACKWARD: Final = 2.5
"""Operations of attention's backward pass relative to its forward pass."""


class BlockCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Costs of one block of the graph: for one microbatch at the job's sizes, in serving for one position of a pass."""

    block: int
    forward_flops: float
    backward_flops: float
    parameter_bytes: int
    """Storage of the parameters held by this block (a tied parameter counts in each block that holds it)."""
    trainable_bytes: int
    activation_bytes: int
    """Activations kept from forward to backward, per microbatch."""
    workspace_bytes: int = 0
    output_bytes: int
    """Activations sent forward over a cut after this block."""
    gradient_bytes: int
    """Gradients sent back over that cut."""
    ops: tuple[str, ...] = ()
    calls: int = 0
    """Operators that make tensors, including views, per microbatch."""
    moved_bytes: float = 0.0
    """Bytes read and written by operators that are not views per microbatch, forward and backward."""
    looked_up_bytes: int = 0
    """Serving: part of `parameter_bytes` that a pass of one position does not read: other rows of tables, and experts
    that it does not choose. Passes of several positions choose more experts."""
    cache_token_bytes: int = 0
    """Serving: keys and values of one token, in layers with full attention."""
    cache_session_bytes: int = 0
    """Serving: ring buffers of layers with windowed attention, and states, for one session."""
    attended_flops: float = 0.0
    """Serving: operations of one position for each earlier position, in layers with full attention. They make long
    prompts slow; the predicted time per token leaves them out."""


def block_costs(
    graph: Graph, symbols: Mapping[str, int], *, training: bool, copies: bool = False
) -> tuple[BlockCost, ...]:
    """Return the cost of every block at these sizes; index: block number. Without `training`, backward, gradients and
    kept activations are 0. `copies`: training runs in bfloat16, so that copies of weights count as activations. Raises
    `GraphError` if a symbol has no value."""
    costs = _Prices(graph, symbols, training=training).records()
    more_bytes = Counter[int]()
    for block, value in copied_weights(graph) if copies else ():
        more_bytes[block] += copy_bytes(graph.params[value])
    return tuple(
        msgspec.structs.replace(cost, activation_bytes=cost.activation_bytes + more_bytes[cost.block]) for cost in costs
    )


def forward_flops(node: Node, sizes: Mapping[str, tuple[int, ...]]) -> float:
    """Return the floating-point operations of one node. `sizes`: value name -> its size, without symbolic integers."""
    results = sum(prod(sizes[value]) for value in node.outputs if value in sizes)
    match OPERATORS[node.op].flops:
        case "none":
            return 0.0
        case "element":
            return float(results)
        case "reduce":
            return float(_largest(node, sizes))
        case "softmax" | "norm":
            return float(FLOPS_PER_ELEMENT * _largest(node, sizes))
        case "matmul":
            left = _operand(node, sizes, 1 if node.op in ("aten.addmm.default", "aten.baddbmm.default") else 0)
            return 2.0 * results * left[-1]
        case "conv":
            return 2.0 * results * prod(_operand(node, sizes, 1)[1:])
        case "conv_transpose":
            return 2.0 * prod(_operand(node, sizes, 0)) * prod(_operand(node, sizes, 1)[1:])
        case "attention":
            (batch, heads, queries, width), (_, _, keys, out_width) = _operand(node, sizes, 0), _operand(node, sizes, 2)
            return 2.0 * batch * heads * queries * keys * (width + out_width)
        case "scan":
            # For each element of the state: decay and add. With a state per pair of key and value, also write and read.
            return 2.0 * results if node.op == "fusion.linear_scan" else 6.0 * results * _operand(node, sizes, 1)[-1]


class _Prices:
    def __init__(self, graph: Graph, symbols: Mapping[str, int], *, training: bool) -> None:
        self.graph = graph
        self.training = training
        self.cheap = cheap_nodes(graph)
        self.readers = consumers(graph)
        self.needs_grad = needing_gradient(graph) if training else frozenset[str]()
        self.sizes = {
            value: tuple(evaluate(dim, symbols) for dim in spec.shape)
            for value, spec in graph.values.items()
            if spec.dtype in ITEMSIZE_BYTES
        }
        self.roots = self._storage()

    def records(self) -> tuple[BlockCost, ...]:
        members = nodes_by_block(self.graph)
        crossing, returning = self._crossing(len(members))
        return tuple(
            self._record(block, nodes, crossing[block], returning[block]) for block, nodes in enumerate(members)
        )

    def _record(self, block: int, nodes: list[Node], output_bytes: int, gradient_bytes: int) -> BlockCost:
        params = {
            value: self.graph.params[value] for node in nodes for value in reads(node) if value in self.graph.params
        }
        return BlockCost(
            block=block,
            forward_flops=sum(forward_flops(node, self.sizes) for node in nodes),
            backward_flops=sum(self._backward_flops(node) for node in nodes),
            parameter_bytes=sum(
                stored_bytes(spec.shape, spec.stored) if spec.stored else self._bytes(value)
                for value, spec in params.items()
            ),
            trainable_bytes=sum(self._bytes(value) for value, spec in params.items() if spec.trainable),
            activation_bytes=self._kept_bytes(nodes),
            # One node's results and, in training, their gradients exist only briefly.
            workspace_bytes=(2 if self.training else 1)
            * max((sum(self._bytes(value) for value in node.outputs) for node in nodes), default=0),
            output_bytes=output_bytes,
            gradient_bytes=gradient_bytes,
            ops=tuple(sorted({node.op for node in nodes})),
            calls=sum(any(value in self.sizes for value in node.outputs) for node in nodes),
            moved_bytes=sum(self._moved_bytes(node) for node in nodes),
        )

    def _backward_flops(self, node: Node) -> float:
        """Operations of the node's backward pass. Operands that need no gradient cost nothing."""
        if not any(value in self.needs_grad for value in node.outputs):
            return 0.0
        forward = forward_flops(node, self.sizes)
        match OPERATORS[node.op].flops:
            case "matmul" | "conv" | "conv_transpose":
                return forward * sum(value in self.needs_grad for value in _factors(node))
            case "attention":
                return forward * ATTENTION_BACKWARD
            case _:
                return forward

    def _moved_bytes(self, node: Node) -> float:
        """Bytes of operands and results, once forward, and for backward scaled by its operations. A lookup reads some
        rows of its table, but the gradient of the table is as large as the table."""
        if OPERATORS[node.op].view:
            return 0.0
        results = sum(self._bytes(value) for value in node.outputs)
        touched = results + sum(self._bytes(value) for value in reads(node))
        forward = 2 * results if OPERATORS[node.op].category == "index" else touched
        if not any(value in self.needs_grad for value in node.outputs):
            return float(forward)
        flops = forward_flops(node, self.sizes)
        return forward + touched * (self._backward_flops(node) / flops if flops > 0 else 1.0)

    def _kept_bytes(self, nodes: list[Node]) -> int:
        """Bytes of distinct storage kept from forward to backward. Views share storage; parameters don't count."""
        kept: set[str] = set()
        for node in nodes:
            if not any(value in self.needs_grad for value in node.outputs):
                continue
            match OPERATORS[node.op].saves:
                case "nothing":
                    continue
                case "result":
                    values = node.outputs
                case "operands":
                    values = self._saved_operands(node)
            kept.update(self.roots.get(value, value) for value in values)
            if OPERATORS[node.op].category in ("attention", "scan"):
                kept.update(node.outputs)
        return sum(self._bytes(value) for value in kept if value not in self.graph.params)

    def _saved_operands(self, node: Node) -> tuple[str, ...]:
        found = tuple(reads(node))
        if OPERATORS[node.op].flops not in ("matmul", "conv", "conv_transpose"):
            return found
        # A factor is kept only if the gradient of the other one is needed.
        factors = _factors(node)
        wanted = [value in self.needs_grad for value in factors]
        return tuple(factors[1 - i] for i in range(len(factors)) if wanted[i])

    def _crossing(self, count: int) -> tuple[list[int], list[int]]:
        """Bytes that cross a cut after each block, forward and backward. Cheap values are recomputed."""
        output_bytes, gradient_bytes = [0] * count, [0] * count
        for node in self.graph.nodes:
            if node.id in self.cheap:
                continue
            for value in node.outputs:
                readers = [reader for reader in self.readers.get(value, ()) if reader.id not in self.cheap]
                for block in range(node.block, max((reader.block for reader in readers), default=0)):
                    output_bytes[block] += self._bytes(value)
                    gradient_bytes[block] += self._bytes(value) if value in self.needs_grad else 0
        return output_bytes, gradient_bytes

    def _storage(self) -> dict[str, str]:
        """View -> the value whose memory it shares."""
        roots: dict[str, str] = {}
        for node in self.graph.nodes:
            if OPERATORS[node.op].view:
                source = next(reads(node))
                for value in node.outputs:
                    roots[value] = roots.get(source, source)
        return roots

    def _bytes(self, value: str) -> int:
        spec = self.graph.values[value]
        return prod(self.sizes[value]) * ITEMSIZE_BYTES[spec.dtype] if value in self.sizes else 0


def _factors(node: Node) -> tuple[str, ...]:
    """Names of the two tensors of a product or convolution, without the bias."""
    first = 1 if node.op in ("aten.addmm.default", "aten.baddbmm.default") else 0
    return tuple(arg.name for arg in node.args[first : first + 2] if isinstance(arg, Ref))


def _operand(node: Node, sizes: Mapping[str, tuple[int, ...]], position: int) -> tuple[int, ...]:
    arg = node.args[position] if position < len(node.args) else None
    if not isinstance(arg, Ref) or arg.name not in sizes:
        raise GraphError(f"node {node.id} ({node.op}): expected a tensor as argument {position}.")
    return sizes[arg.name]


def _largest(node: Node, sizes: Mapping[str, tuple[int, ...]]) -> int:
    return max((prod(sizes[value]) for value in reads(node) if value in sizes), default=0)
