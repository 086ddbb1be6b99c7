"""The broker's home directory: its keys, its certificate authority and its journal.

    <home>/identity.pem            key of this machine
    <home>/membership.json         this machine's own membership in the pool
    <home>/broker/                 certificate authority of the pool, and its journal or the journal's place

A home is open for one broker at a time. If the journal is in an engine and another broker keeps the pool, opening waits
until that broker's lease ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fusionai.broker.engines.interface import EngineUnreachable, JournalHeld, PoolJournal
from fusionai.broker.engines.opening import JournalHome, open_journal
from fusionai.broker.options import BrokerOptions
from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import UsageError
from fusionai.transport.broker_addresses import BrokerAddresses
from fusionai.transport.enrolment import MEMBERSHIP_FILE, Membership, keep_membership, load_membership
from fusionai.transport.security.certificates import (
    CERTIFICATE_FILE,
    KEY_FILE,
    MAX_POOL_NAME_LENGTH,
    Authority,
    MemberCredentials,
    load_authority,
    pool_of,
)
from fusionai.transport.security.identity import Identity, load_identity, make_private_directory, read_private

DIRECTORY: Final = "broker"
DEFAULT_POOL: Final = "pool"
TAKEOVER_CHECK_S: Final = 0.5
"""Interval at which a waiting broker looks whether it may take over, in seconds (chosen)."""
_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BrokerHome:
    """An open home: the journal in it is locked until `close`."""

    path: Path
    identity: Identity
    authority: Authority
    journal: PoolJournal
    credentials: MemberCredentials

    @classmethod
    def open(
        cls,
        path: Path,
        pool: str | None,
        *,
        now_wall_s: float,
        place: str | None = None,
        source: str | None = None,
        notice: Callable[[str], None] = _LOG.info,
    ) -> BrokerHome:
        """Open or create. `pool` None means the name kept there, or a new pool's default name. `place` and `source`: as
        for `open_journal`. Raises `UsageError` (another broker runs here, another pool lives here, a bad name),
        `TrustError` (a key others can read), `StorageError` (a damaged journal, a full disk, an engine out of
        reach)."""
        directory = path / DIRECTORY
        make_private_directory(path)
        make_private_directory(directory)
        name = _pool_name(directory, pool)

        def authority_key(is_new: bool) -> bytes:
            kept = all((directory / file).exists() for file in (KEY_FILE, CERTIFICATE_FILE))
            return load_authority(directory, name, now_wall_s=now_wall_s).public_key if kept or is_new else b""

        # The lock comes first: a second broker must not touch anything.
        home = JournalHome(
            directory=directory, pool=name, identity=lambda: load_identity(path).peer, authority_key=authority_key
        )
        journal = open_journal(home, place, source, notice)
        try:
            identity = load_identity(path)
            authority = load_authority(directory, name, now_wall_s=now_wall_s)
            _check_free_for(path, authority)
            certificate = authority.issue(identity.public_key, "broker", now_wall_s=now_wall_s)
        except BaseException:
            journal.close()
            raise
        credentials = MemberCredentials(identity, certificate, authority.certificate)
        return cls(path, identity, authority, journal, credentials)

    def keep_own_membership(self, addresses: tuple[str, ...]) -> None:
        """Store the owner's membership, so that programs of this machine's owner reach the pool without an
        invitation."""
        places = tuple(dict.fromkeys(addresses))
        keep_membership(self.path, Membership(self.authority.pool, "owner", BrokerAddresses(places), self.credentials))

    def renew_if_due(self, now_wall_s: float) -> bool:
        """Renew this machine's own certificate if its end is near."""
        due = self.credentials.is_renewal_due(now_wall_s)
        if due:
            self.credentials.renew(self.authority.issue(self.identity.public_key, "broker", now_wall_s=now_wall_s))
        return due

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


async def open_when_free(
    options: BrokerOptions, clock: Clock, stop: asyncio.Event, notice: Callable[[str], None]
) -> BrokerHome | None:
    """Open the home, once no other broker keeps the pool. Returns None if `stop` is set before. Raises as
    `run_broker`."""
    waiting = False
    while True:
        try:
            return BrokerHome.open(
                options.home,
                options.pool,
                now_wall_s=clock.wall_s(),
                place=options.journal,
                source=options.journal_from,
                notice=notice,
            )
        except JournalHeld as held:
            if not waiting:
                notice(f"{held.message[0].upper()}{held.message[1:]} This broker waits to take over.")
        except EngineUnreachable as error:
            if not waiting:
                raise
            _LOG.info("still waiting: %s", error)
        waiting = True
        try:
            async with asyncio.timeout(TAKEOVER_CHECK_S):
                await stop.wait()
            return None
        except TimeoutError:
            pass
