"""Speculative decoding: guesses of the next tokens, which the pool verifies in one pass; how many are made, and when.

The emitted tokens are those of plain decoding: each position draws its own random number, and a guess is accepted only
if it is the token drawn (Leviathan et al. 2023, with shared random numbers). `NgramProposer` guesses from the text;
`drafting` has another `Proposer`, a small model. `Speculation` decides by measurements: how often a generation's
guesses held, how long a pass takes for its number of rows, how long a guess takes to make. If no gain is predicted, no
guesses are sent, but their hit rate is still measured.

Neighbours: `answers` reports emitted tokens and sends the guesses; `generating` judges them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fusionai.backends.serving.page_table import FEW_POSITIONS
from fusionai.serving.images import is_image
from fusionai.serving.interface import Sampling

MOST: Final = 8
"""Upper limit of guesses per session and pass, if the number is chosen by gain (chosen)."""
_SHORTEST, _LONGEST = 2, 4
_MEMORY: Final = 0.98
"""Weight of the former observations when one is added: about the last fifty count."""
_PRIOR_TRIALS: Final = 2.0
"""Weight of the expected rate before observations, in guesses (chosen)."""
_MARGIN: Final = 1.03
"""Least predicted gain for which guesses are sent; smaller ones are noise."""


Guesses = Mapping[int, tuple[int, ...]]
"""Session -> tokens that may follow its last one."""


class Proposer(Protocol):
    """Follows sessions and guesses how they continue. Unknown sessions are ignored."""

    def begin(self, session: int, prompt: Sequence[int], sampling: Sampling) -> None:
        """Follow a session. `sampling`: how its tokens are drawn, for a proposer that draws as well."""
        ...

    def extend(self, session: int, tokens: Sequence[int]) -> None:
        """Append emitted tokens, which are never taken back."""
        ...

    def propose(self, wanted: Mapping[int, int]) -> Guesses | asyncio.Future[Guesses]:
        """Guess at most the wanted number of tokens for each session; sessions without a guess are left out. Returns
        the guesses, or a future if a model has to compute them, for all sessions together and off the event loop."""
        ...

    def end(self, session: int) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class StateReader(Proposer, Protocol):
    """A proposer that guesses from states of the served model (`wire.serving.StateOutput`)."""

    def read(self, session: int, start: int, states: NDArray[np.float32]) -> None:
        """Take the states [positions, size] of a session's positions from `start` on. Called before `extend` appends
        the token after the last of them. After a recovery, positions may come again."""
        ...


class NgramProposer:
    """Guesses what followed the last time after the same two to four tokens, in prompt or answer (prompt lookup, Saxena
    2023)."""

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}

    def begin(self, session: int, prompt: Sequence[int], sampling: Sampling) -> None:  # noqa: ARG002
        text = self._texts[session] = _Text()
        text.extend(prompt)

    def extend(self, session: int, tokens: Sequence[int]) -> None:
        if (text := self._texts.get(session)) is not None:
            text.extend(tokens)

    def propose(self, wanted: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        guesses = {
            session: text.continued(count)
            for session, count in wanted.items()
            if (text := self._texts.get(session)) is not None
        }
        texts = {session: tuple(takewhile(_is_text, tokens)) for session, tokens in guesses.items()}
        return {session: tokens for session, tokens in texts.items() if tokens}

    def end(self, session: int) -> None:
        self._texts.pop(session, None)

    def close(self) -> None:
        self._texts.clear()


def _is_text(token: int) -> bool:
    return not is_image(token)


class _Text:
    """Tokens, and the place after the last occurrence of each run of two to four of them."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        known = self._tokens
        for token in tokens:
            for length in range(_SHORTEST, min(_LONGEST, len(known)) + 1):
                self._after[tuple(known[-length:])] = len(known)
            known.append(token)

    def continued(self, count: int) -> tuple[int, ...]:
        known = self._tokens
        for length in range(min(_LONGEST, len(known)), _SHORTEST - 1, -1):
            at = self._after.get(tuple(known[-length:]))
            if at is not None:
                # Beyond the end of the text, the guess continues with itself, as repetitions tend to go on.
                period = len(known) - at
                return tuple(known[at + place % period] for place in range(count))
        return ()


class Acceptance:
    """Moving rate at which a guess holds if those before it held. A guess that was not sent counts too, because the
    emitted token shows whether it would have held."""

    def __init__(self, expected: float = 0.5) -> None:
        """`expected`: rate before anything was observed."""
        self._held = expected * _PRIOR_TRIALS
        self._trials = _PRIOR_TRIALS
        self.tried, self.held = 0, 0
        """Totals: guesses that were judged, and those that held."""

    def observe(self, proposals: Sequence[int], emitted: Sequence[int]) -> None:
        """Compare guesses with the tokens that came in their place; the lengths may differ."""
        for guess, token in zip(proposals, emitted, strict=False):
            self._held = self._held * _MEMORY + (guess == token)
            self._trials = self._trials * _MEMORY + 1
            self.tried += 1
            self.held += guess == token
            if guess != token:
                break

    @property
    def rate(self) -> float:
        """Between 0 and 1."""
        return self._held / self._trials


class PassTimes:
    """Duration of a pass as a line over its number of rows, fitted to the last decoding passes."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Add a pass."""
        self._weight = self._weight * _MEMORY + 1
        self._rows = self._rows * _MEMORY + rows
        self._seconds = self._seconds * _MEMORY + seconds
        self._squares = self._squares * _MEMORY + rows * rows
        self._products = self._products * _MEMORY + rows * seconds

    def predict(self, rows: int) -> float | None:
        """Predicted duration; None before the first pass. If only one size was seen, other sizes are predicted to take
        as long, and trying them corrects that."""
        if self._weight == 0:
            return None
        mean_rows, mean_s = self._rows / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - mean_rows**2
        slope = 0.0
        if variance > 1e-6 * mean_rows**2:
            # More rows never take less time: a negative slope is noise.
            slope = max(0.0, (self._products / self._weight - mean_rows * mean_s) / variance)
        return max(mean_s + slope * (rows - mean_rows), mean_s * 0.01)


def expected_tokens(rate: float, count: float) -> float:
    """Expected tokens per pass with `count` guesses, each of which holds with probability `rate` (Leviathan et al.
    2023, equation 1)."""
    return count + 1.0 if rate >= 1 else (1 - rate ** (count + 1)) / (1 - rate)


def best_count(rate: float, times: PassTimes, *, rows: int = 1, most: int = MOST, guess_s: float = 0.0) -> int:
    """Number of guesses for one session that gives the most tokens per second over all sessions of the pass; 0 if no
    gain is predicted. `rows`: rows of the pass without guesses, one of which is this session's. `guess_s`: time to make
    one guess, which delays the pass."""
    alone_s = times.predict(rows)
    if alone_s is None:
        return 0
    best, best_speed = 0, rows / alone_s * _MARGIN
    for count in range(1, most + 1):
        took_s = (times.predict(rows + count) or alone_s) + guess_s * count
        speed = (rows - 1 + expected_tokens(rate, count)) / took_s
        if speed > best_speed:
            best, best_speed = count, speed
    return best


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
_MEAN_MEMORY: Final = 0.9
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

    @property
    def reads_states(self) -> bool:
        """Whether guesses are made from the model's states, which must then be computed at all positions."""
        return isinstance(self._proposer, StateReader)

    def read(self, number: int, start: int, states: NDArray[np.float32]) -> None:
        """Hand the states of a followed generation's positions from `start` on to the proposer, if it reads any."""
        if isinstance(self._proposer, StateReader) and not self._broken:
            self._proposer.read(number, start, states)

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
                self._guess_s += (1 - _MEAN_MEMORY) * (took_s - self._guess_s)
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
