"""`fusion serve A B` as people use it: one address, a process for each model, and a pool with room for one of them."""

from __future__ import annotations

import json
import shutil
import urllib.request
from pathlib import Path

import pytest

from harness.live_pool import Process, processes_at
from harness.patience import CEILING_S
from harness.saved_model import asked, greedy, heard, saved_model, stopped

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1200)
def test_two_models_take_turns_on_one_machine(tmp_path: Path) -> None:
    first = saved_model(tmp_path / "first")
    shutil.copytree(first, tmp_path / "second")
    figures = tmp_path / "serve.json"
    server = Process(
        *("serve", first, tmp_path / "second", "--local", 1, "--spares", 0, "--context", 128, "--sessions", 2),
        *("--port", 0, "--home", tmp_path / "home", "--json", figures),
    )
    try:
        heard(server, "first answers at")
        ready = json.loads(figures.read_text())
        assert ready["models"] == ["first", "second"]
        expected = greedy(first, "a pool of")
        assert asked(ready["url"], "a pool of", "first")["choices"][0]["text"] == expected
        # There is one machine, so the second model can start only when the first has ended.
        assert asked(ready["url"], "a pool of", "second")["choices"][0]["text"] == expected
        assert "[second] is tried again once there is room" in server.text
        assert "[first] unloaded: its machines are needed" in server.text
        # Whether a machine is free is found out before the model is loaded and planned.
        assert server.text.count("[second] planning") == 1
        with urllib.request.urlopen(f"{ready['url']}/v1/models", timeout=CEILING_S) as answer:
            cards = json.load(answer)["data"]
        assert [(card["id"], card["loaded"]) for card in cards] == [("first", False), ("second", True)]
        assert len(processes_at(tmp_path)) >= 3, "the server, a model's host and its peer"
        server.interrupt()
        assert server.ended() == 0
        assert not processes_at(tmp_path)
    finally:
        stopped(server)
