"""Encoder-decoder models behind the gateway: speech and texts by OpenAI's client, over a pool in memory."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
import transformers
from numpy.typing import NDArray

from fusionai.client.serving.model import ServedFiles, ServedModel, open_model
from fusionai.gateway.app import Gateway
from fusionai.gateway.config import GatewayConfig
from fusionai.wire.messages import ServeOptions
from harness.gateway_stand import listening
from harness.patience import CEILING_S
from harness.seq2seq_models import RATE_HZ, WINDOW_S, generated, sound, write_seq2seq_model
from harness.serving_pool import served, three_stages

pytestmark = pytest.mark.slow
openai = pytest.importorskip("openai")

OPTIONS = ServeOptions(page_tokens=8, pages=200, sessions=6, pass_tokens=64)
TEXT = "The pool answers from many machines."


@asynccontextmanager
async def gateway(model: ServedModel, directory: Path) -> AsyncIterator[str]:
    """The address of a gateway over three machines."""
    async with AsyncExitStack() as stack:
        pool = served(
            model.captured, directory, three_stages(model.graph), options=OPTIONS, vocabulary=model.vocabulary,
            chunk_tokens=32, context_tokens=200,
        )  # fmt: skip
        job = await stack.enter_async_context(pool)
        app = Gateway(GatewayConfig("tiny"), job.engine, model.texts)
        yield (await stack.enter_async_context(listening(app)))[0]
    assert model.texts.source is not None
    model.texts.source.close()


def written(samples: NDArray[np.float32], rate_hz: int = RATE_HZ, form: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format=form)
    return file.getvalue()


def client(url: str) -> Any:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=CEILING_S)


def heard(directory: Path, samples: NDArray[np.float32], **more: Any) -> list[int]:
    """The tokens that transformers writes down, without those that end it."""
    extractor = transformers.AutoFeatureExtractor.from_pretrained(directory)
    inputs = dict(extractor(samples, sampling_rate=RATE_HZ, return_tensors="pt"))
    answer, _ = generated(directory, inputs, None, return_timestamps=False, **more)
    return answer[: answer.index(258)] if 258 in answer else answer


@pytest.mark.long
def test_speech_is_written_down_by_openais_client(tmp_path: Path):
    """Two windows; the second one is shorter. Language given and detected; every form of the answer; refusals."""
    directory = write_seq2seq_model("whisper", tmp_path / "model")
    samples = np.round(sound(WINDOW_S + 1, 3) * 2**12).astype(np.float32) / 2**15  # numbers that WAV holds
    windows = samples[: WINDOW_S * RATE_HZ], samples[WINDOW_S * RATE_HZ :]
    wanted = [heard(directory, window, language="de", task="transcribe") for window in windows]
    translated = heard(directory, windows[0], task="translate")
    model = open_model(ServedFiles(directory, "tiny"))
    decode = model.texts.tokenizer.decode

    async def scenario() -> None:
        async with gateway(model, tmp_path) as url, client(url) as v1:
            speech = v1.audio
            given: dict[str, Any] = {"model": "tiny", "file": ("a.wav", written(samples)), "language": "de"}
            report = await speech.transcriptions.create(**given, response_format="verbose_json")
            assert [list(segment.tokens) for segment in report.segments] == wanted
            assert [(segment.start, segment.end) for segment in report.segments] == [(0.0, 2.0), (2.0, 3.0)]
            assert (report.language, report.duration) == ("de", 3.0)
            text = " ".join(part.strip() for part in map(decode, wanted) if part.strip())
            assert (await speech.transcriptions.create(**given)).text == text == report.text
            captions = await speech.transcriptions.create(**given, response_format="srt")
            assert captions.startswith("1\n00:00:00,000 --> 00:00:02,000\n")
            captions = await speech.transcriptions.create(**given, response_format="vtt")
            assert captions.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:02.000\n")
            one = {"model": "tiny", "file": ("a.flac", written(windows[0], form="FLAC"))}
            with pytest.warns(DeprecationWarning, match="deprecated"):  # the client's own
                assert (await speech.translations.create(**one)).text == decode(translated).strip()
            await asyncio.to_thread(refused, url, given["file"][1])

    asyncio.run(scenario())


def refused(url: str, file: bytes) -> None:
    """What the gateway of a model of speech refuses, each with a reason."""

    def asked(path: str = "transcriptions", data: bytes = file, **fields: str) -> httpx.Response:
        return httpx.post(
            f"{url}/v1/audio/{path}", data={"model": "tiny", **fields}, files={"file": ("a", data)}, trust_env=False,
            timeout=CEILING_S,
        )  # fmt: skip

    for answer, word in (
        (asked(data=b"no sound"), "no sound that can be read"),
        (asked(language="tlh"), "no language"),
        (asked(stream="true"), "`stream` is not supported"),
        (asked(response_format="diarized_json"), "diarized_json"),
        (asked(model="other"), "does not exist"),
        (asked(temperature="warm"), "temperature"),
        (httpx.post(f"{url}/v1/audio/transcriptions", data={"model": "tiny"}, trust_env=False), "multipart"),
        (
            httpx.post(
                f"{url}/v1/chat/completions", json={"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]},
                trust_env=False,
            ),
            "gives no text",
        ),
    ):  # fmt: skip
        assert answer.status_code in (400, 404, 415), answer.text
        assert word in answer.json()["error"]["message"]
    answer = asked(language="en", colour="blue")
    assert (answer.status_code, answer.headers["x-fusion-ignored"]) == (200, "colour")


@pytest.mark.long
def test_texts_are_answered_by_openais_client(tmp_path: Path):
    """A chat and a completion have the tokens of transformers; a model's rules hold for both."""
    directory = write_seq2seq_model("bart", tmp_path / "model")
    tokens = transformers.AutoTokenizer.from_pretrained(directory)(TEXT, return_tensors="pt")
    answer, _ = generated(directory, {"input_ids": tokens["input_ids"]}, 21)
    model = open_model(ServedFiles(directory, "tiny"))
    wanted = model.texts.tokenizer.decode(answer[1:])

    async def scenario() -> None:
        async with gateway(model, tmp_path) as url, client(url) as v1:
            chat: Any = [{"role": "user", "content": TEXT}]
            made = await v1.chat.completions.create(model="tiny", messages=chat, max_tokens=20)
            assert made.choices[0].message.content == wanted
            plain = await v1.completions.create(model="tiny", prompt=TEXT, max_tokens=20)
            assert plain.choices[0].text == wanted
            parts = [
                part.choices[0].delta.content or ""
                async for part in await v1.chat.completions.create(
                    model="tiny", messages=chat, max_tokens=20, stream=True
                )
                if part.choices
            ]
            assert "".join(parts) == wanted
            with pytest.raises(openai.BadRequestError, match="reads 64 tokens at most"):
                await v1.completions.create(model="tiny", prompt=TEXT * 3)
            with pytest.raises(openai.BadRequestError, match="places for 62 tokens"):
                await v1.completions.create(model="tiny", prompt=TEXT, max_tokens=63)
            with pytest.raises(openai.BadRequestError, match="no texts of speech"):
                await v1.audio.transcriptions.create(model="tiny", file=("a.wav", written(sound(1, 0))))

    asyncio.run(scenario())
