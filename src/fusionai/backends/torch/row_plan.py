"""Translates a serving graph into a program for single rows: instructions over plain memory.

Decoding computes few rows, and starting an operator then takes longer than its work. With one position every size is
fixed, so views cost nothing, values reuse memory of values that are no longer needed, and the result is a list of
numbers that one compiled call runs. A graph with any operator unknown to this module gets no plan and runs operator by
operator. Neighbours: `row_code` defines the lines and allocates, `row_draft` collects them, `row_experts` translates
what mixtures of experts need, `row_program` fills in addresses and runs the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    Unplanned,
    View,
    dense_strides,
    refuse_beyond,
)
from fusionai.backends.torch.row_draft import RowDraft, given
from fusionai.backends.torch.row_experts import translation
from fusionai.ir.graph import SYMINT, needed_nodes, reads
from fusionai.ir.schema import DTypeArg, Graph, ListArg, Node, Ref
from fusionai.ir.serving import AXIS_POSITIONS, BATCH, EXPERT_PRODUCT, POSITIONS, SEQUENCE

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
        *("expand", "reshape", "view", "split", "split_with_sizes", "chunk", "clone"),
    }
)
"""Operators that only change how memory is viewed."""
_POWERS: Final = {0.5: Op.SQRT, -0.5: Op.RSQRT, 1: Op.COPY, 2: Op.SQUARE, 3: Op.CUBE}
"""Exponent -> operator."""
_SAME: Final = frozenset({"alias", "detach", "contiguous", "type_as", "_to_copy", "to"})
"""Operators that return their operand, apart from its dtype."""

_MOST_PARTS: Final = 64
"""Lines that a value may take whose parts are copied or added one by one; chosen."""


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
    tables: Mapping[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])
    """Line -> the parameter of which rows are looked up, and the input with their numbers."""


def plan_rows(
    graph: Graph, wanted: Sequence[str], uses: Mapping[int, ProductWeight], *, tables: bool = False
) -> RowPlan:
    """Return the plan for the outputs `wanted`. `uses`: products by node id, as `packed_graph.products` returns them.
    `tables`: rows of parameters may be looked up.
    Raises `Unplanned` if an operator or a shape is not supported."""
    nodes = needed_nodes(graph, {graph.outputs[meaning] for meaning in wanted})
    return _Planner(graph, nodes, uses, tables=tables).planned(wanted)


class _Planner(RowDraft):
    def __init__(self, graph: Graph, nodes: Sequence[Node], uses: Mapping[int, ProductWeight], *, tables: bool) -> None:
        super().__init__(graph, uses)
        self.tables: dict[int, tuple[str, str]] | None = {} if tables else None
        self.nodes = nodes
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
                view = self.copied(view, value + " as output")
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
            tables=self.tables or {},
        )

    def _input(self, name: str) -> tuple[int, int]:
        spec = self.graph.values[name]
        whole = spec.dtype == "int64"
        if not _has_rows(spec.shape) or not (
            spec.dtype == "float32" or (whole and (self.tables is not None or name in (POSITIONS, AXIS_POSITIONS)))
        ):
            raise Unplanned(f"input {name} is no row of floats")
        shape = self.sizes(name)
        self.memory.own(name, shape, whole=whole)
        return self.memory.views[name].start, prod(shape)

    def _node(self, node: Node) -> None:
        name = node.op.split(".")[1]
        if node.id in self.uses and node.op != EXPERT_PRODUCT:
            self._product(node, self.uses[node.id])
        elif node.op == "fusion.attention":
            self._attention(node)
        elif self.tables is not None and name == "embedding":
            self._looked_up(node, self.tables)
        elif (translate := translation(node)) is not None:
            translate(self, node)
        elif self.graph.values[node.outputs[0]].dtype == SYMINT:
            self._size(node)
        elif any(self.graph.values[value].dtype != "float32" for value in node.outputs) and name not in _VIEWS:
            raise Unplanned(f"{node.op} makes no floats")
        elif name in _SAME or name in _VIEWS:
            self._moved(node, name)
        elif name in _BINARY and node.op.endswith((".Tensor", ".Scalar")) and not node.kwargs and len(node.args) == 2:
            self.pointwise(_BINARY[name], self.result(node), self.plain(node.args[0]), self.plain(node.args[1]))
        elif name in _UNARY and not node.kwargs and len(node.args) == 1:
            self.pointwise(_UNARY[name], self.result(node), self.plain(node.args[0]), None)
        elif node.op == "aten.pow.Tensor_Scalar" and isinstance(node.args[1], int | float):
            if node.args[1] not in _POWERS:
                raise Unplanned(f"power {node.args[1]}")
            self.pointwise(_POWERS[node.args[1]], self.result(node), self.plain(node.args[0]), None)
        elif node.op == "aten.gelu.default":
            kind = Op.GELU_TANH if node.kwargs.get("approximate", "none") == "tanh" else Op.GELU
            self.pointwise(kind, self.result(node), self.plain(node.args[0]), None)
        elif name in ("mean", "sum") and node.op.endswith((".dim", ".dim_IntList")):
            self._reduced(node, Op.MEAN if name == "mean" else Op.TOTAL)
        elif node.op == "aten.layer_norm.default":
            self._normalised(node)
        elif name in ("cat", "stack"):
            self._joined(node, stacked=name == "stack")
        elif node.op == "aten.repeat_interleave.self_int":
            self._repeated(node)
        elif node.op in ("aten.slice_scatter.default", "aten.select_scatter.default"):
            self._inserted(node)
        else:
            raise Unplanned(node.op)

    def _size(self, node: Node) -> None:
        """Evaluate an operator on sizes."""
        operand = node.args[0]
        if node.op == "sym.mul":
            self.numbers[node.outputs[0]] = prod(self.number(arg) for arg in node.args)
            return
        if node.op != "aten.sym_size.int" or not isinstance(operand, Ref) or not isinstance(node.args[1], int):
            raise Unplanned(node.op)
        self.numbers[node.outputs[0]] = self.sizes(operand.name)[node.args[1]]

    def _moved(self, node: Node, name: str) -> None:
        """Translate an operator that only changes how memory is viewed."""
        source = node.args[0]
        view = self.view(source)
        label = source.name if isinstance(source, Ref) else ""
        if name in _SAME or name == "clone":
            given = node.kwargs.get("dtype")
            if given is not None and given != DTypeArg("float32"):
                raise Unplanned(f"{node.op} to {given!r}")
            self.memory.show(node.outputs[0], replace(view, whole=view.whole and given is None), label)
            return
        if name in ("split", "split_with_sizes", "chunk"):
            self._split(node, view, label)
            return
        sizes = self.sizes(node.outputs[0])
        if name in ("reshape", "view"):
            self._same_rows(label, node.outputs[0])
        made = self._viewed(node, name, view, label, sizes)
        if made is None:
            copy = self.copied(view, node.outputs[0])
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
                return view.with_dim(self.number(node.args[1]) % (rank + 1))
            case "squeeze" if isinstance(node.args[-1], int):
                at = node.args[-1] % rank
                return view.without_dim(at) if view.shape[at] == 1 else view
            case "transpose":
                first, second = (self.number(arg) % rank for arg in node.args[1:3])
                return view.ordered([{first: second, second: first}.get(at, at) for at in range(rank)])
            case "permute" if isinstance(node.args[1], ListArg):
                return view.ordered([self.number(item) % rank for item in node.args[1].items])
            case "slice":
                at, begin, end, step = (given(node, place) for place in range(1, 5))
                at = 0 if at is None else self.number(at) % rank
                self.unsequenced(label, at)
                return view.sliced(
                    at,
                    0 if begin is None else self.number(begin),
                    view.shape[at] if end is None else self.number(end),
                    1 if step is None else self.number(step),
                )
            case "select":
                at = self.number(node.args[1]) % rank
                self.unsequenced(label, at)
                return view.without_dim(at, self.number(node.args[2]) % view.shape[at])
            case _:
                raise Unplanned(node.op)

    def _same_rows(self, source: str, made: str) -> None:
        """Refuse another shape whose rows hold elements of several rows of the source."""
        places = {self.ahead_of_rows(value) for value in (source, made) if value in self.graph.values} - {None}
        if len(places) > 1:
            raise Unplanned(f"{made} mixes rows of {source}")

    def _split(self, node: Node, view: View, label: str) -> None:
        at = self.number(given(node, 2, "dim", 0)) % len(view.shape)
        self.unsequenced(label, at)
        begin = 0
        for value in node.outputs:
            sizes = self.sizes(value)
            part = view.moved(sizes, view.strides, ahead=begin * view.strides[at])
            self.memory.show(value, part, label)
            begin += sizes[at]
        if begin != view.shape[at]:
            raise Unplanned(f"{node.op} into {begin} of {view.shape[at]}")

    def _reduced(self, node: Node, op: Op) -> None:
        view = self.plain(node.args[0])
        dims = node.args[1].items if isinstance(node.args[1], ListArg) else (node.args[1],)
        if len(dims) != 1 or node.kwargs:
            raise Unplanned(f"{node.op} over {dims}")
        at = self.number(dims[0]) % len(view.shape)
        if isinstance(node.args[0], Ref):
            self.unsequenced(node.args[0].name, at)
        if at == len(view.shape) - 1:
            self.along(op, node, view)
        elif op is Op.TOTAL:
            self._added(node, view, at)
        else:
            raise Unplanned(f"{node.op} over {dims}")

    def _added(self, node: Node, view: View, at: int) -> None:
        """Add the parts of a value along a dimension before the last, in order."""
        if not 0 < view.shape[at] <= _MOST_PARTS:
            raise Unplanned(f"a sum of {view.shape[at]} parts")
        parts = [view.without_dim(at, number) for number in range(view.shape[at])]
        out = self.result(node)
        self.declared(out, parts[0].shape, Op.TOTAL)
        total = out.moved(parts[0].shape, dense_strides(parts[0].shape))
        if len(parts) == 1:
            self.pointwise(Op.COPY, total, parts[0], None)
        for number, part in enumerate(parts[1:]):
            self.pointwise(Op.ADD, total, total if number else parts[0], part)

    def _normalised(self, node: Node) -> None:
        view = self.plain(node.args[0])
        sizes = node.args[1].items if isinstance(node.args[1], ListArg) else ()
        weight, bias, eps = given(node, 2), given(node, 3), given(node, 4, "eps", 1e-5)
        if tuple(sizes) != view.shape[-1:] or set(node.kwargs) - {"eps"}:
            raise Unplanned(f"{node.op} over {sizes}")
        line = self.along(Op.LAYER_NORM, node, view)
        line[Field.EXTRA] = self.fixed(eps, 1)
        line[Field.EXTRA + 1] = -1 if weight is None else self.fixed(weight, view.shape[-1])
        line[Field.EXTRA + 2] = -1 if bias is None else self.fixed(bias, view.shape[-1])

    def _joined(self, node: Node, *, stacked: bool) -> None:
        items = node.args[0].items if isinstance(node.args[0], ListArg) else ()
        out = self.memory.own(node.outputs[0], self.sizes(node.outputs[0]))
        at = self.number(given(node, 1, "dim", 0)) % len(out.shape)
        self.unsequenced(node.outputs[0], at)
        begin = 0
        for item in items:
            part = self.plain(item)
            if stacked:
                part = part.with_dim(at)
            self._placed(out.moved(part.shape, out.strides, ahead=begin * out.strides[at]), part)
            begin += part.shape[at]
        if begin != out.shape[at]:
            raise Unplanned(f"{node.op} of {begin}")

    def _inserted(self, node: Node) -> None:
        """Write another value over a slice of a value, or over one place along a dimension."""
        view, part, out = self.plain(node.args[0]), self.plain(node.args[1]), self.result(node)
        self.declared(out, view.shape, Op.COPY)
        at = self.number(given(node, 2, "dim", 0)) % len(view.shape)
        self.unsequenced(node.outputs[0], at)
        begin, end, step = (given(node, place, name) for place, name in ((3, "start"), (4, "end"), (5, "step")))
        if node.op == "aten.select_scatter.default":
            begin = self.number(given(node, 3, "index")) % view.shape[at]
            end, part = begin + 1, part.with_dim(at)
        whole = out.moved(view.shape, dense_strides(view.shape))
        place = whole.sliced(
            at,
            0 if begin is None else self.number(begin),
            view.shape[at] if end is None else self.number(end),
            1 if step is None else self.number(step),
        )
        if place.shape != part.shape:
            raise Unplanned(f"{node.op} of {part.shape} into {place.shape}")
        self.pointwise(Op.COPY, whole, view, None)
        self._placed(place, part)

    def _repeated(self, node: Node) -> None:
        """Repeat each element several times along a dimension."""
        source = node.args[0]
        view, times = self.plain(source), self.number(node.args[1])
        dim = given(node, 2, "dim")
        if not isinstance(dim, int):
            raise Unplanned(node.op)
        at = dim % len(view.shape)
        sizes = self.sizes(node.outputs[0])
        wide = (*view.shape[: at + 1], times, *view.shape[at + 1 :])
        if sizes != (*view.shape[:at], view.shape[at] * times, *view.shape[at + 1 :]):
            raise Unplanned(node.op)
        spread = view.moved(wide, (*view.strides[: at + 1], 0, *view.strides[at + 1 :]))
        shown = spread.reshaped(sizes)
        if shown is not None:
            self.memory.show(node.outputs[0], shown, source.name if isinstance(source, Ref) else "")
            return
        out = self.result(node)
        self.pointwise(Op.COPY, out.moved(wide, dense_strides(wide)), spread, None)

    def _placed(self, out: View, part: View) -> None:
        """Copy into a part of a value, piece by piece if the part is not contiguous."""
        if not prod(out.shape):
            return
        if out.dense:
            self.pointwise(Op.COPY, out, part, None)
            return
        at = next(at for at, size in enumerate(out.shape) if size > 1)
        if out.shape[at] > _MOST_PARTS:
            raise Unplanned("a value of too many pieces")
        for number in range(out.shape[at]):
            self._placed(_inner(out, at, number), _inner(part, at, number))

    def _product(self, node: Node, use: ProductWeight) -> None:
        operand = next(arg for arg in node.args if isinstance(arg, Ref) and arg.name not in (use.weight, use.bias))
        view = self.plain(operand)
        shape = self.graph.params[use.weight].shape
        columns, count = reversed(shape) if use.transposed else shape
        if prod(view.shape) != count or view.shape[-1] != count or node.kwargs:
            raise Unplanned(f"{node.op} of {view.shape}")
        solid = self.solid(view, f"{node.outputs[0]} operand")
        out = self.result(node)
        self.declared(out, (columns,), Op.LINEAR)
        line = self.line(Op.LINEAR)
        line[Field.DIMS], line[Field.DIMS + 1] = columns, count
        line[Field.OUT], line[Field.A], line[Field.A_ROW] = out.start, solid.start, 1
        line[Field.EXTRA + 2] = -1 if use.bias is None else self.fixed(Ref(use.bias), columns)
        self.products[len(self.lines) - 1] = node.id
        self.memory.end(f"{node.outputs[0]} operand")

    def _looked_up(self, node: Node, tables: dict[int, tuple[str, str]]) -> None:
        """Look up one row of a parameter, by an input."""
        table, indices = node.args[:2]
        if not isinstance(table, Ref) or not isinstance(indices, Ref) or table.name not in self.graph.params:
            raise Unplanned(f"{node.op} of {table!r} at {indices!r}")
        view, shape = self.view(indices), self.graph.params[table.name].shape
        if indices.name not in self.graph.inputs or view.shape != (1, 1) or len(shape) != 2:
            raise Unplanned(f"{node.op} of {shape} at {indices!r}")
        out = self.result(node)
        self.declared(out, (1, 1, shape[1]), Op.TABLE)
        line = self.line(Op.TABLE)
        line[Field.DIMS], line[Field.DIMS + 1] = shape[1], shape[0]
        line[Field.OUT], line[Field.B] = out.start, view.start
        tables[len(self.lines) - 1] = table.name, indices.name

    def _attention(self, node: Node) -> None:
        q, k, v = (self.plain(arg) for arg in node.args[:3])
        labels = [f"{node.outputs[0]} {part}" for part in "qkv"]
        if any(len(view.shape) != 4 or view.shape[0] != 1 or view.shape[2] != 1 for view in (q, k, v)):
            raise Unplanned("attention over something else than one row")
        for arg, view in zip(node.args[:3], (q, k, v), strict=True):
            # Caches have the declared sizes.
            if not isinstance(arg, Ref) or view.shape != self.sizes(arg.name):
                raise Unplanned(f"attention over {view.shape}")
        if k.shape[1] != v.shape[1] or q.shape[3] != k.shape[3] or not k.shape[1] or q.shape[1] % k.shape[1]:
            raise Unplanned(f"attention of {q.shape} over {k.shape} and {v.shape}")
        sinks, softcap = node.kwargs.get("sinks"), node.kwargs.get("softcap")
        solid = [self.solid(view, label) for view, label in zip((q, k, v), labels, strict=True)]
        out = self.result(node)
        self.declared(out, (q.shape[1], v.shape[3]), Op.ATTENTION)
        line = self.line(Op.ATTENTION)
        line[Field.DIMS : Field.DIMS + 3] = [q.shape[1], k.shape[1], k.shape[3]]
        line[Field.OUT], line[Field.A], line[Field.B] = out.start, solid[0].start, solid[1].start
        line[Field.EXTRA] = v.shape[3]
        line[Field.EXTRA + 1] = solid[2].start
        line[Field.EXTRA + 2] = self.fixed(node.kwargs["scale"], 1)
        line[Field.EXTRA + 3] = -1 if softcap is None else self.fixed(softcap, 1)
        line[Field.EXTRA + 4] = -1 if sinks is None else self.fixed(sinks, q.shape[1])
        line[Field.EXTRA + 5] = len(self.attentions)
        self.attentions.append(node.id)
        self.groups = max(self.groups, q.shape[1] // k.shape[1])
        for label in labels:
            self.memory.end(label)


def _has_rows(shape: Sequence[int | str]) -> bool:
    """Return whether the shape is [1, positions, ...]: a pass packs its sessions along the sequence."""
    return len(shape) >= 2 and shape[0] in (1, BATCH) and shape[1] == SEQUENCE


def _inner(view: View, at: int, number: int) -> View:
    """Return element `number` of dimension `at`, before which all dimensions have one element."""
    return view.moved(view.shape[at + 1 :], view.strides[at + 1 :], ahead=number * view.strides[at])
