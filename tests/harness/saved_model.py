"""A small model in Hugging Face layout on disk, what transformers says with it, and how a served one is asked."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers

from fusionai.corpus.tokens import train_tokenizer
from harness.live_pool import Process
from harness.patience import CEILING_S

TOKENS = 24


def saved_model(directory: Path) -> Path:
    """Four layers of a llama; its weights are wide, so that it does not repeat a token."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer = train_tokenizer(iter(["a pool of peers serves a model " * 40]), 300)
    for name, content in tokenizer.files.items():
        (directory / name).write_bytes(content)
    return directory


def greedy(model: Path, prompt: str) -> str:
    """What transformers says."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    asked = torch.tensor([tokenizer.encode(prompt)])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made = loaded.generate(
        asked, do_sample=False, min_new_tokens=TOKENS, max_new_tokens=TOKENS, eos_token_id=None, pad_token_id=0
    )
    return tokenizer.decode(made[0, asked.shape[1] :], skip_special_tokens=True)


def asked(url: str, prompt: str, model: str = "tiny") -> dict[str, Any]:
    """The answer of a served model, with its route."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "fusion_route": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=CEILING_S) as answer:
        return json.load(answer)


def heard(server: Process, words: str) -> None:
    """Starting five processes takes a busy machine a while."""
    found = server.wait_until(lambda: next((line for line in server.lines if words in line), None), 240.0)
    assert found is not None, f"{words!r} never came; said: {server.text}"


def stopped(server: Process) -> None:
    """Whatever became of it, it and its pool are gone."""
    if server.lives:
        server.interrupt()
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(timeout=CEILING_S)
    server.end()
