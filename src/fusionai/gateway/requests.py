"""Request bodies as structs: which fields exist and what each may contain.

Also reads and checks the body of a request.

A field of a protocol that this gateway does not support is refused by name if its value would change the answer;
fields that have no effect are accepted (`OtherFields`). Fields that no protocol has are left out and named in the
answer's header (`unknown_fields`), or refused if the gateway is strict. `app` describes the structs in its OpenAPI
document.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import ClientDisconnect, Request

from fusionai.gateway.config import RequestLimits
from fusionai.gateway.errors import ApiError, invalid, nearest, shown
from fusionai.gateway.unknown_fields import without_unknown


@dataclass(frozen=True, slots=True)
class OtherFields:
    """Fields of a protocol's bodies that have no effect here, and that the structs therefore lack."""

    harmless: frozenset[str]
    """Accepted with any value: labels for bookkeeping, which change no answer elsewhere either."""
    neutral: Mapping[str, tuple[object, ...]]
    """Unsupported; accepted only with one of these values, which ask for the default behaviour."""
    advice: Mapping[str, str]
    """What to use instead of an unsupported field, or of an invalid value of a field. `items[].type` is the field of
    all items of a list."""
    untagged: Mapping[str, str] = field(default_factory=dict[str, str])
    """Lists whose items may leave out their `type`, and the type that they then have."""
    optional: frozenset[str] = frozenset()
    """Unsupported services that a client can do without: left out like unknown fields, or refused if the gateway is
    strict."""
    tools: frozenset[str] = frozenset()
    """The types of `tools` that exist here; others are optional services. Empty: all are checked by the body's form."""


OPENAI: Final = OtherFields(
    harmless=frozenset(
        {"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    ),
    neutral={
        "service_tier": ("auto", "default", None),
        "modalities": (["text"], None),
        "best_of": (1, None),
        "suffix": (None, ""),
        "functions": (None,),
        "function_call": (None,),
        "audio": (None,),
        "prediction": (None,),
        "web_search_options": (None,),
        "reasoning_effort": ("none", None),
        "verbosity": (None,),
        "moderation": (None,),
    },
    advice={
        "functions": "Use `tools`.",
        "function_call": "Use `tool_choice`.",
        "suffix": "Models here can only continue a prompt.",
        "best_of": "Use `n` and choose the best answer yourself.",
        "modalities": "Answers are text only.",
        "audio": "Answers are text only.",
    },
)

Unit = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
TokenId = Annotated[int, Meta(ge=0, le=2**31)]
Word = Annotated[str, Meta(max_length=1024)]
ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """`include_usage`: send one more chunk before the end, with token counts."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's names for the form of an answer; one of them is given. `json`: a JSON schema, as an object or as text.
    `grammar`: in the notation of Lark or GBNF. `disable_any_whitespace`: no whitespace between the parts of JSON."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Annotated[list[Word], Meta(min_length=1, max_length=1024)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


class Options(Struct, frozen=True, kw_only=True):
    """Fields of all requests that generate text. null means the same as leaving the field out."""

    model: Annotated[str, Meta(max_length=512)]
    stream: bool | None = None
    stop: Word | Annotated[list[Word], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Unit | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    """-1 or 0: no limit."""
    min_p: Unit | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]] | None = None
    ignore_eos: bool | None = None
    timeout_s: Annotated[float, Meta(gt=0.0, le=86400.0)] | None = None
    """The generation ends with an error after this many seconds."""
    fusion_route: bool | None = None
    """Report which machines computed the answer and how long each took."""


class Settings(Options, frozen=True, kw_only=True):
    """Fields that chat and completions share."""

    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[Word], Meta(min_length=1, max_length=1024)] | None = None
    guided_grammar: str | None = None


class TextPart(Struct, frozen=True, tag_field="type", tag="text"):
    """Text in a message."""

    text: str


class RefusalPart(Struct, frozen=True, tag_field="type", tag="refusal"):
    """A refusal in an earlier answer."""

    refusal: str


class ImageUrl(Struct, frozen=True, forbid_unknown_fields=True):
    """`url`: a data URL. `detail` has no effect: the model's own processor chooses the size."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(Struct, frozen=True, tag_field="type", tag="image_url"):
    """A picture in a message."""

    image_url: ImageUrl


Content = str | list[TextPart | RefusalPart] | None
ContentWithImages = str | list[TextPart | RefusalPart | ImagePart] | None


class CalledFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """`arguments`: JSON text."""

    name: str
    arguments: str


class MadeToolCall(Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call in an earlier answer."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class _Said(Struct, frozen=True, tag_field="role", forbid_unknown_fields=True):
    content: Content
    name: str | UnsetType = UNSET


class SystemMessage(_Said, frozen=True, tag="system"):
    """Instructions for the model."""


class DeveloperMessage(_Said, frozen=True, tag="developer"):
    """OpenAI's newer name of a system message; rendered as one, because templates only know the older name."""


class UserMessage(Struct, frozen=True, tag_field="role", tag="user", forbid_unknown_fields=True):
    """A message from the user."""

    content: ContentWithImages
    name: str | UnsetType = UNSET


class AssistantMessage(Struct, frozen=True, tag_field="role", tag="assistant", forbid_unknown_fields=True):
    """An earlier answer, with the fields that clients keep of it."""

    content: Content = None
    name: str | UnsetType | None = UNSET
    tool_calls: list[MadeToolCall] | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    refusal: str | None = None
    function_call: None = None
    audio: None = None
    annotations: list[Any] | None = None


class ToolMessage(Struct, frozen=True, tag_field="role", tag="tool", forbid_unknown_fields=True):
    """The result of a tool call."""

    content: Content
    tool_call_id: str
    name: str | UnsetType = UNSET


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class Function(Struct, frozen=True, forbid_unknown_fields=True):
    """A tool. `parameters` is a JSON schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True, forbid_unknown_fields=True):
    """A tool that the model may call."""

    function: Function
    type: Literal["function"] = "function"


class FunctionName(Struct, frozen=True, forbid_unknown_fields=True):
    """The name of a tool."""

    name: str


class NamedChoice(Struct, frozen=True, forbid_unknown_fields=True):
    """The model must call this tool."""

    function: FunctionName
    type: Literal["function"] = "function"


class TextFormat(Struct, frozen=True, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Any text."""


class JsonObjectFormat(Struct, frozen=True, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Any JSON object."""


class NamedSchema(Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON schema with a name."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, frozen=True, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON that is valid under a schema. Always enforced, with or without `strict`."""

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
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """How much the model thinks, if its chat template has a setting for it; "none" turns thinking off."""


class CompletionRequest(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`. `prompt`: a text, several texts, the tokens of one, or of several."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class LoadAdapterRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/load_lora_adapter`, as vLLM has it. `lora_path`: below the directory of `--adapter-directory`."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=128)]
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]


class UnloadAdapterRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/unload_lora_adapter`, as vLLM has it. `lora_int_id` has no effect."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=128)]
    lora_int_id: int | None = None


def plain(message: Message) -> dict[str, Any]:
    """The message in the form that templates read."""
    rendered = msgspec.to_builtins(message)
    if rendered["role"] == "developer":
        rendered["role"] = "system"
    if rendered["role"] == "assistant":
        for name in ("refusal", "function_call", "audio", "annotations"):
            del rendered[name]
    return rendered


Form = TypeVar("Form", bound=msgspec.Struct)
_WHERE: Final = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_LONGEST_REASON: Final = 400
UNKNOWN: Final = "unknown_parameter"
"""Code of the error for a field that no struct has."""
_DRAINED: Final = 4
"""A body up to this many times the limit is read to its end, without keeping it, before it is refused."""
_INDEX: Final = re.compile(r"\[\d+\]")
_MISSING: Final = re.compile(r"Object missing required field `(?P<name>.*)`")


async def read(
    request: Request,
    form: type[Form],
    limits: RequestLimits,
    others: OtherFields = OPENAI,
    ignored: set[str] | None = None,
    *,
    any_type: bool = False,
) -> Form:
    """Decode the request's body as `form`. `ignored`: gets the paths of unknown fields, which are left out; None:
    unknown fields are refused. `any_type`: the body's `Content-Type` does not matter. Raises `ApiError`."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not any_type:
        raise ApiError(415, "Expected the header `Content-Type: application/json`.", code="unsupported_media_type")
    body = await read_body(request, limits)
    try:
        return decode(body, form, others)
    except ApiError as problem:
        if ignored is None or not (isinstance(problem, _Optional) or problem.body.code == UNKNOWN):
            raise
    # Looking through the whole body can take a second, in which all streams would wait.
    return await asyncio.to_thread(decode, body, form, others, ignored)


def decode(body: bytes, form: type[Form], others: OtherFields = OPENAI, ignored: set[str] | None = None) -> Form:
    """Decode a body as `form`; `ignored` as for `read`. Raises `ApiError` with the wrong field."""
    try:
        return checked(msgspec.json.decode(body), form, others, ignored)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise invalid(f"The body is not valid JSON: {problem}", code="invalid_json") from None
    except RecursionError:
        raise invalid("The body is nested too deeply.", code="invalid_json") from None


def checked(given: Any, form: type[Form], others: OtherFields, ignored: set[str] | None = None) -> Form:
    """Convert JSON data to `form`; `ignored` as for `read`. Raises `ApiError` with the wrong field."""
    known = [each.encode_name for each in msgspec.structs.fields(form)]
    try:
        if isinstance(given, dict):
            given = _wanted(given, known, others, ignored)
        if ignored is not None:
            given = without_unknown(given, form, ignored)
        return msgspec.convert(given, form)
    except msgspec.ValidationError as problem:
        raise _explained(str(problem), known, others) from None


async def read_body(request: Request, limits: RequestLimits) -> bytes:
    """Return a request's body. Raises `ApiError` if it is too large or arrives too slowly."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > _DRAINED * limits.body_bytes):
        raise _too_large(limits)
    body = bytearray()
    size = 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for piece in request.stream():
                size += len(piece)
                if size <= limits.body_bytes:
                    body += piece
                # Most clients read no answer before they have sent the whole body, so the rest is read and dropped.
                elif size > _DRAINED * limits.body_bytes:
                    raise _too_large(limits)
                else:
                    body.clear()
    except TimeoutError:
        raise ApiError(
            408,
            f"The body did not arrive within {limits.body_timeout_s:g} s.",
            code="request_timeout",
            headers={"Connection": "close"},
        ) from None
    except ClientDisconnect:
        raise ApiError(400, "The connection closed before the body was complete.", code="incomplete_body") from None
    if size > limits.body_bytes:
        raise _too_large(limits)
    return bytes(body)


def _too_large(limits: RequestLimits) -> ApiError:
    message = f"The body is larger than {limits.body_bytes} bytes."
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


class _Optional(ApiError):
    """A client asks for a service that it can do without."""


def _wanted(given: dict[str, Any], known: list[str], others: OtherFields, ignored: set[str] | None) -> dict[str, Any]:
    """Remove fields that ask for nothing, and complete items without a type. Raises `ApiError` for a field that asks
    for something unsupported, unless the client can do without it and `ignored` may name it."""
    wanted = dict(given)
    for name in given:
        if name in known:
            continue
        if name in others.harmless:
            del wanted[name]
        elif name in others.neutral:
            if given[name] not in others.neutral[name]:
                advice = f" {others.advice[name]}" if name in others.advice else ""
                if name not in others.optional or ignored is None:
                    kind = _Optional if name in others.optional else ApiError
                    message = f"`{name}` is not supported by this gateway.{advice}"
                    raise kind(400, message, code="unsupported_parameter", param=name)
                ignored.add(name)
            del wanted[name]
    if others.tools and isinstance(tools := wanted.get("tools"), list):
        wanted["tools"] = _runnable(tools, others, ignored)
    for name, tag in others.untagged.items():
        if isinstance(items := wanted.get(name), list):
            wanted[name] = [{"type": tag, **item} if isinstance(item, dict) else item for item in items]
    return wanted


def _runnable(tools: list[Any], others: OtherFields, ignored: set[str] | None) -> list[Any]:
    """Return the tools without those that a server would run, which `ignored` names by their types. Raises `ApiError`
    for these if `ignored` is None."""
    runnable: list[Any] = []
    for place, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str) or kind in others.tools:
            runnable.append(tool)
        elif ignored is None:
            path = f"tools[{place}].type"
            message = f"`{path}`: Invalid value '{shown(kind)}'. {others.advice['tools[].type']}"
            raise _Optional(400, message, code="invalid_value", param=path)
        else:
            ignored.add(f"tools[{shown(kind)}]")
    return runnable


def _explained(problem: str, known: list[str], others: OtherFields) -> ApiError:
    found = _WHERE.match(problem)
    what, path = (found["what"], found["path"] or "") if found else (problem, "")
    unknown, missing = _UNKNOWN.match(what), _MISSING.match(what)
    if unknown is not None:
        name = shown(f"{path}.{unknown['name']}" if path else unknown["name"])
        near = nearest(unknown["name"], known) if not path else ""
        return invalid(f"Unknown parameter: `{name}`.{near}", name, UNKNOWN)
    if missing is not None:
        name = shown(f"{path}.{missing['name']}" if path else missing["name"])
        return invalid(f"Missing required parameter: `{name}`.", name, "missing_required_parameter")
    where = f"`{shown(path)}`: " if path else ""
    advice = others.advice.get(_INDEX.sub("[]", path), "")
    return invalid(
        f"{where}{what[:_LONGEST_REASON]}.{advice and f' {advice}'}",
        shown(path) or None,
        "invalid_type" if what.startswith("Expected") else "invalid_value",
    )
