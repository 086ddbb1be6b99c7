"""Names of what is served: what clients call a model, and the adapters that a command line names.

Loads no framework, because a process that only forwards requests needs the names too. `client.serving.model` opens what
is named.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fusionai.capture.models.source import SPLIT, DirectorySource, GgufSource, HubSource, parse_source
from fusionai.primitives.errors import ModelError, UsageError
from fusionai.wire.serving import MAX_ADAPTERS

CHECKPOINTS: Final = "checkpoints"
"""Name of the directory of checkpoints in a job's directory (`storage.rundir`)."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_NAME_HINT: Final = "NAME: the adapter's name for clients, of letters, digits and . _ : / -; DIR: its directory."


def model_name(text: str) -> str:
    """Return what clients call the model `text`. Downloads nothing. Raises `ModelError`."""
    if (Path(text).expanduser() / CHECKPOINTS).is_dir():
        return Path(text).expanduser().resolve().name
    match source_of(text):
        case GgufSource(path=file):
            split = SPLIT.fullmatch(file.name)
            return split["name"] if split else file.stem
        case HubSource():
            return text
        case DirectorySource(path=directory):
            # A checkpoint's directory is named after its step; the name of the job is more useful.
            place = directory.resolve()
            return (place.parent.parent if place.parent.name == CHECKPOINTS else place).name


def source_of(text: str) -> DirectorySource | GgufSource | HubSource:
    """Return where the model `text` comes from. Raises `ModelError`."""
    path = Path(text).expanduser()
    if not path.exists() and (path.is_absolute() or text.startswith((".", "~"))):
        raise ModelError(f"there is no directory {text}.", hint="Check the path, or give a hub id such as owner/name.")
    source = parse_source(text)
    if isinstance(source, DirectorySource | GgufSource | HubSource):
        return source
    raise ModelError(
        f"{text!r} has a configuration but no weights and no tokenizer.",
        hint="Serve a directory in Hugging Face layout, a GGUF file, a hub id, or a trained job's directory.",
    )


def parse_adapters(written: Sequence[str]) -> tuple[tuple[str, Path], ...]:
    """Parse texts `NAME=DIR`. Raises `UsageError`."""
    found: dict[str, Path] = {}
    for text in written:
        name, equals, directory = text.partition("=")
        if not (equals and directory and _NAME.fullmatch(name)):
            raise UsageError(f"expected --adapter NAME=DIR, got {text!r}.", hint=_NAME_HINT)
        if name in found:
            raise UsageError(f"two adapters have the name {name!r}.", hint="Give each its own name.")
        found[name] = Path(directory).expanduser()
    if len(found) > MAX_ADAPTERS:
        raise UsageError(f"{len(found)} adapters are given, but at most {MAX_ADAPTERS} can be served at once.")
    return tuple(found.items())


def adapter_name(name: str) -> None:
    """Raise `UsageError` if clients can't use this name."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name[:200]!r} is no name of an adapter.", hint=_NAME_HINT)
