"""This machine's UDP port for QUIC through NATs: how the broker sees it, and which peers may connect.

A NAT lets in UDP packets that answer outgoing ones. So both sides send to each other at the same time, each to the
address from which the broker receives the other's packets. The connection to the broker that observed the address
stays open, which keeps the NAT's entry alive.

The port is opened when it is first needed. Without the library, or without a broker that observes UDP ports, this
route does not exist: that is logged and other routes are used. `quic` moves the bytes, `introductions` informs
the other side, `peer_transport` decides when to try.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from fusionai.primitives.errors import FusionError, TransportError, WireError
from fusionai.primitives.ids import PeerId, short
from fusionai.transport.conversation import Conversation
from fusionai.transport.credentials import MemberCredentials
from fusionai.transport.framed import Dialling
from fusionai.transport.interface import Accept
from fusionai.transport.introductions import Introductions
from fusionai.transport.quic import QuicListener, QuicTransport, format_quic, parse_quic
from fusionai.transport.quic_channel import QuicChannel
from fusionai.transport.racing import Attempt
from fusionai.transport.rate_limit import Limits
from fusionai.wire.messages import Observe, Observed

_LOG: Final = logging.getLogger(__name__)
_OBSERVE_S: Final = 3.0
KNOCK_S: Final = 5.0
"""Time limit for sending to a peer that is dialling this machine, in seconds."""


class UdpDoor:
    """Owns the UDP endpoint. If it is opened without `accept`, this side only dials."""

    def __init__(self, credentials: MemberCredentials, introductions: Introductions, rates: Limits) -> None:
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
        """Forget the observed address, because it may have changed.

        QUIC itself survives a move and would not notice.
        """
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
        broker, seen = await self._introductions.observed_by(0)
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


async def opened_or_none(door: UdpDoor, accept: Accept) -> str | None:
    """Return the address for others, or None if this machine can't be reached by UDP."""
    try:
        return await door.opened(accept)
    except FusionError as error:
        _LOG.info("no route by UDP: %s", error)
        return None
