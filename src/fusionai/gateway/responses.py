"""Answers OpenAI's Responses API: `POST /v1/responses`, `GET` and `DELETE` of stored responses, and token counts.

A request becomes a chat, which `chat` generates; `response_form` words the answer, `response_store` keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from fusionai.gateway.chat import ChatEndpoint
from fusionai.gateway.context import GatewayContext, Heading, json_response
from fusionai.gateway.errors import ApiError, invalid
from fusionai.gateway.requests import ChatRequest, TextFormat
from fusionai.gateway.response_bodies import DeletedResponse, InputTokenCount, ResponseObject
from fusionai.gateway.response_form import ResponseForm, ResponseOutput
from fusionai.gateway.response_input import chat_of, shortened, wants_logprobs
from fusionai.gateway.response_requests import (
    OTHER_FIELDS,
    InputItem,
    InputMessage,
    ItemReference,
    ReasoningConfig,
    ResponsesRequest,
    TextConfig,
)
from fusionai.gateway.response_store import ResponseStore, StoredTurn
from fusionai.gateway.streaming import while_connected

_ANSWER_SHARE: Final = 4
"""Part of the context that `truncation: auto` keeps free for an answer without `max_output_tokens`: one in this many
(chosen)."""
_PARAMS: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "reasoning_effort": "reasoning.effort",
}
"""Names of a chat's fields in the Responses API."""


class ResponsesEndpoint:
    """Answers responses."""

    def __init__(self, context: GatewayContext, chat: ChatEndpoint) -> None:
        self._context = context
        self._chat = chat
        self._store = ResponseStore(context.config.limits)

    async def responses(self, request: Request) -> Response:
        """Answer one request."""
        context, store = self._context, self._store
        body = self._without_effort(request, await context.read(request, ResponsesRequest, OTHER_FIELDS))
        if body.stream_options is not None and not body.stream:
            raise invalid("`stream_options` needs `stream: true`.", "stream_options")
        scope = request.state.holder.scope
        previous, fresh = self._turns(body, scope)
        try:
            chat = await while_connected(request, self._fitting(body, _items(previous, fresh), scope))
            heading = context.heading(request, chat, "resp_")

            def keep(response: ResponseObject) -> None:
                if response.store:
                    store.add(scope, response, fresh, previous)

            form = ResponseForm(
                self._draft(body, heading),
                heading,
                ResponseOutput(
                    context.text.tokenizer,
                    with_logprobs=wants_logprobs(body),
                    with_sealed="reasoning.encrypted_content" in (body.include or ()),
                ),
                now_s=context.clock.wall_s,
                keep=keep,
            )
            return await self._chat.answer(request, chat, form)
        except ApiError as problem:
            _rename_field(problem)
            raise

    async def input_tokens(self, request: Request) -> Response:
        """Count the tokens of a prompt."""
        body = self._without_effort(request, await self._context.read(request, ResponsesRequest, OTHER_FIELDS))
        previous, fresh = self._turns(body, request.state.holder.scope)
        try:
            scope = request.state.holder.scope
            chat = await while_connected(request, self._fitting(body, _items(previous, fresh), scope))
            self._context.adapter_of(chat.model)
            prompt = await while_connected(request, self._chat.prompt(chat, scope))
        except ApiError as problem:
            _rename_field(problem)
            raise
        return json_response(InputTokenCount(len(prompt.tokens)))

    def _without_effort(self, request: Request, body: ResponsesRequest) -> ResponsesRequest:
        """Return the request without a level of thinking that the model lacks."""
        effort = None if body.reasoning is None else body.reasoning.effort
        if self._context.has_effort(request, effort, "reasoning.effort", with_tools=bool(body.tools)):
            return body
        assert body.reasoning is not None
        return structs.replace(body, reasoning=structs.replace(body.reasoning, effort=None))

    async def response(self, request: Request) -> Response:
        """Return a stored response."""
        turn = self._store.turn(request.state.holder.scope, request.path_params["response_id"])
        if request.query_params.get("stream", "false") != "false":
            raise invalid("A stored response can't be streamed again: leave `stream` out.", "stream")
        return Response(turn.body, media_type="application/json")

    async def deleted_response(self, request: Request) -> Response:
        """Forget a stored response."""
        response_id = request.path_params["response_id"]
        self._store.drop(request.state.holder.scope, response_id)
        return json_response(DeletedResponse(response_id))

    def _turns(self, body: ResponsesRequest, scope: str) -> tuple[StoredTurn | None, list[InputItem]]:
        """Return the turn that a request continues, and its own input, with stored items in the place of references."""
        store, given = self._store, body.input
        previous = None if body.previous_response_id is None else store.previous(scope, body.previous_response_id)
        if isinstance(given, str):
            return previous, [InputMessage("user", given)]
        return previous, [
            store.item(scope, item.id, f"input[{at}].id") if isinstance(item, ItemReference) else item
            for at, item in enumerate(given)
        ]

    async def _fitting(self, body: ResponsesRequest, items: Sequence[InputItem], scope: str) -> ChatRequest:
        """Return the chat for the conversation. With `truncation: auto`, the oldest turns are left out as far as prompt
        and answer would not fit into the context."""
        chat = chat_of(body, items)
        if body.truncation != "auto" or await self._fits(chat, scope):
            return chat
        chats = [chat_of(body, rest) for rest in shortened(items)]
        low, high = 0, len(chats)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if await self._fits(chats[middle], scope) else (middle + 1, high)
        return chats[low] if low < len(chats) else chats[-1] if chats else chat

    async def _fits(self, chat: ChatRequest, scope: str) -> bool:
        context_tokens = self._context.engine.context_tokens
        try:
            prompt = await self._chat.prompt(chat, scope)
        except ApiError as problem:
            if problem.body.code != "context_length_exceeded":
                raise
            return False
        return len(prompt.tokens) + (chat.max_completion_tokens or context_tokens // _ANSWER_SHARE) <= context_tokens

    def _draft(self, body: ResponsesRequest, heading: Heading) -> ResponseObject:
        """Return the response before anything is generated: the request's settings and what applies otherwise."""
        advised = self._context.text.sampling
        text, reasoning = body.text or TextConfig(), body.reasoning or ReasoningConfig()
        return ResponseObject(
            id=heading.answer_id,
            created_at=heading.created,
            model=heading.model,
            instructions=body.instructions,
            previous_response_id=body.previous_response_id,
            store=body.store is not False,
            tools=body.tools or [],
            tool_choice=body.tool_choice or "auto",
            parallel_tool_calls=body.parallel_tool_calls is not False,
            text=TextConfig(text.format or TextFormat(), text.verbosity or "medium"),
            reasoning=reasoning,
            max_output_tokens=body.max_output_tokens,
            temperature=advised.temperature if body.temperature is None else body.temperature,
            top_p=advised.top_p if body.top_p is None else body.top_p,
            top_logprobs=body.top_logprobs or 0,
            truncation=body.truncation or "disabled",
            metadata=body.metadata or {},
        )


def _items(previous: StoredTurn | None, fresh: list[InputItem]) -> list[InputItem]:
    """Return the whole conversation."""
    return fresh if previous is None else [*previous.conversation(), *fresh]


def _rename_field(problem: ApiError) -> None:
    """Give the problem's field its name in the Responses API."""
    param = problem.body.param
    problem.body = structs.replace(problem.body, param=_PARAMS.get(param or "", param))
