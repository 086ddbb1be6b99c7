"""Guesses of the next tokens, which the pool checks in one pass. Decides what they are and how many pay off.

What is emitted is what plain decoding emits, token by token: each position draws its own number, and a guess counts
only where it is the token drawn (Leviathan et al. 2023 with draws in common). Neighbours: `speculating` asks for them,
`generating` judges them; `draft` is another `Proposer`, a small model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from fusionai.serving.interface import Sampling

MOST: Final = 8
_SHORTEST, _LONGEST = 2, 4
_MEMORY: Final = 0.98
"""What an observation still weighs after the next: about the last fifty count."""
_PRIOR_TRIALS: Final = 2.0
_MARGIN: Final = 1.03
"""A predicted gain smaller than this is noise."""


Guesses = Mapping[int, tuple[int, ...]]
"""Session -> the tokens that may follow its last one."""


class Proposer(Protocol):
    """Follows sessions and guesses how they go on. Sessions it does not know are ignored."""

    def begin(self, session: int, prompt: Sequence[int], sampling: Sampling) -> None:
        """`sampling`: what the answer's tokens are drawn by, for whoever can draw as well."""
        ...

    def extend(self, session: int, tokens: Sequence[int]) -> None:
        """Emitted tokens: never taken back."""
        ...

    def propose(self, wanted: Mapping[int, int]) -> Guesses | asyncio.Future[Guesses]:
        """At most so many tokens for each session; those with no guess are left out. At once, or later where a model
        guesses: for all of them together, off the event loop."""
        ...

    def end(self, session: int) -> None: ...

    def close(self) -> None: ...


class NgramProposer:
    """What came after the same two to four tokens the last time, in prompt or answer (prompt lookup, Saxena 2023)."""

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}

    def begin(self, session: int, prompt: Sequence[int], sampling: Sampling) -> None:  # noqa: ARG002
        """See `Proposer`."""
        text = self._texts[session] = _Text()
        text.extend(prompt)

    def extend(self, session: int, tokens: Sequence[int]) -> None:
        """See `Proposer`."""
        if (text := self._texts.get(session)) is not None:
            text.extend(tokens)

    def propose(self, wanted: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        """See `Proposer`."""
        guesses = {
            session: text.continued(count)
            for session, count in wanted.items()
            if (text := self._texts.get(session)) is not None
        }
        return {session: tokens for session, tokens in guesses.items() if tokens}

    def end(self, session: int) -> None:
        """See `Proposer`."""
        self._texts.pop(session, None)

    def close(self) -> None:
        """See `Proposer`."""
        self._texts.clear()


class _Text:
    """Tokens, and where each run of two to four of them was followed by something, the last time."""

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
                # Beyond the end what was guessed goes on: a text that repeats itself repeats its repetition.
                period = len(known) - at
                return tuple(known[at + place % period] for place in range(count))
        return ()


class Acceptance:
    """How often a guess holds, those before it having held; of late. A guess that was not sent counts as well: the
    token that came tells whether it would have held."""

    def __init__(self, expected: float = 0.5) -> None:
        """`expected`: before anything is known."""
        self._held = expected * _PRIOR_TRIALS
        self._trials = _PRIOR_TRIALS
        self.tried, self.held = 0, 0
        """Of all so far: guesses that were looked at, those that held."""

    def observe(self, proposals: Sequence[int], emitted: Sequence[int]) -> None:
        """Guesses and what came in their place; of either may be more."""
        for guess, token in zip(proposals, emitted, strict=False):
            self._held = self._held * _MEMORY + (guess == token)
            self._trials = self._trials * _MEMORY + 1
            self.tried += 1
            self.held += guess == token
            if guess != token:
                break

    @property
    def rate(self) -> float:
        """From 0 to 1."""
        return self._held / self._trials


class PassTimes:
    """How long a pass takes by its rows: a line through the last passes, decoding ones."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """One pass."""
        self._weight = self._weight * _MEMORY + 1
        self._rows = self._rows * _MEMORY + rows
        self._seconds = self._seconds * _MEMORY + seconds
        self._squares = self._squares * _MEMORY + rows * rows
        self._products = self._products * _MEMORY + rows * seconds

    def predict(self, rows: int) -> float | None:
        """None before the first pass. With one size seen, others are taken to last as long: a try will tell."""
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
    """Per pass with `count` guesses of which each holds with probability `rate` (Leviathan et al. 2023, equation 1)."""
    return count + 1.0 if rate >= 1 else (1 - rate ** (count + 1)) / (1 - rate)


def best_count(rate: float, times: PassTimes, *, rows: int = 1, most: int = MOST, guess_s: float = 0.0) -> int:
    """How many guesses to send for one session: as yields most tokens per second of all that share the pass.

    `rows`: of the pass without them, one of which is this session's. `guess_s`: what making one takes, before the pass
    can go. 0 where no gain is predicted."""
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
