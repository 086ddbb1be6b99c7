"""Rows of conversations, whatever is said in them: every token of an answer is a label and nothing else is; packing
loses no conversation and cuts none."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Engine

from fusionai.corpus.chat_file import ChatEncoder, ChatWriter
from fusionai.corpus.conversations import conversation_of
from fusionai.corpus.order import packed
from fusionai.corpus.tables import LocalTokenizer
from fusionai.corpus.tokens import CorpusTokenizer, load_tokenizer
from fusionai.serving.model_text import ModelText
from harness.examples import examples
from harness.tiny_text import write_tiny_text

pytestmark = pytest.mark.slow

SIGNED = """\
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}
{% else %}{{ message['content'] }}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As the harness's own template, but that it says what an answer is, and writes no line's end after it."""

_WORDS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["<|im_end|>", "<|im_start|>assistant\n", " ", "\n\n", "the pool", "日本 🙂", "<tool_call>"]),
)
_TEXT = st.lists(_WORDS, min_size=1, max_size=4).map("".join)
_ANSWER = _TEXT.filter(lambda text: bool(text.strip()))


@st.composite
def talks(draw: st.DrawFn) -> list[dict[str, Any]]:
    talk: list[dict[str, Any]] = [{"role": "system", "content": draw(_TEXT)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        talk.append({"role": "user", "content": draw(_TEXT)})
        talk.append({"role": "assistant", "content": draw(_ANSWER), "weight": draw(st.sampled_from([0, 1, 1]))})
    talk[-1]["weight"] = 1
    return talk


@cache
def model() -> tuple[CorpusTokenizer, ModelText]:
    directory = Path(mkdtemp())
    served = write_tiny_text(directory)
    return load_tokenizer(LocalTokenizer(path=str(directory))), served


@pytest.mark.parametrize("template", [None, SIGNED], ids=["by prefixes", "by signs"])
@given(talk=talks())
@settings(max_examples=examples(100), deadline=None)
def test_labels_are_the_answers_tokens_and_nothing_else(template: str | None, talk: list[dict[str, Any]]) -> None:
    tokenizer, served = model()
    conversation = conversation_of({"messages": talk}, "chat")
    written = ChatWriter(tokenizer.files, template, "answers").write(conversation)
    (tokens,) = ChatEncoder(tokenizer).encode([written])
    if template is None:
        assert tokens.ids.tolist() == list(served.chat_tokens(conversation.messages, add_generation_prompt=False))
    engine = Engine.from_str(tokenizer.files["tokenizer.json"].decode())
    after = "<|im_end|>\n" if template is None else "<|im_end|>"
    wanted = [f"{conversation.messages[number]['content']}{after}" for number in sorted(conversation.answers)]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], tokens.trained.astype(int), [0]])))
    runs = [tokens.ids[start:end].tolist() for start, end in edges.reshape(-1, 2)]
    # Whole tokens are trained; what a user forges is text to the tokenizer but spelled alike.
    assert [engine.decode(run, skip_special_tokens=False) for run in runs] == wanted
    unsaid = engine.decode(tokens.ids[~tokens.trained].tolist(), skip_special_tokens=False)
    rest = written.text
    for start, end in reversed(written.spans):
        rest = rest[:start] + rest[end:]
    assert unsaid == rest


@given(lengths=st.lists(st.integers(1, 50), max_size=60), capacity=st.integers(50, 70))
@settings(max_examples=examples(200), deadline=None)
def test_packing_loses_no_conversation_and_cuts_none(lengths: list[int], capacity: int) -> None:
    rows = packed(np.asarray(lengths, dtype=np.int64), capacity)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in row) <= capacity for row in rows)
    fewest = -(-sum(lengths) // capacity)
    assert len(rows) <= 2 * fewest
    assert rows == packed(np.asarray(lengths, dtype=np.int64), capacity)
