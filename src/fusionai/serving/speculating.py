"""Guesses for the generations of an engine: who gets how many, when, and what became of them.

Decides by what was measured: how often a generation's guesses held, what a pass takes by its rows, what a guess takes
to make. Where no gain is predicted none is sent, but what would have held is still watched. Changes no token.

Neighbours: `proposing` guesses and predicts, `serving.engine` tells what came and sends what is wanted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from fusionai.backends.serving import FEW_POSITIONS
from fusionai.serving.interface import Sampling
from fusionai.serving.proposing import Acceptance, Guesses, PassTimes, Proposer, best_count

log = logging.getLogger(__name__)

Speculate = Literal["auto", "off"] | int
"""How many guesses a pass carries for each generation: as many as pay off, none, always so many."""
MOST_FIXED: Final = FEW_POSITIONS - 1
"""With the last token that is as many positions as have the bits of one by one."""

_RARELY: Final = 16
"""Where guesses do not pay off and cost something, one is made for every so many tokens, to see whether they hold."""
_FREE: Final = 0.02
"""Of a pass's time: what takes less counts as nothing."""
_MEMORY: Final = 0.9


@dataclass(slots=True)
class _Followed:
    acceptance: Acceptance
    guessed: tuple[int, ...] = ()
    """What was guessed last, sent or not."""
    asked: int = 0
    without: int = 0
    """Tokens in a row for which no guess was made."""


class Speculation:
    """`count`: guesses for each generation; None: as many as pay off."""

    def __init__(self, proposer: Proposer, count: int | None, now_s: Callable[[], float]) -> None:
        self._proposer = proposer
        self._count = count
        self._now_s = now_s
        self._followed: dict[int, _Followed] = {}
        self._overall = Acceptance()
        self._times = PassTimes()
        self._guess_s = 0.0
        """A moving mean: what one guess for everybody who asked took."""
        self._broken = False

    def begin(self, number: int, prompt: Sequence[int], sampling: Sampling) -> None:
        """Follow a generation from now on. Harmless twice."""
        if number not in self._followed:
            self._followed[number] = _Followed(Acceptance(self._overall.rate))
            self._proposer.begin(number, prompt, sampling)

    def passed(self, rows: int, elapsed_s: float) -> None:
        """A pass that read no prompt came back."""
        self._times.observe(rows, elapsed_s)

    def emitted(self, number: int, tokens: Sequence[int]) -> None:
        """A generation that is followed went on by these."""
        followed = self._followed[number]
        followed.acceptance.observe(followed.guessed, tokens)
        self._overall.observe(followed.guessed, tokens)
        followed.guessed = ()
        self._proposer.extend(number, tokens)

    def ask(self, numbers: Sequence[int], rows: int, answer: Callable[[Guesses], None]) -> None:
        """Have guesses for these generations, which are followed; `rows` share a pass. `answer` gets what is to be sent
        of each of them, at once or later, once, whatever the proposer does."""
        counts = {number: self._wanted(number, rows) for number in numbers}
        wanted = {number: made for number, (_, made) in counts.items() if made}
        if not wanted or self._broken:
            answer(dict.fromkeys(numbers, ()))
            return
        began_s = self._now_s()
        steady = all(self._followed[number].asked for number in wanted)
        for number in wanted:
            self._followed[number].asked += 1

        def take(guesses: Guesses) -> None:
            if steady:  # else it may have read a prompt first
                took_s = (self._now_s() - began_s) / max(wanted.values())
                self._guess_s += (1 - _MEMORY) * (took_s - self._guess_s)
            told: dict[int, tuple[int, ...]] = {}
            for number, (count, _) in counts.items():
                guessed = tuple(guesses.get(number, ()))
                if number in self._followed:
                    self._followed[number].guessed = guessed
                told[number] = guessed[:count]
            answer(told)

        def took(made: asyncio.Future[Guesses]) -> None:
            if made.cancelled():
                answer(dict.fromkeys(numbers, ()))
            elif (problem := made.exception()) is not None:
                self._give_up(problem)
                answer(dict.fromkeys(numbers, ()))
            else:
                take(made.result())

        guesses = self._proposer.propose(wanted)
        if isinstance(guesses, asyncio.Future):
            guesses.add_done_callback(took)
        else:
            take(guesses)

    @property
    def figures(self) -> dict[str, float]:
        """What counts are decided by, for whoever watches: `pass_seconds` of a pass of one row, `row_seconds` for each
        row more, `guess_seconds` for making one guess; guesses looked at so far and those of them that held."""
        pass_s, two_s = self._times.predict(1) or 0.0, self._times.predict(2) or 0.0
        return {
            "guesses_tried": float(self._overall.tried),
            "guesses_held": float(self._overall.held),
            "guess_seconds": self._guess_s,
            "pass_seconds": pass_s,
            "row_seconds": two_s - pass_s,
        }

    def end(self, number: int) -> None:
        if self._followed.pop(number, None) is not None:
            self._proposer.end(number)

    def close(self) -> None:
        self._proposer.close()

    def _wanted(self, number: int, rows: int) -> tuple[int, int]:
        """How many guesses to send, and how many to make."""
        if self._count is not None:
            return self._count, self._count
        followed = self._followed[number]
        count = best_count(followed.acceptance.rate, self._times, rows=rows, guess_s=self._guess_s)
        if count:
            followed.without = 0
            return count, count
        followed.without += 1
        alone_s = self._times.predict(rows)
        free = alone_s is not None and self._guess_s < _FREE * alone_s
        return 0, int(free or followed.without % _RARELY == 0)

    def _give_up(self, problem: BaseException) -> None:
        """Nobody waits for guesses: tokens go on without."""
        self._broken = True
        log.error("nothing is guessed any more", exc_info=problem)
