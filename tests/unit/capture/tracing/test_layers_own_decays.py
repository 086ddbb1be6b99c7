"""Recurrent layers whose decays differ by channel equal transformers' own loops over positions, and indexers choose all
keys of texts that they see whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusionai.capture.capture import capture
from fusionai.capture.models.source import ConfigSource
from fusionai.capture.tracing.layers import semantic_layers
from harness.families import family_source

pytestmark = pytest.mark.slow

LENGTHS = (1, 2, 15, 16, 17, 70)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Holder(torch.nn.Module):
    """Makes the layers in its file known to `semantic_layers`."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer


@pytest.mark.parametrize("length", LENGTHS)
def test_kimis_delta_rule_is_transformers_own(length: int) -> None:
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi

    shape = (2, length, 3, 8)
    given = (drawn(*shape), drawn(*shape, seed=1), drawn(*shape, seed=2))
    gates = {"g": -drawn(*shape, seed=3).abs(), "beta": drawn(*shape[:3], seed=4).sigmoid()}
    wanted, _ = kimi.chunk_kimi_delta_attention(*given, **gates, use_qk_l2norm_in_kernel=True)
    with semantic_layers(Holder(kimi.KimiLinearRMSNorm(8))):
        found, _ = kimi.chunk_kimi_delta_attention(*given, **gates, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("layers", [2, 8])
def test_rwkv_is_transformers_own(length: int, layers: int) -> None:
    """Eight layers are divided by two after the sixth."""
    from transformers import RwkvConfig, RwkvForCausalLM

    torch.manual_seed(0)
    config = RwkvConfig(vocab_size=67, hidden_size=32, num_hidden_layers=layers, intermediate_size=48)
    module: Any = RwkvForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.25)
        ids = (torch.arange(length) * 7 % 61 + 3)[None]
        with semantic_layers(module):
            found = module(ids, use_cache=False).logits
        module.rwkv.layers_are_rescaled = False
        wanted = module(ids, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", LENGTHS)
def test_gated_recurrences_are_transformers_own(length: int) -> None:
    from transformers import RecurrentGemmaConfig
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

    layer: Any = RecurrentGemmaRglru(
        RecurrentGemmaConfig(hidden_size=32, lru_width=32, num_attention_heads=4, num_hidden_layers=3)
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.25)
        x, positions = drawn(2, length, 32), torch.arange(length)[None]
        layer.recurrent_states = None
        wanted = layer(x, positions)
        layer.recurrent_states = None
        with semantic_layers(layer):
            found = layer(x, positions)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_graph_with_an_indexer_is_of_texts_that_it_sees_whole() -> None:
    config = {**family_source("deepseek_v32").config, "index_topk": 24}
    made = capture(ConfigSource(config), batch=(1, 2), sequence=(1, 64), train=False)
    assert made.graph.symbols["s"] == (1, 24)
    assert "Sequences are limited to the model's 24 positions." in made.notes
    assert made.attention_nodes == made.attention_layers
    assert not any("topk" in node.op for node in made.graph.nodes if "indexer" in node.path)
