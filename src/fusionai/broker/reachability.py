"""How members reach each other: introductions of two members, and how a member is seen from the broker.

Each side of an introduction gets its own pairing token, valid for one connection to this broker's relay within half a
minute. A member that announced no relay is not notified. Of the addresses that the asking side names, only those with
the host of its own connection are passed on; otherwise a member could make another one dial any address.

A member behind a router learns from `Observer` its address as seen from outside, and whether its TCP port can be
dialled. The broker's UDP port, opened when it is first needed, answers the same question for UDP. It has the number of
the TCP port where that is free, so that one number is forwarded. `service` asks, `transport.routes.relay` accepts the
tokens."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from fusionai.coordination.broker.requests import Refusal
from fusionai.coordination.broker.state import BrokerState
from fusionai.primitives.errors import FusionError
from fusionai.primitives.ids import PeerId, short
from fusionai.transport.interface import Accept, Remote, Transport
from fusionai.transport.routes.addresses import RELAY_SCHEME, format_address, host_of
from fusionai.transport.routes.quic import QuicListener, QuicTransport
from fusionai.transport.security.certificates import Authority, MemberCredentials
from fusionai.transport.security.signed import LIFETIME_S, MEETING_BYTES, PairingToken, Side, sign_pairing
from fusionai.wire.messages import Introduced, Meet, MeetNotice, Observe, Observed


@dataclass(frozen=True, slots=True)
class Introducer:
    """Introduces members. `relays`: this broker has a relay. `draw` returns the random number of a meeting."""

    authority: Authority
    relays: bool = False
    draw: Callable[[], bytes] = lambda: secrets.token_bytes(MEETING_BYTES)

    def introduce(
        self, state: BrokerState, remote: Remote, message: Meet, *, now_wall_s: float
    ) -> tuple[Introduced, int, MeetNotice]:
        """Return the answer, the other side's connection, and the notice for it. Raises `Refusal`."""
        asking = remote.peer
        if asking is None:
            raise Refusal("not_authorised", "Only members are introduced.")
        member = state.pool.members.get(PeerId(message.peer))
        if member is None or member.peer == asking:
            raise Refusal("unknown_peer", "There is no such other peer in this pool.")
        connection = state.links.get(member.peer)
        if connection is None or not state.reachable(member):
            raise Refusal("unknown_peer", f"Peer {short(member.peer)} is not connected to the broker now.")
        if not any(address.startswith(f"{RELAY_SCHEME}://") for address in member.addresses):
            raise Refusal("not_authorised", f"Peer {short(member.peer)} wants to be dialled only.")
        meeting, expires_at_s = self.draw(), now_wall_s + LIFETIME_S

        def token(peer: PeerId, other: PeerId, side: Side) -> bytes:
            if not self.relays:
                return b""
            return sign_pairing(PairingToken(meeting, peer, other, side, expires_at_s), self.authority.key)

        own = tuple(address for address in message.addresses if remote.host and host_of(address) == remote.host)
        answer = Introduced(token=token(asking, member.peer, "dials"), addresses=member.addresses)
        notice = MeetNotice(peer=asking, token=token(member.peer, asking, "answers"), addresses=own)
        return answer, connection, notice


TIMEOUT_S: Final = 2.0
AT_A_TIME: Final = 8
"""Connection attempts at the same time; further requests wait."""


class Observer:
    """Reports to a member how it is seen from here; dials back only the asking machine itself. `open_udp` opens the UDP
    port of this machine and returns its number, or 0."""

    def __init__(self, transport: Transport, open_udp: Callable[[], Awaitable[int]] | None = None) -> None:
        self._transport = transport
        self._open_udp = open_udp
        self._attempts = asyncio.Semaphore(AT_A_TIME)

    async def answer(self, remote: Remote, message: Observe) -> Observed:
        """Return the observation, within `TIMEOUT_S` once an attempt may start."""
        reachable = False
        if remote.host and message.port:
            async with self._attempts:
                reachable = await self._reaches(remote, message.port)
        udp_port = 0 if reachable or self._open_udp is None else await self._open_udp()
        return Observed(host=remote.host, port=remote.port, reachable=reachable, udp_port=udp_port)

    async def _reaches(self, remote: Remote, port: int) -> bool:
        address = format_address(remote.host, port)
        try:
            channel = await self._transport.dial((address,), expect=remote.peer, stream="control", timeout_s=TIMEOUT_S)
        except FusionError:
            # Any failure counts: other machines could not connect either.
            return False
        channel.abort()
        return True


_LOG: Final = logging.getLogger(__name__)


@dataclass
class UdpPort:
    """The broker's UDP port. `port`: number of its TCP port, which is preferred."""

    credentials: MemberCredentials
    accept: Accept
    host: str
    port: int
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    _tried: bool = False
    _listener: QuicListener | None = None

    async def opened(self) -> int:
        """Open the port if this was not tried before; return its number, or 0."""
        async with self._opening:
            if not self._tried:
                self._tried = True
                try:
                    transport = QuicTransport(self.credentials)
                    self._listener = await transport.listen(self.accept, host=self.host, port=self.port)
                except FusionError as error:
                    _LOG.info("this broker has no UDP port: %s", error)
        return 0 if self._listener is None else self._listener.port

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()
