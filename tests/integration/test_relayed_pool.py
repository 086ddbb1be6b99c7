"""Peers that nobody can dial take part: real processes, everything between them over the broker's relay."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from harness.fault_proxy import free_port
from harness.live_pool import PATIENCE_S, LivePool, Process, fusion, write_recipe, write_text

pytestmark = pytest.mark.slow


def ways(pool: LivePool, path: Path) -> dict[str, list[str]]:
    """Of every member's links, by its name."""
    seen = fusion("pool", "--home", pool.owner, "--json", path)
    assert seen.code == 0, seen.err
    members: list[dict[str, Any]] = json.loads(path.read_text())["members"]
    return {member["name"]: [link["way"] for link in member["links"]] for member in members}


@pytest.mark.long
def test_a_job_runs_over_the_relay_and_waits_for_a_broker_that_is_away(tmp_path: Path):
    with LivePool(tmp_path) as pool:
        for name in ("one", "two"):
            # What they announce leads nowhere, as behind a router without a forwarded port.
            pool.start(name, pool.invite(), "--address", f"127.0.0.1:{free_port()}", "--relay")
        for name in ("one", "two"):
            assert "relay://" in pool.members[name].wait_for("In pool")
        fusion("join", pool.invite(), "--owner", "--home", pool.owner)
        write_text(tmp_path / "text.txt")
        recipe = write_recipe(tmp_path / "recipe.toml", placement={"stages": 2}, job__steps=100_000)
        job = Process("train", recipe, "--home", pool.owner, "--threads", 1)
        job.wait_for("step 3/")
        deadline_s = time.monotonic() + PATIENCE_S
        while (found := ways(pool, tmp_path / "pool.json")) != {"one": ["relay"] * 2, "two": ["relay"] * 2}:
            assert time.monotonic() < deadline_s, (found, job.text)
        shown = fusion("pool", "--home", pool.owner)
        assert "2 relay" in shown.out
        pool.broker.end()
        pool.open_broker()
        # Whether the links that went over it are missed first, or its own, is chance.
        noticed = ("is lost", "the broker can't be reached")
        assert job.wait_until(lambda: any(words in job.text for words in noticed) or None), job.text
        known = len(job.lines)
        assert job.wait_until(lambda: any("  loss " in line for line in job.lines[known:]) or None), job.text
        job.interrupt()
        assert job.ended() == 130, job.text
        assert "stopped (Ctrl-C)" in job.text
