"""Bodies of answers, field by field, as OpenAI's clients read them.

`fusion` is this gateway's own: which machines answered and how long each took. Neighbours: `chat`, `completions` and
`embeddings` fill them in, `openapi` describes them.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

FinishWord = Literal["stop", "length", "tool_calls"]


class CachedDetail(Struct, frozen=True):
    """Of the prompt's tokens, how many were in a cache."""

    cached_tokens: int = 0


class Usage(Struct, frozen=True):
    """Tokens of one request; a prompt counts once, however many answers it gets."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedDetail


class HopMean(Struct, frozen=True):
    """One machine's part in this answer: means over the `tokens` it worked on, and the last of them. Seconds."""

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
    """The stream stood still: since when (seconds after the request), how it was called, why."""

    at_s: float
    state: str
    detail: str


class RouteReport(Struct, frozen=True):
    """How this answer came about. `route`: names of the machines in order of the stages, the last that held each."""

    route: list[str]
    hops: list[HopMean]
    first_token_s: float | None
    total_s: float
    tokens_per_s: float | None
    """Of one answer, between its first and last token."""
    waits: list[Wait]


class TopLogprob(Struct, frozen=True):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(Struct, frozen=True):
    """A token that came."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """Natural logarithms, before sampling changed anything."""

    content: list[TokenLogprobs]
    refusal: None = None


class FunctionCall(Struct, frozen=True):
    """`arguments`: JSON text of an object."""

    name: str
    arguments: str


class ToolCallAnswer(Struct, frozen=True):
    """A call the model wants made."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class FunctionDelta(Struct, frozen=True):
    """`arguments`: what follows those of the chunks before. `name`: in a call's first chunk."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct, frozen=True):
    """The same within a stream, where a call comes piece by piece; `id` and `type` in its first chunk."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class AnswerMessage(Struct, frozen=True):
    """What the model said."""

    content: str | None
    tool_calls: list[ToolCallAnswer] | UnsetType = UNSET
    refusal: None = None
    role: Literal["assistant"] = "assistant"


class ChatChoice(Struct, frozen=True):
    """One answer."""

    index: int
    message: AnswerMessage
    finish_reason: FinishWord
    logprobs: ChatLogprobs | None = None


class ChatCompletion(Struct, frozen=True):
    """Answer to `POST /v1/chat/completions`."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | None = None
    fusion: RouteReport | UnsetType = UNSET


class MessageDelta(Struct, frozen=True):
    """What comes next."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """Part of one answer."""

    index: int
    delta: MessageDelta
    finish_reason: FinishWord | None = None
    logprobs: ChatLogprobs | None = None


class ChatChunk(Struct, frozen=True):
    """Part of a stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str | None = None
    fusion: RouteReport | UnsetType = UNSET


class TextLogprobs(Struct, frozen=True):
    """Lists of one length, an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Struct, frozen=True):
    """One text, or part of it in a stream."""

    index: int
    text: str
    finish_reason: FinishWord | None = None
    logprobs: TextLogprobs | None = None


class Completion(Struct, frozen=True):
    """Answer to `POST /v1/completions`, whole or a part of a stream."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | None = None
    fusion: RouteReport | UnsetType = UNSET


class Embedding(Struct, frozen=True):
    """One vector; as base64 it is little-endian float32."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(Struct, frozen=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, frozen=True):
    """Answer to `POST /v1/embeddings`."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class ModelCard(Struct, frozen=True):
    """A model one may ask. `max_model_len`: longest prompt plus answer, in tokens. `parent`: of an adapter, the model
    it is beside."""

    id: str
    created: int
    max_model_len: int
    owned_by: str = "fusionai"
    object: Literal["model"] = "model"
    parent: str | None = None


class ModelList(Struct, frozen=True):
    """Answer to `GET /v1/models`."""

    data: list[ModelCard]
    object: Literal["list"] = "list"
