"""Which nodes of a serving graph multiply by a parameter or work element by element. Decides the kernels they get.

A matrix that is also read otherwise (an embedding tied to the head) is kept twice: packed for products, plain for the
rest. Elementwise operators whose last few elements would take another code path than the others are given whole
blocks, so that a value's bits do not depend on how many there are. Neighbours: `packed_linear` makes the products,
`interpreter` calls what is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from fusionai.backends.torch.host import DTYPES
from fusionai.backends.torch.operators import LOOKUPS, PLAIN, guarded
from fusionai.backends.torch.packed_linear import PackedLinear
from fusionai.ir.graph import reads
from fusionai.ir.schema import Graph, Node, Ref

_LINEAR: Final = "aten.linear.default"
_ADDMM: Final = "aten.addmm.default"
_PLAIN_PRODUCTS: Final = frozenset({"aten.mm.default", "aten.matmul.default"})
_EMBEDDING: Final = "aten.embedding.default"
_TAILED: Final = frozenset(
    f"aten.{name}.default"
    for name in (
        *("silu", "gelu", "sigmoid", "softplus", "tanh", "exp", "log", "log1p", "erf", "elu", "mish", "log_sigmoid"),
        *("hardswish", "hardsigmoid", "cos", "sin"),
    )
) | {"aten.pow.Tensor_Scalar"}
"""Functions of one operand whose vectorised and scalar forms may round differently. Roots and quotients are exact."""
_BLOCK: Final = 64
"""Elements that every vectorised loop takes in whole steps."""
_UNSPLIT: Final = 16_384
"""At most so many elements are never shared among threads, whose shares would have ends of their own."""


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter in memory: `plain` for whatever reads it, `packed` for each product (node id)."""

    plain: torch.Tensor | None
    packed: Mapping[int, PackedLinear]


@dataclass(frozen=True, slots=True)
class Use:
    """A product's parameter: `transposed` if it is stored [in, out]. `bias`: its value, None: none."""

    node: int
    weight: str
    transposed: bool
    bias: str | None


def products(graph: Graph) -> dict[int, Use]:
    """Node id -> the parameter it multiplies by, for every product of an activation with a matrix."""
    found: dict[int, Use] = {}
    for node in graph.nodes:
        use = _use(node)
        if use is None or use.weight not in graph.params or len(graph.params[use.weight].shape) != 2:
            continue
        biased = use.bias is None or use.bias in graph.params
        operands = [value for value in reads(node) if value not in (use.weight, use.bias)]
        floats = graph.params[use.weight].dtype == "float32"
        if biased and floats and len(operands) == 1 and operands[0] not in graph.params:
            found[node.id] = use
    return found


def only_packed(graph: Graph, uses: Mapping[int, Use]) -> frozenset[str]:
    """Parameters that nothing but products (and their biases) read: no plain copy is needed."""
    weights = {use.weight for use in uses.values()} | {use.bias for use in uses.values() if use.bias is not None}
    otherwise = {
        value
        for node in graph.nodes
        for value in reads(node)
        if node.id not in uses or value not in (uses[node.id].weight, uses[node.id].bias)
    }
    return frozenset(weights - otherwise - set(graph.outputs.values()))


def lookup_tables(graph: Graph) -> frozenset[str]:
    """Parameters whose every reader but products looks rows up: they may stay as narrow as their file has them."""
    uses = products(graph)
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for value in reads(node):
            if value in graph.params and node.id not in uses:
                readers.setdefault(value, []).append(node)
    return frozenset(
        value
        for value, nodes in readers.items()
        if all(node.op == _EMBEDDING and next(reads(node)) == value for node in nodes)
        and value not in graph.outputs.values()
    )


def kernels(graph: Graph, uses: Mapping[int, Use], tables: frozenset[str]) -> dict[int, Callable[..., Any]]:
    """Node id -> what to call in the place of its operator. Parameters in `uses` and `tables` come as `Held`."""
    held = {use.weight for use in uses.values()} | tables
    found: dict[int, Callable[..., Any]] = {}
    for node in graph.nodes:
        if node.id in uses:
            found[node.id] = _product(node)
        elif node.op == _EMBEDDING and next(reads(node)) in held:
            found[node.id] = _lookup(DTYPES[graph.values[node.outputs[0]].dtype])
        elif any(value in held for value in reads(node)):
            found[node.id] = _unwrapped(node)
        elif node.op in _TAILED and not _whole_blocks(graph, node):
            found[node.id] = whole_blocks(PLAIN[node.op])
    return found


def whole_blocks(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`compute`, elementwise on its first operand, given full blocks of contiguous elements only."""
    one_thread = torch.get_num_threads() == 1

    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.device.type != "cpu" or not x.is_floating_point():
            return compute(x, *args, **kwargs)
        if one_thread and x.numel() % _BLOCK == 0 and x.is_contiguous():
            return compute(x, *args, **kwargs)
        flat = x.reshape(-1)
        missing = -flat.numel() % _BLOCK
        padded = torch.cat([flat, flat.new_ones(missing)]) if missing else flat.contiguous()
        if padded.numel() > _UNSPLIT and torch.get_num_threads() > 1:
            result = torch.cat([compute(part, *args, **kwargs) for part in padded.split(_UNSPLIT)])
        else:
            result = compute(padded, *args, **kwargs)
        return result[: flat.numel()].reshape(x.shape)

    return run


def _use(node: Node) -> Use | None:
    names = [arg.name if isinstance(arg, Ref) else None for arg in node.args]
    match node.op, names:
        case "aten.linear.default", [str(), str(weight), *rest]:
            return Use(node.id, weight, transposed=False, bias=rest[0] if rest else None)
        case "aten.addmm.default", [str(bias), str(), str(weight)] if not node.kwargs:
            return Use(node.id, weight, transposed=True, bias=bias)
        case _ if node.op in _PLAIN_PRODUCTS and len(names) == 2 and names[0] and names[1]:
            return Use(node.id, names[1], transposed=True, bias=None)
        case _:
            return None


def _product(node: Node) -> Callable[..., torch.Tensor]:
    """Called as the node's operator is, with the weight as `Held`; the bias is in the packed product already."""
    identity = node.id
    if node.op == _ADDMM:
        return lambda _bias, x, weight: weight.packed[identity](x)
    return lambda x, weight, _bias=None: weight.packed[identity](x)


def _lookup(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    compute = guarded(_EMBEDDING, PLAIN[_EMBEDDING])

    def run(table: Held, indices: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return compute(table.plain, indices, *args, **kwargs).to(dtype)

    return run


def _unwrapped(node: Node) -> Callable[..., Any]:
    """Any other operator on a parameter that products read as well."""
    compute = PLAIN[node.op]
    if node.op in LOOKUPS:
        compute = guarded(node.op, compute)

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        return value.plain if isinstance(value, Held) else value

    return lambda *args, **kwargs: compute(
        *[plain(value) for value in args], **{name: plain(value) for name, value in kwargs.items()}
    )


def _whole_blocks(graph: Graph, node: Node) -> bool:
    """Whether a position alone fills whole blocks, and there is but one thread."""
    fixed = 1
    for dim in graph.values[node.outputs[0]].shape:
        fixed *= dim if isinstance(dim, int) else 1
    return fixed % _BLOCK == 0 and torch.get_num_threads() == 1 and _contiguous(graph, node)


def _contiguous(graph: Graph, node: Node) -> bool:
    """Whether the operand is surely not a strided view: of one position it would be contiguous, of several not."""
    source = next(reads(node))
    maker = next((other for other in graph.nodes if source in other.outputs), None)
    return maker is not None and maker.op in (_LINEAR, _ADDMM, "aten.add.Tensor", "aten.mul.Tensor")
