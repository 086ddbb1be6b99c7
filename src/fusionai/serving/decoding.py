"""Incremental detokenization: tokens come one by one, text goes out in pieces.

A piece never contains half a character, text that a later token may change, or the possible start of a stop string. All
pieces together equal the decoding of all tokens at once. Neighbours: `text` has the tokenizer, the gateway sends
the pieces.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from fusionai.serving.text import Tokenizer


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
