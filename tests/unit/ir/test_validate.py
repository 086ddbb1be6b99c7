"""What a peer may be sent: legal graphs pass, hostile ones are refused before anything is computed or allocated."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from fusionai.ir.schema import FloatArg, Graph, InitOp, ListArg, Ref, ValueSpec, encode
from fusionai.ir.validate import GraphLimits, parse, validate
from fusionai.primitives.errors import GraphError

replace = msgspec.structs.replace


def edited(graph: Graph, edit: Callable[[Any], None]) -> bytes:
    document = json.loads(encode(graph))
    edit(document)
    return json.dumps(document).encode()


def refuse(graph: Graph, edit: Callable[[Any], None], match: str) -> None:
    with pytest.raises(GraphError, match=match):
        parse(edited(graph, edit))


def test_a_legal_graph_comes_back(model: Graph) -> None:
    assert parse(encode(model)) == model
    assert parse(memoryview(encode(model))) == model
    assert validate(model) is model


# --- the vocabulary


@pytest.mark.parametrize(
    "op",
    [
        "aten.from_file.default",
        "aten.view.default",
        "aten.rand.default",
        "aten.copy_.default",
        "aten.set_.source_Storage",
        "os.system",
        "",
        "x" * 10_000,
    ],
)
def test_operators_not_on_the_list(model: Graph, op: str) -> None:
    refuse(model, lambda d: d["nodes"][0].update(op=op), "is not allowed")


def test_only_frozen_weights_that_a_form_takes_are_kept_in_it(model: Graph) -> None:
    value, spec = next((value, spec) for value, spec in model.params.items() if spec.kind == "parameter")
    odd = msgspec.structs.replace(spec, stored="int4")
    with pytest.raises(GraphError, match="can't be kept as int4"):
        validate(replace(model, params={**model.params, value: odd}))


def test_versions(model: Graph) -> None:
    refuse(model, lambda d: d.update(ir=0), "IR version 0")
    refuse(model, lambda d: d.update(ir=3, brand_new_field=1), "IR version 3")
    refuse(model, lambda d: d.pop("ir"), "not a graph")
    with pytest.raises(GraphError, match="version 3"):
        validate(replace(model, ir=3))


# --- the JSON itself


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"ir": 2',
        b'{"ir": "1"}',
        b'{"ir": 2, "nodes": {}}',
        b'{"ir": 2, "unknown": 1}',
        b'{"ir": 2, "symbols": {"b": [1]}}',
        b'{"ir": 2, "symbols": {"b": [1, 1e400]}}',
        b'{"ir": 2, "symbols": {"b": [NaN, 1]}}',
        b'{"ir": 2, "inputs": "abc"}',
        b'{"ir": 2, "name": "\\ud800"}',
        b'{"ir": ' + b"9" * 5000 + b"}",
    ],
)
def test_not_a_graph(data: bytes) -> None:
    with pytest.raises(GraphError):
        parse(data)


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}"), (b'{"t":"list","items":[', b"]}")])
def test_deep_nesting(opening: bytes, closing: bytes) -> None:
    for depth in (40, 100_000):
        data = b'{"ir": 2, "nodes": ' + opening * depth + b"1" + closing * depth + b"}"
        with pytest.raises(GraphError, match="nests"):
            parse(data)
        with pytest.raises(GraphError, match="nests"):
            parse(b'{"ir": 2, "nodes": ' + opening * depth)


def test_brackets_in_strings_do_not_nest(model: Graph) -> None:
    name = '[{"\\' * 60
    assert parse(encode(replace(model, name=name))).name == name


def test_huge_json() -> None:
    with pytest.raises(GraphError, match="above the limit"):
        parse(b'{"ir": 2, "name": "' + b"x" * 2**20 + b'"}', GraphLimits(json_bytes=2**20))


def test_lists_of_the_grammar_nest_little(model: Graph) -> None:
    deep: Any = ListArg((1,))
    for _ in range(5):
        deep = ListArg((deep,))
    node = replace(model.nodes[0], kwargs={"x": deep})
    with pytest.raises(GraphError, match="too deep"):
        validate(replace(model, nodes=(node, *model.nodes[1:])))


def test_recursion_is_an_ordinary_refusal(model: Graph) -> None:
    deep: Any = ListArg((1,))
    for _ in range(100_000):
        deep = ListArg((deep,))
    node = replace(model.nodes[0], args=(deep,))
    with pytest.raises(GraphError):
        validate(replace(model, nodes=(node, *model.nodes[1:])))
    # Take it apart by hand: freeing it recursively would overflow the interpreter's stack.
    while isinstance(deep, ListArg):
        deep = deep.items[0]


# --- the data flow


def test_cycle(model: Graph) -> None:
    first, last = model.nodes[2], model.nodes[-1]
    cyclic = replace(first, args=(Ref(last.outputs[0]),))
    nodes = tuple(cyclic if node.id == first.id else node for node in model.nodes)
    with pytest.raises(GraphError, match="nothing before it makes"):
        validate(replace(model, nodes=nodes))


def test_self_reference(model: Graph) -> None:
    node = model.nodes[2]
    nodes = (*model.nodes[:2], replace(node, args=(Ref(node.outputs[0]),)), *model.nodes[3:])
    with pytest.raises(GraphError, match="nothing before it makes"):
        validate(replace(model, nodes=nodes))


def test_dangling_reference(model: Graph) -> None:
    refuse(model, lambda d: d["nodes"][1]["args"][0].update(name="ghost"), "ghost")


def test_two_producers(model: Graph) -> None:
    refuse(model, lambda d: d["nodes"][2].update(outputs=["v1"]), "two producers")
    refuse(model, lambda d: d["nodes"][1].update(outputs=["input_ids"]), "two producers|must not be")
    refuse(model, lambda d: d["inputs"].append("input_ids"), "two producers")
    refuse(model, lambda d: d["inputs"].append("p_embed_weight"), "two producers")


def test_no_producer(model: Graph) -> None:
    values = {**model.values, "orphan": ValueSpec((1,), "float32")}
    with pytest.raises(GraphError, match="'orphan' has no producer"):
        validate(replace(model, values=values))


def test_undeclared_result(model: Graph) -> None:
    refuse(model, lambda d: d["values"].pop("v3"), "not declared")


def test_number_of_results(model: Graph) -> None:
    refuse(model, lambda d: d["nodes"][1].update(outputs=[]), "must list 1 results")


def test_duplicate_and_negative_ids(model: Graph) -> None:
    refuse(model, lambda d: d["nodes"][1].update(id=0), "unique node ids")
    refuse(model, lambda d: d["nodes"][1].update(id=-1), "unique node ids")


def test_outputs_must_be_made(model: Graph) -> None:
    refuse(model, lambda d: d["outputs"].update(loss="ghost"), "some node makes")
    refuse(model, lambda d: d["outputs"].update(loss="input_ids"), "some node makes")
    refuse(model, lambda d: d["outputs"].update(loss="p_embed_weight"), "some node makes")
    symint = next(name for name, spec in model.values.items() if spec.dtype == "symint")
    refuse(model, lambda d: d["outputs"].update(loss=symint), "some node makes")


# --- sizes


@pytest.mark.parametrize(
    "dim", ["__import__('os')", "b.__class__", "exec('1')", "b" * 1000, "(" * 100, "s//(b-1)", "unknown"]
)
def test_code_in_dimensions(model: Graph, dim: str) -> None:
    refuse(model, lambda d: d["values"]["v3"].update(shape=[dim, 8]), "dimension expression")


def test_bad_sizes(model: Graph) -> None:
    refuse(model, lambda d: d["values"]["v3"].update(shape=[-1]), "negative size")
    refuse(model, lambda d: d["values"]["v3"].update(shape=["b-100"]), "negative size")
    refuse(model, lambda d: d["values"]["v3"].update(shape=[1] * 17), "rank 17")
    refuse(model, lambda d: d["values"]["v3"].update(dtype="object"), "expected a dtype")
    refuse(model, lambda d: d["values"]["v3"].update(shape=[1.5]), "not a graph")
    refuse(model, lambda d: d["values"]["v3"].update(shape=[True]), "not a graph")


def test_declared_memory_bomb(model: Graph) -> None:
    refuse(model, lambda d: d["values"]["v3"].update(shape=[2**20, 2**20, 8]), "may take")
    refuse(model, lambda d: d["values"]["v3"].update(shape=["b*s*2147483648", 2**20]), "may take")
    refuse(model, lambda d: d["symbols"].update(b=[1, 2**31], s=[1, 2**31]), "may take")


def test_symbols(model: Graph) -> None:
    for wrong in ([0, 4], [5, 4], [-3, -1], [1, 2**40]):
        refuse(model, lambda d, wrong=wrong: d["symbols"].update(b=wrong), "smallest")
    for name in ("1b", "b c", "min", "", "ß"):
        refuse(model, lambda d, name=name: d["symbols"].update({name: [1, 2]}), "expected a symbol")


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("aten.full.default", (ListArg((2**30, 2**30)), 0)),
        ("aten.zeros.default", (ListArg((2**62,)),)),
        ("aten.expand.default", ("x", ListArg((2**40, -1)))),
        ("aten.repeat.default", ("x", ListArg((2**30, 2**20)))),
        ("aten.repeat_interleave.self_int", ("x", 2**50)),
        ("aten.arange.default", (2**50,)),
        ("aten.arange.start", (-(2**50), 0)),
        ("aten.arange.start_step", (0, 1.0, 1e-300)),
        ("aten.arange.start_step", (0, 1, 0)),
        ("aten.arange.start_step", (0.0, 1e308, 5e-324)),
        ("aten.one_hot.default", ("i", 2**50)),
        ("aten.one_hot.default", ("i", -1)),
        ("aten.constant_pad_nd.default", ("x", ListArg((0, 2**60)))),
        ("aten.conv2d.default", ("image", "kernel", None, 1, 2**40)),
        ("aten.conv_transpose2d.input", ("image", "kernel", None, 2**40)),
        ("aten.adaptive_avg_pool2d.default", ("image", ListArg((2**30, 2**30)))),
        ("aten.max_pool2d.default", ("image", 3, 1, 2**40)),
    ],
)
def test_memory_bombs_by_arguments(make: Callable[..., Any], op: str, args: tuple[Any, ...]) -> None:
    """The declared result is tiny; the arguments say otherwise."""
    g = make()
    g.input("x", (4, 4), "float32")
    g.input("i", (4,))
    g.input("image", (1, 3, 8, 8), "float32")
    g.param("kernel", (3, 3, 3, 3))
    g.params["kernel"] = g.params.pop("p_kernel")
    g.values["kernel"] = g.values.pop("p_kernel")
    g.outputs["y"] = g.node(op, *args, shape=(1,))
    with pytest.raises(GraphError, match=r"may take|step|number of classes|exceeds the limits"):
        validate(g.graph())


def test_memory_bombs_by_operands(make: Callable[..., Any]) -> None:
    column, row = (2**22, 1), (1, 2**22)
    for op in ("aten.add.Tensor", "aten.matmul.default", "aten.mm.default", "aten.where.self"):
        g = make()
        a, b = g.input("a", column, "float32"), g.input("b", row, "float32")
        g.outputs["y"] = g.node(op, a, b, *([b] if op == "aten.where.self" else []), shape=(1,))
        with pytest.raises(GraphError, match="may take"):
            validate(g.graph())


def test_memory_bomb_by_doubling(make: Callable[..., Any]) -> None:
    """A chain of concatenations, each declared too small: the bound follows declarations only as far as they are true
    of one step, so the lie shows at the first step that exceeds the limit by itself."""
    g = make()
    x = g.input("x", (2**38,), "float32")
    parts = ListArg((Ref(x), Ref(x), Ref(x), Ref(x), Ref(x)))
    g.outputs["y"] = g.node("aten.cat.default", parts, shape=(1,))
    with pytest.raises(GraphError, match="may take"):
        validate(g.graph())


def test_memory_bomb_by_symbolic_sizes(make: Callable[..., Any]) -> None:
    g = make(b=(1, 2**20))
    x = g.input("x", ("b",), "float32")
    size = g.size(x, 0)
    square = g.node("sym.mul", size, size, dtype="symint")
    cube = g.node("sym.mul", square, size, dtype="symint")
    g.outputs["y"] = g.node("aten.zeros.default", ListArg((Ref(cube),)), shape=("b",))
    with pytest.raises(GraphError, match="may take"):
        validate(g.graph())


def test_integers_never_explode(make: Callable[..., Any]) -> None:
    g = make(b=(1, 2**20))
    size = g.size(g.input("x", ("b",), "float32"), 0)
    for _ in range(10):
        size = g.node("sym.mul", size, size, dtype="symint")
    with pytest.raises(GraphError, match="64 bits"):
        validate(g.graph())


def test_division_by_zero_size(make: Callable[..., Any]) -> None:
    g = make(b=(1, 8))
    size = g.size(g.input("x", ("b",), "float32"), 0)
    less = g.node("sym.sub", size, 1, dtype="symint")
    g.node("sym.floordiv", size, less, dtype="symint")
    with pytest.raises(GraphError, match="divide"):
        validate(g.graph())


def test_a_size_is_read_off_a_tensor(make: Callable[..., Any]) -> None:
    for args in (("x", 2), ("x", -3), ("x", True), ("x",), (3, 0)):
        g = make()
        g.input("x", ("b", "s"), "float32")
        g.node("aten.sym_size.int", *args, dtype="symint")
        with pytest.raises(GraphError, match="one of its dimensions"):
            validate(g.graph())


# --- arguments


@pytest.mark.parametrize("arg", [math.nan, math.inf, -math.inf])
def test_floats_are_finite_or_spelt(make: Callable[..., Any], arg: float) -> None:
    g = make()
    x = g.input("x", (1,), "float32")
    g.node("aten.add.Scalar", x, arg, shape=(1,))
    with pytest.raises(GraphError, match="float argument"):
        validate(g.graph())
    g = make()
    g.node("aten.add.Scalar", g.input("x", (1,), "float32"), FloatArg("inf"), shape=(1,))
    validate(g.graph())


def test_strings_are_a_closed_set(make: Callable[..., Any]) -> None:
    g = make()
    g.node("aten.gelu.default", g.input("x", (1,), "float32"), approximate="/etc/passwd", shape=(1,))
    with pytest.raises(GraphError, match="not an allowed string"):
        validate(g.graph())


def test_argument_shapes(model: Graph) -> None:
    refuse(model, lambda d: d["nodes"][0].update(args=[{"t": "pickle", "name": "x"}]), "not a graph")
    refuse(model, lambda d: d["nodes"][0].update(args=[{"t": "v", "name": "position_ids", "x": 1}]), "not a graph")
    refuse(model, lambda d: d["nodes"][0].update(args=[[1, 2]]), "not a graph")
    refuse(model, lambda d: d["nodes"][0]["args"].append(2**70), "64 bits|not a graph")
    refuse(model, lambda d: d["nodes"][0]["args"].append({"t": "dtype", "name": "object"}), "unknown dtype")
    refuse(model, lambda d: d["nodes"][0].update(args=[1] * 100), "arguments")
    refuse(model, lambda d: d["nodes"][0].update(kwargs={"\n": 1}), "argument name")
    refuse(model, lambda d: d["nodes"][0].update(block=-1), "block")
    refuse(model, lambda d: d["nodes"][0].update(path="a" * 1000), "module path")


@pytest.mark.parametrize(
    ("kwargs", "legal"),
    [
        ({"scale": 0.5, "causal": True, "window": 16, "softcap": 30.0, "dropout": 0.1}, True),
        ({"scale": 1, "causal": False, "window": None, "softcap": None, "dropout": 0.0, "sinks": None}, True),
        ({"key_mask": "mask"}, True),
        ({"window": 0}, False),
        ({"window": True}, False),
        ({"softcap": -1.0}, False),
        ({"dropout": 1.0}, False),
        ({"dropout": "none"}, False),
        ({"causal": 1}, False),
        ({"scale": None}, False),
        ({"sinks": 3}, False),
        ({"backend": "none"}, False),
    ],
)
def test_attention_arguments(make: Callable[..., Any], kwargs: dict[str, Any], legal: bool) -> None:
    g = make()
    q = g.input("q", ("b", 2, "s", 4), "float32")
    g.input("mask", ("b", "s"), "bool")
    g.node("fusion.attention", q, q, q, shape=("b", 2, "s", 4), **kwargs)
    if legal:
        validate(g.graph())
    else:
        with pytest.raises(GraphError, match="unknown or has a value"):
            validate(g.graph())


def test_attention_takes_three_tensors(make: Callable[..., Any]) -> None:
    g = make()
    q = g.input("q", ("b", 2, "s", 4), "float32")
    g.node("fusion.attention", q, q, shape=("b", 2, "s", 4))
    with pytest.raises(GraphError, match="3 tensors"):
        validate(g.graph())


# --- parameters and state


def _param(document: Any) -> Any:
    return document["params"]["p_embed_weight"]


def test_parameters(model: Graph) -> None:
    refuse(model, lambda d: _param(d).update(shape=[2, 2]), "disagree")
    refuse(model, lambda d: _param(d).update(dtype="float16"), "disagree")
    refuse(model, lambda d: d["values"].pop("p_embed_weight"), "disagree")
    refuse(model, lambda d: _param(d).update(kind="weird"), "not a graph")
    refuse(model, lambda d: _param(d).update(kind="buffer"), "can't be trainable")
    refuse(model, lambda d: _param(d).update(order=-1), "order")
    refuse(model, lambda d: _param(d).update(aliases=["layers.0.norm.weight"]), "twice")
    refuse(model, lambda d: _param(d).update(aliases=["embed.weight"]), "twice")
    refuse(model, lambda d: _param(d).update(aliases=[str(i) for i in range(100)]), "aliases")


@pytest.mark.parametrize("key", ["", "../../etc/passwd", "a/b", "a\\b", ".hidden", "a..b", "a\x00b", "k" * 1000])
def test_keys_are_no_paths(model: Graph, key: str) -> None:
    refuse(model, lambda d: _param(d).update(key=key), "parameter key")


@pytest.mark.parametrize(
    "init",
    [
        [],
        [{"op": "mul", "args": [2.0]}],
        [{"op": "normal", "args": [0.0]}],
        [{"op": "normal", "args": [0.0, -1.0]}],
        [{"op": "uniform", "args": [1.0, 0.0]}],
        [{"op": "fill", "args": [0.0]}, {"op": "fill_row", "args": [99, 0.0]}],
        [{"op": "fill", "args": [0.0]}, {"op": "fill_row", "args": [0.5, 0.0]}],
        [{"op": "fill", "args": [0.0]}] * 20,
    ],
)
def test_initialisation_grammar(model: Graph, init: list[Any]) -> None:
    refuse(model, lambda d: _param(d).update(init=init), "initialisation")


def test_initialisation_is_finite(model: Graph) -> None:
    spec = replace(model.params["p_embed_weight"], init=(InitOp("fill", (math.nan,)),))
    with pytest.raises(GraphError, match="finite"):
        validate(replace(model, params={**model.params, "p_embed_weight": spec}))
    refuse(model, lambda d: _param(d).update(init=[{"op": "exec", "args": []}]), "not a graph")


def test_parameter_and_constant_bytes(model: Graph) -> None:
    with pytest.raises(GraphError, match="parameters take"):
        validate(model, GraphLimits(parameter_bytes=100))
    spec = replace(model.params["p_rotary_inv_freq"], kind="constant")
    constant = replace(model, params={**model.params, "p_rotary_inv_freq": spec})
    validate(constant)
    with pytest.raises(GraphError, match="constants take 32 bytes"):
        validate(constant, GraphLimits(constant_bytes=31))


def test_state_writes(make: Callable[..., Any]) -> None:
    def counter(key: str = "count", kind: str = "buffer", shape: tuple[int, ...] = ()) -> Graph:
        g = make()
        count = g.param("count", shape, kind=kind, frozen=True)
        more = g.node("aten.add.Scalar", count, 1.0)
        g.state_writes = {more: key}
        return g.graph()

    validate(counter())
    for wrong in (counter(key="ghost"), counter(kind="parameter"), counter(shape=(2,))):
        with pytest.raises(GraphError, match="state write"):
            validate(wrong)
    good = counter()
    with pytest.raises(GraphError, match="state write"):
        validate(replace(good, state_writes={"p_count": "count"}))


@pytest.mark.parametrize(
    "limits",
    [
        GraphLimits(nodes=3),
        GraphLimits(values=3),
        GraphLimits(params=3),
        GraphLimits(symbols=1),
        GraphLimits(interface=1),
        GraphLimits(value_bytes=64),
        GraphLimits(rank=2),
    ],
)
def test_every_limit_holds(model: Graph, limits: GraphLimits) -> None:
    with pytest.raises(GraphError):
        validate(model, limits)


@pytest.mark.slow
def test_validation_is_linear(transformer_of: Callable[[int], Graph]) -> None:
    """Ten thousand nodes are checked in seconds, so that a graph within the limits can't stall a peer."""
    graph = transformer_of(1250)
    assert len(graph.nodes) > 8_000
    start_s = time.perf_counter()
    parse(encode(graph))
    assert time.perf_counter() - start_s < 10


def test_limits_follow_from_what_a_machine_lends():
    usual, small = GraphLimits.for_memory(2**50), GraphLimits.for_memory(2**28)
    assert usual == GraphLimits()
    assert (small.json_bytes, small.constant_bytes) == (2**23, 2**28)
    assert small.value_bytes == small.parameter_bytes == 2**34
    assert GraphLimits.for_memory(0).json_bytes == 2**20, "a graph of ordinary size can be read before it is refused"
