"""Tool calls in answers: found whatever the pieces, and nothing of a text lost or held longer than it must be."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.serving.tools import Read, ToolForm, ToolReader, for_template, tool_form

Told = tuple[str, list[tuple[str, dict[str, object]]]]


def read(form: ToolForm, answer: str, cuts: tuple[int, ...] = ()) -> Told:
    reader = ToolReader(form)
    text = ""
    calls: list[tuple[str, dict[str, object]]] = []
    places = sorted({0, len(answer), *(cut for cut in cuts if cut < len(answer))})
    parts = [reader.feed(answer[start:end]) for start, end in pairwise(places)]
    for part in [*parts, reader.finish()]:
        text += part.text
        calls += [(call.name, json.loads(call.arguments)) for call in part.calls]
    assert reader.calls == len(calls)
    return text, calls


F = ("f", {"a": 1, "s": "</tool_call> ] ; } é"})
G = ("g", {})
HERMES_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "s": "</tool_call> ] ; } é"}}\n</tool_call>'
HERMES_G = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
LLAMA_F = '{"name": "f", "parameters": {"a": 1, "s": "</tool_call> ] ; } é"}}'
LLAMA_G = '{"type": "function", "name": "g", "parameters": {}}'
MISTRAL_FG = (
    '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1, "s": "</tool_call> ] ; } é"}}, {"name": "g", "arguments": {}}]'
)
ARGS_FG = '[TOOL_CALLS]f[ARGS]{"a": 1, "s": "</tool_call> ] ; } é"}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}'

ANSWERS: list[tuple[ToolForm, str, Told]] = [
    (ToolForm.HERMES, HERMES_F, ("", [F])),
    (ToolForm.HERMES, f"Let me see.\n{HERMES_F}\n{HERMES_G}\n", ("Let me see.\n", [F, G])),
    (ToolForm.HERMES, HERMES_G + " and so", ("and so", [G])),
    (ToolForm.HERMES, HERMES_G.removesuffix("</tool_call>"), ("", [G])),
    (ToolForm.HERMES, HERMES_G.removesuffix("call>"), ("", [G])),
    (ToolForm.HERMES, "a < b, <tool> and <tool_ca", ("a < b, <tool> and <tool_ca", [])),
    (ToolForm.HERMES, "<tool_call>nonsense</tool_call> x", ("<tool_call>nonsense</tool_call> x", [])),
    (ToolForm.HERMES, '<tool_call>{"name": 5}</tool_call>', ('<tool_call>{"name": 5}</tool_call>', [])),
    (ToolForm.HERMES, '<tool_call>{"name": "f", "argu', ('<tool_call>{"name": "f", "argu', [])),
    (ToolForm.HERMES, '<tool_call>{"name": "g"}junk' + HERMES_G, ('<tool_call>{"name": "g"}junk', [G])),
    (ToolForm.HERMES, "", ("", [])),
    (ToolForm.LLAMA, LLAMA_F, ("", [F])),
    (ToolForm.LLAMA, f" <|python_tag|>{LLAMA_F}; {LLAMA_G}", ("", [F, G])),
    (ToolForm.LLAMA, "Hello {you}", ("Hello {you}", [])),
    (ToolForm.LLAMA, 'See: {"name": "f", "parameters": {}}', ('See: {"name": "f", "parameters": {}}', [])),
    (ToolForm.LLAMA, '{"answer": 42}', ('{"answer": 42}', [])),
    (ToolForm.LLAMA, '{"name": "Bob", "age": [1, 2', ('{"name": "Bob", "age": [1, 2', [])),
    (ToolForm.LLAMA, "<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
    (ToolForm.LLAMA, LLAMA_G + " Done.", ("Done.", [G])),
    (ToolForm.LLAMA, "<|py", ("<|py", [])),
    (ToolForm.LLAMA, "{ ", ("{ ", [])),
    (ToolForm.MISTRAL, MISTRAL_FG, ("", [F, G])),
    (ToolForm.MISTRAL, "Well. " + MISTRAL_FG, ("Well. ", [F, G])),
    (ToolForm.MISTRAL, "[TOOL_CALLS] [1, 2]", ("[TOOL_CALLS] [1, 2]", [])),
    (ToolForm.MISTRAL, "an array [1], [TOOL", ("an array [1], [TOOL", [])),
    (ToolForm.MISTRAL_ARGS, ARGS_FG, ("", [F, G])),
    (ToolForm.MISTRAL_ARGS, "So: " + ARGS_FG, ("So: ", [F, G])),
    (ToolForm.MISTRAL_ARGS, "[TOOL_CALLS]what is this", ("[TOOL_CALLS]what is this", [])),
]


@pytest.mark.parametrize(("form", "answer", "told"), ANSWERS)
def test_answers_in_every_form(form: ToolForm, answer: str, told: Told) -> None:
    assert read(form, answer) == told
    assert read(form, answer, tuple(range(len(answer)))) == told, "character by character"


@settings(max_examples=200, deadline=None)
@given(case=st.sampled_from(ANSWERS), cuts=st.lists(st.integers(0, 120), max_size=8))
def test_how_an_answer_is_cut_makes_no_difference(case: tuple[ToolForm, str, Told], cuts: list[int]) -> None:
    form, answer, told = case
    assert read(form, answer, tuple(cuts)) == told


@settings(max_examples=200, deadline=None)
@given(
    form=st.sampled_from(list(ToolForm)),
    parts=st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                '{"name":"f"',
                "}",
                "[TOOL_CALLS]",
                "[ARGS]",
                "<|python_tag|>",
                "x",
                ";",
                '{"a',
                "[",
                "]",
                ',"arguments":{}',
                "\\",
                '"',
                "\n",
                "f",
            ]
        ),
        max_size=12,
    ),
)
def test_any_text_is_read_to_its_end(form: ToolForm, parts: list[str]) -> None:
    answer = "".join(parts)
    whole = read(form, answer)
    assert read(form, answer, tuple(range(len(answer)))) == whole
    if not whole[1]:
        assert whole[0] == answer


@pytest.mark.parametrize(
    ("form", "fresh", "text"),
    [
        (ToolForm.HERMES, "Hello <b", "Hello <b"),
        (ToolForm.HERMES, "Hello <", "Hello "),
        (ToolForm.HERMES, "Hello <tool_cal", "Hello "),
        (ToolForm.LLAMA, "Hel", "Hel"),
        (ToolForm.LLAMA, '{"na', ""),
        (ToolForm.LLAMA, '{"answer', '{"answer'),
        (ToolForm.MISTRAL, "[1] [TOOLS", "[1] [TOOLS"),
        (ToolForm.MISTRAL_ARGS, "[TOOL_CALLS]f(x)", "[TOOL_CALLS]f(x)"),
    ],
)
def test_only_what_may_be_a_call_waits(form: ToolForm, fresh: str, text: str) -> None:
    assert ToolReader(form).feed(fresh) == Read(text)


def test_a_call_comes_as_soon_as_it_is_whole() -> None:
    reader = ToolReader(ToolForm.HERMES)
    assert not reader.feed(HERMES_G[:-1]).calls
    assert [call.name for call in reader.feed(">").calls] == ["g"]


def test_ids_are_as_the_form_wants_them() -> None:
    (hermes,) = ToolReader(ToolForm.HERMES).feed(HERMES_G).calls
    assert hermes.call_id.startswith("call_")
    first, second = ToolReader(ToolForm.MISTRAL).feed(MISTRAL_FG).calls
    assert len(first.call_id) == len(second.call_id) == 9
    assert first.call_id != second.call_id
    reader = ToolReader(ToolForm.MISTRAL_ARGS)
    calls = [*reader.feed(ARGS_FG).calls, *reader.finish().calls]
    assert calls[1].call_id == "123456789"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if tools %}<tool_call>{% endif %}", ToolForm.HERMES),
        ("{{ tools }}<tool_call><function=", None),
        ('{{ tools }}"parameters": ', ToolForm.LLAMA),
        ("{{ tools }}<|python_tag|>", ToolForm.LLAMA),
        ("{{ tools }}[TOOL_CALLS] [", ToolForm.MISTRAL),
        ("{{ tools }}[TOOL_CALLS]f[ARGS]", ToolForm.MISTRAL_ARGS),
        ("{{ messages }}<tool_call>", None),
        ("{{ tools }}", None),
    ],
)
def test_the_form_is_told_by_the_template(template: str, form: ToolForm | None) -> None:
    assert tool_form(template) is form


def test_messages_as_templates_read_them() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    broken = {"id": "2", "type": "function", "function": {"name": "f", "arguments": "not json"}}
    told = for_template(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call, broken]},
            {"role": "assistant", "content": "x", "tool_calls": []},
        ]
    )
    assert told[0]["content"] == "a\nb"
    assert told[1]["content"] == ""
    assert told[1]["tool_calls"][0]["function"]["arguments"] == {"a": [1]}
    assert told[1]["tool_calls"][1] == broken
    assert "tool_calls" not in told[2]
    assert call["function"]["arguments"] == '{"a": [1]}'
