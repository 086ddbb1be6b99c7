"""Reaches a peer by whichever way works: straight by TCP, through routers by QUIC, or over the broker's relay.

Decides which is tried when. All ways are raced in the order `ways` gives; the relay is tried last and wins only while
nothing else answers, or when it is what worked last time. As long as a link goes over the relay, better ways are tried
again in the background, and the next connection takes what was found. The other side proves who it is on every way
alike.

Neighbours: `tcp` dials, `udp_door` goes through routers, `introductions` asks the broker, `relay_dialling` goes through
its relay, `racing` says who wins; `peer` passes on what the broker's notices say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

from fusionai.primitives.errors import FusionError, TransportError, UsageError
from fusionai.primitives.ids import PeerId, short
from fusionai.transport.addresses import RELAY_SCHEME, format_address, parse_address, port_of
from fusionai.transport.credentials import MemberCredentials
from fusionai.transport.framed import Dialling, FramedChannel
from fusionai.transport.interface import Accept, Channel
from fusionai.transport.introductions import Introductions
from fusionai.transport.meeting import Meeting
from fusionai.transport.quic import parse_quic
from fusionai.transport.racing import Attempt, first_to_answer
from fusionai.transport.rate_limit import Limits
from fusionai.transport.relay_dialling import through_relay
from fusionai.transport.tcp import TcpTransport
from fusionai.transport.tcp_listener import TcpListener
from fusionai.transport.udp_door import UdpDoor, opened_or_none
from fusionai.transport.ways import Ways, better_than_relay
from fusionai.wire.messages import LinkView, MeetNotice, Stream

_LOG: Final = logging.getLogger(__name__)
FIRST_LOOK_S: Final = 30.0
"""After a connection went over the relay; then twice as long each time, up to `LAST_LOOK_S`."""
LAST_LOOK_S: Final = 600.0
_LOOK_TIMEOUT_S: Final = 5.0
_ANSWER_TIMEOUT_S: Final = 10.0
MAX_ANSWERING: Final = 64
"""Meetings under way that others asked for."""
QUIC_HEAD_START_S: Final = 1.0
"""Two sides that send at the same time need about a second; the relay is not to win for that alone."""


class PeerTransport:
    """Implements `Transport` for a member. `brokers`: where it reaches its pool's. `admits` raises `TrustError` for
    another member that this machine may not dial, whatever plan or message names it. Make it inside an event loop."""

    def __init__(
        self,
        credentials: MemberCredentials,
        brokers: Sequence[str],
        *,
        rates: Limits | None = None,
        admits: Callable[[PeerId], None] = lambda _peer: None,
    ) -> None:
        self._credentials = credentials
        self._admits = admits
        rates = rates or Limits()
        self._tcp = TcpTransport(credentials, rates=rates)
        self._introductions = Introductions(self._tcp, brokers)
        self._udp = UdpDoor(credentials, self._introductions, rates)
        self._ways = Ways()
        self._accept: Accept | None = None
        self._listener: TcpListener | None = None
        self._looking: dict[PeerId, asyncio.Task[None]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    @property
    def moved(self) -> bool:
        """Whether this machine is seen elsewhere by UDP than it said, or no longer."""
        return self._udp.lost

    @property
    def links(self) -> tuple[LinkView, ...]:
        """The links there are now, dialled or accepted."""
        return self._ways.links()

    async def listen(self, accept: Accept, *, host: str, port: int, strangers: bool = False) -> TcpListener:
        async def known(channel: Channel) -> None:
            if isinstance(channel, FramedChannel):
                self._ways.opened(channel)
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
        ordered = self._ways.in_order(expect, addresses, asyncio.get_running_loop().time())
        attempts = self._attempts(expect, ordered, Dialling(expect, stream), timeout_s)
        if not attempts:
            raise UsageError(f"expected at least one address that can be dialled, got {list(addresses)}.")
        channel = await first_to_answer(attempts, timeout_s=timeout_s)
        self._ways.opened(channel)
        if channel.way == "relay":
            self._look_for_better(expect, addresses)
        return channel

    async def seen_at(self, listener: TcpListener) -> tuple[str, ...]:
        """Where this listener can be dialled from outside, if the broker could: a public address, or one whose router
        forwards the same port. Where it can't, the way by UDP. Nothing where that can't be found out."""
        port = port_of(listener.addresses)
        await self._udp.forget()
        try:
            # Over a connection of its own: one from before a move would be seen where this machine was.
            await self._introductions.close()
            observed = await self._introductions.observed(port)
        except FusionError as error:
            _LOG.info("the broker could not say how it sees this machine: %s", error)
            return ()
        if observed.reachable:
            address = format_address(observed.host, port)
            return () if address in listener.addresses else (address,)
        if self._accept is None:
            return ()
        address = await opened_or_none(self._udp, self._accept)
        return () if address is None else (address,)

    def answer(self, notice: MeetNotice, relay: tuple[str, int]) -> None:
        """Another member can't dial this one: meet it at the relay, and let it in as if it had come to the door; at the
        same time send to where it is seen, so that it gets through by UDP.

        `relay`: where the broker that sent the notice was reached."""
        if self._listener is None:
            return
        if len(self._answering) >= MAX_ANSWERING:
            _LOG.info("%s wants to be met, and too many others are being met now", short(PeerId(notice.peer)))
            return
        if notice.token:
            self._start(self._answer(self._listener, notice, relay))
        self._start(self._udp.knock(PeerId(notice.peer), notice.addresses))

    async def close(self) -> None:
        """End what goes on in the background. Channels and the listener are their holders'."""
        tasks = [*self._looking.values(), *self._answering]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._udp.close()
        await self._introductions.close()

    def _attempts(
        self, peer: PeerId, addresses: Sequence[str], dialling: Dialling, timeout_s: float
    ) -> list[Attempt[FramedChannel]]:
        """One for each address, in order; they share one introduction."""
        meeting = Meeting(self._introductions, peer)
        if addresses and parse_address(addresses[0], RELAY_SCHEME) is not None:
            meeting.waive_head_start()
        attempts: list[Attempt[FramedChannel]] = []
        for address in addresses:
            if parse_address(address, RELAY_SCHEME) is not None:
                start = partial(self._over_relay, address, meeting, dialling, timeout_s)
            elif parse_quic(address) is not None:
                meeting.quic_is_tried()
                start = partial(self._through_routers, address, meeting, dialling, timeout_s)
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
        self._ways.worked(peer, address, among, asyncio.get_running_loop().time())
        return channel

    async def _over_relay(self, address: str, meeting: Meeting, dialling: Dialling, timeout_s: float) -> FramedChannel:
        await meeting.head_start(QUIC_HEAD_START_S)
        introduction = await meeting.introduction()
        if not introduction.token:
            raise TransportError(f"peer {short(meeting.peer)} could be reached over a relay only; this pool has none.")
        sock = await through_relay(introduction.relays, introduction.token, self._credentials.identity)
        return await self._tcp.dial_over(sock, dialling, timeout_s, where=address)

    async def _through_routers(
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
        listener.admit_relayed(sock)

    def _look_for_better(self, peer: PeerId, addresses: Sequence[str]) -> None:
        better = better_than_relay(addresses)
        if better and peer not in self._looking:
            task = asyncio.get_running_loop().create_task(self._look(peer, better))
            self._looking[peer] = task
            task.add_done_callback(lambda _: self._looking.pop(peer, None))

    async def _look(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Until a better way is found or no link goes over the relay any more."""
        wait_s = FIRST_LOOK_S
        while True:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LAST_LOOK_S)
            if not any(link.peer == peer and link.way == "relay" for link in self.links):
                return
            attempts = self._attempts(peer, addresses, Dialling(peer, "control"), _LOOK_TIMEOUT_S)
            if not attempts:
                return
            try:
                channel = await first_to_answer(attempts, timeout_s=_LOOK_TIMEOUT_S)
            except FusionError as error:
                _LOG.debug("no better way to %s yet: %s", short(peer), error)
                continue
            _LOG.info("peer %s can be reached without the relay now (%s)", short(peer), channel.way)
            await channel.close()
            return

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)
