"""Bodies: what is taken, what is refused, and that the refusal names the field."""

from __future__ import annotations

import contextlib
import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.gateway.errors import ApiError
from fusionai.gateway.requests import ChatRequest, CompletionRequest, decode, plain
from fusionai.gateway.text_bodies import EmbeddingRequest
from harness.examples import examples

SMALL = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def refused(body: object, form: type[msgspec.Struct] = ChatRequest) -> ApiError:
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    with pytest.raises(ApiError) as caught:
        decode(raw, form)
    assert caught.value.status == 400
    return caught.value


def test_the_least_is_taken():
    assert decode(msgspec.json.encode(SMALL), ChatRequest).messages[0].content == "x"


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "me"},
        {"metadata": {"a": "b"}},
        {"store": True},
        {"service_tier": "auto"},
        {"functions": None},
        {"modalities": ["text"]},
        {"best_of": 1},
        {"stream_options": None, "stop": None, "tools": None},
    ],
)
def test_what_asks_for_nothing_is_taken(harmless: dict[str, object]):
    decode(msgspec.json.encode({**SMALL, **harmless}), ChatRequest)


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"service_tier": "priority"}, "service_tier", "unsupported_parameter"),
        ({"functions": []}, "functions", "unsupported_parameter"),
        ({"best_of": 4}, "best_of", "unsupported_parameter"),
        ({"reasoning_effort": "most"}, "reasoning_effort", "invalid_value"),
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"temperature": 3}, "temperature", "invalid_type"),
        ({"n": 0}, "n", "invalid_type"),
        ({"n": True}, "n", "invalid_type"),
        ({"max_tokens": 2.5}, "max_tokens", "invalid_type"),
        ({"top_p": -0.1}, "top_p", "invalid_type"),
        ({"messages": []}, "messages", "invalid_type"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x", "contnt": "y"}]}, "messages[0].contnt", "unknown_parameter"),
        ({"stream_options": {"include_usag": True}}, "stream_options.include_usag", "unknown_parameter"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ],
)
def test_every_mistake_names_its_field(more: dict[str, object], param: str, code: str):
    problem = refused({**SMALL, **more})
    assert (problem.body.param, problem.body.code) == (param, code)


def test_an_image_is_read_in_messages_of_the_user_only():
    part = {"type": "image_url", "image_url": {"url": "x"}}
    decode(json.dumps({**SMALL, "messages": [{"role": "user", "content": [part]}]}).encode(), ChatRequest)
    assert "image_url" in refused({**SMALL, "messages": [{"role": "system", "content": [part]}]}).body.message


def test_an_unknown_name_is_answered_with_the_nearest():
    assert "`max_tokens`" in refused({**SMALL, "max_token": 3}).body.message


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"model": NaN}',
        b'{"model": "\\ud800"}',
        b'{"model": "\xff"}',
        b"null",
        b'"text"',
        b"1" * 10_000,
        b'{"\\ud800": 1}',
    ],
)
@pytest.mark.parametrize("form", [ChatRequest, CompletionRequest, EmbeddingRequest])
def test_what_is_no_object_of_json_is_refused(raw: bytes, form: type[msgspec.Struct]):
    refused(raw, form)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_NAMES = st.sampled_from([field.name for field in msgspec.structs.fields(ChatRequest)]) | st.text(max_size=6)


@pytest.mark.slow
@settings(max_examples=examples(120), deadline=None, derandomize=True)
@given(st.dictionaries(_NAMES, _JSON, max_size=6))
def test_any_object_is_taken_or_refused_and_nothing_else_happens(fields: dict[str, object]):
    raw = msgspec.json.encode({**SMALL, **fields})
    with contextlib.suppress(ApiError):
        decode(raw, ChatRequest)
        return
    assert refused(raw).body.message


def test_a_message_reaches_templates_as_it_came():
    request = decode(
        msgspec.json.encode(
            {
                "model": "m",
                "messages": [
                    {"role": "developer", "content": "be brief"},
                    {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "hm"},
                    {"role": "tool", "tool_call_id": "c1", "content": "4"},
                ],
            }
        ),
        ChatRequest,
    )
    assert [plain(message) for message in request.messages] == [
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "content": None, "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]
