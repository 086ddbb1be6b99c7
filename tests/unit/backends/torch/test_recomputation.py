"""Activations made again in backward: not a bit differs from a run that keeps them, and only segments' inputs stay."""

from __future__ import annotations

import gc
import weakref

import msgspec
import numpy as np
import pytest
import torch

from fusionai.backends.interface import Call
from fusionai.backends.semantics import DropoutKey
from fusionai.backends.torch.compiled_stage import META, input_shapes, measure
from fusionai.backends.torch.interpreter import compile_graph
from fusionai.backends.torch.operators import TorchContext
from fusionai.backends.torch.recomputation import segments
from fusionai.ir.schema import Graph, ListArg, ValueSpec
from fusionai.primitives.errors import ExecutionError
from fusionai.wire.messages import OptimizerSpec

LAYERS, ROWS, SEQUENCE = 3, 2, 5


def network(kit, *, dropout: float = 0.0, apart: bool = False) -> Graph:
    """Embedding (block 0), `LAYERS` residual layers that share one weight (1 to LAYERS), loss: a weight in several
    segments, a value that all of them read, and the embedding tied to the head. `apart`: no weight is shared."""
    stage = kit.Stage(b=(1, 8), s=(1, 32))
    hidden = ("b", "s", kit.hidden)
    ids = stage.input("ids", "b", "s", dtype="int64")
    labels = stage.input("labels", "b", "s", dtype="int64")
    embed = stage.param("embed.weight", kit.classes, kit.hidden)
    head = stage.param("head.weight", kit.classes, kit.hidden) if apart else embed
    shared = None if apart else stage.param("shared.weight", kit.hidden, kit.hidden)
    first = x = stage.node("aten.embedding.default", embed, ids, shape=hidden)
    ends = [len(stage.nodes)]
    for layer in range(LAYERS):
        up = stage.node("aten.linear.default", x, stage.param(f"{layer}.weight", kit.hidden, kit.hidden), shape=hidden)
        act = stage.node("aten.silu.default", up, shape=hidden)
        act = stage.node("fusion.dropout", act, p=dropout, shape=hidden) if dropout else act
        own = stage.param(f"{layer}.down", kit.hidden, kit.hidden) if apart else shared
        down = stage.node("aten.linear.default", act, own, shape=hidden)
        x = stage.node("aten.add.Tensor", x, down, shape=hidden)
        x = stage.node("aten.add.Tensor", x, first, shape=hidden)
        ends.append(len(stage.nodes))
    logits = stage.node("aten.linear.default", x, head, shape=("b", "s", kit.classes))
    flat = stage.node("aten.reshape.default", logits, ListArg((-1, kit.classes)), shape=("b*s", kit.classes))
    targets = stage.node("aten.reshape.default", labels, ListArg((-1,)), out={"targets": ValueSpec(("b*s",), "int64")})
    logp = stage.node("aten._log_softmax.default", flat, 1, False, shape=("b*s", kit.classes))
    scalar = ValueSpec((), "float32")
    loss = stage.node(
        "aten.nll_loss_forward.default", logp, targets, None, 1, -100, out={"loss": scalar, "weight_total": scalar}
    )
    graph = stage.graph(loss=loss)
    nodes = [
        msgspec.structs.replace(node, block=sum(position >= end for end in ends))
        for position, node in enumerate(graph.nodes)
    ]
    return msgspec.structs.replace(graph, nodes=tuple(nodes))


def trained(kit, load, graph: Graph, **options: object) -> tuple[list[float], dict[str, bytes]]:
    """Losses and state after two steps of three microbatches, all of a step in flight at once."""
    program = load(graph, optimizer=OptimizerSpec(weight_decay=0.1), in_flight=3, seed=5, **options)
    rng = np.random.default_rng(1)
    losses = []
    for step in range(2):
        for microbatch in range(3):
            ids = rng.integers(0, kit.classes, (ROWS, SEQUENCE))
            made = program.forward(Call("train", step, microbatch), {"ids": kit.host(ids), "labels": kit.host(ids)})
            losses.append(float(kit.array_of(made["loss"])))
        for microbatch in range(3):
            program.backward(Call("train", step, microbatch), {"loss": kit.host(np.asarray(np.float32(1 / 3)))})
            if options.get("weight_lag"):
                program.weight_gradients(Call("train", step, microbatch))
        program.apply(scale=0.7, learning_rate=1e-2)
    return losses, {name: bytes(tensor.data) for name, tensor in program.export_state(["model", "optimizer"])}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"weight_lag": 2}, {"precision": "bf16"}], ids=["plain", "weights-later", "bf16"]
)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_not_a_bit_differs(kit, load, dropout, options):
    graph = network(kit, dropout=dropout)
    assert trained(kit, load, graph, recompute=True, **options) == trained(kit, load, graph, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"weight_lag": 2}, {"precision": "bf16"}, {"offload": True}],
    ids=["plain", "weights-later", "bf16", "state-too"],
)
@pytest.mark.parametrize("apart", [False, True], ids=["shared", "apart"])
def test_not_a_bit_differs_where_weights_come_and_go(kit, load, apart, options):
    graph = network(kit, dropout=0.4, apart=apart)
    away = {"recompute": True, "offload_weights": True}
    assert trained(kit, load, graph, **away, **options) == trained(kit, load, graph, **options)


def test_weights_that_come_and_go_are_there_for_one_segment_alone(kit, load):
    graph = network(kit, apart=True)
    program = load(graph, optimizer=OptimizerSpec(), recompute=True, offload_weights=True, offload=True)
    layer, table = 2 * 4 * kit.hidden**2, 4 * kit.hidden * kit.classes
    assert program.resident_bytes == 0
    ids = kit.host(np.zeros((ROWS, SEQUENCE), dtype=np.int64))
    program.forward(Call("train", 0, 0), {"ids": ids, "labels": ids})
    assert program.resident_bytes == table
    program.backward(Call("train", 0, 0), {"loss": kit.host(np.asarray(np.float32(1)))})
    gradients = LAYERS * layer + 2 * table
    assert program.resident_bytes == gradients + table  # the lookup's, which is made again last
    program.apply(scale=1.0, learning_rate=1e-2)
    assert 0 <= program.resident_bytes < layer  # steps are counted in memory


def test_weights_come_and_go_without_training_too(kit, load):
    graph = network(kit)
    ids = kit.host(np.ones((ROWS, SEQUENCE), dtype=np.int64))
    call, inputs = Call("eval", 0, 0), {"ids": ids, "labels": ids}
    plain = load(graph, seed=3).forward(call, inputs)
    away = load(graph, seed=3, recompute=True, offload_weights=True).forward(call, inputs)
    assert bytes(plain["loss"].data) == bytes(away["loss"].data)


def test_weights_that_come_and_go_ask_for_activations_made_again(kit, load):
    with pytest.raises(ExecutionError, match="offload_weights needs recompute"):
        load(network(kit), optimizer=OptimizerSpec(), offload_weights=True)


def test_a_discarded_step_leaves_no_trace(kit, load):
    graph = network(kit)
    program = load(graph, optimizer=OptimizerSpec(), recompute=True, in_flight=2)
    before = [bytes(tensor.data) for _, tensor in program.export_state(["model", "optimizer"])]
    ids = kit.host(np.zeros((ROWS, SEQUENCE), dtype=np.int64))
    for microbatch in range(2):
        program.forward(Call("train", 0, microbatch), {"ids": ids, "labels": ids})
    program.backward(Call("train", 0, 0), {"loss": kit.host(np.asarray(np.float32(1)))})
    program.discard()
    assert [bytes(tensor.data) for _, tensor in program.export_state(["model", "optimizer"])] == before
    assert program.gradient_norms() == {}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recompute": True},
        {"weight_lag": 1},
        {"recompute": True, "weight_lag": 1},
        {"recompute": True, "offload_weights": True},
    ],
)
def test_a_program_that_is_given_up_with_microbatches_in_flight_is_gone(kit, load, options):
    program = load(network(kit), optimizer=OptimizerSpec(), in_flight=3, **options)
    ids = kit.host(np.zeros((ROWS, SEQUENCE), dtype=np.int64))
    for microbatch in range(3):
        program.forward(Call("train", 0, microbatch), {"ids": ids, "labels": ids})
    program.backward(Call("train", 0, 0), {"loss": kit.host(np.asarray(np.float32(1)))})
    program, gone = None, weakref.ref(program)
    gc.collect()
    assert gone() is None


def test_a_segment_is_a_block_and_what_stands_between_belongs_to_the_one_before(kit):
    graph = network(kit)
    interpreter = compile_graph(graph, ["loss"], with_state_writes=True, device=torch.device("cpu"))
    parts = segments(interpreter)
    assert [interpreter.steps[part.start].node.block for part in parts] == list(range(LAYERS + 2))
    assert [part.stop for part in parts] == [*(part.start for part in parts[1:]), len(interpreter.steps)]
    late = interpreter.steps[parts[2].start + 1].node
    nodes = tuple(msgspec.structs.replace(node, block=0) if node.id == late.id else node for node in graph.nodes)
    moved = compile_graph(
        msgspec.structs.replace(graph, nodes=nodes), ["loss"], with_state_writes=True, device=torch.device("cpu")
    )
    assert segments(moved) == parts


def test_what_is_kept_is_what_enters_the_segments(kit):
    graph = network(kit)
    symbols = {"b": ROWS, "s": SEQUENCE}
    interpreter = compile_graph(graph, ["loss"], with_state_writes=True, device=META)

    def footprint(recompute: bool):
        context = TorchContext(True, DropoutKey(0, 0, 0))
        shapes = input_shapes(graph, symbols)
        return measure(
            graph, interpreter, shapes, symbols, context, grad_inputs=frozenset(), limit_bytes=None, recompute=recompute
        )

    hidden, tokens = ROWS * SEQUENCE * kit.hidden * 4, ROWS * SEQUENCE * 8
    plain, again = footprint(False), footprint(True)
    # The embedding's result enters all layers, each layer's result the next segment; ids and labels come from outside.
    assert again.saved_bytes == (1 + LAYERS) * hidden + 2 * tokens
    assert plain.saved_bytes > again.saved_bytes + again.again_bytes
    assert again.peak_bytes == plain.peak_bytes
    # What one layer saves: its input and what silu made, the operands of two products, and what silu was given.
    assert again.again_bytes == 3 * hidden


def test_a_stage_that_fits_only_so_is_refused_otherwise(kit, load):
    graph = network(kit)

    def needed_bytes(**options: bool) -> int:
        with pytest.raises(ExecutionError, match=r"the stage needs (\d+) bytes") as refused:
            load(graph, limit_bytes=100_000, optimizer=OptimizerSpec(), in_flight=16, **options)
        return int(refused.value.message.split("needs ")[1].split(" ")[0])

    needed = {recompute: needed_bytes(recompute=recompute) for recompute in (False, True)}
    assert needed[True] < needed[False]
    weights = 4 * (LAYERS + 1) * kit.hidden**2
    assert needed[True] - needed_bytes(recompute=True, offload_weights=True) == weights - 2 * 4 * kit.hidden**2 + (
        4 * kit.hidden * kit.classes
    )
    load(graph, limit_bytes=needed[True], optimizer=OptimizerSpec(), in_flight=16, recompute=True)
    with pytest.raises(ExecutionError, match="the limit is"):
        load(graph, limit_bytes=needed[True], optimizer=OptimizerSpec(), in_flight=16)
