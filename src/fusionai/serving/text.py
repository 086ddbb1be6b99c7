"""A served model's tokenizer, and incremental detokenization: text to token ids, tokens one by one to pieces of text.

In a rendered chat, names of special tokens are read as those tokens; they are plain text if the text's author is not
trusted. A piece of an answer never contains half a character, text that a later token may change, or the possible start
of a stop string; all pieces together equal the decoding of all tokens at once. Uses the `tokenizers` library alone.

Neighbours: `templates` renders chats, `model_text` reads a model's other files, `corpus.tokens` is for training."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from tokenizers import Tokenizer as Engine

from fusionai.corpus.templates import special_texts
from fusionai.primitives.errors import ModelError

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE: Final = "▁"
_SLICE_CHARACTERS: Final = 32_768
"""Length of the slices in which a long text's tokens are counted (chosen)."""
_FAR: Final = 2
"""Factor over the limit of tokens at which a text is certainly too long (chosen)."""


class Tokenizer:
    """Created by `load`; safe to share between threads."""

    def __init__(self, engine_json: str, config: dict[str, Any], where: str) -> None:
        """`engine_json`: content of `tokenizer.json`; `config`: content of `tokenizer_config.json`. Raises
        `ModelError`."""
        try:
            self._engine = Engine.from_str(engine_json)
            self._plain = Engine.from_str(engine_json)
            spec: dict[str, Any] = json.loads(engine_json)
        # `tokenizers` raises a bare Exception for a file it can't parse.
        except Exception as problem:
            raise ModelError(f"{where}: tokenizer.json is not readable: {problem}") from problem
        for engine in (self._engine, self._plain):
            engine.no_padding()
            engine.no_truncation()
        self._plain.encode_special_tokens = True
        self.engine_json = engine_json
        added = self._engine.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(token for token, entry in added.items() if entry.special)
        self.added: dict[str, int] = {entry.content: token for token, entry in added.items()}
        """All tokens outside the trained vocabulary, special or not: text -> id."""
        self.special_texts: dict[str, str] = special_texts(config)
        """`bos_token` and so on, named as in templates."""
        decoder = spec.get("decoder") or {}
        kinds = {decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", ()))}
        self.is_byte_level = kinds == {"ByteLevel"}
        """True if tokens are spelled in an alphabet of 256 letters, one per byte."""
        self.may_split_characters = "ByteLevel" in kinds
        self.falls_back_to_bytes = "ByteFallback" in kinds
        """True if tokens `<0x00>` to `<0xFF>` spell characters that the vocabulary lacks."""
        self._of_byte_letter = {letter: byte for byte, letter in enumerate(_byte_letters())}

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Load from a directory in Hugging Face layout. Raises `ModelError` with what is missing."""
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                f"{directory}: no tokenizer.json.",
                hint="Write one: transformers.AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY).",
            )
        try:
            config = read_json(directory / "special_tokens_map.json") | read_json(directory / "tokenizer_config.json")
            return cls(file.read_text(encoding="utf-8"), config, str(directory))
        except (OSError, UnicodeDecodeError) as problem:
            raise ModelError(f"{file}: can't be read: {problem}") from problem

    @property
    def vocabulary(self) -> int:
        """The largest token id plus 1. The model's logits may be wider; the extra ids should never be chosen."""
        return max(self._engine.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def is_like(self, other: Tokenizer) -> bool:
        """Return whether every token id means the same in both tokenizers."""
        mine, others = (one._engine.get_vocab(with_added_tokens=True) for one in (self, other))
        return mine == others

    def id_of(self, text: str) -> int | None:
        """Id of the token with this spelling in the vocabulary, None if there is none."""
        return self._engine.token_to_id(text)

    def encode(self, text: str, *, framed: bool = True, trusted: bool = True) -> list[int]:
        """Return token ids. `framed`: add the tokens that the model wants around a text (such as its first token); a
        rendered chat has them already. If not `trusted`, names of special tokens stay plain text."""
        engine = self._engine if trusted else self._plain
        return engine.encode(text, add_special_tokens=framed).ids

    def encode_inside(self, text: str, *, trusted: bool = True) -> list[int]:
        """Like `encode` for text in the middle of another text, where no tokenizer may put a space before it."""
        lead = self.encode("\n", framed=False)
        tokens = self.encode("\n" + text, framed=False, trusted=trusted)
        if tokens[: len(lead)] == lead:
            return tokens[len(lead) :]
        return self.encode(text, framed=False, trusted=trusted)

    def limited(self, text: str, limit: int) -> list[int]:
        """Return at most `limit` token ids: the first of the text, with the tokens around a text."""
        text = text[: self._far_end(text, limit)]
        encoding = self._engine.encode(text, add_special_tokens=False)
        encoding.truncate(max(0, limit - self._engine.num_special_tokens_to_add(False)))
        return self._engine.post_process(encoding).ids[:limit]

    def pair(self, first: str, second: str, limit: int | None = None, most: int | None = None) -> tuple[list[int], int]:
        """Return the token ids of two texts for a classifier, and the position from which on tokens have type 1 (0: no
        token has). With `limit`, both texts keep their beginnings, and the longer one loses tokens first. `most`:
        tokens that the second text keeps."""
        parts = [
            self._engine.encode(text if limit is None else text[: self._far_end(text, limit)], add_special_tokens=False)
            for text in (first, second)
        ]
        if most is not None:
            parts[1].truncate(most)
        if limit is not None:
            room = max(0, limit - self._engine.num_special_tokens_to_add(True))
            for part, length in zip(parts, shares(len(parts[0]), len(parts[1]), room), strict=True):
                part.truncate(length)
        made = self._engine.post_process(parts[0], parts[1])
        types = made.type_ids
        return made.ids, types.index(1) if 1 in types else 0

    def is_beyond(self, text: str, tokens: int) -> bool:
        """Return whether a long text certainly has far more than `tokens` tokens; false proves nothing."""
        return self._far_end(text, tokens) is not None

    def _far_end(self, text: str, tokens: int) -> int | None:
        """Return a number of characters of a long text that certainly have far more than `tokens` tokens, or None.
        Reads only as much of the text as needed, because encoding takes hundreds of bytes of memory for each
        character."""
        counted = 0
        for start in range(0, len(text) if len(text) > _SLICE_CHARACTERS else 0, _SLICE_CHARACTERS):
            counted += len(self.encode(text[start : start + _SLICE_CHARACTERS], framed=False, trusted=False))
            # The slices' borders can add a few tokens that the whole text does not have.
            if counted > _FAR * tokens + _SLICE_CHARACTERS // 16:
                return start + _SLICE_CHARACTERS
        return None

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """Text of tokens; unknown ids are skipped. `special`: include special tokens."""
        return self._engine.decode(list(tokens), skip_special_tokens=not special)

    def knows(self, token: int) -> bool:
        """Return whether the token is in the vocabulary."""
        return self._engine.id_to_token(token) is not None

    def is_byte_fallback(self, token: int) -> bool:
        """Return whether the token stands for one byte of a character that the vocabulary lacks."""
        return self.falls_back_to_bytes and _BYTE_TOKEN.fullmatch(self._engine.id_to_token(token) or "") is not None

    def token_bytes(self, token: int) -> bytes:
        """The token's bytes in the middle of a text; a special token's name; nothing for an unknown id."""
        spelled = self._engine.id_to_token(token)
        if spelled is None:
            return b""
        if self.may_split_characters:
            letters = [self._of_byte_letter.get(letter) for letter in spelled]
            # Like the library: a token with any letter outside the byte alphabet is plain text.
            return bytes(byte for byte in letters if byte is not None) if None not in letters else spelled.encode()
        byte = _BYTE_TOKEN.fullmatch(spelled) if self.falls_back_to_bytes else None
        return bytes([int(byte[1], 16)]) if byte else spelled.replace(_METASPACE, " ").encode()

    def token_text(self, token: int) -> str:
        """`token_bytes` as text, for people; an incomplete character shows as U+FFFD."""
        return self.token_bytes(token).decode(errors="replace")


def shares(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens two texts of these lengths keep of `room`: the longer one loses first, as transformers
    truncates pairs (`longest_first`)."""
    if first + second <= room:
        return first, second
    shorter, longer = sorted((first, second))
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room // 2 + room % 2
    return (longer, shorter) if first > second else (shorter, longer)


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a model; empty if the file does not exist. Raises `ModelError`."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ModelError(f"{file}: can't be read: {problem}") from problem
    if not isinstance(content, dict):
        raise ModelError(f"{file}: expected a JSON object, got {type(content).__name__}.")
    return content


def _byte_letters() -> list[str]:
    """The letter for each byte (Radford et al. 2019): the byte's own if it is printable, else one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


@dataclass(frozen=True, slots=True)
class Scanned:
    """Text that may be passed on, and the stop string that follows it, if one was found."""

    text: str
    stop: str | None = None


class StopScanner:
    """The stop string that is completed first ends the text; of two that end at the same place, the longer one. How the
    text is cut into pieces makes no difference."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._waiting = ""

    def feed(self, fresh: str) -> Scanned:
        """Scan more text."""
        text = self._waiting + fresh
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, stop = min(found)
            self._waiting = ""
            return Scanned(text[:at], stop)
        held = max((overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - held
        self._waiting = text[cut:]
        return Scanned(text[:cut])

    def rest(self) -> str:
        """End the text; returns what was held back."""
        text, self._waiting = self._waiting, ""
        return text


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


_HALF: Final = "\ufffd"
_CONTEXT_TOKENS: Final = 16
"""Number of the prompt's last tokens with which the answer's first token is decoded (chosen)."""


@dataclass(frozen=True, slots=True)
class TokenText:
    """The text that one token adds. `text` may be empty, or include text held back before. `offset`: number of the
    answer's characters before this token. `stop`: the stop string that was found; it is not in `text`, and nothing
    follows it."""

    text: str
    offset: int
    stop: str | None = None


class Decoder:
    """One per answer. `after`: the prompt, if the answer continues its text: a space between the two is then kept.
    `shown`: special tokens whose names belong to the text, such as those around a tool call."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        after: Sequence[int] = (),
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._hidden = tokenizer.special_ids - shown
        self._tokenizer = tokenizer
        context = [token for token in after[-_CONTEXT_TOKENS:] if self._speaks(token)]
        self._letters: _Letters = _Bytes(tokenizer) if tokenizer.is_byte_level else _Window(tokenizer, context)
        self._stops = StopScanner(stops)
        self._characters = 0
        self.stop: str | None = None
        """The stop string that ended the answer."""

    def add(self, token: int) -> TokenText:
        """Decode the next token. Must not be called after a stop string was found or after `finish`."""
        offset = self._characters
        fresh = self._letters.add(token) if self._speaks(token) else ""
        return self._through(fresh, offset)

    def finish(self) -> TokenText:
        """End the answer; returns the text that was held back."""
        offset = self._characters
        piece = self._through(self._letters.finish(), offset)
        return piece if piece.stop is not None else TokenText(piece.text + self._stops.rest(), offset)

    def _speaks(self, token: int) -> bool:
        return token not in self._hidden and self._tokenizer.knows(token)

    def _through(self, fresh: str, offset: int) -> TokenText:
        self._characters += len(fresh)
        found = self._stops.feed(fresh)
        self.stop = found.stop
        return TokenText(found.text, offset, found.stop)


class _Letters(Protocol):
    def add(self, token: int) -> str:
        """Return the text that is certain after this token."""
        ...

    def finish(self) -> str: ...


class _Bytes:
    """For byte-level tokenizers: a token's bytes do not depend on its neighbours."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Window:
    """For all other tokenizers: a token's text is what it adds to the text of the tokens just before it. The first
    token of a text may decode differently, so every token but the first is decoded with one before it. A run of byte
    tokens is held back until its end: if the run as a whole is not valid UTF-8, each token reads as U+FFFD."""

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._before = context
        self._waiting: list[int] = []

    def add(self, token: int) -> str:
        self._waiting.append(token)
        return "" if self._tokenizer.is_byte_fallback(token) else self._fresh(final=False)

    def finish(self) -> str:
        return self._fresh(final=True) if self._waiting else ""

    def _fresh(self, *, final: bool) -> str:
        decode = self._tokenizer.decode
        known = decode(self._before, special=True)
        text = decode(self._before + self._waiting, special=True)
        if not final and self._tokenizer.may_split_characters and text.endswith(_HALF):
            return ""
        self._before, self._waiting = self._waiting, []
        return text[len(known) :]
