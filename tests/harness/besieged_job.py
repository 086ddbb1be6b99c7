"""The job that chaos tests disturb: a small model with steps of about a tenth of a second, and how its end is checked.

The disturbed run goes on until it is stopped; then an undisturbed one of as many steps says what it should be.
Neighbours: `harness.siege` runs it, `harness.live_pool` writes the recipe.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

import msgspec

from fusionai.storage.commits import read_commits
from fusionai.storage.reader import latest
from fusionai.wire.messages import CommitRecord, Fence
from harness.live_pool import TINY, LivePool, fusion, write_recipe, write_text
from harness.siege import Siege

_ENDLESS: Final = 1_000_000
_DISTURBED, _UNDISTURBED = "disturbed", "undisturbed"


def seed_of(usual: int) -> int:
    """`FUSION_CHAOS_SEED` replays another run."""
    return int(os.environ.get("FUSION_CHAOS_SEED", usual))


def kills_of(usual: int) -> int:
    """`FUSION_CHAOS_KILLS` makes a long run longer or shorter."""
    return int(os.environ.get("FUSION_CHAOS_KILLS", usual))


def peers(count: int) -> tuple[str, ...]:
    return tuple(f"peer{number}" for number in range(count))


def besieged(pool: LivePool, stages: int, replicas: int = 1) -> Siege:
    """`replicas` of so many stages, their gradients summed at every step."""
    recipe = _recipe(pool.directory, _DISTURBED, stages, replicas, _ENDLESS)
    return Siege(pool, recipe, pool.directory / _DISTURBED)


def check(siege: Siege) -> None:
    """The disturbed run has ended: it made what an undisturbed one makes, and nobody had to be surprised."""
    siege.judge_all()
    pool = siege.pool
    disturbed, undisturbed = pool.directory / _DISTURBED, pool.directory / _UNDISTURBED
    plan = siege.plan()
    stages = len(plan.stages) // plan.replicas - 1
    recipe = _recipe(pool.directory, _UNDISTURBED, stages, plan.replicas, len(siege.official))
    shutil.copytree(disturbed / "tokens", undisturbed / "tokens")
    done = fusion("train", recipe, "--home", pool.owner, "--threads", 1)
    assert done.code == 0, done.err
    expected = read_commits(undisturbed / "journal.sqlite")
    assert [_result(one) for one in siege.official.values()] == [_result(one) for one in expected]
    assert _weights(disturbed) == _weights(undisturbed)
    assert siege.complaints() == []


def _result(record: CommitRecord) -> CommitRecord:
    """What a step came to, without whose step it was."""
    return msgspec.structs.replace(record, fence=Fence(0, 0, 0))


def _weights(run: Path) -> bytes:
    newest = latest(run / "checkpoints")
    assert newest is not None
    return (newest / "model.safetensors").read_bytes()


def _recipe(directory: Path, name: str, stages: int, replicas: int, steps: int) -> Path:
    text = directory / "text.txt"
    if not text.exists():
        write_text(text, lines=300)
    more: dict[str, object] = {"replicas": {"count": replicas, "gradients": "summed"}} if replicas > 1 else {}
    return write_recipe(
        directory / f"{name}.toml",
        job={"name": name, "steps": steps, "seed": 1, "directory": name, "checkpoint_every": 40},
        model__config={**TINY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6},
        train={"batch_size": 32, "microbatches": 4, "learning_rate": 3e-4, "clip_norm": 1.0},
        placement={"stages": stages},
        output={"tensorboard": False, "report": False},
        **more,
    )
