"""Finds the adapters of a served model: `fusion serve BASE --adapter NAME=DIR`.

DIR is a directory in PEFT layout, or the output of `fusion train` with [adapter]: a job's directory (its newest
checkpoint is used) or one of its checkpoints. Of the weights only the header is read.

`storage.adapter_files` reads the files, `capture.models.adapter` adds adapters to the graph, `client.serving.serve`
calls this."""

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
"""Name of the directory of checkpoints in a job's directory (`storage.rundir`)."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter. Clients request it by `name` instead of the model's name."""

    name: str
    files: AdapterFiles

    @property
    def words(self) -> str:
        """Description in one line."""
        return f"adapter {self.name}: rank {self.files.rank} on {len(self.files.layers)} layers"


def parse_adapters(written: Sequence[str]) -> tuple[tuple[str, Path], ...]:
    """Parse texts `NAME=DIR`. Raises `UsageError`."""
    found: dict[str, Path] = {}
    for text in written:
        name, equals, directory = text.partition("=")
        if not (equals and directory and _NAME.fullmatch(name)):
            raise UsageError(
                f"expected --adapter NAME=DIR, got {text!r}.",
                hint="NAME: the adapter's name for clients, of letters, digits and . _ : / -; DIR: its directory.",
            )
        if name in found:
            raise UsageError(f"two adapters have the name {name!r}.", hint="Give each its own name.")
        found[name] = Path(directory).expanduser()
    if len(found) > MAX_ADAPTERS:
        raise UsageError(f"{len(found)} adapters are given, but at most {MAX_ADAPTERS} can be served at once.")
    return tuple(found.items())


def find_adapters(named: Sequence[tuple[str, Path]]) -> tuple[ServedAdapter, ...]:
    """Return the adapters. Blocking. Raises `ModelError` for a directory that is not an adapter, `StorageError` for a
    damaged checkpoint."""
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
            hint="Let it train further, or set checkpoint_every in its recipe.",
        )
    return newest.directory
