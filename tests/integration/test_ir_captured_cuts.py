"""Captured models cut anywhere, between any two operators, train as the whole graph does: forward, backward, ties."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fusionai.backends.interface import Call
from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import capture
from fusionai.capture.models.source import ConfigSource
from fusionai.ir.blocks import block_hashes
from fusionai.ir.cost import block_costs, forward_flops
from fusionai.ir.graph import cheap_nodes, reads
from fusionai.ir.partition import FEED, Partition, cut, cut_blocks
from fusionai.ir.schema import Graph, encode
from fusionai.ir.shapes import evaluate
from fusionai.ir.validate import parse
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire.messages import StageOptions

pytestmark = pytest.mark.slow

BATCH, SEQUENCE, VOCABULARY = 2, 12, 61
CALL = Call(mode="train", step=3, microbatch=1)
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_embd": 16,
        "n_layer": 3,
        "n_head": 2,
        "n_positions": 32,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "llama": _SMALL,
    "gemma3_text": {**_SMALL, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}


@pytest.fixture(scope="module", params=sorted(CONFIGURATIONS))
def graph(request: pytest.FixtureRequest) -> Graph:
    configuration = {"model_type": request.param, **CONFIGURATIONS[request.param]}
    return capture(ConfigSource(configuration), batch=(1, 4), sequence=(1, 32)).graph


def feed() -> dict[str, HostTensor]:
    generator = np.random.default_rng(5)
    ids = generator.integers(0, VOCABULARY, (BATCH, SEQUENCE))
    labels = np.concatenate([ids[:, 1:], np.full((BATCH, 1), -100)], axis=1)
    positions = np.broadcast_to(np.arange(SEQUENCE), (BATCH, SEQUENCE))
    arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return {
        name: host_tensor("int64", array.shape, np.ascontiguousarray(array, dtype=np.int64).tobytes())
        for name, array in arrays.items()
    }


def train_once(partition: Partition) -> tuple[bytes, dict[str, float]]:
    """(bits of the loss, gradient norm per parameter) after one microbatch through all stages and back."""
    backend = TorchBackend("cpu", threads=1)
    inputs = feed()
    routes = partition.routes
    programs = [
        backend.load(parse(encode(stage.graph)), grad_inputs=stage.grad_inputs, options=StageOptions(seed=11))
        for stage in partition.stages
    ]
    sent = {(c, r.value): inputs[r.value] for r in routes if r.producer == FEED for c in r.consumers}
    loss = b""
    for stage, program in zip(partition.stages, programs, strict=True):
        missing = [entry for entry in program.initialise() if "inv_freq" not in entry and "embed_scale" not in entry]
        assert missing == []
        _fill_buffers(program, stage.graph)
        named = {value: stage.aliases.get(value, value) for value in stage.graph.inputs}
        made = program.forward(CALL, {value: sent[stage.stage, source] for value, source in named.items()})
        if "loss" in made:
            loss = bytes(made["loss"].data)
        sent.update({(c, r.value): made[r.value] for r in routes if r.producer == stage.stage for c in r.consumers})
    returned: dict[tuple[int, str], HostTensor] = {}
    to = {(route.sender, route.value): route.receiver for route in partition.gradients}
    one = host_tensor("float32", (), np.float32(1).tobytes())
    for stage, program in zip(reversed(partition.stages), reversed(programs), strict=True):
        came = {value: returned.pop((at, value)) for at, value in [*returned] if at == stage.stage}
        gradients = {value: gradient for value, gradient in came.items() if value in stage.graph.outputs}
        begun = {value: gradient for value, gradient in came.items() if value not in stage.graph.outputs}
        if "loss" in stage.graph.outputs:
            gradients["loss"] = one
        for value, gradient in program.backward(CALL, gradients, begun).items():
            returned[to[stage.stage, value], value] = gradient
    for shared in partition.shared:
        assert shared.summed == ()
    homes = {shared.key: shared.stages[0] for shared in partition.shared}
    norms = {
        key: norm
        for stage, program in enumerate(programs)
        for key, norm in program.gradient_norms().items()
        if homes.get(key, stage) == stage
    }
    return loss, norms


def _fill_buffers(program: Any, graph: Graph) -> None:
    """Buffers whose bytes the job owner sends: any fixed numbers do here."""
    for spec in graph.params.values():
        if spec.init is None:
            array = np.linspace(0.1, 1.0, max(1, int(np.prod(spec.shape))), dtype=np.float32).reshape(spec.shape)
            program.import_state([(f"model/{spec.key}", host_tensor("float32", spec.shape, array.tobytes()))])


def random_cut(graph: Graph, count: int, seed: int) -> Partition:
    """Stages that data flows through forward, but which interleave in the node order."""
    choose = random.Random(seed)
    cheap = cheap_nodes(graph)
    home: dict[str, int] = {}
    stages: list[set[int]] = [set() for _ in range(count)]
    for place, node in enumerate(graph.nodes):
        floor = max((home.get(value, 0) for value in reads(node)), default=0)
        about = min(count - 1, place * count // len(graph.nodes))
        stage = max(floor, about + choose.choice((-1, 0, 0, 1)))
        stage = min(count - 1, max(0, stage))
        stages[stage].add(node.id)
        home.update(dict.fromkeys(node.outputs, floor if node.id in cheap else stage))
    return cut(graph, [frozenset(stage) for stage in stages])


def test_any_cut_trains_as_the_whole(graph: Graph) -> None:
    last = max(node.block for node in graph.nodes)
    whole_loss, whole_norms = train_once(cut_blocks(graph, [(0, last + 1)]))
    assert np.isfinite(np.frombuffer(whole_loss, dtype=np.float32)).all()
    assert set(whole_norms) == {spec.key for spec in graph.params.values() if spec.trainable}
    by_blocks = [(0, 1), (1, 3), (3, last), (last, last + 1)]
    for partition in (cut_blocks(graph, by_blocks), random_cut(graph, 4, seed=1), random_cut(graph, 6, seed=2)):
        loss, norms = train_once(partition)
        assert loss == whole_loss
        assert norms.keys() == whole_norms.keys()
        interleaved = {one.key for one in partition.cut_dependent}
        assert interleaved <= {shared.key for shared in partition.shared}
        for key, norm in norms.items():
            expected = whole_norms[key]
            assert norm == (pytest.approx(expected, rel=2e-6) if key in interleaved else expected), key


def test_layers_of_one_kind_have_one_hash(graph: Graph) -> None:
    hashes = block_hashes(graph)
    kinds = 2 if "gemma" in graph.name else 1
    assert len(set(hashes[1:4])) == kinds
    assert len(hashes) == 6


def test_flops_agree_with_torch(graph: Graph) -> None:
    """Products and attention to the last operation; the rest, which torch's counter does not know, stays small."""
    symbols = {"b": BATCH, "s": SEQUENCE}
    sizes = {
        value: tuple(evaluate(dim, symbols) for dim in spec.shape)
        for value, spec in graph.values.items()
        if spec.dtype != "symint"
    }
    counted = 0
    for node in graph.nodes:
        operands = [torch.empty(sizes[value], device="meta") for value in reads(node) if value in sizes]
        with FlopCounterMode(display=False) as counter:
            match node.op:
                case "aten.linear.default":
                    torch.nn.functional.linear(*operands)
                case "aten.addmm.default":
                    torch.addmm(*operands)
                case "fusion.attention":
                    query, key, value = operands
                    keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
                    torch.ops.aten._scaled_dot_product_efficient_attention(query, keys, values, None, False)
                case _:
                    continue
        assert forward_flops(node, sizes) == counter.get_total_flops(), node
        counted += counter.get_total_flops()
    total = sum(record.forward_flops for record in block_costs(graph, symbols, training=True))
    assert 0 < counted <= total <= 1.4 * counted
