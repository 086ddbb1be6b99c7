"""Memory that a stage is said to need, compared with the bytes of tensors that live at its peak."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from fusionai.backends.interface import Call
from fusionai.backends.torch.backend import TorchBackend
from fusionai.backends.torch.host import to_host
from fusionai.backends.torch.live_memory import counted_memory
from fusionai.backends.torch.program import TorchStageProgram
from fusionai.capture.capture import capture
from fusionai.capture.models.adapter import Lora
from fusionai.capture.models.source import ConfigSource
from fusionai.ir.partition import StageGraph, cut_blocks
from fusionai.ir.serving import serving_graph
from fusionai.ir.validate import validate
from fusionai.ir.weights import with_stored
from fusionai.primitives.tensors import HostTensor, host_tensor, tensor_bytes
from fusionai.wire.messages import OptimizerSpec, StageOptions
from fusionai.wire.serving import ServeOptions, WeightFormat

WITHIN = 0.05
"""Largest deviation of an estimate from what is seen."""
_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
}
LLAMA: dict[str, Any] = {**_COMMON, "model_type": "llama", "intermediate_size": 688, "tie_word_embeddings": False}
GROUPED: dict[str, Any] = {**LLAMA, "num_key_value_heads": 2}
EXPERTS: dict[str, Any] = {
    **_COMMON,
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 256,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 32,
}


class Case(NamedTuple):
    """`cut`: only the middle layers of the model. `lora`: rank of adapters over a frozen base, kept as `base`."""

    config: dict[str, Any]
    rows: int
    tokens: int
    in_flight: int = 1
    cut: bool = False
    state_bits: int = 32
    options: Mapping[str, Any] = {}
    lora: int = 0
    base: str = ""


BF16 = {"precision": "bf16"}
AGAIN = {"recompute": True}
QUICK = {
    "float32": Case(LLAMA, 1, 32),
    "bfloat16, two in flight": Case(LLAMA, 2, 64, 2, cut=True, options=BF16),
    "recomputed": Case(GROUPED, 2, 64, 2, cut=True, options=AGAIN),
}
THOROUGH = {
    **QUICK,
    "float32, large": Case(LLAMA, 4, 256),
    "float32, three in flight": Case(LLAMA, 4, 256, 3, cut=True),
    "bfloat16": Case(LLAMA, 4, 256, options=BF16),
    "recomputed, large": Case(LLAMA, 4, 256, 3, cut=True, options=AGAIN),
    "recomputed in bfloat16": Case(LLAMA, 4, 256, options={**BF16, **AGAIN}),
    "grouped queries": Case(GROUPED, 2, 256, cut=True),
    "grouped queries in bfloat16": Case(GROUPED, 2, 256, 2, cut=True, options=BF16),
    "experts": Case(EXPERTS, 2, 256, cut=True),
    "experts in bfloat16": Case(EXPERTS, 4, 256, options=BF16),
    "experts recomputed": Case(EXPERTS, 4, 256, 2, cut=True, options=AGAIN),
    "optimizer state in eight bits": Case(LLAMA, 1, 64, state_bits=8),
    "adapters": Case(LLAMA, 2, 256, 2, lora=8),
    "adapters over int8": Case(LLAMA, 2, 256, 2, lora=8, base="int8"),
    "adapters over int4, recomputed": Case(LLAMA, 2, 256, 2, lora=8, base="int4", options=AGAIN),
    "adapters in bfloat16": Case(LLAMA, 2, 256, 2, lora=8, base="int8", options=BF16),
}
SERVED = ("fp32", "bf16", "int8", "int4")


@cache
def backend() -> TorchBackend:
    return TorchBackend("cpu", threads=1)


def inputs_of(stage: StageGraph, sizes: Mapping[str, int]) -> dict[str, HostTensor]:
    made: dict[str, HostTensor] = {}
    for name in stage.graph.inputs:
        spec = stage.graph.values[name]
        if spec.dtype == "symint":
            made[name] = host_tensor("int64", (), (7).to_bytes(8, "little"))
            continue
        shape = tuple(dim if isinstance(dim, int) else sizes[str(dim)] for dim in spec.shape)
        made[name] = host_tensor(spec.dtype, shape, bytes(tensor_bytes(spec.dtype, shape)))
    return made


def stage_of(case: Case) -> StageGraph:
    adapter = Lora(rank=case.lora, alpha=8.0) if case.lora else None
    found = capture(
        ConfigSource(case.config), batch=(1, case.rows), sequence=(1, case.tokens), train=True, adapter=adapter
    )
    graph = with_stored(found.graph, case.base) if case.base else found.graph  # pyright: ignore[reportArgumentType]
    blocks = 1 + max(node.block for node in graph.nodes)
    cuts = [(0, 2), (2, blocks - 2), (blocks - 2, blocks)] if case.cut else [(0, blocks)]
    return cut_blocks(graph, cuts).stages[len(cuts) // 2]


def filled(program: TorchStageProgram) -> None:
    """Zeros for what has no rule: sizes are all that counts."""
    missing = program.initialise()
    entries = [(name, program._entries[name]) for name in missing]
    program.import_state(
        (name, host_tensor(entry.dtype, entry.shape, bytes(tensor_bytes(entry.dtype, entry.shape))))
        for name, entry in entries
    )


def seen_bytes(case: Case) -> tuple[int, int]:
    """Train two steps, each with two microbatches more than are in flight. Return what was estimated, and the most
    bytes that lived at once."""
    stage = stage_of(case)
    fed = inputs_of(stage, {"b": case.rows, "s": case.tokens})
    options = StageOptions(
        optimizer=OptimizerSpec(state_bits=case.state_bits), in_flight=case.in_flight, **case.options
    )  # pyright: ignore[reportCallIssue]
    with counted_memory(torch.device("cpu")) as count:
        program = backend().load(stage.graph, grad_inputs=stage.grad_inputs, options=options)
        assert isinstance(program, TorchStageProgram)
        filled(program)

        def backward(call: Call) -> None:
            outputs = program._contexts[call.step, 0, call.microbatch].outputs
            names = ["loss"] if "loss" in outputs else list(outputs)
            program.backward(call, {name: to_host(torch.zeros_like(outputs[name])) for name in names})

        count.peak_bytes = count.now_bytes
        for step in range(2):
            calls = [Call("train", step, number) for number in range(case.in_flight + 2)]
            for number, call in enumerate(calls):
                if number >= case.in_flight:
                    backward(calls[number - case.in_flight])
                program.forward(call, fed)
            for call in calls[2:]:
                backward(call)
            program.apply(scale=0.5, learning_rate=1e-3)
    return program.size.kept_bytes + program.size.in_use_bytes, count.peak_bytes


def require_close(estimated_bytes: int, peak_bytes: int) -> None:
    ratio = estimated_bytes / peak_bytes
    assert abs(ratio - 1) <= WITHIN, f"{estimated_bytes} estimated, {peak_bytes} seen: {ratio:.3f}"


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_an_estimate_is_what_training_takes(name: str) -> None:
    require_close(*seen_bytes(QUICK[name]))


@pytest.mark.long
@pytest.mark.parametrize("name", THOROUGH)
def test_an_estimate_is_what_training_takes_in_every_way(name: str) -> None:
    require_close(*seen_bytes(THOROUGH[name]))


@pytest.mark.long
@pytest.mark.parametrize("weights", SERVED)
def test_an_estimate_is_what_serving_keeps(weights: WeightFormat) -> None:
    graph = validate(serving_graph(capture(ConfigSource(GROUPED), batch=(1, 4), sequence=(1, 128), train=False).graph))
    options = ServeOptions(weights=weights, pages=32, sessions=4, pass_tokens=64)
    program = backend().serve(graph, options=options)
    with counted_memory(torch.device("cpu")) as count:
        program.import_weights(
            (spec.key, host_tensor(spec.dtype, tuple(spec.shape), bytes(tensor_bytes(spec.dtype, spec.shape))))
            for spec in graph.params.values()
        )
        program.allocate()
        kept_bytes = count.now_bytes
    require_close(program.size.kept_bytes + program.size.in_use_bytes, max(kept_bytes, program.resident_bytes))
