"""Positions that a model counts for itself become the input `position_ids`, so that packed sessions have their own.

Many models take no positions: they count from the length of what they are given (`arange`), cut a table of positions to
that length, or add up a mask along the text. In a pass of many sessions that would count the pack. Here a count
becomes the row's position, a cut table a look-up by positions, and a sum along the text a scan, which carries its state
from pass to pass (`ir.states`). The numbers of a whole text are the same. What is counted for another purpose, such as
rows of an activation, is left as it is, and `ir.serving` says why it can't be served from caches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec

from fusionai.ir.graph import SYMINT, consumers, reads
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Arg, DTypeArg, Graph, Node, Ref, ValueSpec
from fusionai.ir.shapes import symbols_of
from fusionai.primitives.tensors import FLOAT_DTYPES

POSITIONS: Final = "position_ids"
SEQUENCE: Final = "s"
_BATCHES: Final = ("b", 1)
_COUNTS: Final = frozenset({"aten.arange.default", "aten.arange.start", "aten.arange.start_step"})
_ONES: Final = frozenset({"aten.ones.default", "aten.full.default", "aten.ones_like.default", "aten.full_like.default"})


def by_positions(graph: Graph) -> Graph:
    """Return the graph with counted positions read from the input `position_ids`, which is added if it is missing."""
    made = _Rewriting(graph, consumers(graph))
    for node in graph.nodes:
        made.nodes.extend(made.rewritten(node))
    if not made.changed:
        return graph
    inputs = graph.inputs if POSITIONS in graph.inputs or not made.row else (*graph.inputs, POSITIONS)
    return msgspec.structs.replace(graph, nodes=tuple(made.nodes), values=made.values, inputs=inputs)


@dataclass(slots=True)
class _Rewriting:
    """Nodes made so far. `row`: name of the positions as [s], "" before the first use."""

    graph: Graph
    used: dict[str, tuple[Node, ...]]
    nodes: list[Node] = field(default_factory=list)
    values: dict[str, ValueSpec] = field(init=False)
    following: int = field(init=False)
    ones: set[str] = field(default_factory=set)
    row: str = ""
    changed: bool = False

    def __post_init__(self) -> None:
        self.values = dict(self.graph.values)
        self.following = 1 + max((node.id for node in self.graph.nodes), default=0)

    def rewritten(self, node: Node) -> list[Node]:
        match node.op:
            case op if op in _COUNTS and self._is_count(node):
                return self._count(node)
            case "aten.slice.Tensor" if self._is_cut_table(node):
                return self._look_up(node)
            case "aten.cumsum.default" if self._is_along_text(node):
                return self._sum(node)
            case op if op in _ONES and self._is_one(node):
                self.ones.add(node.outputs[0])
            case _:
                pass
        return [node]

    def _is_count(self, node: Node) -> bool:
        (value,) = node.outputs
        spec = self.graph.values[value]
        begins = node.op == "aten.arange.default" or node.args[0] == 0
        steps = node.op != "aten.arange.start_step" or node.args[2] == 1
        return begins and steps and spec.shape == (SEQUENCE,) and spec.dtype == "int64" and self._by_row(value)

    def _by_row(self, value: str) -> bool:
        """Return whether a count is only used row by row: whole numbers that follow from it have rows along one
        dimension, and are no places in an activation."""
        waiting, seen = [value], {value}
        while waiting:
            for node in self.used.get(waiting.pop(), ()):
                others = [name for name in reads(node) if name not in seen and self._varies(name)]
                if OPERATORS[node.op].category in ("index", "scan") and others:
                    return False
                for made in node.outputs:
                    spec = self.graph.values[made]
                    if sum(SEQUENCE in symbols_of(dim) for dim in spec.shape) > 1:
                        return False
                    if made not in seen and spec.dtype not in FLOAT_DTYPES and spec.dtype != SYMINT:
                        seen.add(made)
                        waiting.append(made)
        return True

    def _varies(self, value: str) -> bool:
        return any(SEQUENCE in symbols_of(dim) for dim in self.graph.values[value].shape)

    def _count(self, node: Node) -> list[Node]:
        made, self.changed = self._row(), True
        copied = msgspec.structs.replace(
            node, op="aten.clone.default", args=(Ref(self.row),), kwargs={}, outputs=node.outputs
        )
        return [*made, copied]

    def _is_cut_table(self, node: Node) -> bool:
        """Return whether a parameter or buffer is cut to the text's length, from its beginning."""
        (made,), source = node.outputs, node.args[0]
        at = node.args[1] if len(node.args) > 1 else 0
        if not isinstance(source, Ref) or not isinstance(at, int) or node.kwargs or len(node.args) > 4:
            return False
        table, cut = self.graph.values[source.name].shape, self.graph.values[made].shape
        begins = len(node.args) < 3 or node.args[2] in (None, 0)
        place = at % len(table)
        fixed = source.name in self.graph.params and all(isinstance(dim, int) for dim in table)
        return begins and fixed and cut == (*table[:place], SEQUENCE, *table[place + 1 :]) and self._by_row(made)

    def _look_up(self, node: Node) -> list[Node]:
        made, self.changed = self._row(), True
        source, *others = node.args
        args = (source, others[0] if others else 0, Ref(self.row))
        return [*made, msgspec.structs.replace(node, op="aten.index_select.default", args=args, kwargs={})]

    def _is_one(self, node: Node) -> bool:
        return node.op in ("aten.ones.default", "aten.ones_like.default") or node.args[1] == 1

    def _is_along_text(self, node: Node) -> bool:
        source, at = node.args[0], node.args[1]
        if not isinstance(source, Ref) or not isinstance(at, int):
            return False
        shape = self.graph.values[source.name].shape
        return len(shape) >= 2 and shape[0] in _BATCHES and shape[1] == SEQUENCE and at % len(shape) == 1

    def _sum(self, node: Node) -> list[Node]:
        """A sum of ones is the position and one; another sum is a scan that forgets nothing."""
        self.changed = True
        source, (result,) = node.args[0], node.outputs
        assert isinstance(source, Ref)
        spec = self.values[result]
        if source.name in self.ones and len(spec.shape) == 2 and spec.dtype == "int64":
            made = self._row()
            counted = self._node(node, "aten.add.Tensor", (Ref(self.row), 1), ValueSpec((SEQUENCE,), "int64"))
            spread = self._node(node, "aten.expand_as.default", (Ref(counted.outputs[0]), source), spec)
            return [*made, counted, msgspec.structs.replace(spread, outputs=node.outputs)]
        wide = ValueSpec(spec.shape, "float32")
        entering = self._node(node, "aten._to_copy.default", (source,), wide, dtype="float32")
        kept = self._node(node, "aten.ones_like.default", (Ref(entering.outputs[0]),), wide)
        scanned = self._node(node, "fusion.linear_scan", (Ref(kept.outputs[0]), Ref(entering.outputs[0])), wide)
        back = self._node(node, "aten._to_copy.default", (Ref(scanned.outputs[0]),), spec, dtype=spec.dtype)
        return [entering, kept, scanned, msgspec.structs.replace(back, outputs=node.outputs)]

    def _row(self) -> list[Node]:
        """Return the nodes that make `row`, if it is used for the first time."""
        if self.row:
            return []
        first = self.graph.nodes[0]
        batch = self.graph.values[self.graph.inputs[0]].shape[0]
        self.values.setdefault(POSITIONS, ValueSpec((batch, SEQUENCE), "int64"))
        taken = self._node(first, "aten.select.int", (Ref(POSITIONS), 0, 0), ValueSpec((SEQUENCE,), "int64"), path="")
        self.row = taken.outputs[0]
        return [taken]

    def _node(
        self, origin: Node, op: str, args: tuple[Arg, ...], spec: ValueSpec, *, dtype: str = "", path: str | None = None
    ) -> Node:
        """Return a node at the place of `origin`, with a new id and a new value."""
        number, self.following = self.following, self.following + 1
        name = f"counted:{number}"
        self.values[name] = spec
        kwargs: dict[str, Arg] = {"dtype": DTypeArg(dtype)} if dtype else {}
        return msgspec.structs.replace(
            origin,
            id=number,
            op=op,
            args=args,
            kwargs=kwargs,
            outputs=(name,),
            path=origin.path if path is None else path,
        )
