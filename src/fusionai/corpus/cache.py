"""Cache of derived data in a job's directory: keys, manifests, arrays and trained tokenizers.

A key covers the data's content and every setting that changes the result, so a stale directory is never read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from fusionai.corpus.files import find_files, fingerprint
from fusionai.corpus.tables import FileData, HubData
from fusionai.corpus.text import open_dataset
from fusionai.primitives.errors import StorageError
from fusionai.storage.atomic import storage_errors, write_atomic

MANIFEST_FILE: Final = "manifest.json"
_KEY_CHARACTERS: Final = 16
_BATCH_CHARACTERS: Final = 2**22

Progress = Callable[[str, int], None]
"""Called with (current work: `tokenizer` or `tokens`, number of pieces so far)."""

_Item = TypeVar("_Item")
_Manifest = TypeVar("_Manifest", bound=msgspec.Struct)
_Number = TypeVar("_Number", np.uint32, np.uint8, np.int64)


def content_of(source: FileData | HubData) -> str:
    """Identify the content of files by its hash, that of a hub data set by the hub's fingerprint."""
    match source:
        case FileData():
            return fingerprint(find_files(source))
        case HubData():
            found = str(open_dataset(source)._fingerprint)
            return "\n".join([source.dataset, source.subset or "", source.split, found])


def cache_key(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_KEY_CHARACTERS]


def batched(items: Iterator[_Item], most: int, characters_of: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """Yield batches of at most `most` items, large enough to keep all cores busy, small enough for memory."""
    batch: list[_Item] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += characters_of(item)
        if len(batch) >= most or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def write_manifest(place: Path, manifest: msgspec.Struct) -> None:
    write_atomic(place / MANIFEST_FILE, msgspec.json.encode(manifest))


def read_manifest(place: Path, kind: type[_Manifest]) -> _Manifest:
    """Return the manifest of a cached directory. Raises `StorageError` if it is missing or damaged."""
    path = place / MANIFEST_FILE
    with storage_errors(path, "read"):
        content = path.read_bytes()
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as problem:
        raise _damaged(path, str(problem)) from None


def mapped(path: Path, dtype: np.dtype[_Number], entries: int) -> npt.NDArray[_Number]:
    """Map an array read-only. Raises `StorageError` if the file does not have exactly `entries` entries."""
    expected = entries * dtype.itemsize
    with storage_errors(path, "read"):
        size = path.stat().st_size
    if size != expected:
        raise _damaged(path, f"expected {expected} bytes, got {size}")
    return np.memmap(path, dtype=dtype, mode="r") if entries else np.zeros(0, dtype=dtype)


def _damaged(path: Path, what: str) -> StorageError:
    return StorageError(f"{path} is damaged: {what}.", hint=f"Delete {path.parent}; the next run makes it again.")
