"""Who this machine is as a job owner. Decides where its key lives and how it gets a certificate.

A plan addresses processes, and a machine may lend itself and run jobs at once: the job owner's key is therefore its
own, in `<home>/owner`. A machine that is in a pool already has its owner's key certified by that membership; a
stranger needs an invitation.

Neighbours: `client.pool_session` connects with it, `transport.enrolment` keeps it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fusionai.primitives.errors import UsageError
from fusionai.transport.enrolment import MEMBERSHIP_FILE, Membership, enrol, enrol_second_key, load_membership

OWNER_DIRECTORY: Final = "owner"


async def owner_membership(home: Path, invitation: str | None) -> Membership:
    """This machine's membership as a job owner, made if need be. Raises `UsageError` for a stranger."""
    owner_home = home / OWNER_DIRECTORY
    if invitation is not None:
        return await enrol(invitation, owner_home, "owner")
    if (home / MEMBERSHIP_FILE).is_file():
        machine = load_membership(home)
        if (owner_home / MEMBERSHIP_FILE).is_file():
            kept = load_membership(owner_home)
            if kept.credentials.authority == machine.credentials.authority:
                return kept
        return await enrol_second_key(machine, owner_home, "owner")
    if (owner_home / MEMBERSHIP_FILE).is_file():
        return load_membership(owner_home)
    raise UsageError(
        f"this machine belongs to no pool (there is no {home / MEMBERSHIP_FILE}).",
        hint="Pass --invite INVITE, or join first: fusion join INVITE.",
    )


def any_membership(home: Path) -> Membership:
    """The machine's own membership, else its owner's: enough to look at the pool."""
    if (home / MEMBERSHIP_FILE).is_file() or not (home / OWNER_DIRECTORY / MEMBERSHIP_FILE).is_file():
        return load_membership(home)
    return load_membership(home / OWNER_DIRECTORY)


def known_owner(home: Path) -> Membership | None:
    """The job owner this machine already is; asks nobody."""
    owner_home = home / OWNER_DIRECTORY
    return load_membership(owner_home) if (owner_home / MEMBERSHIP_FILE).is_file() else None
