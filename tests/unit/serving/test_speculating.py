"""How many guesses are sent, and that nobody ever waits for them in vain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import pytest

from fusionai.primitives.errors import ExecutionError
from fusionai.serving.interface import Sampling
from fusionai.serving.speculating import Guesses, NgramProposer, Speculation


class Told:
    """Guesses what it is told to, at once or when the test says so."""

    def __init__(self, guess: Callable[[int], tuple[int, ...]], *, takes_s: float = 0.0) -> None:
        self.guess = guess
        self.takes_s = takes_s
        self.now_s = 0.0
        self.asked: list[dict[int, int]] = []
        self.later: asyncio.Future[Guesses] | None = None

    def begin(self, session: int, prompt: Sequence[int], sampling: Sampling) -> None: ...

    def extend(self, session: int, tokens: Sequence[int]) -> None: ...

    def propose(self, wanted: Mapping[int, int]) -> Guesses | asyncio.Future[Guesses]:
        self.asked.append(dict(wanted))
        if self.later is not None:
            return self.later
        self.now_s += self.takes_s * max(wanted.values())
        return {session: self.guess(count) for session, count in wanted.items()}

    def end(self, session: int) -> None: ...

    def close(self) -> None: ...


def following(proposer: Told, count: int | None) -> Speculation:
    speculation = Speculation(proposer, count, lambda: proposer.now_s)
    speculation.begin(1, [1, 2], Sampling())
    return speculation


def asked(speculation: Speculation, rows: int = 1) -> tuple[int, ...]:
    told: list[Guesses] = []
    speculation.ask([1], rows, told.append)
    assert len(told) == 1
    return told[0][1]


def rounds(speculation: Speculation, proposer: Told, answer: Sequence[int], row_s: float, times: int) -> list[int]:
    """How many guesses went with each of so many passes, each of which takes 0.1 s and `row_s` for each row more."""
    counts: list[int] = []
    for _ in range(times):
        sent = asked(speculation)
        counts.append(len(sent))
        elapsed_s = 0.1 + row_s * len(sent)
        proposer.now_s += elapsed_s
        speculation.passed(1 + len(sent), elapsed_s)
        speculation.emitted(1, answer[: len(sent) + 1])
    return counts


def test_guesses_that_hold_are_sent_where_rows_are_cheap() -> None:
    proposer = Told(lambda count: (7,) * count)
    counts = rounds(following(proposer, None), proposer, [7] * 9, 0.001, 40)
    assert counts[-1] == 8


def test_no_guess_is_sent_where_none_holds_or_rows_cost_as_much_as_passes() -> None:
    for answer, row_s in (([8] * 9, 0.001), ([7] * 9, 0.12)):
        proposer = Told(lambda count: (7,) * count)
        counts = rounds(following(proposer, None), proposer, answer, row_s, 60)
        assert counts[-20:] == [0] * 20
        assert max(proposer.asked[-1].values()) == 1, "what is free is still watched"


def test_what_was_not_sent_is_watched_and_sent_once_it_holds() -> None:
    proposer = Told(lambda count: (7,) * count)
    speculation = following(proposer, None)
    assert rounds(speculation, proposer, [8] * 9, 0.001, 60)[-1] == 0
    assert rounds(speculation, proposer, [7] * 9, 0.001, 60)[-1] == 8


def test_guesses_that_take_as_long_as_tokens_are_rarely_made() -> None:
    proposer = Told(lambda count: (7,) * count, takes_s=0.2)
    counts = rounds(following(proposer, None), proposer, [7] * 9, 0.001, 100)
    assert sum(counts[20:]) == 0
    assert len(proposer.asked) < 20


def test_a_fixed_number_is_always_asked_for() -> None:
    proposer = Told(lambda count: (7,) * count)
    assert rounds(following(proposer, 3), proposer, [8] * 9, 1.0, 5) == [3] * 5


def test_whoever_waits_gets_an_answer_when_guesses_fail_and_is_not_kept_waiting_again() -> None:
    async def story() -> list[Guesses]:
        proposer = Told(lambda count: ())
        speculation = following(proposer, 2)
        told: list[Guesses] = []
        for end in (
            lambda later: later.set_exception(ExecutionError("the draft has no memory left.")),
            lambda later: later.cancel(),
        ):
            proposer.later = asyncio.get_running_loop().create_future()
            speculation.ask([1], 1, told.append)
            end(proposer.later)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert len(proposer.asked) == 1
        return told

    assert asyncio.run(story()) == [{1: ()}, {1: ()}]


def test_a_generation_that_ended_meanwhile_is_no_trouble() -> None:
    async def story() -> list[Guesses]:
        proposer = Told(lambda count: ())
        speculation = following(proposer, 2)
        told: list[Guesses] = []
        proposer.later = asyncio.get_running_loop().create_future()
        speculation.ask([1], 1, told.append)
        speculation.end(1)
        proposer.later.set_result({1: (3, 4)})
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return told

    assert asyncio.run(story()) == [{1: (3, 4)}]


@pytest.mark.parametrize("count", [2, 5])
def test_a_text_that_repeats_itself_is_guessed(count: int) -> None:
    speculation = Speculation(NgramProposer(), count, lambda: 0.0)
    speculation.begin(1, [5, 6, 7, 5], Sampling())
    speculation.emitted(1, [6])
    assert asked(speculation) == (7, 5, 6, 7, 5)[:count]


def test_what_counts_are_decided_by_is_told() -> None:
    proposer = Told(lambda count: (7,) * count, takes_s=0.01)
    speculation = following(proposer, 2)
    assert set(speculation.figures.values()) == {0.0}
    rounds(speculation, proposer, [7, 8, 9], 0.005, 5)
    told = speculation.figures
    # The first guess of each pass held, the second did not.
    assert (told["guesses_tried"], told["guesses_held"]) == (10, 5)
    assert (told["pass_seconds"], told["row_seconds"]) == (pytest.approx(0.11), 0.0), "only one size was seen"
    assert 0 < told["guess_seconds"] < 0.01
