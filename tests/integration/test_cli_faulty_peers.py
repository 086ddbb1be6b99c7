"""`fusion train` on machines of which one gives wrong results: it is named, left out, and no loss is its."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import lying_peer
from harness.faulty_peers import LIES, Lie
from harness.live_pool import LivePool, fusion, write_recipe, write_text

pytestmark = pytest.mark.long

STEPS = 12
TOLD = tuple(lie for lie in LIES if lie != "four_bits")
"""Who computes with other weights for one task keeps a second program, and no gradients for later: in memory alone."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePool]:
    with LivePool(tmp_path_factory.mktemp("pool"), peers=("ada", "bob", "cleo")) as opened:
        yield opened


@pytest.fixture(scope="module")
def losses(pool: LivePool, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Of the honest alone."""
    directory = tmp_path_factory.mktemp("honest")
    trained = fusion(*command(pool, recipe_in(directory)))
    assert trained.code == 0, trained.err
    return figures(directory)["losses"]


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))


def recipe_in(directory: Path, **placement: object) -> Path:
    write_text(directory / "text.txt")
    settings = {"job__steps": STEPS, "train__batch_size": 8, "placement": {"stages": 2, **placement}}
    return write_recipe(directory / "r.toml", **settings)


def command(pool: LivePool, recipe: Path) -> tuple[object, ...]:
    return ("train", recipe, "--home", pool.owner, "--threads", 1, "--json", recipe.with_name("out.json"))


def figures(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "out.json").read_text())


@pytest.mark.parametrize("lie", TOLD)
def test_who_gives_wrong_results_is_named_and_left_out(lie: Lie, pool: LivePool, losses: list[float], tmp_path: Path):
    eve = f"eve-{lie}".replace("_", "-")
    pool.start(eve, pool.invite(), program=(lying_peer.__file__, lie, 0.2)).wait_for("In pool")
    trained = fusion(*command(pool, recipe_in(tmp_path, required=[eve])))
    pool.kill(eve)
    assert trained.code == 0, trained.err
    told = [line for line in trained.out.splitlines() if "gave wrong results" in line]
    assert told, trained.out
    assert all(eve in line for line in told), told
    seen = figures(tmp_path)
    assert seen["losses"] == losses
    (fault,) = seen["faults"]
    assert (fault["kind"], fault["name"]) == ("faulty", eve)
    assert 0 < seen["checks"]["checked_tasks"] <= seen["checks"]["tasks"]
