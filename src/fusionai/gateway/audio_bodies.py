"""Bodies of requests for the text of speech, and of their answers, in OpenAI's form.

`audio` reads and fills them; `app` describes them in its OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from fusionai.gateway.requests import Word

SpeechFormat = Literal["json", "text", "verbose_json", "srt", "vtt"]
NEUTRAL: Final[Mapping[str, tuple[str, ...]]] = {
    "stream": ("false", "0", "False"),
    "timestamp_granularities": ("segment",),
    "chunking_strategy": ("auto", ""),
    "include": (),
}
"""Fields that are not supported -> values that ask for what is done anyway."""


class SpeechRequest(Struct, frozen=True, kw_only=True):
    """`POST /v1/audio/transcriptions` and `/v1/audio/translations`, as `multipart/form-data`. `file`: WAV, FLAC, OGG or
    MP3. `language`: its code, such as `en`; without it, the model detects the language. `prompt`: text that came
    before."""

    file: bytes
    model: Annotated[str, Meta(max_length=512)]
    language: Word | None = None
    prompt: Annotated[str, Meta(max_length=2**16)] | None = None
    response_format: SpeechFormat = "json"
    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0


class SpeechUsage(Struct, frozen=True):
    """Length of the sound."""

    seconds: float
    type: Literal["duration"] = "duration"


class SpeechText(Struct, frozen=True):
    """The text of speech."""

    text: str
    usage: SpeechUsage


class SpeechSegment(Struct, frozen=True):
    """The text of one window of the sound. Times in seconds. `avg_logprob`: mean log-probability of its tokens.
    `compression_ratio`: length of the text over that of its compressed form, which is large if it repeats itself."""

    id: int
    start: float
    end: float
    text: str
    tokens: Sequence[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float


class SpeechReport(Struct, frozen=True):
    """The text of speech with its windows. `language`: its code, as given or detected; empty for a model of one
    language."""

    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: Sequence[SpeechSegment]
    usage: SpeechUsage
