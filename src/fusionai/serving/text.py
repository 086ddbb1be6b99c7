"""A served model's tokenizer: text to token ids and back, and which tokens are special.

Decides how the names of special tokens in a text are read: as those tokens in a rendered chat, as plain text if the
text's author is not trusted. Uses the `tokenizers` library alone. Neighbours: `decoding` turns a stream of tokens into
text, `templates` renders chats, `model_text` reads a model's other files, `corpus.tokens` is for training.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

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

    def is_beyond(self, text: str, tokens: int) -> bool:
        """Return whether a long text certainly has far more than `tokens` tokens; false proves nothing. Reads only as
        much of the text as needed, because encoding takes hundreds of bytes of memory for each character."""
        counted = 0
        for start in range(0, len(text) if len(text) > _SLICE_CHARACTERS else 0, _SLICE_CHARACTERS):
            counted += len(self.encode(text[start : start + _SLICE_CHARACTERS], framed=False, trusted=False))
            # The slices' borders can add a few tokens that the whole text does not have.
            if counted > _FAR * tokens + _SLICE_CHARACTERS // 16:
                return True
        return False

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
