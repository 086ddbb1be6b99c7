"""Converts a request's fields into the engine's parameters, the same way for chat and completions, and checks them.

Sampling options that a request leaves out come from the model's `generation_config.json`, otherwise from OpenAI's
defaults. `context` calls these functions for its endpoints.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, ParamSpec, TypeVar

from starlette.requests import Request

from fusionai.gateway.config import GatewayConfig
from fusionai.gateway.errors import ApiError, as_api_error, invalid, nearest
from fusionai.gateway.requests import Settings
from fusionai.serving.interface import Constraint, Engine, Generation, Sampling
from fusionai.serving.model_text import ModelText

P = ParamSpec("P")
Result = TypeVar("Result")
_ROUTE_HEADER: Final = "x-fusion-route"
_LARGE_CHARACTERS: Final = 4096
"""Texts from this length on are processed in a thread (chosen)."""
_SHOWN: Final = 8
_SEEDS: Final = 2**63


@dataclass(frozen=True, slots=True)
class GenerationParameters:
    """What all generations of one request share. `scope` separates prefix caches of different API keys."""

    sampling: Sampling
    stops: tuple[str, ...]
    stop_tokens: frozenset[int]
    scope: str
    adapter: str | None
    deadline_s: float | None

    def generation(
        self,
        index: int,
        prompt: tuple[int, ...],
        room: int,
        logprobs: int | None,
        *,
        prompt_logprobs: bool = False,
        constraint: Constraint | None = None,
    ) -> Generation:
        """Generation `index` of the request, of at most `room` tokens. Each has its own seed, so that it can be
        reproduced alone."""
        return Generation(
            prompt=prompt,
            max_tokens=max(room, 1),
            sampling=replace(self.sampling, seed=(self.sampling.seed + index) % _SEEDS),
            stop_tokens=self.stop_tokens,
            logprobs=logprobs,
            scope=self.scope,
            adapter=self.adapter,
            constraint=constraint,
            deadline_s=self.deadline_s,
            prompt_logprobs=prompt_logprobs,
        )


def check_ready(engine: Engine) -> None:
    """Raise `ApiError` 503 if the engine has not been ready yet or has stopped. While it recovers, requests wait
    instead."""
    status = engine.status
    if status.state in ("starting", "stopped"):
        detail = f": {status.detail}" if status.detail else ""
        raise ApiError(503, f"The model is not ready ({status.state}{detail}).", code="not_ready", retry_after_s=2.0)


def adapter_of(name: str, config: GatewayConfig) -> str | None:
    """The adapter that a request's `model` names; None for the base model. Raises `ApiError` 404 for a model that is
    not served here."""
    known = (config.model, *config.aliases, *config.adapters)
    if name not in known:
        near = nearest(name, known) or f" Served here: `{'`, `'.join((config.model, *config.adapters)[:_SHOWN])}`."
        raise ApiError(404, f"The model `{name}` does not exist.{near}", code="model_not_found", param="model")
    return name if name in config.adapters else None


def wants_route(request: Request, asked: bool | None) -> bool:
    """Return whether the answer is asked to include its route."""
    if asked is not None:
        return asked
    value = request.headers.get(_ROUTE_HEADER, "0").strip().lower()
    if value not in ("0", "1", "true", "false"):
        raise invalid(f"The header `{_ROUTE_HEADER}` must be 0 or 1, got {value[:20]!r}.", _ROUTE_HEADER)
    return value in ("1", "true")


def stream_wanted(settings: Settings) -> bool:
    """Return whether the answer is streamed. Raises `ApiError` for stream options without a stream."""
    if settings.stream_options is not None and not settings.stream:
        raise invalid("`stream_options` needs `stream: true`.", "stream_options")
    return bool(settings.stream)


def sampling_of(settings: Settings, advised: Sampling, vocabulary: int) -> Sampling:
    """Sampling options. If the request has no seed, a random one is used, so that repeated requests give other
    answers."""
    bias = tuple((_token(name, vocabulary), value) for name, value in (settings.logit_bias or {}).items())
    top_k = advised.top_k if settings.top_k is None else max(settings.top_k, 0)
    return Sampling(
        temperature=_or(settings.temperature, advised.temperature),
        top_p=_or(settings.top_p, advised.top_p),
        top_k=top_k,
        min_p=_or(settings.min_p, advised.min_p),
        seed=secrets.randbelow(_SEEDS) if settings.seed is None else settings.seed % _SEEDS,
        presence_penalty=_or(settings.presence_penalty, advised.presence_penalty),
        frequency_penalty=_or(settings.frequency_penalty, advised.frequency_penalty),
        repetition_penalty=_or(settings.repetition_penalty, advised.repetition_penalty),
        logit_bias=bias,
    )


def stop_tokens_of(settings: Settings, own: frozenset[int], vocabulary: int) -> frozenset[int]:
    """The request's stop tokens, and the model's unless `ignore_eos` is set."""
    asked = frozenset(settings.stop_token_ids or ())
    outside = sorted(token for token in asked if token >= vocabulary)
    if outside:
        raise invalid(f"Token {outside[0]} is outside the vocabulary of {vocabulary}.", "stop_token_ids")
    return asked if settings.ignore_eos else asked | own


def stops_of(settings: Settings) -> tuple[str, ...]:
    """The request's stop strings. Raises `ApiError` for an empty one, which would end every answer at once."""
    stops = (settings.stop,) if isinstance(settings.stop, str) else tuple(settings.stop or ())
    if "" in stops:
        raise invalid("A stop string can't be empty.", "stop")
    return stops


def room_for(prompt: int, asked: int | None, default: int | None, engine: Engine, param: str) -> int:
    """Largest number of tokens of the answer. Raises `ApiError` if prompt and answer don't fit the context."""
    room = engine.context_tokens - prompt
    wanted = default if asked is None else asked
    if room < 1 or (asked is not None and asked > room):
        message = (
            f"The model's limit is {engine.context_tokens} tokens for prompt and answer; the prompt has {prompt}"
            f"{'' if wanted is None else f', and the request asks for {wanted} more'}."
        )
        raise ApiError(400, message, code="context_length_exceeded", param=param)
    return room if wanted is None else min(wanted, room)


def deadline_of(settings: Settings, config: GatewayConfig) -> float | None:
    """The earlier one of the request's deadline and the gateway's."""
    given = [limit for limit in (settings.timeout_s, config.limits.deadline_s) if limit is not None]
    return min(given, default=None)


async def off_loop(size: int, work: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """Call `work`, for long texts in a thread, because all streams share the event loop. Raises `ApiError`."""
    with as_api_error():
        if size < _LARGE_CHARACTERS:
            return work(*args, **kwargs)
        return await asyncio.to_thread(work, *args, **kwargs)


async def check_length(characters: Sequence[str], text: ModelText, engine: Engine, param: str) -> None:
    """Raise `ApiError` if a prompt is far too long for the model, before it is tokenized as a whole."""
    size = sum(map(len, characters))
    if await off_loop(size, lambda: text.tokenizer.is_beyond("".join(characters), engine.context_tokens)):
        message = f"The model's limit is {engine.context_tokens} tokens; the prompt, {size} characters, has far more."
        raise ApiError(400, message, code="context_length_exceeded", param=param)


def check_tokens(tokens: Sequence[int], vocabulary: int, param: str) -> None:
    """Raise `ApiError` for a token outside the vocabulary."""
    if tokens and max(tokens) >= vocabulary:
        raise invalid(f"Token {max(tokens)} is outside the vocabulary of {vocabulary}.", param)


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _token(name: str, vocabulary: int) -> int:
    token = int(name) if name.isascii() and name.isdecimal() and len(name) < 12 else vocabulary
    if token >= vocabulary:
        raise invalid(f"Expected a token id below {vocabulary}, got {name[:40]!r}.", "logit_bias")
    return token
