"""A draft model's guesses are what it would say after the text as it is, whatever was guessed and refused before."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pytest

from fusionai.execution.host import ComputeThread
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.serving.drafting import DraftProposer, LoadedDraft
from fusionai.serving.interface import Sampling
from fusionai.serving.sampling import TokenHistory, choose
from fusionai.wire.messages import Segment, ServeOptions

VOCABULARY = 23
OPTIONS = ServeOptions(page_tokens=4, pages=24, sessions=3, pass_tokens=8, retain=False)


def said(text: Sequence[int]) -> np.ndarray:
    """What the model says after `text`: all of it counts."""
    return np.random.default_rng([len(text), *text]).standard_normal(VOCABULARY).astype(np.float32) * 3


class Paged:
    """A stage that keeps tokens on pages and believes only what is on them."""

    def __init__(self) -> None:
        self.content: dict[tuple[int, int], int] = {}
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.positions = 0
        self.broken = False

    def run(
        self,
        segments: Sequence[Segment],
        inputs: Mapping[str, HostTensor],
        *,
        wanted: Sequence[str],
        rows: Sequence[int] | None = None,
    ) -> dict[str, HostTensor]:
        if self.broken:
            raise ExecutionError("the draft has no memory left.")
        assert list(wanted) == ["logits"]
        assert rows is not None
        given = np.frombuffer(inputs["input_ids"].data, np.int64).tolist()
        assert len(given) == sum(one.length for one in segments) <= OPTIONS.pass_tokens
        self.positions += len(given)
        all_rows: list[np.ndarray] = []
        for segment in segments:
            table = self.tables.setdefault(segment.session, [])
            assert segment.start <= self.lengths.get(segment.session, 0)
            assert segment.first_page <= len(table)
            if segment.pages:
                table[segment.first_page :] = segment.pages
            for position in range(segment.start, segment.start + segment.length):
                self.content[table[position // 4], position % 4] = given.pop(0)
                known = [self.content[table[at // 4], at % 4] for at in range(position + 1)]
                all_rows.append(said(known))
            self.lengths[segment.session] = segment.start + segment.length
        assert len(self.tables) <= OPTIONS.sessions
        picked = np.stack([all_rows[row] for row in rows]) if rows else np.zeros((0, VOCABULARY), np.float32)
        return {"logits": host_tensor("float32", (1, len(picked), VOCABULARY), picked.tobytes())}

    def forget(self, sessions: Iterable[int]) -> None:
        for session in sessions:
            del self.tables[session], self.lengths[session]


def right(prompt: Sequence[int], answer: Sequence[int], sampling: Sampling, count: int) -> tuple[int, ...]:
    text = [*prompt, *answer]
    for _ in range(count):
        text.append(choose(said(text), sampling, TokenHistory(), len(text) - len(prompt)))
    return tuple(text[len(prompt) + len(answer) :])


def drafting(program: Paged, compute: ComputeThread, context_tokens: int = 200) -> DraftProposer:
    draft = LoadedDraft(program=program, options=OPTIONS, vocabulary=VOCABULARY, context_tokens=context_tokens)  # pyright: ignore[reportArgumentType]
    return DraftProposer(draft, compute)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(seed=4, repetition_penalty=2.0)])
def test_guesses_follow_the_text_as_it_is(sampling: Sampling) -> None:
    plain = Sampling(temperature=sampling.temperature, seed=sampling.seed)

    async def story() -> None:
        program, compute = Paged(), ComputeThread()
        proposer = drafting(program, compute)
        chance = np.random.default_rng(1)
        answers: dict[int, list[int]] = {1: [], 2: []}
        asked = {1: tuple(range(19)), 2: (5, 6)}
        for number, prompt in asked.items():
            proposer.begin(number, prompt, sampling)
        for _ in range(12):
            for number, prompt in asked.items():
                # Some of the model's own words, then another one.
                own = right(prompt, answers[number], plain, int(chance.integers(0, 4)))
                fresh = [*own, int(chance.integers(0, VOCABULARY))]
                proposer.extend(number, fresh)
                answers[number] += fresh
            wanted = {number: int(chance.integers(1, 5)) for number in asked if chance.random() < 0.8}
            guesses = await proposer.propose(wanted)
            assert guesses == {
                number: right(asked[number], answers[number], plain, count) for number, count in wanted.items()
            }
        proposer.end(1)
        proposer.end(2)
        await proposer.propose({})
        assert program.tables == {}
        compute.close()

    asyncio.run(story())


def test_what_was_guessed_rightly_is_not_computed_again() -> None:
    async def story() -> None:
        program, compute = Paged(), ComputeThread()
        proposer = drafting(program, compute)
        greedy = Sampling(temperature=0)
        proposer.begin(1, (1, 2, 3), greedy)
        answer = right((1, 2, 3), (), greedy, 1)
        proposer.extend(1, answer)
        await proposer.propose({1: 3})
        for _ in range(5):
            before = program.positions
            fresh = right((1, 2, 3), answer, greedy, 4)
            proposer.extend(1, fresh)
            answer += fresh
            await proposer.propose({1: 3})
            assert program.positions - before == 4, "the last guess, the token after it, two guesses"
        compute.close()

    asyncio.run(story())


def test_whoever_finds_no_room_goes_without() -> None:
    async def story() -> None:
        program, compute = Paged(), ComputeThread()
        proposer = drafting(program, compute, context_tokens=70)
        greedy = Sampling(temperature=0)
        lengths = {1: 60, 2: 3, 3: 40, 4: 3, 5: 3}
        for number, length in lengths.items():
            proposer.begin(number, (1,) * length, greedy)
            proposer.extend(number, (2,))
        guesses = await proposer.propose(dict.fromkeys(lengths, 2))
        # The third finds 24 pages taken, the fifth three sessions; both are served when others end.
        assert set(guesses) == {1, 2, 4}
        proposer.end(1)
        assert set(await proposer.propose(dict.fromkeys(lengths, 2))) == {2, 3, 4}
        proposer.extend(3, (3,) * 28)
        assert set(await proposer.propose({3: 2, 2: 2})) == {2}, "69 tokens and two: longer than its context"
        proposer.extend(2, (VOCABULARY,))
        assert set(await proposer.propose({2: 2})) == set(), "a token that it does not know"
        compute.close()

    asyncio.run(story())


def test_a_model_that_fails_fails_the_guesses_and_nothing_else() -> None:
    async def story() -> None:
        program, compute = Paged(), ComputeThread()
        program.broken = True
        proposer = drafting(program, compute)
        proposer.begin(1, (1, 2), Sampling())
        proposer.extend(1, (3,))
        with pytest.raises(ExecutionError, match="no memory left"):
            await proposer.propose({1: 2})
        proposer.close()
        compute.close()

    asyncio.run(story())
