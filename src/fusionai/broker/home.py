"""What a broker keeps on its machine: the pool's authority, the journal, and this machine's own membership.

    <home>/identity.pem            this machine's key, whatever else it does
    <home>/membership.json         this machine as the pool's broker: its other programs find the pool by it
    <home>/broker/authority.pem    the key that certifies members and signs tickets
    <home>/broker/journal.sqlite   everything acknowledged; locked by the running broker
    <home>/broker/journal.mirror   all of it once more, in another form: either heals the other

Decides names of files and that one machine's home serves one pool. Neighbours: `main` opens it, `transport` spells
keys and certificates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fusionai.broker.journal import Journal
from fusionai.primitives.errors import UsageError
from fusionai.transport.authority import (
    CERTIFICATE_FILE,
    MAX_POOL_NAME_LENGTH,
    Authority,
    load_authority,
    pool_of,
)
from fusionai.transport.credentials import MemberCredentials
from fusionai.transport.enrolment import MEMBERSHIP_FILE, Membership, keep_membership, load_membership
from fusionai.transport.identity import Identity, load_identity
from fusionai.transport.private_files import make_private_directory, read_private

DIRECTORY: Final = "broker"
JOURNAL_FILE: Final = "journal.sqlite"
DEFAULT_POOL: Final = "pool"


class BrokerHome:
    """An open home: the journal in it is locked until `close`."""

    def __init__(
        self, path: Path, identity: Identity, authority: Authority, journal: Journal, certificate: bytes
    ) -> None:
        self.path = path
        self.identity = identity
        self.authority = authority
        self.journal = journal
        self.credentials = MemberCredentials(identity, certificate, authority.certificate)

    @classmethod
    def open(cls, path: Path, pool: str | None, *, now_wall_s: float) -> BrokerHome:
        """Open or create. `pool` None means the name kept there, or a new pool's default name.

        Raises `UsageError` (another broker runs here, another pool lives here, a bad name), `TrustError` (a key others
        can read), `StorageError` (a damaged journal, a full disk).
        """
        directory = path / DIRECTORY
        make_private_directory(path)
        make_private_directory(directory)
        name = _pool_name(directory, pool)
        # The lock comes first: a second broker must not touch anything.
        journal = Journal.open(directory / JOURNAL_FILE, name)
        try:
            identity = load_identity(path)
            authority = load_authority(directory, name, now_wall_s=now_wall_s)
            _check_free_for(path, authority)
            certificate = authority.issue(identity.public_key, "broker", now_wall_s=now_wall_s)
        except BaseException:
            journal.close()
            raise
        return cls(path, identity, authority, journal, certificate)

    def keep_own_membership(self, addresses: tuple[str, ...]) -> None:
        """From now on programs of this machine's owner reach the pool without an invitation, with its rights."""
        keep_membership(self.path, Membership(self.authority.pool, "owner", addresses, self.credentials))

    def close(self) -> None:
        self.journal.close()


def _pool_name(directory: Path, pool: str | None) -> str:
    kept = read_private(directory / CERTIFICATE_FILE)
    kept_name = None if kept is None else pool_of(kept)
    name = pool if pool is not None else kept_name or DEFAULT_POOL
    if not 0 < len(name) <= MAX_POOL_NAME_LENGTH or not name.isprintable():
        raise UsageError(f"expected a pool name of 1 to {MAX_POOL_NAME_LENGTH} printable characters, got {name!r}.")
    if kept_name is not None and name != kept_name:
        raise UsageError(
            f"expected the broker of pool {name!r} in {directory}, found that of {kept_name!r}.",
            hint="Leave the name out, or give the new pool a home of its own (--home).",
        )
    return name


def _check_free_for(path: Path, authority: Authority) -> None:
    if not (path / MEMBERSHIP_FILE).exists():
        return
    membership = load_membership(path)
    if membership.credentials.authority != authority.certificate:
        raise UsageError(
            f"this machine ({path}) is a member of another pool, {membership.pool!r}.",
            hint=f"Give the broker a home of its own (--home), or remove {path / MEMBERSHIP_FILE} first.",
        )
