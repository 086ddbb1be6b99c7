"""Whether a job may resume with a changed recipe. Decides which settings may change after the job has started.

Neighbours: the driver compares the given recipe with the one stored in the job's directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from fusionai.corpus.recipe import Recipe
from fusionai.primitives.errors import RecipeError

_FREE: Final = (
    "path",
    "directory",
    "job.directory",
    "job.checkpoint_every",
    "job.keep_checkpoints",
    "data.bad_rows",
    "evaluation.every",
    "evaluation.patience",
    "evaluation.minimum_improvement",
    "evaluation.keep_best",
    "placement",
    "privacy",
    "faults",
    "replicas.deadline_s",
    "output",
)
"""Settings that do not change any number in training."""

_encoder: Final = msgspec.json.Encoder()


def encode_recipe(recipe: Recipe) -> bytes:
    """The recipe as it is stored in the job's directory."""
    return msgspec.json.format(_encoder.encode(recipe), indent=1)


def differences(before: Recipe, now: Recipe) -> tuple[str, ...]:
    """Dotted names of settings that differ, in the recipe's order."""
    return tuple(_differences(msgspec.to_builtins(before), msgspec.to_builtins(now), ""))


def check_resumable(kept: bytes, now: Recipe) -> None:
    """Raise `RecipeError` with the changed settings if they must not change. `kept`: the result of `encode_recipe` when
    the job started. The number of steps may change if no schedule depends on it."""
    try:
        before = msgspec.json.decode(kept, type=Recipe)
    except msgspec.DecodeError as problem:
        raise RecipeError(
            f"the recipe stored in {now.directory} can't be read ({problem}).",
            hint="Give the job a new directory.",
        ) from None
    # If exchanges overlap with steps, only the job's last one does not, so the number of steps affects the results.
    waits_at_the_end = now.replicas is not None and now.replicas.overlap > 0
    free = (*_FREE, "job.steps") if now.train.schedule == "constant" and not waits_at_the_end else _FREE
    changed = [
        name
        for name in differences(before, now)
        if not any(name == allowed or name.startswith(f"{allowed}.") for allowed in free)
    ]
    if changed:
        raise RecipeError(
            f"{Path(now.path).name}: changed since the job in {now.directory} began: {', '.join(changed)}.",
            hint="Undo the changes, or give the job another name or directory.",
        )


def _differences(before: object, now: object, name: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            yield from _differences(before.get(key), now.get(key), f"{name}.{key}" if name else str(key))
    elif before != now:
        yield name
