"""The page in a real browser without a window: it streams, shows the pool, is reached by keyboard, harms no reader."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fusionai.gateway.config import GatewayConfig, KeyRing
from fusionai.serving.interface import FaultNote, Generation
from harness.browser import DESK, PHONE, browsed, needs_browser, serious
from harness.gateway_stand import gateway_stand, until
from harness.image_models import picture
from harness.scripted_engine import ScriptedEngine
from harness.seeing_engine import seeing_engine
from harness.tiny_text import TEMPLATE, write_tiny_text

pytestmark = [pytest.mark.slow, needs_browser]


@pytest.fixture(scope="module")
def engine_text(tmp_path_factory: pytest.TempPathFactory):
    return write_tiny_text(tmp_path_factory.mktemp("tiny-text"))


@pytest.fixture
def engine(engine_text: Any) -> ScriptedEngine:
    answer = "Together.\n```\none machine\n```\nThat is all."
    return ScriptedEngine(engine_text, pause_s=0.005, hold_at=12, script=lambda prompt, generation: answer)


async def ask(page: Any, text: str) -> None:
    await page.locator("#state[data-state=ready]").wait_for()
    await page.fill("#prompt", text)
    await page.keyboard.press("Enter")
    await page.locator(".turn.user .words", has_text=text).wait_for()
    await page.locator(".turn:last-child .actions", has_text="Try again").wait_for()


def test_an_answer_streams_and_its_way_is_shown(engine: ScriptedEngine):
    async def scenario() -> None:
        async with gateway_stand(engine) as stand, browsed(stand.url) as page:
            await page.locator("#state[data-state=ready]").wait_for()
            assert await page.locator("#model").inner_text() == "tiny"
            assert await page.locator("#stages .name").all_inner_texts() == ["owner", "laptop", "tower", "owner"]
            # As the faults and the terminal number them.
            numbers = await page.locator("#stages li").evaluate_all("all => all.map(one => one.dataset.stage)")
            assert numbers == ["0", "1", "2", "3"]
            assert "attic stands by" in await page.locator("#stages li:nth-child(3)").inner_text()
            # By keyboard alone: the first stop leads past everything, the field sends with Enter.
            await page.keyboard.press("Tab")
            await page.locator(".skip:focus").wait_for()
            await page.keyboard.press("Enter")
            await page.locator("#prompt:focus").wait_for()
            await page.keyboard.type("How?")
            await page.keyboard.press("Enter")
            await page.locator(".turn.assistant .facts").wait_for()
            assert await page.locator(".turn.assistant pre").inner_text() == "one machine\n"
            facts = await page.locator(".turn.assistant .facts").inner_text()
            assert facts.startswith("owner → laptop → tower → owner")
            assert "attic takes its place" in facts
            ways = await page.locator("#hops .who").all_inner_texts()
            assert ways == ["0 owner", "1 laptop", "2 tower", "3 owner"]
            # Read out once, when it is whole.
            announced = await page.locator("#announce").text_content()
            assert announced == "Answer: Together.\n```\none machine\n```\nThat is all."
            engine.faults = (FaultNote(1_700_000_000.0, "tower was lost; attic took its place.", 0.62),)
            await page.locator("#story li").wait_for()
            assert "after 620 ms" in await page.locator("#story li").inner_text()
            engine.state = "waiting"
            await page.locator("#state[data-state=waiting]").wait_for()

    asyncio.run(scenario())


def test_thinking_is_folded_above_the_answer(tmp_path: Path):
    async def scenario() -> None:
        text = write_tiny_text(tmp_path, TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"))
        engine = ScriptedEngine(text, script=lambda prompt, generation: "Two and two.</think>Four.")
        async with gateway_stand(engine) as stand, browsed(stand.url) as page:
            await page.locator("#state[data-state=ready]").wait_for()
            await page.locator(".idea").first.click()
            await page.locator(".turn.assistant .facts").wait_for()
            assert await page.locator(".turn.assistant > .words").inner_text() == "Four."
            thought = page.locator(".thinking .words")
            assert not await thought.is_visible()
            await page.locator(".thinking summary").click()
            assert await thought.inner_text() == "Two and two."
            assert not await serious(page)

    asyncio.run(scenario())


def test_stopping_cancels_and_a_dead_gateway_is_said(engine: ScriptedEngine):
    async def scenario() -> None:
        engine.gate = asyncio.Event()
        async with gateway_stand(engine) as stand, browsed(stand.url) as page:
            await page.locator("#state[data-state=ready]").wait_for()
            await page.locator(".idea").first.click()
            await page.locator("#send", has_text="Stop").wait_for()
            await page.keyboard.press("Escape")
            await page.locator("#send", has_text="Send").wait_for()
            await until(lambda: engine.live == 0)
            stand.stop.set()
            await page.locator("#state[data-state=unreachable]").wait_for()
            await page.fill("#prompt", "still there?")
            await page.keyboard.press("Enter")
            await page.locator("#problem").wait_for()

    asyncio.run(scenario())


def test_a_gateway_with_keys_asks_for_one(engine: ScriptedEngine, tmp_path: Path):
    (tmp_path / "keys").write_text("a-good-long-key-of-hers\n")

    async def scenario() -> None:
        config = GatewayConfig("tiny", keys=KeyRing.load(tmp_path / "keys"))
        async with gateway_stand(engine, config) as stand, browsed(stand.url) as page:
            await page.locator("#model", has_text="an API key is needed").wait_for()
            await page.fill("#key", "a-good-long-key-of-hers")
            await page.locator("#key").press("Tab")
            await page.locator("#state[data-state=ready]").wait_for()

    asyncio.run(scenario())


@pytest.mark.parametrize(("scheme", "size"), [("light", DESK), ("dark", DESK), ("light", PHONE)])
def test_a_checker_of_accessibility_finds_nothing_serious(engine: ScriptedEngine, scheme: str, size: Any):
    async def scenario() -> None:
        engine.faults = (FaultNote(1_700_000_000.0, "tower was lost; attic took its place.", 0.62),)
        # The checker is a script of its own, which the page's policy would rightly refuse.
        options = {"color_scheme": scheme, "viewport": size, "bypass_csp": True, "reduced_motion": "reduce"}
        async with gateway_stand(engine) as stand, browsed(stand.url, **options) as page:
            await page.locator("#state[data-state=ready]").wait_for()
            assert await serious(page) == []
            await page.fill("#prompt", "How?")
            await page.keyboard.press("Enter")
            await page.locator(".turn.assistant .facts").wait_for()
            await page.locator("#settings summary").click()
            assert await serious(page) == []
            if size == PHONE:
                await page.locator("[data-show=pool]").click()
                assert await serious(page) == []
                width = await page.evaluate("() => document.documentElement.scrollWidth")
                assert width <= PHONE["width"]

    asyncio.run(scenario())


def test_a_model_or_adapter_is_chosen(engine_text: Any):
    said: list[str | None] = []

    def script(prompt: str, generation: Generation) -> str:
        del prompt
        said.append(generation.adapter)
        return "Together."

    async def scenario() -> None:
        config = GatewayConfig("tiny", adapters=("law", "poems"))
        async with (
            gateway_stand(ScriptedEngine(engine_text, script=script), config) as stand,
            browsed(stand.url) as page,
        ):
            await page.locator("#state[data-state=ready]").wait_for()
            assert await page.locator("#picker option").all_inner_texts() == ["tiny", "law", "poems"]
            await page.get_by_label("Model", exact=True).select_option("poems")
            await page.locator("#prompt").fill("hello")
            await page.keyboard.press("Enter")
            await page.locator(".turn.assistant .words", has_text="Together.").wait_for()
            assert said == ["poems"]
            assert await serious(page) == []
        async with (
            gateway_stand(ScriptedEngine(engine_text), GatewayConfig("tiny")) as stand,
            browsed(stand.url) as page,
        ):
            await page.locator("#state[data-state=ready]").wait_for()
            assert not await page.locator("#picking").is_visible(), "there is nothing to choose"

    asyncio.run(scenario())


MARKDOWN = """\
Here is **bold** text with <b>tags</b>, ![a picture](http://127.0.0.1:1/x.png) and [a link](https://example.org).

| machine | speed |
| :-- | --: |
| tower | 40 |

```python
def fast():
    return True
```
"""


def test_markdown_is_shown_without_html_and_foreign_images(engine_text: Any):
    async def scenario() -> None:
        engine = ScriptedEngine(engine_text, context_tokens=2048, script=lambda prompt, generation: MARKDOWN)
        options = {"permissions": ["clipboard-read", "clipboard-write"]}
        async with gateway_stand(engine) as stand, browsed(stand.url, **options) as page:
            asked: list[str] = []
            page.on("request", lambda request: asked.append(request.url))
            await ask(page, "How fast?")
            words = page.locator(".turn.assistant .words")
            assert await words.locator("strong").inner_text() == "bold"
            assert "<b>tags</b>" in await words.inner_text()
            assert await words.locator("b, img, script").count() == 0
            assert await words.locator("a", has_text="a link").get_attribute("rel") == "noopener noreferrer nofollow"
            speed = words.locator("td", has_text="40")
            assert await speed.evaluate("cell => getComputedStyle(cell).textAlign") == "right"
            await words.get_by_role("button", name="Copy").click()
            await words.get_by_role("button", name="Copied").wait_for()
            assert await page.evaluate("() => navigator.clipboard.readText()") == "def fast():\n    return True"
            assert all(url.startswith(stand.url) for url in asked)
            assert not await serious(page)

    asyncio.run(scenario())


def test_chats_are_kept_in_the_browser_until_they_are_deleted(engine_text: Any):
    async def scenario() -> None:
        async with gateway_stand(ScriptedEngine(engine_text)) as stand, browsed(stand.url) as page:
            await ask(page, "first question")
            await page.locator(".chats .fresh").click()
            assert await page.locator(".turn").count() == 0
            await ask(page, "second question")
            await page.reload()
            titles = page.locator("#chat-list .open")
            await titles.first.wait_for()
            assert await titles.all_inner_texts() == ["second question", "first question"]
            await page.locator("#state[data-state=ready]").wait_for()
            await titles.last.click()
            assert "You said: first question" in await page.locator(".turn.assistant .words").inner_text()
            assert (await page.locator(".turn.assistant .facts").inner_text()).startswith("owner → laptop")
            # It goes on with what was said before.
            await ask(page, "third question")
            sent = stand.engine.text.tokenizer.decode(list(stand.engine.given[-1].prompt))
            assert "first question" in sent
            assert "second question" not in sent
            assert await titles.all_inner_texts() == ["first question", "second question"]
            page.on("dialog", lambda dialog: asyncio.ensure_future(dialog.accept()))
            await page.get_by_role("button", name="Delete the chat “first question”").click()
            await page.locator(".turn").first.wait_for(state="detached")
            await page.get_by_role("button", name="Delete all").click()
            await page.locator("#no-chats").wait_for()
            await page.reload()
            await page.locator("#no-chats").wait_for()

    asyncio.run(scenario())


def test_the_last_answer_is_asked_for_again_and_the_last_question_edited(engine_text: Any):
    async def scenario() -> None:
        async with gateway_stand(ScriptedEngine(engine_text)) as stand, browsed(stand.url) as page:
            await ask(page, "one")
            await ask(page, "two")
            given = stand.engine.given
            await page.get_by_role("button", name="Try again").click()
            await until(lambda: len(given) == 3 and stand.engine.live == 0)
            assert given[2].prompt == given[1].prompt
            await page.get_by_role("button", name="Edit").click()
            assert await page.locator("#prompt").input_value() == "two"
            await ask(page, "three")
            assert await page.locator(".turn.user .words").all_inner_texts() == ["one", "three"]
            assert "two" not in stand.engine.text.tokenizer.decode(list(given[3].prompt))

    asyncio.run(scenario())


def test_images_are_offered_to_a_model_that_reads_them(engine: ScriptedEngine, tmp_path: Path):
    (tmp_path / "large.png").write_bytes(picture(3000, 1500, 0))
    (tmp_path / "broken.png").write_bytes(b"no picture")

    async def scenario() -> None:
        seeing = seeing_engine(tmp_path)
        async with gateway_stand(seeing) as stand, browsed(stand.url) as page:
            await page.locator("#attach").wait_for()
            await page.set_input_files("#choose", tmp_path / "broken.png")
            await page.locator("#problem", has_text="The browser can't read broken.png as an image.").wait_for()
            await page.set_input_files("#choose", tmp_path / "large.png")
            await page.locator("#pictures img").wait_for()
            assert await page.locator("#pictures img").evaluate("image => image.naturalWidth") == 1536
            assert not await serious(page)
            await ask(page, "What is it?")
            assert len(seeing.given[-1].images) == 1
            assert await page.locator(".turn.user img").count() == 1
            assert await page.locator("#pictures img").count() == 0
            await page.get_by_role("button", name="Try again").click()
            await until(lambda: len(seeing.given) == 2 and seeing.live == 0)
            assert len(seeing.given[-1].images) == 1
        async with gateway_stand(engine) as stand, browsed(stand.url) as page:
            await page.locator("#state[data-state=ready]").wait_for()
            assert not await page.locator("#attach").is_visible()

    asyncio.run(scenario())
