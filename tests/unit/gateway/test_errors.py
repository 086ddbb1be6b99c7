"""Each protocol's clients get errors in the form that they read."""

from __future__ import annotations

import json

import pytest

from fusionai.gateway.errors import ApiError, error_response


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"error": {"message": "busy", "type": "rate_limit_error", "param": None, "code": "engine_busy"}},
        ),
        ("/v1/messages", {"type": "error", "error": {"type": "rate_limit_error", "message": "busy"}}),
        ("/v1/messages/count_tokens", {"type": "error", "error": {"type": "rate_limit_error", "message": "busy"}}),
        ("/api/chat", {"error": "busy"}),
    ],
)
def test_the_path_says_in_which_form_an_error_is_sent(path: str, body: object):
    answer = error_response(ApiError(429, "busy", code="engine_busy", retry_after_s=2.0), path)
    assert json.loads(bytes(answer.body)) == body
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
