"""What all endpoints of a gateway share: a request's settings as parameters of its generations, and sending answers.

Sampling options that a request leaves out come from the model's `generation_config.json`, otherwise from OpenAI's
defaults. `app` creates the context for the endpoints, which only word the answers.

Templates, tokenizers and grammars never run on the event loop that all streams share, because a client chooses the text
and a model's author the template. `TextThreads` decides how many of them run at once and how long each may take;
constraints compile on a thread of their own (`serving.constraint`).
"""

from __future__ import annotations

import asyncio
import ctypes
import secrets
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, ParamSpec, Protocol, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from fusionai.gateway.answers import RouteReport
from fusionai.gateway.config import GatewayConfig, RequestLimits
from fusionai.gateway.errors import ApiError, as_api_error, invalid, no_such_model
from fusionai.gateway.generation import AnswerUpdate, ApiGeneration, Choice, Delta
from fusionai.gateway.metrics import Metrics
from fusionai.gateway.requests import OPENAI, ChatRequest, CompletionRequest, OtherFields, Settings, read
from fusionai.gateway.streaming import AnswerStream, StreamForm, Streams, while_connected
from fusionai.gateway.tracing import Tracer
from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import UsageError
from fusionai.serving.constraint import ConstraintCompiler, Form
from fusionai.serving.interface import GIFTS, AdapterLoader, Constraint, Engine, Generation, Gift, Sampling
from fusionai.serving.model_text import ModelText
from fusionai.serving.thinking_first import FreeThinking, ThinkingFirst

Body = TypeVar("Body", bound=Struct)
P = ParamSpec("P")
Result = TypeVar("Result")
_ROUTE_HEADER: Final = "x-fusion-route"
_WORDS: Final[Mapping[Gift, str]] = {
    "tokens": "text",
    "vectors": "vectors of texts",
    "scores": "scores of pairs of texts",
    "speech": "texts of speech",
}
_PATHS: Final[Mapping[Gift, str]] = {
    "tokens": "`/v1/chat/completions`",
    "vectors": "`/v1/embeddings`",
    "scores": "`/v1/rerank`, `/v1/score`",
    "speech": "`/v1/audio/transcriptions`",
}
"""Where requests for each of these go."""
_SEEDS: Final = 2**63


@dataclass(frozen=True, slots=True)
class Heading:
    """What names an answer, and which optional parts it contains."""

    answer_id: str
    created: int
    model: str
    is_stream: bool
    with_usage: bool
    with_route: bool
    with_logprobs: bool

    def route(self, generation: ApiGeneration) -> RouteReport | UnsetType:
        """Return the route up to now, if the answer contains it."""
        return generation.report() if self.with_route else UNSET


class AnswerForm(StreamForm, Protocol):
    """How an endpoint words the answer to one request. One object per request, because it may hold a stream's state."""

    def begin(self, generation: ApiGeneration) -> Iterable[bytes]:
        """Return what a stream begins with."""
        ...

    def update(self, update: AnswerUpdate, generation: ApiGeneration) -> Iterable[bytes]:
        """Return what a stream says of an update."""
        ...

    def end(self, generation: ApiGeneration) -> Iterable[bytes]:
        """Return what a stream ends with, after all its answers are complete."""
        ...

    def whole(self, answers: Sequence[Delta], generation: ApiGeneration) -> Struct:
        """Return the body that has all answers, each of which is complete."""
        ...


def json_response(body: object, status: int = 200) -> Response:
    """Return a complete answer."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


class GatewayContext:
    """The endpoints' shared state; one per gateway."""

    def __init__(
        self,
        config: GatewayConfig,
        engine: Engine,
        text: ModelText,
        metrics: Metrics,
        clock: Clock,
        tracer: Tracer,
        loader: AdapterLoader | None = None,
    ) -> None:
        limits = config.limits
        if text.images is not None or (text.source is not None and text.source.speech is not None):
            limits = replace(limits, body_bytes=limits.image_body_bytes)
        self.config = replace(config, limits=limits)
        self.engine = engine
        self.text = text
        self.metrics = metrics
        self.streams = Streams()
        self.clock = clock
        self.tracer = tracer
        self.loader = loader
        self._compiler: ConstraintCompiler | None = None
        self._threads = TextThreads(config.limits)

    @property
    def stop_tokens(self) -> frozenset[int]:
        """The model's own stop tokens."""
        return self.text.stop_tokens | self.engine.stop_tokens

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that can be used now."""
        return self.config.adapters if self.loader is None else self.loader.names

    def close(self) -> None:
        """Release the constraint compiler's thread."""
        if self._compiler is not None:
            self._compiler.close()

    # Every method below raises `ApiError` for a request that can't be served.

    async def read(
        self,
        request: Request,
        kind: type[Body],
        others: OtherFields = OPENAI,
        *,
        any_type: bool = False,
        gift: Gift | None = "tokens",
    ) -> Body:
        """Return the request's checked body, unless the engine can't serve it now. `others`: fields of its protocol
        that `kind` lacks. `any_type`: its `Content-Type` does not matter. `gift`: what the model must give."""
        self.check_ready()
        if gift is not None:
            self.check_gives(gift)
        ignored = None if self.config.is_strict else request.state.ignored
        return await read(request, kind, self.config.limits, others, ignored, any_type=any_type)

    def heading(self, request: Request, body: ChatRequest | CompletionRequest, prefix: str) -> Heading:
        """Return the heading of the answer; its id begins with `prefix`."""
        adapter = self.adapter_of(body.model)
        if body.stream_options is not None and not body.stream:
            raise invalid("`stream_options` needs `stream: true`.", "stream_options")
        return Heading(
            answer_id=prefix + secrets.token_hex(12),
            created=int(self.clock.wall_s()),
            model=adapter or self.config.model,
            is_stream=bool(body.stream),
            with_usage=bool(body.stream_options is not None and body.stream_options.include_usage),
            with_route=_wants_route(request, body.fusion_route),
            with_logprobs=body.logprobs is not None and body.logprobs is not False,
        )

    def check_ready(self) -> None:
        """Check that the engine has been ready and has not stopped. While it recovers, requests wait instead."""
        status = self.engine.status
        if status.state in ("starting", "stopped"):
            message = f"The model is not ready ({status.state}{f': {status.detail}' if status.detail else ''})."
            raise ApiError(503, message, code="not_ready", retry_after_s=2.0)

    def check_gives(self, gift: Gift) -> None:
        """Check that the model gives what a request asks for."""
        source = self.text.source
        gives = GIFTS[self.engine.purpose]
        if source is not None:
            gives = ("tokens",) if source.speech is None else ("speech",)
        if gift not in gives:
            paths = ", ".join(f"{_WORDS[one]} ({_PATHS[one]})" for one in gives)
            message = f"The model `{self.config.model}` gives no {_WORDS[gift]}. It gives {paths}."
            raise ApiError(400, message, code="unsupported_by_model", param="model")

    def adapter_of(self, name: str) -> str | None:
        """Return the adapter that a request's `model` names; None for the base model."""
        served = (self.config.model, *self.adapters)
        if name not in (*served, *self.config.aliases):
            raise no_such_model(name, (*served, *self.config.aliases), served)
        return name if name in self.adapters else None

    def has_effort(self, request: Request, effort: str | None, where: str, *, with_tools: bool) -> bool:
        """Return whether the model's template knows this level of thinking. If not, the field `where` counts as
        ignored, because agents ask every model for a level. Strict gateways return True, and the chat refuses it."""
        if effort is None or self.config.is_strict:
            return True
        try:
            self.text.effort_variables(effort, with_tools=with_tools)
        except UsageError:
            request.state.ignored.add(where)
            return False
        return True

    def check_count(self, n: int, prompts: int) -> int:
        """Return the total number of generations, which one request may have."""
        most = self.config.limits.choices
        if n * prompts > most:
            raise invalid(f"The request asks for {n * prompts} generations; at most {most} are allowed.", "n")
        return n * prompts

    def room_for(self, prompt: int, asked: int | None, default: int | None, param: str, start: int = 0) -> int:
        """Return the largest number of tokens of the answer, which with the prompt must fit into the context. `start`:
        tokens of the prompt that a decoder behind an encoder begins with."""
        room = self.engine.context_tokens - prompt
        wanted = default if asked is None else asked
        if self.text.source is not None:
            places = self.text.source.room(start)
            room = room if places is None else min(room, places)
            wanted = self.text.source.length(start) if wanted is None else wanted
            if places is not None and asked is not None and asked > places:
                message = f"The model's decoder has places for {places} tokens of an answer, not for {asked}."
                raise ApiError(400, message, code="context_length_exceeded", param=param)
        if room < 1 or (asked is not None and asked > room):
            message = (
                f"The model's limit is {self.engine.context_tokens} tokens for prompt and answer; the prompt has "
                f"{prompt}{'' if wanted is None else f', and the request asks for {wanted} more'}."
            )
            raise ApiError(400, message, code="context_length_exceeded", param=param)
        return room if wanted is None else min(wanted, room)

    async def off_loop(self, work: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        """Call `work` in a thread with a time limit, because all streams share the event loop."""
        return await self._threads.run(work, *args, **kwargs)

    async def check_length(self, written: Iterable[str], param: str) -> None:
        """Check that a prompt is not far too long for the model, before it is rendered and tokenized as a whole.
        `written`: all texts that it is made of."""
        limit = self.engine.context_tokens

        def length() -> int | None:
            text = " ".join(written)
            return len(text) if self.text.tokenizer.is_beyond(text, limit) else None

        size = await self.off_loop(length)
        if size is not None:
            message = f"The model's limit is {limit} tokens; the prompt, {size} characters, has far more."
            raise ApiError(400, message, code="context_length_exceeded", param=param)

    def generation(self, request: Request, body: Settings) -> tuple[Generation, tuple[str, ...]]:
        """Return what all generations of the request share, and its stop strings. The scope separates prefix caches of
        different API keys."""
        vocabulary = self.engine.vocabulary
        sampling = _sampling_of(body, self.text.sampling, vocabulary)
        stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        if "" in stops:  # it would end every answer at once
            raise invalid("A stop string can't be empty.", "stop")
        stop_tokens = frozenset(body.stop_token_ids or ())
        outside = [token for token in stop_tokens if token >= vocabulary]
        if outside:
            raise invalid(f"Token {min(outside)} is outside the vocabulary of {vocabulary}.", "stop_token_ids")
        limits = [limit for limit in (body.timeout_s, self.config.limits.deadline_s) if limit is not None]
        shared = Generation(
            prompt=(),
            max_tokens=1,
            sampling=sampling,
            stop_tokens=stop_tokens if body.ignore_eos else stop_tokens | self.stop_tokens,
            scope=request.state.holder.scope,
            adapter=self.adapter_of(body.model),
            deadline_s=min(limits, default=None),
        )
        return shared, stops

    async def constraint(self, form: Form, thinking: FreeThinking | None = None) -> Constraint:
        """Compile a constraint. `thinking`: what comes before the text that it applies to."""
        with as_api_error():
            if self._compiler is None:
                self._compiler = ConstraintCompiler(
                    self.text.tokenizer, vocabulary=self.engine.vocabulary, stop_tokens=self.stop_tokens
                )
            compiled = await self._compiler.compile(form)
        return compiled if thinking is None else ThinkingFirst(compiled, thinking, vocabulary=self.engine.vocabulary)

    def ruled(self, start: Sequence[int], inner: Constraint | None) -> Constraint | None:
        """Return the constraint `inner` together with the rules of a decoder that begins with `start`."""
        source = self.text.source
        if source is None:
            return inner
        return source.constraint(start, self.engine.vocabulary, self.stop_tokens, inner)

    async def reply(self, request: Request, choices: list[Choice], form: AnswerForm, *, is_stream: bool) -> Response:
        """Start the generations and answer: with a stream, or with the whole answer once it is there."""
        model = choices[0].generation.adapter or self.config.model
        span = self.tracer.begin_generations(request, model, choices, is_stream=is_stream)
        generation = ApiGeneration(self.engine, choices, self.metrics, self.clock.now_s)

        async def close() -> None:
            try:
                await generation.close()
            finally:
                span.end_of(generation, choices)

        try:
            await generation.open()
        except ApiError as problem:
            span.end({}, problem.body.code)
            raise
        if is_stream:
            return AnswerStream(
                _pieces(generation, form),
                form,
                self.config.limits,
                self.streams,
                on_slow=self.metrics.slow.inc,
                on_gone=self.metrics.disconnected.inc,
                on_end=close,
            )
        try:
            whole = await while_connected(request, _whole(generation, len(choices), form))
        finally:
            await close()
        return json_response(whole)


async def _whole(generation: ApiGeneration, count: int, form: AnswerForm) -> Struct:
    deltas: list[list[Delta]] = [[] for _ in range(count)]
    async for update in generation.updates():
        if isinstance(update, Delta):
            deltas[update.index].append(update)
    wholes = [
        Delta(
            at,
            "".join(part.text for part in parts),
            tuple(call for part in parts for call in part.calls),
            tuple(one for part in parts for one in part.logprobs),
            parts[-1].finish if parts else None,
            "".join(part.reasoning for part in parts),
            parts[-1].stop if parts else None,
        )
        for at, parts in enumerate(deltas)
    ]
    return form.whole(wholes, generation)


async def _pieces(generation: ApiGeneration, form: AnswerForm) -> AsyncGenerator[bytes, None]:
    # What is said at once goes out at once: a client can't have read the first part of it before the last one waits.
    yield b"".join(form.begin(generation))
    async for update in generation.updates():
        yield b"".join(form.update(update, generation))
    yield b"".join(form.end(generation))


def numbered(shared: Generation, index: int, prompt: tuple[int, ...], room: int, **more: Any) -> Generation:
    """Return generation `index` of a request, of at most `room` tokens. Each has its own seed, so that it can be
    reproduced alone."""
    sampling = replace(shared.sampling, seed=(shared.sampling.seed + index) % _SEEDS)
    return replace(shared, prompt=prompt, max_tokens=max(room, 1), sampling=sampling, **more)


def _wants_route(request: Request, asked: bool | None) -> bool:
    if asked is not None:
        return asked
    value = request.headers.get(_ROUTE_HEADER, "0").strip().lower()
    if value not in ("0", "1", "true", "false"):
        raise invalid(f"The header `{_ROUTE_HEADER}` must be 0 or 1, got {value[:20]!r}.", _ROUTE_HEADER)
    return value in ("1", "true")


_PLAIN_OPTIONS: Final = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""Sampling options that the engine takes as the request gives them."""


def _sampling_of(settings: Settings, advised: Sampling, vocabulary: int) -> Sampling:
    """Return the sampling options. If the request has no seed, a random one is used, so that repeated requests give
    other answers."""
    given = {name: value for name in _PLAIN_OPTIONS if (value := getattr(settings, name)) is not None}
    if settings.top_k is not None:
        given["top_k"] = max(settings.top_k, 0)
    seed = secrets.randbelow(_SEEDS) if settings.seed is None else settings.seed % _SEEDS
    bias = tuple((_token(name, vocabulary), value) for name, value in (settings.logit_bias or {}).items())
    return replace(advised, **given, seed=seed, logit_bias=bias)


def _token(name: str, vocabulary: int) -> int:
    token = int(name) if name.isascii() and name.isdecimal() and len(name) < 12 else vocabulary
    if token >= vocabulary:
        raise invalid(f"Expected a token id below {vocabulary}, got {name[:40]!r}.", "logit_bias")
    return token


class TextThreads:
    """Runs work in threads, at most `RequestLimits.texts` at once, each for at most `text_s`.

    Each piece of work has a thread of its own, which is a daemon: work that can't be interrupted holds its place until
    it ends, but never the process."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limit_s = limits.text_s
        self._places = asyncio.Semaphore(limits.texts)

    async def run(self, work: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        """Return the work's result. Raises `ApiError` for failures of templates and tokenizers and for work that takes
        too long: it is interrupted. With all places taken for that long, the gateway is busy."""
        try:
            async with asyncio.timeout(self._limit_s):
                await self._places.acquire()
        except TimeoutError:
            message = "All threads that read prompts are busy."
            raise ApiError(503, message, code="text_threads_busy", retry_after_s=self._limit_s) from None
        job = _Job(lambda: work(*args, **kwargs), self._places.release)
        try:
            with as_api_error():
                async with asyncio.timeout(self._limit_s):
                    return await job.result
        except TimeoutError:
            message = f"Reading this prompt took longer than {self._limit_s:g} s."
            raise ApiError(400, message, code="prompt_too_costly") from None
        finally:
            job.interrupt()


class _Interrupted(SystemExit):
    """Raised inside a thread whose work is not needed any more. A thread that ends with it prints nothing."""


class _Job:
    """One piece of work in a thread that has begun. `result`: a future on the event loop."""

    def __init__(self, work: Callable[[], Any], on_end: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[Any] = self._loop.create_future()
        self._work = work
        self._on_end = on_end
        self._mutex = threading.Lock()
        self._runs = True
        self._thread = threading.Thread(target=self._run, name="gateway-text", daemon=True)
        self._thread.start()

    def interrupt(self) -> None:
        """Raise an error in the thread if it still works. It ends between two steps of Python code, so not within a
        call of a library that is not written in Python."""
        with self._mutex:
            if self._runs and self._thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread.ident), ctypes.py_object(_Interrupted)
                )

    def _run(self) -> None:
        value, error = None, None
        try:
            try:
                value = self._work()
            finally:
                with self._mutex:
                    self._runs = False
        except BaseException as problem:  # noqa: BLE001 - a thread's boundary: the caller gets every error
            error = problem
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._ended, value, error)

    def _ended(self, value: Any, error: BaseException | None) -> None:
        self._on_end()
        if self.result.done():  # the caller has gone
            return
        if error is None:
            self.result.set_result(value)
        else:
            self.result.set_exception(error)
