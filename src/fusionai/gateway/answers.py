"""Answer bodies as structs, in the form that OpenAI's clients read.

`fusion` is this gateway's own field: which machines computed the answer and how long each took. `chat` and
`completions` fill the structs, `app` describes them in its OpenAPI document.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from fusionai.ir.serving import Purpose

FinishWord = Literal["stop", "length", "tool_calls"]


class CachedDetail(Struct, frozen=True):
    """Number of the prompt's tokens that were in the prefix cache."""

    cached_tokens: int = 0


class ReasoningDetail(Struct, frozen=True):
    """Number of the answer's tokens that are thinking."""

    reasoning_tokens: int = 0


class Usage(Struct, frozen=True):
    """Token counts of a request; a prompt counts once, even if it gets several answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedDetail
    completion_tokens_details: ReasoningDetail | UnsetType = UNSET
    """Left out if the model has no form for thinking."""


class HopMean(Struct, frozen=True):
    """One machine's part in the answer: means over its `tokens`, and the values of the last one. In seconds."""

    stage: int
    peer: str
    tokens: int
    queued_s: float
    compute_s: float
    transfer_s: float
    last_queued_s: float
    last_compute_s: float
    last_transfer_s: float


class Wait(Struct, frozen=True):
    """A pause of the stream: its start in seconds after the request, its state, its reason."""

    at_s: float
    state: str
    detail: str


class RouteReport(Struct, frozen=True):
    """How the answer was computed. `route`: names of the machines that held the stages last, in order of the stages."""

    route: list[str]
    hops: list[HopMean]
    first_token_s: float | None
    total_s: float
    tokens_per_s: float | None
    """Mean rate of an answer, between its first and last token."""
    waits: list[Wait]


class TopLogprob(Struct, frozen=True):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(Struct, frozen=True):
    """A token of the answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """Natural logarithms, from the distribution before sampling options are applied."""

    content: list[TokenLogprobs]
    refusal: None = None


class FunctionCall(Struct, frozen=True):
    """`arguments`: JSON text of an object."""

    name: str
    arguments: str


class ToolCallAnswer(Struct, frozen=True):
    """A tool call that the model asks for."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class FunctionDelta(Struct, frozen=True):
    """`arguments`: text to append to the arguments in earlier chunks. `name`: only in a call's first chunk."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct, frozen=True):
    """A part of a tool call in a stream. `id` and `type` are only in the call's first chunk."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class AnswerMessage(Struct, frozen=True):
    """The model's message. `reasoning_content`: its thinking, null if it did not think; left out if the model has no
    form for thinking."""

    content: str | None
    tool_calls: list[ToolCallAnswer] | UnsetType = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    refusal: None = None
    role: Literal["assistant"] = "assistant"


class ChatChoice(Struct, frozen=True):
    """One answer."""

    index: int
    message: AnswerMessage
    finish_reason: FinishWord
    logprobs: ChatLogprobs | None = None


class _Headed(Struct, frozen=True):
    id: str
    created: int
    model: str


class ChatCompletion(_Headed, frozen=True):
    """Answer to `POST /v1/chat/completions`."""

    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | None = None
    fusion: RouteReport | UnsetType = UNSET


class MessageDelta(Struct, frozen=True):
    """New content of the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """A part of one answer."""

    index: int
    delta: MessageDelta
    finish_reason: FinishWord | None = None
    logprobs: ChatLogprobs | None = None


class ChatChunk(_Headed, frozen=True):
    """An event of a stream."""

    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str | None = None
    fusion: RouteReport | UnsetType = UNSET


class TextLogprobs(Struct, frozen=True):
    """Lists of equal length with one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Struct, frozen=True):
    """One text, or a part of it in a stream."""

    index: int
    text: str
    finish_reason: FinishWord | None = None
    logprobs: TextLogprobs | None = None


class Completion(_Headed, frozen=True):
    """Answer to `POST /v1/completions`, whole or an event of a stream."""

    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | None = None
    fusion: RouteReport | UnsetType = UNSET


class ModelCard(Struct, frozen=True):
    """A model that can be used. `max_model_len`: upper limit of prompt plus answer, in tokens. `parent`: an adapter's
    base model. `task`: what it gives: text and vectors, vectors alone, or scores alone. `input_modalities`: what it
    reads, in OpenRouter's words."""

    id: str
    created: int
    max_model_len: int
    task: Purpose
    input_modalities: tuple[Literal["text", "image", "audio"], ...]
    owned_by: str = "fusionai"
    object: Literal["model"] = "model"
    parent: str | None = None


class ModelList(Struct, frozen=True):
    """Answer to `GET /v1/models`."""

    data: list[ModelCard]
    object: Literal["list"] = "list"
