"""Records the best checkpoint in a file `best.json` beside the checkpoints. The evaluations decide which is best.

`reader` keeps that checkpoint when it removes old ones, `commits` has the evaluations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from fusionai.coordination.training.evaluations import Evaluation
from fusionai.storage.atomic import storage_errors, write_atomic
from fusionai.storage.manifest import step_directory

BEST_FILE: Final = "best.json"


class Best(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of `best.json`. `checkpoint` is the name of the directory beside it."""

    step: int
    loss: float
    checkpoint: str


def name_best(root: Path, best: Evaluation) -> Path:
    """Write `best.json` and return the checkpoint's directory. Raises `StorageError`."""
    directory = step_directory(root, best.step)
    named = Best(step=best.step, loss=best.loss, checkpoint=directory.name)
    write_atomic(root / BEST_FILE, msgspec.json.encode(named) + b"\n")
    return directory


def best_checkpoint(root: Path, best: Evaluation | None) -> Path | None:
    """Return the complete checkpoint of the best evaluation, or None, and correct `best.json`.

    Raises `StorageError`.
    """
    if best is None or not step_directory(root, best.step).is_dir():
        forget_best(root)
        return None
    return name_best(root, best)


def forget_best(root: Path) -> None:
    """Remove `best.json`, because the checkpoint it names is gone. Raises `StorageError`."""
    with storage_errors(root / BEST_FILE, "removed"):
        (root / BEST_FILE).unlink(missing_ok=True)
