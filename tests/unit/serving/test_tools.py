"""Tool calls in answers: found whatever the pieces, and nothing of a text lost or held longer than it must be."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.serving.tool_reading import Read, ToolReader
from fusionai.serving.tools import CallPiece, ToolDefinition, ToolForm, calls_of, tool_form
from harness.examples import examples

Told = tuple[str, list[tuple[str, Any]]]
TOOLS = [
    ToolDefinition(
        "f",
        {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "s": {"type": "string"},
                "b": {"type": "boolean"},
                "o": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                "l": {"$ref": "#/$defs/list"},
                "m": {"type": ["number", "string"]},
            },
            "$defs": {"list": {"type": "array"}},
        },
    )
]


def read(form: ToolForm, answer: str, cuts: tuple[int, ...] = ()) -> Told:
    reader = ToolReader(form, TOOLS)
    text = ""
    pieces: list[CallPiece] = []
    places = sorted({0, len(answer), *(cut for cut in cuts if cut < len(answer))})
    parts = [reader.feed(answer[start:end]) for start, end in pairwise(places)]
    for part in [*parts, reader.finish()]:
        text += part.text
        pieces += part.pieces
    calls = calls_of(pieces)
    assert reader.calls == len(calls)
    assert all(call.call_id and call.name for call in calls)
    return text, [(call.name, _arguments(call.arguments)) for call in calls]


def _arguments(text: str) -> Any:
    """The object, or the text where the answer ended within it."""
    try:
        return json.loads(text)
    except ValueError:
        return text


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
XML_F = (
    "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=s>\n</tool_call> ] ; } é\n</parameter>\n</function>\n</tool_call>"
)
XML_G = "<tool_call><function=g></function></tool_call>"
XML_CODE = (
    "<tool_call>\n<function=f>\n<parameter=s>\nif a < b:\n    x = '</para'\n\n</parameter>\n"
    '<parameter=b>\nTrue\n</parameter>\n<parameter=o>\n{"k": [1]}\n</parameter>\n'
    "<parameter=l>\n[1, 2]\n</parameter>\n<parameter=m>\nten\n</parameter>\n<parameter=new>\n5\n</parameter>\n"
    "</function>\n</tool_call>"
)
CODE = {"s": "if a < b:\n    x = '</para'\n", "b": True, "o": {"k": [1]}, "l": [1, 2], "m": "ten", "new": "5"}

DS_F = 'function<｜tool▁sep｜>f\n```json\n{"a": 1, "s": "</tool_call> ] ; } é"}\n```<｜tool▁call▁end｜>'
DS_G = "function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜>"
DS_BEGIN, DS_CALL, DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"
V31_F = 'f<｜tool▁sep｜>{"a": 1, "s": "</tool_call> ] ; } é"}<｜tool▁call▁end｜>'
V31_G = "g<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_F = (
    '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1, "s": "</tool_call> ] ; } é"}<|tool_call_end|>'
)
KIMI_G = "<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
GLM_F = (
    "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    "<arg_key>s</arg_key>\n<arg_value></tool_call> ] ; } é</arg_value>\n</tool_call>"
)
GLM_G = "<tool_call>g</tool_call>"
GLM_CODE = (
    "<tool_call>f<arg_key>s</arg_key><arg_value>if a < b:\n    x = '</para'\n</arg_value>"
    '<arg_key>b</arg_key><arg_value>true</arg_value><arg_key>o</arg_key><arg_value>{"k": [1]}</arg_value></tool_call>'
)
MINIMAX_F = (
    '<invoke name="f">\n<parameter name="a">1</parameter>\n'
    '<parameter name="s"></tool_call> ] ; } é</parameter>\n</invoke>\n'
)
MINIMAX_G = '<invoke name="g">\n</invoke>\n'
MINIMAX_BEGIN, MINIMAX_END = "<minimax:tool_call>\n", "</minimax:tool_call>"
HARMONY_F = '<|channel|>commentary to=functions.f<|message|>{"a": 1, "s": "</tool_call> ] ; } é"}'

SEED_F = "<function=f>\n<parameter=a>1</parameter>\n<parameter=s></tool_call> ] ; } é</parameter>\n</function>\n"
DSML_F = (
    '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="s" string="true"></tool_call> ] ; } é</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
)
DSML_G = '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n'

NAMED_ANSWERS: list[tuple[ToolForm, str, Told | None]] = [
    (ToolForm.DEEPSEEK_V3, f"{DS_BEGIN}{DS_CALL}{DS_F}\n{DS_CALL}{DS_G}{DS_END}", ("", [F, G])),
    (ToolForm.DEEPSEEK_V3, f"I look.\n{DS_BEGIN}{DS_CALL}{DS_F}", ("I look.\n", [F])),
    (ToolForm.DEEPSEEK_V3, f"{DS_CALL}{DS_G} and", ("and", [G])),
    (ToolForm.DEEPSEEK_V3, f"{DS_BEGIN}{DS_CALL}function<｜tool▁sep｜>f\n```json", None),
    (ToolForm.DEEPSEEK_V3, f'{DS_BEGIN}{DS_CALL}function<｜tool▁sep｜>f\n```json\n{{"a"', ("", [("f", '{"a"')])),
    (ToolForm.DEEPSEEK_V3, f"{DS_BEGIN}nothing", None),
    (ToolForm.DEEPSEEK_V31, f"{DS_BEGIN}{DS_CALL}{V31_F}{DS_CALL}{V31_G}{DS_END} x", ("x", [F, G])),
    (ToolForm.DEEPSEEK_V31, f"{DS_BEGIN}{DS_CALL}{V31_F.removesuffix('end｜>')}", ("", [F])),
    (ToolForm.DEEPSEEK_V31, f"{DS_BEGIN}{DS_CALL}{V31_F}{DS_END[:9]}", ("", [F])),
    (ToolForm.DEEPSEEK_V31, "a <｜User｜> <｜tool▁c", None),
    (ToolForm.KIMI, f"{KIMI_BEGIN}{KIMI_F}{KIMI_G}{KIMI_END}", ("", [F, G])),
    (ToolForm.KIMI, f"Well. {KIMI_BEGIN}{KIMI_F}", ("Well. ", [F])),
    (ToolForm.KIMI, f"{KIMI_BEGIN}<|tool_call_begin|> f <|tool_call_argument_begin|> {{}}", ("", [("f", {})])),
    (ToolForm.KIMI, f"{KIMI_BEGIN}<|tool_call_begin|>what is<|tool_call_argument_begin|>", None),
    (ToolForm.GLM, f"{GLM_F}\n{GLM_G}", ("", [F, G])),
    (ToolForm.GLM, f"So.\n{GLM_CODE}", ("So.\n", [("f", {"s": CODE["s"], "b": True, "o": {"k": [1]}})])),
    (ToolForm.GLM, GLM_F.removesuffix("\n</tool_call>"), ("", [F])),
    (ToolForm.GLM, "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>half", ("", [("f", '{"s": "half')])),
    (ToolForm.GLM, "<tool_call>two words</tool_call>", None),
    (ToolForm.GLM, '<tool_call>{"name": "f"}</tool_call>', None),
    (ToolForm.MINIMAX, f"{MINIMAX_BEGIN}{MINIMAX_F}{MINIMAX_G}{MINIMAX_END}", ("", [F, G])),
    (ToolForm.MINIMAX, f"So.\n{MINIMAX_BEGIN}{MINIMAX_G}", ("So.\n", [G])),
    (ToolForm.MINIMAX, f"{MINIMAX_F} and", ("and", [F])),
    (ToolForm.MINIMAX, f"{MINIMAX_BEGIN}<invoke f>", None),
    (ToolForm.SEED, f"So. <seed:tool_call>\n{SEED_F}</seed:tool_call>", ("So. ", [F])),
    (ToolForm.SEED, "<seed:tool_call>\n<function=g>\n</function>\n</seed:tool_call>", ("", [G])),
    (ToolForm.DEEPSEEK_V32, f"<｜DSML｜function_calls>\n{DSML_F}{DSML_G}</｜DSML｜function_calls>", ("", [F, G])),
    (ToolForm.DEEPSEEK_V32, f"I look.\n\n<｜DSML｜function_calls>\n{DSML_F}", ("I look.\n\n", [F])),
    (
        ToolForm.DEEPSEEK_V4,
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="new">\n'
        '<｜DSML｜parameter name="x" string="false">[1]</｜DSML｜parameter>'
        '\n<｜DSML｜parameter name="y" string="true">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        ("", [("new", {"x": [1], "y": "2"})]),
    ),
    (ToolForm.DEEPSEEK_V4, "<｜DSML｜tool_calls> and <｜DSML｜", None),
    (ToolForm.HARMONY, HARMONY_F, ("", [F])),
    (ToolForm.HARMONY, f"I look.{HARMONY_F}\n{HARMONY_F}", ("I look.", [F, F])),
    (ToolForm.HARMONY, "<|channel|>commentary to=browser.open<|message|>[1]", None),
    (ToolForm.HARMONY, "<|channel|>comment", None),
]
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
    (ToolForm.HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>.', (".", [("f", {"a": 1})])),
    (
        ToolForm.HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "x"}</tool_call>',
        ("", [("f", {"a": 1})]),
    ),
    (ToolForm.HERMES, '<tool_call>{"name": "f", "arguments": {"a": "b', ("", [("f", '{"a": "b')])),
    (ToolForm.HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1} so', ("so", [("f", {"a": 1})])),
    (ToolForm.HERMES, '<tool_call>{"name": "f", "arguments": {}} and </tool_call>', ("and </tool_call>", [("f", {})])),
    (ToolForm.HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("f", {"a": 1})])),
    (ToolForm.QWEN_XML, XML_F, ("", [F])),
    (ToolForm.QWEN_XML, f"I look.\n{XML_F}\n{XML_G}\n", ("I look.\n", [F, G])),
    (ToolForm.QWEN_XML, XML_CODE, ("", [("f", CODE)])),
    (ToolForm.QWEN_XML, XML_F.removeprefix("<tool_call>\n") + " and", ("and", [F])),
    (ToolForm.QWEN_XML, XML_F.removesuffix("\n</tool_call>"), ("", [F])),
    (ToolForm.QWEN_XML, XML_F.removesuffix("\n</function>\n</tool_call>"), ("", [F])),
    (ToolForm.QWEN_XML, "<tool_call>\n<function=f>\n<parameter=s>\nhalf", ("", [("f", '{"s": "half')])),
    (
        ToolForm.QWEN_XML,
        "<tool_call>\n<function=f>\n<parameter=a>\nno number\n</parameter></function>",
        ("", [("f", {"a": "no number"})]),
    ),
    (
        ToolForm.QWEN_XML,
        "<function=f><parameter=s>x</parameter> well </function>",
        ("well </function>", [("f", {"s": "x"})]),
    ),
    (
        ToolForm.QWEN_XML,
        "<tool_call>nonsense</tool_call> a < b <func",
        ("<tool_call>nonsense</tool_call> a < b <func", []),
    ),
    (ToolForm.QWEN_XML, "<function=f <tool_call><function=", ("<function=f <tool_call><function=", [])),
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


ANSWERS += [(form, answer, (answer, []) if told is None else told) for form, answer, told in NAMED_ANSWERS]


@pytest.mark.parametrize(("form", "answer", "told"), ANSWERS)
def test_answers_in_every_form(form: ToolForm, answer: str, told: Told) -> None:
    assert read(form, answer) == told
    assert read(form, answer, tuple(range(len(answer)))) == told, "character by character"


@settings(max_examples=examples(200), deadline=None)
@given(case=st.sampled_from(ANSWERS), cuts=st.lists(st.integers(0, 120), max_size=8))
def test_how_an_answer_is_cut_makes_no_difference(case: tuple[ToolForm, str, Told], cuts: list[int]) -> None:
    form, answer, told = case
    assert read(form, answer, tuple(cuts)) == told


@settings(max_examples=examples(200), deadline=None)
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
                "<function=f>",
                "</function>",
                "<parameter=s>",
                "<parameter=a>",
                "</parameter>",
                "<fun",
                *(
                    mark
                    for form in (ToolForm.DEEPSEEK_V3, ToolForm.KIMI, ToolForm.GLM, ToolForm.DEEPSEEK_V4)
                    for mark in form.marks
                ),
                "functions.f:0",
                "```json",
                "```",
                '<invoke name="f">',
                '<parameter name="a">',
                "</invoke>",
                "<|channel|>commentary to=",
                "<|message|>",
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
    assert reader.feed('<tool_call>{"name": "g", "argum') == Read()
    (begun,) = reader.feed('ents": {"a": ').pieces[:1]
    assert (begun.name, begun.arguments) == ("g", "")
    assert reader.feed('"long te').pieces == (CallPiece(0, '"long te'),)
    assert reader.whole == 0
    assert reader.feed('xt"}').pieces == (CallPiece(0, 'xt"}'),)
    assert reader.whole == 1
    assert reader.feed("}</tool_call>") == Read()


def test_text_in_a_parameter_is_given_on_while_it_is_written() -> None:
    reader = ToolReader(ToolForm.QWEN_XML, TOOLS)
    assert reader.feed("<tool_call>\n<function=f>\n<parameter=s").pieces[0].name == "f"
    assert reader.feed(">\nline 1").pieces == (CallPiece(0, '{"s": "'), CallPiece(0, "line 1"))
    assert reader.feed("\n").pieces == (), "it may be the last line's end"
    assert reader.feed('"2"').pieces == (CallPiece(0, '\\n\\"2\\"'),)


def test_ids_are_as_the_form_wants_them() -> None:
    (hermes,) = calls_of(ToolReader(ToolForm.HERMES).feed(HERMES_G).pieces)
    assert hermes.call_id.startswith("call_")
    first, second = calls_of(ToolReader(ToolForm.MISTRAL).feed(MISTRAL_FG).pieces)
    assert len(first.call_id) == len(second.call_id) == 9
    assert first.call_id != second.call_id
    reader = ToolReader(ToolForm.MISTRAL_ARGS)
    calls = calls_of((*reader.feed(ARGS_FG).pieces, *reader.finish().pieces))
    assert calls[1].call_id == "123456789"
    kimi = ToolReader(ToolForm.KIMI)
    calls = calls_of((*kimi.feed(KIMI_BEGIN + KIMI_F + KIMI_G).pieces, *kimi.finish().pieces))
    # The template of the next turn shows these ids to the model.
    assert [call.call_id for call in calls] == ["functions.f:0", "functions.g:1"]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if tools %}<tool_call>{% endif %}", ToolForm.HERMES),
        ("{{ tools }}<tool_call><function=", None),
        ("{{ tools }}<tool_call><function=f><parameter=", ToolForm.QWEN_XML),
        ('{{ tools }}"parameters": ', ToolForm.LLAMA),
        ("{{ tools }}<|python_tag|>", ToolForm.LLAMA),
        ("{{ tools }}[TOOL_CALLS] [", ToolForm.MISTRAL),
        ("{{ tools }}[TOOL_CALLS]f[ARGS]", ToolForm.MISTRAL_ARGS),
        ("{{ tools }}<tool_call>{name}\n<arg_key>", ToolForm.GLM),
        ("{{ tools }}<minimax:tool_call><invoke", ToolForm.MINIMAX),
        ("{{ tools }}<seed:tool_call><function=", ToolForm.SEED),
        ("{{ tools }}｜DSML｜ 'function_calls>'", ToolForm.DEEPSEEK_V32),
        ("{{ tools }}｜DSML｜ 'tool_calls>'", ToolForm.DEEPSEEK_V4),
        ("{{ tools }}<tool_call><invoke name=", None),
        ("{{ tools }}<|tool_calls_section_begin|>", ToolForm.KIMI),
        ("{{ tools }}<｜tool▁calls▁begin｜>", ToolForm.DEEPSEEK_V31),
        ("{{ tools }}<｜tool▁calls▁begin｜>```json", ToolForm.DEEPSEEK_V3),
        ("{{ message.tool_calls }}<｜tool▁calls▁begin｜>", None),
        ("{{ tools }}functions.<|channel|>commentary", ToolForm.HARMONY),
        ('{{ tools }}"parameters": "tool_name": ', None),
        ("{{ messages }}<tool_call>", None),
        ("{{ tools }}", None),
    ],
)
def test_the_form_is_told_by_the_template(template: str, form: ToolForm | None) -> None:
    assert tool_form(template) is form
