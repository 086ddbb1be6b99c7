"""The broker as a program: opens its home directory, rebuilds the pool from its journal, listens until stopped.

    <home>/identity.pem            key of this machine
    <home>/membership.json         this machine's own membership in the pool
    <home>/broker/                 certificate authority and journal of the pool

Every error that can be found before the port is open is raised as one clear error, with nothing half-written. `cli`
calls `run_broker` and prints the announcement; `server` and `service` do the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fusionai.broker.journal import Journal
from fusionai.broker.reachability import Introducer, Observer, UdpPort
from fusionai.broker.server import BrokerServer
from fusionai.broker.service import BrokerService
from fusionai.coordination.broker.membership import REMEMBERED_LOSSES
from fusionai.coordination.broker.state import BrokerRules
from fusionai.primitives.clock import Clock, SystemClock
from fusionai.primitives.errors import UsageError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.process import set_aside_what_stays
from fusionai.transport.enrolment import MEMBERSHIP_FILE, Membership, keep_membership, load_membership
from fusionai.transport.routes.addresses import parse_address, port_of
from fusionai.transport.routes.relay import PAIR_BYTES_PER_S, Relay, RelayLimits
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.transport.security.certificates import (
    CERTIFICATE_FILE,
    MAX_POOL_NAME_LENGTH,
    Authority,
    MemberCredentials,
    load_authority,
    pool_of,
)
from fusionai.transport.security.identity import Identity, load_identity, make_private_directory, read_private
from fusionai.transport.security.trust import Endorsement, Signer, TrustList, TrustListFile, key_text, load_trust_list

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
        """Open or create. `pool` None means the name kept there, or a new pool's default name. Raises `UsageError`
        (another broker runs here, another pool lives here, a bad name), `TrustError` (a key others can read),
        `StorageError` (a damaged journal, a full disk)."""
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
        """Store the owner's membership, so that programs of this machine's owner reach the pool without an
        invitation."""
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


DEFAULT_PORT: Final = 4711
SHORTEST_LEASE_S: Final = 1.5
"""Below this, an ordinary delay on a slow link looks like a death."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerOptions:
    """`pool` None keeps the name that is there. `port` 0 takes any free one. `advertise`: addresses to put into
    invitations instead of this machine's own (a forwarded port, a name). `inviters`: members that may invite."""

    home: Path
    pool: str | None = None
    host: str = "0.0.0.0"
    port: int = DEFAULT_PORT
    advertise: tuple[str, ...] = ()
    invitation_uses: int = 100
    invitation_lifetime_s: float = 86_400.0
    lease_s: float = 12.0
    heartbeat_s: float = 3.0
    unattended_s: float = 120.0
    ticket_lifetime_s: float = 600.0
    inviters: frozenset[PeerId] = frozenset()
    losses_before_rest: int = 5
    """Losses within ten minutes after which a machine gets no new work for five minutes; 0: no limit."""
    relay_bytes_per_s: float | None = PAIR_BYTES_PER_S
    """Relay rate between two machines that can't dial each other, in each direction; None: no relay."""
    trusted_keys: frozenset[bytes] = frozenset()
    """Signing keys: only machines that one of them has endorsed may lend themselves. Empty, without `trust_file`: all
    members may."""
    trust_file: Path | None = None
    """Trust list with the signing keys, as an alternative to `trusted_keys`."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """The broker accepts connections. `invitation` is a secret that lets its holder join. `members` and `jobs` are
    those of the journal. `healed`: a sentence for each damage in the journal that was repaired."""

    pool: str
    peer: PeerId
    addresses: tuple[str, ...]
    invitation: str
    members: int
    jobs: int
    healed: tuple[str, ...] = ()


async def run_broker(
    options: BrokerOptions,
    *,
    announce: Callable[[Announcement], None],
    stop: asyncio.Event,
    clock: Clock | None = None,
) -> None:
    """Keep the pool until `stop` is set. `announce` is called once, when members can connect. Raises `UsageError`
    (options, port in use, another broker on this home), `TrustError` (a key others can read), `StorageError` (a damaged
    journal, a full disk)."""
    clock = clock or SystemClock()
    check(options)
    home = BrokerHome.open(options.home, options.pool, now_wall_s=clock.wall_s())
    try:
        relay = _relay(options, home, clock)
        service = BrokerService(
            rules=BrokerRules(
                pool=home.authority.pool,
                broker=home.identity.peer,
                inviters=options.inviters,
                lease_s=options.lease_s,
                heartbeat_s=options.heartbeat_s,
                unattended_s=options.unattended_s,
                losses_before_rest=options.losses_before_rest,
            ),
            journal=home.journal,
            authority=home.authority,
            clock=clock,
            ticket_lifetime_s=options.ticket_lifetime_s,
            introducer=Introducer(home.authority, relays=relay is not None),
            admits=_admission(options, clock),
        )
        transport = TcpTransport(home.credentials)
        server = BrokerServer(service, clock)
        listener = await transport.listen(
            server.accept, host=options.host, port=options.port, strangers=True, relay=relay
        )
        udp = UdpPort(home.credentials, server.accept, options.host, port_of(listener.addresses))
        server.observer = Observer(transport, udp.opened)
        try:
            service.addresses = options.advertise or listener.addresses
            home.keep_own_membership(tuple(dict.fromkeys((*listener.addresses, *service.addresses))))
            invitation = service.invite(uses=options.invitation_uses, lifetime_s=options.invitation_lifetime_s)
            pool = service.desk.pool
            announce(
                Announcement(
                    pool=home.authority.pool,
                    peer=home.identity.peer,
                    addresses=service.addresses,
                    invitation=invitation,
                    members=sum(member.phase in ("idle", "active", "draining") for member in pool.members.values()),
                    jobs=len(pool.live_jobs()),
                    healed=home.journal.healed,
                )
            )
            set_aside_what_stays()
            await server.keep(stop)
        finally:
            await udp.close()
            await listener.close()
    finally:
        home.close()


def _admission(options: BrokerOptions, clock: Clock) -> Callable[[PeerId, Sequence[bytes]], None] | None:
    """Return the check of machines that want to lend; None: every member may. Raises `UsageError`, `TrustError`,
    `StorageError`."""
    if options.trust_file is not None:
        if options.trusted_keys:
            raise UsageError("expected trusted keys or a trust file, got both.", hint="Leave one of them out.")
        load_trust_list(options.trust_file)  # raises errors of the file before the port is open
        file = TrustListFile(options.trust_file, clock.wall_s)
        return lambda peer, carried: _discard(file.check(peer, carried))
    if options.trusted_keys:
        trust_list = TrustList(signers=tuple(Signer(key_text(key)) for key in sorted(options.trusted_keys)))
        return lambda peer, carried: _discard(trust_list.endorsement_of(peer, carried, clock.wall_s()))
    return None


def _discard(_endorsement: Endorsement) -> None:
    """Drop the endorsement: the check raises if there is none."""


def _relay(options: BrokerOptions, home: BrokerHome, clock: Clock) -> Relay | None:
    if options.relay_bytes_per_s is None:
        return None
    return Relay(home.authority.public_key, clock, RelayLimits(pair_bytes_per_s=options.relay_bytes_per_s))


def check(options: BrokerOptions) -> None:
    """Raises `UsageError` for options that can't work together."""
    for address in options.advertise:
        parse_address(address)
    if options.lease_s < SHORTEST_LEASE_S:
        raise UsageError(f"expected a lease of at least {SHORTEST_LEASE_S:g} s, got {options.lease_s:g} s.")
    if not 0 < options.heartbeat_s <= options.lease_s / 2:
        raise UsageError(
            f"expected a heartbeat of at most half the lease ({options.lease_s / 2:g} s), got "
            f"{options.heartbeat_s:g} s."
        )
    if options.unattended_s < options.lease_s or options.ticket_lifetime_s <= 0 or options.invitation_lifetime_s <= 0:
        raise UsageError("expected durations above zero, and jobs to be waited for at least as long as members.")
    if not 0 <= options.losses_before_rest <= REMEMBERED_LOSSES:
        raise UsageError(f"expected 0 to {REMEMBERED_LOSSES} losses before a rest, got {options.losses_before_rest}.")
    if not 1 <= options.invitation_uses <= 100_000:
        raise UsageError(f"expected an invitation for 1 to 100000 machines, got {options.invitation_uses}.")
