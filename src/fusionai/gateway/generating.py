"""All answers of one request, generated at the same time. The request is over after its last answer, at its first
failure, or when the client disconnects.

Closing it cancels every generation. Neighbours: `choice` reads each stream, `chat` and `completions` serialise the
result.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from fusionai.gateway.answers import CachedDetail, Usage
from fusionai.gateway.choice import Choice, Delta
from fusionai.gateway.errors import ApiError, of_failure
from fusionai.gateway.metrics import Metrics
from fusionai.gateway.route import RouteLog
from fusionai.primitives.errors import FusionError
from fusionai.serving.interface import Emitted, Engine, Finished, Held, PromptRead, TokenStream

_QUEUED_EVENTS = 64


@dataclass(frozen=True, slots=True)
class PromptSaid:
    """A prompt was read; for answer `index`."""

    index: int
    read: PromptRead


Happening = Delta | Held | PromptSaid


class Generating:
    """Use as: `open`, read `happenings` to the end, and always `close`."""

    def __init__(self, engine: Engine, choices: Sequence[Choice], metrics: Metrics, now_s: Callable[[], float]) -> None:
        self._engine = engine
        self._choices = choices
        self._metrics = metrics
        self._now_s = now_s
        self._streams: list[TokenStream] = []
        self._reads: dict[int, PromptRead] = {}
        self._readers: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[Happening | ApiError | None] = asyncio.Queue(_QUEUED_EVENTS)
        self.route = RouteLog(now_s())

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

    async def happenings(self) -> AsyncIterator[Happening]:
        """Yield all events until every answer is complete. Raises `ApiError` if one of them fails."""
        unfinished = len(self._choices)
        while unfinished:
            happening = await self._queue.get()
            if isinstance(happening, ApiError):
                raise happening
            if happening is None:
                unfinished -= 1
            else:
                yield happening

    @property
    def usage(self) -> Usage:
        """Token counts up to now."""
        prompts = {choice.prompt: choice for choice in reversed(self._choices)}
        prompt_tokens = sum(len(choice.generation.prompt) for choice in prompts.values())
        reads = [self._reads.get(choice.index) for choice in prompts.values()]
        cached = sum(read.cached_tokens for read in reads if read is not None)
        completion_tokens = sum(choice.tokens for choice in self._choices)
        return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, CachedDetail(cached))

    async def _read(self, choice: Choice, stream: TokenStream) -> None:
        try:
            await self._follow(choice, stream)
            await self._queue.put(None)
        except ApiError as problem:
            await self._queue.put(problem)
        except FusionError as problem:
            await self._queue.put(of_failure(problem))
        # Any other failure must reach the client too, which would otherwise wait for ever.
        except Exception as problem:  # noqa: BLE001
            self._metrics.broken(problem)
            await self._queue.put(ApiError(500, "The gateway failed; its log says why.", code="internal_error"))
        finally:
            # The engine does not know of stop strings and would continue after one.
            await stream.aclose()

    async def _follow(self, choice: Choice, stream: TokenStream) -> None:
        began_s = last_s = self._now_s()
        async for event in stream:
            now_s = self._now_s()
            match event:
                case PromptRead():
                    self._reads[choice.index] = event
                    self._metrics.prompt(event)
                    await self._queue.put(PromptSaid(choice.index, event))
                case Emitted():
                    self._metrics.token(event.index, now_s - (last_s if event.index else began_s))
                    last_s = now_s
                    self.route.token(choice.index, event.hops, now_s)
                    await self._give(choice.token(event))
                    if choice.is_over:
                        return
                case Held():
                    self.route.held(event, now_s)
                    await self._queue.put(event)
                case Finished(reason="stop" | "length" as reason):
                    await self._give(choice.end(reason))
                    return
                case Finished():
                    raise _failed(event)
        raise ApiError(503, "The engine ended this generation without giving a reason.", code="generation_failed")

    async def _give(self, delta: Delta) -> None:
        if not delta.is_empty:
            await self._queue.put(delta)


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
