"""Serving by real processes on loopback: transformers' tokens, also when stages are killed under running streams."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fusionai.client.pool.local_pool import LocalPool
from fusionai.client.serving.job import ServeRequest
from fusionai.client.serving.serve import Served, serving
from fusionai.primitives.errors import ModelError
from fusionai.scheduling.problem.types import ServingNeeds
from fusionai.serving.interface import Emitted, Finished, Generation, GenerationPaused, Sampling
from fusionai.serving.pipelines import PipelinedEngine
from harness.patience import CEILING_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

VOCABULARY = 61
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.6,
    "eos_token_id": None,
    "bos_token_id": None,
}
TOKENS = 60


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("llama"), LLAMA, "w")


def model(made: Path, config: dict[str, object], letter: str) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **config)).save_pretrained(made)
    words = Tokenizer(WordLevel({f"{letter}{number}": number for number in range(VOCABULARY)}, unk_token=f"{letter}0"))
    words.save(str(made / "tokenizer.json"))
    return made


def prompt(number: int) -> tuple[int, ...]:
    return tuple((7 * place + 13 * number) % VOCABULARY for place in range(5 + 6 * number))


def expected(directory: Path, count: int) -> list[list[int]]:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory).eval()
    answers: list[list[int]] = []
    for number in range(count):
        ids = torch.tensor([prompt(number)])
        with torch.no_grad():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
        answers.append(made[0, ids.shape[1] :].tolist())
    return answers


def request(directory: Path, home: Path, *, spares: int) -> ServeRequest:
    def needs(positions: int | None, _can_keep: bool) -> ServingNeeds:
        assert positions == 256
        return ServingNeeds(context_tokens=128, sessions=6, cache_tokens=512, pass_tokens=64)

    return ServeRequest(model=str(directory), needs=needs, home=home, local=3, local_spares=spares, threads=1)


async def answer(engine: PipelinedEngine, number: int, seen: list[int], held: list[str]) -> list[int]:
    """`seen` counts tokens of all answers."""
    tokens: list[int] = []
    async for event in engine.submit(
        Generation(prompt=prompt(number), max_tokens=TOKENS, sampling=Sampling(temperature=0))
    ):
        match event:
            case Emitted(index=index, token=token):
                assert index == len(tokens)
                tokens.append(token)
                seen.append(token)
            case GenerationPaused(state=state):
                held.append(state)
            case Finished(reason=reason, detail=detail):
                assert reason == "length", detail
            case _:
                pass
    return tokens


def pool_of(served: Served) -> LocalPool:
    assert served.pool is not None
    return served.pool


async def until_standbys_are_ready(engine: PipelinedEngine) -> None:
    async with asyncio.timeout(CEILING_S):
        while not any(stage.spare and engine.is_warm(stage.stage) for stage in engine.status.stages):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.long
def test_a_killed_stage_changes_no_token_and_whoever_comes_back_lets_others_go_on(directory: Path, tmp_path: Path):
    """First a stage with a standby is killed, then one that nobody can take over: its machine has to come back."""

    async def story() -> tuple[list[list[int]], list[list[int]], list[str], list[float]]:
        async with serving(request(directory, tmp_path, spares=1), on_event=lambda event: None) as served:
            engine, pool = served.engine, pool_of(served)
            await until_standbys_are_ready(engine)
            seen: list[int] = []
            held: list[str] = []
            streams = [asyncio.create_task(answer(engine, number, seen, held)) for number in range(3)]
            while len(seen) < TOKENS // 2:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            victim = next(stage for stage in engine.status.stages if stage.spare)
            await pool.kill(victim.name)
            first = await asyncio.gather(*streams)
            seen.clear()
            held.clear()
            streams = [asyncio.create_task(answer(engine, number, seen, held)) for number in range(3)]
            while len(seen) < TOKENS // 2:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            second_victim = next(stage.name for stage in engine.status.stages if stage.name in pool.names.values())
            await pool.kill(second_victim)
            async with asyncio.timeout(CEILING_S):
                while "waiting" not in held:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert engine.status.state == "waiting"
            await pool.start_again(victim.name)
            second = await asyncio.gather(*streams)
            gaps = [note.gap_s for note in engine.status.faults if note.gap_s is not None]
            return first, second, held, gaps

    first, second, held, gaps = asyncio.run(story())
    answers = expected(directory, 3)
    assert first == answers
    assert second == answers
    assert held[-1] == "running"
    print("gaps", *(f"{gap:.2f} s" for gap in gaps))  # noqa: T201 - for whoever measures


@pytest.mark.long
def test_a_draft_model_guesses_in_the_owners_process(directory: Path, tmp_path: Path):
    """Here it is the model itself, which is always right; one with other tokens is refused."""

    async def story(draft: Path) -> tuple[list[int], dict[str, float]]:
        asked = dataclasses.replace(request(directory, tmp_path, spares=0), local=2, speculate=4, draft=str(draft))
        async with serving(asked, on_event=lambda event: None) as served:
            tokens = await answer(served.engine, 0, [], [])
            return tokens, served.engine.status.extra

    tokens, figures = asyncio.run(story(directory))
    assert tokens == expected(directory, 1)[0]
    assert figures["accepted_tokens"] > 0.9 * figures["proposed_tokens"] > 0
    with pytest.raises(ModelError, match="has a different tokenizer"):
        asyncio.run(story(model(tmp_path / "other", LLAMA, "v")))
