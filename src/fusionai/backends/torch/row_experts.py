"""Translates the operators with which mixtures of experts choose among experts and multiply by their matrices.

Integers and booleans that only choose are kept as float32, like every other value of a row; a view of them is `whole`.
Neighbours: `row_plan` translates all other operators, `row_choices` runs the lines written here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Final

from fusionai.backends.torch.row_code import Field, Op, Unplanned, View
from fusionai.backends.torch.row_draft import RowDraft, given
from fusionai.ir.schema import Arg, DTypeArg, ListArg, Node, Ref
from fusionai.ir.serving import EXPERT_PRODUCT

_LARGEST_SORTED: Final = 17
"""Most elements that are taken in order: PyTorch sorts more of them in another way, which may order equal ones
differently."""
_LARGEST_INDEX: Final = 2**24
"""Indices below this number are exact as float32."""


def translation(node: Node) -> Callable[[RowDraft, Node], None] | None:
    """Return the function that writes the node's lines; None if the operator is not one of a mixture's."""
    if node.op == "aten._to_copy.default":
        return _truth if node.kwargs.get("dtype") == DTypeArg("bool") else None
    return _OPERATORS.get(node.op)


def _softmax(draft: RowDraft, node: Node) -> None:
    view = draft.plain(node.args[0])
    if given(node, 2, "dtype") not in (None, DTypeArg("float32")):
        raise Unplanned(f"{node.op} in {given(node, 2, 'dtype')}")
    _last(draft, node, view, given(node, 1, "dim"))
    draft.along(Op.SOFTMAX, node, view)


def _top(draft: RowDraft, node: Node) -> None:
    """Write the line for the largest elements of the last dimension, and where they are."""
    view, chosen = draft.plain(node.args[0]), draft.number(node.args[1])
    dim, largest, ordered = (given(node, place, name, default) for place, name, default in _TOP)
    _last(draft, node, view, dim)
    length = view.shape[-1]
    if largest is not True or len(node.outputs) != 2 or length > _LARGEST_INDEX:
        raise Unplanned(f"{node.op} of {length}")
    if ordered is True and chosen > _LARGEST_SORTED:
        raise Unplanned(f"the largest {chosen} of {length} in order")
    label = node.outputs[0]
    solid = draft.solid(view, f"{label} operand")
    scratch = draft.memory.own(f"{label} scratch", (2, length))
    values, indices = (
        draft.memory.own(name, draft.sizes(name), whole=bool(number)) for number, name in enumerate(node.outputs)
    )
    for out in (values, indices):
        draft.declared(out, (*view.shape[:-1], chosen), Op.TOP)
    line = draft.line(Op.TOP)
    line[Field.DIMS : Field.DIMS + 3] = [prod(view.shape[:-1]), length, chosen]
    line[Field.OUT], line[Field.A], line[Field.A_ROW] = values.start, solid.start, 1
    line[Field.EXTRA : Field.EXTRA + 3] = [indices.start, scratch.start, 1 if ordered is True else 0]
    for used in ("operand", "scratch"):
        draft.memory.end(f"{label} {used}")


_TOP: Final[tuple[tuple[int, str, Arg], ...]] = ((2, "dim", -1), (3, "largest", True), (4, "sorted", True))
"""Place, name and default of the options of `topk`."""


def _gathered(draft: RowDraft, node: Node) -> None:
    """Write the line for chosen elements of the last dimension."""
    view, indices = draft.plain(node.args[0]), _indices(draft, node.args[2], node)
    _last(draft, node, view, node.args[1])
    if indices.shape[:-1] != view.shape[:-1]:
        raise Unplanned(f"{node.op} of {view.shape} at {indices.shape}")
    solid = draft.solid(view, f"{node.outputs[0]} operand")
    dims = (prod(view.shape[:-1]), indices.shape[-1], 1)
    _looked_up(draft, node, solid, indices, dims, view.shape[-1])
    draft.memory.end(f"{node.outputs[0]} operand")


def _looked_up(
    draft: RowDraft, node: Node, source: View, indices: View, dims: tuple[int, int, int], length: int
) -> None:
    out = draft.result(node)
    draft.declared(out, dims, Op.LOOKUP)
    line = draft.line(Op.LOOKUP)
    line[Field.DIMS : Field.DIMS + 3] = dims
    line[Field.OUT], line[Field.A], line[Field.A_ROW] = out.start, source.start, 0 if source.fixed else 1
    line[Field.B], line[Field.EXTRA] = indices.start, length
    draft.memory.end(f"{node.outputs[0]} indices")


def _indexed(draft: RowDraft, node: Node) -> None:
    """Write the line for chosen rows of a parameter, such as the biases of experts."""
    table = draft.plain(node.args[0])
    places = node.args[1].items if isinstance(node.args[1], ListArg) else ()
    if len(places) != 1 or not table.fixed or not table.dense or not table.shape:
        raise Unplanned(f"{node.op} of {table.shape} at {len(places)} indices")
    indices = _indices(draft, places[0], node)
    _looked_up(draft, node, table, indices, (1, prod(indices.shape), prod(table.shape[1:])), table.shape[0])


def _scattered(draft: RowDraft, node: Node) -> None:
    """Write the lines for a number in place of chosen elements of the last dimension."""
    view, indices = draft.plain(node.args[0]), _indices(draft, node.args[2], node)
    _last(draft, node, view, node.args[1])
    if indices.shape[:-1] != view.shape[:-1] or isinstance(node.args[3], Ref):
        raise Unplanned(f"{node.op} of {view.shape} at {indices.shape}")
    out = draft.result(node)
    draft.declared(out, view.shape, Op.SCATTER)
    draft.pointwise(Op.COPY, out.moved(view.shape, out.strides), view, None)
    line = draft.line(Op.SCATTER)
    line[Field.DIMS : Field.DIMS + 3] = [prod(view.shape[:-1]), indices.shape[-1], view.shape[-1]]
    line[Field.OUT], line[Field.B], line[Field.EXTRA] = out.start, indices.start, draft.fixed(node.args[3], 1)
    draft.memory.end(f"{node.outputs[0]} indices")


def _experts(draft: RowDraft, node: Node) -> None:
    """Write the line that multiplies each of a row's operands by the matrix of an expert."""
    use = draft.uses.get(node.id)
    if use is None:
        raise Unplanned(f"{node.op} by something else than parameters")
    view, indices = draft.plain(node.args[0]), _indices(draft, node.args[2], node)
    experts, columns, count = draft.graph.params[use.weight].shape
    columns, count = (count, columns) if use.transposed else (columns, count)
    if len(view.shape) != 2 or view.shape[1] != count or indices.shape != view.shape[:1]:
        raise Unplanned(f"{node.op} of {view.shape} by the experts {indices.shape}")
    if view.fixed or (view.strides[1] != 1 and count != 1):
        view = draft.copied(view, f"{node.outputs[0]} operand")
    out = draft.result(node)
    draft.declared(out, (view.shape[0], columns), Op.EXPERTS)
    line = draft.line(Op.EXPERTS)
    line[Field.DIMS : Field.DIMS + 3] = [columns, count, view.shape[0]]
    line[Field.OUT], line[Field.A], line[Field.A_ROW], line[Field.B] = out.start, view.start, 1, indices.start
    line[Field.A_STRIDES], line[Field.EXTRA + 2] = view.strides[0], experts
    draft.products[len(draft.lines) - 1] = node.id
    for used in ("operand", "indices"):
        draft.memory.end(f"{node.outputs[0]} {used}")


def _clamped(draft: RowDraft, node: Node) -> None:
    view, out = draft.plain(node.args[0]), draft.result(node)
    bounds = [(Op.MAXIMUM, given(node, 1, "min")), (Op.MINIMUM, given(node, 2, "max"))]
    for op, bound in bounds:
        if bound is not None:
            draft.pointwise(op, out, view, draft.plain(bound))
            view = out
    if view is not out:
        raise Unplanned(f"{node.op} without bounds")


def _zeros(draft: RowDraft, node: Node) -> None:
    sizes = draft.sizes(node.outputs[0])
    draft.memory.show(node.outputs[0], draft.memory.constant(0.0).broadcast(sizes), "")


def _truth(draft: RowDraft, node: Node) -> None:
    out = draft.memory.own(node.outputs[0], draft.sizes(node.outputs[0]), whole=True)
    draft.pointwise(Op.TRUTH, out, draft.view(node.args[0]), None)


def _negated(draft: RowDraft, node: Node) -> None:
    mask = _mask(draft, node.args[0], node)
    out = draft.memory.own(node.outputs[0], draft.sizes(node.outputs[0]), whole=True)
    draft.pointwise(Op.SUB, out, draft.memory.constant(1.0), mask)


def _masked(draft: RowDraft, node: Node) -> None:
    view, mask = draft.plain(node.args[0]), _mask(draft, node.args[1], node)
    if isinstance(node.args[2], Ref):
        raise Unplanned(f"{node.op} with {node.args[2]}")
    draft.pointwise(Op.MASKED, draft.result(node), view, mask)
    draft.lines[-1][Field.EXTRA] = draft.fixed(node.args[2], 1)


def _last(draft: RowDraft, node: Node, view: View, dim: Arg) -> None:
    """Refuse an operator along another dimension than the last one, or along rows."""
    at = draft.number(dim)
    if not view.shape or at % len(view.shape) != len(view.shape) - 1:
        raise Unplanned(f"{node.op} along {at} of {view.shape}")
    if isinstance(node.args[0], Ref):
        draft.unsequenced(node.args[0].name, len(view.shape) - 1)


def _indices(draft: RowDraft, arg: Arg, node: Node) -> View:
    """Return integers contiguously, in a row's memory."""
    view = draft.view(arg)
    if not view.whole:
        raise Unplanned(f"{node.op} at numbers that are no integers")
    return draft.solid(view, f"{node.outputs[0]} indices")


def _mask(draft: RowDraft, arg: Arg, node: Node) -> View:
    if not isinstance(arg, Ref) or draft.graph.values[arg.name].dtype != "bool":
        raise Unplanned(f"{node.op} of something else than booleans")
    return draft.view(arg)


_OPERATORS: Final[Mapping[str, Callable[[RowDraft, Node], None]]] = {
    EXPERT_PRODUCT: _experts,
    "aten.softmax.int": _softmax,
    "aten.topk.default": _top,
    "aten.gather.default": _gathered,
    "aten.index.Tensor": _indexed,
    "aten.scatter.value": _scattered,
    "aten.clamp.default": _clamped,
    "aten.zeros_like.default": _zeros,
    "aten.new_zeros.default": _zeros,
    "aten.bitwise_not.default": _negated,
    "aten.masked_fill.Scalar": _masked,
}
