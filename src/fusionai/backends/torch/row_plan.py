"""Translates a serving graph into a program for single rows: instructions over plain memory.

Decoding computes few rows, and starting an operator then takes longer than its work. With one position every size is
fixed, so views cost nothing, values reuse memory of values that are no longer needed, and the result is a list of
numbers that one compiled call runs. A graph with any operator unknown to this module gets no plan and runs operator by
operator. Neighbours: `row_code` defines the lines, `row_program` fills in addresses and runs the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fusionai.backends.torch.packed_graph import Use
from fusionai.backends.torch.row_code import LINE, Field, Op
from fusionai.ir.graph import SYMINT, needed_nodes, reads
from fusionai.ir.schema import Arg, DTypeArg, FloatArg, Graph, ListArg, Node, Ref
from fusionai.ir.serving import BATCH, POSITIONS, SEQUENCE

LARGEST_CONSTANT: Final = 2**20
"""Largest number of elements of a parameter that is kept as a constant. Larger ones are lookup tables; chosen."""
_BINARY: Final = {"add": Op.ADD, "sub": Op.SUB, "mul": Op.MUL, "div": Op.DIV}
_UNARY: Final = {
    "neg": Op.NEG,
    "sqrt": Op.SQRT,
    "rsqrt": Op.RSQRT,
    "exp": Op.EXP,
    "silu": Op.SILU,
    "sigmoid": Op.SIGMOID,
    "relu": Op.RELU,
    "tanh": Op.TANH,
    "cos": Op.COS,
    "sin": Op.SIN,
}
_POWERS: Final = {0.5: Op.SQRT, -0.5: Op.RSQRT, 1: Op.COPY, 2: Op.SQUARE, 3: Op.CUBE}
"""Exponent -> operator."""
_SAME: Final = frozenset({"alias", "detach", "contiguous", "type_as", "_to_copy", "to"})
"""Operators that return their operand, apart from its dtype."""


class Unplanned(Exception):
    """Raised with the reason why a graph can't be planned and runs operator by operator."""


@dataclass(frozen=True, slots=True)
class View:
    """Elements of memory read as a tensor, in a row's memory or (`fixed`) among the constants. `whole`: the elements
    are integers."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    fixed: bool = False
    whole: bool = False

    @property
    def dense(self) -> bool:
        """Whether the elements are contiguous and in order."""
        return all(size == 1 or step == own for size, step, own in zip(self.shape, self.strides, _dense(self.shape)))  # noqa: B905 - of one shape


@dataclass(frozen=True, slots=True)
class Plan:
    """A row program without addresses.

    `code` [lines, LINE]: complete except for the format and the addresses of products (`products`: line -> node id).
    `constants`: offset -> parameter or number, `fixed` floats in all. `width`: floats of one row. `inputs` and
    `outputs`: name or meaning -> (offset, size). `attentions`: node ids, in the order of their caches.
    """

    code: npt.NDArray[np.int64]
    constants: Mapping[int, str | float]
    fixed: int
    width: int
    inputs: Mapping[str, tuple[int, int]]
    outputs: Mapping[str, tuple[int, tuple[int, ...]]]
    products: Mapping[int, int]
    attentions: tuple[int, ...]
    groups: int
    """Largest number of queries that share a key head."""


def plan_rows(graph: Graph, wanted: Sequence[str], uses: Mapping[int, Use]) -> Plan:
    """Return the plan for the outputs `wanted`. `uses`: products by node id, as `packed_graph.products` returns them.

    Raises `Unplanned` if an operator or a shape is not supported.
    """
    nodes = needed_nodes(graph, {graph.outputs[meaning] for meaning in wanted})
    return _Planner(graph, nodes, uses).planned(wanted)


@dataclass(slots=True)
class _Room:
    """Allocates a row's memory; ranges of values that are no longer read are reused."""

    size: int = 0
    free: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def take(self, floats: int) -> int:
        floats += -floats % 16
        for number, (start, length) in enumerate(self.free):
            if length >= floats:
                if length == floats:
                    del self.free[number]
                else:
                    self.free[number] = (start + floats, length - floats)
                return start
        start = self.size
        self.size += floats
        return start

    def give(self, start: int, floats: int) -> None:
        floats += -floats % 16
        merged: list[tuple[int, int]] = []
        for begin, length in sorted([*self.free, (start, floats)]):
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((begin, length))
        self.free = merged


class _Planner:
    def __init__(self, graph: Graph, nodes: Sequence[Node], uses: Mapping[int, Use]) -> None:
        self.graph = graph
        self.nodes = nodes
        self.uses = uses
        self.views: dict[str, View] = {}
        self.numbers: dict[str, int] = {}
        self.lines: list[list[int]] = []
        self.products: dict[int, int] = {}
        self.attentions: list[int] = []
        self.groups = 1
        self.room = _Room()
        self.fixed = 0
        self.constants: dict[int, str | float] = {}
        self.known: dict[str | float, View] = {}
        self.owners: dict[str, int] = {}
        """Value -> offset of the range it refers to, if that is in a row's memory."""
        self.places: dict[int, int] = {}
        """Offset -> floats of the range."""
        self.readers: dict[int, int] = {}
        """Offset -> number of values that refer to the range and are still to be read."""

    def planned(self, wanted: Sequence[str]) -> Plan:
        last: dict[str, int] = {}
        kept = {self.graph.outputs[meaning] for meaning in wanted}
        inputs: dict[str, tuple[int, int]] = {}
        for number, node in enumerate(self.nodes):
            for value in reads(node):
                last[value] = number
        for name in self.graph.inputs:
            if name in last or name in kept:
                inputs[name] = self._input(name)
        for number, node in enumerate(self.nodes):
            for value in node.outputs:
                last.setdefault(value, number)
            self._node(node)
            ended = {value for value in (*reads(node), *node.outputs) if last[value] == number} - kept
            for value in ended:
                self._end(value)
        outputs: dict[str, tuple[int, tuple[int, ...]]] = {}
        for meaning in wanted:
            value = self.graph.outputs[meaning]
            shape = self.graph.values[value].shape
            if self.graph.values[value].dtype != "float32" or not _has_rows(shape) or value not in self.views:
                raise Unplanned(f"output {meaning} has no rows")
            view = self.views[value]
            if view.fixed or not view.dense:
                view = self._copied(view, value + " as output")
            outputs[meaning] = (view.start, view.shape[2:])
        code = np.array([line + [0] * (LINE - len(line)) for line in self.lines], dtype=np.int64).reshape(-1, LINE)
        return Plan(
            code=code,
            constants=self.constants,
            fixed=self.fixed + -self.fixed % 16,
            width=max(16, self.room.size),
            inputs=inputs,
            outputs=outputs,
            products=self.products,
            attentions=tuple(self.attentions),
            groups=self.groups,
        )

    # ------------------------------------------------------------------------------------------------------- memory

    def _input(self, name: str) -> tuple[int, int]:
        spec = self.graph.values[name]
        whole = spec.dtype == "int64"
        if not _has_rows(spec.shape) or not (spec.dtype == "float32" or (whole and name == POSITIONS)):
            raise Unplanned(f"input {name} is no row of floats")
        shape = self._sizes(name)
        self._own(name, shape, whole=whole)
        return self.views[name].start, prod(shape)

    def _own(self, value: str, shape: tuple[int, ...], *, whole: bool = False) -> View:
        """Allocate memory for a value."""
        start = self.room.take(prod(shape))
        self.places[start] = prod(shape)
        self.readers[start] = 1
        self.owners[value] = start
        self.views[value] = View(start, shape, _dense(shape), whole=whole)
        return self.views[value]

    def _show(self, value: str, view: View, source: str) -> None:
        """Record a value that is a view of another's memory."""
        self.views[value] = view
        if not view.fixed and source in self.owners:
            self.owners[value] = self.owners[source]
            self.readers[self.owners[value]] += 1

    def _end(self, value: str) -> None:
        start = self.owners.pop(value, None)
        if start is None:
            return
        self.readers[start] -= 1
        if self.readers[start] == 0:
            self.room.give(start, self.places.pop(start))

    def _constant(self, what: str | float, shape: tuple[int, ...] = ()) -> View:
        if what not in self.known:
            if prod(shape) > LARGEST_CONSTANT:
                raise Unplanned(f"{what} is read as a table")
            self.known[what] = View(self.fixed, shape, _dense(shape), fixed=True)
            self.constants[self.fixed] = what
            self.fixed += prod(shape)
        return self.known[what]

    def _view(self, arg: Arg) -> View:
        match arg:
            case Ref(name) if name in self.views:
                return self.views[name]
            case Ref(name) if name in self.graph.params and self.graph.params[name].dtype == "float32":
                return self._constant(name, self.graph.params[name].shape)
            case FloatArg() | int() | float() if not isinstance(arg, bool):
                return self._constant(float(arg.name if isinstance(arg, FloatArg) else arg))
            case _:
                raise Unplanned(f"operand {arg!r}")

    def _number(self, arg: Arg) -> int:
        match arg:
            case Ref(name) if name in self.numbers:
                return self.numbers[name]
            case int() if not isinstance(arg, bool):
                return arg
            case _:
                raise Unplanned(f"size {arg!r}")

    def _sizes(self, name: str) -> tuple[int, ...]:
        """Return the sizes of a value for one row."""
        sizes = tuple(1 if dim in (BATCH, SEQUENCE) else dim for dim in self.graph.values[name].shape)
        if not all(isinstance(size, int) for size in sizes):
            raise Unplanned(f"{name} has sizes {sizes}")
        return tuple(int(size) for size in sizes)

    def _copied(self, view: View, name: str) -> View:
        own = self._own(name, view.shape)
        self._pointwise(Op.COPY, own, view, None)
        return own

    # -------------------------------------------------------------------------------------------------------- nodes

    def _node(self, node: Node) -> None:
        name = node.op.split(".")[1]
        if node.id in self.uses:
            self._product(node, self.uses[node.id])
        elif node.op == "fusion.attention":
            self._attention(node)
        elif self.graph.values[node.outputs[0]].dtype == SYMINT:
            self._size(node)
        elif any(self.graph.values[value].dtype != "float32" for value in node.outputs) and not self._is_view(name):
            raise Unplanned(f"{node.op} makes no floats")
        elif name in _SAME or self._is_view(name):
            self._moved(node, name)
        elif name in _BINARY and node.op.endswith((".Tensor", ".Scalar")) and not node.kwargs and len(node.args) == 2:
            self._pointwise(_BINARY[name], self._result(node), self._plain(node.args[0]), self._plain(node.args[1]))
        elif name in _UNARY and not node.kwargs and len(node.args) == 1:
            self._pointwise(_UNARY[name], self._result(node), self._plain(node.args[0]), None)
        elif node.op == "aten.pow.Tensor_Scalar" and isinstance(node.args[1], int | float):
            if node.args[1] not in _POWERS:
                raise Unplanned(f"power {node.args[1]}")
            self._pointwise(_POWERS[node.args[1]], self._result(node), self._plain(node.args[0]), None)
        elif node.op == "aten.gelu.default":
            kind = Op.GELU_TANH if node.kwargs.get("approximate", "none") == "tanh" else Op.GELU
            self._pointwise(kind, self._result(node), self._plain(node.args[0]), None)
        elif name in ("mean", "sum") and node.op.endswith((".dim", ".dim_IntList")):
            self._reduced(node, Op.MEAN if name == "mean" else Op.TOTAL)
        elif node.op == "aten.layer_norm.default":
            self._normalised(node)
        elif name in ("cat", "stack"):
            self._joined(node, stacked=name == "stack")
        elif node.op == "aten.repeat_interleave.self_int":
            self._repeated(node)
        else:
            raise Unplanned(node.op)

    def _result(self, node: Node) -> View:
        if len(node.outputs) != 1:
            raise Unplanned(node.op)
        return self._own(node.outputs[0], self._sizes(node.outputs[0]))

    def _plain(self, arg: Arg) -> View:
        view = self._view(arg)
        if view.whole:
            raise Unplanned("arithmetic on integers")
        return view

    def _size(self, node: Node) -> None:
        """Evaluate an operator on sizes."""
        operand = node.args[0]
        if node.op != "aten.sym_size.int" or not isinstance(operand, Ref) or not isinstance(node.args[1], int):
            raise Unplanned(node.op)
        self.numbers[node.outputs[0]] = self._sizes(operand.name)[node.args[1]]

    @staticmethod
    def _is_view(name: str) -> bool:
        return name in {
            "unsqueeze",
            "squeeze",
            "transpose",
            "permute",
            "slice",
            "select",
            "expand",
            "reshape",
            "view",
            "split",
            "chunk",
            "clone",
        }

    def _moved(self, node: Node, name: str) -> None:
        """Translate an operator that only changes how memory is viewed."""
        source = node.args[0]
        view = self._view(source)
        label = source.name if isinstance(source, Ref) else ""
        shape, strides, rank = view.shape, view.strides, len(view.shape)
        if name in _SAME or name == "clone":
            given = node.kwargs.get("dtype")
            if given is not None and given != DTypeArg("float32"):
                raise Unplanned(f"{node.op} to {given!r}")
            self._show(node.outputs[0], _like(view, shape, strides, whole=view.whole and given is None), label)
            return
        match name:
            case "unsqueeze":
                at = self._number(node.args[1]) % (rank + 1)
                shape, strides = (*shape[:at], 1, *shape[at:]), (*strides[:at], 0, *strides[at:])
            case "squeeze" if isinstance(node.args[-1], int):
                at = node.args[-1] % rank
                if shape[at] == 1:
                    shape, strides = (*shape[:at], *shape[at + 1 :]), (*strides[:at], *strides[at + 1 :])
            case "transpose" | "permute":
                order = list(range(rank))
                if name == "transpose":
                    first, second = (self._number(arg) % rank for arg in node.args[1:3])
                    order[first], order[second] = second, first
                elif isinstance(node.args[1], ListArg):
                    order = [self._number(item) % rank for item in node.args[1].items]
                shape, strides = tuple(shape[at] for at in order), tuple(strides[at] for at in order)
            case "slice":
                at = self._number(node.args[1]) % rank if len(node.args) > 1 else 0
                begin = self._number(node.args[2]) if len(node.args) > 2 and node.args[2] is not None else 0
                end = self._number(node.args[3]) if len(node.args) > 3 and node.args[3] is not None else shape[at]
                step = self._number(node.args[4]) if len(node.args) > 4 else 1
                self._unsequenced(label, at)
                chosen = range(shape[at])[begin:end:step]
                view = _like(view, shape, strides, ahead=chosen.start * strides[at])
                shape = (*shape[:at], len(chosen), *shape[at + 1 :])
                strides = (*strides[:at], strides[at] * step, *strides[at + 1 :])
            case "select":
                at = self._number(node.args[1]) % rank
                self._unsequenced(label, at)
                number = self._number(node.args[2]) % shape[at]
                view = _like(view, shape, strides, ahead=number * strides[at])
                shape, strides = (*shape[:at], *shape[at + 1 :]), (*strides[:at], *strides[at + 1 :])
            case "split" | "chunk":
                self._split(node, name, view, label)
                return
            case "expand":
                shape, strides = self._sizes(node.outputs[0]), _spread(view, self._sizes(node.outputs[0]))
            case "reshape" | "view":
                shape = self._sizes(node.outputs[0])
                kept = _reshaped(view, shape)
                if kept is None:
                    copy = self._copied(view, node.outputs[0])
                    self.views[node.outputs[0]] = _like(copy, shape, _dense(shape))
                    return
                strides = kept
            case _:
                raise Unplanned(node.op)
        if shape != self._sizes(node.outputs[0]):
            raise Unplanned(f"{node.op} gives {shape}")
        self._show(node.outputs[0], _like(view, shape, strides), label)

    def _unsequenced(self, value: str, dim: int) -> None:
        """Refuse an operator that selects among rows."""
        if value in self.graph.values and self.graph.values[value].shape[dim] == SEQUENCE:
            raise Unplanned(f"rows of {value} are chosen")

    def _split(self, node: Node, name: str, view: View, label: str) -> None:
        at = self._number(node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)) % len(view.shape)
        self._unsequenced(label, at)
        begin = 0
        for value in node.outputs:
            sizes = self._sizes(value)
            part = _like(view, sizes, view.strides, ahead=begin * view.strides[at])
            self._show(value, part, label)
            begin += sizes[at]
        if begin != view.shape[at]:
            raise Unplanned(f"{name} into {begin} of {view.shape[at]}")

    def _pointwise(self, op: Op, out: View, a: View, b: View | None) -> None:
        operands = [a] if b is None else [a, b]
        strides = [_spread(view, out.shape) for view in operands]
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
        line = self._line(op)
        missing = 3 - len(dims)
        line[Field.DIMS : Field.DIMS + 3] = [1] * missing + dims
        line[Field.OUT] = out.start
        places = ((Field.A, Field.A_ROW, Field.A_STRIDES), (Field.B, Field.B_ROW, Field.B_STRIDES))
        for view, own, (place, row, first) in zip(operands, steps, places, strict=False):
            line[place], line[row] = view.start, 0 if view.fixed else 1
            line[first : first + 3] = [0] * missing + own

    def _line(self, op: Op) -> list[int]:
        line = [0] * LINE
        line[0] = op
        self.lines.append(line)
        return line

    def _solid(self, view: View, label: str) -> View:
        """Return the same elements contiguously, in a row's memory."""
        return view if view.dense and not view.fixed else self._copied(view, label)

    def _reduced(self, node: Node, op: Op) -> None:
        view = self._plain(node.args[0])
        dims = node.args[1].items if isinstance(node.args[1], ListArg) else (node.args[1],)
        if [self._number(dim) % len(view.shape) for dim in dims] != [len(view.shape) - 1] or node.kwargs:
            raise Unplanned(f"{node.op} over {dims}")
        if isinstance(node.args[0], Ref):
            self._unsequenced(node.args[0].name, len(view.shape) - 1)
        self._along(op, node, view)

    def _along(self, op: Op, node: Node, view: View) -> list[int]:
        solid = self._solid(view, f"{node.outputs[0]} operand")
        out = self._result(node)
        line = self._line(op)
        line[Field.DIMS], line[Field.DIMS + 1] = prod(view.shape[:-1]), view.shape[-1]
        line[Field.OUT], line[Field.A], line[Field.A_ROW] = out.start, solid.start, 1
        self._end(f"{node.outputs[0]} operand")
        return line

    def _normalised(self, node: Node) -> None:
        view = self._plain(node.args[0])
        sizes = node.args[1].items if isinstance(node.args[1], ListArg) else ()
        weight, bias = (node.args[at] if len(node.args) > at else None for at in (2, 3))
        eps = node.args[4] if len(node.args) > 4 else node.kwargs.get("eps", 1e-5)
        if tuple(sizes) != view.shape[-1:] or set(node.kwargs) - {"eps"}:
            raise Unplanned(f"{node.op} over {sizes}")
        line = self._along(Op.LAYER_NORM, node, view)
        line[Field.EXTRA] = self._fixed(eps)
        line[Field.EXTRA + 1] = -1 if weight is None else self._fixed(weight)
        line[Field.EXTRA + 2] = -1 if bias is None else self._fixed(bias)

    def _fixed(self, arg: Arg) -> int:
        view = self._view(arg)
        if not (view.fixed and view.dense):
            raise Unplanned(f"{arg!r} is no constant")
        return view.start

    def _joined(self, node: Node, *, stacked: bool) -> None:
        items = node.args[0].items if isinstance(node.args[0], ListArg) else ()
        out = self._own(node.outputs[0], self._sizes(node.outputs[0]))
        at = self._number(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % len(out.shape)
        self._unsequenced(node.outputs[0], at)
        begin = 0
        for item in items:
            part = self._plain(item)
            if stacked:
                shape = (*part.shape[:at], 1, *part.shape[at:])
                part = _like(part, shape, (*part.strides[:at], 0, *part.strides[at:]))
            self._placed(_like(out, part.shape, out.strides, ahead=begin * out.strides[at]), part)
            begin += part.shape[at]
        if begin != out.shape[at]:
            raise Unplanned(f"{node.op} of {begin}")

    def _repeated(self, node: Node) -> None:
        """Repeat each element several times along a dimension."""
        view, times = self._plain(node.args[0]), self._number(node.args[1])
        dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
        if not isinstance(dim, int):
            raise Unplanned(node.op)
        at = dim % len(view.shape)
        out = self._result(node)
        wide = (*view.shape[: at + 1], times, *view.shape[at + 1 :])
        if prod(wide) != prod(out.shape) or out.shape[at] != view.shape[at] * times:
            raise Unplanned(node.op)
        spread = _like(view, wide, (*view.strides[: at + 1], 0, *view.strides[at + 1 :]))
        self._pointwise(Op.COPY, _like(out, wide, _dense(wide)), spread, None)

    def _placed(self, out: View, part: View) -> None:
        """Copy into a part of a value, piece by piece if the part is not contiguous."""
        if out.dense:
            self._pointwise(Op.COPY, out, part, None)
            return
        at = next(at for at, size in enumerate(out.shape) if size > 1)
        if out.shape[at] > 64:
            raise Unplanned("a value of too many pieces")
        shape = out.shape[at + 1 :]
        for number in range(out.shape[at]):
            self._placed(
                _like(out, shape, out.strides[at + 1 :], ahead=number * out.strides[at]),
                _like(part, shape, part.strides[at + 1 :], ahead=number * part.strides[at]),
            )

    def _product(self, node: Node, use: Use) -> None:
        operand = next(arg for arg in node.args if isinstance(arg, Ref) and arg.name not in (use.weight, use.bias))
        view = self._plain(operand)
        shape = self.graph.params[use.weight].shape
        columns, count = reversed(shape) if use.transposed else shape
        if prod(view.shape) != count or view.shape[-1] != count or node.kwargs:
            raise Unplanned(f"{node.op} of {view.shape}")
        solid = self._solid(view, f"{node.outputs[0]} operand")
        out = self._result(node)
        line = self._line(Op.LINEAR)
        line[Field.DIMS], line[Field.DIMS + 1] = columns, count
        line[Field.OUT], line[Field.A], line[Field.A_ROW] = out.start, solid.start, 1
        line[Field.EXTRA + 2] = -1 if use.bias is None else self._fixed(Ref(use.bias))
        self.products[len(self.lines) - 1] = node.id
        self._end(f"{node.outputs[0]} operand")

    def _attention(self, node: Node) -> None:
        q, k, v = (self._plain(arg) for arg in node.args[:3])
        labels = [f"{node.outputs[0]} {part}" for part in "qkv"]
        if any(len(view.shape) != 4 or view.shape[0] != 1 or view.shape[2] != 1 for view in (q, k, v)):
            raise Unplanned("attention over something else than one row")
        sinks, softcap = node.kwargs.get("sinks"), node.kwargs.get("softcap")
        solid = [self._solid(view, label) for view, label in zip((q, k, v), labels, strict=True)]
        out = self._result(node)
        line = self._line(Op.ATTENTION)
        line[Field.DIMS : Field.DIMS + 3] = [q.shape[1], k.shape[1], k.shape[3]]
        line[Field.OUT], line[Field.A], line[Field.B] = out.start, solid[0].start, solid[1].start
        line[Field.EXTRA] = v.shape[3]
        line[Field.EXTRA + 1] = solid[2].start
        line[Field.EXTRA + 2] = self._fixed(node.kwargs["scale"])
        line[Field.EXTRA + 3] = -1 if softcap is None else self._fixed(softcap)
        line[Field.EXTRA + 4] = -1 if sinks is None else self._fixed(sinks)
        line[Field.EXTRA + 5] = len(self.attentions)
        self.attentions.append(node.id)
        self.groups = max(self.groups, q.shape[1] // k.shape[1])
        for label in labels:
            self._end(label)


def _has_rows(shape: Sequence[int | str]) -> bool:
    """Return whether the shape is [1, positions, ...]: a pass packs its sessions along the sequence."""
    return len(shape) >= 2 and shape[0] in (1, BATCH) and shape[1] == SEQUENCE


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[at + 1 :]) for at in range(len(shape)))


def _like(view: View, shape: tuple[int, ...], strides: tuple[int, ...], *, ahead: int = 0, whole: Any = None) -> View:
    return View(view.start + ahead, shape, strides, view.fixed, view.whole if whole is None else bool(whole))


def _spread(view: View, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides with which a view is broadcast to a larger shape."""
    missing = len(shape) - len(view.shape)
    if missing < 0 or any(own not in (1, size) for own, size in zip(view.shape, shape[missing:], strict=True)):
        raise Unplanned(f"{view.shape} as {shape}")
    return (0,) * missing + tuple(0 if own == 1 else step for own, step in zip(view.shape, view.strides, strict=True))


def _reshaped(view: View, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the strides of the same elements in another shape; None if they must be copied."""
    if prod(shape) != prod(view.shape):
        raise Unplanned(f"{view.shape} as {shape}")
    runs: list[tuple[int, int]] = []
    for size, step in zip(view.shape, view.strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * step:
            runs[-1] = (runs[-1][0] * size, step)
        else:
            runs.append((size, step))
    strides: list[int] = []
    left, step = 1, 0
    for size in shape:
        if size == 1:
            strides.append(0)
            continue
        if left == 1:
            left, step = runs.pop(0)
        if left % size:
            return None
        left //= size
        strides.append(left * step)
    return tuple(strides)
