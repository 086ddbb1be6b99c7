"""All answers of one request, generated at the same time. The request is over after its last answer, at its first
failure, or when the client disconnects.

Also holds the state of one choice and the log of the route that its tokens took.

Closing it cancels every generation. `chat` and `completions` serialise the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from msgspec import UNSET

from fusionai.gateway.answers import CachedDetail, FinishWord, HopMean, ReasoningDetail, RouteReport, Usage, Wait
from fusionai.gateway.errors import ApiError, of_failure
from fusionai.gateway.metrics import GenerationEnd, Metrics
from fusionai.primitives.errors import FusionError
from fusionai.serving.interface import (
    Emitted,
    Engine,
    Finished,
    Generation,
    GenerationPaused,
    HopTiming,
    PromptRead,
    TokenLogprob,
    TokenStream,
)
from fusionai.serving.reasoning import ReasoningReader, Separated
from fusionai.serving.text import Decoder, TokenText
from fusionai.serving.tool_reading import Read, ToolReader
from fusionai.serving.tools import CallPiece


@dataclass(frozen=True, slots=True)
class AnswerLogprob:
    """A token's log-probabilities, and the number of the answer's characters before it."""

    logprob: TokenLogprob
    offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New content of answer `index`."""

    index: int
    text: str = ""
    calls: tuple[CallPiece, ...] = ()
    logprobs: tuple[AnswerLogprob, ...] = ()
    finish: FinishWord | None = None
    reasoning: str = ""
    """The model's thinking, which comes before the text."""
    stop: str | None = None
    """The stop string that ended the answer."""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to send to the client."""
        return not (self.text or self.reasoning or self.calls or self.logprobs or self.finish)


@dataclass(slots=True)
class Choice:
    """`prompt`: index among the request's prompts; `keeps`: number of tokens to pass on (fewer than generated if none
    is wanted); `one_call`: the answer ends after the first tool call."""

    index: int
    prompt: int
    generation: Generation
    decoder: Decoder
    reasoning: ReasoningReader | None = None
    tools: ToolReader | None = None
    one_call: bool = False
    keeps: int | None = None
    tokens: int = 0
    reasoning_tokens: int = 0
    finish: FinishWord | None = None
    """Set when the answer is complete."""

    def token(self, emitted: Emitted) -> Delta:
        """Process the next token."""
        self.tokens += 1
        if self.keeps is not None and self.tokens > self.keeps:
            self.tokens = self.keeps
            return Delta(self.index)
        was_thinking = self._is_thinking
        piece = self.decoder.add(emitted.token)
        delta = self._delta(piece, "stop" if piece.stop is not None else None)
        if was_thinking or self._is_thinking:
            self.reasoning_tokens += 1
            return delta
        logprobs = (AnswerLogprob(emitted.logprob, piece.offset),) if emitted.logprob is not None else ()
        return replace(delta, logprobs=logprobs)

    def end(self, reason: Literal["stop", "length"]) -> Delta:
        """End the answer; returns text that was held back."""
        return self._delta(self.decoder.finish(), reason)

    @property
    def _is_thinking(self) -> bool:
        return self.reasoning is not None and self.reasoning.is_thinking

    def _delta(self, piece: TokenText, finish: Literal["stop", "length"] | None) -> Delta:
        parts = Separated("", piece.text, piece.stop)
        if self.reasoning is not None:
            parts = self.reasoning.feed(piece.text, final=finish is not None)
            finish = finish if parts.stop is None else "stop"
        if self.tools is None:
            self.finish = finish
            return Delta(self.index, parts.text, finish=finish, reasoning=parts.reasoning, stop=parts.stop)
        read = self.tools.feed(parts.text)
        if finish is not None:
            rest = self.tools.finish()
            read = Read(read.text + rest.text, read.pieces + rest.pieces)
        pieces = read.pieces
        if self.one_call:
            pieces = tuple(piece for piece in pieces if piece.index == 0)
            finish = "stop" if self.tools.whole else finish
        called = self.tools.calls and finish == "stop"
        self.finish = "tool_calls" if called else finish
        return Delta(self.index, read.text, pieces, finish=self.finish, reasoning=parts.reasoning, stop=parts.stop)


@dataclass(slots=True)
class _Sum:
    tokens: int
    queued_s: float
    compute_s: float
    transfer_s: float
    last: HopTiming


class RouteLog:
    """Hops of one request, over all its answers. `now_s` is monotonic time."""

    def __init__(self, now_s: float) -> None:
        self._began_s = now_s
        self._sums: dict[tuple[int, str], _Sum] = {}
        self._holders: dict[int, str] = {}
        self._first_s: float | None = None
        self._spans: dict[int, tuple[float, float, int]] = {}
        self._waits: list[Wait] = []

    def token(self, choice: int, hops: Iterable[HopTiming], now_s: float) -> None:
        """Record a token."""
        if self._first_s is None:
            self._first_s = now_s
        first, _, count = self._spans.get(choice, (now_s, now_s, 0))
        self._spans[choice] = (first, now_s, count + 1)
        for hop in hops:
            self._holders[hop.stage] = hop.peer
            known = self._sums.get((hop.stage, hop.peer))
            if known is None:
                self._sums[hop.stage, hop.peer] = _Sum(1, hop.queued_s, hop.compute_s, hop.transfer_s, hop)
            else:
                known.tokens += 1
                known.queued_s += hop.queued_s
                known.compute_s += hop.compute_s
                known.transfer_s += hop.transfer_s
                known.last = hop

    def held(self, held: GenerationPaused, now_s: float) -> None:
        """Record that the stream pauses or continues."""
        self._waits.append(Wait(now_s - self._began_s, held.state, held.detail))

    def report(self, now_s: float) -> RouteReport:
        """The report up to now."""
        rates = [(count - 1) / (last - first) for first, last, count in self._spans.values() if last > first]
        return RouteReport(
            route=[self._holders[stage] for stage in sorted(self._holders)],
            hops=[
                HopMean(
                    stage=stage,
                    peer=peer,
                    tokens=known.tokens,
                    queued_s=known.queued_s / known.tokens,
                    compute_s=known.compute_s / known.tokens,
                    transfer_s=known.transfer_s / known.tokens,
                    last_queued_s=known.last.queued_s,
                    last_compute_s=known.last.compute_s,
                    last_transfer_s=known.last.transfer_s,
                )
                for (stage, peer), known in sorted(self._sums.items())
            ],
            first_token_s=None if self._first_s is None else self._first_s - self._began_s,
            total_s=now_s - self._began_s,
            tokens_per_s=sum(rates) / len(rates) if rates else None,
            waits=list(self._waits),
        )


_QUEUED_EVENTS = 64


@dataclass(frozen=True, slots=True)
class PromptProcessed:
    """A prompt was read; for answer `index`."""

    index: int
    read: PromptRead


AnswerUpdate = Delta | GenerationPaused | PromptProcessed


class ApiGeneration:
    """Use as: `open`, read `updates` to the end, and always `close`."""

    def __init__(self, engine: Engine, choices: Sequence[Choice], metrics: Metrics, now_s: Callable[[], float]) -> None:
        self._engine = engine
        self._choices = choices
        self._metrics = metrics
        self._now_s = now_s
        self._streams: list[TokenStream] = []
        self._reads: dict[int, PromptRead] = {}
        self._readers: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[AnswerUpdate | ApiError | None] = asyncio.Queue(_QUEUED_EVENTS)
        self.route = RouteLog(now_s())
        self.problem: str | None = None
        """Code of the error that ended an answer."""

    async def open(self) -> None:
        """Submit all generations. If the engine refuses one, stop all and raise `ApiError`."""
        try:
            for choice in self._choices:
                self._streams.append(self._engine.submit(choice.generation))
        except FusionError as problem:
            await self.close()
            raise of_failure(problem) from problem
        self._readers = [
            asyncio.create_task(self._read(choice, stream))
            for choice, stream in zip(self._choices, self._streams, strict=True)
        ]

    async def close(self) -> None:
        """Cancel what still runs. May be called twice."""
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        await asyncio.gather(*(stream.aclose() for stream in self._streams), return_exceptions=True)

    async def updates(self) -> AsyncIterator[AnswerUpdate]:
        """Yield all events until every answer is complete. Raises `ApiError` if one of them fails."""
        unfinished = len(self._choices)
        while unfinished:
            update = await self._queue.get()
            if isinstance(update, ApiError):
                self.problem = update.body.code
                raise update
            if update is None:
                unfinished -= 1
            else:
                yield update

    def report(self) -> RouteReport:
        """The route up to now."""
        return self.route.report(self._now_s())

    def prompt_read(self, index: int) -> PromptRead | None:
        """Return what was read of the prompt of answer `index`, None if it has not been read yet."""
        return self._reads.get(index)

    @property
    def usage(self) -> Usage:
        """Token counts up to now."""
        prompts = {choice.prompt: choice for choice in reversed(self._choices)}
        prompt_tokens = sum(len(choice.generation.prompt) for choice in prompts.values())
        reads = [self._reads.get(choice.index) for choice in prompts.values()]
        cached = sum(read.cached_tokens for read in reads if read is not None)
        completion_tokens = sum(choice.tokens for choice in self._choices)
        thinks = any(choice.reasoning is not None for choice in self._choices)
        thought = sum(choice.reasoning_tokens for choice in self._choices)
        return Usage(
            prompt_tokens,
            completion_tokens,
            prompt_tokens + completion_tokens,
            CachedDetail(cached),
            ReasoningDetail(thought) if thinks else UNSET,
        )

    async def _read(self, choice: Choice, stream: TokenStream) -> None:
        began_s = self._now_s()
        how: GenerationEnd = "abort"
        try:
            how = await self._follow(choice, stream)
            await self._queue.put(None)
        except ApiError as problem:
            how = "abort" if problem.body.code in _ABORTED else "error"
            await self._queue.put(problem)
        except FusionError as problem:
            how = "error"
            await self._queue.put(of_failure(problem))
        # Any other failure must reach the client too, which would otherwise wait for ever.
        except Exception as problem:  # noqa: BLE001
            how = "error"
            self._metrics.broken(problem)
            await self._queue.put(ApiError(500, "The gateway failed; its log says why.", code="internal_error"))
        finally:
            self._metrics.ended(how, self._now_s() - began_s)
            # The engine does not know of stop strings and would continue after one.
            await stream.aclose()

    async def _follow(self, choice: Choice, stream: TokenStream) -> GenerationEnd:
        began_s = last_s = self._now_s()
        async for event in stream:
            now_s = self._now_s()
            match event:
                case PromptRead():
                    self._reads[choice.index] = event
                    self._metrics.prompt(event)
                    await self._queue.put(PromptProcessed(choice.index, event))
                case Emitted():
                    self._metrics.token(event.index, now_s - (last_s if event.index else began_s))
                    last_s = now_s
                    self.route.token(choice.index, event.hops, now_s)
                    if not (delta := choice.token(event)).is_empty:
                        await self._queue.put(delta)
                    if choice.finish is not None:
                        return "stop"
                case GenerationPaused():
                    self.route.held(event, now_s)
                    await self._queue.put(event)
                case Finished(reason="stop" | "length" as reason):
                    if not (delta := choice.end(reason)).is_empty:
                        await self._queue.put(delta)
                    return reason
                case Finished():
                    raise _failed(event)
        raise ApiError(503, "The engine ended this generation without giving a reason.", code="generation_failed")


_ABORTED = ("generation_cancelled", "deadline_exceeded")
"""Codes of the errors of generations that were ended, not broken."""


def _failed(event: Finished) -> ApiError:
    detail = event.detail or "no reason given"
    match event.reason:
        case "cancelled":
            message = f"The generation was cancelled: {detail}"
            return ApiError(503, message, code="generation_cancelled", retry_after_s=1.0)
        case "deadline":
            return ApiError(504, f"The generation took too long: {detail}", code="deadline_exceeded")
        case _:
            return ApiError(503, f"The generation failed: {detail}", code="generation_failed", retry_after_s=1.0)
