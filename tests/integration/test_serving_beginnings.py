"""Conversations on models whose layers keep windows or states: each turn begins with what the stages kept of the last
one's prompt, instructions that several share are read once, and tokens are those of transformers, also after a kill."""

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
from fusionai.wire.messages import ServeOptions
from harness.patience import CEILING_S
from harness.pool import peer_id
from harness.serving_pool import served, tokens_of
from harness.small_llama import captured_model, greedy, own_model

pytestmark = pytest.mark.slow

VOCABULARY, ANSWER = 61, 10
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8,
}  # fmt: skip
_SPACE = {"num_heads": 4, "head_dim": 8, "n_groups": 2, "state_size": 8, "chunk_size": 8, "num_hidden_layers": 3}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": _TEXT | {"sliding_window": 24, "query_pre_attn_scalar": 8},
    "mamba2": {"vocab_size": VOCABULARY, "hidden_size": 16, "initializer_range": 0.4, **_SPACE},
    "lfm2": _TEXT | {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "block_ff_dim": 24},
    "llama": _TEXT,
}
"""Windows and all positions in turn; states alone; states beside pages; pages alone, which are shared as they are."""
THREE_PEERS = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))
LONG = pytest.mark.long


def drawn(length: int, seed: int) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(3, VOCABULARY, length))


async def turn(engine: ServingEngine, prompt: tuple[int, ...]) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt were not read again."""
    before = engine.status.prefix_hit_tokens
    answer = await tokens_of(engine, Generation(prompt=prompt, max_tokens=ANSWER, sampling=Sampling(temperature=0)))
    return answer, engine.status.prefix_hit_tokens - before


@pytest.mark.parametrize(("kind", "killed"), [
    ("gemma2", True), ("mamba2", False), pytest.param("gemma2", False, marks=LONG),
    pytest.param("mamba2", True, marks=LONG), pytest.param("lfm2", False, marks=LONG),
    pytest.param("lfm2", True, marks=LONG), pytest.param("llama", False, marks=LONG),
])  # fmt: skip
def test_a_turn_reads_what_is_new(kind: str, killed: bool, tmp_path: Path):
    """Two conversations of three turns with common instructions. `killed`: a stage is lost before the last turns."""
    config = {"model_type": kind, **FAMILIES[kind]}
    captured = captured_model(config)
    instructions = drawn(100, 1)
    asked: list[tuple[tuple[int, ...], list[int], int]] = []

    async def story() -> None:
        async with served(
            captured, tmp_path, THREE_PEERS, standbys=[Standby(stage=2, peer=peer_id(3))], spares=1,
            options=ServeOptions(page_tokens=4, pages=480, sessions=9, pass_tokens=48),
            vocabulary=VOCABULARY, chunk_tokens=32, tile_tokens=16, context_tokens=400,
        ) as job:  # fmt: skip
            async with asyncio.timeout(CEILING_S):
                while not any(isinstance(one, progress.WeightsLoaded) and one.standby for one in job.told):  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
            texts = dict.fromkeys((2, 3), instructions)
            for number in range(3):
                if number == 2 and killed:
                    job.pool.kill(peer_id(1))
                for seed, text in texts.items():
                    prompt = (*text, *drawn(80, 10 * seed + number))
                    answer, known = await turn(job.engine, prompt)
                    asked.append((prompt, answer, known))
                    texts[seed] = (*prompt, *answer)
            if not killed:
                prompt = (*instructions, *drawn(30, 99))
                asked.append((prompt, *await turn(job.engine, prompt)))

    asyncio.run(story())
    model = own_model(captured, tmp_path / "owner", config)
    for prompt, answer, _ in asked:
        assert answer == greedy(model, prompt, ANSWER)
    known = [known for _, _, known in asked]
    # Of prompts of 180, 270 and 360 tokens, in tiles of 16 and without the last 17. The second conversation branches
    # off within the first, where a copy is taken then. Pages keep the answers as well.
    expected = [0, 100, 188, 188, 276, 276, 100] if kind == "llama" else [0, 0, 160, 160, 240, 240, 96]
    assert known[:4] == expected[:4]
    # Copies are lost with a machine, and taken again.
    assert killed or known == expected
