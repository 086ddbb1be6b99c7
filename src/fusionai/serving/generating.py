"""The state of one generation: its tokens, its sampling state, its listener.

Decides when the generation is over and which parts of a result are reported. `judge` samples rows of logits without
changing anything, on any thread; `adopt` applies the outcome once the pass is known to count.

Neighbours: `serving.engine` owns the generations, `sampling` chooses tokens.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fusionai.primitives.errors import FusionError
from fusionai.serving.interface import (
    Emitted,
    Finished,
    FinishReason,
    Generation,
    GenerationPaused,
    HopTiming,
    PromptRead,
    StreamEvent,
    TokenLogprob,
)
from fusionai.serving.sampling import TokenHistory, choose


def token_logprob(logits: NDArray[np.float32], token: int, top: int) -> TokenLogprob:
    """Log-probability of `token` and of the `top` best tokens, best first, ties by the smaller id. `logits`:
    [vocabulary]. Sums in float64. A token that the model rules out has -inf."""
    best = float(logits.max())
    weights = logits.astype(np.float64)
    weights -= best
    np.exp(weights, out=weights)
    level = best + float(np.log(weights.sum()))
    ids = _best(logits, min(top, len(logits)))
    return TokenLogprob(token, float(logits[token]) - level, tuple((n, float(logits[n]) - level) for n in ids))


def _best(logits: NDArray[np.float32], count: int) -> list[int]:
    if count <= 0:
        return []
    place = len(logits) - count
    border = np.partition(logits, place)[place]
    # All tokens as good as the last one, because the order of equals in a partition is arbitrary.
    ids = np.flatnonzero(logits >= border)
    return ids[np.argsort(-logits[ids], kind="stable")][:count].tolist()


Rows = NDArray[np.float32]


@dataclass(slots=True)
class Verdict:
    """What a pass's rows mean for one generation. `ended`: why the generation is over, None if it is not."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob | None] = field(default_factory=list["TokenLogprob | None"])
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    proposed: int = 0
    accepted: int = 0
    """Number of proposals that were right."""
    ended: FinishReason | None = None
    detail: str = ""


class Generating:
    """`number`: the session's. `on_left` is called when nothing listens any more."""

    def __init__(self, number: int, generation: Generation, on_left: Callable[[int], None]) -> None:
        self.number = number
        self.generation = generation
        self.tokens = list(generation.text)
        """Prompt and answer."""
        self.history = TokenHistory(generation.prompt)
        for token in generation.answered:
            self.history.add(token)
        self.prompt_read = False
        self.finished = False
        self._prompt_logprobs: list[TokenLogprob] = []
        self._events: asyncio.Queue[StreamEvent] = asyncio.Queue()
        self._on_left = on_left

    @property
    def emitted(self) -> int:
        return len(self.tokens) - len(self.generation.prompt)

    @property
    def is_plain(self) -> bool:
        """True if the best token is simply taken and nothing else is reported."""
        sampling = self.generation.sampling
        return (
            sampling.temperature == 0
            and self.generation.constraint is None
            and self.generation.logprobs is None
            and not sampling.logit_bias
        )

    # ------------------------------------------------------------------------------------------------------ judging

    def judge(self, rows: Rows, first: int, following: Sequence[int]) -> Verdict:
        """Sample the next tokens. `rows` [n, vocabulary]: logits after the positions from `first` on; `following`: the
        tokens that were computed after each position but the last. Those beyond the last emitted token are proposals.
        """
        verdict = Verdict()
        generation, known = self.generation, len(self.tokens)
        if generation.prompt_logprobs:
            for row, position in enumerate(range(first, min(first + len(rows), len(generation.prompt) - 1))):
                token = generation.prompt[position + 1]
                verdict.prompt_logprobs.append(token_logprob(rows[row], token, generation.logprobs or 0))
        before = max(0, known - 1 - first)
        rows, proposals = rows[before:], following[before:]
        verdict.proposed = len(proposals)
        if len(rows) and generation.max_tokens == 0:
            verdict.ended = "length"
            return verdict
        # Proposals are judged in order, each as if the ones before it had been emitted.
        history = copy.deepcopy(self.history) if len(rows) > 1 else self.history
        for place, row in enumerate(rows):
            try:
                mask = None if generation.constraint is None else generation.constraint.allowed()
                token = choose(row, generation.sampling, history, self.emitted + len(verdict.tokens), mask)
            except FusionError as error:
                verdict.ended, verdict.detail = "failed", error.message
                break
            if token in generation.stop_tokens:
                verdict.ended = "stop"
                break
            verdict.tokens.append(token)
            logprobs = None if generation.logprobs is None else token_logprob(row, token, generation.logprobs)
            verdict.logprobs.append(logprobs)
            if self.emitted + len(verdict.tokens) >= generation.max_tokens:
                verdict.ended = "length"
                break
            if place >= len(proposals) or proposals[place] != token:
                break
            verdict.accepted += 1
            history.add(token)
        return verdict

    # ------------------------------------------------------------------------------------------------------ adopting

    def adopt(self, verdict: Verdict, hops: tuple[HopTiming, ...], cached_tokens: int) -> None:
        """Emit the verdict's tokens and log-probabilities."""
        self._prompt_logprobs += verdict.prompt_logprobs
        if not self.prompt_read and (verdict.tokens or verdict.ended is not None):
            self.prompt_read = True
            logprobs = tuple(self._prompt_logprobs)
            self._events.put_nowait(PromptRead(len(self.generation.prompt), cached_tokens, logprobs))
        constraint = self.generation.constraint
        for token, logprob in zip(verdict.tokens, verdict.logprobs, strict=True):
            try:
                if constraint is not None:
                    constraint.accept(token)
            except FusionError as error:
                self.finish("failed", error.message)
                return
            self._events.put_nowait(Emitted(self.emitted, token, logprob, hops))
            self.tokens.append(token)
            self.history.add(token)
        if verdict.ended is not None:
            self.finish(verdict.ended, verdict.detail)
        elif constraint is not None and verdict.tokens and constraint.finished:
            self.finish("stop")

    def held(self, held: GenerationPaused) -> None:
        self._events.put_nowait(held)

    def finish(self, reason: FinishReason, detail: str = "") -> None:
        if not self.finished:
            self.finished = True
            self._events.put_nowait(Finished(reason, detail))

    # ----------------------------------------------------------------------------------------------------- listening

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        return self._streamed()

    async def _streamed(self) -> AsyncIterator[StreamEvent]:
        try:
            while True:
                event = await self._events.get()
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Cancel the generation if it is not over."""
        if not self.finished:
            self.finish("cancelled")
            self._on_left(self.number)


class TextToRead:
    """A text of which rows are wanted, not tokens. `rows`: their number. `made`: makes the result of the rows."""

    def __init__(self, number: int, rows: int, made: RowReader) -> None:
        self.number = number
        self.done: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        self._left = rows
        self._made = made

    def adopt(self, rows: Rows) -> None:
        """Add rows; they come in order, each once."""
        self._made.add(rows)
        self._left -= len(rows)
        if self._left <= 0 and not self.done.done():
            self.done.set_result(self._made.vector())

    def fail(self, error: FusionError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class RowReader(Protocol):
    """Takes the rows of one text in order, then gives what they make."""

    def add(self, rows: Rows) -> None: ...

    def vector(self) -> list[float]: ...


class LastRow:
    """Reads a text's scores, which its last row has."""

    def __init__(self) -> None:
        self._row: Rows | None = None

    def add(self, rows: Rows) -> None:
        self._row = rows[-1]

    def vector(self) -> list[float]:
        return [] if self._row is None else [float(value) for value in self._row]
