"""Bodies of Anthropic's Messages API as structs: requests, answers, and the events of a stream.

`messages` converts the requests to chats and fills the answers; `app` describes both in its OpenAPI document. A field
that asks for something unsupported is refused by name. `cache_control` is accepted everywhere and has no effect,
because the prefix cache always works.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from fusionai.gateway.answers import RouteReport
from fusionai.gateway.requests import OtherFields, ToolName, Unit, Word

ANTHROPIC: Final = OtherFields(
    harmless=frozenset({"metadata", "cache_control", "user_profile_id"}),
    neutral={
        "service_tier": ("auto", "standard_only", None),
        "speed": ("standard", None),
        "inference_geo": (None,),
        "container": (None,),
        "context_management": (None,),
        "diagnostics": (None,),
        "mcp_servers": ([], None),
    },
    advice={
        "container": "Tools run in your program; describe them in `tools`.",
        "mcp_servers": "Connect to MCP servers in your program and describe their tools in `tools`.",
        "tools[].type": "Only tools that the client runs can be called; there are no hosted tools here.",
    },
    optional=frozenset({"context_management"}),
    tools=frozenset({"custom"}),
)


class TextBlock(Struct, frozen=True, tag="text", omit_defaults=True, forbid_unknown_fields=True):
    """Text of a message."""

    text: str
    cache_control: Any = None
    citations: list[Any] | None = None


class Base64Source(Struct, frozen=True, tag="base64", forbid_unknown_fields=True):
    """A picture's bytes."""

    data: str
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]


class UrlSource(Struct, frozen=True, tag="url", forbid_unknown_fields=True):
    """Where a picture is. Only data URLs are read."""

    url: str


class ImageBlock(Struct, frozen=True, tag="image", forbid_unknown_fields=True):
    """A picture in a message."""

    source: Base64Source | UrlSource
    cache_control: Any = None


class ThinkingBlock(Struct, frozen=True, tag="thinking", forbid_unknown_fields=True):
    """What the model thought before its answer. `signature` is empty, because nothing checks it."""

    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, frozen=True, tag="tool_use", omit_defaults=True, forbid_unknown_fields=True):
    """A tool call that the model asks for."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None


class ToolResultBlock(Struct, frozen=True, tag="tool_result", forbid_unknown_fields=True):
    """The result of a tool call. The text of a result that `is_error` is marked as an error for the model."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None
    cache_control: Any = None


class UserTurn(Struct, frozen=True, tag_field="role", tag="user", forbid_unknown_fields=True):
    """A message from the user, with results of tool calls."""

    content: str | list[TextBlock | ImageBlock | ToolResultBlock]


class AssistantTurn(Struct, frozen=True, tag_field="role", tag="assistant", forbid_unknown_fields=True):
    """An earlier answer."""

    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock]


class SystemTurn(Struct, frozen=True, tag_field="role", tag="system", forbid_unknown_fields=True):
    """Instructions in the middle of a conversation."""

    content: str | list[TextBlock]


Turn = UserTurn | AssistantTurn | SystemTurn


class ClientTool(Struct, frozen=True, forbid_unknown_fields=True):
    """A tool that the model may call and the client runs. `input_schema` is a JSON schema."""

    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None
    """Without effect: arguments are always streamed as they come."""
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class ToolPolicy(Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the model calls tools: as it likes, at least one, none, or the tool called `name`."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the model thinks before it answers; `adaptive`: as its chat template has it. `budget_tokens` is a wish
    that has no effect here: `max_tokens` limits thinking and answer together."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None
    """`omitted`: the answer leaves the thinking out; otherwise it has all of it."""


class AnswerSchema(Struct, frozen=True, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON that is valid under a schema."""

    schema: dict[str, Any]


Effort = Literal["low", "medium", "high", "xhigh", "max"]
"""How much a model thinks."""


class OutputConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The form of the answer, and how much the model thinks."""

    format: AnswerSchema | None = None
    effort: Effort | None = None


class Prompted(Struct, frozen=True, kw_only=True):
    """Fields that make up a prompt. null means the same as leaving the field out."""

    model: Annotated[str, Meta(max_length=512)]
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=16384)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ClientTool], Meta(max_length=128)] | None = None
    tool_choice: ToolPolicy | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class TokenCountRequest(Prompted, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/messages/count_tokens`."""


class MessageRequest(Prompted, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Meta(ge=0, le=2**31)]
    """If prompt and answer would exceed the context, the answer ends there, for the reason
    `model_context_window_exceeded`."""
    stop_sequences: Annotated[list[Word], Meta(max_length=16)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Unit | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31)] | None = None


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class TokenCount(Struct, frozen=True):
    """Answer to `POST /v1/messages/count_tokens`."""

    input_tokens: int


class ThinkingDetails(Struct, frozen=True):
    """Number of the answer's tokens that are thinking, its marks included."""

    thinking_tokens: int


class MessageUsage(Struct, frozen=True):
    """Token counts. `input_tokens`: tokens of the prompt that were not in the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    output_tokens_details: ThinkingDetails | UnsetType = UNSET
    """Left out if the model has no form for thinking."""


class MessageAnswer(Struct, frozen=True):
    """Answer to `POST /v1/messages`."""

    id: str
    model: str
    content: list[AnswerBlock]
    usage: MessageUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    fusion: RouteReport | UnsetType = UNSET


class MessageStart(Struct, frozen=True, tag="message_start"):
    """Begins a stream."""

    message: MessageAnswer


class BlockStart(Struct, frozen=True, tag="content_block_start"):
    """Begins a block of the answer, which is still empty."""

    index: int
    content_block: AnswerBlock


class TextDelta(Struct, frozen=True, tag="text_delta"):
    """Text to append to a block."""

    text: str


class ThinkingDelta(Struct, frozen=True, tag="thinking_delta"):
    """Text to append to what the model thought."""

    thinking: str


class InputJsonDelta(Struct, frozen=True, tag="input_json_delta"):
    """JSON text to append to a call's arguments."""

    partial_json: str


class BlockDelta(Struct, frozen=True, tag="content_block_delta"):
    """New content of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class BlockStop(Struct, frozen=True, tag="content_block_stop"):
    """Ends a block."""

    index: int


class StopDelta(Struct, frozen=True):
    """Why the answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None = None


class MessageEnd(Struct, frozen=True, tag="message_delta"):
    """Follows the last block. `usage` counts the whole answer."""

    delta: StopDelta
    usage: MessageUsage
    fusion: RouteReport | UnsetType = UNSET


class MessageStop(Struct, frozen=True, tag="message_stop"):
    """Ends a stream."""


class PingEvent(Struct, frozen=True, tag="ping"):
    """Keeps a stream alive."""
