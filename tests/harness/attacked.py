"""A decoder of random weights that is small enough to be attacked in a blink."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fusionai.privacy.subject import AttackedModel

VOCABULARY = 150


def tiny(seed: int = 3, layers: int = 2, width: int = 32) -> AttackedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=2,
            initializer_range=0.2,
        )
        return AttackedModel(LlamaForCausalLM(config))
