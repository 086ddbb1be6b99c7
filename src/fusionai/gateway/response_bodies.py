"""Answers of the Responses API as structs, in the form that OpenAI's clients read.

`response_form` fills them, whole or in a stream's events; `app` describes them in its OpenAPI document.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from fusionai.gateway.answers import RouteReport, TokenLogprobs
from fusionai.gateway.response_requests import (
    AllowedTools,
    FunctionChoice,
    FunctionTool,
    ItemStatus,
    ReasoningConfig,
    ReasoningText,
    SummaryText,
    TextConfig,
)


class OutputText(Struct, frozen=True, tag_field="type", tag="output_text"):
    """The text of a message. `annotations` is always empty: they are of hosted tools."""

    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprobs] | UnsetType = UNSET


class OutputMessage(Struct, frozen=True, tag_field="type", tag="message"):
    """What the model says."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputCall(Struct, frozen=True, tag_field="type", tag="function_call"):
    """A function call that the model asks for. `arguments`: JSON text of an object."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class OutputReasoning(Struct, frozen=True, tag_field="type", tag="reasoning"):
    """The model's reasoning before its answer. No summary is made of it."""

    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: list[SummaryText] = []
    encrypted_content: str | UnsetType = UNSET


OutputItem = OutputMessage | OutputCall | OutputReasoning


class InputDetails(Struct, frozen=True):
    """`cached_tokens`: number of the prompt's tokens that were in the prefix cache. OpenAI charges for writing to its
    cache; here nothing counts as written."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(Struct, frozen=True):
    """`reasoning_tokens`: number of the answer's tokens that are reasoning."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct, frozen=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Struct, frozen=True):
    """Why the answer ended early."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFailure(Struct, frozen=True):
    """Why the answer failed."""

    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class ResponseObject(Struct, frozen=True, kw_only=True):
    """Answer to `POST /v1/responses`. Beside the output it returns the request's settings, and their defaults for those
    that were left out."""

    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    completed_at: int | None = None
    instructions: str | None
    previous_response_id: str | None
    store: bool
    tools: list[FunctionTool]
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedTools
    parallel_tool_calls: bool
    text: TextConfig
    reasoning: ReasoningConfig
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    truncation: Literal["auto", "disabled"]
    metadata: dict[str, str]
    background: Literal[False] = False
    service_tier: Literal["default"] = "default"
    object: Literal["response"] = "response"
    fusion: RouteReport | UnsetType = UNSET


class DeletedResponse(Struct, frozen=True):
    """Answer to `DELETE /v1/responses/{id}`."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokenCount(Struct, frozen=True):
    """Answer to `POST /v1/responses/input_tokens`."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"
