"""A machine that lends itself with JAX, as people start it: it trains beside PyTorch, and never loads PyTorch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionai.backends.tolerance import TOLERANCES
from harness.live_pool import LivePool, fusion, write_recipe, write_text

pytest.importorskip("jax", reason="the extra fusionai[jax] is not installed")
pytestmark = pytest.mark.slow


def trained(pool: LivePool, directory: Path) -> dict[str, Any]:
    directory.mkdir()
    write_text(directory / "text.txt")
    recipe = write_recipe(directory / "r.toml", job__steps=8, train__clip_norm=1.0, placement={"stages": 2})
    figures = directory / "figures.json"
    done = fusion("train", recipe, "--home", pool.owner, "--threads", 1, "--json", figures)
    assert done.code == 0, done.err + done.out
    return json.loads(figures.read_text())


def test_a_jax_peer_trains_beside_pytorch_and_never_loads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))
    with LivePool(tmp_path, peers=("one", "two")) as pool:
        pure = trained(pool, tmp_path / "pure")
        pool.kill("two")
        third = pool.start("three", pool.invite(), "--backend", "jax")
        third.wait_for("In pool")
        mixed = trained(pool, tmp_path / "mixed")
        names = {stage["peer"] for stage in mixed["plan"]["stages"]}
        assert len(names) == 3, "both machines, and the owner"
        apart = np.abs(np.array(mixed["losses"]) / np.array(pure["losses"]) - 1)
        assert apart.max() <= TOLERANCES["float32"].loss
        if sys.platform == "linux":
            mapped = Path(f"/proc/{third.process.pid}/maps").read_text()
            assert "jaxlib" in mapped
            assert "libtorch" not in mapped
