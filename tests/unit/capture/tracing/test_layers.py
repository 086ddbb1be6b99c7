"""Layers with semantic operators in them equal transformers' own loops, at every length around a block's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fusionai.backends.interface import Call
from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import Captured, capture
from fusionai.capture.checking.comparison import from_host
from fusionai.capture.checking.self_check import self_check
from fusionai.capture.models.source import ConfigSource
from fusionai.capture.models.state import to_host
from fusionai.capture.tracing.layers import semantic_layers
from fusionai.wire.messages import StageOptions
from harness.zoo import models

pytestmark = pytest.mark.slow

MINIMAX = next(model.source for model in models() if model.name == "minimax")
BLOCK = 8
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 19)


def lightning() -> torch.nn.Module:
    from transformers.models.minimax.configuration_minimax import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    torch.manual_seed(0)
    config = MiniMaxConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8, block_size=BLOCK, num_hidden_layers=4,
        layer_types=["linear_attention"] * 4,
    )  # fmt: skip
    return MiniMaxLightningAttention(config, 1)


@pytest.mark.parametrize("drawn", [False, True], ids=["as initialised", "decays that were rounded in files"])
def test_lightning_attention_equals_its_loop_over_blocks(drawn: bool) -> None:
    layer: Any = lightning()
    for buffer in layer.buffers() if drawn else ():
        buffer.copy_(buffer.bfloat16())
    for length in LENGTHS:
        x = torch.randn(2, length, 32)
        wanted, _ = layer(x, None, None)
        with semantic_layers(layer):
            found, _ = layer(x, None, None)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_padding_adds_nothing_to_lightning_attention() -> None:
    layer: Any = lightning()
    x, mask = torch.randn(1, 11, 32), torch.ones(1, 11)
    mask[:, :4] = 0
    wanted, _ = layer(x, None, mask)
    with semantic_layers(layer):
        found, _ = layer(x, None, mask)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def minimax() -> Captured:
    assert isinstance(MINIMAX, ConfigSource)
    return capture(ConfigSource({**MINIMAX.config, "num_hidden_layers": 2}), batch=(1, 8), sequence=(1, 32))


def test_a_model_with_lightning_attention_trains_as_its_own_module(minimax: Captured) -> None:
    assert any(node.op == "fusion.linear_scan" for node in minimax.graph.nodes)
    assert self_check(minimax).ok


def test_one_graph_of_lightning_attention_serves_every_length(minimax: Captured) -> None:
    program = TorchBackend("cpu").load(minimax.graph, grad_inputs=(), options=StageOptions())
    program.initialise()
    held = dict(minimax.state(minimax.owed))
    program.import_state((f"model/{key}", tensor) for key, tensor in held.items())
    text = np.arange(32) * 7 % 61 + 3
    whole: torch.Tensor | None = None
    for length in (32, *LENGTHS):
        ids = torch.from_numpy(text[None, :length].astype(np.int64))
        given = {"input_ids": ids, "position_ids": torch.arange(length)[None], "labels": ids}
        inputs = {name: to_host(given[name]) for name in minimax.graph.inputs}
        logits = from_host(program.forward(Call("eval", 0, 0), inputs, ["logits"])["logits"], torch.float32)
        whole = logits if whole is None else whole
        torch.testing.assert_close(logits, whole[:, :length], rtol=1e-4, atol=1e-5)


def test_the_forwards_of_transformers_come_back() -> None:
    layer = lightning()
    own = type(layer).forward
    with semantic_layers(layer):
        assert type(layer).forward is not own
    assert type(layer).forward is own
