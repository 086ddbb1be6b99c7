"""Cache of captured graphs on disk, so that planning a known model again needs no framework.

A graph's key covers everything it depends on: the configuration (for a directory also its files' sizes and times), the
requested options, this program's own capture and IR code, and every installed package with its version. In doubt the
model is captured again: graphs of the job owner's own code, which may depend on anything, and of hub models, which may
have changed, are not cached.

Loads no framework."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

import fusionai.ir
from fusionai.capture.models.source import ConfigSource, DirectorySource, ModelSource
from fusionai.ir.schema import Graph, decode, encode
from fusionai.ir.validate import validate
from fusionai.primitives.errors import GraphError, StorageError
from fusionai.storage.atomic import write_atomic

MOST_KEPT: Final = 32
"""Most graphs in the cache (chosen); the least recently used go first. A graph takes some hundred kB up to MB."""
_SUFFIX: Final = ".graph"
"""Suffix of a cached graph's file: a line with the checksum, then the graph's JSON."""
_log: Final = logging.getLogger(__name__)


def kept(directory: Path, source: ModelSource, asked: Mapping[str, object], capture: Callable[[], Graph]) -> Graph:
    """Return the graph that `capture` returns for `source` and these options (JSON values), or the cached one."""
    key = _key(source, asked)
    if key is None:
        return capture()
    path = directory / f"{key}{_SUFFIX}"
    with suppress(OSError, msgspec.MsgspecError, GraphError):
        checksum, _, content = path.read_bytes().partition(b"\n")
        if checksum == _checksum(content):
            graph = validate(decode(content))
            os.utime(path)
            return graph
    graph = capture()
    content = encode(graph)
    try:
        write_atomic(path, _checksum(content) + b"\n" + content)
        _forget(directory)
    except (StorageError, OSError) as problem:
        _log.warning("the captured graph is not kept on disk: %s", problem)
    return graph


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _key(source: ModelSource, asked: Mapping[str, object]) -> str | None:
    """Return a hash of everything that the graph depends on; None if that can't be known."""
    try:
        described = _described(source)
        if described is None:
            return None
        parts = {
            "source": described,
            "asked": dict(asked),
            "python": sys.version,
            "packages": sorted(_packages()),
            "code": _code(),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    except (OSError, TypeError, ValueError):
        return None


def _described(source: ModelSource) -> object:
    match source:
        case ConfigSource(config=config, architecture=architecture):
            return ["config", dict(config), architecture]
        case DirectorySource(path=path, architecture=architecture):
            files = sorted(one for one in path.resolve().iterdir() if one.suffix in (".json", ".safetensors"))
            described = [(one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in files]
            config = hashlib.sha256((path / "config.json").read_bytes()).hexdigest()
            return ["directory", str(path.resolve()), config, described, architecture]
        case _:
            return None


def _packages() -> Iterator[str]:
    """Yield names and versions of installed packages: the names of the directories that describe them."""
    for place in dict.fromkeys(sys.path):
        with suppress(OSError):
            yield from (name for name in os.listdir(place or ".") if name.endswith((".dist-info", ".egg-info")))


def _code() -> str:
    """Return a hash of the source files of `capture` and `ir`."""
    found = hashlib.sha256()
    for place in (Path(__file__).parent, *(Path(one) for one in fusionai.ir.__path__)):
        for path in sorted(place.rglob("*.py")):
            found.update(path.relative_to(place).as_posix().encode())
            found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def _forget(directory: Path) -> None:
    """Delete the least recently used files beyond `MOST_KEPT`."""
    files = sorted(directory.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files[MOST_KEPT:]:
        path.unlink(missing_ok=True)
