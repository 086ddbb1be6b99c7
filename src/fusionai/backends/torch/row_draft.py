"""A row program while it is written: lines, sizes and values, and what every operator's translation needs of them.

Declared sizes are those of any number of positions; here they are evaluated for one. Neighbours: `row_plan` translates
a graph's operators, `row_experts` those of mixtures of experts, `row_code` owns the memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from fusionai.backends.torch.packed_graph import ProductWeight
from fusionai.backends.torch.row_code import LINE, Field, Op, RowMemory, Unplanned, View
from fusionai.ir.schema import Arg, Dim, FloatArg, Graph, Node, Ref
from fusionai.ir.serving import BATCH, SEQUENCE
from fusionai.ir.shapes import evaluate, symbols_of


class RowDraft:
    """Lines of the program for `graph` so far. `uses`: products by node id. `products`: line -> node id of its
    product."""

    def __init__(self, graph: Graph, uses: Mapping[int, ProductWeight]) -> None:
        self.graph = graph
        self.uses = uses
        self.memory = RowMemory()
        self.numbers: dict[str, int] = {}
        self.lines: list[list[int]] = []
        self.products: dict[int, int] = {}

    def view(self, arg: Arg) -> View:
        match arg:
            case Ref(name) if name in self.memory.views:
                return self.memory.views[name]
            case Ref(name) if name in self.graph.params and self.graph.params[name].dtype == "float32":
                return self.memory.constant(name, self.graph.params[name].shape)
            case FloatArg() | int() | float() if not isinstance(arg, bool):
                return self.memory.constant(float(arg.name if isinstance(arg, FloatArg) else arg))
            case _:
                raise Unplanned(f"operand {arg!r}")

    def number(self, arg: Arg) -> int:
        match arg:
            case Ref(name) if name in self.numbers:
                return self.numbers[name]
            case int() if not isinstance(arg, bool):
                return arg
            case _:
                raise Unplanned(f"size {arg!r}")

    def sizes(self, name: str) -> tuple[int, ...]:
        """Return the sizes of a value for one row."""
        shape = self.graph.values[name].shape
        sizes = [_of_one_row(dim) for dim in shape]
        if None in sizes or len([dim for dim in shape if _grows(dim)]) > 1:
            raise Unplanned(f"{name} has sizes {shape}")
        return tuple(size for size in sizes if size is not None)

    def ahead_of_rows(self, name: str) -> int | None:
        """Return the product of the sizes before the dimension along which the value has its rows; None if it has none.
        Another shape of the same elements has the same rows only if this number is the same."""
        shape = self.graph.values[name].shape
        at = next((at for at, dim in enumerate(shape) if _grows(dim)), None)
        return None if at is None else prod(self.sizes(name)[:at])

    def copied(self, view: View, name: str) -> View:
        own = self.memory.own(name, view.shape, whole=view.whole)
        self.pointwise(Op.COPY, own, view, None)
        return own

    def result(self, node: Node) -> View:
        if len(node.outputs) != 1:
            raise Unplanned(node.op)
        return self.memory.own(node.outputs[0], self.sizes(node.outputs[0]))

    def plain(self, arg: Arg) -> View:
        view = self.view(arg)
        if view.whole:
            raise Unplanned("arithmetic on integers")
        return view

    def unsequenced(self, value: str, dim: int) -> None:
        """Refuse an operator that selects among rows."""
        if value in self.graph.values and _grows(self.graph.values[value].shape[dim]):
            raise Unplanned(f"rows of {value} are chosen")

    def pointwise(self, op: Op, out: View, a: View, b: View | None) -> None:
        operands = [a] if b is None else [a, b]
        longest = max(len(view.shape) for view in operands)
        shapes = [(1,) * (longest - len(view.shape)) + view.shape for view in operands]
        self.declared(out, tuple(max(sizes) if min(sizes) else 0 for sizes in zip(*shapes, strict=True)), op)
        strides = [view.broadcast(out.shape).strides for view in operands]
        dims: list[int] = []
        steps: list[list[int]] = [[] for _ in operands]
        for at, size in enumerate(out.shape):
            if size == 1:
                continue
            if dims and all(own[-1] == size * step[at] for own, step in zip(steps, strides, strict=True)):
                dims[-1] *= size
                for own, step in zip(steps, strides, strict=True):
                    own[-1] = step[at]
                continue
            dims.append(size)
            for own, step in zip(steps, strides, strict=True):
                own.append(step[at])
        if len(dims) > 3:
            raise Unplanned("an operand of too many dimensions")
        line = self.line(op)
        missing = 3 - len(dims)
        line[Field.DIMS : Field.DIMS + 3] = [1] * missing + dims
        line[Field.OUT] = out.start
        places = ((Field.A, Field.A_ROW, Field.A_STRIDES), (Field.B, Field.B_ROW, Field.B_STRIDES))
        for view, own, (place, row, first) in zip(operands, steps, places, strict=False):
            line[place], line[row] = view.start, 0 if view.fixed else 1
            line[first : first + 3] = [0] * missing + own

    def declared(self, out: View, derived: Sequence[int], op: Op) -> None:
        """Refuse a result that the graph declares with other sizes than follow from its operands: a declaration may
        hold for another number of positions, and a kernel writes as much as follows."""
        if prod(out.shape) != prod(derived):
            raise Unplanned(f"{op.name} gives {list(derived)}, declared is {list(out.shape)}")

    def line(self, op: Op) -> list[int]:
        line = [0] * LINE
        line[0] = op
        self.lines.append(line)
        return line

    def solid(self, view: View, label: str) -> View:
        """Return the same elements contiguously, in a row's memory."""
        return view if view.dense and not view.fixed else self.copied(view, label)

    def fixed(self, arg: Arg, count: int) -> int:
        """Return the offset of a constant of `count` elements."""
        view = self.view(arg)
        if not (view.fixed and view.dense) or prod(view.shape) != count:
            raise Unplanned(f"{arg!r} is no constant of {count} elements")
        return view.start

    def along(self, op: Op, node: Node, view: View) -> list[int]:
        """Add the line of an operator over the last dimension."""
        solid = self.solid(view, f"{node.outputs[0]} operand")
        out = self.result(node)
        self.declared(out, view.shape if op in (Op.LAYER_NORM, Op.SOFTMAX) else view.shape[:-1], op)
        line = self.line(op)
        line[Field.DIMS], line[Field.DIMS + 1] = prod(view.shape[:-1]), view.shape[-1]
        line[Field.OUT], line[Field.A], line[Field.A_ROW] = out.start, solid.start, 1
        self.memory.end(f"{node.outputs[0]} operand")
        return line


def given(node: Node, place: int, name: str = "", default: Arg = None) -> Arg:
    """Return an argument of a node, by its place or its name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _grows(dim: Dim) -> bool:
    """Return whether there are as many elements along this dimension as rows, or a multiple."""
    return SEQUENCE in symbols_of(dim)


def _of_one_row(dim: Dim) -> int | None:
    """Return the elements of each row along a dimension; None if they are not as many for each. The batch has one
    text."""
    symbols = symbols_of(dim)
    if not symbols <= {BATCH, SEQUENCE}:
        return None
    one, several, more = (evaluate(dim, {BATCH: 1, SEQUENCE: rows}) for rows in (1, 7, 13))
    return one if SEQUENCE not in symbols or (several, more) == (7 * one, 13 * one) else None
