"""Requests whose every detail follows from a seed and a number, the model they are put to, and what it answers.

The model's weights are large enough for the best logits to lie apart and for texts not to repeat. The reference is
transformers' own forward over the whole text: every token must be what the same choice on those logits gives. Where it
is not, the tokens' logits must have been as good as equal; such exceptions are counted.

Neighbour: `harness.serving_siege` runs the requests.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from fusionai.serving.interface import Sampling
from fusionai.serving.sampling import TokenHistory, choose
from harness.tiny_text import write_tiny_text

CONTEXT: Final = 256
VOCABULARY: Final = 384
TINY: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.25,
}
TOLERANCE: Final = 1e-3
"""Logits nearer to each other than this, relative to the largest, may change places."""
TRIALS: Final = 256


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling


def asked(seed: int, number: int) -> Ask:
    """Every other one is greedy; of the others each has its own way of sampling."""
    choose_ = random.Random(f"{seed} {number}")
    prompt = tuple(choose_.randrange(VOCABULARY) for _ in range(choose_.randint(3, 60)))
    sampling = Sampling(temperature=0)
    if number % 2:
        kinds = (
            Sampling(temperature=0.8, top_p=0.95, seed=number),
            Sampling(temperature=1.2, top_k=40, seed=number),
            Sampling(temperature=1.0, min_p=0.02, frequency_penalty=0.3, seed=number),
        )
        sampling = choose_.choice(kinds)
    return Ask(number, prompt, choose_.randint(80, 180), sampling)


def write_model(directory: Path, **changes: Any) -> Path:
    """A Llama in Hugging Face layout, the same every time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directory.mkdir(parents=True)
    write_tiny_text(directory)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        LlamaForCausalLM(LlamaConfig(**{**TINY, **changes})).eval().save_pretrained(directory)
    return directory


@dataclass(slots=True)
class Comparison:
    """`exceptions`: tokens that other logits, as good as equal, would have given."""

    answers: int = 0
    tokens: int = 0
    exceptions: int = 0

    def __str__(self) -> str:
        return f"{self.answers} answers, {self.tokens} tokens as transformers', {self.exceptions} exceptions"


class Reference:
    """transformers' model of the same files."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
        """[tokens, vocabulary]: what each of `tokens` was chosen by."""
        text = [*prompt, *tokens]
        with torch.no_grad():
            rows = self._model(input_ids=torch.tensor([text])).logits[0].float().numpy()
        return rows[len(prompt) - 1 : len(text) - 1]

    def compare(self, asks: Sequence[tuple[Ask, Sequence[int]]]) -> Comparison:
        """Raises `AssertionError` at the first token that is wrong."""
        found = Comparison()
        for ask, tokens in asks:
            found.answers += 1
            history = TokenHistory(ask.prompt)
            for position, (row, token) in enumerate(zip(self.logits(ask.prompt, tokens), tokens, strict=True)):
                if choose(row, ask.sampling, history, position) != token:
                    assert _could_be(row, ask.sampling, history, position, token), (
                        f"request {ask.number}, token {position}: {token} instead of "
                        f"{choose(row, ask.sampling, history, position)}"
                    )
                    found.exceptions += 1
                found.tokens += 1
                history.add(token)
        return found


def _could_be(row: NDArray[np.float32], sampling: Sampling, history: TokenHistory, position: int, token: int) -> bool:
    """Whether logits that differ by no more than the tolerance give this token."""
    room = TOLERANCE * float(np.abs(row).max())
    if sampling.temperature == 0:
        return float(row.max() - row[token]) <= room
    noise = np.random.default_rng(position)
    moved = (row + noise.uniform(-room, room, len(row)).astype(np.float32) for _ in range(TRIALS))
    return any(choose(one, sampling, history, position) == token for one in moved)
