"""One `fusion join` lends several devices of a box: two members on one processor stand in for two cards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.live_pool import LivePool, Process, fusion, write_recipe, write_text

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePool]:
    with LivePool(tmp_path_factory.mktemp("pool")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))


def members(pool: LivePool, directory: Path) -> list[dict[str, Any]]:
    done = fusion("pool", "--home", pool.owner, "--json", directory / "pool.json")
    assert done.code == 0, done.err
    listed = json.loads((directory / "pool.json").read_text())["members"]
    return [one for one in listed if one["state"] != "lost"]


def trained(pool: LivePool, directory: Path, stages: int) -> dict[str, Any]:
    directory.mkdir()
    write_text(directory / "text.txt")
    recipe = write_recipe(directory / "r.toml", placement={"stages": stages})
    done = fusion("train", recipe, "--home", pool.owner, "--threads", 1, "--json", directory / "out.json")
    assert done.code == 0, done.err + done.out
    return json.loads((directory / "out.json").read_text()) | {"said": done.out}


def test_one_join_lends_both_and_a_job_uses_both(pool: LivePool, tmp_path: Path):
    box = pool.start("box", pool.invite(), "--device", "cpu,cpu", "--json", tmp_path / "join.json")
    box.wait_for("as box cpu 1 (")
    box.wait_for("as box cpu 2 (")
    announced = json.loads((tmp_path / "join.json").read_text())
    assert len({one["peer"] for one in announced["devices"]}) == 2
    assert announced["peer"] == announced["devices"][0]["peer"]

    there = {one["name"]: one for one in members(pool, tmp_path)}
    assert sorted(there) == ["box cpu 1", "box cpu 2"]
    assert all(one["memory_bytes"] == 500_000_000 for one in there.values()), "each lends half of --max-memory"

    measured: set[str] = set()
    while len(measured) < 2:  # a heartbeat brings them; the test's timeout is the limit
        views = members(pool, tmp_path)
        measured = {link["peer"] for one in views for link in one["links"] if link["probed_bytes_per_s"]}
        box.wait_until(lambda: None, 0.5)
    assert measured == {one["peer"] for one in there.values()}, "the link between them was measured"

    run = trained(pool, tmp_path / "two", stages=2)
    assert set(re.findall(r"stage \d+: (box cpu \d)", run["said"])) == {"box cpu 1", "box cpu 2"}
    assert run["losses"] == trained(pool, tmp_path / "one", stages=1)["losses"], "a cut changes no bit"

    assert fusion("leave", "--home", pool.directory / "box").code == 0
    assert box.ended() == 0, box.text
    assert members(pool, tmp_path) == []


def test_the_members_are_the_same_after_a_restart(pool: LivePool, tmp_path: Path):
    box = pool.start("twice", pool.invite(), "--device", "cpu,cpu")
    box.wait_for("as twice cpu 2 (")
    before = {one["peer"] for one in members(pool, tmp_path)}
    pool.kill("twice")
    again = pool.start("twice", "--device", "cpu,cpu")
    again.wait_for("as twice cpu 1 (")
    again.wait_for("as twice cpu 2 (")
    assert {one["peer"] for one in members(pool, tmp_path)} == before
    again.interrupt()
    assert again.ended() == 0


def test_two_jobs_run_on_one_machine_at_the_same_time(pool: LivePool, tmp_path: Path):
    box = pool.start("shared", pool.invite(), "--jobs", 2)
    box.wait_for("as shared 1 (")
    box.wait_for("as shared 2 (")
    write_text(tmp_path / "text.txt")
    jobs: list[Process] = []
    for name in ("first", "second"):
        recipe = write_recipe(tmp_path / f"{name}.toml", job__name=name, job__steps=100_000, job__directory=name)
        jobs.append(Process("train", recipe, "--home", pool.owner, "--threads", 1, "--json", tmp_path / f"{name}.json"))
        jobs[-1].wait_for("step 3/")
    steps_seen = len(jobs[0].lines)
    jobs[0].wait_until(lambda: len(jobs[0].lines) > steps_seen + 3 or None)
    working = {one["name"]: one["job"].partition("-")[0] for one in members(pool, tmp_path)}
    assert sorted(working) == ["shared 1", "shared 2"]
    assert sorted(working.values()) == ["first", "second"]
    for job in jobs:
        job.interrupt()
        assert job.ended() == 130, job.text
    losses = [json.loads((tmp_path / f"{name}.json").read_text())["losses"][:3] for name in ("first", "second")]
    assert losses[0] == losses[1]
    box.interrupt()
    assert box.ended() == 0


def test_a_standby_is_on_another_machine_than_its_stage(pool: LivePool, tmp_path: Path):
    """And after the machine with the stage is switched off, the job goes on from the standby's snapshot."""
    box = pool.start("double", pool.invite(), "--jobs", 2, "--share", "100%")
    box.wait_for("as double 2 (")
    other = pool.start("other", pool.invite(), "--share", "20%")
    other.wait_for("In pool")
    write_text(tmp_path / "text.txt")
    recipe = write_recipe(tmp_path / "r.toml", job__steps=100_000, placement={"stages": 1})
    job = Process("train", recipe, "--home", pool.owner, "--threads", 1)
    assert "spot checks: warm standbys recompute part of the work of stage 0" in job.wait_for("spot checks")
    job.wait_for("step 5/")
    there = {one["name"]: one for one in members(pool, tmp_path)}
    assert there["other"]["standby_of"] == [0], (
        {n: (o["stages"], o["standby_of"], o["flops_per_s"]) for n, o in there.items()},
        job.text,
    )
    assert {name for name, one in there.items() if one["stages"]} < {"double 1", "double 2"}
    pool.kill("double")
    assert "other" in job.wait_for("recovered after")
    job.interrupt()
    assert job.ended() == 130, job.text
    other.interrupt()
    assert other.ended() == 0


@pytest.mark.parametrize("devices", ["cuda:0,cuda:0", "auto,cpu", "cpu,", "tpu", "cuda:x", "cuda:0"])
def test_a_wrong_device_is_named(pool: LivePool, tmp_path: Path, devices: str):
    said = fusion("join", pool.invite(), "--home", tmp_path / "wrong", "--device", devices)
    assert said.code == 2
    assert "Traceback" not in said.err
    assert devices.split(",")[0] in said.err
