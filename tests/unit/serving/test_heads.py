"""A head reads the state of each position with the token after it, once, and guesses from what it has read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np
import pytest

from fusionai.execution.host import ComputeThread
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.serving.drafting import LoadedDraft
from fusionai.serving.heads import HeadProposer
from fusionai.serving.images import FIRST_TOKEN
from fusionai.serving.interface import Sampling
from fusionai.wire.messages import Segment, ServeOptions

VOCABULARY = 23
OPTIONS = ServeOptions(page_tokens=4, pages=24, sessions=3, pass_tokens=6, retain=False)
GREEDY = Sampling(temperature=0)
Pair = tuple[int, float]


def said(read: Sequence[Pair]) -> tuple[np.ndarray, float]:
    """What the head says after these pairs, and its own state: all of them count, in order."""
    seed = [round(1000 * state) % 99991 for _, state in read] + [token for token, _ in read]
    drawn = np.random.default_rng(seed).standard_normal(VOCABULARY + 1).astype(np.float32)
    return drawn[:-1], float(drawn[-1])


def state(session: int, position: int) -> float:
    """The served model's state."""
    return float(np.float32(session + position / 100))


def states(session: int, start: int, count: int) -> np.ndarray:
    return np.array([[state(session, position)] for position in range(start, start + count)], np.float32)


def right(read: Sequence[Pair], count: int) -> tuple[int, ...]:
    text, made = list(read), list[int]()
    for _ in range(count):
        logits, own = said(text)
        made.append(int(logits.argmax()))
        text.append((made[-1], own))
    return tuple(made)


class Paged:
    """A head that keeps pairs on pages and believes only what is on them."""

    def __init__(self) -> None:
        self.content: dict[tuple[int, int], Pair] = {}
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.positions = 0

    def run(
        self,
        segments: Sequence[Segment],
        inputs: Mapping[str, HostTensor],
        *,
        wanted: Sequence[str],
        rows: Sequence[int],
    ) -> dict[str, HostTensor]:
        assert list(wanted) == ["logits", "hidden"]
        ids = np.frombuffer(inputs["input_ids"].data, np.int64).tolist()
        given = np.frombuffer(inputs["states"].data, np.float32).tolist()
        assert len(ids) == len(given) == sum(one.length for one in segments) <= OPTIONS.pass_tokens
        self.positions += len(ids)
        made: list[tuple[np.ndarray, float]] = []
        for segment in segments:
            table = self.tables.setdefault(segment.session, [])
            assert segment.start <= self.lengths.get(segment.session, 0)
            if segment.pages:
                table[segment.first_page :] = segment.pages
            for position in range(segment.start, segment.start + segment.length):
                self.content[table[position // 4], position % 4] = ids.pop(0), given.pop(0)
                made.append(said([self.content[table[at // 4], at % 4] for at in range(position + 1)]))
            self.lengths[segment.session] = segment.start + segment.length
        logits = np.array([made[row][0] for row in rows], np.float32).reshape(1, len(rows), VOCABULARY)
        hidden = np.array([made[row][1] for row in rows], np.float32).reshape(1, len(rows), 1)
        return {
            name: host_tensor("float32", one.shape, one.tobytes())
            for name, one in (("logits", logits), ("hidden", hidden))
        }

    def forget(self, sessions: Iterable[int]) -> None:
        for session in sessions:
            self.tables.pop(session, None)
            self.lengths.pop(session, None)


def tried(work: Callable[[HeadProposer, Paged], Awaitable[None]], **fields: object) -> None:
    async def story() -> None:
        program, compute = Paged(), ComputeThread()
        loaded = LoadedDraft(
            **{"program": program, "options": OPTIONS, "vocabulary": VOCABULARY, "context_tokens": 40, **fields}  # pyright: ignore[reportArgumentType]
        )
        try:
            await work(HeadProposer(loaded, compute), program)
        finally:
            compute.close()

    asyncio.run(story())


def read_of(session: int, base: int, tokens: Sequence[int]) -> list[Pair]:
    """What the head has read of a text that it follows from `base` on."""
    return [(tokens[at + 1], state(session, at)) for at in range(base, len(tokens) - 1)]


def test_guesses_follow_the_texts_whatever_held_before() -> None:
    async def work(head: HeadProposer, program: Paged) -> None:
        chance = np.random.default_rng(1)
        texts = {1: list(range(9)), 2: [5, 6]}
        for session, prompt in texts.items():
            head.begin(session, tuple(prompt), GREEDY)
            for start in range(0, len(prompt), 4):  # the prompt is read in pieces
                head.read(session, start, states(session, start, min(4, len(prompt) - start)))
            head.extend(session, [session])
            texts[session].append(session)
        for _ in range(7):
            wanted = {session: int(chance.integers(1, 4)) for session in texts if chance.random() < 0.8}
            guesses = await head.propose(wanted)
            for session, count in wanted.items():
                assert guesses[session] == right(read_of(session, 0, texts[session]), count)
            for session in texts:
                # Some of the guesses held, and another token came.
                held = list(guesses.get(session, ()))[: int(chance.integers(0, 3))]
                head.read(session, len(texts[session]) - 1, states(session, len(texts[session]) - 1, len(held) + 1))
                fresh = [*held, int(chance.integers(0, VOCABULARY))]
                head.extend(session, fresh)
                texts[session] += fresh
        head.end(1)
        head.end(2)
        await head.propose({})
        assert program.tables == {}

    tried(work)


def test_states_that_come_again_after_a_fault_are_skipped() -> None:
    async def work(head: HeadProposer, program: Paged) -> None:
        text = [3, 1, 4, 1, 5]
        head.begin(1, text, GREEDY)
        head.read(1, 0, states(1, 0, 3))
        head.read(1, 0, states(1, 0, 5))
        head.extend(1, [9])
        assert (await head.propose({1: 2}))[1] == right(read_of(1, 0, [*text, 9]), 2)
        assert program.positions == 6

    tried(work)


@pytest.mark.parametrize("gap", [False, True])
def test_a_text_is_followed_from_where_states_arrive(gap: bool) -> None:
    """Behind what the prefix cache had, and behind states that are missing."""

    async def work(head: HeadProposer, program: Paged) -> None:
        text = [3, 1, 4, 1, 5, 9, 2, 6]
        head.begin(1, text, GREEDY)
        if gap:
            head.read(1, 0, states(1, 0, 2))
        head.read(1, 4, states(1, 4, 4))
        head.extend(1, [7])
        assert (await head.propose({1: 3}))[1] == right(read_of(1, 4, [*text, 7]), 3)

    tried(work)


def test_a_text_with_an_image_is_followed_behind_it() -> None:
    async def work(head: HeadProposer, program: Paged) -> None:
        text = [3, FIRST_TOKEN, FIRST_TOKEN + 1, 1, 5]
        head.begin(1, text, GREEDY)
        head.read(1, 0, states(1, 0, 5))
        head.extend(1, [9])
        assert (await head.propose({1: 2}))[1] == right(read_of(1, 2, [*text, 9]), 2)

    tried(work)


def test_nothing_is_guessed_without_the_last_state_or_room() -> None:
    async def work(head: HeadProposer, program: Paged) -> None:
        text = [3, 1, 4]
        head.begin(1, text, GREEDY)
        head.read(1, 0, states(1, 0, 2))
        head.extend(1, [1])
        assert await head.propose({1: 2}) == {}
        head.read(1, 2, states(1, 2, 1))
        assert (await head.propose({1: 1}))[1] == right(read_of(1, 0, [*text, 1]), 1)
        head.begin(2, range(20), GREEDY)
        head.read(2, 0, states(2, 0, 20))
        head.begin(3, range(22), GREEDY)
        head.read(3, 0, states(3, 0, 22))
        head.extend(2, [1])
        head.extend(3, [1])
        guesses = await head.propose({2: 1, 3: 1})
        assert len(guesses) == 1

    tried(work, options=msgspec.structs.replace(OPTIONS, pages=12))


def test_columns_of_a_smaller_vocabulary_stand_for_tokens() -> None:
    tokens = np.arange(VOCABULARY)[::-1].copy()

    async def work(head: HeadProposer, program: Paged) -> None:
        head.begin(1, [3, 1], GREEDY)
        head.read(1, 0, states(1, 0, 2))
        head.extend(1, [1])
        ((guess,),) = (await head.propose({1: 1})).values()
        logits, _ = said(read_of(1, 0, [3, 1, 1]))
        assert guess == 30 + tokens[int(logits.argmax())]

    tried(work, vocabulary=60, tokens=30 + tokens)
