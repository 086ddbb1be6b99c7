"""Bodies of requests, field by field. Decides which fields there are and what each may hold.

What OpenAI's API knows and this gateway does not do is refused by name, as is every unknown name: no setting is ignored
silently. The few that ask for nothing are taken (`HARMLESS`). Neighbours: `reading` decodes them, `openapi` describes
them.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

HARMLESS: Final = frozenset(
    {
        "user",
        "metadata",
        "store",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)
"""Labels for OpenAI's own bookkeeping: they change no answer there either."""

NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "service_tier": ("auto", "default", None),
    "modalities": (["text"], None),
    "best_of": (1, None),
    "suffix": (None, ""),
    "functions": (None,),
    "function_call": (None,),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "moderation": (None,),
}
"""Known to OpenAI's API, not done here: taken only with a value that asks for what is done anyway."""

ADVICE: Final = {
    "functions": "Use `tools`.",
    "function_call": "Use `tool_choice`.",
    "suffix": "Models here write on from a prompt only.",
    "best_of": "Use `n` and choose yourself.",
    "modalities": "Only text comes out.",
    "audio": "Only text comes out.",
}

Unit = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
TokenId = Annotated[int, Meta(ge=0, le=2**31)]
Word = Annotated[str, Meta(max_length=1024)]


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """`include_usage`: one more chunk before the end, with what was used."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Settings(Struct, frozen=True, kw_only=True):
    """What chat and completions share. null means: as if it were not there."""

    model: Annotated[str, Meta(max_length=512)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: Word | Annotated[list[Word], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Unit | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    """-1 or 0: all."""
    min_p: Unit | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]] | None = None
    ignore_eos: bool | None = None
    timeout_s: Annotated[float, Meta(gt=0.0, le=86400.0)] | None = None
    """The generation ends after so many seconds, with an error."""
    fusion_route: bool | None = None
    """Tell which machines answered and how long each took."""


class TextPart(Struct, frozen=True, tag_field="type", tag="text"):
    """Text within a message."""

    text: str


class RefusalPart(Struct, frozen=True, tag_field="type", tag="refusal"):
    """A refusal within an earlier answer."""

    refusal: str


Content = str | list[TextPart | RefusalPart] | None


class CalledFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """`arguments`: JSON text."""

    name: str
    arguments: str


class MadeToolCall(Struct, frozen=True, forbid_unknown_fields=True):
    """A call that an earlier answer made."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class SystemMessage(Struct, frozen=True, tag_field="role", tag="system", forbid_unknown_fields=True):
    """How to behave."""

    content: Content
    name: str | UnsetType = UNSET


class DeveloperMessage(Struct, frozen=True, tag_field="role", tag="developer", forbid_unknown_fields=True):
    """The newer name of a system message; templates know only the old one."""

    content: Content
    name: str | UnsetType = UNSET


class UserMessage(Struct, frozen=True, tag_field="role", tag="user", forbid_unknown_fields=True):
    """What somebody says."""

    content: Content
    name: str | UnsetType = UNSET


class AssistantMessage(Struct, frozen=True, tag_field="role", tag="assistant", forbid_unknown_fields=True):
    """An earlier answer, with what clients keep of it."""

    content: Content = None
    name: str | UnsetType | None = UNSET
    tool_calls: list[MadeToolCall] | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    refusal: str | None = None
    function_call: None = None
    audio: None = None
    annotations: list[Any] | None = None


class ToolMessage(Struct, frozen=True, tag_field="role", tag="tool", forbid_unknown_fields=True):
    """What a tool gave."""

    content: Content
    tool_call_id: str
    name: str | UnsetType = UNSET


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class Function(Struct, frozen=True, forbid_unknown_fields=True):
    """A tool: `parameters` is a JSON schema."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True, forbid_unknown_fields=True):
    """A tool the model may call."""

    function: Function
    type: Literal["function"] = "function"


class FunctionName(Struct, frozen=True, forbid_unknown_fields=True):
    """Which tool."""

    name: str


class NamedChoice(Struct, frozen=True, forbid_unknown_fields=True):
    """This tool has to be called."""

    function: FunctionName
    type: Literal["function"] = "function"


class TextFormat(Struct, frozen=True, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Anything."""


class JsonObjectFormat(Struct, frozen=True, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Some JSON object."""


class NamedSchema(Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON schema with a name."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, frozen=True, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON by a schema. It always holds, strict or not."""

    json_schema: NamedSchema


class ChatRequest(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=16384)]
    max_completion_tokens: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`. `prompt`: a text, several, the tokens of one, or of several."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class EmbeddingRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/embeddings`."""

    model: Annotated[str, Meta(max_length=512)]
    input: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31)] | None = None


def plain(message: Message) -> dict[str, Any]:
    """As templates read it."""
    told = msgspec.to_builtins(message)
    if told["role"] == "developer":
        told["role"] = "system"
    if told["role"] == "assistant":
        for name in ("refusal", "function_call", "audio", "annotations"):
            del told[name]
    return told
