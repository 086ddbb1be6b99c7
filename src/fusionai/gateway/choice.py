"""Builds one answer from a stream of tokens: text, tool calls, log-probabilities, reason of its end.

Neighbours: `generating` runs several at the same time, `chat` and `completions` serialise the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fusionai.gateway.answers import FinishWord
from fusionai.serving.decoding import Decoder, Piece
from fusionai.serving.interface import Emitted, Generation, TokenLogprob
from fusionai.serving.tool_reading import Read, ToolReader
from fusionai.serving.tools import CallPiece


@dataclass(frozen=True, slots=True)
class Said:
    """A token's log-probabilities, and the number of the answer's characters before it."""

    logprob: TokenLogprob
    offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New content of answer `index`."""

    index: int
    text: str = ""
    calls: tuple[CallPiece, ...] = ()
    said: tuple[Said, ...] = ()
    finish: FinishWord | None = None

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to send to the client."""
        return not (self.text or self.calls or self.said or self.finish)


@dataclass(slots=True)
class Choice:
    """`prompt`: index among the request's prompts; `keeps`: number of tokens to pass on (fewer than generated if none
    is wanted); `one_call`: the answer ends after the first tool call."""

    index: int
    prompt: int
    generation: Generation
    decoder: Decoder
    tools: ToolReader | None = None
    one_call: bool = False
    keeps: int | None = None
    tokens: int = 0
    is_over: bool = False

    def token(self, emitted: Emitted) -> Delta:
        """Process the next token."""
        self.tokens += 1
        if self.keeps is not None and self.tokens > self.keeps:
            self.tokens = self.keeps
            return Delta(self.index)
        piece = self.decoder.add(emitted.token)
        said = (Said(emitted.logprob, piece.offset),) if emitted.logprob is not None else ()
        return self._delta(piece, said, "stop" if piece.stop is not None else None)

    def end(self, reason: Literal["stop", "length"]) -> Delta:
        """End the answer; returns text that was held back."""
        return self._delta(self.decoder.finish(), (), reason)

    def _delta(self, piece: Piece, said: tuple[Said, ...], finish: Literal["stop", "length"] | None) -> Delta:
        if self.tools is None:
            self.is_over = finish is not None
            return Delta(self.index, piece.text, (), said, finish)
        read = self.tools.feed(piece.text)
        if finish is not None:
            rest = self.tools.finish()
            read = Read(read.text + rest.text, read.pieces + rest.pieces)
        pieces = read.pieces
        if self.one_call:
            pieces = tuple(piece for piece in pieces if piece.index == 0)
            finish = "stop" if self.tools.whole else finish
        self.is_over = finish is not None
        called = self.tools.calls and finish == "stop"
        return Delta(self.index, read.text, pieces, said, "tool_calls" if called else finish)
