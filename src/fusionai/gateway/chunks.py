"""Answers in OpenAI's older form: a body with `choices`, or a stream of chunks that each have `choices`.

`chat` and `completions` word the choices; `context` runs the generations and sends what this module encodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from msgspec import UNSET, Struct, UnsetType

from fusionai.gateway.answers import RouteReport, Usage
from fusionai.gateway.context import Heading
from fusionai.gateway.generation import AnswerUpdate, ApiGeneration, Delta, PromptProcessed
from fusionai.gateway.streaming import EventForm, comment, event
from fusionai.serving.interface import GenerationPaused, PromptRead


class ChoiceForm(Protocol):
    """How an endpoint words its choices. A choice is an entry of `choices` in a body or chunk."""

    def first(self, index: int) -> Sequence[Struct]:
        """Return the choices that begin a stream's answer `index`."""
        ...

    def parts(self, update: Delta | PromptProcessed) -> Sequence[Struct]:
        """Return the choices for new content of a stream."""
        ...

    def whole(self, answer: Delta, prompt: PromptRead | None) -> Struct:
        """Return the choice for a complete answer. `prompt`: what was read of its prompt."""
        ...

    def body(
        self, heading: Heading, choices: list[Any], usage: Usage | UnsetType | None, route: RouteReport | UnsetType
    ) -> Struct:
        """Return a complete body, or a chunk of a stream."""
        ...


class ChunkForm(EventForm):
    """`context.AnswerForm` of a request with `count` answers."""

    def __init__(self, heading: Heading, count: int, choices: ChoiceForm) -> None:
        self._heading = heading
        self._count = count
        self._choices = choices
        self._unfinished = count

    def begin(self, generation: ApiGeneration) -> Iterable[bytes]:
        del generation
        return [self._chunk(choice) for index in range(self._count) for choice in self._choices.first(index)]

    def update(self, update: AnswerUpdate, generation: ApiGeneration) -> Iterable[bytes]:
        if isinstance(update, GenerationPaused):
            yield comment(f"{update.state}: {update.detail}")
            return
        self._unfinished -= isinstance(update, Delta) and update.finish is not None
        choices = self._choices.parts(update)
        for place, choice in enumerate(choices, 1):
            is_end = not self._unfinished and not self._heading.with_usage and place == len(choices)
            yield self._chunk(choice, self._heading.route(generation) if is_end else UNSET)

    def end(self, generation: ApiGeneration) -> Iterable[bytes]:
        heading = self._heading
        if heading.with_usage:
            yield event(self._choices.body(heading, [], generation.usage, heading.route(generation)))
        yield b"data: [DONE]\n\n"

    def whole(self, answers: Sequence[Delta], generation: ApiGeneration) -> Struct:
        choices = [self._choices.whole(answer, generation.prompt_read(answer.index)) for answer in answers]
        return self._choices.body(self._heading, choices, generation.usage, self._heading.route(generation))

    def _chunk(self, choice: Struct, route: RouteReport | UnsetType = UNSET) -> bytes:
        no_usage = None if self._heading.with_usage else UNSET
        return event(self._choices.body(self._heading, [choice], no_usage, route))
