"""Models with states (short convolutions, state spaces, delta rules) served from caches over three peers of a pool in
memory: in batches, with prompts in pieces, and after kills, with the tokens of transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionai.scheduling.problem.types import Standby
from fusionai.serving import job as progress
from fusionai.serving.engine import ServingEngine
from fusionai.serving.interface import Generation, Sampling
from fusionai.wire import messages as wire
from fusionai.wire.messages import ServeOptions
from harness.patience import until
from harness.pool import peer_id
from harness.serving_pool import served, tokens_of
from harness.small_llama import captured_model, greedy, own_model

pytestmark = pytest.mark.slow

VOCABULARY = 61
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_SPACE = {"num_heads": 4, "head_dim": 8, "n_groups": 2, "state_size": 8, "chunk_size": 8, "num_hidden_layers": 3}
_SPACE |= {"vocab_size": VOCABULARY, "hidden_size": 16, "initializer_range": 0.4}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_KINDS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "mamba2": _SPACE,
    "mamba": {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 3, "state_size": 8},
    "lfm2": _TEXT | {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "block_ff_dim": 24},
    "qwen3_5_text": _TEXT | _DELTA | _KINDS | {"head_dim": 8},
}
THREE_PEERS = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))
"""Embedding; a layer each; norm and head."""
OPTIONS = ServeOptions(page_tokens=4, pages=120, sessions=6, pass_tokens=48)
ANSWER = 24
LONG = pytest.mark.long


def _prompts() -> list[tuple[int, ...]]:
    generator = np.random.default_rng(3)
    return [tuple(int(token) for token in generator.integers(3, VOCABULARY, length)) for length in (5, 70, 33)]


async def _answers(engine: ServingEngine) -> list[list[int]]:
    generations = [
        Generation(prompt=prompt, max_tokens=ANSWER, sampling=Sampling(temperature=0)) for prompt in _prompts()
    ]
    return list(await asyncio.gather(*(tokens_of(engine, one) for one in generations)))


@pytest.mark.parametrize("killed", ["answering", "reading"])
@pytest.mark.parametrize("kind", ["mamba2", "lfm2", pytest.param("mamba", marks=LONG),
                                  pytest.param("qwen3_5_text", marks=LONG)])  # fmt: skip
def test_tokens_are_transformers_also_after_a_kill(kind: str, killed: str, tmp_path: Path):
    """The second stage is lost while answers or prompts are under way: its standby gets states and caches from the rows
    that the stage before retains, and the other stages go back by one pass where they were ahead. Guesses were asked
    for, but states can't drop them, so every pass has one token of a text that answers."""
    config = {"model_type": kind, **FAMILIES[kind]}
    captured = captured_model(config)
    pieces: list[wire.Segment] = []

    def seen(_sender: str, _receiver: str, message: wire.Message) -> None:
        if isinstance(message, wire.Pass) and message.rebuild < 0 and message.consumer == 1:
            pieces.extend(message.segments)

    async def story() -> list[list[int]]:
        async with served(
            captured, tmp_path, THREE_PEERS, standbys=[Standby(stage=2, peer=peer_id(3))], spares=1, options=OPTIONS,
            vocabulary=VOCABULARY, chunk_tokens=16, tile_tokens=16, speculate=3, on_message=seen,
        ) as job:  # fmt: skip
            warm = lambda: any(isinstance(one, progress.WeightsLoaded) and one.standby for one in job.told)  # noqa: E731
            await until(warm)
            pieces.clear()
            answering = asyncio.create_task(_answers(job.engine))
            at = 10 if killed == "answering" else 1
            await until(lambda: job.engine.status.emitted_tokens >= at)
            job.pool.kill(peer_id(1))
            return await answering

    told = asyncio.run(story())
    model = own_model(captured, tmp_path / "owner", config)
    assert told == [greedy(model, prompt, ANSWER) for prompt in _prompts()]
    longest = [piece for piece in pieces if piece.start > 0]
    assert any(piece.length == 1 for piece in longest)
    assert any(piece.length > 1 for piece in longest), "a prompt came in several pieces"
    # A token costs one step: hardly more positions are computed than the texts have, rebuilt ones aside.
    assert sum(piece.length for piece in pieces) <= 3 * sum(len(prompt) + ANSWER for prompt in _prompts())
