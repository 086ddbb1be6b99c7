"""A machine that lends itself with JAX, as people start it: it trains beside PyTorch, and never loads PyTorch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fusionai.backends.tolerance import TOLERANCES
from harness.live_pool import LivePool, Process, fusion, write_recipe, write_text

pytest.importorskip("jax", reason="the extra fusionai[jax] is not installed")
pytestmark = pytest.mark.slow


def trained(pool: LivePool, directory: Path, **changes: object) -> dict[str, Any]:
    directory.mkdir()
    write_text(directory / "text.txt")
    settings: dict[str, object] = {"job__steps": 8, "train__clip_norm": 1.0, "placement": {"stages": 2}, **changes}
    recipe = write_recipe(directory / "r.toml", **settings)
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
            daemon, worker = (
                Path(f"/proc/{pid}/maps").read_text()
                for pid in (third.process.pid, *(child.pid for child in psutil.Process(third.process.pid).children()))
            )
            assert "jaxlib" in worker
            assert "jaxlib" not in daemon
            assert "libtorch" not in daemon + worker


SIZES: dict[str, object] = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {**SIZES, "intermediate_size": 64, "num_key_value_heads": 1, "max_position_embeddings": 32},
    "qwen3": {
        **SIZES,
        "intermediate_size": 64,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 32,
    },
    "gpt2": {
        "n_embd": 32,
        "n_layer": 6,
        "n_head": 2,
        "n_positions": 32,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "attn_pdrop": 0.1,
    },
}


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_frameworks_in_four_processes_train_as_pytorch_alone(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty steps of AdamW; every machine holds a stage, so that both meet."""
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))
    changes: dict[str, object] = {
        "job__steps": 50,
        "model": {"config": {"model_type": family, **FAMILIES[family]}},
        "placement": {"stages": 4},
        "faults": {"takeover": "tolerant"},
    }
    with LivePool(tmp_path, peers=("one", "two", "three", "four")) as pool:
        pure = trained(pool, tmp_path / "pure", **changes)
        for name, instead in (("two", "five"), ("four", "six")):
            pool.kill(name)
            pool.start(instead, pool.invite(), "--backend", "jax").wait_for("In pool")
        mixed = trained(pool, tmp_path / "mixed", **changes)
    assert len({stage["peer"] for stage in mixed["plan"]["stages"]}) == 5, "four machines, and the owner"
    assert len(mixed["losses"]) == 50
    apart = np.abs(np.array(mixed["losses"]) / np.array(pure["losses"]) - 1)
    assert apart.max() <= TOLERANCES["float32"].loss, apart.max()


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("working", "victim"), [(["one", "two"], "two"), (["one", "three"], "three")])
def test_a_machine_of_the_other_framework_takes_over(
    working: list[str], victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's stage by the JAX machine that stands by, and the other way round: no step lost, and it is said."""
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))
    changes: dict[str, object] = {"job__steps": 40, "faults": {"takeover": "tolerant"}}
    with LivePool(tmp_path, peers=("one", "two")) as pool:
        pure = trained(pool, tmp_path / "pure", **changes)
        pool.start("three", pool.invite(), "--backend", "jax").wait_for("In pool")
        directory = tmp_path / "mixed"
        directory.mkdir()
        write_text(directory / "text.txt")
        placed = {"stages": 2, "required": working}
        recipe = write_recipe(directory / "r.toml", train__clip_norm=1.0, **{**changes, "placement": placed})
        figures = directory / "figures.json"
        job = Process("train", recipe, "--home", pool.owner, "--threads", 1, "--json", figures)
        job.wait_for("step 8/40")
        pool.kill(victim)
        assert job.ended() == 0, job.text
        mixed = json.loads(figures.read_text())
    assert len(mixed["faults"]) == 1, job.text
    assert "tolerant" in job.text
    assert len(mixed["losses"]) == 40
    apart = np.abs(np.array(mixed["losses"]) / np.array(pure["losses"]) - 1)
    assert apart.max() <= TOLERANCES["float32"].loss, apart.max()
