"""Graphs that were captured before, kept on disk: who plans a known model again needs no framework for it.

Decides what a graph depends on, and that a doubt means capturing: the configuration (of a directory also its files'
sizes and times), what is asked for, this program's own capture and IR, and every installed package with its version.
Code of the job owner's own may depend on anything, and a hub's model may have changed: neither is kept.

Loads no framework. Neighbours: `cli.asked` asks, `capture.capture` captures, `storage.atomic` writes.
"""

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
from fusionai.capture.source import ConfigSource, DirectorySource, ModelSource
from fusionai.ir.schema import Graph, decode, encode
from fusionai.ir.validate import validate
from fusionai.primitives.errors import GraphError, StorageError
from fusionai.storage.atomic import write_atomic

MOST_KEPT: Final = 32
"""The longest unused go first. A graph takes some hundred kilobytes, of the largest models megabytes."""
_SUFFIX: Final = ".graph"
"""A line with the checksum, then the graph's JSON."""
_log: Final = logging.getLogger(__name__)


def kept(directory: Path, source: ModelSource, asked: Mapping[str, object], capture: Callable[[], Graph]) -> Graph:
    """What `capture` returns for `source` and these options (of JSON), from `directory` where it was kept."""
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
        _log.warning("the captured graph is not kept: %s", problem)
    return graph


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _key(source: ModelSource, asked: Mapping[str, object]) -> str | None:
    """Of all that the graph depends on; None where nobody can know that."""
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
    """Names and versions, as the directories are called that describe installed packages."""
    for place in dict.fromkeys(sys.path):
        with suppress(OSError):
            yield from (name for name in os.listdir(place or ".") if name.endswith((".dist-info", ".egg-info")))


def _code() -> str:
    """Of this program's files that a graph follows from."""
    found = hashlib.sha256()
    for place in (Path(__file__).parent, *(Path(one) for one in fusionai.ir.__path__)):
        for path in sorted(place.glob("*.py")):
            found.update(path.name.encode())
            found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def _forget(directory: Path) -> None:
    """Files beyond `MOST_KEPT`, those that were not used for longest."""
    files = sorted(directory.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files[MOST_KEPT:]:
        path.unlink(missing_ok=True)
