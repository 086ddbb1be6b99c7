"""The adapters beside a served model: `fusion serve BASE --adapter NAME=DIR`. Decides what NAME and DIR may be.

DIR is a directory in PEFT layout, or what `fusion train` with [adapter] left: a job's directory (its newest checkpoint
is taken) or one of its checkpoints. Reads no weights but their header.

Neighbours: `storage.adapter_files` reads, `capture.adapter_slots` puts them into the graph, `client.serve` calls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fusionai.primitives.errors import ModelError, UsageError
from fusionai.storage.adapter_files import AdapterFiles, read_adapter
from fusionai.storage.reader import open_latest
from fusionai.wire.serving import MAX_ADAPTERS

CHECKPOINTS: Final = "checkpoints"
"""In a job's directory (`storage.rundir`)."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """`name` is what clients call it, in the place of the model."""

    name: str
    files: AdapterFiles

    @property
    def words(self) -> str:
        """One line for people."""
        return f"adapter {self.name}: rank {self.files.rank} on {len(self.files.layers)} layers"


def parse_adapters(written: Sequence[str]) -> tuple[tuple[str, Path], ...]:
    """Of `NAME=DIR`. Raises `UsageError`."""
    found: dict[str, Path] = {}
    for text in written:
        name, equals, directory = text.partition("=")
        if not (equals and directory and _NAME.fullmatch(name)):
            raise UsageError(
                f"expected --adapter NAME=DIR, got {text!r}.",
                hint="NAME: what clients call it, letters, digits, . _ : / -; DIR: an adapter's directory.",
            )
        if name in found:
            raise UsageError(f"two adapters are called {name!r}.", hint="Each needs a name of its own.")
        found[name] = Path(directory).expanduser()
    if len(found) > MAX_ADAPTERS:
        raise UsageError(f"{len(found)} adapters; at most {MAX_ADAPTERS} can be served at once.")
    return tuple(found.items())


def find_adapters(named: Sequence[tuple[str, Path]]) -> tuple[ServedAdapter, ...]:
    """Blocking. Raises `ModelError` where one is none, `StorageError` where a checkpoint is damaged."""
    return tuple(ServedAdapter(name, read_adapter(_directory(path))) for name, path in named)


def _directory(path: Path) -> Path:
    if not path.is_dir():
        raise ModelError(f"there is no directory {path}.", hint="Check the path of --adapter NAME=DIR.")
    if not (path / CHECKPOINTS).is_dir():
        return path
    newest = open_latest(path / CHECKPOINTS)
    if newest is None:
        raise ModelError(
            f"the job in {path} has no checkpoint yet.",
            hint="Let it train on, or set checkpoint_every in its recipe.",
        )
    return newest.directory
