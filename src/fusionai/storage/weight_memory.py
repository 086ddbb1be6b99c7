"""Hashes of tensors in files, remembered from one start to the next. Decides when a file is taken for the same.

The same path, size and time of change. A damaged memory is forgotten with a warning, never trusted in part.
Neighbours: `weight_manifest` asks and tells.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec

from fusionai.primitives.errors import StorageError
from fusionai.storage.atomic import storage_errors, write_atomic
from fusionai.storage.directory_lock import directory_lock
from fusionai.storage.weight_pieces import spec_bytes
from fusionai.wire.serving import WeightSpec

log = logging.getLogger(__name__)

MAX_FILES: Final = 512
"""Those used longest ago are forgotten."""


class FileStamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """Raises `StorageError`."""
        with storage_errors(path, "read"):
            stat = path.stat()
        return cls(str(path.resolve()), stat.st_size, stat.st_mtime_ns)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stamp: FileStamp
    tensors: dict[str, WeightSpec]


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[1]
    files: tuple[_File, ...]


_DECODER: Final = msgspec.json.Decoder(_Content)


class WeightMemory:
    """`path` None remembers nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._files = {} if path is None else _load(path)
        self._changed: dict[str, _File] = {}

    def get(self, stamp: FileStamp, name: str) -> WeightSpec | None:
        """The tensor `name` of a file, its key the name."""
        file = self._files.get(stamp.path)
        return file.tensors.get(name) if file is not None and file.stamp == stamp else None

    def files(self) -> Iterator[tuple[FileStamp, Mapping[str, WeightSpec]]]:
        """All that is remembered: tensors by their names in the file."""
        for file in self._files.values():
            yield file.stamp, file.tensors

    def put(self, stamp: FileStamp, specs: Mapping[str, WeightSpec]) -> None:
        before = self._files.get(stamp.path)
        kept = before.tensors if before is not None and before.stamp == stamp else {}
        self._files[stamp.path] = self._changed[stamp.path] = _File(stamp, {**kept, **specs})

    def write(self) -> None:
        """Keep what was put. That it can't be kept is a warning: the next start hashes again."""
        if self._path is None or not self._changed:
            return
        try:
            with storage_errors(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
            with directory_lock(self._path.parent):
                # Another process may have written since.
                files = {**_load(self._path), **self._changed}
                newest = [*(file for path, file in files.items() if path not in self._changed), *self._changed.values()]
                content = _Content(version=1, files=tuple(newest[-MAX_FILES:]))
                write_atomic(self._path, msgspec.json.encode(content))
        except StorageError as problem:
            log.warning("the hashes of the model's files are not remembered: %s", problem)


def _load(path: Path) -> dict[str, _File]:
    try:
        content = _DECODER.decode(path.read_bytes())
        for file in content.files:
            for spec in file.tensors.values():
                spec_bytes(spec)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError, StorageError) as problem:
        log.warning("%s is damaged and ignored, the model's files are hashed again: %s", path, problem)
        return {}
    return {file.stamp.path: file for file in content.files}
