"""Reaches a peer by any route that works: directly by TCP, through NATs by QUIC, or over the broker's relay.

Decides which route is tried when. All routes are raced in the order that `RouteTable` gives. The relay is tried last;
it wins only if nothing else answers, or if it is what worked last time. While a link goes over the relay, better routes
are tried again in the background, and the next connection uses the one that was found. The other side proves its
identity on every route alike.

`tcp` dials, `quic` goes through NATs, `conversation` asks the broker, `relay` connects through its relay, `addresses`
decides which attempt wins. `peer` passes on the broker's notices.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

from fusionai.primitives.errors import FusionError, TransportError, UsageError, WireError
from fusionai.primitives.ids import PeerId, short
from fusionai.transport.broker_addresses import BrokerAddresses
from fusionai.transport.channels.framed import Dialling, FramedChannel
from fusionai.transport.channels.quic import QuicChannel
from fusionai.transport.channels.uplink import TransferLimits
from fusionai.transport.conversation import Conversation, Introductions, Meeting
from fusionai.transport.interface import Accept, Channel
from fusionai.transport.routes.addresses import (
    RELAY_SCHEME,
    Attempt,
    RouteTable,
    better_than_relay,
    dialable,
    first_to_answer,
    format_address,
    parse_address,
    port_of,
)
from fusionai.transport.routes.quic import QuicListener, QuicTransport, format_quic, parse_quic
from fusionai.transport.routes.relay import through_relay
from fusionai.transport.routes.tcp import TcpListener, TcpTransport
from fusionai.transport.security.certificates import MemberCredentials
from fusionai.wire.messages import LinkView, MeetNotice, Observe, Observed, Stream

_OBSERVE_S: Final = 3.0
KNOCK_S: Final = 5.0
"""Time limit for sending to a peer that is dialling this machine, in seconds."""


class UdpAcceptor:
    """Owns the UDP endpoint. If it is opened without `accept`, this side only dials."""

    def __init__(self, credentials: MemberCredentials, introductions: Introductions, rates: TransferLimits) -> None:
        self._credentials = credentials
        self._introductions = introductions
        self._rates = rates
        self._quic: QuicTransport | None = None
        self._listener: QuicListener | None = None
        self._observer: Conversation | None = None
        self._address: str | None = None
        self._opening = asyncio.Lock()
        self._why_not = ""

    @property
    def lost(self) -> bool:
        """Whether the port was open and the connection to the broker that observed it has ended."""
        return self._address is not None and self._observer is not None and self._observer.channel.closed

    async def opened(self, accept: Accept | None = None) -> str:
        """Return the address that others may send to. Raises `TransportError` if there is none."""
        async with self._opening:
            if self._address is not None and self._observer is not None and not self._observer.channel.closed:
                return self._address
            if self._why_not:
                raise TransportError(self._why_not)
            self._address = await self._open(accept)
            return self._address

    async def forget(self) -> None:
        """Forget the observed address, because it may have changed. QUIC itself survives a move and would not
        notice."""
        async with self._opening:
            observer, self._observer, self._address = self._observer, None, None
        if observer is not None:
            await observer.close()

    def attempts(self, address: str, dialling: Dialling, timeout_s: float) -> list[Attempt[QuicChannel]]:
        """Attempts to dial `address`; empty before `opened` has succeeded."""
        return [] if self._quic is None else self._quic.attempts((address,), dialling, timeout_s)

    async def knock(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Send packets to a peer that is dialling this machine now."""
        try:
            places = [found[1:] for address in addresses if (found := parse_quic(address)) is not None]
            if self._quic is not None and places:
                await self._quic.knock(peer, places, KNOCK_S)
        except FusionError as error:
            _LOG.info("could not send towards %s: %s", short(peer), error)

    async def close(self) -> None:
        if self._observer is not None:
            await self._observer.close()
        if self._listener is not None:
            await self._listener.close()

    async def _open(self, accept: Accept | None) -> str:
        try:
            quic = self._quic or QuicTransport(self._credentials, rates=self._rates)
        except TransportError as error:
            self._why_not = str(error)
            _LOG.info("%s", error)
            raise
        seen, broker = await self._introductions.observed(0)
        if broker.peer is None or not seen.udp_port:
            raise TransportError("the broker observes no UDP port; links that can't be dialled go over its relay.")
        self._quic = quic
        if accept is not None and self._listener is None:
            self._listener = await quic.listen(accept, host="0.0.0.0", port=0)
        place = format_quic(broker.peer, broker.host, seen.udp_port)
        channel = await quic.dial((place,), expect=broker.peer, stream="control", timeout_s=_OBSERVE_S)
        self._observer = Conversation(channel)
        try:
            async with asyncio.timeout(_OBSERVE_S):
                answer = await self._observer.ask(Observe())
        except TimeoutError:
            raise TransportError("the broker did not say how it sees this machine's UDP port.") from None
        if not isinstance(answer, Observed):
            raise WireError(f"expected the broker's observation, got {answer.__struct_config__.tag}.")
        return format_quic(self._credentials.identity.peer, answer.host, answer.port)


async def opened_or_none(acceptor: UdpAcceptor, accept: Accept) -> str | None:
    """Return the address for others, or None if this machine can't be reached by UDP."""
    try:
        return await acceptor.opened(accept)
    except FusionError as error:
        _LOG.info("no route by UDP: %s", error)
        return None


_LOG: Final = logging.getLogger(__name__)
FIRST_RETRY_S: Final = 30.0
"""Wait in seconds after a connection went over the relay; doubled after each attempt, up to `LAST_RETRY_S`."""
LAST_RETRY_S: Final = 600.0
_RETRY_TIMEOUT_S: Final = 5.0
_ANSWER_TIMEOUT_S: Final = 10.0
MAX_ANSWERING: Final = 64
"""Upper limit on concurrent meetings requested by other peers."""
QUIC_HEAD_START_S: Final = 1.0
"""Head start of QUIC over the relay: two sides that send at the same time need about a second to connect."""


class PeerTransport:
    """Implements `Transport` for a member. `broker` says where its pool's broker is. `admits` raises
    `TrustError` for a member that this machine must not dial, whichever plan or message names it. Must be created
    inside an event loop."""

    def __init__(
        self,
        credentials: MemberCredentials,
        broker: BrokerAddresses,
        *,
        rates: TransferLimits | None = None,
        admits: Callable[[PeerId], None] = lambda _peer: None,
    ) -> None:
        self._credentials = credentials
        self._admits = admits
        self._beside_broker = broker.is_beside
        """Whether the broker, and so every member that it saw at a loopback address, is on this machine."""
        rates = rates or TransferLimits()
        self._tcp = TcpTransport(credentials, rates=rates)
        self._introductions = Introductions(self._tcp, broker)
        self._udp = UdpAcceptor(credentials, self._introductions, rates)
        self._routes = RouteTable()
        self._accept: Accept | None = None
        self._listener: TcpListener | None = None
        self._seeking: dict[PeerId, asyncio.Task[None]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    @property
    def moved(self) -> bool:
        """Whether this machine's observed UDP address is no longer valid."""
        return self._udp.lost

    @property
    def links(self) -> tuple[LinkView, ...]:
        """The current links, dialled or accepted."""
        return self._routes.links()

    async def listen(self, accept: Accept, *, host: str, port: int, strangers: bool = False) -> TcpListener:
        async def known(channel: Channel) -> None:
            if isinstance(channel, FramedChannel):
                self._routes.opened(channel)
            await accept(channel)

        self._accept = known
        self._listener = await self._tcp.listen(known, host=host, port=port, strangers=strangers)
        return self._listener

    async def dial(
        self, addresses: Sequence[str], *, expect: PeerId | None, stream: Stream, timeout_s: float = 10.0
    ) -> Channel:
        if expect is None:
            return await self._tcp.dial(addresses, expect=None, stream=stream, timeout_s=timeout_s)
        self._admits(expect)
        addresses = dialable(addresses, beside=self._beside_broker)
        ordered = self._routes.in_order(expect, addresses, asyncio.get_running_loop().time())
        attempts = self._attempts(expect, ordered, Dialling(expect, stream, self._beside_broker), timeout_s)
        if not attempts:
            raise UsageError(f"peer {short(expect)} has no address that this machine may dial.")
        channel = await first_to_answer(attempts, timeout_s=timeout_s)
        self._routes.opened(channel)
        if channel.route == "relay":
            self._seek_better_route(expect, addresses)
        return channel

    async def seen_at(self, listener: TcpListener) -> tuple[str, ...]:
        """Return the addresses at which this listener can be reached from outside its network. A public TCP address, or
        one whose router forwards the same port, if the broker could dial it; otherwise the QUIC address. Empty if
        neither is known or the listener already offers it."""
        port = port_of(listener.addresses)
        await self._udp.forget()
        try:
            # Uses a new connection: one from before a move would be seen at this machine's old address.
            await self._introductions.close()
            observed, _ = await self._introductions.observed(port)
        except FusionError as error:
            _LOG.info("the broker could not report how it sees this machine: %s", error)
            return ()
        if observed.reachable:
            address = format_address(observed.host, port)
            return () if address in listener.addresses else (address,)
        if self._accept is None:
            return ()
        address = await opened_or_none(self._udp, self._accept)
        return () if address is None else (address,)

    def answer(self, notice: MeetNotice, relay: tuple[str, int]) -> None:
        """Meet a member that can't dial this machine: connect to it through the relay and by UDP at the same time. A
        relayed connection is handled like an accepted one. `relay`: host and port at which the broker that sent the
        notice was reached."""
        if self._listener is None:
            return
        if len(self._answering) >= MAX_ANSWERING:
            _LOG.info("no meeting with %s: too many other meetings are in progress", short(PeerId(notice.peer)))
            return
        if notice.token:
            self._start(self._answer(self._listener, notice, relay))
        self._start(self._udp.knock(PeerId(notice.peer), notice.addresses))

    async def close(self) -> None:
        """Stop all background work. Channels and the listener are closed by their holders."""
        tasks = [*self._seeking.values(), *self._answering]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._udp.close()
        await self._introductions.close()

    def _attempts(
        self, peer: PeerId, addresses: Sequence[str], dialling: Dialling, timeout_s: float
    ) -> list[Attempt[FramedChannel]]:
        """Return one attempt per address, in order. They share one introduction."""
        meeting = Meeting(self._introductions, peer)
        if addresses and parse_address(addresses[0], RELAY_SCHEME) is not None:
            meeting.waive_head_start()
        attempts: list[Attempt[FramedChannel]] = []
        for address in addresses:
            if parse_address(address, RELAY_SCHEME) is not None:
                start = partial(self._over_relay, address, meeting, dialling, timeout_s)
            elif parse_quic(address) is not None:
                meeting.quic_is_tried()
                start = partial(self._through_nats, address, meeting, dialling, timeout_s)
            elif straight := self._tcp.attempts((address,), dialling, timeout_s):
                start = straight[0].start
            else:
                continue
            attempts.append(Attempt(address, partial(self._noted, peer, address, addresses, start)))
        return attempts

    async def _noted(
        self,
        peer: PeerId,
        address: str,
        among: Sequence[str],
        start: Callable[[], Coroutine[Any, Any, FramedChannel]],
    ) -> FramedChannel:
        channel = await start()
        self._routes.worked(peer, address, among, asyncio.get_running_loop().time())
        return channel

    async def _over_relay(self, address: str, meeting: Meeting, dialling: Dialling, timeout_s: float) -> FramedChannel:
        await meeting.head_start(QUIC_HEAD_START_S)
        introduction = await meeting.introduction()
        if not introduction.token:
            raise TransportError(
                f"peer {short(meeting.peer)} can be reached over a relay only, and this pool has none."
            )
        sock = await through_relay(introduction.relays, introduction.token, self._credentials.identity)
        return await self._tcp.dial_over(sock, dialling, timeout_s, where=address)

    async def _through_nats(
        self, address: str, meeting: Meeting, dialling: Dialling, timeout_s: float
    ) -> FramedChannel:
        try:
            own = await self._udp.opened()
            await meeting.introduction((own,))
            (attempt,) = self._udp.attempts(address, dialling, timeout_s)
            return await attempt.start()
        finally:
            meeting.quic_is_over()

    async def _answer(self, listener: TcpListener, notice: MeetNotice, relay: tuple[str, int]) -> None:
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                sock = await through_relay((relay,), notice.token, self._credentials.identity)
        except (TransportError, TimeoutError) as error:
            _LOG.info("could not meet %s at the relay: %s", short(PeerId(notice.peer)), error)
            return
        listener.admit_relayed(sock, PeerId(notice.peer))

    def _seek_better_route(self, peer: PeerId, addresses: Sequence[str]) -> None:
        better = better_than_relay(addresses)
        if better and peer not in self._seeking:
            task = asyncio.get_running_loop().create_task(self._try_better_routes(peer, better))
            self._seeking[peer] = task
            task.add_done_callback(lambda _: self._seeking.pop(peer, None))

    async def _try_better_routes(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Try the better routes until one works or no link to `peer` goes over the relay any more."""
        wait_s = FIRST_RETRY_S
        while True:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LAST_RETRY_S)
            if not any(link.peer == peer and link.route == "relay" for link in self.links):
                return
            attempts = self._attempts(peer, addresses, Dialling(peer, "control", self._beside_broker), _RETRY_TIMEOUT_S)
            if not attempts:
                return
            try:
                channel = await first_to_answer(attempts, timeout_s=_RETRY_TIMEOUT_S)
            except FusionError as error:
                _LOG.debug("no better route to %s yet: %s", short(peer), error)
                continue
            _LOG.info("peer %s can be reached without the relay now (%s)", short(peer), channel.route)
            await channel.close()
            return

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)
