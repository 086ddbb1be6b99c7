"""Errors in the form that the clients of each protocol expect, with a status. Decides which failure gives which status.

The path of a request says which protocol it speaks: Anthropic's, Ollama's, or otherwise OpenAI's, whose form is
`{"error": {message, type, param, code}}`. Neighbours: every endpoint raises `ApiError`; `app` turns it and any other
exception into an answer.
"""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any, Final, Literal

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from fusionai.primitives.errors import ExecutionError, FusionError, UsageError
from fusionai.serving.interface import EngineBusy, PromptTooLong

_LISTED: Final = 8
"""Most models that an answer lists."""
_LONGEST_NAME: Final = 64
"""Most characters of a client's name of something in an answer, and of a name that is compared with known ones."""


class ErrorBody(msgspec.Struct, frozen=True):
    """The failure, for people (`message`) and for programs (`type`, `param`, `code`)."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """Body of an unsuccessful answer in OpenAI's form."""

    error: ErrorBody


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    """The failure, for people (`message`) and for programs (`type`)."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, frozen=True):
    """Body of an unsuccessful answer in Anthropic's form."""

    error: AnthropicErrorBody
    type: Literal["error"] = "error"


class OllamaError(msgspec.Struct, frozen=True):
    """Body of an unsuccessful answer in Ollama's form."""

    error: str


class ApiError(Exception):
    """An error to be sent as the answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(message, _TYPES.get(status, "invalid_request_error"), param, code)
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(max(1, ceil(retry_after_s)))


class ClientGone(Exception):
    """The client has disconnected, so there is no answer to send."""


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Error 400 for an invalid request."""
    return ApiError(400, message, code=code, param=param)


def of_failure(problem: FusionError) -> ApiError:
    """The error for a failure of the engine, a tokenizer or a template."""
    match problem:
        case EngineBusy():
            return ApiError(429, str(problem), code="engine_busy", retry_after_s=problem.retry_after_s)
        case PromptTooLong():
            return invalid(str(problem), "messages", "context_length_exceeded")
        case UsageError() | ExecutionError():
            return invalid(str(problem))
        case _:
            return ApiError(503, str(problem), code="engine_failed", retry_after_s=1.0)


@contextmanager
def as_api_error() -> Iterator[None]:
    """Turn a failure of the engine, a tokenizer or a template into an `ApiError`."""
    try:
        yield
    except FusionError as problem:
        raise of_failure(problem) from problem


def openai_error(problem: ApiError) -> ErrorAnswer:
    """The error's body in OpenAI's form."""
    return ErrorAnswer(problem.body)


def anthropic_error(problem: ApiError) -> AnthropicError:
    """The error's body in Anthropic's form."""
    kind = _ANTHROPIC_TYPES.get(problem.status, "invalid_request_error")
    return AnthropicError(AnthropicErrorBody(kind, problem.body.message))


def ollama_error(problem: ApiError) -> OllamaError:
    """The error's body in Ollama's form."""
    return OllamaError(problem.body.message)


def error_response(problem: ApiError, path: str) -> Response:
    """The complete answer for an error, in the form of the protocol that a request's `path` belongs to."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        body: msgspec.Struct = anthropic_error(problem)
    elif path.startswith("/api/"):
        body = ollama_error(problem)
    else:
        body = openai_error(problem)
    return Response(msgspec.json.encode(body), problem.status, problem.headers, "application/json")


def shown(name: str) -> str:
    """Return a client's name of something in full, or its beginning."""
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean ...?` if a known name is similar, else empty. Long names are not compared, which takes seconds."""
    if len(name) > _LONGEST_NAME:
        return ""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean `{near[0]}`?" if near else ""


def no_such_model(name: str, known: Iterable[str], listed: Sequence[str]) -> ApiError:
    """The error for a request with an unknown model. `known`: all names; `listed`: those that the message may list."""
    near = nearest(name, known) or f" Served here: `{'`, `'.join(listed[:_LISTED])}`."
    return ApiError(404, f"The model `{shown(name)}` does not exist.{near}", code="model_not_found", param="model")


def error_handlers(
    on_broken: Callable[[Exception], None],
) -> dict[Any, Callable[[Request, Exception], Awaitable[Response]]]:
    """Return Starlette's handlers of all errors. `on_broken` gets those that are mistakes of the gateway itself."""

    async def own_mistake(request: Request, problem: Exception) -> Response:
        if isinstance(problem, ClientGone):
            return Response(status_code=499)
        on_broken(problem)
        own = ApiError(500, "The gateway failed; its log says why.", code="internal_error")
        return error_response(own, request.url.path)

    return {ApiError: _api_error, HTTPException: _http_error, Exception: own_mistake}


async def _api_error(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, ApiError)
    return error_response(problem, request.url.path)


async def _http_error(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    path = request.url.path[:200]
    match problem.status_code:
        case 404:
            answer = ApiError(404, f"There is no path `{path}`; see `/openapi.json` for all paths.", code="not_found")
        case 405:
            headers = dict(problem.headers or {})
            allowed = headers.get("Allow", "other methods")
            message = f"`{path}` accepts {allowed}, not {request.method}."
            answer = ApiError(405, message, code="method_not_allowed", headers=headers)
        case status:
            answer = ApiError(status, problem.detail, code="http_error")
    return error_response(answer, request.url.path)
