"""Answers `POST /v1/completions`.

`context` runs the generations; `requests.CompletionRequest` comes in, `answers.Completion` goes out, whole or in parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from msgspec import UnsetType
from starlette.requests import Request
from starlette.responses import Response

from fusionai.gateway import answers
from fusionai.gateway.chunks import ChunkForm
from fusionai.gateway.context import GatewayContext, Heading, numbered
from fusionai.gateway.errors import invalid
from fusionai.gateway.generation import AnswerLogprob, Choice, Delta, PromptProcessed
from fusionai.gateway.prompts import SourcePrompt, prompts_of, read_source
from fusionai.gateway.requests import CompletionRequest
from fusionai.gateway.streaming import while_connected
from fusionai.gateway.structured import enforced_form
from fusionai.serving.interface import PromptRead, TokenLogprob
from fusionai.serving.model_text import ModelText
from fusionai.serving.text import Tokenizer

_DEFAULT_TOKENS: Final = 16
"""OpenAI's default."""


@dataclass(frozen=True, slots=True)
class _Echo:
    """A prompt to be included in the answer: its text, and where each of its tokens begins in it."""

    text: str
    tokens: tuple[int, ...]
    offsets: tuple[int, ...]


class CompletionEndpoint:
    """Continues texts."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context

    async def text_completions(self, request: Request) -> Response:
        """Answer one request."""
        body = await self._context.read(request, CompletionRequest)
        heading = self._context.heading(request, body, "cmpl-")
        choices, echoes = await while_connected(request, self._choices(request, body))
        form = ChunkForm(heading, len(choices), _CompletionForm(self._context.text, heading, echoes))
        return await self._context.reply(request, choices, form, is_stream=heading.is_stream)

    async def _choices(self, request: Request, body: CompletionRequest) -> tuple[list[Choice], list[_Echo | None]]:
        context, text = self._context, self._context.text
        each = body.n or 1
        many = len(body.prompt) if isinstance(body.prompt, list) and not isinstance(body.prompt[0], int) else 1
        context.check_count(each, many)
        prompts = await prompts_of(body.prompt, context, "prompt")
        shared, stops = context.generation(request, body)
        form = enforced_form(body)
        choices: list[Choice] = []
        echoes: list[_Echo | None] = []
        if text.source is not None and body.echo:
            raise invalid("`echo`: the encoder reads the prompt, so there is nothing to repeat.", "echo")
        for number, given in enumerate(prompts):
            asked = await self._prompt(request, given)
            prompt, default = asked.tokens, _DEFAULT_TOKENS if text.source is None else None
            room = context.room_for(len(prompt), body.max_tokens, default, "prompt", start=len(asked.start))
            echo = await context.off_loop(self._echo, prompt) if body.echo else None
            with_prompt = echo is not None and body.logprobs is not None
            for index in range(number * each, (number + 1) * each):
                constraint = None if form is None else await context.constraint(form)
                generation = numbered(shared, index, prompt, room, logprobs=body.logprobs, prompt_logprobs=with_prompt)
                constraint = context.ruled(asked.start, constraint)
                generation = replace(generation, constraint=constraint, images=asked.images)
                decoder = text.decoder(stops=stops, after=() if asked.images else prompt)
                choices.append(Choice(index, number, generation, decoder, keeps=None if room else 0))
                echoes.append(echo)
        return choices, echoes

    async def _prompt(self, request: Request, tokens: tuple[int, ...]) -> SourcePrompt:
        """Return the prompt that the model reads for the tokens of a text."""
        if self._context.text.source is None:
            return SourcePrompt(tokens, (), ())
        return await read_source(self._context, tokens, request.state.holder.scope, "prompt")

    def _echo(self, prompt: Sequence[int]) -> _Echo:
        decoder = self._context.text.decoder()
        pieces = [decoder.add(token) for token in prompt]
        text = "".join(piece.text for piece in (*pieces, decoder.finish()))
        return _Echo(text, tuple(prompt), tuple(piece.offset for piece in pieces))


@dataclass(frozen=True, slots=True)
class _CompletionForm:
    """`chunks.ChoiceForm` of completions. `echoes`: by index of the answer."""

    text: ModelText
    heading: Heading
    echoes: Sequence[_Echo | None]

    def first(self, index: int) -> list[answers.TextChoice]:
        del index
        return []

    def parts(self, update: Delta | PromptProcessed) -> list[answers.TextChoice]:
        echo = self.echoes[update.index]
        if isinstance(update, Delta):
            logprobs = self._lists(self._of_answer(update.logprobs, echo)) if update.logprobs else None
            return [answers.TextChoice(update.index, update.text, update.finish, logprobs)]
        if echo is None:
            return []
        rows = self._of_prompt(echo, update.read.logprobs)
        logprobs = self._lists(rows) if self.heading.with_logprobs else None
        return [answers.TextChoice(update.index, echo.text, None, logprobs)]

    def whole(self, answer: Delta, prompt: PromptRead | None) -> answers.TextChoice:
        echo = self.echoes[answer.index]
        rows = self._of_answer(answer.logprobs, echo)
        text = answer.text
        if echo is not None and prompt is not None:
            text, rows = echo.text + text, self._of_prompt(echo, prompt.logprobs) + rows
        logprobs = self._lists(rows) if self.heading.with_logprobs else None
        return answers.TextChoice(answer.index, text, answer.finish or "stop", logprobs)

    def body(
        self,
        heading: Heading,
        choices: list[Any],
        usage: answers.Usage | UnsetType | None,
        route: answers.RouteReport | UnsetType,
    ) -> answers.Completion:
        return answers.Completion(heading.answer_id, heading.created, heading.model, choices, usage, fusion=route)

    def _of_answer(self, logprobs: Sequence[AnswerLogprob], echo: _Echo | None) -> list[_Row]:
        before = 0 if echo is None else len(echo.text)
        return [(one.logprob.token, one.logprob, before + one.offset) for one in logprobs]

    def _of_prompt(self, echo: _Echo, logprobs: Sequence[TokenLogprob]) -> list[_Row]:
        """Return the prompt's log-probabilities; the first token has none, because nothing precedes it."""
        known = [*itertools.repeat(None, len(echo.tokens) - len(logprobs)), *logprobs]
        return list(zip(echo.tokens, known, echo.offsets, strict=True))

    def _lists(self, rows: Sequence[_Row]) -> answers.TextLogprobs:
        tokenizer = self.text.tokenizer
        return answers.TextLogprobs(
            tokens=[_name(tokenizer, token) for token, _, _ in rows],
            token_logprobs=[None if known is None else known.logprob for _, known, _ in rows],
            top_logprobs=[None if known is None else _best(tokenizer, known) for _, known, _ in rows],
            text_offset=[offset for _, _, offset in rows],
        )


def _best(tokenizer: Tokenizer, known: TokenLogprob) -> dict[str, float]:
    """Return one entry for each of the best tokens, the worst first. Tokens can have the same text. The text names the
    row's own token, otherwise the best of them; the others are named by their ids, as in vLLM, so that none is lost."""
    first = {_name(tokenizer, token): token for token in (*(token for token, _ in reversed(known.top)), known.token)}
    named = ((token, value, _name(tokenizer, token)) for token, value in reversed(known.top))
    return {name if first[name] == token else _by_id(token): value for token, value, name in named}


def _name(tokenizer: Tokenizer, token: int) -> str:
    """Return the token's text. One that ends within a character is written as its bytes, as by OpenAI's API."""
    spelled = tokenizer.token_bytes(token)
    if not spelled:
        return _by_id(token)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _by_id(token: int) -> str:
    return f"token_id:{token}"


_Row = tuple[int, TokenLogprob | None, int]
"""A token, its log-probability, and the number of characters before it."""
