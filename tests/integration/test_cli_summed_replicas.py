"""`fusion train` with `[replicas] gradients = "summed"`, as people use it: one training on two chains of machines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from harness.live_pool import LivePool, Process, fusion, write_recipe, write_text

pytestmark = [pytest.mark.slow, pytest.mark.long]

STEPS = 12
NAMES = ("one", "two", "three", "four", "five")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePool]:
    with LivePool(tmp_path_factory.mktemp("pool"), peers=NAMES) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))


def recipe_in(directory: Path, replicas: int = 2) -> Path:
    """Four microbatches a step, shared among so many replicas of two stages."""
    directory.mkdir(exist_ok=True)
    write_text(directory / "text.txt")
    more: dict[str, object] = {"replicas": {"count": replicas, "gradients": "summed"}} if replicas > 1 else {}
    return write_recipe(
        directory / "r.toml",
        job__steps=STEPS,
        train__batch_size=8,
        train__microbatches=4,
        train__clip_norm=1.0,
        placement={"stages": 2},
        **more,
    )


def command(pool: LivePool, recipe: Path) -> tuple[object, ...]:
    return ("train", recipe, "--home", pool.owner, "--threads", 1, "--json", recipe.with_suffix(".json"))


def trained(pool: LivePool, recipe: Path) -> dict[str, Any]:
    """Train in this process; the figures of `--json`."""
    done = fusion(*command(pool, recipe))
    assert done.code == 0, done.err + done.out
    return json.loads(recipe.with_suffix(".json").read_text()) | {"said": done.out}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same losses and the same weights, to the bit."""
    assert found["losses"] == expected["losses"]
    first, second = (load_file(Path(one["checkpoint"]) / "model.safetensors") for one in (found, expected))
    assert first.keys() == second.keys()
    for key, value in first.items():
        np.testing.assert_array_equal(value, second[key], err_msg=key)


@pytest.fixture(scope="module")
def summed(pool: LivePool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained(pool, recipe_in(tmp_path_factory.mktemp("summed")))


def test_it_is_one_training(pool: LivePool, summed: dict[str, Any], tmp_path: Path) -> None:
    """The same losses as one chain of stages, but for the order of sums."""
    stages = [stage for stage in summed["plan"]["stages"] if "stage" in stage["roles"]]
    assert [stage["replica"] for stage in stages] == [0, 0, 1, 1]
    assert len({stage["peer"] for stage in stages}) == 4
    assert "2 replicas of 4 peers" in summed["said"]
    chain = trained(pool, recipe_in(tmp_path / "chain", replicas=1))
    assert {stage["replica"] for stage in chain["plan"]["stages"]} == {0}
    np.testing.assert_allclose(summed["losses"], chain["losses"], rtol=1e-5)
    assert (Path(summed["directory"]) / "report.html").is_file()


@pytest.mark.long
def test_it_resumes_and_no_bit_changes(pool: LivePool, summed: dict[str, Any], tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path / "stopped")
    running = Process(*command(pool, recipe))
    running.wait_for("step 5/")
    running.interrupt()
    assert running.ended() == 130, running.text
    assert_equal(trained(pool, recipe), summed)


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.long
def test_a_machine_is_killed_and_no_bit_changes(
    replica: int, pool: LivePool, summed: dict[str, Any], tmp_path: Path
) -> None:
    recipe = recipe_in(tmp_path / "killed")
    running = Process(*command(pool, recipe))
    running.wait_for("step 4/")
    words = next(line for line in running.lines if f"replica {replica}," in line).replace(",", " ").split()
    victim = next(name for name in NAMES if name in words)
    pool.kill(victim)
    assert running.ended() == 0, running.text
    figures = json.loads(recipe.with_suffix(".json").read_text())
    assert figures["faults"], "it was noticed"
    assert victim in running.text
    pool.start(victim).wait_for("In pool")
    assert_equal(figures, summed)
