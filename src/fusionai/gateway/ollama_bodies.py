"""Bodies of Ollama's API as structs: requests, and answers, which are also the lines of a stream.

`ollama` converts the requests to chats and fills the answers; `app` describes both in its OpenAPI document. A field or
option that asks for something unsupported is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from fusionai.gateway.answers import RouteReport
from fusionai.gateway.requests import OtherFields, Penalty, Tool, Unit, Word

OLLAMA: Final = OtherFields(
    harmless=frozenset({"keep_alive"}),
    neutral={
        "raw": (False, None),
        "template": (None, ""),
        "suffix": (None, ""),
        "context": (None, []),
        "logprobs": (False, None),
        "top_logprobs": (0, None),
    },
    advice={
        "raw": "Use `/v1/completions`.",
        "template": "The model's own chat template is used.",
        "suffix": "Models here can only continue a prompt.",
        "context": "Send the conversation to `/api/chat`.",
        "logprobs": "Use `/v1/chat/completions`.",
        "top_logprobs": "Use `/v1/chat/completions`.",
    },
)
OLLAMA_OPTIONS: Final = OtherFields(
    harmless=frozenset(
        {
            "num_ctx",
            "num_keep",
            "num_batch",
            "num_gpu",
            "num_thread",
            "main_gpu",
            "low_vram",
            "f16_kv",
            "use_mmap",
            "use_mlock",
            "numa",
            "mirostat_tau",
            "mirostat_eta",
        }
    ),
    neutral={
        "mirostat": (0, None),
        "typical_p": (1, None),
        "tfs_z": (1, None),
        "repeat_last_n": (-1, None),
        "penalize_newline": (None,),
        "logits_all": (False, None),
        "vocab_only": (False, None),
        "embedding_only": (False, None),
    },
    advice={
        "mirostat": "Use `temperature`, `top_p` and `min_p`.",
        "repeat_last_n": "`repeat_penalty` is about the whole text (-1).",
    },
)
"""Options: those about the machine have no effect, because the pool's job was planned when it started."""


class OllamaOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Options that have an effect. `num_predict`: limit of tokens of the answer; below 0: none but the context."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Unit | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    min_p: Unit | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Word | Annotated[list[Word], Meta(max_length=16)] | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=2**31)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class OllamaFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """A called function with its arguments as an object."""

    name: str
    arguments: dict[str, Any]
    index: int | UnsetType = UNSET


class OllamaCall(Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call."""

    function: OllamaFunction
    id: str | UnsetType = UNSET


class OllamaMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """A message of a conversation. `tool_name`: the tool whose result a message of the role `tool` is."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Annotated[list[str], Meta(max_length=256)] | None = None
    """Pictures in base64."""


class OllamaSettings(Struct, frozen=True, kw_only=True):
    """Fields that conversations and single prompts share. `stream` is true if it is left out."""

    model: Annotated[str, Meta(max_length=512)]
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None


class OllamaChatRequest(OllamaSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /api/chat`. Without messages it only asks whether the model is ready."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=16384)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None


class OllamaGenerateRequest(OllamaSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /api/generate`. Without a prompt it only asks whether the model is ready."""

    prompt: str | None = None
    system: str | None = None
    images: Annotated[list[str], Meta(max_length=256)] | None = None
    """Pictures in base64."""


class OllamaShowRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /api/show`."""

    model: Annotated[str, Meta(max_length=512)]
    verbose: bool | None = None


class OllamaLine(Struct, frozen=True, kw_only=True):
    """Fields of a whole answer and of a line of a stream, whose last line has the counts. Durations are in
    nanoseconds; that of the prompt includes the wait for room."""

    model: str
    created_at: str
    done: bool = False
    done_reason: Literal["stop", "length", "load"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    fusion: RouteReport | UnsetType = UNSET


class OllamaAnswer(Struct, frozen=True):
    """The model's message, or new content of it."""

    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"


class OllamaChatLine(OllamaLine, frozen=True, kw_only=True):
    """Answer to `POST /api/chat`, whole or a line of it."""

    message: OllamaAnswer


class OllamaTextLine(OllamaLine, frozen=True, kw_only=True):
    """Answer to `POST /api/generate`, whole or a line of it."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaDetails(Struct, frozen=True):
    """`parent_model`: an adapter's base model, otherwise empty."""

    parent_model: str = ""


class OllamaModel(Struct, frozen=True):
    """A model that can be used. `size`: bytes that its stages occupy on all machines together."""

    name: str
    model: str
    modified_at: str
    size: int
    details: OllamaDetails


class OllamaModels(Struct, frozen=True):
    """Answer to `GET /api/tags`."""

    models: list[OllamaModel]


Capability = Literal["completion", "embedding", "tools", "thinking", "vision"]


class OllamaShown(Struct, frozen=True):
    """Answer to `POST /api/show`."""

    template: str
    capabilities: list[Capability]
    model_info: dict[str, str | int]
    details: OllamaDetails
    modified_at: str


class OllamaVersion(Struct, frozen=True):
    """Answer to `GET /api/version`: the version of Ollama whose API this gateway follows."""

    version: str
