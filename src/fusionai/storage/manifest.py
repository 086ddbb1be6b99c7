"""What a checkpoint says about itself. Decides names and fields; opens nothing.

Neighbours: `checkpoint` writes it last, `reader` believes nothing that it does not confirm.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from fusionai.scheduling.types import TolerantTakeover
from fusionai.storage.assembly import Assembly

FORMAT: Final = "fusionai.checkpoint/1"
MANIFEST: Final = "fusion/manifest.json"
MANIFEST_HASH: Final = "fusion/manifest.sha256"
_STEP_NAME: Final = re.compile(r"^step-(\d{8,})$")


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file must be."""

    sha256: str
    size_bytes: Annotated[int, Meta(ge=0)]


class CheckpointHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What the job says about its checkpoints, the same for all of them.

    `recipe`: as `msgspec.to_builtins` gives it. `aliases`: further name -> key of the same tensor (ties).
    `private_keys`: model keys outside the Hugging Face layout (buffers that are not saved). `adapter_keys`:
    where only an adapter is trained, its model keys; `base`: SHA-256 of the files that it adapts, by name. `layout`:
    tensors of the model's files that are not a key as it is -> which parts of keys they are."""

    graph_hash: str
    data_fingerprint: str = ""
    recipe: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    private_keys: frozenset[str] = frozenset()
    adapter_keys: frozenset[str] = frozenset()
    base: dict[str, str] = {}
    tolerant_takeovers: tuple[TolerantTakeover, ...] = ()
    """What had happened to the job's bits when this one was made: of one checkpoint, not of all."""
    layout: dict[str, Assembly] = {}


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a checkpoint holds. Of tied tensors only the key is stored. `entries`: state entry -> file. `files`: all
    files but this one. `step` is the number of steps applied. `assembled`: entries that are made of parts of the
    model's tensors in several files or under other names, which lie where `tensors` says: name -> file."""

    format: str = FORMAT
    step: Annotated[int, Meta(ge=0)]
    graph_hash: str
    data_fingerprint: str
    recipe: dict[str, Any]
    aliases: dict[str, str]
    entries: dict[str, str]
    files: dict[str, FileRecord]
    base: dict[str, str] = {}
    """Files outside, without which this is not the whole model: name -> SHA-256."""
    tolerant_takeovers: tuple[TolerantTakeover, ...] = ()
    """From which steps on machines of other numerics computed; empty: the bits are those of the job's first plan."""
    assembled: dict[str, Assembly] = {}
    tensors: dict[str, str] = {}


def step_directory(root: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps stands."""
    return root / f"step-{step:08d}"


def step_of(directory: Path) -> int | None:
    """The step a directory's name says; None for what is no complete checkpoint."""
    match = _STEP_NAME.match(directory.name)
    return int(match[1]) if match else None
