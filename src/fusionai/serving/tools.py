"""Tool calls: which form a model writes them in, and reading them out of its answer as it comes. Decides what is a call
and what is mere text; nothing of an answer is ever lost.

The form is told by the model's chat template. Neighbours: `templates` gives tools to the model, `tool_grammar` makes
it call one, the gateway sends what is found here.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from fusionai.serving.stops import overlap

_DECODER: Final = json.JSONDecoder()
_CALL_KEYS: Final = ("name", "parameters", "arguments", "type", "function", "id")
_LONGEST_LITERAL: Final = len("-Infinity")
_MISTRAL_ID: Final = 9
"""Mistral's templates take ids of exactly so many letters and digits."""
_ALPHABET: Final = string.ascii_letters + string.digits


class ToolForm(Enum):
    """How a model calls tools; the value is what announces a call. `HERMES`: `<tool_call>{"name", "arguments"}
    </tool_call>` (Qwen and many more). `LLAMA`: the answer is `{"name", "parameters"}`, several parted by `;`.
    `MISTRAL`: `[TOOL_CALLS]` and a list of `{"name", "arguments"}`. `MISTRAL_ARGS`: `[TOOL_CALLS]name[ARGS]{...}`."""

    HERMES = "<tool_call>"
    LLAMA = "<|python_tag|>"
    MISTRAL = "[TOOL_CALLS]"
    MISTRAL_ARGS = "[TOOL_CALLS][ARGS]"

    @property
    def marks(self) -> tuple[str, ...]:
        """Tokens whose names have to stay in the text for the calls to be found."""
        match self:
            case ToolForm.HERMES:
                return ("<tool_call>", "</tool_call>")
            case ToolForm.LLAMA:
                return ("<|python_tag|>",)
            case ToolForm.MISTRAL:
                return ("[TOOL_CALLS]",)
            case ToolForm.MISTRAL_ARGS:
                return ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")


def tool_form(template: str) -> ToolForm | None:
    """Of a chat template's text; None where it has no place for tools or writes calls in a form not known here."""
    if not re.search(r"\btools\b", template):
        return None
    if "[TOOL_CALLS]" in template:
        return ToolForm.MISTRAL_ARGS if "[ARGS]" in template else ToolForm.MISTRAL
    # `<function=` is the same mark around another form, XML.
    if "<tool_call>" in template and "<function=" not in template:
        return ToolForm.HERMES
    if "<|python_tag|>" in template or re.search(r'"parameters\\?"', template):
        return ToolForm.LLAMA
    return None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments`: JSON text of an object."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Read:
    """What some text turned out to be: text first, then calls."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


class ToolReader:
    """One per answer. Text is given out as it comes, except what may be a call: that waits until it is one or not."""

    def __init__(self, form: ToolForm) -> None:
        self._form = form
        self._opener = form.marks[0]
        self._waiting = ""
        self._may_begin = True
        """Llama calls at the very start of its answer or not at all."""
        self._in_gap = False
        self.calls = 0
        """How many were found."""

    def feed(self, fresh: str) -> Read:
        """More of the answer."""
        return self._read(self._waiting + fresh, final=False)

    def finish(self) -> Read:
        """No more comes: what waited is a call by now, or text."""
        return self._read(self._waiting, final=True)

    def _read(self, rest: str, *, final: bool) -> Read:
        text: list[str] = []
        calls: list[ToolCall] = []
        while True:
            before, announced = self._until_call(rest, final=final)
            text.append(self._without_gap(before))
            rest = rest[len(before) :]
            if announced is None:
                self._waiting = rest
                return Read("".join(text), tuple(calls))
            found = self._body(rest[announced:], final=final)
            match found:
                case _Found():
                    calls.extend(found.calls)
                    self.calls += len(found.calls)
                    self._in_gap = True
                    rest = found.rest
                case _Verdict.MORE:
                    self._waiting = rest
                    return Read("".join(text), tuple(calls))
                case _Verdict.TEXT:
                    self._may_begin = False
                    cut = max(announced, 1)
                    text.append(self._without_gap(rest[:cut]))
                    rest = rest[cut:]

    def _without_gap(self, text: str) -> str:
        """Space between calls, and after the last, is no text."""
        if self._in_gap:
            text = text.lstrip()
            self._in_gap = not text
        return text

    def _until_call(self, rest: str, *, final: bool) -> tuple[str, int | None]:
        """Text before a call may begin, and how many characters after it announce the call; None: no call yet, and
        what is not that text waits."""
        if self._form is not ToolForm.LLAMA:
            at = rest.find(self._opener)
            if at >= 0:
                return rest[:at], len(self._opener)
            return rest[: len(rest) - (0 if final else overlap(rest, self._opener))], None
        begun = rest.lstrip()
        if self._may_begin and self.calls:
            begun = begun.removeprefix(";").lstrip() if begun.startswith(";") or not begun else "no call"
        if self._may_begin and not final and (self._opener.startswith(begun)):
            return "", None
        if self._may_begin and begun.startswith(self._opener):
            return "", len(rest) - len(begun) + len(self._opener)
        if self._may_begin and begun.startswith("{"):
            return "", len(rest) - len(begun)
        self._may_begin = self._may_begin and not rest
        return rest, None

    def _body(self, text: str, *, final: bool) -> _Found | _Verdict:
        match self._form:
            case ToolForm.HERMES:
                return _hermes(text, final=final)
            case ToolForm.LLAMA:
                return _llama(text, final=final)
            case ToolForm.MISTRAL:
                return _mistral(text, final=final)
            case ToolForm.MISTRAL_ARGS:
                return _mistral_args(text, final=final)


class _Verdict(Enum):
    """Of a text that may be a call: it can't be told yet, or it is none."""

    MORE = "more"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class _Found:
    calls: tuple[ToolCall, ...]
    rest: str


def _hermes(text: str, *, final: bool) -> _Found | _Verdict:
    parsed = _value(text, final=final)
    if isinstance(parsed, _Verdict):
        return parsed
    call = _call(parsed.value, "call_")
    if call is None:
        return _Verdict.TEXT
    rest = parsed.rest.lstrip()
    closer = ToolForm.HERMES.marks[1]
    if rest.startswith(closer):
        return _Found((call,), rest[len(closer) :])
    if closer.startswith(rest) and not final:
        return _Verdict.MORE
    # A model may stop without closing; anything else in there is no call.
    return _Found((call,), "") if closer.startswith(rest) else _Verdict.TEXT


def _llama(text: str, *, final: bool) -> _Found | _Verdict:
    if not final and not text.strip():
        return _Verdict.MORE
    if not _may_name_a_tool(text):
        return _Verdict.TEXT
    parsed = _value(text, final=final)
    if isinstance(parsed, _Verdict):
        return parsed
    call = _call(parsed.value, "call_")
    return _Verdict.TEXT if call is None else _Found((call,), parsed.rest)


def _mistral(text: str, *, final: bool) -> _Found | _Verdict:
    parsed = _value(text, final=final)
    if isinstance(parsed, _Verdict):
        return parsed
    values = parsed.value if isinstance(parsed.value, list) else [parsed.value]
    calls = [_call(value, "") for value in values]
    known = tuple(call for call in calls if call is not None)
    return _Found(known, parsed.rest) if known and len(known) == len(calls) else _Verdict.TEXT


def _mistral_args(text: str, *, final: bool) -> _Found | _Verdict:
    head = re.match(r"\s*([\w.-]+)(?:\[CALL_ID\](\w+))?\[ARGS\]", text)
    if head is None:
        begun = re.fullmatch(r"\s*[\w.-]*(\[[A-Z_]*(\]\w*(\[[A-Z]*)?)?)?", text)
        return _Verdict.MORE if begun and not final else _Verdict.TEXT
    parsed = _value(text[head.end() :], final=final)
    if isinstance(parsed, _Verdict):
        return parsed
    call = _call({"name": head[1], "arguments": parsed.value, "id": head[2]}, "")
    return _Verdict.TEXT if call is None else _Found((call,), parsed.rest)


def _may_name_a_tool(text: str) -> bool:
    """Whether this beginning of an object may go on as a call: an answer in JSON should not have to wait."""
    begun = re.match(r'\s*\{\s*(?:"([^"]*)("?))?', text)
    if begun is None or begun[1] is None:
        return begun is not None and text[begun.end() :].strip() == ""
    if begun[2]:
        return begun[1] in _CALL_KEYS
    return any(name.startswith(begun[1]) for name in _CALL_KEYS)


@dataclass(frozen=True, slots=True)
class _Parsed:
    value: Any
    rest: str


def _value(text: str, *, final: bool) -> _Parsed | _Verdict:
    """The JSON value that `text` begins with."""
    begun = text.lstrip()
    try:
        value, end = _DECODER.raw_decode(begun)
    except json.JSONDecodeError as problem:
        # Where the text ends too early, that is said of its last few characters, or of the string that they are in.
        unfinished = problem.msg.startswith("Unterminated") or problem.pos >= len(begun) - _LONGEST_LITERAL
        return _Verdict.MORE if unfinished and not final else _Verdict.TEXT
    except RecursionError:
        return _Verdict.TEXT
    return _Parsed(value, begun[end:])


def _call(value: Any, prefix: str) -> ToolCall | None:
    """From what a model wrote; models differ in what they call the arguments."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = {**value["function"], "id": value.get("id")}
    name, arguments, call_id = value.get("name"), value.get("arguments", value.get("parameters", {})), value.get("id")
    if isinstance(arguments, str):
        parsed = _value(arguments, final=True)
        arguments = parsed.value if isinstance(parsed, _Parsed) else None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    made = prefix + "".join(secrets.choice(_ALPHABET) for _ in range(24 if prefix else _MISTRAL_ID))
    return ToolCall(call_id if isinstance(call_id, str) and call_id else made, name, json.dumps(arguments))


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as clients send them, as templates read them: the arguments of earlier calls as objects, not as JSON
    text; content that came in parts as one text; none as an empty one."""
    return [_for_template(message) for message in messages]


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    changed = dict(message)
    content = changed.get("content")
    if content is None:
        changed["content"] = ""
    elif isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        changed["content"] = "\n".join(str(part["text"]) for part in content)
    if isinstance(changed.get("tool_calls"), list):
        changed["tool_calls"] = [_with_object(call) for call in changed["tool_calls"]]
        if not changed["tool_calls"]:
            del changed["tool_calls"]
    return changed


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    parsed = _value(function["arguments"] or "{}", final=True)
    if isinstance(parsed, _Verdict):
        return call
    return {**call, "function": {**function, "arguments": parsed.value}}
