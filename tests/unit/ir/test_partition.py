"""What crosses a cut, what is repeated, who holds what, and which cuts are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from fusionai.ir.blocks import assign_blocks
from fusionai.ir.partition import FEED, Route, SharedParam, cut, cut_blocks
from fusionai.ir.schema import Graph, ListArg, Ref
from fusionai.ir.validate import validate
from fusionai.primitives.errors import GraphError
from harness.held_state import holders


def ids(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


def test_one_tensor_crosses_a_layer_boundary(transformer_of: Callable[[int], Graph]) -> None:
    graph = assign_blocks(transformer_of(3))
    partition = cut_blocks(graph, [(0, 2), (2, 4), (4, 5), (5, 6)])
    boundary = [route for route in partition.routes if route.producer != FEED]
    assert [(r.producer, r.consumers, r.needs_grad) for r in boundary] == [
        (0, (1,), True),
        (1, (2,), True),
        (2, (3,), True),
    ]
    fed = {route.value: route.consumers for route in partition.routes if route.producer == FEED}
    # The rotary table is made again where layers are, from positions; labels go to the loss alone.
    assert fed == {"input_ids": (0,), "position_ids": (0, 1), "labels": (3,)}
    assert [stage.grad_inputs[:1] for stage in partition.stages] == [(), *((r.value,) for r in boundary)]
    assert {(r.value, r.sender, r.receiver) for r in partition.gradients if r.value not in graph.params} == {
        (r.value, *r.consumers, r.producer) for r in boundary
    }
    assert set(partition.stages[2].graph.outputs) == {"logits", boundary[2].value}
    assert set(partition.stages[3].graph.outputs) == {"loss"}
    for stage in partition.stages:
        validate(stage.graph)


def test_tied_weight_has_a_home(model: Graph) -> None:
    graph = assign_blocks(model)
    partition = cut_blocks(graph, [(0, 1), (1, 3), (3, 5)])
    assert partition.shared == (SharedParam(key="embed.weight", stages=(0, 2)),)
    held = holders(partition)
    assert held["embed.weight"] == (0, 2)
    assert held["layers.1.linear.weight"] == (1,)
    # A frozen table is held twice as well, but there is no gradient to sum.
    frozen = {
        value: msgspec.structs.replace(spec, trainable=spec.trainable and spec.key != "embed.weight")
        for value, spec in graph.params.items()
    }
    partition = cut_blocks(msgspec.structs.replace(graph, params=frozen), [(0, 1), (1, 3), (3, 5)])
    assert partition.shared == ()
    assert holders(partition)["embed.weight"] == (0, 2)
    assert [route.needs_grad for route in partition.routes if route.producer == 0] == [False]


def test_a_read_only_buffer_goes_to_every_reader(transformer_of: Callable[[int], Graph]) -> None:
    partition = cut_blocks(assign_blocks(transformer_of(2)), [(0, 2), (2, 5)])
    assert holders(partition)["rotary.inv_freq"] == (0, 1)


def test_values_may_skip_stages(make: Callable[..., Any]) -> None:
    g = make()
    x = g.input("x", ("b", 4), "float32")
    a = g.node("aten.linear.default", x, g.param("a", (4, 4)), shape=("b", 4))
    b = g.node("aten.relu.default", a, shape=("b", 4))
    g.outputs["y"] = g.node("aten.add.Tensor", a, b, shape=("b", 4))
    partition = cut(g.graph(), [ids(0), ids(1), ids(2)])
    assert partition.routes == (
        Route(value="x", producer=FEED, consumers=(0,), needs_grad=False),
        Route(value=a, producer=0, consumers=(1, 2), needs_grad=True),
        Route(value=b, producer=1, consumers=(2,), needs_grad=True),
    )


def test_backward_flow_is_refused(model: Graph) -> None:
    assignment = [
        frozenset(n.id for n in model.nodes if n.id % 2),
        frozenset(n.id for n in model.nodes if n.id % 2 == 0),
    ]
    with pytest.raises(GraphError, match=r"data would flow backward: node \d+ \(aten\..*\) in stage 0 reads 'v\d+'"):
        cut(model, assignment)


def test_assignment_must_cover_each_node_once(model: Graph) -> None:
    every = frozenset(node.id for node in model.nodes)
    with pytest.raises(GraphError, match="node 0 is in stage 0 and in stage 1"):
        cut(model, [every, ids(0)])
    with pytest.raises(GraphError, match="have no stage, the first is node 3"):
        cut(model, [every - ids(3, 4)])
    with pytest.raises(GraphError, match="names node 999"):
        cut(model, [every | ids(999)])


def test_an_idle_stage_is_refused(model: Graph) -> None:
    every = frozenset(node.id for node in model.nodes)
    with pytest.raises(GraphError, match="stage 1 has nothing to do"):
        cut(model, [every, ids()])


@pytest.mark.parametrize(
    "ranges", [[], [(0, 4)], [(0, 6)], [(0, 2), (3, 5)], [(0, 3), (2, 5)], [(0, 2), (2, 2), (2, 5)], [(2, 5), (0, 2)]]
)
def test_ranges_must_tile_the_blocks(model: Graph, ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(GraphError, match="blocks"):
        cut_blocks(assign_blocks(model), ranges)


def test_dead_code_goes(make: Callable[..., Any]) -> None:
    g = make()
    x = g.input("x", ("b", 4), "float32")
    a = g.node("aten.linear.default", x, g.param("a", (4, 4)), shape=("b", 4))
    g.node("aten.linear.default", a, g.param("unused", (4, 4)), shape=("b", 4))
    g.outputs["y"] = g.node("aten.relu.default", a, shape=("b", 4))
    (stage,) = cut(g.graph(), [ids(0, 1, 2)]).stages
    assert [node.id for node in stage.graph.nodes] == [0, 2]
    assert {spec.key for spec in stage.graph.params.values()} == {"a"}


def _norm(g: Any, x: str) -> str:
    g.node(
        "aten._native_batch_norm_legit_functional.default",
        x,
        g.param("norm.weight", (4,)),
        g.param("norm.bias", (4,)),
        g.param("norm.mean", (4,), kind="buffer"),
        g.param("norm.var", (4,), kind="buffer"),
        True,
        0.1,
        1e-5,
        shape=("b", 4),
        results=5,
    )
    node = g.nodes[-1]
    for name in node.outputs[1:]:
        g.values[name] = msgspec.structs.replace(g.values[name], shape=(4,))
    g.state_writes.update({node.outputs[3]: "norm.mean", node.outputs[4]: "norm.var"})
    return str(node.outputs[0])


def test_state_stays_with_its_writer(make: Callable[..., Any]) -> None:
    g = make()
    x = g.input("x", ("b", 4), "float32")
    a = g.node("aten.linear.default", x, g.param("a", (4, 4)), shape=("b", 4))
    normed = _norm(g, a)
    count = g.param("norm.count", (), kind="buffer", dtype="float32")
    g.state_writes[g.node("aten.add.Scalar", count, 1.0)] = "norm.count"
    g.outputs["y"] = g.node("aten.relu.default", normed, shape=("b", 4))
    partition = cut(g.graph(), [ids(0), ids(1), ids(2, 3)])
    assert [sorted(stage.graph.state_writes.values()) for stage in partition.stages] == [
        [],
        ["norm.mean", "norm.var"],
        ["norm.count"],
    ]
    assert holders(partition)["norm.mean"] == (1,)
    for stage in partition.stages:
        validate(stage.graph)


def test_readers_of_written_state_are_not_separated(make: Callable[..., Any]) -> None:
    g = make()
    x = g.input("x", ("b", 4), "float32")
    mean = g.param("mean", (4,), kind="buffer")
    a = g.node("aten.sub.Tensor", x, mean, shape=("b", 4))
    new = g.node("aten.mul.Scalar", mean, 0.9, shape=(4,))
    g.state_writes[new] = "mean"
    g.outputs["y"] = g.node("aten.relu.default", a, shape=("b", 4))
    cut(g.graph(), [ids(0, 1), ids(2)])
    with pytest.raises(GraphError, match="buffer 'mean' is read by node 0"):
        cut(g.graph(), [ids(0), ids(1, 2)])


def test_needs_grad_follows_gradients_only(make: Callable[..., Any]) -> None:
    g = make()
    x = g.input("x", ("b", 4), "float32")
    shape = ("b", 4)
    plain = g.node("aten.relu.default", x, shape=shape)
    frozen = g.node("aten.linear.default", x, g.param("frozen", (4, 4), frozen=True), shape=shape)
    trained = g.node("aten.linear.default", x, g.param("w", (4, 4)), shape=shape)
    stopped = g.node("aten.detach.default", trained, shape=shape)
    chosen = g.node("aten.argmax.default", trained, -1, shape=("b",), dtype="int64")
    like = g.node("aten.ones_like.default", trained, shape=shape)
    everything = [plain, frozen, trained, stopped, like]
    total = everything[0]
    for value in everything[1:]:
        total = g.node("aten.add.Tensor", total, value, shape=shape)
    g.outputs = {"y": total, "chosen": g.node("aten.add.Scalar", chosen, 1, shape=("b",), dtype="int64")}
    partition = cut(g.graph(), [ids(*range(6)), ids(*range(6, len(g.nodes)))])
    assert {route.value for route in partition.routes if route.needs_grad} == {trained}
    assert {route.value for route in partition.routes if route.producer == 0} == {*everything, chosen}


def test_a_size_is_read_off_what_the_stage_has(make: Callable[..., Any]) -> None:
    """The size of an activation of stage 0 is needed in stage 1, which does not get that activation."""
    g = make()
    ids_ = g.input("ids", ("b", "s"))
    h = g.node("aten.embedding.default", g.param("table", (7, 4)), ids_, shape=("b", "s", 4))
    size = g.size(h, 1)
    kept = g.node("aten.sum.dim_IntList", h, ListArg((2,)), shape=("b", "s"))
    g.outputs["y"] = g.node("aten.reshape.default", kept, ListArg((-1, Ref(size))), shape=("b", "s"))
    partition = cut(g.graph(), [ids(0, 1, 2), ids(3)])
    second = partition.stages[1].graph
    assert second.inputs == (kept,)
    assert next((node.id, node.op, node.args) for node in second.nodes) == (1, "aten.sym_size.int", (Ref(kept), 1))
    # Stage 0 does not compute it for nothing.
    assert [node.id for node in partition.stages[0].graph.nodes] == [0, 2]


def test_a_size_nothing_else_has_is_read_off_a_job_input_or_the_tensor(make: Callable[..., Any]) -> None:
    g = make()
    ids_ = g.input("ids", ("b", "s"))
    h = g.node("aten.embedding.default", g.param("table", (7, 4)), ids_, shape=("b", "s", 4))
    first = g.node("aten.select.int", h, 1, 0, shape=("b", 4))
    size = g.size(h, 1)
    g.outputs["y"] = g.node("aten.full.default", ListArg((Ref(size),)), 1.0, shape=("s",))
    g.outputs["z"] = g.node("aten.relu.default", first, shape=("b", 4))
    partition = cut(g.graph(), [ids(0, 1, 2), ids(3, 4)])
    assert partition.stages[1].graph.inputs == ("ids", first)
    # Without an input of that size the tensor itself comes along.
    grown = g.graph()
    values = {**grown.values, h: msgspec.structs.replace(grown.values[h], shape=("b", "s+1", 4))}
    partition = cut(msgspec.structs.replace(grown, values=values), [ids(0, 1, 2), ids(3, 4)])
    assert partition.stages[1].graph.inputs == (h, first)


def test_an_output_name_must_not_hide_a_boundary_value(make: Callable[..., Any]) -> None:
    g = make()
    x = g.input("x", ("b", 4), "float32")
    a = g.node("aten.linear.default", x, g.param("a", (4, 4)), shape=("b", 4))
    b = g.node("aten.relu.default", a, shape=("b", 4))
    g.outputs = {"y": g.node("aten.relu.default", a, shape=("b", 4)), a: b}
    with pytest.raises(GraphError, match="name of another value"):
        cut(g.graph(), [ids(0, 1), ids(2)])
