"""Which files a recipe refers to, their kind, and a fingerprint of their content; invalid rows are counted here
(`BadRows`).

Glob matches are sorted, so that every start reads the files in the same order. `select_library` offers the source text
of Python's own standard library, a corpus that every machine has. `corpus.text` reads the files."""

from __future__ import annotations

import glob
import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TextIO

import msgspec

from fusionai.corpus.tables import FileData
from fusionai.primitives.errors import DataError
from fusionai.storage.atomic import storage_errors

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
    """All files that match the patterns, in the order of the patterns, sorted within each, without duplicates. Raises
    `DataError` for a pattern without a match, a directory, or an unsupported suffix."""
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
                f"{path}: can't tell whether it is one JSON document or one per line.",
                hint="Set format = 'jsonl' or 'text' in [data].",
            )
        case "auto" if suffix in _BINARY_SUFFIXES:
            raise DataError(f"{path}: {suffix} files can't be read.", hint="Give text, .jsonl or .parquet files.")
        case "auto" | "tensors" | "chat" | "instructions":
            return _KIND_OF_SUFFIX.get(suffix, "text")


SHOWN: Final = 3
"""Number of invalid rows that messages name; the list has all of them."""


class RowError(Exception):
    """An invalid row: `expected ..., got ...`, without the row's content."""


class BadRow(msgspec.Struct, frozen=True):
    """`place`: file and line, file and row of a Parquet file, or data set and record."""

    place: str
    problem: str


class BadRows:
    """Invalid rows of one pass over the data. `limit`: number that may be left out; below 1, the fraction of all rows.
    `listing` gets one line of JSON for each invalid row; the file does not exist if there are none."""

    def __init__(self, limit: float, listing: Path) -> None:
        self._limit = limit
        self._listing = listing
        self._file: TextIO | None = None
        self.count = 0
        self.rows = 0
        self.first: list[BadRow] = []

    def __enter__(self) -> BadRows:
        """Begin the pass. Raises `StorageError` if an old list can't be removed."""
        with storage_errors(self._listing, "removed"):
            self._listing.unlink(missing_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def good(self) -> None:
        """Count a valid row."""
        self.rows += 1

    def bad(self, place: str, problem: str) -> None:
        """Record an invalid row. Raises `DataError` if there are too many, `StorageError` for the list."""
        self.rows += 1
        self.count += 1
        row = BadRow(place, problem)
        if len(self.first) < SHOWN:
            self.first.append(row)
        with storage_errors(self._listing):
            if self._file is None:
                self._listing.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._listing.open("w", encoding="utf-8")
            self._file.write(msgspec.json.encode(row).decode() + "\n")
            self._file.flush()
        if self._limit == 0 or (self._limit >= 1 and self.count > self._limit):
            raise too_many(self.first, self.count, self.rows, self._limit, self._listing)

    def settle(self) -> None:
        """End the pass. Raises `DataError` if too large a fraction of the rows is invalid."""
        check_bad_rows(self.first, self.count, self.rows, self._limit, self._listing)


def check_bad_rows(first: list[BadRow], count: int, rows: int, limit: float, listing: Path) -> None:
    """Raise `DataError` if `count` invalid rows of `rows` are too many."""
    if count > (limit if limit >= 1 else limit * rows):
        raise too_many(first, count, rows, limit, listing)


def too_many(first: list[BadRow], count: int, rows: int, limit: float, listing: Path) -> DataError:
    """The error that names the first invalid row and the limit."""
    named = f"{first[0].place}: {first[0].problem}"
    if limit == 0:
        return DataError(
            named, hint="Fix the row, or set bad_rows in [data]: the number or fraction of rows that may be left out."
        )
    allowed = f"{limit:g}" if limit >= 1 else f"{limit:.3g} of all rows"
    return DataError(
        f"{count} of the first {rows} rows are invalid; [data] bad_rows allows {allowed}. The first: {named}",
        hint=f"All found so far are listed in {listing}.",
    )


_LEFT_OUT: Final = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
"""Test files are mostly tables and odd strings, not ordinary code; installed packages differ between machines."""


def select_library(max_bytes: int, root: Path | None = None) -> tuple[Path, ...]:
    """Return files with at most `max_bytes` of source text below `root` (default: this Python's standard library), in
    reading order, without files that are not UTF-8. The same library gives the same files. Raises `DataError` if no
    source is installed."""
    library = Path(sysconfig.get_path("stdlib")) if root is None else root
    candidates = sorted(
        (path for path in library.rglob("*.py") if _LEFT_OUT.isdisjoint(path.relative_to(library).parts)),
        key=lambda path: path.relative_to(library).as_posix(),
    )
    readable: list[tuple[Path, int]] = []
    for path in candidates:
        try:
            content = path.read_bytes()
            content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        except OSError as problem:
            raise DataError(f"{path}: can't be read ({problem.strerror}).") from None
        else:
            if content:
                readable.append((path, len(content)))
    chosen = _spread(readable, max_bytes)
    if not chosen:
        raise DataError(
            f"no Python source of at most {max_bytes} bytes below {library}.",
            hint="This Python is installed without its library's source; use another one, or another corpus.",
        )
    return tuple(path for path, _ in chosen)


def _spread(files: list[tuple[Path, int]], max_bytes: int) -> list[tuple[Path, int]]:
    """Files at even distances in bytes, so that a small selection has modules from the whole alphabet."""
    total = sum(size for _, size in files)
    if total <= max_bytes:
        return files
    chosen: list[tuple[Path, int]] = []
    seen = taken = 0
    for path, size in files:
        seen += size
        # Take a file if it fits into the part of the budget that is due so far.
        if taken + size <= max_bytes * seen // total:
            chosen.append((path, size))
            taken += size
    return chosen
