"""Finds the nodes of a serving graph that multiply by a parameter or work element by element, and chooses their
kernels.

A matrix with other readers besides products (an embedding tied to the head) is kept twice: packed for products and
plain for the rest. Vectorised elementwise operators may compute the last few elements by another code path; such
operators are given whole blocks, so that a value's bits do not depend on the number of elements. Neighbours:
`packed_linear` makes the products, `interpreter` calls the kernels chosen here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fusionai.backends.torch.host import DTYPES
from fusionai.backends.torch.operators import PLAIN, checked
from fusionai.backends.torch.packed_linear import PackedLinear, aligned
from fusionai.ir.graph import reads
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Graph, Node, ParamSpec, Ref
from fusionai.ir.serving import EXPERT_PRODUCT

_LINEAR: Final = "aten.linear.default"
_ADDMM: Final = "aten.addmm.default"
_PLAIN_PRODUCTS: Final = frozenset({"aten.mm.default", "aten.matmul.default"})
_EMBEDDING: Final = "aten.embedding.default"
_BATCHED: Final = frozenset({"aten.bmm.default", "aten.matmul.default"})
_EXACT: Final = frozenset(
    f"aten.{name}"
    for name in (
        *("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar", "rsub.Scalar", "neg.default", "abs.default"),
        *("mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode"),
        *("square.default", "sqrt.default", "rsqrt.default", "reciprocal.default"),
        *("relu.default", "relu6.default", "leaky_relu.default", "hardtanh.default", "prelu.default"),
        *("clamp.default", "clamp.Tensor", "clamp_min.default", "clamp_max.default", "maximum.default"),
        *("minimum.default", "where.self", "where.ScalarOther", "where.ScalarSelf", "sign.default"),
        *("masked_fill.Scalar", "masked_fill.Tensor", "floor.default", "ceil.default", "round.default"),
    )
)
"""Elementwise operators with few roundings, all prescribed by IEEE 754: vectorised and scalar loops give the same
bits."""
_NO_NUMBERS: Final = (
    *(f"aten.{name}." for name in ("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "__and__", "__or__")),
    *("aten.logical_", "aten.bitwise_"),
)
"""Prefixes of elementwise operators that return booleans or integers."""
_GATED: Final = "aten.glu.default"
_TOGETHER: Final = frozenset({_GATED, "aten.linalg_cross.default"})
"""Operators that read several elements of an operand for one result, so elements of a dimension must stay together."""
_TAILED: Final = frozenset(
    name
    for name, operator in OPERATORS.items()
    if operator.category == "elementwise" and name not in _EXACT | _TOGETHER and not name.startswith(_NO_NUMBERS)
)
"""Elementwise functions whose vectorised and scalar forms may round differently: all that are not known to be exact."""
_BLOCK: Final = 64
"""Elements of a block; a multiple of the step of every vectorised loop."""
_UNSPLIT: Final = 16_384
"""Elements up to which torch never splits a call among threads. Each thread's share would have remainder elements of
its own."""


@dataclass(frozen=True, slots=True)
class PackedParameter:
    """A parameter in memory: `plain` for readers that are not products, `packed` for each product (by node id): its
    matrix, or the matrix of each expert. `rows` returns rows of a table that is kept as a quantised file holds it."""

    plain: Tensor | None
    packed: Mapping[int, Sequence[PackedLinear]]
    rows: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class ProductWeight:
    """The parameter of a product: a matrix, or a stack of an expert's matrices each. `transposed`: it is stored [in,
    out]. `bias`: value name of the bias, or None."""

    node: int
    weight: str
    transposed: bool
    bias: str | None


def products(graph: Graph) -> dict[int, ProductWeight]:
    """Return node id -> the parameter it multiplies by, for every product of an activation with a matrix, or with those
    of chosen experts."""
    found: dict[int, ProductWeight] = {}
    for node in graph.nodes:
        use = _use(node)
        if use is None or use.weight not in graph.params:
            continue
        if len(graph.params[use.weight].shape) != (3 if node.op == EXPERT_PRODUCT else 2):
            continue
        biased = use.bias is None or use.bias in graph.params
        operands = [value for value in reads(node) if value not in (use.weight, use.bias)]
        floats = graph.params[use.weight].dtype == "float32"
        numbers = 2 if node.op == EXPERT_PRODUCT else 1
        if biased and floats and len(operands) == numbers and operands[0] not in graph.params:
            found[node.id] = use
    return found


def only_packed(graph: Graph, uses: Mapping[int, ProductWeight]) -> frozenset[str]:
    """Return the parameters that only products read, as weight or bias: they need no plain copy."""
    weights = {use.weight for use in uses.values()} | {use.bias for use in uses.values() if use.bias is not None}
    otherwise = {
        value
        for node in graph.nodes
        for value in reads(node)
        if node.id not in uses or value not in (uses[node.id].weight, uses[node.id].bias)
    }
    return frozenset(weights - otherwise - set(graph.outputs.values()))


def lookup_tables(graph: Graph) -> frozenset[str]:
    """Return the parameters whose readers, except products, all look up rows: they may keep their file's narrower
    dtype."""
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


def kernels(graph: Graph, uses: Mapping[int, ProductWeight], tables: frozenset[str]) -> dict[int, Callable[..., Any]]:
    """Return node id -> function to call instead of its operator. Parameters in `uses` and `tables` come as
    `PackedParameter`."""
    held = {use.weight for use in uses.values()} | tables
    found: dict[int, Callable[..., Any]] = {}
    for node in graph.nodes:
        if node.id in uses:
            found[node.id] = _product(node, graph.params[uses[node.id].weight])
        elif node.op == _EMBEDDING and next(reads(node)) in held:
            found[node.id] = _lookup(DTYPES[graph.values[node.outputs[0]].dtype])
        elif any(value in held for value in reads(node)):
            found[node.id] = _unwrapped(node)
        elif node.op in _BATCHED:
            found[node.id] = one_by_one(PLAIN[node.op])
        elif node.op == _GATED:
            found[node.id] = gated(PLAIN[node.op])
        elif node.op in _TAILED and not _whole_blocks(graph, node):
            found[node.id] = whole_blocks(PLAIN[node.op])
    return found


def whole_blocks(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an elementwise `compute` that is called on whole blocks of contiguous elements only."""
    one_thread = torch.get_num_threads() == 1

    def run(*args: Any, **kwargs: Any) -> Tensor:
        given = [arg for arg in args if isinstance(arg, Tensor)]
        if any(x.device.type != "cpu" or not x.is_floating_point() for x in given):
            return compute(*args, **kwargs)
        shape = given[0].shape
        whole = all(x.shape == shape and x.is_contiguous() for x in given)
        if one_thread and whole and given[0].numel() % _BLOCK == 0:
            return compute(*args, **kwargs)
        spread = given if whole else torch.broadcast_tensors(*given)
        blocks = [_padded(x.reshape(-1)) for x in spread]
        if blocks[0].numel() > _UNSPLIT and torch.get_num_threads() > 1:
            shares = zip(*(x.split(_UNSPLIT) for x in blocks), strict=True)
            result = torch.cat([compute(*_with(args, share), **kwargs) for share in shares])
        else:
            result = compute(*_with(args, blocks), **kwargs)
        return result[: spread[0].numel()].reshape(spread[0].shape)

    return run


def gated(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `glu` computed elementwise on its two halves, in whole blocks."""
    in_blocks = whole_blocks(lambda values, gates: compute(torch.cat([values, gates]), 0))
    return lambda x, dim=-1: in_blocks(*x.chunk(2, dim))


def one_by_one(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a product of two batches of matrices that is computed item by item. The number of items depends on all
    rows of a pass (a module may gather a matrix for every row), and libraries may choose kernels by that number.
    Here every call has the sizes of one item."""

    def run(a: Tensor, b: Tensor) -> Tensor:
        if a.dim() > 3 and a.shape[:-2] == b.shape[:-2]:
            return run(a.flatten(0, -3), b.flatten(0, -3)).unflatten(0, a.shape[:-2])
        # A single product per sum has only one order. Other devices are excluded, because each call would cost a wait.
        if a.dim() != 3 or b.dim() != 3 or a.shape[2] == 1 or a.shape[0] == 0 or a.device.type != "cpu":
            return compute(a, b)
        if a.shape[0] != b.shape[0]:
            return compute(a, b)
        return torch.stack([torch.mm(aligned(one), aligned(other)) for one, other in zip(a, b, strict=True)])

    return run


def _padded(flat: Tensor) -> Tensor:
    missing = -flat.numel() % _BLOCK
    return torch.cat([flat, flat.new_ones(missing)]) if missing else flat.contiguous()


def _with(args: Sequence[Any], tensors: Iterable[Tensor]) -> list[Any]:
    """Return `args` with their tensors replaced, in order, by `tensors`."""
    others = iter(tensors)
    return [next(others) if isinstance(arg, Tensor) else arg for arg in args]


def _use(node: Node) -> ProductWeight | None:
    names = [arg.name if isinstance(arg, Ref) else None for arg in node.args]
    match node.op, names:
        case "aten.linear.default", [str(), str(weight), *rest]:
            return ProductWeight(node.id, weight, transposed=False, bias=rest[0] if rest else None)
        case "fusion.expert_linear", [str(), str(weight), str()]:
            return ProductWeight(node.id, weight, transposed=node.kwargs.get("transposed") is True, bias=None)
        case "aten.addmm.default", [str(bias), str(), str(weight)] if not node.kwargs:
            return ProductWeight(node.id, weight, transposed=True, bias=bias)
        case _ if node.op in _PLAIN_PRODUCTS and len(names) == 2 and names[0] and names[1]:
            return ProductWeight(node.id, names[1], transposed=True, bias=None)
        case _:
            return None


def _product(node: Node, spec: ParamSpec) -> Callable[..., Tensor]:
    """Return a function called like the node's operator, with the weight as `PackedParameter`; the packed product
    contains the bias. `spec`: of the weight."""
    identity = node.id
    match node.op:
        case "fusion.expert_linear":
            # The rules read no more than the weight's shape.
            check = checked(node.op, lambda *_, **__: None)

            def run(x: Tensor, weight: PackedParameter, experts: Tensor, **options: Any) -> Tensor:
                check(x, spec, experts, **options)
                return by_experts(weight.packed[identity], x, experts)

            return run
        case "aten.addmm.default":
            return lambda _bias, x, weight: weight.packed[identity][0](x)
        case _:
            return lambda x, weight, _bias=None: weight.packed[identity][0](x)


def by_experts(products: Sequence[PackedLinear], x: Tensor, experts: Tensor) -> Tensor:
    """Return [rows, out] for x [rows, in]: each row's product with the matrix of its expert, experts int64 [rows]. The
    rows of an expert are multiplied together, which changes no bit of any of them."""
    if not x.shape[0]:
        return products[0](x)
    order = experts.argsort(stable=True)
    counts = torch.bincount(experts, minlength=len(products)).tolist()
    rows = zip(products, x[order].split(counts), strict=True)
    made = torch.cat([product(own) for product, own in rows if own.shape[0]])
    result = torch.empty_like(made)
    result[order] = made
    return result


def _lookup(dtype: torch.dtype) -> Callable[..., Tensor]:
    compute = checked(_EMBEDDING, PLAIN[_EMBEDDING])

    def run(table: PackedParameter, indices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if table.rows is not None:
            return table.rows(indices).to(dtype)
        return compute(table.plain, indices, *args, **kwargs).to(dtype)

    return run


def _unwrapped(node: Node) -> Callable[..., Any]:
    """Return the node's operator for a parameter that products read too: it uses the plain copy."""
    compute = checked(node.op, PLAIN[node.op])

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        return value.plain if isinstance(value, PackedParameter) else value

    return lambda *args, **kwargs: compute(
        *[plain(value) for value in args], **{name: plain(value) for name, value in kwargs.items()}
    )


def _whole_blocks(graph: Graph, node: Node) -> bool:
    """Return whether a single position always fills whole blocks and torch has only one thread."""
    fixed = 1
    for dim in graph.values[node.outputs[0]].shape:
        fixed *= dim if isinstance(dim, int) else 1
    return fixed % _BLOCK == 0 and torch.get_num_threads() == 1 and _contiguous(graph, node)


def _contiguous(graph: Graph, node: Node) -> bool:
    """Return whether the node has one operand that is never a strided view. A view of one position would be contiguous,
    a view of several would not."""
    source, *others = reads(node)
    maker = next((other for other in graph.nodes if source in other.outputs), None)
    return not others and maker is not None and maker.op in (_LINEAR, _ADDMM, "aten.add.Tensor", "aten.mul.Tensor")
