"""Manages this machine's identity as a job owner: its key and certificate.

A plan addresses processes, and a machine may lend itself and run jobs at the same time. The job owner therefore has its
own key, in `<home>/owner`. If the machine is already in a pool, that membership certifies the key; otherwise an
invitation is needed.

`client.pool.session` connects with the membership; `transport.enrolment` stores it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fusionai.primitives.errors import UsageError
from fusionai.transport.enrolment import MEMBERSHIP_FILE, Membership, enrol, enrol_second_key, load_membership

OWNER_DIRECTORY: Final = "owner"


async def owner_membership(home: Path, invitation: str | None) -> Membership:
    """Return this machine's membership as a job owner; enrol if it has none. Raises `UsageError` if that needs an
    invitation."""
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
        f"this machine has not joined a pool (there is no {home / MEMBERSHIP_FILE}).",
        hint="Pass --invite INVITE, or join a pool first: fusion join INVITE.",
    )


def any_membership(home: Path) -> Membership:
    """Return the machine's own membership, else its owner's. Either is enough to query the pool."""
    if (home / MEMBERSHIP_FILE).is_file() or not (home / OWNER_DIRECTORY / MEMBERSHIP_FILE).is_file():
        return load_membership(home)
    return load_membership(home / OWNER_DIRECTORY)


def known_owner(home: Path) -> Membership | None:
    """Return the stored membership as a job owner, None if there is none. Contacts no other machine."""
    owner_home = home / OWNER_DIRECTORY
    return load_membership(owner_home) if (owner_home / MEMBERSHIP_FILE).is_file() else None
