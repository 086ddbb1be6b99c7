"""The source text of Python's own standard library, as a corpus that is available on every machine. Decides which
files.

Modules of the library proper in sorted order, without tests and installed packages; if `max_bytes` is smaller than
their total, files spread evenly over the whole. Files that are not UTF-8 are left out and counted. Neighbours: the demo
writes the selection into its recipe, `text` reads the files like any others.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fusionai.primitives.errors import DataError

_LEFT_OUT: Final = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
"""Test files are mostly tables and odd strings, not ordinary code; installed packages differ between machines."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Files in reading order. `undecodable`: files left out because they are not UTF-8."""

    files: tuple[Path, ...]
    total_bytes: int
    undecodable: tuple[Path, ...]


def select(max_bytes: int, root: Path | None = None) -> Selection:
    """Select at most `max_bytes` of source text below `root` (default: this Python's standard library). The same
    library gives the same selection. Raises `DataError` if no source is installed."""
    library = Path(sysconfig.get_path("stdlib")) if root is None else root
    candidates = sorted(
        (path for path in library.rglob("*.py") if _LEFT_OUT.isdisjoint(path.relative_to(library).parts)),
        key=lambda path: path.relative_to(library).as_posix(),
    )
    readable: list[tuple[Path, int]] = []
    undecodable: list[Path] = []
    for path in candidates:
        try:
            content = path.read_bytes()
            content.decode("utf-8")
        except UnicodeDecodeError:
            undecodable.append(path)
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
    return Selection(tuple(path for path, _ in chosen), sum(size for _, size in chosen), tuple(undecodable))


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
