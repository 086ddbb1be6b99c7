"""Which counts become positions, what they become, and which are left alone."""

from __future__ import annotations

from typing import Any

import pytest

from fusionai.ir.positions import by_positions
from fusionai.ir.schema import Graph, ListArg, Node, ParamSpec, Ref, ValueSpec
from fusionai.ir.states import state_shapes

LENGTH = Node(id=0, op="aten.sym_size.int", args=(Ref("input_ids"), 1), outputs=("length",))
COUNT = Node(id=1, op="aten.arange.default", args=(Ref("length"),), outputs=("count",))
TABLE = Node(id=2, op="aten.embedding.default", args=(Ref("table"), Ref("count")), outputs=("rows",))


def graph_of(*nodes: Node, outputs: dict[str, str], **values: tuple[tuple[Any, ...], str]) -> Graph:
    known = {
        "input_ids": ((1, "s"), "int64"), "length": ((), "symint"), "count": (("s",), "int64"),
        "table": ((64, 8), "float32"), "rows": (("s", 8), "float32"), **values,
    }  # fmt: skip
    return Graph(
        name="test",
        symbols={"s": (1, 64)},
        inputs=("input_ids",),
        outputs=outputs,
        values={name: ValueSpec(shape, dtype) for name, (shape, dtype) in known.items()},
        params={"table": ParamSpec(key="table", shape=(64, 8), dtype="float32", kind="parameter")},
        nodes=(LENGTH, *nodes),
    )


def ops(graph: Graph) -> list[str]:
    return [node.op.removeprefix("aten.") for node in graph.nodes]


def test_a_count_of_the_text_becomes_its_positions() -> None:
    made = by_positions(graph_of(COUNT, TABLE, outputs={"made": "rows"}))
    assert made.inputs == ("input_ids", "position_ids")
    assert made.values["position_ids"] == ValueSpec((1, "s"), "int64")
    assert ops(made) == ["sym_size.int", "select.int", "clone.default", "embedding.default"]


@pytest.mark.parametrize(
    ("op", "args"), [("aten.arange.start", (1, Ref("length"))), ("aten.arange.start_step", (0, Ref("length"), 2))]
)
def test_another_count_is_left_alone(op: str, args: tuple[Any, ...]) -> None:
    graph = graph_of(Node(id=1, op=op, args=args, outputs=("count",)), TABLE, outputs={"made": "rows"})
    assert by_positions(graph) is graph


def test_places_in_an_activation_are_left_alone() -> None:
    """A row of a pass is no position of a text."""
    picked = Node(id=3, op="aten.index_select.default", args=(Ref("rows"), 0, Ref("count")), outputs=("picked",))
    graph = graph_of(COUNT, TABLE, picked, outputs={"made": "picked"}, picked=(("s", 8), "float32"))
    assert by_positions(graph) is graph


def test_a_mask_of_all_positions_is_left_alone() -> None:
    turned = Node(id=3, op="aten.unsqueeze.default", args=(Ref("count"), 1), outputs=("turned",))
    mask = Node(id=4, op="aten.le.Tensor", args=(Ref("count"), Ref("turned")), outputs=("mask",))
    graph = graph_of(
        COUNT, turned, mask, outputs={"made": "mask"}, turned=(("s", 1), "int64"), mask=(("s", "s"), "bool")
    )
    assert by_positions(graph) is graph


def test_a_table_cut_to_the_text_is_looked_up() -> None:
    cut = Node(id=1, op="aten.slice.Tensor", args=(Ref("table"), 0, None, Ref("length")), outputs=("rows",))
    made = by_positions(graph_of(cut, outputs={"made": "rows"}))
    assert ops(made) == ["sym_size.int", "select.int", "index_select.default"]
    assert made.nodes[-1].args[:2] == (Ref("table"), 0)


def test_a_sum_of_ones_counts_positions_and_another_sum_is_a_scan() -> None:
    ones = Node(id=1, op="aten.ones.default", args=(ListArg((1, Ref("length"))),), outputs=("ones",))
    summed = Node(id=2, op="aten.cumsum.default", args=(Ref("ones"), 1), outputs=("sum",))
    shape = ((1, "s"), "int64")
    made = by_positions(graph_of(ones, summed, outputs={"made": "sum"}, ones=shape, sum=shape))
    assert ops(made) == ["sym_size.int", "ones.default", "select.int", "add.Tensor", "expand_as.default"]
    there = Node(id=1, op="aten.ne.Scalar", args=(Ref("input_ids"), 0), outputs=("there",))
    summed = Node(id=2, op="aten.cumsum.default", args=(Ref("there"), 1), outputs=("sum",))
    made = by_positions(graph_of(there, summed, outputs={"made": "sum"}, there=((1, "s"), "bool"), sum=shape))
    assert [shape.kind for shape in state_shapes(made)] == ["scan"]
    assert made.nodes[-1].outputs == ("sum",)
