"""May a job go on under a changed recipe? Decides which settings may change; everything else is history already made.

Neighbours: the driver compares the recipe it is given with the one kept in the job's directory.
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
"""Settings that change no number of the training."""

_encoder: Final = msgspec.json.Encoder()


def encode_recipe(recipe: Recipe) -> bytes:
    """As it is kept in the job's directory."""
    return msgspec.json.format(_encoder.encode(recipe), indent=1)


def differences(before: Recipe, now: Recipe) -> tuple[str, ...]:
    """Dotted names of settings that differ, in the recipe's order."""
    return tuple(_differences(msgspec.to_builtins(before), msgspec.to_builtins(now), ""))


def check_resumable(kept: bytes, now: Recipe) -> None:
    """`kept`: what `encode_recipe` gave when the job started. Raises `RecipeError` naming the settings that must not
    change. More (or fewer) steps are fine as long as no schedule depends on their number."""
    try:
        before = msgspec.json.decode(kept, type=Recipe)
    except msgspec.DecodeError as problem:
        raise RecipeError(
            f"the recipe kept in {now.directory} is not understood ({problem}).",
            hint="Give the job a new directory.",
        ) from None
    # Who trains on beside an exchange waits for the job's last one, so that its number is part of what was computed.
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
            hint="Undo that, or give the job another name or directory.",
        )


def _differences(before: object, now: object, name: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            yield from _differences(before.get(key), now.get(key), f"{name}.{key}" if name else str(key))
    elif before != now:
        yield name
