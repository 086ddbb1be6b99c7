"""What an engine promises, one case after the other, over stages of a pool in memory: against transformers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusionai.capture.capture import Captured
from fusionai.primitives.errors import ExecutionError
from fusionai.scheduling.problem.types import Standby
from fusionai.serving import job as progress
from fusionai.serving.constraint import ConstraintCompiler, JsonSchema
from fusionai.serving.engine import ServingEngine
from fusionai.serving.interface import (
    Emitted,
    EngineBusy,
    Finished,
    Generation,
    PromptRead,
    PromptTooLong,
    Sampling,
    StreamEvent,
)
from fusionai.serving.pooling import Pooling, PoolingMode
from fusionai.wire import messages as wire
from fusionai.wire.messages import ServeOptions
from harness.patience import CEILING_S
from harness.pool import peer_id
from harness.serving_pool import Served, collect, served, tokens_of
from harness.small_llama import (
    SMALL_LLAMA,
    THREE_PEERS,
    VOCABULARY,
    captured_llama,
    captured_model,
    greedy,
    own_model,
    prompts,
)
from harness.tiny_text import write_tiny_text

pytestmark = pytest.mark.slow

GREEDY = Sampling(temperature=0)
DRAWN = Sampling(temperature=0.8, seed=11, top_p=0.95)
OWN_PAGES = 2
"""Of the probe."""


@asynccontextmanager
async def running(directory: Path, captured: Captured | None = None, **job: Any) -> AsyncIterator[Served]:
    ranges = job.pop("ranges", THREE_PEERS)
    async with served(captured or captured_llama(), directory, ranges, **{"vocabulary": VOCABULARY, **job}) as made:
        yield made


def ended(events: Sequence[StreamEvent]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


async def until_standbys_are_ready(job: Served) -> None:
    async with asyncio.timeout(CEILING_S):
        while not any(isinstance(one, progress.WeightsLoaded) and one.standby for one in job.told):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def answers(
    engine: ServingEngine, asked: Sequence[tuple[int, ...]], count: int, sampling: Sampling = GREEDY
) -> list[list[int]]:
    generations = [Generation(prompt=prompt, max_tokens=count, sampling=sampling) for prompt in asked]
    return list(await asyncio.gather(*(tokens_of(engine, one) for one in generations)))


async def emitted(engine: ServingEngine, tokens: int) -> None:
    async with asyncio.timeout(CEILING_S):
        while engine.status.emitted_tokens < tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def test_a_generation_that_is_left_frees_its_pages_at_once_and_others_go_on(tmp_path: Path):
    async def story() -> tuple[list[int], list[int]]:
        async with running(tmp_path, prefix_cache=False) as job:
            engine = job.engine
            other = asyncio.create_task(
                tokens_of(engine, Generation(prompt=prompts(1)[0], max_tokens=30, sampling=GREEDY))
            )
            left: list[int] = []
            before = 0
            async with aclosing(
                aiter(engine.submit(Generation(prompt=prompts(5)[4], max_tokens=90, sampling=GREEDY)))
            ) as stream:
                async for event in stream:
                    if isinstance(event, Emitted):
                        left.append(event.token)
                        if len(left) == 3:
                            before = engine.status.pages_free
                            break
            status = engine.status
            assert status.pages_free >= before + 5, "19 tokens of a prompt have five pages of four"
            assert status.running == 1
            told = await other
            assert engine.status.pages_free == engine.status.pages - OWN_PAGES
            return left, told

    left, told = asyncio.run(story())
    model = own_model(captured_llama(), tmp_path / "owner")
    assert left == greedy(model, prompts(5)[4], 3)
    assert told == greedy(model, prompts(1)[0], 30)


def test_a_deadline_ends_one_generation_and_says_so(tmp_path: Path):
    async def story() -> None:
        async with running(tmp_path) as job:
            late = Generation(prompt=prompts(1)[0], max_tokens=100, sampling=GREEDY, deadline_s=0.0)
            events, other = await asyncio.gather(
                collect(job.engine.submit(late)), answers(job.engine, prompts(2)[1:], 5)
            )
            assert ended(events).reason == "deadline"
            assert "deadline of 0 s" in ended(events).detail
            assert len(other[0]) == 5
            assert job.engine.status.running == 0

    asyncio.run(story())


def test_what_never_fits_and_what_does_not_fit_now_is_refused(tmp_path: Path):
    async def story() -> None:
        options = ServeOptions(page_tokens=4, pages=20, sessions=2, pass_tokens=32)
        async with running(tmp_path, options=options, queue=2) as job:
            engine = job.engine
            with pytest.raises(PromptTooLong, match="128 tokens together"):
                engine.submit(Generation(prompt=(1,) * 100, max_tokens=29))
            with pytest.raises(PromptTooLong, match="all caches together have 72"):
                engine.submit(Generation(prompt=(1,) * 60, max_tokens=30))
            with pytest.raises(ExecutionError, match="expected tokens from 0 to 60, got 61"):
                engine.submit(Generation(prompt=(1, VOCABULARY), max_tokens=3))
            with pytest.raises(PromptTooLong):
                await engine.embed([(1,) * 129], "")
            first = Generation(prompt=prompts(1)[0], max_tokens=20, sampling=GREEDY)
            asked = [replace(first, scope=scope) for scope in ("one", "two")]
            streams = [engine.submit(one) for one in asked]
            with pytest.raises(EngineBusy) as busy:
                streams += [engine.submit(asked[number % 2]) for number in range(9)]
            assert busy.value.retry_after_s > 0
            ends = [ended(await collect(stream)).reason for stream in streams]
            assert ends == ["length"] * len(streams)
            assert len((await answers(engine, prompts(1), 3))[0]) == 3

    asyncio.run(story())


@pytest.mark.parametrize("mode", ["mean", "lasttoken", "cls"])
def test_an_embedding_is_made_of_the_last_hidden_states(mode: PoolingMode, tmp_path: Path):
    asked = prompts(4)

    async def story() -> list[list[float]]:
        async with running(tmp_path, pooling=Pooling((mode,))) as job:
            beside = asyncio.create_task(answers(job.engine, prompts(2), 10))
            told = await job.engine.embed(asked, "somebody")
            assert len(await beside) == 2
            return told

    told = asyncio.run(story())
    model = own_model(captured_llama(), tmp_path / "owner")
    for prompt, embedding in zip(asked, told, strict=True):
        with torch.no_grad():
            states = model.model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
        states = states.double().numpy()
        made = {"mean": states.mean(axis=0), "lasttoken": states[-1], "cls": states[0]}[mode]
        np.testing.assert_allclose(embedding, made / np.linalg.norm(made), atol=1e-5)


def test_log_probabilities_of_prompt_and_answer_are_transformers(tmp_path: Path):
    prompt = prompts(5)[4]

    async def story() -> list[StreamEvent]:
        async with running(tmp_path) as job:
            await answers(job.engine, [prompt], 2)  # what is cached is read again: its rows are wanted
            asked = Generation(prompt=prompt, max_tokens=6, sampling=GREEDY, logprobs=3, prompt_logprobs=True)
            return await collect(job.engine.submit(asked))

    events = asyncio.run(story())
    read = next(event for event in events if isinstance(event, PromptRead))
    told = [event for event in events if isinstance(event, Emitted)]
    tokens = [*prompt, *(event.token for event in told)]
    model = own_model(captured_llama(), tmp_path / "owner")
    with torch.no_grad():
        levels = model(input_ids=torch.tensor([tokens])).logits[0].double().log_softmax(dim=-1).numpy()
    everything = [*read.logprobs, *(event.logprob for event in told)]
    assert [one.token for one in everything if one is not None] == tokens[1:]
    for level, one in zip(levels, everything, strict=False):
        assert one is not None
        assert one.logprob == pytest.approx(level[one.token], abs=1e-4)
        best = np.argsort(-level, kind="stable")[:3]
        assert [token for token, _ in one.top] == best.tolist()


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["fox", "dog"]}, "ok": {"type": "boolean"}},
    "required": ["kind", "ok"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("speculate", ["off", pytest.param(3, marks=pytest.mark.long)])
def test_a_model_without_sense_gives_json_that_fits(speculate: str | int, tmp_path: Path):
    texts = write_tiny_text(tmp_path)
    vocabulary = texts.tokenizer.vocabulary + 3
    captured = captured_model({**SMALL_LLAMA, "vocab_size": vocabulary})
    compiler = ConstraintCompiler(texts.tokenizer, vocabulary=vocabulary, stop_tokens=texts.stop_tokens)

    async def story() -> list[list[int]]:
        async with running(tmp_path / "job", captured, vocabulary=vocabulary, speculate=speculate) as job:
            form = JsonSchema(json.dumps(SCHEMA))
            asked = [
                Generation(
                    prompt=(5, 6, 7),
                    max_tokens=100,
                    sampling=Sampling(seed=seed, temperature=1.0, logit_bias=((texts.tokenizer.id_of("Ġ") or 0, -50),)),
                    stop_tokens=texts.stop_tokens,
                    constraint=compiler.compile_now(form),
                )
                for seed in range(3)
            ]
            return await asyncio.gather(*(tokens_of(job.engine, one) for one in asked))

    for tokens in asyncio.run(story()):
        value = json.loads(texts.tokenizer.decode(tokens))
        assert value["kind"] in ("fox", "dog")
        assert isinstance(value["ok"], bool)
        assert len(value) == 2
    compiler.close()


def test_drawn_tokens_depend_on_seed_and_prompt_alone(tmp_path: Path):
    """Not on others in the batch, nor on a machine that dies meanwhile; another seed gives other tokens."""
    mine = prompts(3)[2]

    async def story() -> tuple[list[int], list[int], list[int], list[int]]:
        standby = Standby(stage=2, peer=peer_id(3))
        async with running(tmp_path, standbys=[standby], spares=1, prefix_cache=False) as job:
            engine = job.engine
            (alone,) = await answers(engine, [mine], 24, DRAWN)
            crowd, *_ = await answers(engine, [mine, *prompts(5)], 24, DRAWN)
            (other,) = await answers(engine, [mine], 24, Sampling(temperature=0.8, seed=12, top_p=0.95))
            await until_standbys_are_ready(job)
            so_far = engine.status.emitted_tokens
            again = asyncio.create_task(answers(engine, [mine, *prompts(4)], 24, DRAWN))
            await emitted(engine, so_far + 30)
            job.pool.kill(peer_id(1))
            survived, *_ = await again
            return alone, crowd, survived, other

    alone, crowd, survived, other = asyncio.run(story())
    assert crowd == alone
    assert survived == alone
    assert other != alone


@pytest.mark.long
def test_a_long_prompt_is_read_in_chunks(tmp_path: Path):
    config = {**SMALL_LLAMA, "max_position_embeddings": 8192, "initializer_range": 0.3}
    captured = captured_model(config, longest=512)
    prompt = tuple(int(token) for token in np.random.default_rng(0).integers(0, VOCABULARY, 4096))
    lengths: set[int] = set()

    def seen(_sender: str, _receiver: str, message: wire.Message) -> None:
        if isinstance(message, wire.Pass):
            lengths.update(segment.length for segment in message.segments)

    async def story() -> list[list[int]]:
        options = ServeOptions(page_tokens=16, pages=300, sessions=4, pass_tokens=300)
        async with running(
            tmp_path, captured, options=options, chunk_tokens=256, context_tokens=4200, on_message=seen
        ) as job:
            return await answers(job.engine, [prompt, prompts(1)[0]], 8)

    told = asyncio.run(story())
    model = own_model(captured, tmp_path / "owner", config)
    assert told == [greedy(model, prompt, 8), greedy(model, prompts(1)[0], 8)]
    assert max(lengths) == 256


@pytest.mark.parametrize("speculate", ["off", pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.long
def test_windows_go_on_beyond_their_length_also_after_a_kill(speculate: str | int, tmp_path: Path):
    config = {**SMALL_LLAMA, "model_type": "mistral", "sliding_window": 6, "tie_word_embeddings": False}
    captured = captured_model(config)
    asked = [prompts(4)[3], prompts(1)[0]]

    async def story() -> list[list[int]]:
        standby = Standby(stage=2, peer=peer_id(3))
        async with running(
            tmp_path, captured, standbys=[standby], spares=1, prefix_cache=False, speculate=speculate
        ) as job:
            await until_standbys_are_ready(job)
            told = asyncio.create_task(answers(job.engine, asked, 40))
            await emitted(job.engine, 30)
            job.pool.kill(peer_id(1))
            return await told

    told = asyncio.run(story())
    model = own_model(captured, tmp_path / "owner", config)
    assert told == [greedy(model, prompt, 40) for prompt in asked]


@pytest.mark.parametrize("victim", [0, 2])
def test_the_pool_may_have_embedding_and_head(victim: int, tmp_path: Path):
    """Whoever has the first or the last stage may die."""
    ends = [(0, 2), (2, 3), (3, 5)]
    peers = [peer_id(0), peer_id(1), peer_id(2)]
    standbys = [Standby(stage=victim, peer=peer_id(3))]

    async def story() -> list[list[int]]:
        async with running(tmp_path, ranges=ends, peers=peers, standbys=standbys, spares=1) as job:
            await until_standbys_are_ready(job)
            told = asyncio.create_task(answers(job.engine, prompts(3), 20))
            await emitted(job.engine, 20)
            job.pool.kill(peers[victim])
            return await told

    told = asyncio.run(story())
    model = own_model(captured_llama(), tmp_path / "owner")
    assert told == [greedy(model, prompt, 20) for prompt in prompts(3)]


def test_a_known_prompt_is_not_read_again_but_by_others(tmp_path: Path):
    prompt = prompts(5)[4]

    async def cached(engine: ServingEngine, scope: str, asked: tuple[int, ...]) -> tuple[int, list[int]]:
        events = await collect(engine.submit(Generation(prompt=asked, max_tokens=6, sampling=GREEDY, scope=scope)))
        read = next(event for event in events if isinstance(event, PromptRead))
        return read.cached_tokens, [event.token for event in events if isinstance(event, Emitted)]

    async def story() -> list[tuple[int, list[int]]]:
        async with running(tmp_path) as job:
            engine = job.engine
            told = [
                await cached(engine, "one", prompt),
                await cached(engine, "one", prompt),
                await cached(engine, "another", prompt),
                await cached(engine, "one", (*prompt[:9], 3, 4)),
            ]
            assert engine.status.prefix_hit_tokens == sum(count for count, _ in told)
            return told

    told = asyncio.run(story())
    assert [count for count, _ in told] == [0, 16, 0, 8]
    model = own_model(captured_llama(), tmp_path / "owner")
    assert [tokens for _, tokens in told] == [greedy(model, prompt, 6)] * 3 + [greedy(model, (*prompt[:9], 3, 4), 6)]


def test_more_than_fit_wait_their_turn_and_nobody_is_passed_over(tmp_path: Path):
    """One scope asks for much, another a little later for little: it does not wait for all of the first."""
    order: list[str] = []

    async def one(engine: ServingEngine, scope: str, prompt: tuple[int, ...]) -> list[int]:
        told = await tokens_of(engine, Generation(prompt=prompt, max_tokens=12, sampling=GREEDY, scope=scope))
        order.append(scope)
        return told

    async def story() -> list[list[int]]:
        options = ServeOptions(page_tokens=4, pages=64, sessions=3, pass_tokens=32)
        async with running(tmp_path, options=options) as job:
            much = [asyncio.create_task(one(job.engine, "much", prompt)) for prompt in prompts(5) * 2]
            await emitted(job.engine, 1)
            assert job.engine.status.running == 2
            assert job.engine.status.queued == 8
            little = [asyncio.create_task(one(job.engine, "little", prompt)) for prompt in prompts(2)]
            return [await task for task in (*much, *little)]

    told = asyncio.run(story())
    model = own_model(captured_llama(), tmp_path / "owner")
    expected = [greedy(model, prompt, 12) for prompt in prompts(5)]
    assert told == [*expected, *expected, *expected[:2]]
    assert order.index("little") < 6
    assert order[-1] == "much"
