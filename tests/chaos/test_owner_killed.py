"""A job owner that is killed and never comes back: its machines are free for another owner's job after two minutes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from harness.live_pool import LivePool, Process, fusion, write_recipe, write_text

pytestmark = pytest.mark.long

PEERS = ("one", "two")
LOOK_S = 1.0


def command(directory: Path, home: Path, steps: int) -> tuple[object, ...]:
    directory.mkdir()
    write_text(directory / "text.txt")
    recipe = write_recipe(directory / "r.toml", job__steps=steps, placement={"stages": len(PEERS)})
    return ("train", recipe, "--home", home, "--threads", 1, "--json", directory / "out.json")


def members(home: Path, answer: Path) -> list[dict[str, Any]]:
    looked = fusion("pool", "--home", home, "--json", answer)
    assert looked.code == 0, looked.err
    return json.loads(answer.read_text())["members"]


@pytest.mark.timeout(1200)
def test_the_machines_of_a_killed_owner_are_free_for_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))
    other, answer = tmp_path / "other", tmp_path / "pool.json"
    with LivePool(tmp_path / "pool", PEERS) as pool:
        entered = fusion("join", pool.invite(), "--owner", "--home", other)
        assert entered.code == 0, entered.err
        pids = {name: member.process.pid for name, member in pool.members.items()}
        job = Process(*command(tmp_path / "first", pool.owner, 100_000))
        job.wait_for("step 4/")
        job.end()
        killed_s = time.monotonic()
        assert {one["state"] for one in members(other, answer)} == {"active"}
        while {one["state"] for one in members(other, answer)} != {"idle"}:
            # Until the next look, or until the machine says something.
            pool.members["one"].wait_until(lambda: None, LOOK_S)
        free_s = time.monotonic() - killed_s
        done = fusion(*command(tmp_path / "second", other, 4))
        assert done.code == 0, done.err
        assert json.loads((tmp_path / "second" / "out.json").read_text())["steps"] == 4
        assert {name: one.process.pid for name, one in pool.members.items() if one.lives} == pids
    with capsys.disabled():
        print(f"\nfree {free_s:.0f} s after their owner was killed")  # noqa: T201 - figures
