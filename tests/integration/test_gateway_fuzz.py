"""What schemathesis makes of the interface's own description: whatever is sent, the gateway never fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from harness.gateway_stand import gateway_stand
from harness.patience import CEILING_S
from harness.scripted_engine import ScriptedEngine
from harness.tiny_text import write_tiny_text

pytestmark = pytest.mark.slow

EXAMPLES = 10


def test_fuzzing_finds_no_failure(tmp_path: Any):
    schemathesis = pytest.importorskip("schemathesis")
    engine = ScriptedEngine(write_tiny_text(tmp_path))
    loop = asyncio.new_event_loop()
    statuses: dict[str, set[int]] = {}
    current = [""]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        stand_context = gateway_stand(engine)
        stand = runner.run(stand_context.__aenter__())
        http = httpx.AsyncClient(base_url=stand.url, timeout=CEILING_S, trust_env=False)
        document = runner.run(http.get("/openapi.json")).json()
        schema = schemathesis.openapi.from_dict(document)
        for operation in (result.ok() for result in schema.get_all_operations()):
            for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
                if mode is schemathesis.GenerationMode.NEGATIVE and not len(operation.body):
                    continue  # nothing about it can be wrong
                current[0] = mode.value

                @settings(
                    max_examples=EXAMPLES,
                    deadline=None,
                    derandomize=True,
                    database=None,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )
                @given(operation.as_strategy(generation_mode=mode))
                def send(case: Any) -> None:
                    known = case.operation.path.startswith(("/v1/", "/api/")) and isinstance(case.body, dict)
                    # Past the name of the model, or no field after it would ever be looked at.
                    body = {**case.body, "model": "tiny"} if known and "model" in case.body else case.body
                    made = case.as_transport_kwargs(base_url=stand.url)
                    headers = {str(name): str(value) for name, value in made["headers"].items()}
                    content = json.dumps(body).encode(errors="replace") if isinstance(body, dict | list | str) else b""
                    if content:
                        headers["content-type"] = "application/json"
                    answer = runner.run(http.request(made["method"], made["url"], headers=headers, content=content))
                    statuses.setdefault(f"{case.operation.label} {current[0]}", set()).add(answer.status_code)
                    assert answer.status_code < 500, (answer.text, body)
                    if answer.status_code >= 400:
                        error = answer.json()["error"]
                        anthropic = case.operation.path.startswith("/v1/messages")
                        if case.operation.path.startswith("/api/"):
                            assert isinstance(error, str)
                        else:
                            assert set(error) == {"message", "type"} | (set() if anthropic else {"param", "code"})

                send()
        runner.run(http.aclose())
        runner.run(stand_context.__aexit__(None, None, None))
    # It got through to the engine, and was refused, on every path that takes a body.
    for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
        assert 200 in statuses[f"POST {path} positive"], path
        assert 400 in statuses[f"POST {path} negative"], path
    assert engine.live == 0
