"""Output items and their events: each item is complete before the next begins, and numbers have no gap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fusionai.gateway.generation import AnswerLogprob, Delta
from fusionai.gateway.response_bodies import OutputCall, OutputMessage, OutputReasoning
from fusionai.gateway.response_form import Event, ResponseOutput
from fusionai.serving.interface import TokenLogprob
from fusionai.serving.model_text import ModelText
from fusionai.serving.tools import CallPiece


def build(
    text: ModelText, deltas: Sequence[Delta], *, with_logprobs: bool = False, is_cut: bool = False
) -> tuple[list[Any], list[Event]]:
    output = ResponseOutput(text.tokenizer, with_logprobs=with_logprobs, with_sealed=False)
    events = [event for delta in deltas for event in output.add(delta)]
    events += output.end("incomplete" if is_cut else "completed")
    return output.items, events


def kinds(events: Sequence[Event]) -> list[str]:
    return [kind for kind, _ in events]


CALLS = (CallPiece(0, '{"a"', "c1", "f"), CallPiece(0, ": 1}"), CallPiece(1, "{}", "c2", "g"))


def test_items_follow_each_other(text: ModelText):
    deltas = [Delta(0, reasoning="hm"), Delta(0, "\n\n"), Delta(0, "so"), Delta(0, " it"), Delta(0, calls=CALLS)]
    (thought, message, first, second), events = build(text, deltas)
    assert (thought.content[0].text, message.content[0].text) == ("hm", "\n\nso it")
    assert [(call.call_id, call.name, call.arguments) for call in (first, second)] == [
        ("c1", "f", '{"a": 1}'),
        ("c2", "g", "{}"),
    ]
    open_items: list[int] = []
    for kind, fields in events:
        if kind == "output_item.added":
            assert fields["item"].status == "in_progress"
            open_items.append(fields["output_index"])
        assert fields["output_index"] == open_items[-1], "items do not overlap"
    assert open_items == [0, 1, 2, 3]
    assert len({item.id for item in (thought, message, first, second)}) == 4


def test_the_same_whole_as_in_pieces(text: ModelText):
    pieces = [Delta(0, reasoning="h"), Delta(0, reasoning="m"), Delta(0, "\nso"), Delta(0, calls=CALLS)]
    whole = Delta(0, "\nso", CALLS, reasoning="hm")
    (streamed, _), (at_once, _) = build(text, pieces), build(text, [whole])
    assert [type(item) for item in streamed] == [OutputReasoning, OutputMessage, OutputCall, OutputCall]
    assert [_named(item) for item in streamed] == [_named(item) for item in at_once]


def _named(item: Any) -> object:
    return (item.name, item.arguments) if isinstance(item, OutputCall) else item.content


def test_blanks_between_items_are_no_message(text: ModelText):
    items, _ = build(text, [Delta(0, reasoning="hm"), Delta(0, "\n"), Delta(0, "\n"), Delta(0, calls=CALLS[:1])])
    assert [type(item) for item in items] == [OutputReasoning, OutputCall]


@pytest.mark.parametrize("said", ["", "\n"])
def test_an_answer_is_never_without_an_item(text: ModelText, said: str):
    items, events = build(text, [Delta(0, said)])
    assert [item.content[0].text for item in items] == [said]
    assert kinds(events)[-1] == "output_item.done"


def test_a_cut_answer_ends_with_an_incomplete_item(text: ModelText):
    items, _ = build(text, [Delta(0, "so"), Delta(0, calls=CALLS[:1])], is_cut=True)
    assert [item.status for item in items] == ["completed", "incomplete"]


def test_text_after_a_call_is_another_message(text: ModelText):
    items, _ = build(text, [Delta(0, "a"), Delta(0, calls=CALLS[:2]), Delta(0, "b")])
    assert [type(item) for item in items] == [OutputMessage, OutputCall, OutputMessage]


def test_log_probabilities_stay_with_their_text(text: ModelText):
    blank, word = text.tokenizer.encode("\n", framed=False)[0], text.tokenizer.encode("s", framed=False)[0]
    deltas = [
        Delta(0, "\n", logprobs=(AnswerLogprob(TokenLogprob(blank, -1.0, ()), 0),)),
        Delta(0, "s", logprobs=(AnswerLogprob(TokenLogprob(word, -2.0, ()), 1),)),
    ]
    (message,), events = build(text, deltas, with_logprobs=True)
    assert [(one.token, one.logprob) for one in message.content[0].logprobs] == [("\n", -1.0), ("s", -2.0)]
    deltas_sent = [fields for kind, fields in events if kind == "output_text.delta"]
    assert [len(fields["logprobs"]) for fields in deltas_sent] == [2]
