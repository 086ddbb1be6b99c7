"""Reads tool calls whose name stands before the JSON of their arguments, between marks: those of DeepSeek, Kimi and
gpt-oss. Decides where a call begins and ends.

Calls of one section follow each other. Marks behind the arguments may be missing. The forms are those of the models'
chat templates and of vLLM's parsers for them (vllm/tool_parsers: deepseekv3, deepseekv31, kimi_k2; gpt-oss:
https://github.com/openai/harmony).

Neighbours: `tool_reading` finds the announcement, `tool_bodies` and `tool_tags` read the other forms, `tools` has the
forms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fusionai.serving.tool_bodies import JsonScan
from fusionai.serving.tools import CallPiece, CallState, Followed, Given, Part, ToolForm, follow, without_mark

_OBJECT: Final = re.compile(r"\s*(?=\{)")
_NAME: Final = re.compile(r"\s*(?P<name>[\w.-]+)\s*")
_NUMBERED: Final = re.compile(r"\s*(?P<id>[\w.:-]+)\s*")


@dataclass(frozen=True, slots=True)
class _Section:
    """`head`: what stands before the arguments; `tail`: marks behind them; `closer`: mark behind the last call, None:
    each call has an announcement of its own."""

    head: Sequence[Part]
    tail: Sequence[str] = ()
    closer: str | None = None


_SECTIONS: Final[Mapping[ToolForm, _Section]] = {
    ToolForm.HARMONY: _Section((_NAME, "<|message|>", _OBJECT)),
    ToolForm.DEEPSEEK_V3: _Section(
        ("<｜tool▁call▁begin｜>", re.compile(r"\w*"), "<｜tool▁sep｜>", _NAME, "```json", _OBJECT),
        ("```", "<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁end｜>",
    ),
    ToolForm.DEEPSEEK_V31: _Section(
        ("<｜tool▁call▁begin｜>", _NAME, "<｜tool▁sep｜>", _OBJECT), ("<｜tool▁call▁end｜>",), "<｜tool▁calls▁end｜>"
    ),
    ToolForm.KIMI: _Section(
        ("<|tool_call_begin|>", _NUMBERED, "<|tool_call_argument_begin|>", _OBJECT),
        ("<|tool_call_end|>",),
        "<|tool_calls_section_end|>",
    ),
}
SECTIONS: Final = frozenset(_SECTIONS)
"""The forms that are read here."""


class SectionBody:
    """Implements `tools.Body`."""

    def __init__(self, form: ToolForm) -> None:
        self._form = form
        self._section = _SECTIONS[form]
        self._scan: JsonScan | None = None
        """The arguments that are being read."""
        self._tail: list[str] = []
        """Marks that may follow next."""
        self._begun = False

    @property
    def begun(self) -> bool:
        return self._begun

    def take(self, rest: str, *, final: bool) -> Given:
        pieces: list[CallPiece] = []
        whole = 0
        while True:
            if self._scan is not None:
                taken = self._scan.object_end(rest)
                pieces.append(CallPiece(0, rest[:taken]))
                rest = rest[taken:]
                if self._scan.depth:
                    return Given(CallState.DONE if final else CallState.MORE, rest, tuple(pieces), whole)
                whole += 1
                self._scan, self._tail = None, list(self._section.tail)
            while self._tail:
                after = without_mark(rest, self._tail[0], final=final)
                if after is None:
                    return Given(CallState.MORE, rest, tuple(pieces), whole)
                rest = after
                del self._tail[0]
            if self._begun:
                closer = self._section.closer
                after = rest if closer is None else without_mark(rest, closer, final=final)
                if after is None:
                    return Given(CallState.MORE, rest, tuple(pieces), whole)
                if closer is None or after != rest:
                    return Given(CallState.DONE, after, tuple(pieces), whole)
            bare = rest.lstrip()
            head = follow(self._section.head, bare, final=final)
            if isinstance(head, CallState):
                outcome = CallState.DONE if self._begun and head is CallState.TEXT else head
                return Given(outcome, rest, tuple(pieces), whole)
            rest = bare[head.length :]
            pieces.append(self._begin(head))

    def _begin(self, head: Followed) -> CallPiece:
        self._begun, self._scan = True, JsonScan()
        written_id = head.groups.get("id")
        name = (written_id or head.groups["name"]).removeprefix("functions.")
        return CallPiece(0, "", written_id or self._form.new_id(), name.rpartition(":")[0] or name)
