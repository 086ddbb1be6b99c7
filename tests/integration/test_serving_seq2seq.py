"""Encoder-decoder models served over three peers of a pool in memory, with the tokens and log-probabilities that
transformers' `generate` gives for the same sound and texts; also after a kill."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
import transformers

from fusionai.client.serving.model import ServedFiles, ServedModel, open_model
from fusionai.ir.graph import reads
from fusionai.scheduling.problem.types import Standby
from fusionai.serving import job as progress
from fusionai.serving.images import PlacedImage
from fusionai.serving.interface import Emitted, Generation, Sampling
from fusionai.wire.messages import ServeOptions
from harness.backend_kinds import Kinds
from harness.patience import until
from harness.pool import peer_id
from harness.seq2seq_models import FAMILIES, RATE_HZ, generated, sound, write_seq2seq_model
from harness.serving_pool import Served, answered, served, three_stages

pytestmark = pytest.mark.slow

TEXT = "The pool answers from many machines."
ANSWER = 16
OPTIONS = ServeOptions(page_tokens=8, pages=120, sessions=6, pass_tokens=64)
LONG = pytest.mark.long


def _reference(directory: Path, family: str) -> tuple[list[int], list[float]]:
    if family == "whisper":
        made = transformers.AutoFeatureExtractor.from_pretrained(directory)
        inputs = made(sound(1.5, 0), sampling_rate=RATE_HZ, return_tensors="pt")
        return generated(directory, dict(inputs), ANSWER, language="en", task="transcribe", return_timestamps=False)
    forced = int(
        "forced_bos_token_id" in FAMILIES[family].rules
    )  # it is one of the tokens that the decoder starts with
    tokens = transformers.AutoTokenizer.from_pretrained(directory)(TEXT, return_tensors="pt")
    given = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    answer, scores = generated(directory, given, ANSWER + forced)
    return answer[forced:], scores[forced:]


async def _read(model: ServedModel) -> tuple[PlacedImage, tuple[int, ...]]:
    """Return what the encoder read, and the start of the decoder."""
    source = model.texts.source
    assert source is not None
    if source.speech is None:
        return await source.read_text(model.texts.text_tokens(TEXT), ""), source.rules.start
    speech = source.speech
    assert speech.no_timestamps is not None
    start = (*source.rules.start, speech.languages["en"], speech.tasks["transcribe"], speech.no_timestamps)
    return await source.read_sound(sound(1.5, 0), ""), start


async def _answer(job: Served, model: ServedModel, rows: PlacedImage, start: tuple[int, ...]) -> list[Emitted]:
    source = model.texts.source
    assert source is not None
    generation = Generation(
        prompt=source.prompt(rows, start),
        max_tokens=ANSWER,
        sampling=Sampling(temperature=0),
        stop_tokens=model.texts.stop_tokens,
        logprobs=0,
        images=(rows,),
        constraint=source.constraint(start, model.vocabulary, model.texts.stop_tokens),
    )
    return await answered(job.engine, generation)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("whisper", "torch"),
        *(pytest.param(name, "torch", marks=LONG) for name in FAMILIES if name != "whisper"),
        pytest.param("whisper", "onnxruntime", marks=LONG),
        pytest.param("whisper", "jax", marks=LONG),
    ],
)
def test_answers_are_transformers_also_after_a_kill(family: str, kind: str, tmp_path: Path):
    """The same input is read twice: the second time its rows come from the cache, and the second stage is lost while
    the answer is under way."""
    directory = write_seq2seq_model(family, tmp_path / "model")
    answer, scores = _reference(directory, family)
    model = open_model(ServedFiles(directory, family))
    source = model.texts.source
    assert source is not None
    given = {node.block for node in model.graph.nodes if not {"input_ids", "image_rows"}.isdisjoint(reads(node))}
    assert given == {0}, "tokens and rows stay with the embedding"

    async def story() -> tuple[list[list[Emitted]], int]:
        rows, start = await _read(model)
        async with served(
            model.captured, tmp_path, three_stages(model.graph), standbys=[Standby(stage=2, peer=peer_id(3))], spares=1,
            options=msgspec.structs.replace(OPTIONS, whole=model.whole), vocabulary=model.vocabulary, chunk_tokens=32,
            context_tokens=200, speculate=2, backends=Kinds((kind,) * 4),
        ) as job:  # fmt: skip
            await until(lambda: any(isinstance(one, progress.WeightsLoaded) and one.standby for one in job.told))
            first = await _answer(job, model, rows, start)
            hits = job.engine.status.prefix_hit_tokens
            again = asyncio.create_task(_answer(job, model, rows, start))
            before = job.engine.status.emitted_tokens
            await until(lambda: job.engine.status.emitted_tokens >= before + 3)
            job.pool.kill(peer_id(1))
            return [first, await again], job.engine.status.prefix_hit_tokens - hits

    answers, hits = asyncio.run(story())
    source.close()
    assert hits > 0
    wanted = answer[: next((place for place, token in enumerate(answer) if token in model.texts.stop_tokens), ANSWER)]
    assert len(set(wanted)) > 1
    for given in answers:
        assert [one.token for one in given] == wanted
        assert [one.logprob.logprob for one in given if one.logprob] == pytest.approx(scores[: len(wanted)], abs=1e-4)
