"""Separates a model's thinking from its answer while the answer streams. Decides what is thinking; no text is lost.

A model that thinks writes its thinking between marks before its answer, and its chat template shows which marks. Some
templates write the opening mark themselves, so that the answer begins within the thinking.

Neighbours: `tool_reading` finds calls in the text that is left, `model_text` chooses the form and keeps the marks in
the decoded text, the gateway sends the two apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

from fusionai.corpus.templates import ChatTemplate
from fusionai.primitives.errors import UsageError
from fusionai.serving.text import StopScanner, overlap


class ReasoningForm(Enum):
    """How a model writes its thinking; the enum value is the marks around it.

    `THINK`: Qwen3, DeepSeek-R1 and V3.1, GLM, MiniMax M2, Kimi K2 Thinking and most others.
    `SEED`: ByteDance's Seed-OSS. `MISTRAL`: Mistral's Magistral. `GEMMA`: Google's Gemma 4. `COHERE`: Command A.
    `HARMONY`: gpt-oss, whose answer is a sequence of messages, each in a channel: `analysis` is thinking.
    """

    THINK = ("<think>", "</think>")
    SEED = ("<seed:think>", "</seed:think>")
    MISTRAL = ("[THINK]", "[/THINK]")
    GEMMA = ("<|channel>thought", "<channel|>")
    COHERE = ("<|START_THINKING|>", "<|END_THINKING|>")
    HARMONY = ("<|channel|>", "<|end|>")

    @property
    def marks(self) -> tuple[str, ...]:
        """Tokens whose names must stay in the decoded text, so that thinking can be found."""
        match self:
            case ReasoningForm.HARMONY:
                return ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
            case ReasoningForm.GEMMA:
                return ("<|channel>", "<channel|>")
            case _:
                return self.value


def reasoning_form(template: str) -> ReasoningForm | None:
    """The form in a chat template's text; None if the template has no marks of thinking."""
    if "<|channel|>" in template and "<|message|>" in template:
        return ReasoningForm.HARMONY
    # Some templates only have the closing mark, to remove earlier thinking.
    tagged = (form for form in ReasoningForm if form is not ReasoningForm.HARMONY)
    return next((form for form in tagged if form.value[0] in template or form.value[1] in template), None)


THINKING_SWITCHES: Final = ("enable_thinking", "thinking")
"""Variables with which templates turn thinking on and off."""
_LEVELS: Final = ("low", "medium", "high")
"""Levels of `reasoning_effort` that every template with this variable is taken to know."""


def effort_variables(template: ChatTemplate, effort: str) -> dict[str, Any]:
    """Variables for the template that set how much the model thinks: the level `effort`, "none" for not at all. A
    template that can only turn thinking on and off gets on for every other level. Raises `UsageError` if the template
    can't do what is asked."""
    has_level = "reasoning_effort" in template.reads
    levels = [*_LEVELS, *(one for one in ("none", "minimal", "xhigh", "max") if _is_quoted(one, template.source))]
    variables: dict[str, Any] = {name: effort != "none" for name in THINKING_SWITCHES if name in template.reads}
    if has_level and effort in levels:
        variables["reasoning_effort"] = effort
    elif has_level and effort != "none":
        raise UsageError(f"this model's chat template knows the levels {', '.join(levels)}, not {effort!r}.")
    if not variables and effort == "none" and reasoning_form(template.source) is not None:
        raise UsageError("this model's chat template can't turn thinking off.")
    if not variables and effort != "none":
        raise UsageError("this model's chat template has no setting for how much the model thinks.")
    return variables


def with_one_analysis(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """An earlier answer for the template of gpt-oss, which refuses thinking and text together beside a tool call: it
    writes either of them as the message in `analysis` before the call. The text becomes the end of the thinking."""
    reasoning, content = message.get("reasoning_content"), message.get("content")
    if not (message.get("tool_calls") and reasoning and content):
        return message
    return {**message, "reasoning_content": f"{reasoning}\n\n{content}", "content": ""}


def _is_quoted(word: str, source: str) -> bool:
    return f"'{word}'" in source or f'"{word}"' in source


@dataclass(frozen=True, slots=True)
class Separated:
    """Result of reading some text. `stop`: the stop string that ends the answer; it is not in `text`."""

    reasoning: str = ""
    text: str = ""
    stop: str | None = None


class ReasoningReader:
    """One per answer. Stop strings are searched in the text of the answer only, not in the thinking."""

    def __init__(self, form: ReasoningForm, *, is_opened: bool = False, stops: Sequence[str] = ()) -> None:
        """`is_opened`: the prompt ends with the opening mark."""
        self._split: _Split = _Channels() if form is ReasoningForm.HARMONY else _Tags(form, is_opened=is_opened)
        self._stops = StopScanner(stops)
        self._waiting = ""

    @property
    def is_thinking(self) -> bool:
        """True while the text that follows belongs to the thinking."""
        return self._split.is_thinking

    def feed(self, fresh: str, *, final: bool = False) -> Separated:
        """Read more of the answer. If `final`, the answer ends here, and text that was held back is returned too."""
        reasoning: list[str] = []
        text: list[str] = []
        self._waiting = self._split.read(self._waiting + fresh, reasoning, text, final=final)
        found = self._stops.feed("".join(text))
        rest = self._stops.rest() if final and found.stop is None else ""
        return Separated("".join(reasoning), found.text + rest, found.stop)


class _Split(Protocol):
    @property
    def is_thinking(self) -> bool: ...

    def read(self, rest: str, reasoning: list[str], text: list[str], *, final: bool) -> str:
        """Append what is certain of `rest` to `reasoning` or `text`. Return the text that must be passed again, before
        the text that follows; nothing if `final`."""
        ...


class _Place(Enum):
    """Place in the answer: before the opening mark, behind it without any thinking yet, in the thinking, behind it
    without any answer yet, in the answer."""

    BEFORE = "before"
    OPENED = "opened"
    INSIDE = "inside"
    CLOSED = "closed"
    ANSWER = "answer"


class _Tags:
    """Thinking between two marks at the start of the answer. Whitespace next to the marks belongs to neither part."""

    def __init__(self, form: ReasoningForm, *, is_opened: bool) -> None:
        self._opener, self._closer = form.value
        self._is_opened = is_opened
        self._place = _Place.BEFORE

    @property
    def is_thinking(self) -> bool:
        is_before = self._place is _Place.BEFORE
        return self._is_opened if is_before else self._place in (_Place.OPENED, _Place.INSIDE)

    def read(self, rest: str, reasoning: list[str], text: list[str], *, final: bool) -> str:
        if self._place is _Place.BEFORE:
            bare = rest.lstrip()
            if bare.startswith(self._opener):
                # A model may repeat the mark that the prompt ends with.
                self._place, rest = _Place.OPENED, bare[len(self._opener) :]
            elif not final and self._opener.startswith(bare):
                return rest
            else:
                self._place = _Place.OPENED if self._is_opened else _Place.ANSWER
        if self._place is _Place.OPENED:
            rest = rest.lstrip()
            self._place = _Place.INSIDE if rest else _Place.OPENED
        if self._place is _Place.INSIDE:
            end = rest.find(self._closer)
            if end < 0:
                known = rest if final else rest[: len(rest) - overlap(rest, self._closer)].rstrip()
                reasoning.append(known)
                return rest[len(known) :]
            reasoning.append(rest[:end].rstrip())
            self._place, rest = _Place.CLOSED, rest[end + len(self._closer) :]
        if self._place is _Place.CLOSED:
            rest = rest.lstrip()
            self._place = _Place.ANSWER if rest else _Place.CLOSED
        if self._place is _Place.ANSWER:
            text.append(rest)
        return ""


_RECIPIENT: Final = r"to=(?P<{}>[^\s<]+)\s*"
_HEADER: Final = re.compile(
    rf"\s*(?:<\|start\|>)?(?:assistant)?\s*(?:{_RECIPIENT.format('before')})?"
    rf"<\|channel\|>(?P<channel>\w+)\s*(?:{_RECIPIENT.format('behind')})?[^<\n]*(?:<\|constrain\|>[^<\n]*)?<\|message\|>"
)
"""What stands before a message's text: its channel, and the recipient of a call on either side of it."""
_LONGEST_HEADER: Final = 512
"""Number of characters beyond which an unfinished header at the end of an answer is text (chosen; names have 128 at
most)."""
_ENDS: Final = ("<|end|>", "<|start|>", "<|channel|>")
"""What ends a message's text. The tokens `<|call|>` and `<|return|>` end the whole answer."""


class _Kind(Enum):
    """What a message is: thinking, text for the user, or a call, which `tool_reading` reads."""

    THINKING = "thinking"
    TEXT = "text"
    CALL = "call"


class _Channels:
    """Messages of the form Harmony (https://github.com/openai/harmony). A call is passed on as text, with the header
    `<|channel|>commentary to=NAME<|message|>`. Empty lines separate messages of one kind."""

    def __init__(self) -> None:
        self._kind: _Kind | None = None
        """Kind of the message that is being read; None: its header is not complete."""
        self._is_fresh = False
        """Nothing of the message was passed on."""
        self._written: set[_Kind] = set()

    @property
    def is_thinking(self) -> bool:
        return self._kind is _Kind.THINKING

    def read(self, rest: str, reasoning: list[str], text: list[str], *, final: bool) -> str:
        while True:
            if self._kind is None:
                # An end without a message says nothing.
                while rest.lstrip().startswith(_ENDS[0]):
                    rest = rest.lstrip().removeprefix(_ENDS[0])
                header = _HEADER.match(rest)
                if header is None and _may_be_header(rest):
                    # In an answer that is cut off here, a header without its message is dropped.
                    if final and (len(rest) > _LONGEST_HEADER or not any(mark in rest for mark in _ENDS)):
                        text.append(rest)
                    return "" if final else rest
                self._begin(header, text)
                if header is not None:
                    rest = rest[header.end() :]
                elif rest.startswith(_ENDS):
                    # A mark out of place is text.
                    text.append(rest[0])
                    rest = rest[1:]
            found = [at for mark in _ENDS if (at := rest.find(mark)) >= 0]
            end = min(found, default=len(rest) if final else len(rest) - max(overlap(rest, mark) for mark in _ENDS))
            self._pass(rest[:end], reasoning if self._kind is _Kind.THINKING else text)
            rest = rest[end:]
            if not found:
                return rest
            self._kind, rest = None, rest.removeprefix(_ENDS[0])

    def _begin(self, header: re.Match[str] | None, text: list[str]) -> None:
        self._is_fresh = True
        recipient = (header["before"] or header["behind"]) if header is not None else None
        if recipient is not None:
            self._kind, self._is_fresh = _Kind.CALL, False
            text.append(f"<|channel|>commentary to={recipient}<|message|>")
        else:
            self._kind = _Kind.THINKING if header is not None and header["channel"] == "analysis" else _Kind.TEXT

    def _pass(self, fresh: str, target: list[str]) -> None:
        if fresh and self._kind is not None:
            separate = self._is_fresh and self._kind in self._written
            target.append(f"\n\n{fresh}" if separate else fresh)
            self._written.add(self._kind)
            self._is_fresh = False


def _may_be_header(text: str) -> bool:
    """Return whether this text can be the start of a message's header."""
    bare = text.lstrip()
    if _ENDS[0].startswith(bare):
        return True
    for mark in ("<|start|>", "assistant"):
        if mark.startswith(bare):
            return True
        bare = bare.removeprefix(mark)
    bare = bare.lstrip()
    recipient = re.match(r"to=[^\s<]*\s*", bare)
    bare = bare[recipient.end() :] if recipient is not None else bare
    if "to=".startswith(bare) or "<|channel|>".startswith(bare):
        return True
    behind = bare.removeprefix("<|channel|>")
    return behind != bare and not any(mark in behind for mark in ("\n", *_ENDS))
