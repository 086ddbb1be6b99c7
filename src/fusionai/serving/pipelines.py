"""Several serving engines of one model behind one interface: each text goes to the pipeline that finishes it soonest.

Every pipeline is an engine with a job, machines and a plan of its own, so that a fault in one never stops another. A
generation whose pipeline ends, or waits for a machine, goes on in another pipeline: it is submitted there with the
tokens that it has emitted, which are read as part of the prompt. A draw depends on the token's number only, so the
answer has the same tokens.

Neighbours: `coordination.serving.routing` chooses, `serving.engine` serves, `client.serving.pipelines` opens and
dissolves pipelines, the gateway submits generations.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeVar

import msgspec

from fusionai.coordination.serving.routing import Answered, Pace, Routing, TextToRoute
from fusionai.execution.connections import Deployment
from fusionai.ir.serving import Purpose
from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import ExecutionError, FusionError
from fusionai.scheduling.problem.types import Plan
from fusionai.serving.engine import ServingEngine
from fusionai.serving.interface import (
    Emitted,
    EngineBusy,
    EngineStatus,
    Finished,
    Generation,
    GenerationPaused,
    PromptRead,
    PromptTooLong,
    StreamEvent,
    TextPair,
    TokenStream,
)

MOVING_S: Final = 60.0
"""Time for which a generation whose pipeline has ended tries to get a place in another, in seconds (chosen)."""
RETRY_S: Final = 0.5
TRIED_TOKENS: Final = 25
"""Length of the answer with which a pipeline is tried (chosen): one token, and two halves after it."""
TRIED_S: Final = 10.0
"""Longest time for that, in seconds (chosen)."""
TRIED_SCOPE: Final = "trial of a pipeline"
"""Scope of these texts, so that they share no cache with those of users."""
T = TypeVar("T")


class PipelinedEngine:
    """Implements `serving.interface.Engine` over the open pipelines. `first`: the pipeline to begin with, whose model
    and limits all others share; its engine need not be ready. `ended` is done when no pipeline is left, with the error
    of the last one if it had one. `changing` is held while a pipeline is opened or an adapter is loaded."""

    def __init__(self, first: ServingEngine, pace: Pace, clock: Clock) -> None:
        self.purpose: Purpose = first.purpose
        self.vocabulary = first.vocabulary
        self.context_tokens = first.context_tokens
        self.stop_tokens = first.stop_tokens
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.changing = asyncio.Lock()
        self.clock = clock
        self.routing = Routing()
        self._engines: dict[int, ServingEngine] = {}
        self._newest = first
        self._past = EngineStatus(state="stopped")
        """Counts and faults of pipelines that are closed."""
        self.add(1, first, pace)

    # ------------------------------------------------------------------------------------------------- pipelines

    def add(self, number: int, engine: ServingEngine, pace: Pace) -> None:
        """Open a pipeline."""
        engine.adapters.update(self._newest.adapters)
        self._newest = engine
        self._engines[number] = engine
        self.routing.open(number, pace)

    def remove(self, number: int, error: BaseException | None = None) -> None:
        """Close a pipeline: it gets no further texts, and those that it has go on elsewhere when its engine stops.
        `error`: why its engine has ended, None if it was asked to."""
        if (engine := self._engines.pop(number, None)) is None:
            return
        self.routing.close(number)
        self._past = _sum([self._past, engine.status])
        if not self._engines and not self.ended.done():
            self.ended.set_result(None) if error is None else self.ended.set_exception(error)

    def close(self) -> None:
        """Close all pipelines: no text moves any more."""
        for number in tuple(self._engines):
            self.remove(number)

    @property
    def open(self) -> Mapping[int, ServingEngine]:
        """Engines of the open pipelines, by number, the oldest first."""
        return self._engines

    @property
    def ready(self) -> frozenset[int]:
        """Numbers of the pipelines that compute."""
        return frozenset(number for number, engine in self._engines.items() if engine.status.state == "ready")

    @property
    def oldest(self) -> ServingEngine:
        """The engine of the oldest open pipeline; without one, the engine that was opened last."""
        return next(iter(self._engines.values()), self._newest)

    @property
    def deployment(self) -> Deployment:
        """The oldest pipeline's plan in force, with tickets and addresses."""
        return self.oldest.deployment

    @property
    def plan(self) -> Plan:
        """The oldest pipeline's plan in force, without standbys that are lost."""
        return self.oldest.plan

    def is_warm(self, stage: int) -> bool:
        """Return whether the spare of this stage of the oldest pipeline could take over now."""
        return self.oldest.is_warm(stage)

    def plan_of(self, stream: TokenStream) -> tuple[int, Plan]:
        """Return the number and the plan of the pipeline in which a generation is."""
        number = stream.pipeline if isinstance(stream, RoutedStream) else 1
        return number, self._engines.get(number, self._newest).plan

    async def try_out(self, number: int) -> bool:
        """Measure how fast a pipeline answers a short text, and have the choice of pipelines depend on it. The faster
        half of the answer counts, so that one stall does not. Returns whether it was measured: it must be open and
        idle, and generate tokens."""
        engine = self._engines.get(number)
        if engine is None or self.purpose != "generate" or number not in self.ready or self.routing.texts[number]:
            return False
        prompt = tuple((17 * place + 3) % self.vocabulary for place in range(TRIED_TOKENS))
        at_s: list[float] = []
        with suppress(FusionError, TimeoutError):
            stream = engine.submit(Generation(prompt=prompt, max_tokens=TRIED_TOKENS, scope=TRIED_SCOPE))
            try:
                async with asyncio.timeout(TRIED_S):
                    at_s = [self.clock.now_s() async for event in stream if isinstance(event, Emitted)]
            finally:
                await stream.aclose()
        if len(at_s) < TRIED_TOKENS or number not in self._engines:
            return False
        half = TRIED_TOKENS // 2
        self.routing.tried(number, min(at_s[half] - at_s[0], at_s[-1] - at_s[half]) / half)
        return True

    # -------------------------------------------------------------------------------------------------- adapters

    @property
    def adapters(self) -> Mapping[str, int]:
        """Names of the adapters that generations may use, with their numbers."""
        return self.oldest.adapters

    @property
    def free_adapters(self) -> tuple[int, ...]:
        """Numbers of adapters that have no name and that no generation uses any more."""
        free = [set(engine.free_adapters) for engine in self._engines.values()]
        return tuple(sorted(set.intersection(*free))) if free else ()

    async def load_adapter(self, name: str, number: int) -> None:
        """Have all stages load the weights that the manifest has now, then offer them as adapter `name`. Generations
        pause meanwhile. Raises `ExecutionError` if the last pipeline ends before."""
        engines = list(self._engines.values())
        loads = await asyncio.gather(*(one.load_adapter(name, number) for one in engines), return_exceptions=True)
        failures = [failure for failure in loads if isinstance(failure, BaseException)]
        if failures and len(failures) == len(engines):
            raise failures[0]

    def drop_adapter(self, name: str) -> None:
        """Refuse further generations with this adapter."""
        for engine in self._engines.values():
            engine.adapters.pop(name, None)

    # -------------------------------------------------------------------------------------------------- requests

    def submit(self, generation: Generation) -> RoutedStream:
        """Start a generation. Raises `EngineBusy`, `PromptTooLong`, `ExecutionError`."""
        number, stream = self.place(generation)
        return RoutedStream(self, generation, number, stream)

    def place(self, generation: Generation, without: Collection[int] = ()) -> tuple[int, TokenStream]:
        """Submit a generation to the best pipeline that has room, and return its number with the stream. Raises the
        errors of `submit`, and `ExecutionError` if only pipelines of `without` are open."""
        text = routed(generation)
        problem: FusionError = ExecutionError("no pipeline of the model is open.")
        for number in self.routing.ranked(text, self.ready):
            if number in without:
                continue
            try:
                stream = self._engines[number].submit(generation)
            except (EngineBusy, PromptTooLong) as error:
                # Caches differ in size, so a text that is too long for one pipeline may fit into another.
                problem = error if isinstance(error, EngineBusy) or not isinstance(problem, EngineBusy) else problem
                continue
            self.routing.began(number, text)
            return number, stream
        raise problem

    async def embed(
        self, prompts: Sequence[Sequence[int]], scope: str, adapter: str | None = None
    ) -> list[list[float]]:
        """Vectors of the prompts, made of their last hidden states as the model's files say."""
        tokens = max(prompts, key=len, default=())
        return await self._read(tokens, (scope, adapter or ""), lambda engine: engine.embed(prompts, scope, adapter))

    async def score(self, pairs: Sequence[TextPair], scope: str) -> list[list[float]]:
        """Scores of pairs of texts, one per label of the model."""
        tokens = max((pair.tokens for pair in pairs), key=len, default=())
        return await self._read(tokens, (scope, ""), lambda engine: engine.score(pairs, scope))

    async def _read(
        self, tokens: Sequence[int], cache: tuple[str, ...], ask: Callable[[ServingEngine], Awaitable[T]]
    ) -> T:
        """Ask the best pipeline; if it has no room or ends meanwhile, ask the next one."""
        text = TextToRoute(tokens=tokens, cache=cache, most_tokens=0)
        tried: set[int] = set()
        problem: FusionError = ExecutionError("no pipeline of the model is open.")
        while (number := next((n for n in self.routing.ranked(text, self.ready) if n not in tried), None)) is not None:
            tried.add(number)
            engine = self._engines[number]
            self.routing.began(number, text)
            try:
                return await ask(engine)
            except FusionError as error:
                if not isinstance(error, EngineBusy) and engine.status.state != "stopped":
                    raise
                problem = error
            finally:
                self.routing.ended(number)
        raise problem

    # ---------------------------------------------------------------------------------------------------- status

    @property
    def status(self) -> EngineStatus:
        """Sums over the pipelines. Ready if one of them is."""
        parts = {number: engine.status for number, engine in self._engines.items()}
        if not parts:
            return self._past
        first = next((one for one in parts.values() if one.state == "ready"), next(iter(parts.values())))
        stages = [
            msgspec.structs.replace(stage, pipeline=number) for number, one in parts.items() for stage in one.stages
        ]
        whole = _sum([self._past, *parts.values()])
        return replace(
            whole,
            state=first.state,
            detail=first.detail,
            model=first.model,
            stages=tuple(stages),
            running=sum(one.running for one in parts.values()),
            queued=sum(one.queued for one in parts.values()),
            pages=sum(one.pages for one in parts.values()),
            pages_free=sum(one.pages_free for one in parts.values()),
            tokens_per_s=sum(one.tokens_per_s for one in parts.values()),
            members=tuple(sorted({name for one in parts.values() for name in one.members})),
            extra={**whole.extra, "pipelines": float(len(parts))},
        )


class RoutedStream:
    """A generation that may move to another pipeline. `pipeline`: the number of its present pipeline."""

    def __init__(self, engine: PipelinedEngine, generation: Generation, pipeline: int, stream: TokenStream) -> None:
        self.pipeline = pipeline
        self._engine = engine
        self._generation = generation
        self._stream = stream
        self._began_s = engine.clock.now_s()
        self._tokens: list[int] = list(generation.answered)
        self._is_read = False
        self._is_placed = True
        self._is_disturbed = False
        self._planned_s = 0.0
        self._crowded_s = 0.0
        """Planned time of the tokens after the first, and the same times the number of other texts."""
        self._first_s = 0.0

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        return self._streamed()

    async def aclose(self) -> None:
        """Cancel the generation if it is not over."""
        self._leave()
        await self._stream.aclose()

    async def _streamed(self) -> AsyncIterator[StreamEvent]:
        try:
            while True:
                async for event in self._stream:
                    if await self._goes_elsewhere(event):
                        break
                    if isinstance(event, PromptRead):
                        if self._is_read:
                            continue
                        self._is_read = True
                    self._see(event)
                    yield event
                    if isinstance(event, Finished):
                        return
        finally:
            await self.aclose()

    async def _goes_elsewhere(self, event: StreamEvent) -> bool:
        """Move to another pipeline if this one can't continue the generation and another can."""
        match event:
            case GenerationPaused(state="waiting"):
                return bool(self._engine.ready - {self.pipeline}) and await self._move(patience_s=0.0)
            case Finished(reason="failed"):
                engine = self._engine.open.get(self.pipeline)
                if engine is not None and engine.status.state != "stopped":
                    return False  # the generation itself failed
                return await self._move(patience_s=MOVING_S)
            case _:
                return False

    async def _move(self, *, patience_s: float) -> bool:
        """Submit the rest of the generation to another pipeline. If all are full, try again for `patience_s`."""
        clock, former = self._engine.clock, self._stream
        until_s = clock.now_s() + patience_s
        while True:
            try:
                number, stream = self._engine.place(self._rest(), without=(self.pipeline,))
                break
            except EngineBusy as busy:
                if clock.now_s() >= until_s:
                    return False
                await asyncio.sleep(min(busy.retry_after_s, RETRY_S))
            except FusionError:
                return False
        self._leave()
        self.pipeline, self._stream = number, stream
        self._is_placed = self._is_disturbed = True
        await former.aclose()
        return True

    def _rest(self) -> Generation:
        """What another engine has to do."""
        asked = self._generation
        deadline_s = asked.deadline_s
        if deadline_s is not None:
            deadline_s = max(0.0, deadline_s - (self._engine.clock.now_s() - self._began_s))
        # The prompt's log-probabilities are reported with `PromptRead`, which comes once.
        logprobs = asked.prompt_logprobs and not self._is_read
        return replace(asked, answered=tuple(self._tokens), deadline_s=deadline_s, prompt_logprobs=logprobs)

    def _see(self, event: StreamEvent) -> None:
        now_s, routing = self._engine.clock.now_s(), self._engine.routing
        match event:
            case Emitted(token=token):
                if len(self._tokens) == len(self._generation.answered):
                    self._first_s = now_s
                else:
                    planned_s, others = routing.token_s(self.pipeline)
                    self._planned_s += planned_s
                    self._crowded_s += planned_s * others
                self._tokens.append(token)
            case GenerationPaused():
                self._is_disturbed = True
            case Finished(reason=reason):
                if reason in ("stop", "length") and not self._is_disturbed:
                    measured_s = now_s - self._first_s
                    answer = Answered(len(self._tokens), self._planned_s, self._crowded_s, measured_s)
                    routing.answered(self.pipeline, answer)
                self._leave()
            case _:
                pass

    def _leave(self) -> None:
        """Have the pipeline counted without this generation."""
        if self._is_placed:
            self._is_placed = False
            self._engine.routing.ended(self.pipeline, routed(self._rest()))


def routed(generation: Generation) -> TextToRoute:
    """Return what the choice of a pipeline depends on."""
    cache = (generation.scope, generation.adapter or "")
    left = max(0, generation.max_tokens - len(generation.answered))
    return TextToRoute(tokens=generation.text, cache=cache, most_tokens=left)


def _sum(parts: Sequence[EngineStatus]) -> EngineStatus:
    """Return what pipelines have done so far, together."""
    return EngineStatus(
        state="stopped",
        emitted_tokens=sum(one.emitted_tokens for one in parts),
        prompt_tokens=sum(one.prompt_tokens for one in parts),
        prefix_hit_tokens=sum(one.prefix_hit_tokens for one in parts),
        faults=tuple(sorted((note for one in parts for note in one.faults), key=lambda note: note.at_s)),
        extra={name: _extra(name, parts) for name in sorted({name for one in parts for name in one.extra})},
    )


def _extra(name: str, parts: Sequence[EngineStatus]) -> float:
    """Sum of a count, mean of a duration."""
    values = [one.extra[name] for one in parts if name in one.extra]
    return sum(values) / len(values) if name.endswith("_seconds") else sum(values)
