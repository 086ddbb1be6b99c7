"""The answer of the Responses API: output items, and the events of a stream that builds them.

An answer is a row of items: reasoning, messages and function calls, each of which is complete before the next begins.
`ResponseForm` is how `context` sends such an answer; `response_bodies` has the items, `responses` the endpoint.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from msgspec import UNSET, UnsetType, structs

from fusionai.gateway.answers import TokenLogprobs, Usage
from fusionai.gateway.chat import token_logprobs
from fusionai.gateway.context import Heading
from fusionai.gateway.errors import ApiError
from fusionai.gateway.generation import AnswerLogprob, AnswerUpdate, ApiGeneration, Delta
from fusionai.gateway.response_bodies import (
    IncompleteDetails,
    InputDetails,
    OutputCall,
    OutputDetails,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
)
from fusionai.gateway.response_input import sealed
from fusionai.gateway.response_requests import ItemStatus, ReasoningText
from fusionai.gateway.streaming import EventForm, comment, event
from fusionai.serving.interface import GenerationPaused
from fusionai.serving.text import Tokenizer
from fusionai.serving.tools import CallPiece

Event = tuple[str, dict[str, Any]]
"""An event's type without `response.`, and its fields, without the number."""


def new_id(prefix: str) -> str:
    """Make an id of a response or an item."""
    return f"{prefix}_{secrets.token_hex(16)}"


class _OpenText:
    """The text of an item that is not complete: of a message, or reasoning."""

    def __init__(self, place: int, kind: Literal["output_text", "reasoning_text"], *, with_logprobs: bool) -> None:
        self._id = new_id("msg" if kind == "output_text" else "rs")
        self._place = place
        self._kind: Literal["output_text", "reasoning_text"] = kind
        self._with_logprobs = with_logprobs and kind == "output_text"
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []

    @property
    def is_message(self) -> bool:
        return self._kind == "output_text"

    def begin(self) -> Iterator[Event]:
        yield "output_item.added", {"output_index": self._place, "item": self._item("in_progress", [])}
        yield "content_part.added", {**self._where, "part": self._part("")}

    def add(self, text: str, logprobs: list[TokenLogprobs]) -> Iterator[Event]:
        self._text.append(text)
        self._logprobs += logprobs
        more = {"logprobs": logprobs} if self.is_message else {}
        yield f"{self._kind}.delta", {**self._where, "delta": text, **more}

    def end(self, status: ItemStatus, *, is_sealed: bool = False) -> Iterator[Event]:
        text = "".join(self._text)
        more = {"logprobs": self._logprobs} if self.is_message else {}
        yield f"{self._kind}.done", {**self._where, "text": text, **more}
        yield "content_part.done", {**self._where, "part": self._part(text)}
        item = self._item(status, [self._part(text)])
        if is_sealed and isinstance(item, OutputReasoning):
            item = structs.replace(item, encrypted_content=sealed(text))
        yield "output_item.done", {"output_index": self._place, "item": item}

    @property
    def _where(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": self._place, "content_index": 0}

    def _part(self, text: str) -> OutputText | ReasoningText:
        if not self.is_message:
            return ReasoningText(text)
        return OutputText(text, logprobs=list(self._logprobs) if self._with_logprobs else UNSET)

    def _item(self, status: ItemStatus, parts: list[Any]) -> OutputMessage | OutputReasoning:
        return (OutputMessage if self.is_message else OutputReasoning)(self._id, status, parts)


class _OpenCall:
    """A function call that is not complete."""

    def __init__(self, place: int, piece: CallPiece) -> None:
        self._id = new_id("fc")
        self._place = place
        self._call_id = piece.call_id or new_id("call")
        self._name = piece.name or ""
        self._arguments: list[str] = []

    def begin(self) -> Iterator[Event]:
        yield "output_item.added", {"output_index": self._place, "item": self._item("in_progress")}

    def add(self, arguments: str) -> Iterator[Event]:
        if arguments:
            self._arguments.append(arguments)
            yield "function_call_arguments.delta", {**self._where, "delta": arguments}

    def end(self, status: ItemStatus) -> Iterator[Event]:
        yield "function_call_arguments.done", {**self._where, "arguments": "".join(self._arguments)}
        yield "output_item.done", {"output_index": self._place, "item": self._item(status)}

    @property
    def _where(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": self._place}

    def _item(self, status: ItemStatus) -> OutputCall:
        return OutputCall(self._id, status, self._call_id, self._name, "".join(self._arguments))


class ResponseOutput:
    """Builds the output items of one answer. Every method returns the events of what it did."""

    def __init__(self, tokenizer: Tokenizer, *, with_logprobs: bool, with_sealed: bool) -> None:
        """`with_sealed`: reasoning items have `encrypted_content` too."""
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._with_sealed = with_sealed
        self._open: _OpenText | _OpenCall | None = None
        self._blank = ""
        self._blank_logprobs: list[AnswerLogprob] = []
        self.items: list[OutputItem] = []
        """Complete items."""

    def add(self, delta: Delta) -> list[Event]:
        """Add new content of the answer."""
        events: list[Event] = []
        if delta.reasoning:
            events += self._add_text("reasoning_text", delta.reasoning, ())
        if delta.text or delta.logprobs:
            events += self._add_said(delta.text, delta.logprobs)
        for piece in delta.calls:
            if piece.name is not None or not isinstance(self._open, _OpenCall):
                events += self._begin(_OpenCall(len(self.items) + (self._open is not None), piece))
            assert isinstance(self._open, _OpenCall)
            events += self._open.add(piece.arguments)
        return events

    def end(self, status: ItemStatus) -> list[Event]:
        """End the answer with the last item in this state. An answer without any item gets an empty message."""
        events: list[Event] = []
        if self._open is None and not self.items:
            events += self._add_text("output_text", self._blank, self._blank_logprobs)
        return events + self._close(status)

    def _add_said(self, text: str, logprobs: Sequence[AnswerLogprob]) -> list[Event]:
        """Add text of a message. Blanks alone begin no message, because models put them between other items."""
        text, logprobs = self._blank + text, [*self._blank_logprobs, *logprobs]
        self._blank, self._blank_logprobs = "", []
        is_message = isinstance(self._open, _OpenText) and self._open.is_message
        if not is_message and not text.strip():
            self._blank, self._blank_logprobs = text, logprobs
            return []
        return self._add_text("output_text", text, logprobs)

    def _add_text(
        self, kind: Literal["output_text", "reasoning_text"], text: str, logprobs: Sequence[AnswerLogprob]
    ) -> list[Event]:
        events: list[Event] = []
        is_message = kind == "output_text"
        if not isinstance(self._open, _OpenText) or self._open.is_message is not is_message:
            place = len(self.items) + (self._open is not None)
            events += self._begin(_OpenText(place, kind, with_logprobs=self._with_logprobs))
        assert isinstance(self._open, _OpenText)
        named = token_logprobs(self._tokenizer, logprobs) if self._with_logprobs else []
        return [*events, *self._open.add(text, named)]

    def _begin(self, item: _OpenText | _OpenCall) -> list[Event]:
        self._blank, self._blank_logprobs = "", []
        events = [*self._close("completed"), *item.begin()]
        self._open = item
        return events

    def _close(self, status: ItemStatus) -> list[Event]:
        match self._open:
            case None:
                return []
            case _OpenText() as text:
                events = [*text.end(status, is_sealed=self._with_sealed)]
            case _OpenCall() as call:
                events = [*call.end(status)]
        self._open = None
        self.items.append(events[-1][1]["item"])
        return events


class ResponseForm(EventForm):
    """`context.AnswerForm` of a response."""

    def __init__(
        self,
        draft: ResponseObject,
        heading: Heading,
        output: ResponseOutput,
        *,
        now_s: Callable[[], float],
        keep: Callable[[ResponseObject], None],
    ) -> None:
        """`draft`: the response before anything is generated. `now_s`: the wall clock. `keep` is called with a response
        that is over, unless it failed."""
        self._draft = draft
        self._heading = heading
        self._output = output
        self._now_s = now_s
        self._keep = keep
        self._number = 0
        self._is_cut = False

    def begin(self, generation: ApiGeneration) -> Iterable[bytes]:
        del generation
        yield self._event("created", response=self._draft)
        yield self._event("in_progress", response=self._draft)

    def update(self, update: AnswerUpdate, generation: ApiGeneration) -> Iterable[bytes]:
        del generation
        match update:
            case GenerationPaused():
                yield comment(f"{update.state}: {update.detail}")
            case Delta():
                self._is_cut = update.finish == "length"
                yield from (self._event(kind, **fields) for kind, fields in self._output.add(update))
            case _:
                pass

    def end(self, generation: ApiGeneration) -> Iterable[bytes]:
        yield from (self._event(kind, **fields) for kind, fields in self._output.end(self._status))
        response = self._over(generation)
        yield self._event(response.status, response=response)

    def whole(self, answers: Sequence[Delta], generation: ApiGeneration) -> ResponseObject:
        for answer in answers:
            self._is_cut = answer.finish == "length"
            self._output.add(answer)
        self._output.end(self._status)
        return self._over(generation)

    def failed(self, problem: ApiError) -> bytes:
        self._output.end("incomplete")
        failure = ResponseFailure(
            "rate_limit_exceeded" if problem.status == 429 else "server_error", problem.body.message
        )
        response = structs.replace(self._draft, status="failed", output=self._output.items, error=failure)
        return self._event("failed", response=response)

    @property
    def _status(self) -> Literal["completed", "incomplete"]:
        return "incomplete" if self._is_cut else "completed"

    def _over(self, generation: ApiGeneration) -> ResponseObject:
        """Return the response once it is over, and keep it."""
        response = structs.replace(
            self._draft,
            status=self._status,
            output=self._output.items,
            usage=_usage(generation.usage),
            incomplete_details=IncompleteDetails() if self._is_cut else None,
            completed_at=None if self._is_cut else int(self._now_s()),
            fusion=self._heading.route(generation),
        )
        self._keep(response)
        return response

    def _event(self, kind: str, **fields: Any) -> bytes:
        name = f"response.{kind}"
        numbered = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return event(numbered, name)


def _usage(usage: Usage) -> ResponseUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    thought = usage.completion_tokens_details
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(cached),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(0 if isinstance(thought, UnsetType) else thought.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )
