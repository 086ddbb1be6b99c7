"""Requests to encoder-decoder models: what the encoder reads, and what its decoder's answer begins with.

The encoder's rows come first in the prompt, each as a token beyond every vocabulary (`serving.images`), then the tokens
with which the model's decoder starts. `DecoderRules` are what the model's `generation_config.json` forbids in an
answer; `RuledConstraint` enforces them token by token, as transformers' `generate` does.

`capture.models.sources` runs the encoder; the gateway calls this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from fusionai.primitives.errors import ModelError
from fusionai.serving.images import ImageMarks, ImageReader, PlacedImage
from fusionai.serving.interface import Constraint
from fusionai.serving.text import Tokenizer, read_json

if TYPE_CHECKING:
    from fusionai.capture.models.sources import SourceEncoder

_MARKS: Final = ImageMarks("", -1)
"""Rows of an encoder are not named in prompts."""
_REFUSED: Final[Mapping[str, tuple[object, ...]]] = {
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1, 1.0),
    "bad_words_ids": (None,),
    "force_words_ids": (None,),
    "constraints": (None,),
    "sequence_bias": (None,),
    "exponential_decay_length_penalty": (None,),
}
"""Rules of transformers that have no effect here -> values that ask for nothing. `forced_eos_token_id` is not among
them: it ends answers that reach their limit, which end there anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderRules:
    """`start`: tokens that every answer begins behind. `positions`: how many tokens the decoder has places for, None:
    no limit. `most_tokens`, `longest`: of an answer, and of an answer with what it begins behind, unless a request says
    more; None: no limit."""

    start: tuple[int, ...]
    positions: int | None = None
    most_tokens: int | None = None
    longest: int | None = None
    suppressed: frozenset[int] = frozenset()
    first_suppressed: frozenset[int] = frozenset()
    """Not as the first token of an answer."""
    least_tokens: int = 0
    """Tokens of an answer before which it may not end."""
    ngram: int = 0
    """Length of sequences that may not occur twice; 0: no rule."""
    beams: int = 1
    """Beams that transformers would search by default; here the best token is taken."""
    without_effect: tuple[str, ...] = ()
    """Other rules of the model that are not followed."""

    @classmethod
    def load(cls, directory: Path) -> DecoderRules:
        """Load from a directory in Hugging Face layout. Raises `ModelError`."""
        config, generation = read_json(directory / "config.json"), read_json(directory / "generation_config.json")
        both = {**config, **{name: value for name, value in generation.items() if value is not None}}
        start = next(
            (both[name] for name in ("decoder_start_token_id", "bos_token_id") if _is_token(both.get(name))), None
        )
        if start is None:
            raise ModelError(
                f"{directory}: no decoder_start_token_id in its configuration.",
                hint="Save the model again with its generation_config.json.",
            )
        forced = both.get("forced_bos_token_id")
        begun = (int(start), *((int(forced),) if isinstance(forced, int) and _is_token(forced) else ()))
        least = max(_number(both, "min_length") - len(begun), _number(both, "min_new_tokens"), 0)
        return cls(
            start=begun,
            positions=_positions(config),
            most_tokens=_number(both, "max_new_tokens") or None,
            longest=_number(both, "max_length") or None,
            suppressed=_tokens(both, "suppress_tokens"),
            first_suppressed=_tokens(both, "begin_suppress_tokens"),
            least_tokens=least,
            ngram=_number(both, "no_repeat_ngram_size"),
            beams=_number(both, "num_beams") or 1,
            without_effect=tuple(name for name, plain in _REFUSED.items() if both.get(name) not in plain),
        )

    @property
    def words(self) -> tuple[str, ...]:
        """What differs from transformers' defaults, in sentences."""
        said = []
        if self.beams > 1:
            said.append(f"the model's default is a search with {self.beams} beams; here one answer is decoded")
        if self.without_effect:
            said.append(f"has no effect here: {', '.join(self.without_effect)} of generation_config.json")
        return tuple(said)


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _tokens(fields: Mapping[str, Any], name: str) -> frozenset[int]:
    value = fields.get(name)
    return frozenset(token for token in value if _is_token(token)) if isinstance(value, list) else frozenset()


def _positions(config: Mapping[str, Any]) -> int | None:
    names = ("max_target_positions", "max_position_embeddings")
    return next((size for name in names if (size := _number(config, name)) > 0), None)


def source_positions(config: Mapping[str, Any]) -> int | None:
    """Return how many rows an encoder makes at most; None: no limit."""
    names = ("max_source_positions", "max_position_embeddings")
    return next((size for name in names if (size := _number(config, name)) > 0), None)


class RuledConstraint:
    """Implements `interface.Constraint`: the model's rules, and another constraint if there is one. `begun`: tokens
    before the answer. `stop_tokens` end an answer."""

    def __init__(
        self,
        rules: DecoderRules,
        *,
        begun: Sequence[int],
        vocabulary: int,
        stop_tokens: frozenset[int],
        inner: Constraint | None = None,
    ) -> None:
        self._rules = rules
        self._tokens = list(begun)
        self._begun = len(self._tokens)
        self._inner = inner
        self._stop_tokens = stop_tokens
        self._free = np.full((vocabulary + 31) // 32, 0xFFFFFFFF, np.uint32)
        _clear(self._free, rules.suppressed)
        self._followers: dict[tuple[int, ...], set[int]] = {}
        for end in range(rules.ngram, len(self._tokens) + 1):
            self._note(end)

    def allowed(self) -> memoryview:
        """See `Constraint`."""
        rules, words = self._rules, self._free.copy()
        answered = len(self._tokens) - self._begun
        if not answered:
            _clear(words, rules.first_suppressed)
        if answered < rules.least_tokens:
            _clear(words, self._stop_tokens)
        if rules.ngram:
            last = self._tokens[len(self._tokens) - rules.ngram + 1 :]
            _clear(words, self._followers.get(tuple(last), ()))
        if self._inner is not None:
            inner = np.frombuffer(self._inner.allowed(), np.uint32)
            words[: len(inner)] &= inner[: len(words)]
            words[len(inner) :] = 0
        return words.data

    def accept(self, token: int) -> None:
        """See `Constraint`."""
        if self._inner is not None:
            self._inner.accept(token)
        self._tokens.append(token)
        if self._rules.ngram and len(self._tokens) >= self._rules.ngram:
            self._note(len(self._tokens))

    def _note(self, end: int) -> None:
        """Remember the sequence that ends before `end`."""
        if not self._rules.ngram:
            return
        *before, token = self._tokens[end - self._rules.ngram : end]
        self._followers.setdefault(tuple(before), set()).add(token)

    @property
    def finished(self) -> bool:
        """See `Constraint`."""
        return self._inner is not None and self._inner.finished


class OneOf:
    """Implements `interface.Constraint`: each token is one of `tokens`."""

    def __init__(self, tokens: Sequence[int], vocabulary: int) -> None:
        self._words = np.zeros((vocabulary + 31) // 32, np.uint32)
        for token in tokens:
            self._words[token // 32] |= np.uint32(1 << token % 32)

    def allowed(self) -> memoryview:
        """See `Constraint`."""
        return self._words.data

    def accept(self, token: int) -> None:
        """See `Constraint`."""
        del token

    @property
    def finished(self) -> bool:
        """See `Constraint`."""
        return False


def _clear(words: NDArray[np.uint32], tokens: Sequence[int] | frozenset[int] | set[int] | tuple[()]) -> None:
    for token in tokens:
        if token // 32 < len(words):
            words[token // 32] &= ~np.uint32(1 << token % 32)


@dataclass(frozen=True, slots=True)
class SpeechTokens:
    """Whisper's special tokens. `languages`: code, such as `en` -> token; empty for a model of one language. `tasks`:
    `transcribe` and `translate` -> token. `no_timestamps`, `before`: tokens before an answer without times, and before
    the text that came before; None if the model has none."""

    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    no_timestamps: int | None
    before: int | None

    @classmethod
    def load(cls, directory: Path, tokenizer: Tokenizer) -> SpeechTokens:
        """Load from a directory in Hugging Face layout."""
        generation = read_json(directory / "generation_config.json")
        many = generation.get("is_multilingual", bool(generation.get("lang_to_id"))) is True
        languages = _ids(generation.get("lang_to_id")) if many else {}
        times = generation.get("no_timestamps_token_id")
        return cls(
            {name.strip("<|>"): token for name, token in languages.items()},
            _ids(generation.get("task_to_id")) if many else {},
            times if _is_token(times) else None,
            tokenizer.id_of("<|startofprev|>"),
        )


def _ids(value: object) -> dict[str, int]:
    return {str(name): token for name, token in value.items() if _is_token(token)} if isinstance(value, dict) else {}


class Source:
    """What an encoder-decoder model reads. `speech`: Whisper's special tokens; None for a model of texts. `rate_hz` and
    `window_samples`: of sound that the encoder takes; 0 for a model of texts. `longest`: tokens of a text."""

    def __init__(
        self, encoder: SourceEncoder, rules: DecoderRules, speech: SpeechTokens | None, longest: int | None
    ) -> None:
        self.rules = rules
        self.speech = speech
        self.rate_hz = encoder.rate_hz
        self.window_samples = encoder.window_samples
        self.longest = longest
        self._encoder = encoder
        self._reader = ImageReader(self._encode, _MARKS)

    def _encode(self, data: bytes) -> Any:
        if self.speech is not None:
            return self._encoder.encode_sound(np.frombuffer(data, np.float32))
        return self._encoder.encode_text(np.frombuffer(data, np.int64).tolist())

    async def read_text(self, tokens: Sequence[int], scope: str) -> PlacedImage:
        """Return the rows of a text. Raises `UsageError` if too many wait, `ModelError`."""
        return await self._reader.read(np.array(tokens, np.int64).tobytes(), scope)

    async def read_sound(self, samples: NDArray[np.float32], scope: str) -> PlacedImage:
        """Return the rows of sound, of at most `window_samples`. Raises `UsageError` if too many wait, `ModelError`."""
        return await self._reader.read(np.ascontiguousarray(samples, np.float32).tobytes(), scope)

    def prompt(self, rows: PlacedImage, start: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return the prompt of an answer to what was read. `start`: instead of the model's own start."""
        return (*rows.tokens, *(self.rules.start if start is None else start))

    def room(self, start: int) -> int | None:
        """Return how many tokens an answer may have that begins behind `start` tokens; None: no limit."""
        return None if self.rules.positions is None else self.rules.positions - start

    def length(self, start: int) -> int | None:
        """Return how long an answer is that begins behind `start` tokens, unless a request says more; None: no
        limit."""
        rules = self.rules
        if rules.most_tokens is not None or rules.longest is None:
            return rules.most_tokens
        # Whisper's own `generate` counts what an answer begins behind apart.
        return rules.longest if self.speech is not None else max(rules.longest - start, 1)

    def constraint(
        self, start: Sequence[int], vocabulary: int, stop_tokens: frozenset[int], inner: Constraint | None = None
    ) -> Constraint | None:
        """Return the constraint that an answer to what was read has to keep; `start`: tokens before it."""
        rules = self.rules
        if not (rules.suppressed or rules.first_suppressed or rules.least_tokens or rules.ngram):
            return inner
        return RuledConstraint(rules, begun=start, vocabulary=vocabulary, stop_tokens=stop_tokens, inner=inner)

    def close(self) -> None:
        """End the encoder's thread."""
        self._reader.close()
