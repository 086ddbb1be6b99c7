"""Which files a recipe refers to, their kind, and a fingerprint of their content.

Glob matches are sorted, so that every start reads the files in the same order. Neighbours: `text` and `tensors` read
the files, `tokens` uses the fingerprint in its cache key.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from fusionai.corpus.tables import FileData
from fusionai.primitives.errors import DataError

FileKind = Literal["text", "jsonl", "parquet"]

_KIND_OF_SUFFIX: Final[dict[str, FileKind]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
_BINARY_SUFFIXES: Final = frozenset({".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".arrow", ".npy", ".npz", ".bin"})
_CHUNK_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file and its format."""

    path: Path
    kind: FileKind


def find_files(data: FileData) -> tuple[SourceFile, ...]:
    """All files that match the patterns, in the order of the patterns, sorted within each, without duplicates.

    Raises `DataError` for a pattern without a match, a directory, or an unsupported suffix.
    """
    found: dict[Path, None] = {}
    for pattern in data.files:
        matches = sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(pattern) else [pattern]
        files = [Path(match) for match in matches if not (glob.has_magic(pattern) and Path(match).is_dir())]
        if not files:
            raise DataError(f"no file matches {pattern}.")
        for file in files:
            if file.is_dir():
                raise DataError(f"{file} is a directory.", hint=f"Write {file}/**/*.txt to read the files in it.")
            if not file.is_file():
                raise DataError(f"no file at {file}.")
        found.update(dict.fromkeys(files))
    return tuple(SourceFile(path, _kind(path, data)) for path in found)


def fingerprint(files: Iterable[SourceFile]) -> str:
    """SHA-256 over the kind and content of the files in order, hex. Paths don't matter."""
    whole = hashlib.sha256()
    for file in files:
        whole.update(f"{file.kind}:".encode())
        content = hashlib.sha256()
        try:
            with file.path.open("rb") as handle:
                while chunk := handle.read(_CHUNK_BYTES):
                    content.update(chunk)
        except OSError as problem:
            raise DataError(f"{file.path}: can't be read ({problem.strerror}).") from None
        whole.update(content.digest())
    return whole.hexdigest()


def _kind(path: Path, data: FileData) -> FileKind:
    suffix = path.suffix.lower()
    match data.format:
        case "text" | "jsonl" | "parquet":
            return data.format
        case "tensors" | "chat" | "instructions" if suffix not in _KIND_OF_SUFFIX:
            raise DataError(
                f"{path}: expected a .jsonl or .parquet file for format = {data.format!r}.",
                hint="Convert a JSON list with `jq -c '.[]' FILE`: one object per line." if suffix == ".json" else None,
            )
        case "auto" if suffix == ".json":
            raise DataError(
                f"{path}: one JSON document or one per line?", hint="Set format = 'jsonl' or 'text' in [data]."
            )
        case "auto" if suffix in _BINARY_SUFFIXES:
            raise DataError(f"{path}: {suffix} files can't be read.", hint="Give text, .jsonl or .parquet files.")
        case "auto" | "tensors" | "chat" | "instructions":
            return _KIND_OF_SUFFIX.get(suffix, "text")
