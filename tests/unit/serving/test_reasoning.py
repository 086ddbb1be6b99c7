"""Thinking in answers: separated whatever the pieces, and nothing of a text lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.corpus.templates import ChatTemplate
from fusionai.primitives.errors import UsageError
from fusionai.serving.reasoning import ReasoningForm, ReasoningReader, effort_variables, reasoning_form
from harness.examples import examples

Form = ReasoningForm


def read(
    form: ReasoningForm,
    answer: str,
    cuts: tuple[int, ...] = (),
    *,
    is_opened: bool = False,
    stops: tuple[str, ...] = (),
) -> tuple[str, str]:
    reader = ReasoningReader(form, is_opened=is_opened, stops=stops)
    places = sorted({0, len(answer), *(cut for cut in cuts if cut < len(answer))})
    reasoning, text = "", ""
    for start, end in [*pairwise(places), (len(answer), len(answer))]:
        part = reader.feed(answer[start:end], final=start == len(answer))
        reasoning, text = reasoning + part.reasoning, text + part.text
        if part.stop is not None:
            break
    return reasoning, text


CALL = "<|channel|>commentary to=functions.f<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
ANSWERS: list[tuple[ReasoningForm, bool, str, tuple[str, str]]] = [
    (Form.THINK, False, "<think>\nTwo and two.\n</think>\n\nFour.", ("Two and two.", "Four.")),
    (Form.THINK, False, "\n<think>a < b</think>c\n", ("a < b", "c\n")),
    (Form.THINK, False, "<think>\n\n</think>\n\nFour.", ("", "Four.")),
    (Form.THINK, False, " Four <think> five </think>", ("", " Four <think> five </think>")),
    (Form.THINK, False, "<thin", ("", "<thin")),
    (Form.THINK, False, "", ("", "")),
    (Form.THINK, False, "<think>cut off \n", ("cut off \n", "")),
    (Form.THINK, False, "<think>cut off</thi", ("cut off</thi", "")),
    (Form.THINK, True, "Two and\ntwo. \n</think>\n\nFour.", ("Two and\ntwo.", "Four.")),
    (Form.THINK, True, "\n<think>again</think>Four.", ("again", "Four.")),
    (Form.THINK, True, "</think>Four.", ("", "Four.")),
    (Form.THINK, True, "a</think>b</think>c", ("a", "b</think>c")),
    (Form.SEED, False, "<seed:think>hm</seed:think>yes", ("hm", "yes")),
    (Form.MISTRAL, False, "[THINK]hm [1] [/TH[/THINK]yes", ("hm [1] [/TH", "yes")),
    (Form.GEMMA, False, "<|channel>thought\nhm\n<channel|>yes", ("hm", "yes")),
    (Form.COHERE, True, "hm<|END_THINKING|>yes", ("hm", "yes")),
    (Form.HARMONY, False, f"{ANALYSIS}hm<|end|>{FINAL}yes", ("hm", "yes")),
    (Form.HARMONY, False, f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|>{FINAL}c", ("a\n\nb", "c")),
    (Form.HARMONY, False, f"{ANALYSIS}a{FINAL}b < c", ("a", "b < c")),
    (Form.HARMONY, False, f"{ANALYSIS}a<|end|>", ("a", "")),
    (Form.HARMONY, False, f"{ANALYSIS}a<|end|><|start|>assis", ("a", "")),
    (Form.HARMONY, False, "assistant plain", ("", "assistant plain")),
    (Form.HARMONY, False, "to", ("", "to")),
    (Form.HARMONY, False, "<|channel|>x<|end|>y", ("", "<|channel|>x\n\ny")),
    (
        Form.HARMONY,
        False,
        f"{ANALYSIS}hm<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"a": 1}',
        ("hm", f'{CALL}{{"a": 1}}'),
    ),
    (
        Form.HARMONY,
        False,
        " to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
        ("", f"{CALL}{{}}<|call|>"),
    ),
    (
        Form.HARMONY,
        False,
        "<|channel|>commentary<|message|>I look.<|end|>" + FINAL + "Done.",
        ("", "I look.\n\nDone."),
    ),
]


@pytest.mark.parametrize(("form", "is_opened", "answer", "wanted"), ANSWERS)
def test_whole_and_by_character(form: ReasoningForm, is_opened: bool, answer: str, wanted: tuple[str, str]) -> None:
    assert read(form, answer, is_opened=is_opened) == wanted
    assert read(form, answer, tuple(range(len(answer))), is_opened=is_opened) == wanted


@given(st.sampled_from(ANSWERS), st.lists(st.integers(1, 120)))
def test_cuts_make_no_difference(case: tuple[ReasoningForm, bool, str, tuple[str, str]], cuts: list[int]) -> None:
    form, is_opened, answer, wanted = case
    assert read(form, answer, tuple(cuts), is_opened=is_opened) == wanted


@settings(max_examples=examples(300))
@given(st.sampled_from(Form), st.booleans(), st.data())
def test_no_text_is_lost(form: ReasoningForm, is_opened: bool, data: st.DataObject) -> None:
    parts = (
        *form.marks,
        *form.value,
        "<|call|>",
        "assistant",
        "to=f ",
        "analysis",
        "final",
        "thought",
        "\n",
        " ",
        "a",
        "<",
    )
    answer = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=14)))
    cuts = tuple(data.draw(st.lists(st.integers(1, 80))))
    whole = read(form, answer, is_opened=is_opened)
    assert read(form, answer, cuts, is_opened=is_opened) == whole
    kept = "".join(whole)
    headers = ("assistant", "to=f", "analysis", "final", "thought")
    for mark in (*form.marks, *form.value, "<|call|>", *headers):
        kept, answer = kept.replace(mark, ""), answer.replace(mark, "")
    if form is not Form.HARMONY:
        assert kept.split() == answer.split() or "".join(kept.split()) == "".join(answer.split())


@pytest.mark.parametrize("size", [1, 3, 100])
def test_stop_strings_end_the_answer_and_not_the_thinking(size: int) -> None:
    answer = "<think>one. two</think>three. four"
    assert read(Form.THINK, answer, tuple(range(0, 100, size)), stops=("rest", ". ")) == ("one. two", "three")
    assert read(Form.THINK, "<think>a</think>b.", stops=(". ",)) == ("a", "b.")


def test_when_a_model_thinks() -> None:
    reader = ReasoningReader(Form.THINK, is_opened=True)
    assert reader.is_thinking
    reader.feed("a")
    assert reader.is_thinking
    reader.feed("</think>")
    assert not reader.is_thinking
    reader = ReasoningReader(Form.HARMONY)
    assert not reader.is_thinking
    reader.feed(ANALYSIS)
    assert reader.is_thinking


LEVELS = "{% macro system() %}{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
LEVELS += "{{ reasoning_effort }}{% endmacro %}{{ system() }}<|channel|>analysis<|message|>"
SWITCH = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
DEEPSEEK = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{% if thinking %}<think>{% endif %}"
NAMED = "{% if reasoning_effort in ['none', 'high'] %}[THINK]{% endif %}"
ALWAYS = "<think>{% for m in messages %}{% set thinking = m.thinking %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "effort", "wanted"),
    [
        (LEVELS, "low", {"reasoning_effort": "low"}),
        (LEVELS, "xhigh", "knows the levels low, medium, high, not 'xhigh'"),
        (LEVELS, "none", "can't turn thinking off"),
        (SWITCH, "none", {"enable_thinking": False}),
        (SWITCH, "minimal", {"enable_thinking": True}),
        (DEEPSEEK, "high", {"thinking": True}),
        (NAMED, "none", {"reasoning_effort": "none"}),
        (ALWAYS, "none", "can't turn thinking off"),
        (ALWAYS, "high", "no setting"),
        ("plain", "none", {}),
        ("plain", "high", "no setting"),
    ],
)
def test_how_much_a_model_thinks(template: str, effort: str, wanted: dict[str, object] | str) -> None:
    if isinstance(wanted, dict):
        assert effort_variables(ChatTemplate(template), effort) == wanted
        return
    with pytest.raises(UsageError, match=wanted):
        effort_variables(ChatTemplate(template), effort)


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}", Form.THINK),
        ("{% set content = content.split('</think>')[-1] %}", Form.THINK),
        ("[THINK]", Form.MISTRAL),
        ("<seed:think>", Form.SEED),
        ("<|channel>thought\n", Form.GEMMA),
        ("<|start|>assistant<|channel|>analysis<|message|>", Form.HARMONY),
        ("{{ messages }}", None),
    ],
)
def test_the_form_in_a_template(template: str, wanted: ReasoningForm | None) -> None:
    assert reasoning_form(template) is wanted
