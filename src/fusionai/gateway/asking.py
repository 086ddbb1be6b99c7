"""From the fields of a request to what the engine is asked for. Decides what a field left out means.

What a request does not say about sampling, the model's makers may have (`generation_config.json`); after them OpenAI's
defaults hold. Neighbours: `chat` and `completions`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import Final, ParamSpec, TypeVar

from starlette.requests import Request

from fusionai.gateway.config import GatewayConfig
from fusionai.gateway.errors import ApiError, invalid, nearest, of_failure
from fusionai.gateway.requests import Settings
from fusionai.primitives.errors import FusionError
from fusionai.serving.interface import Engine, Sampling
from fusionai.serving.model_text import ModelText

P = ParamSpec("P")
Result = TypeVar("Result")
_ROUTE_HEADER: Final = "x-fusion-route"
_LARGE_CHARACTERS: Final = 4096
_SHOWN: Final = 8
_SEEDS: Final = 2**63


def check_ready(engine: Engine) -> None:
    """Raises `ApiError` 503 before the engine was ever ready and after its end. While it recovers, requests wait."""
    status = engine.status
    if status.state in ("starting", "stopped"):
        detail = f": {status.detail}" if status.detail else ""
        raise ApiError(503, f"The model is not ready ({status.state}{detail}).", code="not_ready", retry_after_s=2.0)


def adapter_of(name: str, config: GatewayConfig) -> str | None:
    """Which adapter a request's `model` means; None: the model itself. Raises `ApiError` 404 for a model that is not
    served here."""
    known = (config.model, *config.aliases, *config.adapters)
    if name not in known:
        near = nearest(name, known) or f" Served here: `{'`, `'.join((config.model, *config.adapters)[:_SHOWN])}`."
        raise ApiError(404, f"The model `{name}` does not exist.{near}", code="model_not_found", param="model")
    return name if name in config.adapters else None


def wants_route(request: Request, asked: bool | None) -> bool:
    """Whether the answer is to tell its route."""
    if asked is not None:
        return asked
    told = request.headers.get(_ROUTE_HEADER, "0").strip().lower()
    if told not in ("0", "1", "true", "false"):
        raise invalid(f"The header `{_ROUTE_HEADER}` is 0 or 1, got {told[:20]!r}.", _ROUTE_HEADER)
    return told in ("1", "true")


def stream_wanted(settings: Settings) -> bool:
    """Raises `ApiError` for options of a stream without one."""
    if settings.stream_options is not None and not settings.stream:
        raise invalid("`stream_options` needs `stream: true`.", "stream_options")
    return bool(settings.stream)


def sampling_of(settings: Settings, advised: Sampling, vocabulary: int) -> Sampling:
    """With a seed of its own if none is given: answers then differ from request to request."""
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
    """The model's, unless they are to be ignored, and the request's."""
    asked = frozenset(settings.stop_token_ids or ())
    outside = sorted(token for token in asked if token >= vocabulary)
    if outside:
        raise invalid(f"Token {outside[0]} is outside the vocabulary of {vocabulary}.", "stop_token_ids")
    return asked if settings.ignore_eos else asked | own


def stops_of(settings: Settings) -> tuple[str, ...]:
    """Stop strings; an empty one would end everything at once."""
    stops = (settings.stop,) if isinstance(settings.stop, str) else tuple(settings.stop or ())
    if "" in stops:
        raise invalid("A stop string can't be empty.", "stop")
    return stops


def room_for(prompt: int, asked: int | None, default: int | None, engine: Engine, param: str) -> int:
    """How many tokens may come. Raises `ApiError` where prompt and answer don't fit together."""
    room = engine.context_tokens - prompt
    wanted = default if asked is None else asked
    if room < 1 or (asked is not None and asked > room):
        message = (
            f"The model takes {engine.context_tokens} tokens in all; the prompt has {prompt}"
            f"{'' if wanted is None else f', and {wanted} more are asked for'}."
        )
        raise ApiError(400, message, code="context_length_exceeded", param=param)
    return room if wanted is None else min(wanted, room)


def deadline_of(settings: Settings, config: GatewayConfig) -> float | None:
    """The nearer one."""
    given = [limit for limit in (settings.timeout_s, config.limits.deadline_s) if limit is not None]
    return min(given, default=None)


async def off_loop(size: int, work: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """Long texts are worked on in a thread: everybody's tokens pass through this one. Raises `ApiError`."""
    try:
        if size < _LARGE_CHARACTERS:
            return work(*args, **kwargs)
        return await asyncio.to_thread(work, *args, **kwargs)
    except FusionError as problem:
        raise of_failure(problem) from problem


async def check_length(characters: Sequence[str], text: ModelText, engine: Engine, param: str) -> None:
    """Before a prompt is read as a whole. Raises `ApiError` where it is far too long for the model."""
    size = sum(map(len, characters))
    if await off_loop(size, lambda: text.tokenizer.is_beyond("".join(characters), engine.context_tokens)):
        message = f"The model takes {engine.context_tokens} tokens in all; the prompt, {size} characters, has far more."
        raise ApiError(400, message, code="context_length_exceeded", param=param)


def check_tokens(tokens: Sequence[int], vocabulary: int, param: str) -> None:
    """Raises `ApiError`."""
    if tokens and max(tokens) >= vocabulary:
        raise invalid(f"Token {max(tokens)} is outside the vocabulary of {vocabulary}.", param)


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _token(name: str, vocabulary: int) -> int:
    token = int(name) if name.isascii() and name.isdecimal() and len(name) < 12 else vocabulary
    if token >= vocabulary:
        raise invalid(f"Expected the number of a token below {vocabulary}, got {name[:40]!r}.", "logit_bias")
    return token
