"""Stored responses: continued, dropped oldest first by number and size, apart for each key."""

from __future__ import annotations

import pytest

from fusionai.gateway.config import RequestLimits
from fusionai.gateway.errors import ApiError
from fusionai.gateway.response_bodies import OutputMessage, OutputText, ResponseObject
from fusionai.gateway.response_requests import InputItem, InputMessage, ReasoningConfig, TextConfig
from fusionai.gateway.responses import ResponseStore, StoredTurn


def response(number: int, said: str = "yes") -> ResponseObject:
    return ResponseObject(
        id=f"resp_{number}",
        created_at=number,
        model="m",
        output=[OutputMessage(f"msg_{number}", "completed", [OutputText(said)])],
        instructions=None,
        previous_response_id=None,
        store=True,
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        text=TextConfig(),
        reasoning=ReasoningConfig(),
        max_output_tokens=None,
        temperature=1.0,
        top_p=1.0,
        top_logprobs=0,
        truncation="disabled",
        metadata={},
    )


def add(store: ResponseStore, number: int, previous: int | None = None, size: int = 1, scope: str = "a") -> None:
    turn = None if previous is None else store.previous(scope, f"resp_{previous}")
    store.add(scope, response(number), [InputMessage("user", f"{number}:" + "x" * size)], turn)


def kept(store: ResponseStore, scope: str = "a") -> list[int]:
    found: list[int] = []
    for number in range(20):
        try:
            store.turn(scope, f"resp_{number}")
        except ApiError:
            continue
        found.append(number)
    return found


def said(turn: StoredTurn) -> list[str]:
    def text(item: InputItem) -> str:
        assert isinstance(item, InputMessage)
        return item.content if isinstance(item.content, str) else f"{item.role}!"

    return [text(item).split(":")[0] for item in turn.conversation()]


def test_a_conversation_has_all_turns_in_order():
    store = ResponseStore(RequestLimits())
    add(store, 1)
    add(store, 2, previous=1)
    add(store, 3, previous=1)
    assert said(store.previous("a", "resp_2")) == ["1", "assistant!", "2", "assistant!"]
    assert said(store.previous("a", "resp_3")) == ["1", "assistant!", "3", "assistant!"]


def test_the_oldest_are_dropped_by_number_and_their_turns_stay():
    store = ResponseStore(RequestLimits(stored_responses=2))
    for number in range(1, 6):
        add(store, number, previous=number - 1 if number > 1 else None)
    assert kept(store) == [4, 5]
    assert said(store.previous("a", "resp_5")) == [
        word for number in range(1, 6) for word in (str(number), "assistant!")
    ]
    with pytest.raises(ApiError, match="the last 2 responses") as lost:
        store.previous("a", "resp_3")
    assert (lost.value.status, lost.value.body.code) == (400, "previous_response_not_found")
    with pytest.raises(ApiError) as lost:
        store.turn("a", "resp_3")
    assert lost.value.status == 404


def test_the_oldest_are_dropped_by_size():
    store = ResponseStore(RequestLimits(stored_bytes=10_000))
    for number in range(1, 8):
        add(store, number, size=2500)
    assert kept(store) == [5, 6, 7]
    add(store, 8, size=20_000)
    assert kept(store) == []


def test_turns_that_are_still_needed_count_once():
    store = ResponseStore(RequestLimits(stored_bytes=9_000))
    add(store, 1, size=5000)
    add(store, 2, previous=1)
    add(store, 3, previous=1)
    assert kept(store) == [1, 2, 3]
    store.drop("a", "resp_1")
    store.drop("a", "resp_2")
    # The turn of the first is held by the third, and leaves with it.
    add(store, 4, size=2500)
    assert kept(store) == [4]
    add(store, 5, size=2500)
    assert kept(store) == [4, 5]


def test_a_turn_that_was_dropped_meanwhile_counts_again():
    store = ResponseStore(RequestLimits(stored_bytes=9_000))
    add(store, 1, size=5000)
    turn = store.previous("a", "resp_1")
    store.drop("a", "resp_1")
    store.add("a", response(2), [InputMessage("user", "2:")], turn)
    add(store, 3, size=2500)
    assert kept(store) == [3]


def test_keys_are_apart():
    store = ResponseStore(RequestLimits(stored_responses=1))
    add(store, 1)
    add(store, 2, scope="b")
    assert (kept(store), kept(store, "b"), kept(store, "c")) == ([1], [2], [])
    for attempt in (store.turn, store.previous, store.drop):
        with pytest.raises(ApiError, match="another API key"):
            attempt("b", "resp_1")


def test_output_items_are_found_by_id():
    store = ResponseStore(RequestLimits())
    add(store, 1)
    item = store.item("a", "msg_1", "input[0].id")
    assert isinstance(item, InputMessage)
    assert item.role == "assistant"
    store.drop("a", "resp_1")
    with pytest.raises(ApiError, match="No stored response") as lost:
        store.item("a", "msg_1", "input[0].id")
    assert lost.value.body.param == "input[0].id"
