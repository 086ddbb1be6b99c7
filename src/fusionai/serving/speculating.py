"""Speculative decoding for an engine's generations: how many tokens to guess for which generation, and when.

Decides by measurements: how often a generation's guesses held, how long a pass takes for its number of rows, how long a
guess takes to make. If no gain is predicted, no guesses are sent, but their hit rate is still measured. Never changes
the emitted tokens.

Neighbours: `proposing` guesses and predicts, `serving.engine` reports emitted tokens and sends the guesses.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from fusionai.backends.serving.page_table import FEW_POSITIONS
from fusionai.serving.interface import Sampling
from fusionai.serving.proposing import Acceptance, Guesses, PassTimes, Proposer, best_count

log = logging.getLogger(__name__)

Speculate = Literal["auto", "off"] | int
"""Guesses in a pass for each generation: as many as pay off, none, or a fixed number."""
MOST_FIXED: Final = FEW_POSITIONS - 1
"""Largest fixed number of guesses: with the last token, these positions give the same bits as one by one."""

_RARELY: Final = 16
"""If guesses don't pay off and take time to make, one guess per this many tokens is made, to measure whether guesses
hold."""
_FREE: Final = 0.02
"""Fraction of a pass's time below which making guesses counts as free."""
_MEMORY: Final = 0.9
"""Weight of the former mean in a moving mean."""


@dataclass(slots=True)
class _Followed:
    acceptance: Acceptance
    guessed: tuple[int, ...] = ()
    """The last guesses, sent or not."""
    asked: int = 0
    without: int = 0
    """Number of tokens in a row for which no guess was made."""


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
        """Moving mean of the time for one guess for all generations that asked."""
        self._broken = False
        self.proposed, self.accepted = 0, 0
        """Guesses that were verified in a pass, and those of them that were right."""
        self._passes_by_guesses: Counter[int] = Counter()
        """Guesses sent for a generation in one pass -> number of such passes."""

    def begin(self, number: int, prompt: Sequence[int], sampling: Sampling) -> None:
        """Follow a generation from now on. Does nothing if it is followed already."""
        if number not in self._followed:
            self._followed[number] = _Followed(Acceptance(self._overall.rate))
            self._proposer.begin(number, prompt, sampling)

    def passed(self, rows: int, elapsed_s: float) -> None:
        """Record a pass that read no prompt."""
        self._times.observe(rows, elapsed_s)

    def emitted(self, number: int, tokens: Sequence[int]) -> None:
        """Record the tokens that a followed generation emitted."""
        followed = self._followed[number]
        followed.acceptance.observe(followed.guessed, tokens)
        self._overall.observe(followed.guessed, tokens)
        followed.guessed = ()
        self._proposer.extend(number, tokens)

    def verified(self, proposed: int, accepted: int) -> None:
        """Record a generation's share of a pass: guesses that were in it, and those that were right."""
        self.proposed += proposed
        self.accepted += accepted
        self._passes_by_guesses[proposed] += 1

    def ask(self, numbers: Sequence[int], rows: int, answer: Callable[[Guesses], None]) -> None:
        """Request guesses for these generations, which must be followed; `rows`: rows of the pass that they share.
        Calls `answer` exactly once, now or later, with the guesses to send for each generation, whatever the proposer
        does."""
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
            if steady:  # otherwise the time may include reading a prompt
                took_s = (self._now_s() - began_s) / max(wanted.values())
                self._guess_s += (1 - _MEMORY) * (took_s - self._guess_s)
            chosen: dict[int, tuple[int, ...]] = {}
            for number, (count, _) in counts.items():
                guessed = tuple(guesses.get(number, ()))
                if number in self._followed:
                    self._followed[number].guessed = guessed
                chosen[number] = guessed[:count]
            answer(chosen)

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
        """Measurements that decide the number of guesses: `pass_seconds` of a pass with one row, `row_seconds` for each
        further row, `guess_seconds` to make one guess, the number of guesses judged so far and how many of them held.
        `passes_with_N_guesses` counts a pass once for each of its generations."""
        pass_s, two_s = self._times.predict(1) or 0.0, self._times.predict(2) or 0.0
        return {
            "guesses_tried": float(self._overall.tried),
            "guesses_held": float(self._overall.held),
            "guess_seconds": self._guess_s,
            "pass_seconds": pass_s,
            "row_seconds": two_s - pass_s,
            **{
                f"passes_with_{count}_guesses": float(times)
                for count, times in sorted(self._passes_by_guesses.items())
                if count
            },
        }

    def end(self, number: int) -> None:
        if self._followed.pop(number, None) is not None:
            self._proposer.end(number)

    def close(self) -> None:
        self._proposer.close()

    def _wanted(self, number: int, rows: int) -> tuple[int, int]:
        """Return how many guesses to send, and how many to make."""
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
        """Stop guessing for good; tokens continue without guesses."""
        self._broken = True
        log.error("the proposer failed; speculation is off from now on", exc_info=problem)
