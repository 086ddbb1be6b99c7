"""Any forward cut of any graph computes what the whole graph computes, checked with an oracle that shares no code."""

from __future__ import annotations

import bisect
from functools import cache
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.ir.gradients import ALIAS
from fusionai.ir.graph import cheap_nodes, consumers, needing_gradient, reads
from fusionai.ir.operators import OPERATORS
from fusionai.ir.partition import FEED, Partition, StageGraph, cut
from fusionai.ir.schema import Dim, Graph, ListArg, Node, ParamSpec, Ref, ValueSpec, decode, encode
from fusionai.ir.validate import parse, validate
from harness.examples import examples
from harness.held_state import holders

FULL: tuple[Dim, ...] = ("b", 4)
HALF: tuple[Dim, ...] = ("b", 2)
TALL: tuple[Dim, ...] = ("b*2", 2)


class Growing:
    """A graph in the making, with the values of each shape that a next node may read."""

    def __init__(self) -> None:
        self.values: dict[str, ValueSpec] = {}
        self.params: dict[str, ParamSpec] = {}
        self.nodes: list[Node] = []
        self.writes: dict[str, str] = {}
        self.pool: dict[str, list[str]] = {"full": [], "half": [], "tall": [], "b": [], "2b": []}
        for name, dtype, shape in (("ids", "int64", ("b",)), ("x", "float32", FULL), ("positions", "float64", HALF)):
            self.values[name] = ValueSpec(shape, dtype)
        self.pool["full"].append("x")

    def param(self, shape: tuple[int, ...], kind: str = "parameter") -> Ref:
        value = f"p{len(self.params)}"
        self.values[value] = ValueSpec(shape, "float32")
        self.params[value] = ParamSpec(
            key=f"module.{value}",
            kind=kind,  # type: ignore[arg-type]
            shape=shape,
            dtype="float32",
            trainable=kind == "parameter",
        )
        return Ref(value)

    def node(self, op: str, *args: Any, shapes: tuple[tuple[Dim, ...], ...], dtype: str = "float32") -> tuple[str, ...]:
        number = len(self.nodes)
        outputs = tuple(f"v{number}_{i}" for i in range(len(shapes)))
        for name, shape in zip(outputs, shapes, strict=True):
            self.values[name] = ValueSpec(shape, dtype)
        # Ids need not follow the order.
        self.nodes.append(Node(id=1000 - 3 * number, op=op, args=args, outputs=outputs))
        return outputs


KINDS = (
    *("linear", "tied_linear", "add", "mul", "relu", "embedding", "split", "cat", "size", "tall_size"),
    *("double", "halve", "to_tall", "to_full", "cheap", "norm"),
)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    g = Growing()
    tied, table = g.param((4, 4)), g.param((5, 4))
    frequencies = g.param((4,), kind="constant")
    first = g.node("aten.linear.default", Ref("x"), tied, shapes=(FULL,))
    g.pool["full"] += first

    def pick(kind: str) -> Ref:
        return Ref(draw(st.sampled_from(g.pool[kind])))

    for kind in draw(st.lists(st.sampled_from(KINDS), min_size=2, max_size=22)):
        match kind:
            case "linear":
                g.pool["full"] += g.node("aten.linear.default", pick("full"), g.param((4, 4)), shapes=(FULL,))
            case "tied_linear":
                g.pool["full"] += g.node("aten.linear.default", pick("full"), tied, shapes=(FULL,))
            case "add" | "mul":
                g.pool["full"] += g.node(f"aten.{kind}.Tensor", pick("full"), pick("full"), shapes=(FULL,))
            case "relu":
                g.pool["full"] += g.node("aten.relu.default", pick("full"), shapes=(FULL,))
            case "embedding":
                g.pool["full"] += g.node("aten.embedding.default", table, Ref("ids"), shapes=(FULL,))
            case "split":
                g.pool["half"] += g.node("aten.split.Tensor", pick("full"), 2, -1, shapes=(HALF, HALF))
            case "cat" if g.pool["half"]:
                parts = ListArg((pick("half"), pick("half")))
                g.pool["full"] += g.node("aten.cat.default", parts, -1, shapes=(FULL,))
            case "size":
                g.pool["b"] += g.node("aten.sym_size.int", pick("full"), 0, shapes=((),), dtype="symint")
            case "tall_size" if g.pool["tall"]:
                g.pool["2b"] += g.node("aten.sym_size.int", pick("tall"), 0, shapes=((),), dtype="symint")
            case "double" if g.pool["b"]:
                g.pool["2b"] += g.node("sym.mul", pick("b"), 2, shapes=((),), dtype="symint")
            case "halve" if g.pool["2b"]:
                g.pool["b"] += g.node("sym.floordiv", pick("2b"), 2, shapes=((),), dtype="symint")
            case "to_tall" if g.pool["2b"]:
                size = ListArg((pick("2b"), 2))
                g.pool["tall"] += g.node("aten.reshape.default", pick("full"), size, shapes=(TALL,))
            case "to_full" if g.pool["b"] and g.pool["tall"]:
                size = ListArg((pick("b"), 4))
                g.pool["full"] += g.node("aten.reshape.default", pick("tall"), size, shapes=(FULL,))
            case "cheap":
                turned = g.node("aten.mul.Tensor", frequencies, 2.0, shapes=((4,),))
                wave = g.node("aten.cos.default", Ref(turned[0]), shapes=((4,),))
                g.pool["full"] += g.node("aten.add.Tensor", pick("full"), Ref(wave[0]), shapes=(FULL,))
            case "norm":
                statistics = [g.param((4,), kind="buffer"), g.param((4,), kind="buffer")]
                made = g.node(
                    "aten._native_batch_norm_legit_functional.default",
                    pick("full"),
                    g.param((4,)),
                    None,
                    *statistics,
                    True,
                    0.1,
                    1e-5,
                    shapes=(FULL, (4,), (4,), (4,), (4,)),
                )
                g.pool["full"].append(made[0])
                for written, buffer in zip(made[3:], statistics, strict=True):
                    g.writes[written] = g.params[buffer.name].key
            case _:
                pass
    outputs = {"last": [v for v in g.pool["full"] if v != "x"][-1]}
    if g.pool["tall"] and draw(st.booleans()):
        outputs["tall"] = g.pool["tall"][0]
    return Graph(
        symbols={"b": (1, 64)},
        inputs=("ids", "x", "positions"),
        outputs=outputs,
        values=g.values,
        params=g.params,
        state_writes=g.writes,
        nodes=tuple(g.nodes),
    )


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Graph, list[frozenset[int]]]:
    """A graph and an assignment along which data flows forward and every stage has something to do."""
    graph = draw(graphs())
    cheap = cheap_nodes(graph)
    count = draw(st.integers(1, 5))
    stage_of: dict[int, int] = {}
    home: dict[str, int] = {}
    for node in graph.nodes:
        floor = max((home.get(value, 0) for value in reads(node)), default=0)
        # A cheap node may stand in any stage, yet whoever reads a size comes after the tensor that has it.
        stage_of[node.id] = draw(st.integers(0 if node.id in cheap else floor, count - 1))
        home.update(dict.fromkeys(node.outputs, floor if node.id in cheap else stage_of[node.id]))
    used = sorted({stage_of[node_id] for node_id in live_ids(graph, through_sizes=False) - cheap})
    dense = {node_id: min(bisect.bisect_left(used, stage), len(used) - 1) for node_id, stage in stage_of.items()}
    return graph, [frozenset(i for i, stage in dense.items() if stage == wanted) for wanted in range(len(used))]


def live_ids(graph: Graph, *, through_sizes: bool) -> set[int]:
    """Nodes the outputs and written state need; a tensor read only for its size counts if `through_sizes`."""
    wanted = {*graph.outputs.values(), *graph.state_writes}
    found: set[int] = set()
    for node in reversed(graph.nodes):
        if not wanted.isdisjoint(node.outputs):
            found.add(node.id)
            if through_sizes or node.op != "aten.sym_size.int":
                wanted.update(reads(node))
    return found


def run(graph: Graph, given_values: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """The oracle: every value of the graph. `params` by key."""
    env = {value: params[spec.key] for value, spec in graph.params.items()}
    env.update({value: given_values[value] for value in graph.inputs})

    def arg(a: Any) -> Any:
        match a:
            case Ref(name):
                return env[name]
            case ListArg(items):
                return [arg(item) for item in items]
            case _:
                return a

    for node in graph.nodes:
        a = [arg(x) for x in node.args]
        match node.op:
            case "aten.alias.default":
                made = (a[0],)
            case "aten.linear.default":
                made = (a[0] @ a[1].T,)
            case "aten.add.Tensor":
                made = (a[0] + a[1],)
            case "aten.mul.Tensor":
                made = (a[0] * a[1],)
            case "aten.relu.default":
                made = (np.maximum(a[0], 0),)
            case "aten.cos.default":
                made = (np.cos(a[0]),)
            case "aten.embedding.default":
                made = (a[0][a[1]],)
            case "aten.split.Tensor":
                made = (a[0][:, :2], a[0][:, 2:])
            case "aten.cat.default":
                made = (np.concatenate(a[0], axis=-1),)
            case "aten.sym_size.int":
                made = (a[0].shape[a[1]],)
            case "sym.mul":
                made = (a[0] * a[1],)
            case "sym.floordiv":
                made = (a[0] // a[1],)
            case "aten.reshape.default":
                made = (a[0].reshape(a[1]),)
            case "aten._native_batch_norm_legit_functional.default":
                x, weight, _, mean, variance, _, momentum, eps = a
                m, v = x.mean(0), x.var(0)
                made = (
                    (x - m) / np.sqrt(v + eps) * weight,
                    m,
                    1 / np.sqrt(v + eps),
                    mean * (1 - momentum) + m * momentum,
                    variance * (1 - momentum) + v * momentum,
                )
            case _:
                raise AssertionError(node.op)
        env.update(zip(node.outputs, made, strict=True))
    return env


def feed(graph: Graph, batch: int) -> tuple[dict[str, Any], dict[str, Any]]:
    random = np.random.default_rng(batch)
    params = {spec.key: random.normal(size=spec.shape) / 2 for spec in graph.params.values()}
    inputs = {
        "ids": random.integers(0, 5, batch),
        "x": random.normal(size=(batch, 4)),
        "positions": random.normal(size=(batch, 2)),
    }
    return inputs, params


def run_stages(graph: Graph, partition: Partition, batch: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Outputs and written state, with nothing passed between stages but what the routes name."""
    inputs, params = feed(graph, batch)
    outputs: dict[str, Any] = {}
    state: dict[str, Any] = {}
    sent: dict[tuple[int, str], Any] = {
        (consumer, route.value): inputs[route.value]
        for route in partition.routes
        if route.producer == FEED
        for consumer in route.consumers
    }
    for stage in partition.stages:
        held = {spec.key: params[spec.key] for spec in stage.graph.params.values()}
        named = {value: stage.aliases.get(value, value) for value in stage.graph.inputs}
        env = run(stage.graph, {value: sent[stage.stage, source] for value, source in named.items()}, held)
        made = {meaning: env[value] for meaning, value in stage.graph.outputs.items()}
        for route in partition.routes:
            if route.producer == stage.stage:
                sent.update({(consumer, route.value): made[route.value] for consumer in route.consumers})
        outputs.update({meaning: made[meaning] for meaning in graph.outputs if meaning in made})
        state.update({key: env[value] for value, key in stage.graph.state_writes.items()})
    return outputs, state


@settings(deadline=None, derandomize=True, max_examples=examples(150))
@given(cuts(), st.integers(1, 5))
def test_stages_compute_what_the_whole_computes(case: tuple[Graph, list[frozenset[int]]], batch: int) -> None:
    graph, assignment = case
    whole = run(graph, *feed(graph, batch))
    outputs, state = run_stages(graph, cut(graph, assignment), batch)
    assert set(outputs) == set(graph.outputs)
    for meaning, value in graph.outputs.items():
        assert np.array_equal(outputs[meaning], whole[value])
    assert set(state) == set(graph.state_writes.values())
    for value, key in graph.state_writes.items():
        assert np.array_equal(state[key], whole[value])


@settings(deadline=None, derandomize=True, max_examples=examples(150))
@given(cuts())
def test_structure_of_a_cut(case: tuple[Graph, list[frozenset[int]]]) -> None:
    graph, assignment = case
    validate(graph)
    partition = cut(graph, assignment)
    cheap = cheap_nodes(graph)
    whole = {node.id for node in graph.nodes}
    placed = [
        node.id for stage in partition.stages for node in stage.graph.nodes if node.id not in cheap and node.id in whole
    ]
    assert len(placed) == len(set(placed))
    assert live_ids(graph, through_sizes=False) - cheap <= set(placed) <= live_ids(graph, through_sizes=True)
    for stage in partition.stages:
        assert parse(encode(stage.graph)) == stage.graph
        own = {node.id for node in stage.graph.nodes}
        assert own & whole - cheap <= assignment[stage.stage]
        joins = [node for node in stage.graph.nodes if node.id not in whole]
        assert [(node.op, node.outputs[0]) for node in joins] == [(ALIAS, name) for name in joins_in_order(stage)]
        assert set(stage.grad_inputs) <= {*stage.graph.inputs, *stage.graph.params}
        assert set(stage.joins) <= set(stage.graph.outputs)
    _check_routes(graph, partition)
    held = holders(partition)
    assert held.keys() <= {spec.key for spec in graph.params.values()}
    trainable = {spec.key for spec in graph.params.values() if spec.trainable}
    assert {s.key: s.stages for s in partition.shared} == {
        key: stages for key, stages in held.items() if len(stages) > 1 and key in trainable
    }
    for value, key in graph.state_writes.items():
        (holder,) = held[key]
        assert partition.stages[holder].graph.state_writes[value] == key


def joins_in_order(stage: StageGraph) -> list[str]:
    return [name for node in stage.graph.nodes for name in node.outputs if name in stage.joins]


def _returns_gradient(graph: Graph, partition: Partition, value: str, stage: int) -> bool:
    """Whether a use of the value in the stage leads over differentiable operators to an output of the graph: behind a
    detached value none does."""
    readers = consumers(graph)
    trained = needing_gradient(graph)

    @cache
    def flows(name: str) -> bool:
        return name in trained and (
            name in graph.outputs.values() or any(leads(reader) for reader in readers.get(name, ()))
        )

    def leads(node: Node) -> bool:
        return OPERATORS[node.op].differentiable and any(flows(output) for output in node.outputs)

    held = {node.id for node in partition.stages[stage].graph.nodes}
    return value in trained and any(leads(reader) for reader in readers.get(value, ()) if reader.id in held)


def _check_routes(graph: Graph, partition: Partition) -> None:
    routes = {route.value: route for route in partition.routes}
    assert len(routes) == len(partition.routes)
    consumed = [
        (stage.stage, value) for stage in partition.stages for value in stage.graph.inputs if value not in stage.aliases
    ]
    assert sorted(consumed) == sorted((c, r.value) for r in partition.routes for c in r.consumers)
    for route in partition.routes:
        assert route.value not in graph.params
        assert graph.values[route.value].dtype != "symint"
        assert route.consumers == tuple(sorted(set(route.consumers)))
        assert route.producer < route.consumers[0]
        assert (route.producer == FEED) == (route.value in graph.inputs)
        if route.producer != FEED:
            assert partition.stages[route.producer].graph.outputs[route.value] == route.value
        returns = [_returns_gradient(graph, partition, route.value, consumer) for consumer in route.consumers]
        assert [route.value in partition.stages[one].grad_inputs for one in route.consumers] == returns
        assert any(returns) == route.needs_grad


@settings(deadline=None, derandomize=True, max_examples=examples(100))
@given(graphs())
def test_json_round_trip(graph: Graph) -> None:
    data = encode(graph)
    assert decode(data) == graph
    assert parse(data) == graph
    assert encode(parse(data)) == data
