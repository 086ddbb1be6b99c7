"""Reaches a peer by whichever way works: straight by TCP, or over the broker's relay. Decides which is tried when.

All ways are raced in the order `ways` gives; the relay is tried last and wins only while nothing else answers, or when
it is what worked last time. As long as a link goes over the relay, better ways are tried again in the background, and
the next connection takes what was found. The other side proves who it is on every way alike.

Neighbours: `tcp` dials, `introductions` asks the broker, `relay_dialling` goes through its relay, `racing` says who
wins; `peer` passes on what the broker's notices say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from fusionai.primitives.errors import FusionError, RefusedError, TransportError, UsageError
from fusionai.primitives.ids import PeerId, short
from fusionai.transport.addresses import RELAY_SCHEME, format_address, parse_address
from fusionai.transport.credentials import MemberCredentials
from fusionai.transport.framed import Dialling
from fusionai.transport.interface import Accept, Channel
from fusionai.transport.introductions import Introductions
from fusionai.transport.racing import Attempt, first_to_answer
from fusionai.transport.rate_limit import Limits
from fusionai.transport.relay_dialling import through_relay
from fusionai.transport.tcp import TcpTransport
from fusionai.transport.tcp_channel import TcpChannel
from fusionai.transport.tcp_listener import TcpListener
from fusionai.transport.ways import Ways, better_than_relay
from fusionai.wire.messages import LinkView, MeetNotice, Stream

_LOG: Final = logging.getLogger(__name__)
FIRST_LOOK_S: Final = 30.0
"""After a connection went over the relay; then twice as long each time, up to `LAST_LOOK_S`."""
LAST_LOOK_S: Final = 600.0
_LOOK_TIMEOUT_S: Final = 5.0
_ANSWER_TIMEOUT_S: Final = 10.0


class PeerTransport:
    """Implements `Transport` for a member. `brokers`: where it reaches its pool's. Make it inside an event loop."""

    def __init__(self, credentials: MemberCredentials, brokers: Sequence[str], *, rates: Limits | None = None) -> None:
        self._credentials = credentials
        self._tcp = TcpTransport(credentials, rates=rates)
        self._introductions = Introductions(self._tcp, brokers)
        self._ways = Ways()
        self._listener: TcpListener | None = None
        self._looking: dict[PeerId, asyncio.Task[None]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    @property
    def links(self) -> tuple[LinkView, ...]:
        """The links there are now, dialled or accepted."""
        return self._ways.links()

    async def listen(self, accept: Accept, *, host: str, port: int, strangers: bool = False) -> TcpListener:
        async def known(channel: Channel) -> None:
            if isinstance(channel, TcpChannel):
                self._ways.opened(channel)
            await accept(channel)

        self._listener = await self._tcp.listen(known, host=host, port=port, strangers=strangers)
        return self._listener

    async def dial(
        self, addresses: Sequence[str], *, expect: PeerId | None, stream: Stream, timeout_s: float = 10.0
    ) -> TcpChannel:
        if expect is None:
            return await self._tcp.dial(addresses, expect=None, stream=stream, timeout_s=timeout_s)
        dialling = Dialling(expect, stream)
        attempts = [
            attempt
            for address in self._ways.in_order(expect, addresses)
            for attempt in self._attempts(address, expect, dialling, timeout_s)
        ]
        if not attempts:
            raise UsageError(f"expected at least one address that can be dialled, got {list(addresses)}.")
        channel = await first_to_answer(attempts, timeout_s=timeout_s)
        self._ways.opened(channel)
        if channel.way == "relay":
            self._look_for_better(expect, addresses)
        return channel

    async def seen_at(self, listener: TcpListener) -> tuple[str, ...]:
        """Where this listener can be dialled from outside, if the broker could: a public address, or one whose router
        forwards the same port. Nothing where that can't be found out."""
        targets = [target for address in listener.addresses if (target := parse_address(address)) is not None]
        if not targets:
            return ()
        try:
            observed = await self._introductions.observed(targets[0][1])
        except FusionError as error:
            _LOG.info("the broker could not say how it sees this machine: %s", error)
            return ()
        address = format_address(observed.host, targets[0][1]) if observed.reachable else ""
        return (address,) if address and address not in listener.addresses else ()

    def answer(self, notice: MeetNotice, relay: tuple[str, int]) -> None:
        """Another member can't dial this one: meet it at the relay, and let it in as if it had come to the door.

        `relay`: where the broker that sent the notice was reached."""
        if self._listener is None:
            return
        task = asyncio.get_running_loop().create_task(self._answer(self._listener, notice, relay))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def close(self) -> None:
        """End what goes on in the background. Channels and the listener are their holders'."""
        tasks = [*self._looking.values(), *self._answering]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._introductions.close()

    def _attempts(self, address: str, peer: PeerId, dialling: Dialling, timeout_s: float) -> list[Attempt[TcpChannel]]:
        if parse_address(address, RELAY_SCHEME) is None:
            straight = self._tcp.attempts((address,), dialling, timeout_s)
            return [Attempt(one.name, lambda one=one: self._noted(peer, address, one)) for one in straight]
        relayed = Attempt(address, lambda: self._over_relay(address, peer, dialling, timeout_s))
        return [Attempt(address, lambda: self._noted(peer, address, relayed))]

    async def _noted(self, peer: PeerId, address: str, attempt: Attempt[TcpChannel]) -> TcpChannel:
        channel = await attempt.start()
        self._ways.worked(peer, address)
        return channel

    async def _over_relay(self, address: str, peer: PeerId, dialling: Dialling, timeout_s: float) -> TcpChannel:
        try:
            introduction = await self._introductions.ask(peer)
        except RefusedError as error:
            # The broker's refusal to introduce says nothing about the ways that do without it.
            raise TransportError(f"the broker could not introduce {short(peer)}: {error}") from error
        if not introduction.token:
            raise TransportError(f"peer {short(peer)} could be reached over a relay only, and this pool has none.")
        sock = await through_relay(introduction.relays, introduction.token, self._credentials.identity)
        return await self._tcp.dial_over(sock, dialling, timeout_s, where=address)

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
            dialling = Dialling(peer, "control")
            attempts = [
                attempt for address in addresses for attempt in self._attempts(address, peer, dialling, _LOOK_TIMEOUT_S)
            ]
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
