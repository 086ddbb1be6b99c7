"""Thinking before a constrained answer: free, without an end of the answer, and followed by the constrained text."""

from __future__ import annotations

import numpy as np
import pytest

from fusionai.primitives.errors import ExecutionError
from fusionai.serving.constraint import ConstraintCompiler, JsonObject
from fusionai.serving.interface import Constraint
from fusionai.serving.model_text import ModelText
from fusionai.serving.thinking_first import FreeThinking, ThinkingFirst
from harness.tiny_text import write_tiny_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return write_tiny_text(tmp_path_factory.mktemp("tiny-text"))


def allowed(constraint: Constraint) -> set[int]:
    words = np.frombuffer(constraint.allowed(), np.uint8)
    return set(np.flatnonzero(np.unpackbits(words, bitorder="little")).tolist())


def test_thinking_is_free_before_the_form(text: ModelText) -> None:
    model = text.tokenizer
    width, stops = model.vocabulary + 13, text.stop_tokens
    compiler = ConstraintCompiler(model, vocabulary=width, stop_tokens=stops)
    opener, closer, line = *(model.added[mark] for mark in ("<tool_call>", "</tool_call>")), model.id_of("Ċ")
    assert line is not None
    plain = FreeThinking(opener=opener, closer=closer, gap=frozenset({line}))

    def fresh(thinking: FreeThinking) -> ThinkingFirst:
        return ThinkingFirst(compiler.compile_now(JsonObject()), thinking, vocabulary=width)

    def chosen(constraint: Constraint, wanted: str | int) -> None:
        for token in [wanted] if isinstance(wanted, int) else model.encode(wanted, framed=False):
            assert token in allowed(constraint), wanted
            constraint.accept(token)

    constraint = fresh(plain)
    assert opener in allowed(constraint)
    chosen(constraint, opener)
    # Everything but the end of the answer.
    assert allowed(constraint) >= set(range(width)) - stops
    assert not allowed(constraint) & stops
    chosen(constraint, "quick } foxes")
    assert not constraint.finished
    chosen(constraint, closer)
    chosen(constraint, "\n{")
    assert not allowed(constraint) & {opener, closer}
    chosen(constraint, "}")
    assert constraint.finished
    # Without thinking, and without a line break.
    constraint = fresh(plain)
    chosen(constraint, "{}")
    assert constraint.finished
    constraint = fresh(FreeThinking(closer=closer))
    chosen(constraint, "a")
    chosen(constraint, closer)
    assert line not in allowed(constraint)
    # Tokens between the thinking and the text.
    constraint = fresh(FreeThinking(lead=(5, 6), closer=closer, between=(7, 8)))
    for token in (5, 6):
        assert allowed(constraint) == {token}
        constraint.accept(token)
    chosen(constraint, closer)
    assert allowed(constraint) == {7}
    with pytest.raises(ExecutionError, match="not allowed"):
        constraint.accept(8)
