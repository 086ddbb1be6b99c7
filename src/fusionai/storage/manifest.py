"""The manifest of a checkpoint: names and fields. Opens no file.

`checkpoint` writes the manifest last; `reader` trusts only what it confirms.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from fusionai.coordination.training.evaluations import Evaluation
from fusionai.scheduling.problem.types import TolerantTakeover
from fusionai.storage.assembly import Assembly
from fusionai.storage.atomic import storage_errors, write_atomic

FORMAT: Final = "fusionai.checkpoint/1"
MANIFEST: Final = "fusion/manifest.json"
MANIFEST_HASH: Final = "fusion/manifest.sha256"
_STEP_NAME: Final = re.compile(r"^step-(\d{8,})$")


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Expected hash and size of a file."""

    sha256: str
    size_bytes: Annotated[int, Meta(ge=0)]


class CheckpointHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What all checkpoints of a job have in common, except `tolerant_takeovers`.

    `recipe`: as converted by `msgspec.to_builtins`. `aliases`: other name -> key of the same tensor (ties).
    `private_keys`: model keys outside the Hugging Face layout (buffers that are not saved). `adapter_keys`: if only an
    adapter is trained, its model keys; `base`: SHA-256 of the files it adapts, by name. `layout`: name -> parts of
    keys, for tensors in the model's files that are not a whole key.
    """

    graph_hash: str
    data_fingerprint: str = ""
    recipe: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    private_keys: frozenset[str] = frozenset()
    adapter_keys: frozenset[str] = frozenset()
    base: dict[str, str] = {}
    tolerant_takeovers: tuple[TolerantTakeover, ...] = ()
    """Takeovers up to this checkpoint on machines with other numerics. Differs between checkpoints."""
    layout: dict[str, Assembly] = {}


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Content of a checkpoint. Of tied tensors only the key is stored. `entries`: state entry -> file. `files`: all
    files but this one. `step`: number of steps applied. `assembled`: entries made of parts of the model's tensors in
    several files or under other names; `tensors` maps those tensors to files."""

    format: str = FORMAT
    step: Annotated[int, Meta(ge=0)]
    graph_hash: str
    data_fingerprint: str
    recipe: dict[str, Any]
    aliases: dict[str, str]
    entries: dict[str, str]
    files: dict[str, FileRecord]
    base: dict[str, str] = {}
    """Required files outside the checkpoint: name -> SHA-256."""
    tolerant_takeovers: tuple[TolerantTakeover, ...] = ()
    """Steps from which machines with other numerics computed; empty if all bits are those of the job's first plan."""
    assembled: dict[str, Assembly] = {}
    tensors: dict[str, str] = {}


def step_directory(root: Path, step: int) -> Path:
    """Return the directory of the checkpoint after `step` steps."""
    return root / f"step-{step:08d}"


def step_of(directory: Path) -> int | None:
    """Return the step in a directory's name; None if it is not a complete checkpoint."""
    match = _STEP_NAME.match(directory.name)
    return int(match[1]) if match else None


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
    """Return the complete checkpoint of the best evaluation, or None, and correct `best.json`. Raises
    `StorageError`."""
    if best is None or not step_directory(root, best.step).is_dir():
        forget_best(root)
        return None
    return name_best(root, best)


def forget_best(root: Path) -> None:
    """Remove `best.json`, because the checkpoint it names is gone. Raises `StorageError`."""
    with storage_errors(root / BEST_FILE, "removed"):
        (root / BEST_FILE).unlink(missing_ok=True)
