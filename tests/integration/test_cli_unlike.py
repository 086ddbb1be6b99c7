"""`fusion train` where the machine that is left is of another processor: what the terminal says, and which bits result.

Two equal machines run the job, one that computes other bits stands by. None has the memory for the whole model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest

from harness.levels import variables_of
from harness.live_pool import TINY, LivePool, Process, fusion, write_recipe, write_text

pytestmark = [pytest.mark.slow, pytest.mark.long]

STEPS: Final = 20
EQUAL: Final = ("one", "two")
MEMORY: Final = ("--max-memory", "16MB")
"""A stage takes 13 MB, both of them more than this."""
GRACE_S: Final = 4
WITHIN_S: Final = 5.0
"""In which the terminal says what the job waits for."""


class SmallPool(LivePool):
    """Whose machines lend little."""

    def start(self, name: str, *more: object, program: Sequence[object] = ()) -> Process:
        self.members[name] = Process(
            *("join", *more, "--home", self.directory / name, "--host", "127.0.0.1", "--threads", "1"),
            *("--name", name, *MEMORY),
            program=program,
        )
        return self.members[name]


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LivePool]:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))
    with SmallPool(tmp_path / "pool", EQUAL) as opened:
        with patch.dict(os.environ, variables_of("sse")):
            # Its libraries read the variables when they are loaded: a process of its own.
            unlike = opened.start("unlike", opened.invite(), program=("-m", "fusionai"))
        unlike.wait_for("In pool")
        yield opened


def command(pool: LivePool, directory: Path, **faults: object) -> tuple[object, ...]:
    directory.mkdir()
    write_text(directory / "text.txt")
    recipe = write_recipe(
        directory / "r.toml",
        job__steps=STEPS,
        model__config={**TINY, "hidden_size": 128, "intermediate_size": 512},
        train__recompute="never",
        train__offload="never",
        train__offload_weights="never",
        placement={"stages": 2, "required": [*EQUAL]},
        faults=faults,
    )
    return ("train", recipe, "--home", pool.owner, "--threads", 1, "--json", directory / "out.json")


def figures(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "out.json").read_text())


def undisturbed(pool: LivePool, tmp_path: Path) -> list[float]:
    done = fusion(*command(pool, tmp_path / "undisturbed"))
    assert done.code == 0, done.err
    return figures(tmp_path / "undisturbed")["losses"]


def bereaved(pool: LivePool, directory: Path, **faults: object) -> tuple[Process, str]:
    """A job that has lost the machine of its second stage, and that machine's name."""
    job = Process(*command(pool, directory, **faults))
    job.wait_for("step 4/")
    lost = re.findall(r"^  stage 1: (\w+),", job.text, re.MULTILINE)[0]
    assert lost in EQUAL
    pool.kill(lost)
    return job, lost


def test_an_exact_job_says_what_would_help_waits_for_it_and_keeps_its_bits(pool: LivePool, tmp_path: Path):
    losses = undisturbed(pool, tmp_path)
    directory = tmp_path / "bereaved"
    job, lost = bereaved(pool, directory, takeover="exact", grace_s=GRACE_S)
    waits = job.wait_for("the job waits")
    assert f"computes the same bits as {lost} did (stage 1)" in waits
    assert 'takeover = "exact" demands the same bits' in waits
    assert "What would help: a machine with the processor, device and settings of the one that is lost" in waits
    assert 'or takeover = "any" in [faults], which would mean going on with unlike' in waits
    assert "`fusion invite` lets another machine join" in waits
    fell, said = (next(at for at, line in enumerate(job.lines) if words in line) for words in ("is lost", "job waits"))
    assert job.came_at_s[said] - job.came_at_s[fell] < WITHIN_S

    pool.start("three", pool.invite()).wait_for("In pool")
    assert job.ended() == 0, job.text
    assert job.text.count("the job waits") == 1
    seen = figures(directory)
    assert seen["losses"] == losses
    assert seen["tolerant_takeovers"] == []
    (fault,) = seen["faults"]
    assert (fault["name"], fault["numerics"]) == (lost, "exact")
    assert f"{lost} is lost (stage 1)" in job.text
    assert "three takes over" in job.text
    assert "tolerant, " not in job.text.replace(waits, "")


def test_by_default_it_goes_on_with_the_unlike_machine_and_says_so_once_wherever_one_looks(
    pool: LivePool, tmp_path: Path
):
    directory = tmp_path / "bereaved"
    job, lost = bereaved(pool, directory, grace_s=GRACE_S)
    assert job.ended() == 0, job.text
    waits = job.wait_for("the job waits")
    assert "going on with unlike, of other numerics (tolerant, not bit-exact) in" in waits
    assert len(re.findall(r"unlike takes over .* \(other numerics: tolerant, not bit-exact", job.text)) == 1
    seen = figures(directory)
    assert len(seen["losses"]) == STEPS
    (fault,) = seen["faults"]
    assert (fault["name"], fault["numerics"]) == (lost, "tolerant")
    (takeover,) = seen["tolerant_takeovers"]
    assert takeover["stages"] == [1]
    manifest = json.loads((Path(seen["checkpoint"]) / "fusion" / "manifest.json").read_text())
    assert json.dumps(takeover["peers"][0]) in json.dumps(manifest)
    report = (directory / "run" / "report.html").read_text(encoding="utf-8")
    assert "tolerant, not bit-exact" in report
