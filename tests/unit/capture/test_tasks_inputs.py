"""What models take when nobody gave an example, heads by task, experts and recurrent layers as operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fusionai.capture.capture import _inputs, capture
from fusionai.capture.checking.check import check
from fusionai.capture.models.build import build
from fusionai.capture.models.source import ConfigSource, FactorySource, architecture_of
from fusionai.capture.tasks import ExampleInput, Task
from fusionai.capture.tracing.layers import semantic_layers
from fusionai.primitives.errors import ModelError
from harness.zoo import models

pytestmark = pytest.mark.slow
ZOO = {model.name: model for model in models()}
SHAPES: dict[str, dict[str, tuple[int | str, ...]]] = {
    "vit": {"pixel_values": ("b", 3, 16, 16), "labels": ("b",)},
    "wav2vec2": {"input_values": ("b", 4000), "labels": ("b",)},
    "whisper": {"input_features": ("b", 8, 24), "decoder_input_ids": ("b", "s"), "labels": ("b", "s")},
    "clip": {"input_ids": ("b", "s"), "pixel_values": ("b", 3, 16, 16)},
}


@pytest.mark.parametrize("name", SHAPES)
def test_inputs_follow_from_the_configuration(name: str) -> None:
    model = ZOO[name]
    captured = capture(model.source, task=model.task, batch=(1, 8), sequence=(1, 32))
    assert {spec.name: spec.dims for spec in captured.inputs} == SHAPES[name]


def test_tokens_go_into_an_encoder_and_a_decoder() -> None:
    """T5, which `integration.test_universality` captures with what is found here."""
    model = ZOO["t5"]
    specs, _ = _inputs(build(model.source, 0, None), model.task, None)
    tokens = ("b", "s")
    assert {spec.name: spec.dims for spec in specs} == dict.fromkeys(
        ("input_ids", "decoder_input_ids", "labels"), tokens
    )


def test_each_task_has_its_head() -> None:
    tasks = ("causal_lm", "masked_lm", "seq2seq_lm", "classification", "regression", "module_loss")
    assert [architecture_of(task) for task in tasks] == [*tasks[:4], "plain", "plain"]
    with pytest.raises(ModelError, match="transformers has no seq2seq_lm model for 'llama'"):
        capture(ConfigSource({"model_type": "llama"}, "seq2seq_lm"), task="seq2seq_lm")


def test_a_decoder_without_its_input_is_told() -> None:
    def two() -> nn.Module:
        return nn.Linear(4, 4)

    with pytest.raises(ModelError, match="needs an input 'decoder_input_ids'; given are input"):
        capture(FactorySource(two), task="seq2seq_lm", example_inputs={"input": ExampleInput(torch.zeros(2, 4))})


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * mask


@pytest.mark.parametrize("task", ["causal_lm", "masked_lm", "regression"])
def test_a_module_of_several_inputs_is_told_to_give_examples(task: Task) -> None:
    with pytest.raises(ModelError, match="its forward takes x, mask") as told:
        check(FactorySource(Pair), task=task)
    written = 'Pair(), {"x": torch.zeros(2, 8), "mask": torch.zeros(2, 8)}'
    assert f"return {written}" in str(told.value.hint)
    # What the sentence shows works.
    report = check(FactorySource(lambda: (Pair(), {name: torch.zeros(2, 8) for name in ("x", "mask")})), task="none")
    assert report.ok


@pytest.mark.parametrize("train", [True, False])
def test_experts_are_products_by_groups(train: bool) -> None:
    made = capture(ZOO["mixtral"].source, batch=(1, 8), sequence=(1, 32), train=train)
    layers = sum(node.op == "fusion.expert_linear" for node in made.graph.nodes)
    assert layers == 2 * 4, "two products in each of four layers"
    assert not any("gathered" in note for note in made.notes)


def test_recurrent_layers_are_operators_whose_states_are_cached() -> None:
    report = check(ZOO["mamba"].source, sequence=(1, 32))
    assert report.ok
    assert report.operators["fusion.linear_scan"] == 4
    assert report.cached_serving
    assert any("4 layers carry a state" in note for note in report.notes)
    assert report.lacking["torch"] == ()


@pytest.mark.parametrize("asked", [{"return_last_state": True}, {"cu_seqlens": torch.zeros(2)}])
def test_what_the_operators_do_not_have_is_refused(asked: dict[str, Any]) -> None:
    from transformers.models.mamba import modeling_mamba

    given = torch.zeros(1, 2, 3)
    module = modeling_mamba.MambaRMSNorm(4)
    original = modeling_mamba.mamba_selective_scan
    with semantic_layers(module):
        with pytest.raises(ModelError, match=f"asks its scan for {next(iter(asked))}"):
            modeling_mamba.mamba_selective_scan(
                given, given, torch.zeros(2, 4), torch.zeros(1, 4, 3), torch.zeros(1, 4, 3), **asked
            )
        assert modeling_mamba.mamba_selective_scan is not original
    assert modeling_mamba.mamba_selective_scan is original
