"""Whom a job does not believe any more, on its disk: no start of its driver gives them work again.

Decides nothing. Neighbours: `client.replanning` adds and leaves them out of plans; `fusion train` reads them.
"""

from __future__ import annotations

import msgspec

from fusionai.primitives.errors import StorageError
from fusionai.storage.atomic import storage_errors, write_atomic
from fusionai.storage.rundir import RunDirectory


class Distrusted(msgspec.Struct, frozen=True):
    """`peer`'s results were wrong; `reason`: which, and how it was found."""

    peer: str
    reason: str


def distrusted(directory: RunDirectory) -> tuple[Distrusted, ...]:
    """Raises `StorageError` for a file that is none."""
    path = directory.distrusted
    if not path.is_file():
        return ()
    with storage_errors(path, "read"):
        content = path.read_bytes()
    try:
        return msgspec.json.decode(content, type=tuple[Distrusted, ...])
    except msgspec.DecodeError as problem:
        raise StorageError(
            f"{path}: not understood ({problem}).", hint="Remove it: whoever is in it may be given work again then."
        ) from None


def distrust(directory: RunDirectory, peer: str, reason: str) -> None:
    """On the disk when this returns. Raises `StorageError`."""
    known = tuple(one for one in distrusted(directory) if one.peer != peer)
    write_atomic(directory.distrusted, msgspec.json.encode((*known, Distrusted(peer, reason))))
