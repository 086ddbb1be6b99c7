"""`fusion plan` over a pool of real processes: who is there is planned with, a machine that has gone is named."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from harness.live_pool import PATIENCE_S, TINY, LivePool, fusion

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))


def test_the_live_pool_and_a_machine_that_is_gone(tmp_path: Path):
    model = tmp_path / "model.json"
    model.write_text(json.dumps({**TINY, "vocab_size": 128}))

    def planned(*flags: object) -> dict[str, Any]:
        sizes = ("--batch", 4, "--microbatches", 2, "--sequence", 32)
        done = fusion("plan", model, "--home", pool.owner, *sizes, "--json", tmp_path / "plan.json", *flags)
        assert done.code == 0, done.err
        written = json.loads((tmp_path / "plan.json").read_text())
        return {**written, "out": done.out}

    with LivePool(tmp_path / "pool", peers=("attic", "barn")) as pool:
        found = planned("--stages", 2)
        assert {stage["peer"] for stage in found["stages"]} == {"attic", "barn", "this machine"}
        assert found["stages"][-1]["roles"] == ["loss"]
        assert found["excluded"] == []
        assert all(link["latency_s"] > 0 for link in found["links"])
        pool.kill("barn")
        until = time.monotonic() + PATIENCE_S
        while not (left := planned()["excluded"]):
            assert time.monotonic() < until, "the broker never missed it"
        assert [entry["peer"] for entry in left] == ["barn"]
        assert left[0]["reason"] in ("its heartbeats have stopped.", "it is not connected.")
        refused = fusion("plan", model, "--home", pool.owner, "--require", "barn")
        assert refused.code == 2
        assert "there is no peer 'barn'" in refused.err
