"""Boundaries of models of several families: the same by every way, tried tokens included."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, MistralConfig, PreTrainedConfig, Qwen3Config

from fusionai.privacy.subject import AttackedModel, Prefixes
from harness.attacked import tiny

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
}
FAMILIES: list[PreTrainedConfig] = [
    GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0),
    Gemma2Config(**SIZES, head_dim=16),
    MistralConfig(**SIZES, sliding_window=64),
    Qwen3Config(**SIZES, head_dim=16),
]


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.model_type)
def test_a_tried_token_has_the_boundary_it_has_in_the_text(config: PreTrainedConfig):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        attacked = AttackedModel(AutoModelForCausalLM.from_config(config))
    ids = torch.randint(40, (2, 7), generator=torch.Generator().manual_seed(2))
    seen = attacked.boundaries(ids)
    assert seen.shape == (3, 2, 7, 32)
    prefixes = Prefixes(attacked)
    prefixes.advance(ids[:, :6])
    tried = prefixes.tried(torch.arange(40).expand(2, -1))
    assert torch.allclose(tried[:, torch.arange(2), ids[:, 6]], seen[:, :, 6], atol=1e-4)
    assert torch.equal(attacked.boundary_at(1, input_ids=ids), seen[1])


def test_a_changed_boundary_changes_the_loss_where_it_is_changed():
    attacked = tiny()
    ids = torch.randint(40, (2, 7), generator=torch.Generator().manual_seed(2))
    plain = attacked.loss(ids)
    for depth in range(3):
        assert attacked.loss(ids, depth, lambda boundary: boundary) == plain
        assert attacked.loss(ids, depth, lambda boundary: boundary.flip(-1)) != plain


def test_windows_and_positions_bound_a_text():
    with torch.random.fork_rng():
        attacked = AttackedModel(AutoModelForCausalLM.from_config(FAMILIES[2]))
    assert attacked.longest_tokens == 64
