"""Stores a job's deployment and its faulty peers in the job's directory, for the next start of its driver.

The deployment lets a driver restart while the broker is away. It contains tickets, so only its owner may read the file.
Peers whose results were wrong are never used again. `client.pool.replanning` writes both; `client.pool.beginning` and
`client.training.train` read them."""

from __future__ import annotations

import msgspec

from fusionai.execution.connections import Deployment
from fusionai.primitives.errors import StorageError, TrustError
from fusionai.scheduling.problem.types import Plan
from fusionai.storage.atomic import storage_errors, write_atomic
from fusionai.storage.rundir import RunDirectory
from fusionai.transport.security.identity import read_private, write_private

LARGEST_BYTES = 2**28


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    plan: Plan
    members: dict[str, tuple[str, ...]]
    tickets: dict[str, bytes]


def keep_deployment(directory: RunDirectory, deployment: Deployment) -> None:
    """Store the deployment, durably on return. Raises `StorageError`."""
    kept = _Kept(deployment.plan, dict(deployment.members), dict(deployment.tickets))
    write_private(directory.deployment, msgspec.msgpack.encode(kept))


def kept_deployment(directory: RunDirectory) -> Deployment | None:
    """Return the stored deployment, None if there is no intact one. Raises `StorageError`."""
    try:
        content = read_private(directory.deployment, limit_bytes=LARGEST_BYTES)
        kept = None if content is None else msgspec.msgpack.decode(content, type=_Kept)
    except (TrustError, msgspec.DecodeError):
        return None
    return None if kept is None else Deployment(plan=kept.plan, members=kept.members, tickets=kept.tickets)


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
