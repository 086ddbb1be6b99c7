"""`fusion train` of a recipe with `[replicas]`, as people use it: a broker and peers as processes on loopback."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from harness.live_pool import LivePool, Process, fusion, write_recipe, write_text

pytestmark = pytest.mark.slow

STEPS, EVERY, EARLY = 15, 5, 2
ROUNDS = 5
"""Of 1, 1, 3, 5 and 5 steps."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePool]:
    with LivePool(tmp_path_factory.mktemp("pool"), peers=("one", "two", "three", "four")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))


def recipe_in(directory: Path, steps: int = STEPS, count: int | str = 2, **changes: object) -> Path:
    directory.mkdir(exist_ok=True)
    write_text(directory / "text.txt")
    return write_recipe(
        directory / "r.toml",
        job__steps=steps,
        train__clip_norm=1.0,
        replicas={"count": count, "every": EVERY, "codec": "int8", "early_steps": EARLY},
        **changes,
    )


def command(pool: LivePool, recipe: Path) -> tuple[object, ...]:
    return ("train", recipe, "--home", pool.owner, "--threads", 1, "--json", recipe.with_suffix(".json"))


def trained(pool: LivePool, recipe: Path) -> dict[str, Any]:
    """Train in this process; the figures of `--json`."""
    done = fusion(*command(pool, recipe))
    assert done.code == 0, done.err + done.out
    return json.loads(recipe.with_suffix(".json").read_text()) | {"said": done.out}


def weights(figures: dict[str, Any]) -> dict[str, np.ndarray]:
    return load_file(Path(figures["checkpoint"]) / "model.safetensors")


def assert_equal(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    assert first.keys() == second.keys()
    for key, value in first.items():
        np.testing.assert_array_equal(value, second[key], err_msg=key)


@pytest.fixture(scope="module")
def undisturbed(pool: LivePool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained(pool, recipe_in(tmp_path_factory.mktemp("undisturbed")))


def test_two_replicas_agree(undisturbed: dict[str, Any]) -> None:
    figures = undisturbed
    assert (figures["steps"], figures["stopped"], figures["failed"]) == (STEPS, None, {})
    assert len(figures["losses"]) == STEPS
    assert figures["losses"][-1] < figures["losses"][0]
    first, second = figures["replicas"]
    assert_equal(weights(first), weights(second))
    machines = [{stage["peer"] for stage in one["plan"]["stages"][:-1]} for one in (first, second)]
    assert not machines[0] & machines[1], "each has machines of its own"
    assert first["losses"] != second["losses"], "and data of its own"
    exchange = figures["exchange"]
    assert exchange["rounds"] == ROUNDS
    trained_bytes = sum(value.nbytes for value in weights(first).values())
    assert exchange["every_step_bytes"] == 2 * STEPS * trained_bytes
    unpacked_bytes = 2 * ROUNDS * trained_bytes
    assert unpacked_bytes / 4 < exchange["exchanged_bytes"] < unpacked_bytes / 3
    assert 0 < exchange["owner_line_bytes"] < unpacked_bytes / 50, "it carries decisions only"
    assert exchange["times_less"] == pytest.approx(exchange["every_step_bytes"] / exchange["exchanged_bytes"])
    for words in (
        "replica 0:",
        "replica 1:",
        f"step {STEPS}/{STEPS}",
        f"round {ROUNDS}: 2 replicas synchronised",
        "x less",
    ):
        assert words in figures["said"], words
    for one in (first, second):
        assert (Path(one["directory"]) / "report.html").is_file()


def test_done_is_done(pool: LivePool, undisturbed: dict[str, Any]) -> None:
    recipe = Path(undisturbed["directory"]).parent / "r.toml"
    again = trained(pool, recipe)
    assert f"all {STEPS} steps are already done" in again["said"]
    assert again["checkpoint"] == undisturbed["checkpoint"]
    assert again["losses"] == undisturbed["losses"]


@pytest.mark.long
def test_stopped_it_resumes_and_no_bit_changes(pool: LivePool, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path / "stopped")
    running = Process(*command(pool, recipe))
    running.wait_for("replica 0  step 6/")
    running.interrupt()
    assert running.ended() == 130, running.text
    assert "the same command resumes" in running.text
    figures = trained(pool, recipe)
    assert figures["losses"] == undisturbed["losses"]
    assert_equal(weights(figures), weights(undisturbed))


@pytest.mark.long
def test_the_drivers_process_is_killed_and_no_bit_changes(
    pool: LivePool, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    recipe = recipe_in(tmp_path / "killed")
    running = Process(*command(pool, recipe))
    running.wait_for("round 1:")
    running.process.send_signal(signal.SIGKILL)
    running.end()
    figures = trained(pool, recipe)
    assert figures["losses"] == undisturbed["losses"]
    assert_equal(weights(figures), weights(undisturbed))


def test_what_can_not_be_changed(pool: LivePool, undisturbed: dict[str, Any]) -> None:
    directory = Path(undisturbed["directory"]).parent
    other = write_recipe(
        directory / "other.toml",
        job__steps=STEPS,
        train__clip_norm=1.0,
        replicas={"count": 3, "every": EVERY, "codec": "int8", "early_steps": EARLY},
    )
    done = fusion("train", other, "--home", pool.owner)
    assert done.code == 2
    assert "changed since the job in" in done.err
    assert "replicas.count" in done.err


@pytest.mark.long
def test_more_replicas_than_machines(pool: LivePool, tmp_path: Path) -> None:
    figures = trained(pool, recipe_in(tmp_path / "many", steps=5, count=6))
    assert len(figures["replicas"]) == 4
    assert "replica 5 waits for machines: the pool has machines for 4 of 6 replicas" in figures["said"]


@pytest.mark.long
def test_as_many_as_pay_exchange_between_their_machines(pool: LivePool, tmp_path: Path) -> None:
    figures = trained(pool, recipe_in(tmp_path / "auto", steps=10, count="auto"))
    assert (figures["steps"], figures["failed"]) == (10, {})
    count = len(figures["replicas"])
    assert count > 1
    assert figures["exchange"]["rounds"] == ROUNDS - 1
    first, *others = (weights(one) for one in figures["replicas"])
    for other in others:
        assert_equal(first, other)


@pytest.mark.long
def test_a_replica_joins_is_lost_and_returns_and_the_other_never_waits(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    def rounds(count: int, others: str) -> bool | None:
        """True once `count` rounds of `others` were said."""
        return sum(f": {others} synchronised" in line for line in running.lines) >= count or None

    with LivePool(tmp_path_factory.mktemp("own"), peers=("one",)) as pool:
        directory = tmp_path / "elastic"
        directory.mkdir()
        write_text(directory / "text.txt")
        recipe = write_recipe(
            directory / "r.toml",
            job__steps=100_000,
            job__checkpoint_every=20,
            output={"tensorboard": False},
            replicas={
                "count": 2,
                "every": EVERY,
                "codec": "int8",
                "deadline_s": 5.0,
                "early_steps": 1000,
            },
        )
        running = Process(*command(pool, recipe))
        running.wait_for("replica 1 waits for machines: the pool has machines for 1 of 2 replicas")
        running.wait_for(": 1 of 2 replicas synchronised")
        pool.start("two", pool.invite())
        running.wait_for("replica 1 starts at step")
        assert running.wait_until(lambda: rounds(2, "2 replicas")), running.text
        alone = sum("1 of 2 replicas synchronised" in line for line in running.lines)
        pool.kill("two")
        assert running.wait_until(lambda: rounds(alone + 3, "1 of 2 replicas")), running.text
        together = sum(": 2 replicas synchronised" in line for line in running.lines)
        pool.start("two")
        assert running.wait_until(lambda: rounds(together + 2, "2 replicas")), running.text
        running.interrupt()
        assert running.ended() == 130, running.text
        assert "Traceback" not in running.text
        figures = json.loads(recipe.with_suffix(".json").read_text())
        newcomer = figures["replicas"][1]
        assert newcomer["first_step"] > 0
        late = newcomer["losses"][0]
        assert late < figures["replicas"][0]["losses"][0], "it begins where the others are, not at the beginning"
