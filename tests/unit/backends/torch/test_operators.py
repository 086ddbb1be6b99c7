"""The operator table: everything on the allow-list, nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusionai.backends.interface import Call
from fusionai.backends.torch.operators import CONTEXTUAL, LOOKUPS, PLAIN
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import DTypeArg, FloatArg, ListArg, Ref, ValueSpec
from fusionai.primitives.errors import ExecutionError
from fusionai.wire.messages import OptimizerSpec


def test_the_table_holds_the_allow_list_and_nothing_else(backend):
    table = set(PLAIN) | set(CONTEXTUAL)
    assert table == set(OPERATORS)
    assert backend.unsupported(OPERATORS) == ()
    assert set(LOOKUPS) <= table


def test_names_outside_the_list_resolve_to_nothing(backend):
    names = ["aten.from_file.default", "aten.rand.default", "aten.__class__.default", "sym.__import__", "os.system.x"]
    assert backend.unsupported(names) == tuple(sorted(names))


def run(load, graph, fed, mode: str = "eval"):
    return load(graph, optimizer=OptimizerSpec()).forward(Call(mode, 0, 0), fed)


def test_arguments_of_every_kind_reach_the_operator(kit, load):
    stage = kit.Stage(b=(1, 4), s=(1, 8))
    x = stage.input("x", "b", "s")
    length = stage.node("aten.sym_size.int", x, 1, out={"length": ValueSpec((), "symint")})
    twice = stage.node("sym.mul", length, 2, out={"twice": ValueSpec((), "symint")})
    zeros = stage.node("aten.full.default", ListArg((3, length)), 1.5, shape=(3, "s"))
    places = stage.node(
        "aten.arange.default", twice, out={"places": ValueSpec(("2*s",), "float64")}, dtype=DTypeArg("float64")
    )
    filled = stage.node(
        "aten.masked_fill.Scalar",
        x,
        stage.node("aten.lt.Scalar", x, 0, out={"negative": ValueSpec(("b", "s"), "bool")}),
        FloatArg("-inf"),
        shape=("b", "s"),
    )
    joined = stage.node("aten.cat.default", ListArg((zeros, zeros)), 1, shape=(3, "2*s"))
    pieces = {"left": ValueSpec(("b", "s"), "float32"), "right": ValueSpec(("b", "s"), "float32")}
    both = stage.node("aten.cat.default", ListArg((x, filled)), 1, shape=("b", "2*s"))
    stage.node("aten.split.Tensor", both, length, 1, out=pieces)
    graph = stage.graph(places=places, joined=joined, filled=filled, right=Ref("right"))
    values = np.array([[1.0, -2.0, 3.0]], dtype=np.float32)
    out = {name: kit.array_of(tensor) for name, tensor in run(load, graph, {"x": kit.host(values)}).items()}
    np.testing.assert_array_equal(out["places"], np.arange(6, dtype=np.float64))
    np.testing.assert_array_equal(out["joined"], np.full((3, 6), 1.5))
    np.testing.assert_array_equal(out["filled"], [[1.0, -np.inf, 3.0]])
    np.testing.assert_array_equal(out["right"], out["filled"])


def test_an_output_may_share_memory_with_an_input_or_a_parameter(kit, load):
    stage = kit.Stage(b=(1, 4))
    x = stage.input("x", "b", 2)
    seen = stage.node("aten.reshape.default", stage.param("w", 3, fill=4.0), ListArg((3,)), shape=(3,))
    same = stage.node("aten.alias.default", x, shape=("b", 2))
    program = load(stage.graph(x=same, w=seen), ("x",), optimizer=OptimizerSpec(kind="sgd"))
    values = kit.host(np.ones((1, 2), dtype=np.float32))
    out = program.forward(Call("train", 0, 0), {"x": values})
    np.testing.assert_array_equal(kit.array_of(out["w"]), 4.0)
    returned = program.backward(Call("train", 0, 0), {"x": values, "w": kit.host(np.ones(3, dtype=np.float32))})
    np.testing.assert_array_equal(kit.array_of(returned["x"]), 1.0)
    program.apply(scale=1.0, learning_rate=1.0)
    # What was handed out stays as it was.
    np.testing.assert_array_equal(kit.array_of(out["w"]), 4.0)
    np.testing.assert_array_equal(kit.array_of(dict(program.export_state(["model"]))["model/w"]), 3.0)


def lookup_stage(kit, op: str):
    stage = kit.Stage(n=(1, 8))
    x = stage.input("x", 5, 3)
    if op == "aten.gather.default":
        indices = stage.input("i", 5, 3, dtype="int64")
        return stage.graph(y=stage.node(op, x, 1, indices, shape=(5, 3))), (5, 3), 3
    indices = stage.input("i", "n", dtype="int64")
    if op == "aten.index_select.default":
        return stage.graph(y=stage.node(op, x, 0, indices, shape=("n", 3))), (4,), 5
    return stage.graph(y=stage.node(op, x, ListArg((None, indices)), shape=(5, "n"))), (4,), 3


@pytest.mark.parametrize("op", ["aten.gather.default", "aten.index_select.default", "aten.index.Tensor"])
def test_lookups_check_their_indices_on_every_device(kit, load, op):
    graph, shape, size = lookup_stage(kit, op)
    x = kit.host(np.zeros((5, 3), dtype=np.float32))
    run(load, graph, {"x": x, "i": kit.host(np.full(shape, size - 1))})
    for wrong in (size, -size - 1):
        with pytest.raises(ExecutionError, match=f"got {wrong}"):
            run(load, graph, {"x": x, "i": kit.host(np.full(shape, wrong))})


def test_batch_norm_that_would_write_in_place_is_refused_in_training(kit, load):
    stage = kit.Stage(b=(2, 4))
    x = stage.input("x", "b", 3, 2, 2)
    statistics = [stage.param(key, 3, kind="buffer", fill=float(i)) for i, key in enumerate(("mean", "variance"))]
    y = stage.node("aten.batch_norm.default", x, None, None, *statistics, True, 0.1, 1e-5, False, shape=("b", 3, 2, 2))
    graph = stage.graph(y=y)
    with pytest.raises(ExecutionError, match="in place"):
        load(graph, optimizer=OptimizerSpec())
    values = np.random.default_rng(0).standard_normal((2, 3, 2, 2), dtype=np.float32)
    out = load(graph).forward(Call("eval", 0, 0), {"x": kit.host(values)})
    expected = torch.nn.functional.batch_norm(torch.from_numpy(values), torch.zeros(3), torch.ones(3), eps=1e-5)
    np.testing.assert_array_equal(kit.array_of(out["y"]), expected.numpy())
