"""Fine-tuning on conversations over four stages: losses and weights of a plain transformers loop on the same rows."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fusionai.backends.torch.backend import TorchBackend
from fusionai.backends.torch.optimizers import make_optimizer
from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource
from fusionai.corpus.chat_source import ChatSource
from fusionai.corpus.recipe import recipe_from_table
from fusionai.corpus.source import open_source
from harness.pool import Data, Job, MemoryPool, Run, array
from harness.tiny_text import write_tiny_text

pytestmark = pytest.mark.slow

STEPS, MICROBATCHES, ROWS, LENGTH = 4, 4, 2, 96
WORDS = ["the", "pool", "answers", "from", "many", "machines", "weather", "Paris", "fine"]
TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}
{% else %}{{ message['content'] }}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}


@cache
def captured_llama(vocabulary: int) -> Captured:
    config = {**LLAMA, "vocab_size": vocabulary}
    return capture(ConfigSource(config), task="counted_lm", batch=(1, ROWS), sequence=(1, LENGTH))


def talk(number: int) -> list[dict[str, str]]:
    draw = np.random.default_rng(number)
    turns: list[dict[str, str]] = []
    for _ in range(int(draw.integers(1, 3))):
        for role, most in (("user", 4), ("assistant", 7)):
            turns.append({"role": role, "content": " ".join(draw.choice(WORDS, int(draw.integers(1, most))))})
    return turns


def chat_source(directory: Path, *, packing: bool) -> ChatSource:
    (directory / "model").mkdir()
    write_tiny_text(directory / "model")
    (directory / "own.jinja").write_text(TEMPLATE)
    (directory / "rows.jsonl").write_text("".join(json.dumps({"messages": talk(n)}) + "\n" for n in range(200)))
    table: dict[str, Any] = {
        "job": {"name": "t", "steps": STEPS, "seed": 3},
        "model": {"config": LLAMA},
        "data": {
            "files": ["rows.jsonl"],
            "format": "chat",
            "sequence_length": LENGTH,
            "tokenizer": {"path": "model"},
            "template": "own.jinja",
            "packing": packing,
        },
        "train": {"batch_size": ROWS * MICROBATCHES, "microbatches": MICROBATCHES, "learning_rate": 0.1},
    }
    source = open_source(recipe_from_table(table, directory / "job.toml"), directory / "tokens")
    assert isinstance(source, ChatSource)
    return source


def plain(model: nn.Module, done: Run, batches: list[list[dict[str, torch.Tensor]]]) -> list[float]:
    """As transformers' Trainer: every microbatch divides its sum by the labels of the whole step."""
    entries = {name.removeprefix("model/"): value for name, value in done.weights(0).items()}
    model.load_state_dict({key: torch.from_numpy(entries[key].copy()) for key in model.state_dict()})
    model.train()
    optimizer = make_optimizer(done.job.optimizer, list(model.parameters()))
    losses: list[float] = []
    for step, microbatches in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = done.job.learning_rate(step)
        items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in microbatches)
        values: list[float] = []
        for batch in microbatches:
            loss = model(**batch, num_items_in_batch=items).loss
            loss.backward()
            values.append(loss.item())
        assert done.job.clip_norm is not None
        nn.utils.clip_grad_norm_(model.parameters(), done.job.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(values))
    return losses


def their_rows(directory: Path, source: ChatSource) -> list[list[dict[str, torch.Tensor]]]:
    """The rows of every microbatch, made by transformers of the conversations alone: padded, with the mask of padding
    and of answers that its own template code gives."""
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    known: dict[tuple[int, ...], list[int]] = {}
    for number in range(200):
        made = tokenizer.apply_chat_template(
            talk(number), chat_template=TEMPLATE, return_dict=True, return_assistant_tokens_mask=True
        )
        known[tuple(made["input_ids"])] = made["assistant_masks"]
    batches: list[list[dict[str, torch.Tensor]]] = []
    for step in range(STEPS):
        batches.append([])
        for microbatch in range(MICROBATCHES):
            batch: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
            for row in array(source.microbatch(step, microbatch)["input_ids"]).tolist():
                ids = next(ids for ids in known if tuple(row[: len(ids)]) == ids and not any(row[len(ids) :]))
                left = LENGTH - len(ids)
                labels = [token if said else -100 for token, said in zip(ids, known[ids], strict=True)]
                batch["input_ids"].append([*ids, *[0] * left])
                batch["labels"].append([*labels, *[-100] * left])
                batch["attention_mask"].append([*[1] * len(ids), *[0] * left])
            batches[-1].append({name: torch.tensor(values) for name, values in batch.items()})
    return batches


def packed_rows(source: ChatSource) -> list[list[dict[str, torch.Tensor]]]:
    """What the source gives, with labels where transformers wants them."""
    batches: list[list[dict[str, torch.Tensor]]] = []
    for step in range(STEPS):
        batches.append([])
        for microbatch in range(MICROBATCHES):
            made = {
                name: torch.from_numpy(array(value).copy())
                for name, value in source.microbatch(step, microbatch).items()
            }
            labels = torch.full_like(made["labels"], -100)
            labels[:, 1:] = made["labels"][:, :-1]
            batches[-1].append({"input_ids": made["input_ids"], "labels": labels})
    return batches


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_the_losses_are_those_of_transformers(tmp_path: Path, packing: bool) -> None:
    source = chat_source(tmp_path, packing=packing)
    config = {**LLAMA, "vocab_size": source.tokenizer.vocabulary}
    captured = captured_llama(source.tokenizer.vocabulary)

    async def train() -> Run:
        async with MemoryPool(4, lambda: TorchBackend(device="cpu", threads=1)) as pool:
            job = Job(
                pool=pool,
                directory=tmp_path / "run",
                graph=captured.graph,
                state=captured.state,
                ranges=((0, 2), (2, 3), (3, 4), (4, 6), (6, 7)),
                owned=frozenset({4}),
                data=Data(lambda step, number: {k: array(v) for k, v in source.microbatch(step, number).items()}),
                steps=STEPS,
                microbatches=MICROBATCHES,
            )
            return await job.run()

    done = asyncio.run(train())
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    batches = packed_rows(source) if packing else their_rows(tmp_path, source)
    wanted = plain(model, done, batches)
    assert done.losses == pytest.approx(wanted, rel=1e-6)
    assert wanted[-1] < wanted[0]
    counts = [int((batch["labels"] != -100).sum()) for batch in batches[0]]
    assert len(set(counts)) > 1, "microbatches of equal counts would not show how the mean is made"
    weights = done.weights(STEPS)
    for key, value in model.state_dict().items():
        np.testing.assert_allclose(weights[f"model/{key}"], value.numpy(), rtol=0, atol=2e-6, err_msg=key)
