"""Translates a serving graph into a program for single rows: instructions over plain memory.

Decoding computes few rows, and starting an operator then takes longer than its work. With one position every size is
fixed, so views cost nothing, values reuse memory of values that are no longer needed, and the result is a list of
numbers that one compiled call runs. A graph with any operator unknown to this module gets no plan and runs operator by
operator. Neighbours: `row_code` allocates, `row_code` defines the lines, `row_program` fills in addresses and runs
the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

from fusionai.backends.torch.packed_graph import ProductWeight
from fusionai.backends.torch.row_code import (
    ALIGNMENT_FLOATS,
    LINE,
    Field,
    Op,
    RowMemory,
    Unplanned,
    View,
    dense_strides,
    refuse_beyond,
)
from fusionai.ir.graph import SYMINT, needed_nodes, reads
from fusionai.ir.schema import Arg, DTypeArg, FloatArg, Graph, ListArg, Node, Ref
from fusionai.ir.serving import BATCH, EXPERT_PRODUCT, POSITIONS, SEQUENCE

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
_VIEWS: Final = frozenset(
    {
        *("unsqueeze", "squeeze", "transpose", "permute", "slice", "select"),
        *("expand", "reshape", "view", "split", "chunk", "clone"),
    }
)
"""Operators that only change how memory is viewed."""
_POWERS: Final = {0.5: Op.SQRT, -0.5: Op.RSQRT, 1: Op.COPY, 2: Op.SQUARE, 3: Op.CUBE}
"""Exponent -> operator."""
_SAME: Final = frozenset({"alias", "detach", "contiguous", "type_as", "_to_copy", "to"})
"""Operators that return their operand, apart from its dtype."""


@dataclass(frozen=True, slots=True)
class RowPlan:
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


def plan_rows(graph: Graph, wanted: Sequence[str], uses: Mapping[int, ProductWeight]) -> RowPlan:
    """Return the plan for the outputs `wanted`. `uses`: products by node id, as `packed_graph.products` returns them.
    Raises `Unplanned` if an operator or a shape is not supported."""
    nodes = needed_nodes(graph, {graph.outputs[meaning] for meaning in wanted})
    return _Planner(graph, nodes, uses).planned(wanted)


class _Planner:
    def __init__(self, graph: Graph, nodes: Sequence[Node], uses: Mapping[int, ProductWeight]) -> None:
        self.graph = graph
        self.nodes = nodes
        self.uses = uses
        self.memory = RowMemory()
        self.numbers: dict[str, int] = {}
        self.lines: list[list[int]] = []
        self.products: dict[int, int] = {}
        self.attentions: list[int] = []
        self.groups = 1

    def planned(self, wanted: Sequence[str]) -> RowPlan:
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
                self.memory.end(value)
        outputs: dict[str, tuple[int, tuple[int, ...]]] = {}
        for meaning in wanted:
            value = self.graph.outputs[meaning]
            shape = self.graph.values[value].shape
            if self.graph.values[value].dtype != "float32" or not _has_rows(shape) or value not in self.memory.views:
                raise Unplanned(f"output {meaning} has no rows")
            view = self.memory.views[value]
            if view.fixed or not view.dense:
                view = self._copied(view, value + " as output")
            outputs[meaning] = (view.start, view.shape[2:])
        code = np.array([line + [0] * (LINE - len(line)) for line in self.lines], dtype=np.int64).reshape(-1, LINE)
        fixed = self.memory.fixed + -self.memory.fixed % ALIGNMENT_FLOATS
        width = max(ALIGNMENT_FLOATS, self.memory.width)
        refuse_beyond(code, fixed, width)
        return RowPlan(
            code=code,
            constants=self.memory.constants,
            fixed=fixed,
            width=width,
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
        self.memory.own(name, shape, whole=whole)
        return self.memory.views[name].start, prod(shape)

    def _view(self, arg: Arg) -> View:
        match arg:
            case Ref(name) if name in self.memory.views:
                return self.memory.views[name]
            case Ref(name) if name in self.graph.params and self.graph.params[name].dtype == "float32":
                return self.memory.constant(name, self.graph.params[name].shape)
            case FloatArg() | int() | float() if not isinstance(arg, bool):
                return self.memory.constant(float(arg.name if isinstance(arg, FloatArg) else arg))
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
        own = self.memory.own(name, view.shape)
        self._pointwise(Op.COPY, own, view, None)
        return own

    # -------------------------------------------------------------------------------------------------------- nodes

    def _node(self, node: Node) -> None:
        name = node.op.split(".")[1]
        if node.id in self.uses and node.op != EXPERT_PRODUCT:
            self._product(node, self.uses[node.id])
        elif node.op == "fusion.attention":
            self._attention(node)
        elif self.graph.values[node.outputs[0]].dtype == SYMINT:
            self._size(node)
        elif any(self.graph.values[value].dtype != "float32" for value in node.outputs) and name not in _VIEWS:
            raise Unplanned(f"{node.op} makes no floats")
        elif name in _SAME or name in _VIEWS:
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
        return self.memory.own(node.outputs[0], self._sizes(node.outputs[0]))

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

    def _moved(self, node: Node, name: str) -> None:
        """Translate an operator that only changes how memory is viewed."""
        source = node.args[0]
        view = self._view(source)
        label = source.name if isinstance(source, Ref) else ""
        if name in _SAME or name == "clone":
            given = node.kwargs.get("dtype")
            if given is not None and given != DTypeArg("float32"):
                raise Unplanned(f"{node.op} to {given!r}")
            self.memory.show(node.outputs[0], replace(view, whole=view.whole and given is None), label)
            return
        if name in ("split", "chunk"):
            self._split(node, view, label)
            return
        sizes = self._sizes(node.outputs[0])
        made = self._viewed(node, name, view, label, sizes)
        if made is None:
            copy = self._copied(view, node.outputs[0])
            self.memory.views[node.outputs[0]] = copy.moved(sizes, dense_strides(sizes))
            return
        if made.shape != sizes:
            raise Unplanned(f"{node.op} gives {made.shape}")
        self.memory.show(node.outputs[0], made, label)

    def _viewed(self, node: Node, name: str, view: View, label: str, sizes: tuple[int, ...]) -> View | None:
        """Return the result of an operator on views; None if its elements must be copied."""
        rank = len(view.shape)
        match name:
            case "expand":
                return view.broadcast(sizes)
            case "reshape" | "view":
                return view.reshaped(sizes)
            case "unsqueeze":
                return view.with_dim(self._number(node.args[1]) % (rank + 1))
            case "squeeze" if isinstance(node.args[-1], int):
                at = node.args[-1] % rank
                return view.without_dim(at) if view.shape[at] == 1 else view
            case "transpose":
                first, second = (self._number(arg) % rank for arg in node.args[1:3])
                return view.ordered([{first: second, second: first}.get(at, at) for at in range(rank)])
            case "permute" if isinstance(node.args[1], ListArg):
                return view.ordered([self._number(item) % rank for item in node.args[1].items])
            case "slice":
                at, begin, end, step = (_given(node, place) for place in range(1, 5))
                at = 0 if at is None else self._number(at) % rank
                self._unsequenced(label, at)
                return view.sliced(
                    at,
                    0 if begin is None else self._number(begin),
                    view.shape[at] if end is None else self._number(end),
                    1 if step is None else self._number(step),
                )
            case "select":
                at = self._number(node.args[1]) % rank
                self._unsequenced(label, at)
                return view.without_dim(at, self._number(node.args[2]) % view.shape[at])
            case _:
                raise Unplanned(node.op)

    def _unsequenced(self, value: str, dim: int) -> None:
        """Refuse an operator that selects among rows."""
        if value in self.graph.values and self.graph.values[value].shape[dim] == SEQUENCE:
            raise Unplanned(f"rows of {value} are chosen")

    def _split(self, node: Node, view: View, label: str) -> None:
        at = self._number(_given(node, 2, "dim", 0)) % len(view.shape)
        self._unsequenced(label, at)
        begin = 0
        for value in node.outputs:
            sizes = self._sizes(value)
            part = view.moved(sizes, view.strides, ahead=begin * view.strides[at])
            self.memory.show(value, part, label)
            begin += sizes[at]
        if begin != view.shape[at]:
            raise Unplanned(f"{node.op} into {begin} of {view.shape[at]}")

    def _pointwise(self, op: Op, out: View, a: View, b: View | None) -> None:
        operands = [a] if b is None else [a, b]
        longest = max(len(view.shape) for view in operands)
        shapes = [(1,) * (longest - len(view.shape)) + view.shape for view in operands]
        self._declared(out, tuple(max(sizes) if min(sizes) else 0 for sizes in zip(*shapes, strict=True)), op)
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
        line = self._line(op)
        missing = 3 - len(dims)
        line[Field.DIMS : Field.DIMS + 3] = [1] * missing + dims
        line[Field.OUT] = out.start
        places = ((Field.A, Field.A_ROW, Field.A_STRIDES), (Field.B, Field.B_ROW, Field.B_STRIDES))
        for view, own, (place, row, first) in zip(operands, steps, places, strict=False):
            line[place], line[row] = view.start, 0 if view.fixed else 1
            line[first : first + 3] = [0] * missing + own

    def _declared(self, out: View, derived: Sequence[int], op: Op) -> None:
        """Refuse a result that the graph declares with other sizes than follow from its operands: a declaration may
        hold for another number of positions, and a kernel writes as much as follows."""
        if prod(out.shape) != prod(derived):
            raise Unplanned(f"{op.name} gives {list(derived)}, declared is {list(out.shape)}")

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
        self._declared(out, view.shape if op is Op.LAYER_NORM else view.shape[:-1], op)
        line = self._line(op)
        line[Field.DIMS], line[Field.DIMS + 1] = prod(view.shape[:-1]), view.shape[-1]
        line[Field.OUT], line[Field.A], line[Field.A_ROW] = out.start, solid.start, 1
        self.memory.end(f"{node.outputs[0]} operand")
        return line

    def _normalised(self, node: Node) -> None:
        view = self._plain(node.args[0])
        sizes = node.args[1].items if isinstance(node.args[1], ListArg) else ()
        weight, bias, eps = _given(node, 2), _given(node, 3), _given(node, 4, "eps", 1e-5)
        if tuple(sizes) != view.shape[-1:] or set(node.kwargs) - {"eps"}:
            raise Unplanned(f"{node.op} over {sizes}")
        line = self._along(Op.LAYER_NORM, node, view)
        line[Field.EXTRA] = self._fixed(eps, 1)
        line[Field.EXTRA + 1] = -1 if weight is None else self._fixed(weight, view.shape[-1])
        line[Field.EXTRA + 2] = -1 if bias is None else self._fixed(bias, view.shape[-1])

    def _fixed(self, arg: Arg, count: int) -> int:
        """Return the offset of a constant of `count` elements."""
        view = self._view(arg)
        if not (view.fixed and view.dense) or prod(view.shape) != count:
            raise Unplanned(f"{arg!r} is no constant of {count} elements")
        return view.start

    def _joined(self, node: Node, *, stacked: bool) -> None:
        items = node.args[0].items if isinstance(node.args[0], ListArg) else ()
        out = self.memory.own(node.outputs[0], self._sizes(node.outputs[0]))
        at = self._number(_given(node, 1, "dim", 0)) % len(out.shape)
        self._unsequenced(node.outputs[0], at)
        begin = 0
        for item in items:
            part = self._plain(item)
            if stacked:
                part = part.with_dim(at)
            self._placed(out.moved(part.shape, out.strides, ahead=begin * out.strides[at]), part)
            begin += part.shape[at]
        if begin != out.shape[at]:
            raise Unplanned(f"{node.op} of {begin}")

    def _repeated(self, node: Node) -> None:
        """Repeat each element several times along a dimension."""
        view, times = self._plain(node.args[0]), self._number(node.args[1])
        dim = _given(node, 2, "dim")
        if not isinstance(dim, int):
            raise Unplanned(node.op)
        at = dim % len(view.shape)
        out = self._result(node)
        wide = (*view.shape[: at + 1], times, *view.shape[at + 1 :])
        if prod(wide) != prod(out.shape) or out.shape[at] != view.shape[at] * times:
            raise Unplanned(node.op)
        spread = view.moved(wide, (*view.strides[: at + 1], 0, *view.strides[at + 1 :]))
        self._pointwise(Op.COPY, out.moved(wide, dense_strides(wide)), spread, None)

    def _placed(self, out: View, part: View) -> None:
        """Copy into a part of a value, piece by piece if the part is not contiguous."""
        if out.dense:
            self._pointwise(Op.COPY, out, part, None)
            return
        at = next(at for at, size in enumerate(out.shape) if size > 1)
        if out.shape[at] > 64:
            raise Unplanned("a value of too many pieces")
        for number in range(out.shape[at]):
            self._placed(_inner(out, at, number), _inner(part, at, number))

    def _product(self, node: Node, use: ProductWeight) -> None:
        operand = next(arg for arg in node.args if isinstance(arg, Ref) and arg.name not in (use.weight, use.bias))
        view = self._plain(operand)
        shape = self.graph.params[use.weight].shape
        columns, count = reversed(shape) if use.transposed else shape
        if prod(view.shape) != count or view.shape[-1] != count or node.kwargs:
            raise Unplanned(f"{node.op} of {view.shape}")
        solid = self._solid(view, f"{node.outputs[0]} operand")
        out = self._result(node)
        self._declared(out, (columns,), Op.LINEAR)
        line = self._line(Op.LINEAR)
        line[Field.DIMS], line[Field.DIMS + 1] = columns, count
        line[Field.OUT], line[Field.A], line[Field.A_ROW] = out.start, solid.start, 1
        line[Field.EXTRA + 2] = -1 if use.bias is None else self._fixed(Ref(use.bias), columns)
        self.products[len(self.lines) - 1] = node.id
        self.memory.end(f"{node.outputs[0]} operand")

    def _attention(self, node: Node) -> None:
        q, k, v = (self._plain(arg) for arg in node.args[:3])
        labels = [f"{node.outputs[0]} {part}" for part in "qkv"]
        if any(len(view.shape) != 4 or view.shape[0] != 1 or view.shape[2] != 1 for view in (q, k, v)):
            raise Unplanned("attention over something else than one row")
        for arg, view in zip(node.args[:3], (q, k, v), strict=True):
            # Caches have the declared sizes.
            if not isinstance(arg, Ref) or view.shape != self._sizes(arg.name):
                raise Unplanned(f"attention over {view.shape}")
        if k.shape[1] != v.shape[1] or q.shape[3] != k.shape[3] or not k.shape[1] or q.shape[1] % k.shape[1]:
            raise Unplanned(f"attention of {q.shape} over {k.shape} and {v.shape}")
        sinks, softcap = node.kwargs.get("sinks"), node.kwargs.get("softcap")
        solid = [self._solid(view, label) for view, label in zip((q, k, v), labels, strict=True)]
        out = self._result(node)
        self._declared(out, (q.shape[1], v.shape[3]), Op.ATTENTION)
        line = self._line(Op.ATTENTION)
        line[Field.DIMS : Field.DIMS + 3] = [q.shape[1], k.shape[1], k.shape[3]]
        line[Field.OUT], line[Field.A], line[Field.B] = out.start, solid[0].start, solid[1].start
        line[Field.EXTRA] = v.shape[3]
        line[Field.EXTRA + 1] = solid[2].start
        line[Field.EXTRA + 2] = self._fixed(node.kwargs["scale"], 1)
        line[Field.EXTRA + 3] = -1 if softcap is None else self._fixed(softcap, 1)
        line[Field.EXTRA + 4] = -1 if sinks is None else self._fixed(sinks, q.shape[1])
        line[Field.EXTRA + 5] = len(self.attentions)
        self.attentions.append(node.id)
        self.groups = max(self.groups, q.shape[1] // k.shape[1])
        for label in labels:
            self.memory.end(label)


def _has_rows(shape: Sequence[int | str]) -> bool:
    """Return whether the shape is [1, positions, ...]: a pass packs its sessions along the sequence."""
    return len(shape) >= 2 and shape[0] in (1, BATCH) and shape[1] == SEQUENCE


def _given(node: Node, place: int, name: str = "", default: Arg = None) -> Arg:
    """Return an argument of a node, by its place or its name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _inner(view: View, at: int, number: int) -> View:
    """Return element `number` of dimension `at`, before which all dimensions have one element."""
    return view.moved(view.shape[at + 1 :], view.strides[at + 1 :], ahead=number * view.strides[at])
