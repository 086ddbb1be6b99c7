"""A worker process is lost in the middle of a job: a standby goes on with the same losses, and the daemon lives on."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from harness.live_pool import TINY, LivePool, Process, fusion, write_recipe, write_text
from harness.variants import kept

pytestmark = pytest.mark.slow

STEPS = 16
NAMES = ("one", "two", "three")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePool]:
    """Daemons with workers of their own: the tests' forked ones are not their children."""
    with LivePool(tmp_path_factory.mktemp("pool")) as opened:
        for name in NAMES:
            opened.start(name, opened.invite(), program=("-m", "fusionai"))
        for name in NAMES:
            opened.members[name].wait_for("In pool")
        yield opened


@pytest.fixture(scope="module")
def losses(pool: LivePool, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Of the undisturbed run."""
    directory = tmp_path_factory.mktemp("undisturbed")
    done = fusion(*command(pool, directory))
    assert done.code == 0, done.err
    return result(directory)


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))


def command(pool: LivePool, directory: Path) -> tuple[object, ...]:
    write_text(directory / "text.txt")
    # A worker that recomputes returns freed memory, and its activations take more than a mebibyte each, which has a
    # mapping of its own, so that a limit on it is felt in the next step.
    train = {"train__batch_size": 16, "train__clip_norm": 1.0, "train__recompute": "always"}
    model = {"config": {**TINY, "intermediate_size": 2048}}
    settings = {"job__steps": STEPS, "model": model, **train, "placement": {"stages": 2}}
    recipe = write_recipe(directory / "r.toml", **settings)
    return ("train", recipe, "--home", pool.owner, "--threads", 1, "--json", directory / "out.json")


def result(directory: Path) -> list[float]:
    return json.loads((directory / "out.json").read_text())["losses"]


def worker_of(daemon: Process) -> psutil.Process:
    (worker,) = psutil.Process(daemon.process.pid).children()
    return worker


def no_more_memory(pid: int) -> None:
    """What it has is all that it gets."""
    import resource

    used_kib = next(
        int(line.split()[1])
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmData:")
    )
    limit = used_kib * 1024 // 2
    resource.prlimit(pid, resource.RLIMIT_DATA, (limit, limit))


FAULTS: dict[str, Callable[[int], object]] = {
    "crash": lambda pid: os.kill(pid, signal.SIGSEGV),
    "killed for its memory": lambda pid: os.kill(pid, signal.SIGKILL),
    "no memory": no_more_memory,
    "hang": lambda pid: os.kill(pid, signal.SIGSTOP),
}


@pytest.mark.skipif(sys.platform != "linux", reason="the limits of another process can be set on Linux only")
@pytest.mark.parametrize("fault", kept(FAULTS, ["crash"]))
def test_the_job_goes_on_bit_for_bit_and_the_daemon_lives(
    pool: LivePool, losses: list[float], tmp_path: Path, fault: str
):
    job = Process(*command(pool, tmp_path))
    job.wait_for("step 4/")
    name = re.findall(r"^  stage 1: (\w+),", job.text, re.MULTILINE)[0]
    daemon = pool.members[name]
    before = daemon.process.pid, worker_of(daemon).pid
    FAULTS[fault](before[1])
    job.wait_for("takes over")
    assert job.ended() == 0, job.text
    assert result(tmp_path) == losses
    assert daemon.lives
    assert daemon.process.pid == before[0]
    assert all(pool.members[other].lives for other in NAMES)
