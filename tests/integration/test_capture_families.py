"""Captured graphs, cut into four stages and run on the torch backend, against the modules they came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest
import torch
from torch import nn

from fusionai.backends.interface import Call
from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import Captured, capture
from fusionai.capture.checking.comparison import from_host, relative_difference
from fusionai.capture.checking.self_check import draw_inputs, reference_module
from fusionai.capture.models.source import Architecture, ConfigSource, FactorySource
from fusionai.capture.models.state import to_host
from fusionai.capture.tasks import ExampleInput, TaskModule
from fusionai.ir.partition import Partition, cut
from fusionai.wire.messages import OptimizerSpec, StageOptions
from harness.staged import STAGES, Staged, by_blocks
from harness.variants import kept
from harness.zoo import Convolutions

pytestmark = pytest.mark.slow
SEED = 7
SIZES = {"b": 2, "s": 11}
LARGEST_GRADIENT_DIFF = 1e-6
_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 67, "n_positions": 32, "bos_token_id": 1}
_GPT2 |= {"eos_token_id": 1}
_BERT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
_BERT |= {"vocab_size": 67, "max_position_embeddings": 32}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_NO_BERT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Windows shorter than the sequence, so that the windowed path is the one compared.
FAMILIES: dict[str, tuple[Architecture, dict[str, Any]]] = {
    "gpt2": ("causal_lm", {"model_type": "gpt2", **_GPT2, **_NO_DROPOUT}),
    "llama": ("causal_lm", {"model_type": "llama", **_LLAMA}),
    "qwen3": ("causal_lm", {"model_type": "qwen3", **_LLAMA, "head_dim": 8}),
    "gemma3": ("causal_lm", {"model_type": "gemma3_text", **_LLAMA, "num_hidden_layers": 6, "head_dim": 8}),
    "mistral": ("causal_lm", {"model_type": "mistral", **_LLAMA, "sliding_window": 5}),
    "phi3": ("causal_lm", {"model_type": "phi3", **_LLAMA}),
    "bert": ("masked_lm", {"model_type": "bert", **_BERT, **_NO_BERT_DROPOUT}),
}
MORE_OF_A_KIND: Final = ("qwen3", "mistral", "phi3")
FAMILIES["gemma3"][1]["sliding_window"] = 5


def family(name: str, changes: Mapping[str, Any] | None = None) -> Captured:
    architecture, config = FAMILIES[name]
    task = "masked_lm" if architecture == "masked_lm" else "causal_lm"
    source = ConfigSource({**config, **(changes or {})}, architecture)
    return capture(source, task=task, batch=(1, 8), sequence=(1, 32), seed=SEED)


def staged(captured: Captured, partition: Partition, optimizer: OptimizerSpec | None = None) -> Staged:
    return Staged(captured, partition, [TorchBackend("cpu")], seed=SEED, optimizer=optimizer)


def worst_gradient_difference(got: Mapping[str, torch.Tensor], module: nn.Module) -> float:
    expected = {key: parameter.grad for key, parameter in module.named_parameters() if parameter.grad is not None}
    assert set(got) == set(expected)
    return max(relative_difference(to_host(got[key]), gradient) for key, gradient in expected.items())


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.long) if name in MORE_OF_A_KIND else name for name in FAMILIES],
)
def captured(request: pytest.FixtureRequest) -> Captured:
    return family(request.param)


def test_a_four_stage_cut_equals_the_module(captured: Captured) -> None:
    module = reference_module(captured, SEED).train()
    inputs = draw_inputs(captured.inputs, SEED, SIZES)
    pipeline = staged(captured, by_blocks(captured))
    values = pipeline.run(inputs, Call("train", step=0, microbatch=0))

    # transformers' own loss, from labels before the feed shifts them.
    labels = inputs["labels"]
    if captured.task == "causal_lm":
        labels = torch.cat([torch.full_like(labels[:, :1], -100), labels[:, :-1]], dim=1)
    output = module(input_ids=inputs["input_ids"], labels=labels)
    output.loss.backward()
    assert torch.equal(from_host(values["logits"], torch.float32), output.logits)
    assert torch.equal(from_host(values["loss"], torch.float32), output.loss)
    assert worst_gradient_difference(pipeline.gradients(), module) <= LARGEST_GRADIENT_DIFF


def test_every_attention_layer_is_semantic(captured: Captured) -> None:
    assert captured.attention_nodes == captured.attention_layers >= 4
    windows = {node.kwargs["window"] for node in captured.graph.nodes if node.op == "fusion.attention"}
    expected = {"mistral": {5}, "gemma3_text": {5, None}}
    assert windows == expected.get(captured.graph.name, {None})


def test_one_tensor_crosses_each_cut_between_layers(captured: Captured) -> None:
    partition = by_blocks(captured)
    for stage in range(1, STAGES):
        crossing = [r for r in partition.routes if 0 <= r.producer < stage and any(c >= stage for c in r.consumers)]
        assert len([route for route in crossing if route.needs_grad]) == 1


@pytest.mark.parametrize("sizes", [{"b": 1, "s": 1}, {"b": 1, "s": 11}, {"b": 5, "s": 1}, {"b": 8, "s": 32}])
def test_one_graph_serves_every_size(captured: Captured, sizes: Mapping[str, int]) -> None:
    module = TaskModule(reference_module(captured, SEED), captured.task, captured.input_names).eval()
    inputs = draw_inputs(captured.inputs, SEED, sizes)
    program = TorchBackend("cpu").load(captured.graph, grad_inputs=(), options=StageOptions(seed=SEED))
    program.initialise()
    program.import_state((f"model/{key}", tensor) for key, tensor in captured.state(captured.owed))
    got = program.forward(Call("eval", step=0, microbatch=0), {k: to_host(v) for k, v in inputs.items()}, ["logits"])
    with torch.no_grad():
        expected = module(inputs)
    assert torch.equal(from_host(got["logits"], torch.float32), expected["logits"])


@pytest.mark.parametrize("name", kept(["gpt2", "bert"], ["bert"]))
def test_with_dropout_the_cut_equals_the_uncut_graph(name: str) -> None:
    with_dropout = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    if name == "bert":
        with_dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    captured = family(name, with_dropout)
    ops = [node.op for node in captured.graph.nodes]
    assert ops.count("fusion.dropout") == {"gpt2": 9, "bert": 9}[name]
    whole = staged(captured, cut(captured.graph, [frozenset(node.id for node in captured.graph.nodes)]))
    parts = staged(captured, by_blocks(captured))
    inputs = draw_inputs(captured.inputs, SEED, SIZES)
    call = Call("train", step=3, microbatch=1)
    expected, got = whole.run(inputs, call), parts.run(inputs, call)
    assert bytes(got["loss"].data) == bytes(expected["loss"].data)
    assert bytes(got["logits"].data) == bytes(expected["logits"].data)
    wanted = whole.gradients()
    for key, gradient in parts.gradients().items():
        assert relative_difference(to_host(gradient), wanted[key]) <= LARGEST_GRADIENT_DIFF
    # Dropout does something, and it is off outside training.
    evaluated = parts.run(inputs, Call("eval", step=3, microbatch=1), backward=False)
    assert bytes(evaluated["logits"].data) != bytes(got["logits"].data)


def _image() -> dict[str, torch.Tensor]:
    return {"image": torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))}


def test_convolutions_and_batch_statistics_equal_the_module() -> None:
    source = FactorySource(lambda: (Convolutions(), _image()))
    captured = capture(source, task="classification", batch=(1, 16), seed=SEED)
    assert len(captured.graph.state_writes) == 3 * 4
    module = reference_module(captured, SEED)
    task = TaskModule(module, captured.task, captured.input_names).train()
    pipeline = staged(captured, by_blocks(captured))
    inputs = draw_inputs(captured.inputs, SEED, {"b": 6})
    values = pipeline.run(inputs, Call("train", step=0, microbatch=0))
    expected = task(inputs)
    expected["loss"].backward()
    assert torch.equal(from_host(values["logits"], torch.float32), expected["logits"])
    assert torch.equal(from_host(values["loss"], torch.float32), expected["loss"])
    assert worst_gradient_difference(pipeline.gradients(), module) <= LARGEST_GRADIENT_DIFF


def test_batch_statistics_move_as_the_modules_do() -> None:
    source = FactorySource(lambda: (Convolutions(), _image()))
    captured = capture(source, task="classification", batch=(1, 16), seed=SEED)
    module = reference_module(captured, SEED)
    task = TaskModule(module, captured.task, captured.input_names).train()
    pipeline = staged(captured, by_blocks(captured), OptimizerSpec(kind="sgd"))
    for microbatch in range(3):
        inputs = draw_inputs(captured.inputs, SEED + microbatch, {"b": 6 - microbatch})
        pipeline.run(inputs, Call("train", step=0, microbatch=microbatch))
        with torch.no_grad():
            task(inputs)
    state = pipeline.state()
    for name, buffer in module.named_buffers():
        assert torch.equal(from_host(state[name], buffer.dtype), buffer), name
    assert state["blocks.0.1.num_batches_tracked"].data[0] == 3


class Skips(nn.Module):
    """Three inputs, and values that skip over two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.gate = nn.Linear(4, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, gate: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(self.layers[0](x))
        opened = torch.sigmoid(self.gate(gate))
        second = torch.tanh(self.layers[1](first)) * scale
        third = torch.tanh(self.layers[2](second))
        fourth = self.layers[3](third) * opened + first
        return self.out(fourth + x)


def test_skips_over_two_cuts_and_three_inputs() -> None:
    generator = torch.Generator().manual_seed(3)
    example = {
        "x": torch.randn(4, 8, generator=generator),
        "gate": torch.randn(4, 4, generator=generator),
        "scale": torch.randn(4, 1, generator=generator),
        "labels": ExampleInput(torch.randn(4, 3, generator=generator), ("b", None)),
    }
    captured = capture(FactorySource(Skips), task="regression", batch=(1, 16), seed=SEED, example_inputs=example)
    partition = by_blocks(captured)
    assert any(len(route.consumers) and max(route.consumers) - route.producer > 2 for route in partition.routes)
    module = reference_module(captured, SEED)
    task = TaskModule(module, captured.task, captured.input_names).train()
    pipeline = staged(captured, partition)
    inputs = draw_inputs(captured.inputs, SEED, {"b": 5})
    values = pipeline.run(inputs, Call("train", step=0, microbatch=0))
    expected = task(inputs)
    expected["loss"].backward()
    assert torch.equal(from_host(values["output"], torch.float32), expected["output"])
    assert worst_gradient_difference(pipeline.gradients(), module) <= LARGEST_GRADIENT_DIFF
