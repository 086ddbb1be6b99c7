"""Bodies of `POST /v1/responses` as structs: which fields exist, and which items a conversation may consist of.

Only what this gateway can do is accepted: texts, calls of the client's own functions and their results, and earlier
reasoning. `OTHER_FIELDS` says what else of OpenAI's Responses API is accepted without effect or refused with advice.
`requests` reads and checks the bodies, `response_input` turns them into chats.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from fusionai.gateway.requests import JsonObjectFormat, Options, OtherFields, TextFormat

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(Struct, frozen=True, tag_field="type", tag="input_text"):
    """Text that the client wrote."""

    text: str


class InputImage(Struct, frozen=True, tag_field="type", tag="input_image", forbid_unknown_fields=True):
    """A picture. `image_url`: a data URL. `detail` has no effect: the model's own processor chooses the size."""

    image_url: str
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: None = None


class SaidText(Struct, frozen=True, tag_field="type", tag="output_text"):
    """Text of an earlier answer."""

    text: str


class SaidRefusal(Struct, frozen=True, tag_field="type", tag="refusal"):
    """A refusal in an earlier answer."""

    refusal: str


class InputMessage(Struct, frozen=True, tag_field="type", tag="message", forbid_unknown_fields=True):
    """A message of the conversation. `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | InputImage | SaidText | SaidRefusal]
    id: str | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class InputCall(Struct, frozen=True, tag_field="type", tag="function_call"):
    """A function call of an earlier answer. `arguments`: JSON text."""

    call_id: str
    name: str
    arguments: str


class InputCallOutput(Struct, frozen=True, tag_field="type", tag="function_call_output", forbid_unknown_fields=True):
    """The result of a function call."""

    call_id: str
    output: str | list[InputText]
    id: str | None = None
    name: str | None = None
    status: ItemStatus | None = None


class SummaryText(Struct, frozen=True, tag_field="type", tag="summary_text"):
    """A summary of reasoning."""

    text: str


class ReasoningText(Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """A model's reasoning."""

    text: str


class InputReasoning(Struct, frozen=True, tag_field="type", tag="reasoning"):
    """Reasoning of an earlier answer. `encrypted_content` is read if `content` is missing."""

    summary: list[SummaryText] = []
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class ItemReference(Struct, frozen=True, tag_field="type", tag="item_reference"):
    """An output item of a stored response, by its id."""

    id: str


InputItem = InputMessage | InputCall | InputCallOutput | InputReasoning | ItemReference


class FunctionTool(Struct, frozen=True, tag_field="type", tag="function", forbid_unknown_fields=True):
    """A function that the model may call and that the client runs. `parameters`: a JSON schema."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None
    defer_loading: Literal[False] | None = None


class FunctionChoice(Struct, frozen=True, tag_field="type", tag="function", forbid_unknown_fields=True):
    """The model must call this function."""

    name: str


class AllowedTools(Struct, frozen=True, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    """The model may (`auto`) or must (`required`) call some of the tools; the others are not offered to it."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Meta(min_length=1, max_length=128)]


class SchemaFormat(Struct, frozen=True, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON that is valid under a schema. Always enforced, with or without `strict`."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Form of the answer's text."""

    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How much the model reasons before it answers. The reasoning itself is returned, so that no summary is made."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    """OpenAI's older name of `summary`."""
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ObfuscationOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_obfuscation: Literal[False] | None = None


Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""The first two add something here. The others concern items that no answer of this gateway has."""


class ResponsesRequest(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/responses`. `input`: a text, or items that continue the conversation of `previous_response_id`."""

    input: str | Annotated[list[InputItem], Meta(max_length=16384)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=128)] | None = None
    store: bool | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None
    ) = None
    include: Annotated[list[Includable], Meta(max_length=16)] | None = None
    stream_options: ObfuscationOptions | None = None


OTHER_FIELDS: Final = OtherFields(
    harmless=frozenset(
        {
            "user",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "prompt_cache_options",
            "max_tool_calls",
            "client_metadata",
        }
    ),
    neutral={
        "background": (False, None),
        "service_tier": ("auto", "default", None),
        "conversation": (None,),
        "prompt": (None,),
        "context_management": (None, []),
        "moderation": (None,),
        "access_programs": (None,),
        "image": (None,),
    },
    advice={
        "background": "Use `stream`, or wait for the answer.",
        "conversation": "Use `previous_response_id`, or send the whole conversation as `input`.",
        "prompt": "Send the prompt's text as `instructions` and `input`.",
        "context_management": "Use `truncation`.",
        "image": "Models here write text only.",
        "tools[].type": "Only functions can be called, which the client runs; there are no hosted tools here.",
        "tool_choice.type": "Only functions can be called; there are no hosted tools here.",
        "input[].type": "Expected a message, a function call, its output, reasoning, or a reference to an item.",
        "input[].content[].type": "Models here read `input_text`, `input_image`, `output_text` and `refusal`.",
        "input[].output[].type": "Models here read text only: `input_text`.",
        "text.verbosity": "Models here have no such setting; ask for it in `instructions`.",
        "reasoning.summary": "The reasoning itself is returned; only `auto` is accepted.",
    },
    untagged={"input": "message"},
    optional=frozenset({"context_management"}),
    tools=frozenset({"function"}),
)
"""What the fields of OpenAI's Responses API that `ResponsesRequest` lacks may contain. `max_tool_calls` limits hosted
tools, of which there are none; `client_metadata` are labels of Codex."""
