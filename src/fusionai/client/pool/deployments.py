"""Stores the deployment in force in the job's directory, so that a driver can restart while the broker is away.

The file contains tickets, so only its owner may read it. `client.pool.replanning` stores each deployment,
`client.pool.beginning` starts with the stored one.
"""

from __future__ import annotations

import msgspec

from fusionai.execution.deployment import Deployment
from fusionai.primitives.errors import TrustError
from fusionai.scheduling.problem.types import Plan
from fusionai.storage.rundir import RunDirectory
from fusionai.transport.identity import read_private, write_private

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
