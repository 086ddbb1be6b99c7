"""A stage on torch computes the same bits as plain torch in one process, and refuses what it must not run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusionai.backends.interface import Call
from fusionai.ir.schema import ListArg, ValueSpec
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import host_tensor
from fusionai.wire.messages import OptimizerSpec

MICROBATCHES = 3
ADAMW = OptimizerSpec(weight_decay=0.1)
SGD = OptimizerSpec(kind="sgd", momentum=0.9, nesterov=True, weight_decay=0.1)


def batches(kit, steps: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        yield [
            (rng.integers(0, kit.classes, (2, 5)), rng.integers(0, kit.classes, (2, 5))) for _ in range(MICROBATCHES)
        ]


def run_step(kit, backend, stages, step: int, microbatches, learning_rate: float = 1e-2) -> tuple[list[float], float]:
    """One step of a chain of stages (graph parts in order); returns the losses and the total norm."""
    losses = []
    for number, (ids, labels) in enumerate(microbatches):
        values = {"ids": kit.host(ids), "labels": kit.host(labels)}
        call = Call("train", step, number)
        for graph, program in stages:
            values.update(program.forward(call, {name: values[name] for name in graph.inputs}))
        losses.append(float(kit.array_of(values["loss"])))
        gradients = {"loss": kit.host(np.asarray(np.float32(1.0) / np.float32(len(microbatches))))}
        for graph, program in reversed(stages):
            gradients.update(
                program.backward(call, {name: gradients[name] for name in graph.outputs if name in gradients})
            )
    norms = {}
    for _, program in stages:
        norms.update(program.gradient_norms())
    order = ["embed.weight", "up.weight", "up.bias", "down.weight", "head.weight"]
    total, scale = backend.clip_scale([norms[key] for key in order], 0.5)
    for _, program in stages:
        program.apply(scale=scale, learning_rate=learning_rate)
    return losses, total


def plain_optimizer(spec: OptimizerSpec, model: torch.nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": spec.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    if spec.kind == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=spec.momentum, nesterov=spec.nesterov)
    return torch.optim.AdamW(groups, lr=1e-2, betas=spec.betas, eps=spec.eps)


def weights(kit, program) -> dict[str, bytes]:
    return {name: bytes(tensor.data) for name, tensor in program.export_state(["model", "optimizer"])}


@pytest.mark.parametrize("spec", [ADAMW, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("parts", [("whole",), ("first", "second")])
def test_training_equals_plain_torch_bit_for_bit(kit, backend, load, spec, parts):
    model = kit.Mlp()
    stages = []
    for part in parts:
        graph = kit.mlp_graph(part)
        program = load(graph, ("y",) if part == "second" else (), optimizer=spec)
        keys = {param.key for param in graph.params.values()}
        program.import_state(
            (f"model/{key}", kit.host(value.numpy())) for key, value in model.state_dict().items() if key in keys
        )
        stages.append((graph, program))
    optimizer = plain_optimizer(spec, model)
    for step, microbatches in enumerate(batches(kit, 6)):
        expected = []
        for ids, labels in microbatches:
            loss = model(torch.from_numpy(ids), torch.from_numpy(labels))
            (loss / len(microbatches)).backward()
            expected.append(loss.item())
        expected_total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        optimizer.step()
        optimizer.zero_grad()
        losses, total = run_step(kit, backend, stages, step, microbatches)
        assert losses == expected
        assert total == expected_total
    exported = {name: tensor for _, program in stages for name, tensor in program.export_state(["model"])}
    for key, value in model.state_dict().items():
        np.testing.assert_array_equal(kit.array_of(exported[f"model/{key}"]), value.numpy())


@pytest.mark.parametrize("spec", [ADAMW, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("handover", [0, 2])
def test_a_stand_in_continues_with_the_same_bits(kit, backend, load, spec, handover):
    graph = kit.mlp_graph()
    original = load(graph, optimizer=spec, seed=3)
    stand_in = None
    for step, microbatches in enumerate(batches(kit, 5)):
        if step == handover:
            stand_in = load(graph, optimizer=spec, seed=99)
            stand_in.import_state(original.export_state(["model", "optimizer"]))
        run_step(kit, backend, [(graph, original)], step, microbatches)
        if stand_in is not None:
            run_step(kit, backend, [(graph, stand_in)], step, microbatches)
            assert weights(kit, stand_in) == weights(kit, original)


def test_import_takes_a_program_back_in_time(kit, backend, load):
    graph = kit.mlp_graph()
    program = load(graph, optimizer=ADAMW)
    steps = list(batches(kit, 3))
    run_step(kit, backend, [(graph, program)], 0, steps[0])
    kept = list(program.export_state(["model", "optimizer"]))
    run_step(kit, backend, [(graph, program)], 1, steps[1])
    expected = weights(kit, program)
    run_step(kit, backend, [(graph, program)], 2, steps[2])
    program.import_state(kept)
    run_step(kit, backend, [(graph, program)], 1, steps[1])
    assert weights(kit, program) == expected


def test_a_half_imported_optimizer_state_is_refused_at_the_update(kit, load):
    program = load(kit.mlp_graph(), optimizer=ADAMW)
    zeros = kit.host(np.zeros((kit.classes, kit.hidden), dtype=np.float32))
    program.import_state([("optimizer/head.weight/exp_avg", zeros)])
    program.import_gradients([("head.weight", zeros)], add=False)
    with pytest.raises(ExecutionError, match=r"'head\.weight' lacks exp_avg_sq, step"):
        program.apply(scale=1.0, learning_rate=0.1)


def test_parameters_come_from_seed_and_key(kit, load):
    states = [weights(kit, load(kit.mlp_graph(), seed=seed)) for seed in (1, 1, 2)]
    assert states[0] == states[1]
    assert states[0]["model/up.weight"] != states[2]["model/up.weight"]


@pytest.mark.parametrize("offset", [0, 4, 7])
@pytest.mark.parametrize("read_only", [False, True])
def test_where_the_bytes_lie_does_not_change_the_result(kit, load, offset, read_only):
    program = load(kit.mlp_graph("second"), ("y",), optimizer=ADAMW)
    y = np.random.default_rng(0).standard_normal((2, 5, kit.hidden), dtype=np.float32)
    labels = kit.host(np.zeros((2, 5), dtype=np.int64))
    expected = program.forward(Call("eval", 0, 0), {"y": kit.host(y), "labels": labels})
    padded = bytearray(bytes(offset) + y.tobytes())
    view = memoryview(bytes(padded) if read_only else padded)[offset:]
    got = program.forward(Call("eval", 0, 0), {"y": host_tensor("float32", y.shape, view), "labels": labels})
    assert bytes(got["logits"].data) == bytes(expected["logits"].data)


def test_an_output_without_gradient_is_skipped(kit, load):
    stage = kit.Stage(b=(1, 4))
    x = stage.input("x", "b", 3)
    ids = stage.input("ids", "b", dtype="int64")
    doubled = stage.node("aten.mul.Tensor", x, stage.param("w", 3), shape=("b", 3))
    shifted = stage.node("aten.add.Scalar", ids, 1, out={"shifted": ValueSpec(("b",), "int64")})
    program = load(stage.graph(doubled=doubled, shifted=shifted), optimizer=ADAMW)
    fed = {"x": kit.host(np.ones((2, 3), dtype=np.float32)), "ids": kit.host(np.zeros(2, dtype=np.int64))}
    program.forward(Call("train", 0, 0), fed)
    ones = kit.host(np.ones((2, 3), dtype=np.float32))
    assert program.backward(Call("train", 0, 0), {"doubled": ones, "shifted": fed["ids"]}) == {}
    assert program.gradient_norms() == {"w": pytest.approx(np.sqrt(12.0))}


def test_several_outputs_send_gradients_back_at_once(kit, load):
    stage = kit.Stage(b=(1, 4))
    x = stage.input("x", "b", 3)
    product = stage.node("aten.mul.Tensor", x, stage.param("w", 3, fill=2.0), shape=("b", 3))
    square = stage.node("aten.square.default", product, shape=("b", 3))
    program = load(stage.graph(product=product, square=square), ("x",), optimizer=ADAMW)
    fed = {"x": kit.host(np.full((2, 3), 3.0, dtype=np.float32))}
    program.forward(Call("train", 0, 0), fed)
    ones = kit.host(np.ones((2, 3), dtype=np.float32))
    # d(product + square)/dx = w + 2 w^2 x = 2 + 24; d/dw = x + 2 w x^2 = 3 + 36, over two rows.
    returned = program.backward(Call("train", 0, 0), {"product": ones, "square": ones})
    np.testing.assert_array_equal(kit.array_of(returned["x"]), 26.0)
    np.testing.assert_array_equal(kit.array_of(program.export_gradients(["w"])[0][1]), 78.0)


# ------------------------------------------------------------------------------------------------------ buffers written


def batch_norm(kit):
    stage = kit.Stage(b=(2, 8))
    x = stage.input("x", "b", 3, 4, 4)
    weight, bias = stage.param("bn.weight", 3, fill=1.0), stage.param("bn.bias", 3, fill=0.0)
    mean = stage.param("bn.running_mean", 3, kind="buffer", fill=0.0)
    variance = stage.param("bn.running_var", 3, kind="buffer", fill=1.0)
    count = stage.param("bn.num_batches_tracked", kind="buffer", dtype="int64", fill=0.0)
    per_channel = ValueSpec((3,), "float32")
    y = stage.node(
        "aten._native_batch_norm_legit_functional.default",
        x, weight, bias, mean, variance, True, 0.1, 1e-5,
        out={
            "y": ValueSpec(("b", 3, 4, 4), "float32"),
            "saved_mean": per_channel, "saved_deviation": per_channel,
            "new_mean": per_channel, "new_variance": per_channel,
        },
    )  # fmt: skip
    stage.node("aten.add.Scalar", count, 1, out={"new_count": ValueSpec((), "int64")})
    stage.state_writes = {
        "new_mean": "bn.running_mean",
        "new_variance": "bn.running_var",
        "new_count": "bn.num_batches_tracked",
    }
    return stage.graph(y=y)


def buffers(kit, program) -> dict[str, np.ndarray]:
    return {name[9:]: kit.array_of(tensor) for name, tensor in program.export_state(["model"]) if "bn." in name}


def test_running_statistics_follow_the_microbatches_and_serve_evaluation(kit, load):
    program = load(batch_norm(kit), optimizer=ADAMW)
    plain = torch.nn.BatchNorm2d(3)
    rng = np.random.default_rng(0)
    for microbatch in range(3):
        x = rng.standard_normal((4, 3, 4, 4), dtype=np.float32)
        out = program.forward(Call("train", 0, microbatch), {"x": kit.host(x)})
        np.testing.assert_array_equal(kit.array_of(out["y"]), plain(torch.from_numpy(x)).detach().numpy())
    # Both earlier contexts still hold the statistics of their time.
    for microbatch in range(3):
        gradient = kit.host(np.ones((4, 3, 4, 4), dtype=np.float32))
        program.backward(Call("train", 0, microbatch), {"y": gradient})
    program.apply(scale=1.0, learning_rate=0.0)
    for key, value in plain.state_dict().items():
        np.testing.assert_array_equal(buffers(kit, program)[key], value.numpy())
    plain.eval()
    before = buffers(kit, program)
    out = program.forward(Call("eval", 1, 0), {"x": kit.host(x)})
    np.testing.assert_array_equal(kit.array_of(out["y"]), plain(torch.from_numpy(x)).detach().numpy())
    for key, value in before.items():
        np.testing.assert_array_equal(buffers(kit, program)[key], value)


def test_a_discarded_step_leaves_no_trace_in_the_buffers(kit, load):
    program = load(batch_norm(kit), optimizer=ADAMW)
    fresh = weights(kit, program)
    x = kit.host(np.random.default_rng(0).standard_normal((4, 3, 4, 4), dtype=np.float32))
    for microbatch in range(2):
        program.forward(Call("train", 0, microbatch), {"x": x})
    # An export while a step is in flight is of the last applied one.
    assert weights(kit, program) == fresh
    program.discard()
    assert weights(kit, program) == fresh
    program.forward(Call("train", 0, 0), {"x": x})
    program.backward(Call("train", 0, 0), {"y": x})
    program.apply(scale=1.0, learning_rate=0.0)
    assert weights(kit, program)["model/bn.running_mean"] != fresh["model/bn.running_mean"]


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("wrong", [-1, 11, 10**12])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_an_index_outside_is_an_error_that_names_node_and_index(kit, load, mode, wrong):
    program = load(kit.mlp_graph(), optimizer=ADAMW)
    good, bad = np.zeros((2, 3), dtype=np.int64), np.full((2, 3), wrong)
    with pytest.raises(ExecutionError, match=rf"node 10 \(aten\.embedding\.default of stage\): .*0 to 10, got {wrong}"):
        program.forward(Call(mode, 0, 0), {"ids": kit.host(bad), "labels": kit.host(good)})
    with pytest.raises(ExecutionError, match=rf"nll_loss_forward.*got {wrong}"):
        program.forward(Call(mode, 0, 0), {"ids": kit.host(good), "labels": kit.host(bad)})


def test_ignored_labels_are_inside(kit, load):
    labels = np.array([[-100, 2, -100]])
    fed = {"ids": kit.host(np.zeros((1, 3), dtype=np.int64)), "labels": kit.host(labels)}
    assert np.isfinite(kit.array_of(load(kit.mlp_graph()).forward(Call("eval", 0, 0), fed)["loss"]))


def _lying(kit, shape=("b", 3), dtype="float32"):
    """A graph whose only node's result is not what it declares; unvalidated, as a faulty sender would have it."""
    import msgspec

    stage = kit.Stage(b=(1, 4))
    y = stage.node("aten.relu.default", stage.input("x", "b", 3), shape=("b", 3))
    graph = stage.graph(y=y)
    return msgspec.structs.replace(graph, values={**graph.values, y.name: ValueSpec(shape, dtype)})


@pytest.mark.parametrize("declaration", [{"shape": ("b", 2)}, {"shape": ("b*2", 3)}, {"dtype": "int64"}])
def test_a_graph_that_lies_about_its_values_is_refused_at_load(kit, load, declaration):
    with pytest.raises(ExecutionError, match="is declared as"):
        load(_lying(kit, **declaration))
    load(_lying(kit))


def test_a_size_that_grows_where_a_symbol_shrinks_is_refused_before_it_is_allocated(kit, load):
    stage = kit.Stage(s=(1, 4096))
    x = stage.input("x", "s", 1)
    length = stage.node("aten.sym_size.int", x, 0, out={"length": ValueSpec((), "symint")})
    count = stage.node("sym.floordiv", 1 << 40, length, out={"count": ValueSpec((), "symint")})
    bomb = stage.node("aten.full.default", ListArg((count,)), 0.0, shape=("1099511627776//s",))
    total = stage.node("aten.sum.default", bomb, shape=())
    # 1 GiB at the largest s passes the check at load; 4 TiB at the smallest must not be tried.
    program = load(stage.graph(total=total, checked=False), limit_bytes=2 << 30)
    with pytest.raises(ExecutionError, match="the limit is"):
        program.forward(Call("eval", 0, 0), {"x": kit.host(np.ones((1, 1), dtype=np.float32))})


def test_sizes_can_not_grow_without_bound(kit, load):
    stage = kit.Stage(s=(2, 64))
    x = stage.input("x", "s")
    size = stage.node("aten.sym_size.int", x, 0, out={"n0": ValueSpec((), "symint")})
    for level in range(1, 12):
        size = stage.node("sym.mul", size, size, out={f"n{level}": ValueSpec((), "symint")})
    y = stage.node("aten.mul.Tensor", x, size, shape=("s",))
    with pytest.raises(ExecutionError, match="a size computed in the graph is above"):
        load(stage.graph(y=y, checked=False))


def test_operands_of_the_wrong_kind_are_an_execution_error(kit, load):
    stage = kit.Stage(b=(1, 4))
    x = stage.input("x", "b", 2, 4, 8)
    y = stage.node("fusion.attention", x, "k", 3, shape=("b", 2, 4, 8), scale=1.0)
    with pytest.raises(ExecutionError, match=r"fusion\.attention of stage"):
        load(stage.graph(y=y, checked=False))


def test_memory_that_was_never_written_is_not_shown(kit, load):
    stage = kit.Stage(b=(1, 4))
    x = stage.input("x", "b", 4096)
    blank = stage.node("aten.empty_like.default", x, shape=("b", 4096))
    program = load(stage.graph(y=blank))
    for _ in range(8):
        out = program.forward(Call("eval", 0, 0), {"x": kit.host(np.full((2, 4096), 7.0, dtype=np.float32))})
        np.testing.assert_array_equal(kit.array_of(out["y"]), 0.0)


def test_an_optimizer_that_can_not_be_is_refused_at_load(kit, load):
    with pytest.raises(ExecutionError, match="invalid optimizer settings"):
        load(kit.mlp_graph(), optimizer=OptimizerSpec(kind="sgd", nesterov=True))


def test_bf16_runs_products_in_bfloat16_and_keeps_parameters_in_float32(kit, load):
    fed = {"ids": kit.host(np.arange(10).reshape(2, 5)), "labels": kit.host(np.zeros((2, 5), dtype=np.int64))}
    program = load(kit.mlp_graph(), optimizer=ADAMW, precision="bf16")
    out = program.forward(Call("train", 0, 0), fed)
    assert out["logits"].dtype == "bfloat16"
    assert out["loss"].dtype == "float32"
    program.backward(Call("train", 0, 0), {"loss": kit.host(np.asarray(np.float32(1.0)))})
    assert {tensor.dtype for _, tensor in program.export_gradients(["up.weight", "head.weight"])} == {"float32"}
    exact = load(kit.mlp_graph(), optimizer=ADAMW).forward(Call("eval", 0, 0), fed)
    np.testing.assert_allclose(kit.array_of(out["loss"]), kit.array_of(exact["loss"]), rtol=2e-2)


# --------------------------------------------------------------------------------------------------------------- CUDA


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
def test_cuda_agrees_with_the_cpu_and_survives_a_bad_index(kit, load):
    from fusionai.backends.torch.backend import TorchBackend
    from fusionai.wire.messages import StageOptions

    graph = kit.mlp_graph()
    on_cpu = load(graph, optimizer=ADAMW)
    on_cuda = TorchBackend("cuda").load(graph, grad_inputs=(), options=StageOptions(optimizer=ADAMW))
    on_cuda.initialise()
    (microbatches,) = batches(kit, 1)
    for number, (ids, labels) in enumerate(microbatches):
        fed = {"ids": kit.host(ids), "labels": kit.host(labels)}
        one = {"loss": kit.host(np.asarray(np.float32(1.0)))}
        for program in (on_cpu, on_cuda):
            program.forward(Call("train", 0, number), fed)
            program.backward(Call("train", 0, number), one)
    assert on_cuda.gradient_norms() == pytest.approx(on_cpu.gradient_norms(), rel=1e-4)
    for program in (on_cpu, on_cuda):
        program.apply(scale=0.5, learning_rate=1e-3)
    bad = {"ids": kit.host(np.full((1, 2), 999)), "labels": kit.host(np.zeros((1, 2), dtype=np.int64))}
    with pytest.raises(ExecutionError, match="got 999"):
        on_cuda.forward(Call("eval", 1, 0), bad)
    expected = {name: kit.array_of(tensor) for name, tensor in on_cpu.export_state(["model", "optimizer"])}
    for name, tensor in on_cuda.export_state(["model", "optimizer"]):
        np.testing.assert_allclose(kit.array_of(tensor), expected[name], rtol=1e-3, atol=1e-5)
