"""`--json FILE`: writes one object with `"schema": "fusionai.<command>/1"`, atomically.

A path that can't be written is refused before the command starts to work. The commands supply the content;
`storage.atomic` writes the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from fusionai.primitives.errors import UsageError
from fusionai.storage.atomic import write_atomic

_Function = TypeVar("_Function", bound=Callable[..., Any])


def json_option(function: _Function) -> _Function:
    """Give a click command the parameter `json_file: Path | None`."""
    return click.option(
        "--json",
        "json_file",
        type=click.Path(path_type=Path, dir_okay=False),
        callback=lambda _context, _parameter, path: None if path is None else _checked(path),
        help="Also write the results to FILE as one JSON object.",
        metavar="FILE",
    )(function)


def write_json(path: Path, command: str, figures: Mapping[str, object]) -> None:
    """Write `figures` to `path` under the schema of `command`. NaN and infinities become null, as JSON has neither.

    Raises `StorageError` if the file can't be written; an existing file is then unchanged."""
    encoded = msgspec.json.encode({"schema": f"fusionai.{command}/1", **figures}, enc_hook=_encode)
    write_atomic(path, msgspec.json.format(encoded, indent=2) + b"\n")


def _checked(path: Path) -> Path:
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"can't write {path}: there is no directory {folder}.", hint="Create it or name another file.")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"can't write {path}: {folder} is not writable.", hint="Name a file in another directory.")
    return path


def _encode(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
