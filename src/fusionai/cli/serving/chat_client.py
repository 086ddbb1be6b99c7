"""HTTP client of the terminal chat: one connection to a gateway, answers streamed as they arrive.

Understands the part of OpenAI's chat completions that it needs, and the gateway's `fusion` report. `cli.serving.chat`
keeps the conversation; `gateway` is the server."""

from __future__ import annotations

import difflib
import http.client
from collections.abc import Iterator, Sequence
from typing import Final, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec

from fusionai.primitives.errors import FusionError, TransportError, UsageError

CONNECT_S: Final = 10.0
SILENCE_S: Final = 120.0
"""Timeout for the next bytes, in seconds (chosen). The gateway sends keep-alive comments far more often."""

_URL_HINT: Final = "Give the gateway's address, such as http://127.0.0.1:8000."
T = TypeVar("T")


class ApiRefusal(FusionError):
    """The gateway refused the request, with its reason. `code`: the API's machine-readable error code."""

    def __init__(self, message: str, code: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class PictureUrl(msgspec.Struct, frozen=True):
    """`url`: a data URL."""

    url: str


class QuestionPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A text or a picture in a message."""

    type: Literal["text", "image_url"]
    text: str = ""
    image_url: PictureUrl | None = None


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str | tuple[QuestionPart, ...]


class AnswerHop(msgspec.Struct, frozen=True):
    """One machine's part in an answer. Times are means per token, in seconds."""

    stage: int
    peer: str
    tokens: int
    queued_s: float
    compute_s: float
    transfer_s: float


class AnswerWait(msgspec.Struct, frozen=True):
    at_s: float
    state: str
    detail: str


class AnswerRoute(msgspec.Struct, frozen=True):
    """How an answer was computed. `route`: names of the machines in order of stages."""

    route: tuple[str, ...]
    hops: tuple[AnswerHop, ...]
    tokens_per_s: float | None = None
    waits: tuple[AnswerWait, ...] = ()


class ServedStage(msgspec.Struct, frozen=True):
    stage: int
    name: str
    blocks: tuple[int, int]
    state: str
    spare: str
    resident_bytes: int
    mean_compute_s: float


class EngineState(msgspec.Struct, frozen=True):
    state: str
    stages: tuple[ServedStage, ...] = ()
    tokens_per_s: float = 0.0


class ServerStatus(msgspec.Struct, frozen=True):
    model: str
    engine: EngineState


class AnswerPiece(msgspec.Struct, frozen=True):
    """The next piece of the answer."""

    text: str


class ThinkingPiece(msgspec.Struct, frozen=True):
    """The next piece of the thinking before the answer."""

    text: str


class Note(msgspec.Struct, frozen=True):
    """A note that the stream is interrupted, with the reason, or has resumed."""

    text: str


class ChatAnswer(msgspec.Struct, frozen=True):
    """The end of an answer."""

    completion_tokens: int
    finish: str
    route: AnswerRoute | None


AnswerPart = AnswerPiece | ThinkingPiece | Note | ChatAnswer


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int = 0


class _Problem(msgspec.Struct, frozen=True):
    message: str = ""
    code: str | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    fusion: AnswerRoute | None = None
    error: _Problem | None = None


class _Card(msgspec.Struct, frozen=True):
    id: str


class _Cards(msgspec.Struct, frozen=True):
    data: tuple[_Card, ...] = ()


class ChatClient:
    """A connection to a gateway, used as `with ChatClient(url, key) as client:`. `wanted`: the model or adapter to chat
    with; None: the gateway's first one. Raises `TransportError` if the gateway does not answer, `ApiRefusal` if it
    refuses a request, `UsageError` if it does not serve `wanted`."""

    def __init__(self, address: str, key: str | None, wanted: str | None = None) -> None:
        try:
            parts = urlsplit(address if "://" in address else f"http://{address}")
            host, port = parts.hostname, parts.port
        except ValueError as problem:
            raise UsageError(f"--url: {address!r} is not an address: {problem}.", hint=_URL_HINT) from None
        if parts.scheme not in ("http", "https") or host is None:
            raise UsageError(f"--url: expected http:// or https:// and a host, got {address!r}.", hint=_URL_HINT)
        self.address = f"{parts.scheme}://{parts.netloc}"
        self.model = ""
        self._wanted = wanted
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", "User-Agent": "fusion-chat"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(host, port, timeout=CONNECT_S)

    def __enter__(self) -> ChatClient:
        try:
            models = self.models()
            if not models:
                raise ApiRefusal(f"{self.address} serves no model.")
            self.choose(self._wanted or models[0], models)
        except BaseException:
            self._connection.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def models(self) -> list[str]:
        """Return the names of the gateway's models and adapters."""
        return [card.id for card in self._get("/v1/models", _Cards).data]

    def choose(self, name: str, models: Sequence[str]) -> None:
        """Send further questions to this one of `models`."""
        if name not in models:
            near = difflib.get_close_matches(name, models, n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"{self.address} serves no {name!r}, but {', '.join(models)}.{meant}")
        self.model = name

    def status(self) -> ServerStatus:
        """Return the state of the engine and of its stages."""
        return self._get("/fusion/status", ServerStatus)

    def answer(
        self, messages: Sequence[Message], *, max_tokens: int | None, temperature: float | None, seed: int | None
    ) -> Iterator[AnswerPart]:
        """Yield the answer as it arrives. `max_tokens` None: as many as fit. If the iteration is left early, the
        connection is closed, which cancels the answer."""
        body: dict[str, object] = {
            "model": self.model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            "fusion_route": True,
        }
        body |= {} if max_tokens is None else {"max_tokens": max_tokens}
        body |= {} if temperature is None else {"temperature": temperature}
        body |= {} if seed is None else {"seed": seed}
        finish, tokens, route, whole = "", 0, None, False
        try:
            # Inside the `try`, because an interrupt before the first token must close the connection as well.
            response = self._ask("POST", "/v1/chat/completions", msgspec.json.encode(body))
            for data in _events(response):
                if isinstance(data, Note):
                    yield data
                    continue
                chunk = _decoded(data, _Chunk)
                if chunk.error is not None:
                    raise ApiRefusal(chunk.error.message or "the gateway failed.")
                for choice in chunk.choices:
                    if choice.delta.reasoning_content:
                        yield ThinkingPiece(choice.delta.reasoning_content)
                    if choice.delta.content:
                        yield AnswerPiece(choice.delta.content)
                    finish = choice.finish_reason or finish
                tokens = chunk.usage.completion_tokens if chunk.usage is not None else tokens
                route = chunk.fusion or route
            whole = True
        except (OSError, http.client.HTTPException) as problem:
            raise TransportError(f"the connection to {self.address} broke: {problem}.") from problem
        finally:
            if not whole:
                self._connection.close()
        yield ChatAnswer(tokens, finish, route)

    def _get(self, path: str, kind: type[T]) -> T:
        return _decoded(self._ask("GET", path, None).read(), kind)

    def _ask(self, method: str, path: str, body: bytes | None) -> http.client.HTTPResponse:
        try:
            try:
                response = self._sent(method, path, body)
            except (http.client.BadStatusLine, BrokenPipeError, ConnectionResetError):
                self._connection.close()  # the gateway closed the idle connection
                response = self._sent(method, path, body)
        except (OSError, http.client.HTTPException) as problem:
            self._connection.close()
            raise TransportError(
                f"no gateway answers at {self.address}: {getattr(problem, 'strerror', None) or problem}.",
                hint="Start one with `fusion serve MODEL`, or give the address of a running one with --url.",
            ) from problem
        if response.status != 200:
            content = response.read()
            self._connection.close()
            try:
                refusal = msgspec.json.decode(content, type=_Chunk).error
            except msgspec.DecodeError:
                refusal = None
            if refusal is None:
                raise ApiRefusal(f"the gateway answered with status {response.status}.")
            hint = "Name a file with a valid key: --api-key-file FILE." if response.status == 401 else None
            raise ApiRefusal(refusal.message, refusal.code or "", hint)
        return response

    def _sent(self, method: str, path: str, body: bytes | None) -> http.client.HTTPResponse:
        self._connection.request(method, f"{self._prefix}{path}", body, self._headers)
        if self._connection.sock is not None:
            self._connection.sock.settimeout(SILENCE_S)
        return self._connection.getresponse()


def _events(response: http.client.HTTPResponse) -> Iterator[bytes | Note]:
    """Yield the data of each event until `[DONE]`, and comments that contain a colon as notes."""
    ended = False
    while line := response.readline():
        text = line.rstrip(b"\r\n")
        if ended or not text:
            continue
        if text.startswith(b":"):
            note = text[1:].strip().decode(errors="replace")
            if ":" in note:
                yield Note(note)
        elif text.startswith(b"data:"):
            data = text[5:].strip()
            if data == b"[DONE]":
                ended = True
            else:
                yield data
    if not ended:
        raise http.client.HTTPException("the stream ended in the middle of an answer")


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as problem:
        raise TransportError(f"expected the answer of a FusionAI gateway, check --url: {problem}.") from None
