"""Keeps responses in memory, so that they can be read again and continued by `previous_response_id`.

Decides what is dropped: the oldest responses of an API key, past a number and a size. A response keeps the turns before
it, even after their own ids are gone. Nothing survives the gateway's process. `responses` adds and reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from fusionai.gateway.config import RequestLimits
from fusionai.gateway.errors import ApiError, shown
from fusionai.gateway.response_bodies import ResponseObject
from fusionai.gateway.response_requests import InputItem


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
