"""Guesses of the next tokens, which the pool verifies in one pass. Decides what they are and how many pay off.

The emitted tokens are those of plain decoding: each position draws its own random number, and a guess is accepted only
if it is the token drawn (Leviathan et al. 2023, with shared random numbers). Neighbours: `speculating` requests
guesses; `generating` judges them; `draft` is another `Proposer`, a small model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

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


class NgramProposer:
    """Guesses what followed the last time after the same two to four tokens, in prompt or answer (prompt lookup, Saxena
    2023)."""

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
