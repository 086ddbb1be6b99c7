"""Answers `POST /v1/audio/transcriptions` and `/v1/audio/translations`: the text of speech.

The sound is cut into windows of the length that the model hears, which are answered one after the other. Files are
decoded by libsndfile (WAV, FLAC, OGG, MP3 and its other formats) and resampled by soxr in threads, a second at a time,
so that no size which a file names is allocated. `serving.sources` encodes a window, `generation` runs the decoder. The
bodies are in OpenAI's form; `app` describes them in its OpenAPI document."""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
import soundfile
import soxr
from msgspec import Meta, Struct
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from fusionai.gateway.context import GatewayContext, json_response
from fusionai.gateway.errors import ApiError, invalid, nearest, of_failure, shown
from fusionai.gateway.forms import FormPart, parts_of
from fusionai.gateway.generation import ApiGeneration, Choice, Delta
from fusionai.gateway.requests import UNKNOWN, Word, read_body
from fusionai.gateway.streaming import while_connected
from fusionai.primitives.errors import FusionError, UsageError
from fusionai.serving.images import PlacedImage
from fusionai.serving.interface import Constraint, Generation, Sampling
from fusionai.serving.sources import OneOf, Source, SpeechTokens

SpeechFormat = Literal["json", "text", "verbose_json", "srt", "vtt"]
SpeechTask = Literal["transcribe", "translate"]
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

    task: SpeechTask
    language: str
    duration: float
    text: str
    segments: Sequence[SpeechSegment]
    usage: SpeechUsage


_FIELDS: Final = tuple(each.encode_name for each in msgspec.structs.fields(SpeechRequest))


@dataclass(frozen=True, slots=True)
class _Spoken:
    """The text of a window, its tokens and their log-probabilities."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class AudioEndpoint:
    """Answers requests for the text of speech."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context

    async def transcriptions(self, request: Request) -> Response:
        """Answer with the text in its own language."""
        return await self._respond(request, "transcribe")

    async def translations(self, request: Request) -> Response:
        """Answer with the text in English."""
        return await self._respond(request, "translate")

    async def _respond(self, request: Request, task: SpeechTask) -> Response:
        context = self._context
        context.check_ready()
        context.check_gives("speech")
        body = await read_body(request, context.config.limits)
        asked = await context.off_loop(self._read, request, body)
        context.adapter_of(asked.model)
        source = context.text.source
        assert source is not None
        assert source.speech is not None
        _check_task(asked, task, source.speech)
        transcript = _Transcript(context, source, source.speech, request.state.holder.scope, asked, task)
        report = await while_connected(request, transcript.report())
        return _answer(report, asked)

    def _read(self, request: Request, body: bytes) -> SpeechRequest:
        """Return the request's form. Blocking. Raises `ApiError`."""
        given: dict[str, bytes | str] = {}
        for part in parts_of(body, request.headers.get("content-type", "")):
            name = part.name.removesuffix("[]")
            if name in given:
                raise invalid(f"The form has `{shown(name)}` twice.", shown(name))
            if name in _FIELDS:
                given[name] = part.data if name == "file" else part.text
            else:
                self._leave_out(request, name, part)
        if "file" not in given:
            raise invalid("The form has no `file`.", "file", "missing_required_parameter")
        try:
            return msgspec.convert(given, SpeechRequest, strict=False)
        except msgspec.ValidationError as problem:
            raise invalid(f"The form is not valid: {problem}") from None

    def _leave_out(self, request: Request, name: str, part: FormPart) -> None:
        """Accept a field that changes nothing. Raises `ApiError` for another one."""
        if name in NEUTRAL:
            if part.text not in NEUTRAL[name]:
                raise invalid(f"`{name}` is not supported with this value.", name, "unsupported_parameter")
        elif self._context.config.is_strict:
            raise invalid(f"Unknown field `{shown(name)}`.{nearest(name, _FIELDS)}", shown(name), UNKNOWN)
        else:
            request.state.ignored.add(name)


def _check_task(asked: SpeechRequest, task: SpeechTask, speech: SpeechTokens) -> None:
    if task == "translate" and task not in speech.tasks:
        raise ApiError(400, "This model does not translate: it knows one language.", code="unsupported_by_model")
    if asked.language is not None and speech.languages and asked.language.lower() not in speech.languages:
        known = nearest(asked.language.lower(), speech.languages) or f" It knows {len(speech.languages)} languages."
        raise invalid(f"The model has no language `{shown(asked.language)}`.{known}", "language")
    if asked.language is not None and not speech.languages and asked.language.lower() != "en":
        raise invalid(f"The model knows one language only, not `{shown(asked.language)}`.", "language")


@dataclass(slots=True)
class _Transcript:
    """The answer to one request."""

    context: GatewayContext
    source: Source
    speech: SpeechTokens
    scope: str
    asked: SpeechRequest
    task: SpeechTask

    async def report(self) -> SpeechReport:
        """Return the text of all windows. Raises `ApiError`."""
        off_loop, source = self.context.off_loop, self.source
        sound = await off_loop(SoundReader, self.asked.file, source.rate_hz, source.window_samples)
        before = await off_loop(self._before)
        language = None if self.asked.language is None else self.asked.language.lower()
        segments: list[SpeechSegment] = []
        begun_s = 0.0
        while (window := await off_loop(sound.next_window)) is not None:
            try:
                rows = await source.read_sound(window, self.scope)
            except FusionError as problem:
                raise of_failure(problem) from problem
            if language is None and self.speech.languages:
                language = await self._language(rows)
            start = self._start(before, language)
            spoken = await self._spoken(rows, start)
            segments.append(self._segment(len(segments), begun_s, sound.seconds, spoken))
            begun_s = sound.seconds
        if not segments:
            raise invalid("The file has no sound.", "file")
        text = " ".join(part for segment in segments if (part := segment.text.strip()))
        return SpeechReport(
            self.task, language or "", sound.seconds, text, segments, SpeechUsage(seconds=sound.seconds)
        )

    def _before(self) -> tuple[int, ...]:
        """Return the tokens of the text that came before, as many as transformers takes."""
        prompt = (self.asked.prompt or "").strip()
        if not prompt:
            return ()
        if self.speech.before is None:
            raise invalid("This model takes no text that came before.", "prompt", "unsupported_parameter")
        tokens = self.context.text.tokenizer.encode(f" {prompt}", framed=False, trusted=False)
        most = (self.source.rules.positions or 448) // 2 - 1
        return (self.speech.before, *tokens[-most:])

    def _start(self, before: Sequence[int], language: str | None) -> tuple[int, ...]:
        """Return the tokens that the decoder begins with."""
        speech = self.speech
        asked = () if language is None or not speech.languages else (speech.languages[language],)
        task = (speech.tasks[self.task],) if self.task in speech.tasks else ()
        plain = () if speech.no_timestamps is None else (speech.no_timestamps,)
        return (*before, self.source.rules.start[0], *asked, *task, *plain)

    async def _language(self, rows: PlacedImage) -> str:
        """Return the most probable language, as the model's first token says it."""
        start = self.source.rules.start[:1]
        among = OneOf(tuple(self.speech.languages.values()), self.context.engine.vocabulary)
        found = await self._generated(rows, start, 1, 0.0, among, frozenset())
        codes = {token: code for code, token in self.speech.languages.items()}
        return codes[found.tokens[0]]

    async def _spoken(self, rows: PlacedImage, start: tuple[int, ...]) -> _Spoken:
        context, source = self.context, self.source
        room = context.room_for(len(rows.tokens) + len(start), None, None, "prompt", start=len(start))
        rules = source.constraint(start, context.engine.vocabulary, context.stop_tokens)
        return await self._generated(rows, start, room, self.asked.temperature, rules, context.stop_tokens)

    async def _generated(
        self,
        rows: PlacedImage,
        start: tuple[int, ...],
        room: int,
        temperature: float,
        constraint: Constraint | None,
        stop_tokens: frozenset[int],
    ) -> _Spoken:
        context = self.context
        asked = Generation(
            prompt=self.source.prompt(rows, start),
            max_tokens=room,
            sampling=Sampling(temperature=temperature),
            stop_tokens=stop_tokens,
            logprobs=0,
            scope=self.scope,
            constraint=constraint,
            deadline_s=context.config.limits.deadline_s,
            images=(rows,),
        )
        choice = Choice(index=0, prompt=0, generation=asked, decoder=context.text.decoder())
        generation = ApiGeneration(context.engine, [choice], context.metrics, context.clock.now_s)
        try:
            await generation.open()
            parts = [update async for update in generation.updates() if isinstance(update, Delta)]
        finally:
            await generation.close()
        found = [one.logprob for part in parts for one in part.logprobs]
        text = "".join(part.text for part in parts)
        return _Spoken(text, tuple(one.token for one in found), tuple(one.logprob for one in found))

    def _segment(self, number: int, begun_s: float, end_s: float, spoken: _Spoken) -> SpeechSegment:
        written = spoken.text.encode()
        return SpeechSegment(
            id=number,
            start=begun_s,
            end=end_s,
            text=spoken.text,
            tokens=spoken.tokens,
            temperature=self.asked.temperature,
            avg_logprob=sum(spoken.logprobs) / len(spoken.logprobs) if spoken.logprobs else 0.0,
            compression_ratio=len(written) / len(zlib.compress(written)),
        )


def _answer(report: SpeechReport, asked: SpeechRequest) -> Response:
    match asked.response_format:
        case "json":
            return json_response(SpeechText(report.text, report.usage))
        case "verbose_json":
            return json_response(report)
        case "text":
            return Response(report.text + "\n", media_type="text/plain")
        case "srt":
            return Response(_captions(report.segments, ",", numbered=True), media_type="text/plain")
        case "vtt":
            return Response("WEBVTT\n\n" + _captions(report.segments, ".", numbered=False), media_type="text/vtt")


def _captions(segments: Sequence[SpeechSegment], point: str, *, numbered: bool) -> str:
    written: list[str] = []
    for segment in segments:
        number = f"{segment.id + 1}\n" if numbered else ""
        times = f"{_time(segment.start, point)} --> {_time(segment.end, point)}"
        written.append(f"{number}{times}\n{segment.text.strip()}\n\n")
    return "".join(written)


def _time(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"


MOST_S: Final = 4 * 3600
"""Longest sound, in seconds (chosen)."""
MOST_RATE_HZ: Final = 384_000
MOST_CHANNELS: Final = 16
"""Largest rate and number of channels of a file: those of audio hardware."""
_FORMATS: Final = "WAV, FLAC, OGG or MP3"


class SoundReader:
    """Reads the sound of a file in windows, at the rate that a model hears; several channels become their mean. Every
    method blocks. `seconds`: length of what was read up to now."""

    def __init__(self, data: bytes, rate_hz: int, window_samples: int) -> None:
        """Open the file `data`. Raises `UsageError` if it is no sound, or more than the limits."""
        self._rate_hz = rate_hz
        self._window_samples = window_samples
        try:
            self._file = soundfile.SoundFile(io.BytesIO(data))
        except (soundfile.SoundFileError, TypeError) as problem:
            raise UsageError(
                f"these bytes are no sound that can be read: {problem}", hint=f"Send {_FORMATS}."
            ) from None
        rate_hz_given, channels = int(self._file.samplerate), int(self._file.channels)
        if not 0 < rate_hz_given <= MOST_RATE_HZ or not 0 < channels <= MOST_CHANNELS:
            raise UsageError(
                f"the sound has {channels} channels at {rate_hz_given} Hz; at most {MOST_CHANNELS} at {MOST_RATE_HZ} "
                "Hz are accepted."
            )
        self._given_hz = rate_hz_given
        self._resampler = soxr.ResampleStream(rate_hz_given, rate_hz, 1, dtype="float32")
        self._waiting: list[NDArray[np.float32]] = []
        self._has_ended = False
        self.seconds = 0.0

    def next_window(self) -> NDArray[np.float32] | None:
        """Return the next window, float32 [samples], of which the last one may be shorter; None at the end. Raises
        `UsageError` for a damaged file, and for sound that is too long."""
        while not self._has_ended and sum(map(len, self._waiting)) < self._window_samples:
            self._waiting.append(self._next_second())
        samples = np.concatenate(self._waiting) if self._waiting else np.zeros(0, np.float32)
        self._waiting = [samples[self._window_samples :]]
        window = samples[: self._window_samples]
        self.seconds += len(window) / self._rate_hz
        if self.seconds > MOST_S:
            raise UsageError(f"the sound is longer than {MOST_S} seconds.", hint="Send it in parts.")
        return window if len(window) else None

    def _next_second(self) -> NDArray[np.float32]:
        try:
            read = self._file.read(self._given_hz, dtype="float32", always_2d=True)
        except soundfile.SoundFileError as problem:
            raise UsageError(f"the sound can't be read to its end: {problem}", hint="Save it again.") from None
        self._has_ended = len(read) < self._given_hz
        mono = np.ascontiguousarray(np.nan_to_num(read).mean(axis=1, dtype=np.float32))
        return self._resampler.resample_chunk(mono, last=self._has_ended)
