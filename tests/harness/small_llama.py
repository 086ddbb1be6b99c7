"""A small random Llama: captured, and transformers' own with the weights that a pool serves. Decides its sizes, and
those of small models with states."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource
from harness.serving_pool import model_weights

VOCABULARY = 61
LAYERS = 3
SMALL_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.6,
}
SMALL_MAMBA: dict[str, Any] = {
    "model_type": "mamba",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "state_size": 4,
    "num_hidden_layers": LAYERS,
    "initializer_range": 0.6,
}
SMALL_MAMBA2: dict[str, Any] = {**SMALL_MAMBA, "model_type": "mamba2", "num_heads": 4, "head_dim": 8, "n_groups": 2}
THREE_PEERS = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))
"""Embedding; a layer each; norm and head."""


@cache
def captured_llama() -> Captured:
    return captured_model(SMALL_LLAMA)


def captured_model(config: dict[str, Any], longest: int = 128) -> Captured:
    return capture(ConfigSource(config), batch=(1, 4), sequence=(1, longest), train=False)


def own_model(captured: Captured, directory: Path, config: dict[str, Any] | None = None) -> nn.Module:
    """transformers' model, with the weights of `captured` laid down in `directory`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(config or SMALL_LLAMA))).eval()
    weights = model_weights(captured, directory)
    state = {}
    for spec in weights.specs:
        tensor = weights.read(spec)
        state[spec.key] = torch.frombuffer(bytearray(tensor.data), dtype=torch.float32).reshape(tensor.shape)
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model


def greedy(model: nn.Module, prompt: tuple[int, ...], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return made[0, len(prompt) :].tolist()


def prompts(count: int) -> list[tuple[int, ...]]:
    return [tuple((7 * place + 13 * number) % VOCABULARY for place in range(3 + 4 * number)) for number in range(count)]
