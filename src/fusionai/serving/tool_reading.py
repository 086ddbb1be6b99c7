"""Finds tool calls in a model's answer while it streams. Decides what is a call and what is text; no text is lost.

A call is passed on piece by piece as soon as its name is known and its arguments have begun. Neighbours: `tools` has
the forms, `tool_bodies` and `tool_tags` read what follows an announcement, the gateway builds its answers from the
result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusionai.serving.text import overlap
from fusionai.serving.tool_bodies import SECTIONS, JsonBody, SectionBody
from fusionai.serving.tool_tags import TAG_FORMS, TagBody
from fusionai.serving.tools import Body, CallPiece, CallState, Given, ToolDefinition, ToolForm


@dataclass(frozen=True, slots=True)
class Read:
    """Result of reading some text: plain text, followed by pieces of calls."""

    text: str = ""
    pieces: tuple[CallPiece, ...] = ()


class ToolReader:
    """One per answer. Text is passed on as it comes; text that may be a call is held back until that is certain."""

    def __init__(self, form: ToolForm, tools: Sequence[ToolDefinition] = ()) -> None:
        """`tools`: the tools offered to the model; their schemas give the types of arguments where a form has none."""
        self._form = form
        self._tools = {tool.name: tool for tool in tools}
        self._openers = form.openers
        self._waiting = ""
        self._body: Body | None = None
        self._may_begin = True
        """Llama calls tools at the very start of its answer or not at all."""
        self._in_gap = False
        self.calls = 0
        """Number of calls that have begun."""
        self.whole = 0
        """Number of calls that are complete."""

    def feed(self, fresh: str) -> Read:
        """Read more of the answer."""
        return self._read(self._waiting + fresh, final=False)

    def finish(self) -> Read:
        """End the answer: text that was held back becomes a call or plain text."""
        return self._read(self._waiting, final=True)

    def _read(self, rest: str, *, final: bool) -> Read:
        text: list[str] = []
        pieces: list[CallPiece] = []
        self._waiting = ""
        while True:
            if self._body is None:
                before, announced = self._until_call(rest, final=final)
                text.append(self._without_gap(before))
                rest = rest[len(before) :]
                if announced is None:
                    self._waiting = rest
                    break
                body, after = self._new_body(), rest[announced:]
                given = body.take(after, final=final)
                if given.outcome is CallState.TEXT or (given.outcome is CallState.MORE and not body.begun):
                    if given.outcome is CallState.MORE:
                        self._waiting = rest
                        break
                    self._may_begin = False
                    cut = max(announced, 1)
                    text.append(self._without_gap(rest[:cut]))
                    rest = rest[cut:]
                    continue
                self._body = body
            else:
                given = self._body.take(rest, final=final)
            pieces += self._counted(given)
            rest = given.rest
            if given.outcome is CallState.MORE:
                self._waiting = rest
                break
            self._body, self._in_gap = None, True
        return Read("".join(text), tuple(pieces))

    def _new_body(self) -> Body:
        if self._form in TAG_FORMS:
            return TagBody(self._form, self._tools)
        if self._form in SECTIONS:
            return SectionBody(self._form)
        return JsonBody(self._form)

    def _counted(self, given: Given) -> list[CallPiece]:
        """Replace the body's call indices by those of the whole answer."""
        pieces: list[CallPiece] = []
        for piece in given.pieces:
            self.calls += piece.name is not None
            pieces.append(CallPiece(self.calls - 1, piece.arguments, piece.call_id, piece.name))
        self.whole += given.whole
        return pieces

    def _without_gap(self, text: str) -> str:
        """Remove whitespace between calls and after the last one; it is not part of the text."""
        if self._in_gap:
            text = text.lstrip()
            self._in_gap = not text
        return text

    def _until_call(self, rest: str, *, final: bool) -> tuple[str, int | None]:
        """Return the text before a possible call, and the number of characters after it that announce the call; None:
        no call yet, and the rest of the text is held back."""
        if self._form is not ToolForm.LLAMA:
            found = [(at, opener) for opener in self._openers if (at := rest.find(opener)) >= 0]
            if found:
                at, opener = min(found)
                return rest[:at], len(opener) if opener == self._openers[0] else 0
            held = 0 if final else max(overlap(rest, opener) for opener in self._openers)
            return rest[: len(rest) - held], None
        begun = rest.lstrip()
        if self._may_begin and self.calls:
            begun = begun.removeprefix(";").lstrip() if begun.startswith(";") or not begun else "no call"
        opener = self._openers[0]
        if self._may_begin and not final and opener.startswith(begun):
            return "", None
        if self._may_begin and begun.startswith(opener):
            return "", len(rest) - len(begun) + len(opener)
        if self._may_begin and begun.startswith("{"):
            return "", len(rest) - len(begun)
        self._may_begin = self._may_begin and not rest
        return rest, None
