"""One suite for every backend: what `backends.interface` promises. Numbers only where the backend computes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import msgspec
import numpy as np
import pytest

from fusionai.backends.interface import Backend, Call, Speeds, StageProgram
from fusionai.backends.registry import TRAINING, open_backend
from fusionai.backends.semantics import DropoutKey, folds
from fusionai.backends.tolerance import numbers
from fusionai.backends.worker.client import WorkerBackend, WorkerOptions
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Graph, InitOp, Node, ParamSpec, Ref, ValueSpec
from fusionai.ir.validate import validate
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import ITEMSIZE_BYTES, HostTensor, host_tensor
from fusionai.wire.messages import OptimizerSpec, Saving, StageOptions

WIDTH, ROWS = 8, 5
OPTIONS = StageOptions(seed=7, optimizer=OptimizerSpec(weight_decay=0.1), microbatches=2, in_flight=2)


@pytest.fixture(scope="module")
def worker() -> Iterator[Backend]:
    """One confined process for the whole suite, as a daemon has."""
    backend = WorkerBackend(WorkerOptions(backend="torch", device="cpu", threads=1))
    yield backend
    backend.close()


@pytest.fixture(
    params=[
        "torch",
        pytest.param("worker", marks=pytest.mark.slow),
        pytest.param("jax", marks=pytest.mark.slow),
        "null",
    ]
)
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "worker":
        return request.getfixturevalue("worker")
    if request.param == "torch":
        from fusionai.backends.torch.backend import TorchBackend

        return TorchBackend("cpu", threads=1)
    if request.param == "jax":
        pytest.importorskip("jax", reason="the extra fusionai[jax] is not installed")
        from fusionai.backends.jax.backend import JaxBackend

        return JaxBackend("cpu")
    from harness.null_backend import NullBackend

    return NullBackend()


def stage() -> Graph:
    """A middle stage: boundary `x` and job input `ids` in, boundary `y` and job output `total` out."""
    params = {
        "p_table": ParamSpec(
            key="table.weight",
            kind="parameter",
            shape=(ROWS, WIDTH),
            dtype="float32",
            trainable=True,
            order=0,
            init=(InitOp(op="normal", args=(0.0, 1.0)),),
        ),
        "p_linear": ParamSpec(
            key="linear.weight",
            kind="parameter",
            shape=(WIDTH, WIDTH),
            dtype="float32",
            trainable=True,
            order=1,
            init=(InitOp(op="uniform", args=(-1.0, 1.0)),),
        ),
        "p_shift": ParamSpec(key="shift", kind="buffer", shape=(WIDTH,), dtype="float32"),
    }
    hidden = ValueSpec(("b", "s", WIDTH), "float32")
    return validate(
        Graph(
            name="stage",
            symbols={"b": (1, 4), "s": (2, 16)},
            inputs=("x", "ids"),
            outputs={"y": "y", "total": "total", "looked_up": "looked_up"},
            values={
                "x": hidden,
                "ids": ValueSpec(("b", "s"), "int64"),
                "looked_up": hidden,
                "mixed": hidden,
                "shifted": hidden,
                "y": hidden,
                "total": ValueSpec((), "float32"),
                **{name: ValueSpec(spec.shape, spec.dtype) for name, spec in params.items()},
            },
            params=params,
            nodes=(
                Node(id=3, op="aten.embedding.default", args=(Ref("p_table"), Ref("ids")), outputs=("looked_up",)),
                Node(id=4, op="aten.add.Tensor", args=(Ref("x"), Ref("looked_up")), outputs=("mixed",)),
                Node(id=5, op="aten.add.Tensor", args=(Ref("mixed"), Ref("p_shift")), outputs=("shifted",)),
                Node(id=6, op="aten.linear.default", args=(Ref("shifted"), Ref("p_linear")), outputs=("y",)),
                Node(id=7, op="aten.sum.default", args=(Ref("y"),), outputs=("total",)),
            ),
        )
    )


def host(array: np.ndarray) -> HostTensor:
    return host_tensor(str(array.dtype), array.shape, bytearray(array.tobytes()))


def array_of(tensor: HostTensor) -> np.ndarray:
    return np.frombuffer(tensor.data, dtype=tensor.dtype).reshape(tensor.shape)


def inputs(batch: int = 2, length: int = 3, seed: int = 0) -> dict[str, HostTensor]:
    rng = np.random.default_rng(seed)
    return {
        "x": host(rng.standard_normal((batch, length, WIDTH), dtype=np.float32)),
        "ids": host(rng.integers(0, ROWS, (batch, length))),
    }


def output_gradient(batch: int = 2, length: int = 3) -> dict[str, HostTensor]:
    return {"y": host(np.full((batch, length, WIDTH), 0.5, dtype=np.float32))}


def load(backend: Backend, options: StageOptions = OPTIONS, limit_bytes: int | None = None) -> StageProgram:
    return backend.load(stage(), grad_inputs=("x",), options=options, memory_limit_bytes=limit_bytes)


@pytest.fixture
def program(backend: Backend) -> StageProgram:
    loaded = load(backend)
    assert loaded.initialise() == ("model/shift",)
    loaded.import_state([("model/shift", host(np.ones(WIDTH, dtype=np.float32)))])
    return loaded


def train(program: StageProgram, step: int = 0, microbatch: int = 0) -> dict[str, HostTensor]:
    call = Call("train", step, microbatch)
    program.forward(call, inputs(seed=microbatch))
    return program.backward(call, output_gradient())


def state(program: StageProgram) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    exported = program.export_state(["model", "optimizer"])
    return {name: (tensor.dtype, tensor.shape, bytes(tensor.data)) for name, tensor in exported}


def test_a_backend_says_how_it_saves_memory_and_refuses_what_it_can_not(backend: Backend) -> None:
    report = backend.probe(Speeds(flops_per_s=1e9, memory_bandwidth_bytes_per_s=1e9))
    for saving in get_args(Saving):
        options = msgspec.structs.replace(OPTIONS, **{"recompute": True, saving: True})
        if saving in report.savings:
            load(backend, options)
        else:
            with pytest.raises(ExecutionError, match=r"machines with backend torch|can't be offloaded"):
                load(backend, options)


# ------------------------------------------------------------------------------------------------------------ forward


@pytest.mark.parametrize("mode", ["train", "eval", "infer"])
def test_outputs_have_the_declared_shapes_at_the_fed_sizes(program: StageProgram, mode: str) -> None:
    for batch, length in ((1, 2), (4, 16)):
        outputs = program.forward(Call(mode, 0, batch), inputs(batch, length))
        assert outputs["y"].shape == (batch, length, WIDTH)
        assert outputs["y"].dtype == "float32"
        assert outputs["total"].shape == ()
        assert set(outputs) == {"y", "total", "looked_up"}


def test_only_wanted_outputs_come_back(program: StageProgram) -> None:
    assert set(program.forward(Call("eval", 0, 0), inputs(), ["y"])) == {"y"}
    assert program.forward(Call("eval", 0, 0), inputs(), []) == {}


def test_only_what_the_wanted_outputs_need_must_be_fed(program: StageProgram) -> None:
    fed = _without("x")
    assert program.forward(Call("eval", 0, 0), fed, ["looked_up"])["looked_up"].shape == (2, 3, WIDTH)
    with pytest.raises(ExecutionError, match="expected input 'x'"):
        program.forward(Call("eval", 0, 0), fed, ["looked_up", "y"])


def test_an_unknown_output_is_refused_with_the_nearest_name(program: StageProgram) -> None:
    with pytest.raises(ExecutionError, match="did you mean 'total'"):
        program.forward(Call("eval", 0, 0), inputs(), ["totl"])


def _without(name: str) -> dict[str, HostTensor]:
    return {key: tensor for key, tensor in inputs().items() if key != name}


@pytest.mark.parametrize(
    ("fed", "message"),
    [
        (_without("x"), "expected input 'x'"),
        ({**inputs(), "y": inputs()["x"]}, "no input 'y'"),
        ({**inputs(), "ids": host(np.zeros((2, 3), dtype=np.int32))}, "'ids' as int64, got int32"),
        ({**inputs(), "x": host(np.zeros((2, WIDTH), dtype=np.float32))}, "'x' of shape"),
        ({**inputs(), "x": host(np.zeros((2, 3, WIDTH + 1), dtype=np.float32))}, "size 9 where 8"),
        ({**inputs(), "x": host(np.zeros((3, 3, WIDTH), dtype=np.float32))}, "'b' is 3 elsewhere"),
        (inputs(5, 3), "'b' must be from 1 to 4"),
        (inputs(2, 1), "'s' must be from 2 to 16"),
    ],
)
def test_inputs_that_break_the_graph_are_refused(
    program: StageProgram, fed: dict[str, HostTensor], message: str
) -> None:
    with pytest.raises(ExecutionError, match=message):
        program.forward(Call("train", 0, 0), fed)
    # Nothing of the refused microbatch is left: it can come again.
    program.forward(Call("train", 0, 0), inputs())


def test_bfloat16_boundaries_are_taken_only_in_bf16_precision(backend: Backend) -> None:
    half = {**inputs(), "x": host_tensor("bfloat16", (2, 3, WIDTH), bytearray(2 * 3 * WIDTH * 2))}
    for precision, accepted in (("fp32", False), ("bf16", True)):
        program = load(backend, msgspec.structs.replace(OPTIONS, precision=precision))
        program.initialise()
        program.import_state([("model/shift", host(np.ones(WIDTH, dtype=np.float32)))])
        if accepted:
            assert program.forward(Call("eval", 0, 0), half)["y"].shape == (2, 3, WIDTH)
        else:
            with pytest.raises(ExecutionError, match="got bfloat16"):
                program.forward(Call("eval", 0, 0), half)


# ----------------------------------------------------------------------------------------------------------- backward


def test_gradients_come_back_for_grad_inputs_only(program: StageProgram) -> None:
    returned = train(program)
    assert set(returned) == {"x"}
    assert (returned["x"].dtype, returned["x"].shape) == ("float32", (2, 3, WIDTH))


def test_a_sum_that_was_begun_is_continued(program: StageProgram, backend: Backend) -> None:
    own = np.frombuffer(train(program)["x"].data, np.float32)
    call = Call("train", 0, 1)
    program.forward(call, inputs(seed=0))
    begun = np.linspace(-1, 1, own.size, dtype=np.float32)
    sent = host_tensor("float32", (2, 3, WIDTH), begun.tobytes())
    returned = program.backward(call, output_gradient(), {"x": sent})["x"]
    if backend.name != "null":
        np.testing.assert_allclose(np.frombuffer(returned.data, np.float32), begun + own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("begun", "message"),
    [
        ({"z": output_gradient()["y"]}, "no gradient sum of 'z'"),
        ({"x": host(np.zeros((2, 2, WIDTH), dtype=np.float32))}, "gradient of 'x'"),
    ],
)
def test_sums_that_do_not_fit_are_refused(program: StageProgram, begun: dict[str, HostTensor], message: str) -> None:
    program.forward(Call("train", 0, 0), inputs())
    with pytest.raises(ExecutionError, match=message):
        program.backward(Call("train", 0, 0), output_gradient(), begun)


def test_microbatches_may_be_in_flight_together_and_return_in_any_order(program: StageProgram) -> None:
    calls = [Call("train", 0, microbatch) for microbatch in range(3)]
    for call in calls:
        program.forward(call, inputs(length=2 + call.microbatch))
    for call in reversed(calls):
        returned = program.backward(call, output_gradient(length=2 + call.microbatch))
        assert returned["x"].shape == (2, 2 + call.microbatch, WIDTH)


def test_replicas_of_one_microbatch_are_different_contexts(program: StageProgram) -> None:
    for replica in (0, 1):
        program.forward(Call("train", 0, 0, replica), inputs())
    for replica in (0, 1):
        program.backward(Call("train", 0, 0, replica), output_gradient())


def test_backward_needs_a_forward_of_the_same_call(program: StageProgram) -> None:
    with pytest.raises(ExecutionError, match="no forward context of step 0, replica 0, microbatch 0"):
        program.backward(Call("train", 0, 0), output_gradient())
    train(program)
    with pytest.raises(ExecutionError, match="no forward context"):
        program.backward(Call("train", 0, 0), output_gradient())


@pytest.mark.parametrize("mode", ["eval", "infer"])
def test_other_modes_keep_no_context(program: StageProgram, mode: str) -> None:
    program.forward(Call(mode, 0, 0), inputs())
    with pytest.raises(ExecutionError, match="no forward context"):
        program.backward(Call("train", 0, 0), output_gradient())


def test_a_microbatch_in_flight_is_not_forwarded_again(program: StageProgram) -> None:
    program.forward(Call("train", 0, 0), inputs())
    with pytest.raises(ExecutionError, match="already in flight"):
        program.forward(Call("train", 0, 0), inputs())


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ({"z": output_gradient()["y"]}, "no output 'z'"),
        ({"y": host(np.zeros((2, 2, WIDTH), dtype=np.float32))}, "gradient of 'y'"),
        ({"y": host(np.zeros((2, 3, WIDTH), dtype=np.float64))}, "gradient of 'y'"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(
    program: StageProgram, gradients: dict[str, HostTensor], message: str
) -> None:
    program.forward(Call("train", 0, 0), inputs())
    with pytest.raises(ExecutionError, match=message):
        program.backward(Call("train", 0, 0), gradients)


def test_a_backward_without_gradients_drops_the_context(program: StageProgram) -> None:
    program.forward(Call("train", 0, 0), inputs())
    assert program.backward(Call("train", 0, 0), {}) == {}
    assert program.gradient_norms() == {}
    program.apply(scale=1.0, learning_rate=0.0)


# --------------------------------------------------------------------------------------------------------- the update


def test_norms_are_there_after_a_backward_and_gone_after_an_update(program: StageProgram) -> None:
    assert program.gradient_norms() == {}
    train(program)
    norms = program.gradient_norms()
    assert set(norms) == {"table.weight", "linear.weight"}
    assert all(norm > 0 for norm in norms.values())
    program.apply(scale=1.0, learning_rate=0.1)
    assert program.gradient_norms() == {}
    assert train(program, step=1)


def test_an_update_waits_for_all_microbatches(program: StageProgram) -> None:
    program.forward(Call("train", 0, 0), inputs())
    with pytest.raises(ExecutionError, match="1 microbatches in flight"):
        program.apply(scale=1.0, learning_rate=0.1)


def test_a_stage_without_an_optimizer_can_not_update(backend: Backend) -> None:
    program = load(backend, StageOptions())
    with pytest.raises(ExecutionError, match="without an optimizer"):
        program.apply(scale=1.0, learning_rate=0.1)


def test_gradients_go_out_and_come_in(program: StageProgram) -> None:
    assert program.export_gradients(["linear.weight"]) == []
    train(program)
    exported = program.export_gradients(["linear.weight", "table.weight"])
    assert [key for key, _ in exported] == ["linear.weight", "table.weight"]
    program.discard()
    program.import_gradients(exported[:1], add=False)
    assert set(program.gradient_norms()) == {"linear.weight"}
    program.import_gradients(exported[:1], add=True)
    again = dict(program.export_gradients(["linear.weight"]))["linear.weight"]
    np.testing.assert_array_equal(array_of(again), 2 * array_of(exported[0][1]))


def test_gradients_of_what_is_not_trained_here_are_refused(program: StageProgram) -> None:
    with pytest.raises(ExecutionError, match=r"did you mean 'linear\.weight'"):
        program.export_gradients(["linear.weigh"])
    with pytest.raises(ExecutionError, match="no trainable parameter 'shift'"):
        program.import_gradients([("shift", host(np.ones(WIDTH, dtype=np.float32)))], add=False)
    with pytest.raises(ExecutionError, match=r"expected model/linear.weight"):
        program.import_gradients([("linear.weight", host(np.ones((WIDTH, 1), dtype=np.float32)))], add=False)


def test_discard_drops_contexts_and_sums_and_keeps_state(program: StageProgram) -> None:
    before = state(program)
    train(program)
    program.forward(Call("train", 0, 1), inputs())
    program.discard()
    assert program.gradient_norms() == {}
    assert state(program) == before
    with pytest.raises(ExecutionError, match="no forward context"):
        program.backward(Call("train", 0, 1), output_gradient())
    train(program)


# -------------------------------------------------------------------------------------------------------------- state


def test_state_is_complete_and_in_canonical_order_from_the_start(program: StageProgram) -> None:
    expected = ["model/linear.weight", "model/shift", "model/table.weight"] + [
        f"optimizer/{key}/{slot}"
        for key in ("linear.weight", "table.weight")
        for slot in ("exp_avg", "exp_avg_sq", "step")
    ]
    assert list(state(program)) == expected
    assert [name for name, _ in program.export_state(["model"])] == expected[:3]
    assert [name for name, _ in program.export_state(["optimizer"])] == expected[3:]


def test_state_moves_to_another_program_unchanged(backend: Backend, program: StageProgram) -> None:
    for step in range(2):
        train(program, step)
        program.apply(scale=0.5, learning_rate=0.1)
    other = load(backend)
    other.import_state(program.export_state(["model", "optimizer"]))
    assert state(other) == state(program)


def test_exported_bytes_are_copies(program: StageProgram) -> None:
    exported = list(program.export_state(["model", "optimizer"]))
    before = [bytes(tensor.data) for _, tensor in exported]
    train(program)
    program.apply(scale=1.0, learning_rate=0.5)
    assert [bytes(tensor.data) for _, tensor in exported] == before


def test_imported_bytes_are_copies(program: StageProgram) -> None:
    data = bytearray(np.full(WIDTH, 3.0, dtype=np.float32).tobytes())
    program.import_state([("model/shift", host_tensor("float32", (WIDTH,), data))])
    data[:] = bytes(len(data))
    np.testing.assert_array_equal(array_of(dict(program.export_state(["model"]))["model/shift"]), 3.0)


@pytest.mark.parametrize(
    ("entry", "array", "message"),
    [
        ("model/shft", np.ones(WIDTH, dtype=np.float32), "did you mean 'model/shift'"),
        ("shift", np.ones(WIDTH, dtype=np.float32), "unknown state entry"),
        ("optimizer/shift/exp_avg", np.ones(WIDTH, dtype=np.float32), "unknown state entry"),
        ("optimizer/linear.weight/momentum_buffer", np.ones((WIDTH, WIDTH), dtype=np.float32), "unknown state entry"),
        ("model/shift", np.ones(WIDTH + 1, dtype=np.float32), "expected model/shift"),
        ("model/shift", np.ones(WIDTH, dtype=np.float64), "expected model/shift"),
        ("optimizer/linear.weight/step", np.ones(1, dtype=np.float32), "expected optimizer/linear.weight/step"),
    ],
)
def test_state_that_does_not_fit_is_refused(program: StageProgram, entry: str, array: np.ndarray, message: str) -> None:
    before = state(program)
    with pytest.raises(ExecutionError, match=message):
        program.import_state([(entry, host(array))])
    assert state(program) == before


def test_nothing_runs_or_leaves_before_all_state_is_there(backend: Backend) -> None:
    program = load(backend)
    program.initialise()
    with pytest.raises(ExecutionError, match="model/shift"):
        program.forward(Call("eval", 0, 0), inputs())
    with pytest.raises(ExecutionError, match="model/shift has no value"):
        list(program.export_state(["model"]))


def test_initialising_again_is_the_first_state_again(program: StageProgram) -> None:
    shift = [("model/shift", host(np.ones(WIDTH, dtype=np.float32)))]
    before = state(program)
    train(program)
    program.apply(scale=1.0, learning_rate=0.5)
    program.initialise()
    program.import_state(shift)
    assert state(program) == before


# ---------------------------------------------------------------------------------------------------- loading, device


def test_a_stage_that_does_not_fit_is_refused_at_load(backend: Backend) -> None:
    # Far too little, enough for the parameters only, and ample.
    for limit_bytes in (64, 2_000):
        with pytest.raises(ExecutionError, match="the limit is"):
            load(backend, limit_bytes=limit_bytes)
    load(backend, limit_bytes=10_000_000)


def test_more_microbatches_in_flight_need_more_memory(backend: Backend) -> None:
    def smallest_limit_bytes(in_flight: int) -> int:
        low, high = 0, 1 << 24
        while high - low > 1:
            middle = (low + high) // 2
            try:
                load(backend, msgspec.structs.replace(OPTIONS, in_flight=in_flight), middle)
                high = middle
            except ExecutionError:
                low = middle
        return high

    assert smallest_limit_bytes(1) < smallest_limit_bytes(2) < smallest_limit_bytes(8)


def test_huge_sizes_are_refused_before_they_are_allocated(backend: Backend) -> None:
    graph = msgspec.structs.replace(stage(), symbols={"b": (1, 1 << 20), "s": (2, 1 << 20)})
    with pytest.raises(ExecutionError, match="the limit is"):
        backend.load(graph, grad_inputs=("x",), options=OPTIONS, memory_limit_bytes=1 << 30)


def test_operators_it_lacks_are_named_and_refused(backend: Backend) -> None:
    assert backend.unsupported(["aten.system.default", "aten.add.Tensor", "aten.from_file.default"]) == (
        "aten.from_file.default",
        "aten.system.default",
    )
    assert backend.unsupported(["aten.linear.default", "fusion.attention", "fusion.dropout", "sym.add"]) == ()
    assert set(backend.unsupported(OPERATORS)) <= set(OPERATORS)
    graph = stage()
    evil = msgspec.structs.replace(graph.nodes[1], op="aten.from_file.default")
    nodes = (graph.nodes[0], evil, *graph.nodes[2:])
    with pytest.raises(ExecutionError, match=r"no operator aten\.from_file\.default"):
        backend.load(msgspec.structs.replace(graph, nodes=nodes), grad_inputs=("x",), options=OPTIONS)


@pytest.fixture(
    params=["torch", pytest.param("jax", marks=pytest.mark.slow), pytest.param("onnxruntime", marks=pytest.mark.slow)]
)
def computing(request: pytest.FixtureRequest) -> Backend:
    """Backends that compute, those that only evaluate among them."""
    if request.param != "torch":
        pytest.importorskip(request.param, reason=f"the extra fusionai[{request.param}] is not installed")
    return open_backend(request.param, device="cpu", threads=1)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_random_numbers_are_the_documented_function_of_their_counters(computing: Backend, dtype: str) -> None:
    """By Python's own integers, see `backends.semantics`; in every mode."""
    like = ValueSpec(("b", 3), dtype)
    node = Node(id=11, op="fusion.uniform", args=(Ref("x"),), outputs=("y",))
    graph = validate(
        Graph(name="drawn", symbols={"b": (1, 4)}, inputs=("x",), outputs={"y": "y"}, values={"x": like, "y": like},
              params={}, nodes=(node,))
    )  # fmt: skip
    program = computing.load(graph, grad_inputs=(), options=StageOptions(seed=2**40 + 5, microbatches=2, in_flight=2))
    x = host_tensor(dtype, (2, 3), b"\xff" * 6 * ITEMSIZE_BYTES[dtype])  # no numbers at all
    bits = {"float64": 32, "float32": 24, "float16": 11, "bfloat16": 8}[dtype]
    # Another call of the same program has numbers of its own.
    calls = [Call("eval", 3, 1), Call("eval", 4, 1)]
    for call in [*calls, Call("train", 5, 1)] if computing.name in TRAINING else calls:
        first, second = folds(DropoutKey(2**40 + 5, call.step, 1), 11)
        words = [mixed(mixed(place ^ first) ^ second ^ mixed(0)) for place in range(6)]
        expected = [(word >> (32 - bits)) / 2**bits for word in words]
        assert numbers(program.forward(call, {"x": x})["y"]).reshape(-1).tolist() == expected
        program.discard()


def mixed(x: int) -> int:
    x ^= x >> 16
    x = x * 0x21F0AAAD % 2**32
    x ^= x >> 15
    x = x * 0x735A2D97 % 2**32
    return x ^ (x >> 15)


def test_a_choice_by_mode_is_made_by_the_mode(backend: Backend) -> None:
    if backend.name == "null":
        pytest.skip("it computes nothing")
    value = ValueSpec(("b", 2), "float32")
    node = Node(id=4, op="fusion.in_training", args=(Ref("x"), Ref("z")), outputs=("y",))
    graph = validate(
        Graph(name="chosen", symbols={"b": (1, 4)}, inputs=("x", "z"), outputs={"y": "y"},
              values={"x": value, "z": value, "y": value}, params={}, nodes=(node,))
    )  # fmt: skip
    program = backend.load(graph, grad_inputs=("x", "z"), options=OPTIONS)
    given = {"x": host(np.ones((1, 2), np.float32)), "z": host(np.zeros((1, 2), np.float32))}
    np.testing.assert_array_equal(array_of(program.forward(Call("train", 0, 0), given)["y"]), 1.0)
    gradients = program.backward(Call("train", 0, 0), {"y": given["x"]})
    np.testing.assert_array_equal(array_of(gradients["x"]), 1.0)
    assert "z" not in gradients or not array_of(gradients["z"]).any()
    np.testing.assert_array_equal(array_of(program.forward(Call("eval", 0, 0), given)["y"]), 0.0)


def test_a_grad_input_must_be_an_input(backend: Backend) -> None:
    with pytest.raises(ExecutionError, match="no input 'y'"):
        backend.load(stage(), grad_inputs=("y",), options=OPTIONS)


def test_resident_bytes_count_what_is_held(program: StageProgram) -> None:
    parameters_bytes = 4 * (ROWS * WIDTH + WIDTH * WIDTH + WIDTH)
    held = program.resident_bytes
    assert held >= parameters_bytes
    train(program)
    assert program.resident_bytes >= held + 4 * (ROWS * WIDTH + WIDTH * WIDTH)
    program.discard()
    assert program.resident_bytes == held


def test_clipping_scale(backend: Backend) -> None:
    total, scale = backend.clip_scale([3.0, 4.0], 1.0)
    assert total == pytest.approx(5.0)
    assert scale == pytest.approx(0.2, rel=1e-5)
    assert backend.clip_scale([0.3, 0.4], 1.0)[1] == 1.0
    assert backend.clip_scale([], 1.0) == (0.0, 1.0)


@pytest.mark.slow
def test_a_probe_reports_a_usable_device(backend: Backend) -> None:
    first, second = backend.probe(), backend.probe(Speeds(flops_per_s=1e9, memory_bandwidth_bytes_per_s=1e9))
    assert first.backend == backend.name
    assert first.device == backend.device
    assert min(first.flops_per_s, first.memory_bandwidth_bytes_per_s, first.memory_bytes, first.threads) > 0
    assert first.fingerprint == second.fingerprint != ""


def test_weight_gradients_put_off_give_the_same_sums(backend: Backend) -> None:
    at_once, later = load(backend), load(backend, msgspec.structs.replace(OPTIONS, weight_lag=2))
    for program in (at_once, later):
        program.initialise()
        program.import_state([("model/shift", host(np.arange(WIDTH, dtype=np.float32)))])
    calls = [Call("train", 0, microbatch) for microbatch in range(2)]
    for call in calls:
        returned = []
        for program in (at_once, later):
            program.forward(call, inputs(seed=call.microbatch))
            returned.append(program.backward(call, output_gradient()))
        np.testing.assert_array_equal(array_of(returned[0]["x"]), array_of(returned[1]["x"]))
    for call in calls:
        later.weight_gradients(call)
    assert later.gradient_norms() == at_once.gradient_norms()
    sums = [dict(program.export_gradients(["linear.weight", "table.weight"])) for program in (at_once, later)]
    for key in sums[0]:
        np.testing.assert_array_equal(array_of(sums[0][key]), array_of(sums[1][key]))


def test_activations_made_again_give_the_same_gradients(backend: Backend) -> None:
    kept, again = load(backend), load(backend, msgspec.structs.replace(OPTIONS, recompute=True))
    call = Call("train", 0, 0)
    returned = []
    for program in (kept, again):
        program.initialise()
        program.import_state([("model/shift", host(np.arange(WIDTH, dtype=np.float32)))])
        program.forward(call, inputs())
        returned.append(program.backward(call, output_gradient()))
    np.testing.assert_array_equal(array_of(returned[0]["x"]), array_of(returned[1]["x"]))
    assert again.gradient_norms() == kept.gradient_norms()


def test_nothing_is_reported_while_weight_gradients_are_owed() -> None:
    from fusionai.backends.torch.backend import TorchBackend

    program = load(TorchBackend("cpu", threads=1), msgspec.structs.replace(OPTIONS, weight_lag=1))
    program.initialise()
    program.import_state([("model/shift", host(np.zeros(WIDTH, dtype=np.float32)))])
    call = Call("train", 0, 0)
    program.forward(call, inputs())
    program.backward(call, output_gradient())
    for report in (
        program.gradient_norms,
        lambda: program.export_gradients(["linear.weight"]),
        lambda: program.apply(scale=1.0, learning_rate=0.1),
    ):
        with pytest.raises(ExecutionError, match="weight gradients"):
            report()
    program.discard()
    assert program.gradient_norms() == {}
