"""What the rivals of `benchmarks/recovery.py` train: the demo's model on text of Python's standard library.

Nothing of this project runs here, so that it also works where only torch, transformers and torchft are installed.
"""

from __future__ import annotations

import json
import random
import sysconfig
import time
from pathlib import Path

import torch
from transformers import LlamaConfig

ROWS, LENGTH = 8, 128
LEARNING_RATE = 2e-3


def config(layers: int) -> LlamaConfig:
    """The sizes of `fusion demo`; its tokenizer is replaced by bytes, the vocabulary's size is kept."""
    return LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.04,
        attn_implementation="sdpa",
    )


class Text:
    """Rows of bytes; which ones depends on the step alone."""

    def __init__(self) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        joined = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:60])
        self._bytes = torch.frombuffer(bytearray(joined), dtype=torch.uint8)

    def batch(self, step: int) -> torch.Tensor:
        """int64 [ROWS, LENGTH]."""
        choose = random.Random(step)
        starts = [choose.randrange(len(self._bytes) - LENGTH) for _ in range(ROWS)]
        return torch.stack([self._bytes[start : start + LENGTH] for start in starts]).long()


def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)


def say(event: str, **figures: object) -> None:
    """One line of JSON on standard output; `at_s` is on the machine's monotonic clock, comparable across processes."""
    print(json.dumps({"event": event, "at_s": time.monotonic(), **figures}), flush=True)
