"""Answers OpenAI's Responses API: `POST /v1/responses`, `GET` and `DELETE` of stored responses, and token counts.

A request becomes a chat, which `chat` generates; `response_form` words the answer.

`ResponseStore` keeps responses in memory, so that they can be read again and continued by `previous_response_id`. It
drops the oldest responses of an API key, past a number and a size. A response keeps the turns before it, even after
their own ids are gone. Nothing survives the gateway's process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
from msgspec import Struct, structs
from starlette.requests import Request
from starlette.responses import Response

from fusionai.gateway.chat import ChatEndpoint
from fusionai.gateway.config import RequestLimits
from fusionai.gateway.context import GatewayContext, Heading, json_response
from fusionai.gateway.errors import ApiError, invalid, shown
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
from fusionai.gateway.streaming import while_connected


@dataclass(slots=True, eq=False)
class StoredTurn:
    """A response with the input that it answers, both as JSON. `holders`: the store itself and later turns, as far as
    they are stored."""

    inputs: bytes
    body: bytes
    item_ids: tuple[str, ...]
    previous: StoredTurn | None
    holders: int = 0

    @property
    def size_bytes(self) -> int:
        """Memory that the turn takes."""
        return len(self.inputs) + len(self.body)

    def conversation(self) -> list[InputItem]:
        """Return all items up to and including this turn's output."""
        turns: list[StoredTurn] = []
        turn: StoredTurn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.previous
        return [item for each in reversed(turns) for item in each.items()]

    def items(self) -> Iterator[InputItem]:
        """Yield the items of this turn alone."""
        yield from msgspec.json.decode(self.inputs, type=list[InputItem])
        yield from msgspec.json.decode(self.body, type=_Output).output


class _Output(Struct):
    output: list[InputItem]


@dataclass(slots=True)
class _Shelf:
    """The turns of one API key, oldest first."""

    turns: dict[str, StoredTurn] = field(default_factory=dict)
    item_turns: dict[str, StoredTurn] = field(default_factory=dict)
    size_bytes: int = 0

    def put(self, response_id: str, turn: StoredTurn) -> None:
        self.turns[response_id] = turn
        self.item_turns.update(dict.fromkeys(turn.item_ids, turn))
        held: StoredTurn | None = turn
        while held is not None:
            held.holders += 1
            if held.holders > 1:
                break
            self.size_bytes += held.size_bytes
            held = held.previous

    def drop(self, response_id: str) -> None:
        turn = self.turns.pop(response_id)
        for item_id in turn.item_ids:
            del self.item_turns[item_id]
        freed: StoredTurn | None = turn
        while freed is not None:
            freed.holders -= 1
            if freed.holders:
                break
            self.size_bytes -= freed.size_bytes
            freed = freed.previous


class ResponseStore:
    """One per gateway. `scope` stands for an API key, as in `KeyHolder`."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._shelves: dict[str, _Shelf] = {}

    def add(self, scope: str, response: ResponseObject, inputs: list[InputItem], previous: StoredTurn | None) -> None:
        """Store a response, and drop the key's oldest ones that are beyond the limits."""
        shelf = self._shelves.setdefault(scope, _Shelf())
        item_ids = tuple(item.id for item in response.output)
        turn = StoredTurn(msgspec.json.encode(inputs), msgspec.json.encode(response), item_ids, previous)
        shelf.put(response.id, turn)
        limits = self._limits
        while len(shelf.turns) > limits.stored_responses or shelf.size_bytes > limits.stored_bytes:
            shelf.drop(next(iter(shelf.turns)))

    def turn(self, scope: str, response_id: str) -> StoredTurn:
        """Return a stored response. Raises `ApiError` 404."""
        turn = self._shelf(scope).turns.get(response_id)
        if turn is None:
            message = f"There is no response `{shown(response_id)}`. {self._reasons}"
            raise ApiError(404, message, code="response_not_found", param="response_id")
        return turn

    def previous(self, scope: str, response_id: str) -> StoredTurn:
        """Return the response that a request continues. Raises `ApiError` 400."""
        turn = self._shelf(scope).turns.get(response_id)
        if turn is None:
            message = (
                f"There is no response `{shown(response_id)}` to continue. {self._reasons} Send the whole conversation "
                "as `input` instead."
            )
            raise ApiError(400, message, code="previous_response_not_found", param="previous_response_id")
        return turn

    def item(self, scope: str, item_id: str, param: str) -> InputItem:
        """Return an output item of a stored response. Raises `ApiError` 400."""
        turn = self._shelf(scope).item_turns.get(item_id)
        if turn is None:
            message = f"No stored response has an item `{shown(item_id)}`. {self._reasons} Send the item itself."
            raise ApiError(400, message, code="item_not_found", param=param)
        output = msgspec.json.decode(turn.body, type=_Output).output
        return output[turn.item_ids.index(item_id)]

    def drop(self, scope: str, response_id: str) -> None:
        """Forget a response. Later responses keep its turn. Raises `ApiError` 404."""
        self.turn(scope, response_id)
        self._shelves[scope].drop(response_id)

    def _shelf(self, scope: str) -> _Shelf:
        return self._shelves.get(scope, _Shelf())

    @property
    def _reasons(self) -> str:
        """Reasons for which a response can be missing."""
        limits = self._limits
        return (
            "It was made with `store: false` or another API key, was deleted, or is lost: this gateway keeps the last "
            f"{limits.stored_responses} responses of a key, at most {limits.stored_bytes >> 20} MiB, until it restarts."
        )


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
