"""A small real language model, trained during the audit, so that an audit needs no download and no private model.

Decides its shape and training schedule. Attacks on it measure what any public model of this kind would leak: recovery
needs a known model, not a good one. Only the loss that a defence costs needs a good one. `client.audit` provides the
text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from fusionai.privacy.subject import AttackedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallModel:
    """Shape of a Llama-type model and its training: `steps` of `rows` texts of `tokens` tokens."""

    layers: int = 4
    width: int = 96
    steps: int = 400
    rows: int = 16
    tokens: int = 128
    learning_rate: float = 3e-3
    seed: int = 7

    @property
    def trained_tokens(self) -> int:
        return self.steps * self.rows * self.tokens


def train_small_model(
    shape: SmallModel, vocabulary: int, batches: Iterator[Tensor], device: str, on_step: Callable[[int, float], None]
) -> AttackedModel:
    """Train the model. `batches` yields [rows, tokens] without end; `on_step` is called with the step and its loss."""
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.width * 8 // 3 // 8 * 8,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": max(2, shape.width // 32),
        "num_key_value_heads": max(2, shape.width // 32),
        "max_position_embeddings": 1024,
        "initializer_range": 0.04,
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.seed)
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    cast(nn.Module, model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=shape.learning_rate, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=shape.learning_rate, total_steps=shape.steps, pct_start=min(0.3, 20 / shape.steps)
    )
    for step in range(1, shape.steps + 1):
        ids = next(batches)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        on_step(step, float(loss.detach()))
    return AttackedModel(model)


def batches_of(stream: Tensor, rows: int, tokens: int, seed: int) -> Iterator[Tensor]:
    """Yield batches [rows, tokens] from random places in `stream`, without end."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(tokens, device=stream.device)
    while True:
        starts = torch.randint(len(stream) - tokens, (rows, 1), generator=generator).to(stream.device)
        yield stream[starts + offsets]
