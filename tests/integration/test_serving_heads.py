"""Guesses of heads, which read the model's states from the stages: the same tokens as without, whatever they guess."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from fusionai.capture.capture import Captured
from fusionai.capture.heads import CapturedHead, eagle_head, featured, mtp_head
from fusionai.capture.models.eagle import eagle_files
from fusionai.capture.models.source import DirectorySource
from fusionai.capture.served import capture_served
from fusionai.execution.host import ComputeThread
from fusionai.serving.heads import HeadProposer
from fusionai.serving.interface import Generation, Sampling
from fusionai.serving.speculating import Proposer, Speculate
from fusionai.wire import messages as wire
from fusionai.wire.messages import ServeOptions
from harness.head_models import FIVE_STAGES, GLM, VOCABULARY, loaded_head, save_eagle_head, save_model_with_head
from harness.pool import peer_id
from harness.serving_pool import served, tokens_of
from harness.small_llama import captured_llama

pytestmark = pytest.mark.slow

COUNT = 24
KINDS = [Sampling(temperature=0), Sampling(temperature=0.6, seed=3, top_p=0.9), Sampling(seed=9, frequency_penalty=0.5)]


def prompts(count: int) -> list[tuple[int, ...]]:
    return [tuple((7 * place + 13 * number) % VOCABULARY for place in range(3 + 7 * number)) for number in range(count)]


ASKED = [
    Generation(prompt=prompt, max_tokens=COUNT, sampling=KINDS[number % len(KINDS)])
    for number, prompt in enumerate(prompts(5))
]


@dataclass(frozen=True)
class Model:
    captured: Captured
    head: CapturedHead


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model that repeats its last token nearly always, and a head that does so always."""
    directory = tmp_path_factory.mktemp("model")
    save_model_with_head(GLM, directory, copies=True)
    captured = capture_served(DirectorySource(directory))
    head = mtp_head(captured)
    assert head is not None
    return Model(captured, head)


@pytest.fixture
def proposer(model: Model) -> Iterator[HeadProposer]:
    compute = ComputeThread()
    yield guessing(model, compute)
    compute.close()


def guessing(model: Model, compute: ComputeThread, pages: int = 64) -> HeadProposer:
    options = ServeOptions(page_tokens=4, pages=pages, sessions=8, pass_tokens=16, retain=False)
    return HeadProposer(loaded_head(model.head, model.captured, options), compute)


def answers(
    model: Model,
    directory: Path,
    speculate: Speculate,
    proposer: Proposer | None = None,
    *,
    asked: Sequence[Generation] = ASKED,
    pool_ends: bool = False,
    stages: Sequence[tuple[int, int]] = FIVE_STAGES,
    kill: bool = False,
    in_turn: bool = False,
) -> tuple[list[list[int]], dict[str, float], int]:
    """Tokens, the engine's figures, and the passes that generated."""
    passes: set[int] = set()

    def seen(sender: str, receiver: str, message: wire.Message) -> None:
        if isinstance(message, wire.Pass) and message.wanted:
            passes.add(message.number)

    async def story() -> tuple[list[list[int]], dict[str, float]]:
        async with served(
            model.captured,
            directory,
            ((0, 2), (2, 5)) if pool_ends else stages,
            peers=[peer_id(0), peer_id(1)] if pool_ends else None,
            spares=int(kill),
            vocabulary=VOCABULARY,
            speculate=speculate,
            proposer=proposer,
            on_message=seen,
            states=model.head.reads,
            state_size=16 if model.head.reads == "hidden" else 48,
        ) as job:
            if in_turn:
                told = [await tokens_of(job.engine, generation) for generation in asked]
                return told, {**job.engine.status.extra, "hit": float(job.engine.status.prefix_hit_tokens)}
            streams = [asyncio.create_task(tokens_of(job.engine, generation)) for generation in asked]
            while kill and job.engine.status.emitted_tokens < len(asked) * COUNT // 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            if kill:
                job.pool.kill(peer_id(1))
            return await asyncio.gather(*streams), job.engine.status.extra

    told, extra = asyncio.run(story())
    return told, extra, len(passes)


@pytest.fixture(scope="module")
def plain(model: Model, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What is answered without guesses."""
    told, figures, _ = answers(model, tmp_path_factory.mktemp("plain"), "off")
    assert figures["proposed_tokens"] == 0
    return told


@pytest.mark.parametrize("kill", [False, True])
def test_a_head_changes_no_token(
    model: Model, plain: list[list[int]], proposer: HeadProposer, kill: bool, tmp_path: Path
):
    """Also if a stage is lost while it guesses."""
    told, figures, _ = answers(model, tmp_path, 3, proposer, kill=kill)
    assert told == plain
    assert 0 < figures["accepted_tokens"] < figures["proposed_tokens"], figures


def test_a_head_works_where_the_pool_has_the_models_own_head(
    model: Model, plain: list[list[int]], proposer: HeadProposer, tmp_path: Path
):
    told, figures, _ = answers(model, tmp_path, 3, proposer, pool_ends=True)
    assert told == plain
    assert figures["accepted_tokens"] > 0, figures


def test_texts_whose_beginning_is_cached_are_guessed_from_there(model: Model, proposer: HeadProposer, tmp_path: Path):
    """The states of those positions do not arrive again."""
    twice = [ASKED[4], ASKED[4]]
    without, figures, _ = answers(model, tmp_path / "off", "off", asked=twice, in_turn=True)
    assert figures["hit"] > 0
    told, figures, _ = answers(model, tmp_path / "on", 3, proposer, asked=twice, in_turn=True)
    assert told == without
    assert figures["hit"] > 0
    assert figures["accepted_tokens"] > 0, figures


def test_a_head_with_too_few_pages_guesses_for_some(model: Model, plain: list[list[int]], tmp_path: Path):
    compute = ComputeThread()
    told, figures, _ = answers(model, tmp_path, 3, guessing(model, compute, pages=16))
    compute.close()
    assert told == plain
    assert figures["accepted_tokens"] > 0, figures


@pytest.mark.parametrize("way", ["stages", "one", "pool"])
def test_an_eagle_head_reads_states_of_three_layers(way: str, tmp_path: Path):
    """Also if one stage has all layers, and so computes only wanted rows behind the last attention."""
    save_eagle_head(tmp_path / "head", 16, 48)
    files = eagle_files(tmp_path / "head")
    assert files is not None
    captured = featured(files, captured_llama())
    model = Model(captured, eagle_head(files, captured))
    one = ((0, 1), (1, 4), (4, 5))
    without, _, _ = answers(Model(captured_llama(), model.head), tmp_path / "off", "off")
    compute = ComputeThread()
    told, figures, _ = answers(
        model,
        tmp_path / "on",
        3,
        guessing(model, compute),
        pool_ends=way == "pool",
        stages=one if way == "one" else FIVE_STAGES,
    )
    compute.close()
    assert told == without
    assert 0 < figures["accepted_tokens"] < figures["proposed_tokens"], figures
