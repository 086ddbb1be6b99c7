"""Models of images and text served over three peers of a pool in memory, with the tokens and log-probabilities that
transformers computes from the same pictures; also after a kill."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fusionai.capture.models.image_processor import ImageProcessor
from fusionai.client.serving.model import ServedFiles, ServedModel, open_model
from fusionai.scheduling.problem.types import Standby
from fusionai.serving import job as progress
from fusionai.serving.images import PlacedImage, is_image
from fusionai.serving.interface import Emitted, Generation, Sampling
from fusionai.wire.messages import ServeOptions
from harness.backend_kinds import Kinds
from harness.image_models import FAMILIES, opened, picture, write_image_model
from harness.patience import until
from harness.pool import peer_id
from harness.serving_pool import Served, answered, served, three_stages

pytestmark = pytest.mark.slow

PICTURES = (picture(56, 40, 0), picture(30, 64, 1))
CONTENT: list[dict[str, Any]] = [
    {"type": "text", "text": "Look: "}, {"type": "image"}, {"type": "text", "text": " and "}, {"type": "image"},
    {"type": "text", "text": " What differs?"},
]  # fmt: skip
CHAT = [{"role": "user", "content": CONTENT}]
ANSWER = 16
OPTIONS = ServeOptions(page_tokens=8, pages=120, sessions=6, pass_tokens=64)
LONG = pytest.mark.long
SHORT = ("llava_onevision", "qwen3_vl", "gemma3")
"""Tried always: the plainest case, the one with positions of three axes and features for several layers, and the one in
which positions of a picture see each other, in layers with and without windows."""


def _reference(directory: Path, model: ServedModel) -> tuple[list[int], list[int], list[float]]:
    """Return the prompt, the answer's tokens and their log-probabilities, by transformers."""
    config = transformers.AutoConfig.from_pretrained(directory)
    processor = ImageProcessor.load(directory, config)._processor
    template = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    text = processor.tokenizer.apply_chat_template(
        CHAT, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    inputs = processor(images=[opened(one) for one in PICTURES], text=[text], return_tensors="pt")
    module = transformers.AutoModelForImageTextToText.from_pretrained(directory).eval()
    with torch.no_grad():
        made = module.generate(
            **inputs, max_new_tokens=ANSWER, do_sample=False, return_dict_in_generate=True, output_logits=True,
            pad_token_id=0,
        )  # fmt: skip
    prompt = inputs["input_ids"][0].tolist()
    answer = made.sequences[0, len(prompt) :].tolist()
    scores = [torch.log_softmax(row[0].float(), -1) for row in made.logits]
    return prompt, answer, [float(row[token]) for row, token in zip(scores, answer, strict=True)]


async def _placed(model: ServedModel) -> list[PlacedImage]:
    assert model.texts.images is not None
    return [await model.texts.images.read(one, "") for one in PICTURES]


async def _answer(job: Served, model: ServedModel, prompt: tuple[int, ...], images: list[PlacedImage]) -> list[Emitted]:
    generation = Generation(
        prompt=prompt, max_tokens=ANSWER, sampling=Sampling(temperature=0), logprobs=0, images=tuple(images)
    )
    return await answered(job.engine, generation)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((name, "torch") if name in SHORT else pytest.param(name, "torch", marks=LONG) for name in FAMILIES),
        pytest.param("gemma3", "onnxruntime", marks=LONG),
        pytest.param("gemma3", "jax", marks=LONG),
    ],
)
def test_answers_about_pictures_are_transformers_also_after_a_kill(family: str, kind: str, tmp_path: Path):
    """Two pictures in one prompt, which comes in pieces. The same conversation is sent twice: the second time its
    beginning, pictures included, comes from the cache, and the second stage is lost while the answer is under way."""
    directory = write_image_model(family, tmp_path / "model")
    model = open_model(ServedFiles(directory, family))
    prompt, answer, scores = _reference(directory, model)

    async def story() -> tuple[tuple[int, ...], list[list[Emitted]], int]:
        images = await _placed(model)
        tokens = model.texts.chat_tokens(CHAT, images=images)
        async with served(
            model.captured, tmp_path, three_stages(model.graph), standbys=[Standby(stage=2, peer=peer_id(3))], spares=1,
            options=OPTIONS, vocabulary=model.vocabulary, chunk_tokens=32, context_tokens=400, speculate=2,
            backends=Kinds((kind,) * 4),
        ) as job:  # fmt: skip
            await until(lambda: any(isinstance(one, progress.WeightsLoaded) and one.standby for one in job.told))
            first = await _answer(job, model, tokens, images)
            hits = job.engine.status.prefix_hit_tokens
            again = asyncio.create_task(_answer(job, model, tokens, images))
            before = job.engine.status.emitted_tokens
            await until(lambda: job.engine.status.emitted_tokens >= before + 4)
            job.pool.kill(peer_id(1))
            return tokens, [first, await again], job.engine.status.prefix_hit_tokens - hits

    tokens, answers, hits = asyncio.run(story())
    assert model.texts.images is not None
    model.texts.images.close()
    marks = next(one for one in prompt if prompt.count(one) == sum(map(is_image, tokens)))
    assert [marks if is_image(token) else token for token in tokens] == prompt
    # What a model with states keeps of a text lies behind its prompt, and the last tokens are always read again.
    assert hits > 0 or model.states, "the second conversation begins with what is cached of the first"
    for given in answers:
        assert [one.token for one in given] == answer
        assert [one.logprob.logprob for one in given if one.logprob] == pytest.approx(scores, abs=1e-4)


def test_another_picture_gives_another_answer(tmp_path: Path):
    """A check on the test above: the answer depends on the pictures."""
    directory = write_image_model("llava_onevision", tmp_path / "model")
    model = open_model(ServedFiles(directory, "tiny"))
    assert model.texts.images is not None
    reader = model.texts.images

    async def story() -> list[list[float]]:
        found: list[list[float]] = []
        async with served(
            model.captured,
            tmp_path,
            three_stages(model.graph),
            options=OPTIONS,
            vocabulary=model.vocabulary,
            context_tokens=400,
        ) as job:
            for seed in (0, 7):
                images = [await reader.read(picture(56, 40, seed), ""), await reader.read(PICTURES[1], "")]
                given = await _answer(job, model, model.texts.chat_tokens(CHAT, images=images), images)
                found.append([one.logprob.logprob for one in given if one.logprob])
        return found

    one, other = asyncio.run(story())
    reader.close()
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.01


def test_a_lost_first_stage_gets_the_rows_again(tmp_path: Path):
    """All stages are on peers, so rows of images cross the network. The first one is lost while the answer is under
    way: its standby reads the text again, pictures included."""
    directory = write_image_model("llava_onevision", tmp_path / "model")
    model = open_model(ServedFiles(directory, "tiny"))
    _, answer, scores = _reference(directory, model)

    async def story() -> list[Emitted]:
        images = await _placed(model)
        tokens = model.texts.chat_tokens(CHAT, images=images)
        ranges = [(0, 2), (2, 4), (4, three_stages(model.graph)[-1][1])]
        async with served(
            model.captured, tmp_path, ranges, peers=[peer_id(number) for number in range(3)],
            standbys=[Standby(stage=0, peer=peer_id(3))], spares=1, options=OPTIONS, vocabulary=model.vocabulary,
            chunk_tokens=32, context_tokens=400,
        ) as job:  # fmt: skip
            await until(lambda: any(isinstance(one, progress.WeightsLoaded) and one.standby for one in job.told))
            answering = asyncio.create_task(_answer(job, model, tokens, images))
            await until(lambda: job.engine.status.emitted_tokens >= 4)
            job.pool.kill(peer_id(0))
            return await answering

    given = asyncio.run(story())
    assert model.texts.images is not None
    model.texts.images.close()
    assert [one.token for one in given] == answer
    assert [one.logprob.logprob for one in given if one.logprob] == pytest.approx(scores, abs=1e-4)


@LONG
def test_a_spare_that_reads_a_text_with_pictures_again_agrees(tmp_path: Path):
    """In a model whose positions of a picture see each other: a verifier without that would accuse the honest."""
    directory = write_image_model("gemma3", tmp_path / "model")
    model = open_model(ServedFiles(directory, "tiny"))

    async def story() -> list[progress.TextRechecked]:
        images = await _placed(model)
        tokens = model.texts.chat_tokens(CHAT, images=images)
        async with served(
            model.captured, tmp_path, three_stages(model.graph), standbys=[Standby(stage=2, peer=peer_id(3))], spares=1,
            options=OPTIONS, vocabulary=model.vocabulary, chunk_tokens=32, context_tokens=400, secret=bytes(range(32)),
        ) as job:  # fmt: skip
            await until(lambda: any(isinstance(one, progress.WeightsLoaded) and one.standby for one in job.told))
            await _answer(job, model, tokens, images)
            await until(lambda: any(isinstance(one, progress.TextRechecked) for one in job.told))
            assert not job.engine.status.faults
            return [one for one in job.told if isinstance(one, progress.TextRechecked)]

    checks = asyncio.run(story())
    assert model.texts.images is not None
    model.texts.images.close()
    assert {(one.stage, one.outcome) for one in checks} == {(2, "valid")}
