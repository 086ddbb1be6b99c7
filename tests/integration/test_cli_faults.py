"""`fusion train` while machines die: what the terminal says, how it ends, and that the losses never change."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.live_pool import LivePool, Process, fusion, write_recipe, write_text

pytestmark = pytest.mark.slow

STEPS = 30


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePool]:
    with LivePool(tmp_path_factory.mktemp("pool"), peers=("one", "two", "three")) as opened:
        yield opened


@pytest.fixture(scope="module")
def losses(pool: LivePool, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Of the undisturbed run."""
    directory = tmp_path_factory.mktemp("undisturbed")
    done = fusion(*command(pool, recipe_in(directory)))
    assert done.code == 0, done.err
    return figures(directory)["losses"]


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))


def recipe_in(directory: Path) -> Path:
    write_text(directory / "text.txt")
    settings = {"job__steps": STEPS, "train__batch_size": 16, "train__clip_norm": 1.0, "placement": {"stages": 2}}
    return write_recipe(directory / "r.toml", **settings)


def command(pool: LivePool, recipe: Path) -> tuple[object, ...]:
    return ("train", recipe, "--home", pool.owner, "--threads", 1, "--json", recipe.with_name("out.json"))


def figures(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "out.json").read_text())


def holder(job: Process, stage: int) -> str:
    """Who has the stage, as the plain output's first lines say."""
    return re.findall(rf"^  stage {stage}: (\w+),", job.text, re.MULTILINE)[0]


def test_a_spare_takes_over_and_who_was_lost_comes_back(pool: LivePool, losses: list[float], tmp_path: Path):
    recipe = recipe_in(tmp_path)
    job = Process(*command(pool, recipe))
    job.wait_for("step 4/")
    lost = holder(job, 1)
    pool.kill(lost)
    told = job.wait_for("takes over")
    assert re.search(
        rf"^step \d+: {lost} is lost \(stage 1\): .*; \w+ takes over from "
        r"(its snapshot of step \d+|the initial weights)(, with \d+ steps? recomputed)?; "
        r"recovered after [\d.]+ m?s \(step \d+ committed\)$",
        told,
    ), told
    pool.start(lost).wait_for("In pool")
    assert job.ended() == 0, job.text
    assert "Traceback" not in job.text
    seen = figures(tmp_path)
    assert seen["losses"] == losses
    (fault,) = seen["faults"]
    assert (fault["name"], fault["stages"], fault["numerics"], fault["recovered_s"] > 0) == (lost, [1], "exact", True)
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "takes over from" in report


@pytest.mark.long
def test_without_a_spare_the_job_waits_and_goes_on_by_itself(pool: LivePool, losses: list[float], tmp_path: Path):
    spare = next(iter(pool.members))
    pool.kill(spare)
    job = Process(*command(pool, recipe_in(tmp_path)))
    job.wait_for("step 4/")
    lost = holder(job, 0)
    pool.kill(lost)
    waiting = job.wait_for("the job waits")
    assert "`fusion invite`" in waiting
    pool.start(lost).wait_for("In pool")
    assert job.ended() == 0, job.text
    assert "is back and continues" in job.text
    assert figures(tmp_path)["losses"] == losses
    pool.start(spare).wait_for("In pool")


@pytest.mark.long
def test_an_interrupt_while_it_waits_ends_in_order_and_resumes(pool: LivePool, losses: list[float], tmp_path: Path):
    spare = next(iter(pool.members))
    pool.kill(spare)
    job = Process(*command(pool, recipe_in(tmp_path)))
    job.wait_for("step 4/")
    lost = holder(job, 1)
    pool.kill(lost)
    job.wait_for("the job waits")
    job.interrupt()
    assert job.ended() == 130, job.text
    assert "stopped (Ctrl-C)" in job.text
    assert "Traceback" not in job.text
    assert figures(tmp_path)["steps"] >= 4
    for name in (lost, spare):
        pool.start(name).wait_for("In pool")
    again = fusion(*command(pool, tmp_path / "r.toml"))
    assert again.code == 0, again.err
    assert figures(tmp_path)["losses"] == losses
