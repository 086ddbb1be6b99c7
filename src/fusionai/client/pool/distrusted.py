"""Stores the peers whose results were wrong in the job's directory, so that no start of its driver uses them again.

`client.pool.replanning` adds peers and leaves them out of plans; `client.training.train` reads them at the start.
"""

from __future__ import annotations

import msgspec

from fusionai.primitives.errors import StorageError
from fusionai.storage.atomic import storage_errors, write_atomic
from fusionai.storage.rundir import RunDirectory


class Distrusted(msgspec.Struct, frozen=True):
    """A peer whose results were wrong. `reason`: which results, and how they were found wrong."""

    peer: str
    reason: str


def distrusted(directory: RunDirectory) -> tuple[Distrusted, ...]:
    """Return the stored peers. Raises `StorageError` for a file that can't be read or parsed."""
    path = directory.distrusted
    if not path.is_file():
        return ()
    with storage_errors(path, "read"):
        content = path.read_bytes()
    try:
        return msgspec.json.decode(content, type=tuple[Distrusted, ...])
    except msgspec.DecodeError as problem:
        raise StorageError(
            f"{path} can't be parsed ({problem}).",
            hint="Remove it; the job may then use the peers listed in it again.",
        ) from None


def distrust(directory: RunDirectory, peer: str, reason: str) -> None:
    """Add a peer to the file, durably on return. Raises `StorageError`."""
    known = tuple(one for one in distrusted(directory) if one.peer != peer)
    write_atomic(directory.distrusted, msgspec.json.encode((*known, Distrusted(peer, reason))))
