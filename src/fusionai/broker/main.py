"""The broker as a program: from a home directory to an open door, until told to stop.

The loop is `run_broker`: open the home, rebuild the pool from its journal, listen, announce, keep watch. Everything
that can be wrong before the door is open is raised as one clear error, with nothing half-written.

Neighbours: `cli` calls this and prints what is announced; `server` and `service` do the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fusionai.broker.home import BrokerHome
from fusionai.broker.introductions import Introducer
from fusionai.broker.observer import Observer
from fusionai.broker.server import BrokerServer
from fusionai.broker.service import BrokerService
from fusionai.broker.udp_port import UdpPort
from fusionai.coordination.broker.membership import REMEMBERED_LOSSES
from fusionai.coordination.broker.state import DeskRules
from fusionai.primitives.clock import Clock, SystemClock
from fusionai.primitives.errors import UsageError
from fusionai.primitives.garbage import set_aside_what_stays
from fusionai.primitives.ids import PeerId
from fusionai.transport.addresses import parse_address, port_of
from fusionai.transport.circle import Circle, CircleFile, Signer, load_circle
from fusionai.transport.endorsements import Endorsement, key_text
from fusionai.transport.relay import PAIR_BYTES_PER_S, Relay, RelayLimits
from fusionai.transport.tcp import TcpTransport

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
    """A machine lost so often within ten minutes is given nothing new for five; 0: never mind."""
    relay_bytes_per_s: float | None = PAIR_BYTES_PER_S
    """Between two machines that can't dial each other, each way; None: nothing is relayed."""
    trusted_keys: frozenset[bytes] = frozenset()
    """Signing keys: only machines that one of them has endorsed may lend themselves. Empty, without `trust_file`: all
    members may."""
    trust_file: Path | None = None
    """The same by a circle that is kept in this file."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """The door is open. `invitation` is a secret: whoever has it may join. `members` and `jobs` were there before.
    `healed`: a sentence for each damage found in the journal and mended."""

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
    """Keep the pool until `stop` is set. `announce` is called once, when the first member may come.

    Raises `UsageError` (options, port in use, another broker on this home), `TrustError` (a key others can read),
    `StorageError` (a damaged journal, a full disk).
    """
    clock = clock or SystemClock()
    check(options)
    home = BrokerHome.open(options.home, options.pool, now_wall_s=clock.wall_s())
    try:
        relay = _relay(options, home, clock)
        service = BrokerService(
            rules=DeskRules(
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
    """Who may lend: None for every member. Raises `UsageError`, `TrustError`, `StorageError`."""
    if options.trust_file is not None:
        if options.trusted_keys:
            raise UsageError("expected trusted keys or a trust file, got both.", hint="Leave one of them out.")
        load_circle(options.trust_file)  # what is wrong with it is told before the door is open
        file = CircleFile(options.trust_file, clock.wall_s)
        return lambda peer, carried: _discard(file.check(peer, carried))
    if options.trusted_keys:
        circle = Circle(signers=tuple(Signer(key_text(key)) for key in sorted(options.trusted_keys)))
        return lambda peer, carried: _discard(circle.endorsement_of(peer, carried, clock.wall_s()))
    return None


def _discard(_endorsement: Endorsement) -> None:
    """That it holds is all that is asked."""


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
