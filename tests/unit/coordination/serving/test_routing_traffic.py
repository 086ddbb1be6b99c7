"""What the choice of a pipeline brings under traffic: simulated pipelines whose real speeds differ from their plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from random import Random

import pytest

from fusionai.coordination.serving.routing import BLOCK_TOKENS, Answered, Pace, Routing, TextToRoute

TICK_S = 0.02
PLACES = 8


@dataclass
class Text:
    """A text on its way. `missing_tokens`: those of the prompt that its pipeline lacks."""

    asked: TextToRoute
    pipeline: int
    missing_tokens: float
    tokens: float = 0.0
    planned_s: float = 0.0
    crowded_s: float = 0.0
    measured_s: float = 0.0


@dataclass
class Real:
    """A pipeline as it really is: `token_s` alone, slower by `crowding` per further text, with a cache of its own."""

    token_s: float
    crowding: float = 0.3
    prompt_token_s: float = 0.0005
    texts: list[Text] = field(default_factory=list[Text])
    cached: set[tuple[int, ...]] = field(default_factory=set[tuple[int, ...]])

    def token_s_with(self, texts: int) -> float:
        return self.token_s * (1 + self.crowding * (texts - 1))

    def missing(self, tokens: tuple[int, ...]) -> int:
        blocks = len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
        known = next((end for end in range(blocks, 0, -BLOCK_TOKENS) if tokens[:end] in self.cached), 0)
        return len(tokens) - known

    def remember(self, tokens: tuple[int, ...]) -> None:
        self.cached |= {tokens[:end] for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)}


class Traffic:
    """Texts go where `Routing` says, and are answered at the real speeds."""

    def __init__(self, real: dict[int, Real], planned_s: dict[int, float], tries: bool = True) -> None:
        self.real, self.routing = real, Routing()
        for number, token_s in planned_s.items():
            self.routing.open(number, Pace(token_s=(token_s,) * PLACES, prompt_token_s=0.0005, sessions=PLACES))
            if tries:
                self.routing.tried(number, real[number].token_s)
        self.answered = 0.0
        self.waited_s: list[float] = []

    def ask(self, text: TextToRoute) -> Text:
        number = self.routing.ranked(text, tuple(self.real))[0]
        asked = Text(text, number, self.real[number].missing(tuple(text.tokens)))
        self.routing.began(number, text)
        self.real[number].texts.append(asked)
        return asked

    def tick(self) -> Iterator[Text]:
        """Let a moment pass. Yields the texts that are finished."""
        for number, pipeline in self.real.items():
            running = pipeline.texts[:PLACES]
            for text in running:
                if text.missing_tokens > 0:
                    text.missing_tokens -= TICK_S / pipeline.prompt_token_s
                    continue
                made = TICK_S / pipeline.token_s_with(len(running))
                planned_s, others = self.routing.token_s(number)
                text.tokens += made
                text.planned_s += made * planned_s
                text.crowded_s += made * planned_s * others
                text.measured_s += TICK_S
                self.answered += made
            for text in [one for one in running if one.tokens >= one.asked.most_tokens]:
                pipeline.texts.remove(text)
                pipeline.remember(tuple(text.asked.tokens))
                self.routing.ended(number, text.asked)
                self.routing.answered(
                    number, Answered(text.asked.most_tokens, text.planned_s, text.crowded_s, text.measured_s)
                )
                yield text


def closed_loop(traffic: Traffic, streams: int, ticks: int) -> float:
    """Keep `streams` texts under way, and return the tokens per second after a time of getting used to them."""
    number = 0
    for _ in range(streams):
        traffic.ask(TextToRoute(tokens=(number := number + 1,), cache=(), most_tokens=100))
    for tick in range(2 * ticks):
        if tick == ticks:
            traffic.answered = 0.0
        for _ in traffic.tick():
            traffic.ask(TextToRoute(tokens=(number := number + 1,), cache=(), most_tokens=100))
    return traffic.answered / (ticks * TICK_S)


def best_per_s(real: dict[int, Real], streams: int) -> float:
    """The most tokens per second of any fixed distribution of the streams, by trying all."""
    pipelines = list(real.values())
    bars = combinations(range(streams + len(pipelines) - 1), len(pipelines) - 1)
    counts = (
        [after - before - 1 for before, after in zip((-1, *bar), (*bar, streams + len(pipelines) - 1), strict=True)]
        for bar in bars
    )
    return max(
        sum(
            min(count, PLACES) / one.token_s_with(min(count, PLACES))
            for count, one in zip(chosen, pipelines, strict=True)
            if count
        )
        for chosen in counts
    )


@pytest.mark.parametrize("planned", ["right", "all too fast", "one too slow", "one too fast", "by chance"])
@pytest.mark.parametrize("speeds", [(0.01, 0.01, 0.01, 0.01), (0.01, 0.012, 0.02, 0.03)])
def test_the_pool_gives_most_of_what_it_could_however_wrong_plans_are(planned: str, speeds: tuple[float, ...]):
    """A profile that was measured on a busy machine can be wrong by a factor of ten."""
    choose = Random(7)
    wrong = {
        "right": [1.0] * 4,
        "all too fast": [1 / 17] * 4,
        "one too slow": [1, 1, 1, 12],
        "one too fast": [1, 1, 1, 1 / 12],
        "by chance": [choose.choice((0.1, 0.3, 1, 3, 10)) for _ in speeds],
    }[planned]
    real = {number: Real(token_s) for number, token_s in enumerate(speeds)}
    planned_s = {number: factor * real[number].token_s for number, factor in enumerate(wrong)}
    reached = closed_loop(Traffic(real, planned_s), 16, 2000)
    assert reached >= 0.9 * best_per_s(real, 16)


def test_pipelines_that_were_never_tried_share_the_texts_after_a_while():
    real = {number: Real(0.01) for number in range(4)}
    planned_s = {0: 0.001, 1: 0.01, 2: 0.004, 3: 0.02}
    reached = closed_loop(Traffic(real, planned_s, tries=False), 16, 6000)
    assert reached >= 0.9 * best_per_s(real, 16)


def test_a_single_user_has_the_fastest_pipeline():
    real = {number: Real(token_s) for number, token_s in enumerate((0.02, 0.01, 0.03))}
    reached = closed_loop(Traffic(real, {0: 0.002, 1: 0.01, 2: 0.001}), 1, 1000)
    assert reached == pytest.approx(1 / 0.01, rel=0.05)


def test_conversations_return_to_their_pipelines():
    """32 conversations of 10 turns over 4 pipelines, 8 to 12 of which are answered at a time."""
    choose = Random(3)
    real = {number: Real(0.01) for number in range(4)}
    traffic = Traffic(real, dict.fromkeys(real, 0.01))
    texts = [tuple(choose.randrange(1000) for _ in range(300)) for _ in range(32)]
    turns, due_s = [0] * 32, [choose.uniform(0, 5) for _ in texts]
    running: dict[int, int] = {}
    lacked, asked, now_s = 0, 0, 0.0
    while min(turns) < 10:
        now_s += TICK_S
        for conversation, at_s in enumerate(due_s):
            if at_s <= now_s and turns[conversation] < 10:
                text = traffic.ask(TextToRoute(tokens=texts[conversation], cache=(), most_tokens=80))
                running[id(text)] = conversation
                due_s[conversation] = float("inf")
                if turns[conversation]:
                    lacked += max(0.0, text.missing_tokens - 200) > BLOCK_TOKENS
                    asked += 1
        for text in traffic.tick():
            conversation = running.pop(id(text))
            turns[conversation] += 1
            texts[conversation] += tuple(choose.randrange(1000) for _ in range(80 + 120))
            due_s[conversation] = now_s + choose.uniform(1, 5)
    assert asked == 9 * 32
    assert lacked <= 0.1 * asked
