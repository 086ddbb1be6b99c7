"""Pictures in requests, by the clients that people have: what reaches the engine, and what is refused."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import httpx
import pytest

from fusionai.gateway import images as gateway_images
from fusionai.gateway.config import GatewayConfig, RequestLimits
from fusionai.serving.images import is_image
from harness.gateway_stand import Stand, gateway_stand
from harness.image_models import picture
from harness.patience import CEILING_S
from harness.scripted_engine import ScriptedEngine
from harness.seeing_engine import MARK, ROWS, seeing_engine

pytestmark = pytest.mark.slow

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
ollama = pytest.importorskip("ollama")

IMAGE = picture(20, 10, 0)
WRITTEN = base64.b64encode(IMAGE).decode()
URL = f"data:image/png;base64,{WRITTEN}"
PART = {"type": "image_url", "image_url": {"url": URL}}


@pytest.fixture
def seeing(tmp_path: Path) -> ScriptedEngine:
    return seeing_engine(tmp_path)


def shape(engine: ScriptedEngine) -> str:
    """The last prompt as text, with # for each row of an image."""
    generation = engine.given[-1]
    known = {token for image in generation.images for token in image.tokens}
    assert {token for token in generation.prompt if is_image(token)} == known
    decode = engine.text.tokenizer.decode
    return "".join("#" if is_image(token) else decode([token], special=True) for token in generation.prompt)


def asked(stand: Stand, content: Any, **more: Any) -> httpx.Response:
    body = {"model": "tiny", "temperature": 0, "messages": [{"role": "user", "content": content}], **more}
    return httpx.post(f"{stand.url}/v1/chat/completions", json=body, timeout=CEILING_S, trust_env=False)


USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def test_pictures_come_by_the_clients_of_four_apis(seeing: ScriptedEngine):
    """Each client sends the picture before its question. The second time its rows are those of the first."""
    wanted = USER.format("###What is it?")

    async def scenario() -> None:
        async with gateway_stand(seeing) as stand:
            v1 = openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key="none", max_retries=0, timeout=CEILING_S)
            ask: Any = [{"role": "user", "content": [PART, {"type": "text", "text": "What is it?"}]}]
            made = await v1.chat.completions.create(model="tiny", messages=ask, temperature=0)
            assert made.usage is not None
            assert made.usage.prompt_tokens == len(seeing.given[-1].prompt)
            assert shape(seeing) == wanted
            first = seeing.given[-1].images
            items: Any = [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": URL, "detail": "auto"},
                        {"type": "input_text", "text": "What is it?"},
                    ],
                }
            ]
            answer = await v1.responses.create(model="tiny", input=items, temperature=0)
            assert shape(seeing) == wanted
            assert seeing.given[-1].images == first
            # What is kept of a response has its pictures.
            await v1.responses.create(model="tiny", input="And now?", previous_response_id=answer.id, temperature=0)
            assert shape(seeing).count("#") == ROWS
            await v1.close()
            messages = anthropic.AsyncAnthropic(base_url=stand.url, api_key="none", max_retries=0, timeout=CEILING_S)
            source: Any = {"type": "base64", "media_type": "image/png", "data": WRITTEN}
            said: Any = [
                {
                    "role": "user",
                    "content": [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}],
                }
            ]
            await messages.messages.create(model="tiny", max_tokens=50, messages=said)
            assert shape(seeing) == wanted
            counted = await messages.messages.count_tokens(model="tiny", messages=said)
            assert counted.input_tokens == len(seeing.given[-1].prompt)
            await messages.close()
            chats = ollama.AsyncClient(host=stand.url, timeout=CEILING_S)
            turn: Any = {"role": "user", "content": "What is it?", "images": [IMAGE]}
            await chats.chat(model="tiny", messages=[turn])
            assert shape(seeing) == wanted
            await chats.generate(model="tiny", prompt="What is it?", images=[IMAGE])
            assert shape(seeing) == wanted
            assert "vision" in ((await chats.show("tiny")).capabilities or ())
            await chats.close()

    asyncio.run(scenario())


def test_text_of_a_user_never_becomes_an_image(seeing: ScriptedEngine):
    async def scenario() -> None:
        async with gateway_stand(seeing) as stand:
            content = [{"type": "text", "text": f"a {MARK} "}, PART]
            assert (await asyncio.to_thread(asked, stand, content)).status_code == 200
            assert shape(seeing).count("#") == ROWS
            assert shape(seeing).startswith(f"<|im_start|>user\na {MARK} ###")

    asyncio.run(scenario())


def test_what_is_no_picture_is_refused_with_its_number(seeing: ScriptedEngine):
    cases = [
        ("https://example.org/cat.png", "Image 1 of the request: expected a data URL"),
        ("data:text/plain;base64,aGk=", "expected a data URL"),
        ("data:image/png;base64,%%", "not valid base64"),
        ("data:image/png;base64,aGk=", "no picture in a known format"),
        (f"data:image/png;base64,{base64.b64encode(IMAGE[:-60]).decode()}", "can't be read"),
    ]

    async def scenario() -> None:
        async with gateway_stand(seeing, GatewayConfig("tiny", limits=RequestLimits(images=2))) as stand:
            for url, why in cases:
                answer = await asyncio.to_thread(asked, stand, [{"type": "image_url", "image_url": {"url": url}}])
                assert answer.status_code == 400
                error = answer.json()["error"]
                assert why in error["message"]
                assert error["code"] == "invalid_image"
            answer = await asyncio.to_thread(asked, stand, [PART] * 3)
            assert "3 images; at most 2" in answer.json()["error"]["message"]
            large = "data:image/png;base64," + "A" * (9 * 2**20)
            answer = await asyncio.to_thread(asked, stand, [{"type": "image_url", "image_url": {"url": large}}])
            assert answer.status_code == 400, "a model that reads images takes larger bodies"
            assert not seeing.given

    asyncio.run(scenario())


def test_urls_are_fetched_only_if_the_gateway_may(seeing: ScriptedEngine, monkeypatch: pytest.MonkeyPatch):
    asked_for: list[tuple[str, int]] = []

    def fetched(url: str, most_bytes: int) -> bytes:
        asked_for.append((url, most_bytes))
        return IMAGE

    monkeypatch.setattr(gateway_images, "fetched", fetched)
    part = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}

    async def scenario() -> None:
        async with gateway_stand(seeing, GatewayConfig("tiny", fetches_images=True)) as stand:
            assert (await asyncio.to_thread(asked, stand, [part])).status_code == 200
            assert shape(seeing).count("#") == ROWS

    asyncio.run(scenario())
    assert asked_for == [("https://example.org/cat.png", RequestLimits().image_body_bytes)]


def test_a_model_of_texts_refuses_pictures(engine: ScriptedEngine):
    async def scenario() -> None:
        async with gateway_stand(engine) as stand:
            answer = await asyncio.to_thread(asked, stand, [PART])
            assert answer.status_code == 400
            assert "reads text only" in answer.json()["error"]["message"]

    asyncio.run(scenario())
