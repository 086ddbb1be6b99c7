"""Tells members how they are seen from here. Decides whom it dials back: the asking machine itself, and nobody else.

Behind a router a machine does not know its address from outside, nor whether a port forwarded to it works. The broker
sees the one and can try the other: it connects to the address the question came from, at the port that was named, and
believes only the asking peer's own key there.
Neighbours: `server` passes questions on; `peer` and `fusion doctor` ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from fusionai.primitives.errors import FusionError
from fusionai.transport.addresses import format_address
from fusionai.transport.interface import Remote, Transport
from fusionai.wire.messages import Observe, Observed

TIMEOUT_S: Final = 2.0
AT_A_TIME: Final = 8
"""Others wait their turn."""


class Observer:
    """`open_udp` opens this machine's UDP port once somebody needs it; it gives the port, 0 for none."""

    def __init__(self, transport: Transport, open_udp: Callable[[], Awaitable[int]] | None = None) -> None:
        self._transport = transport
        self._open_udp = open_udp
        self._turn = asyncio.Semaphore(AT_A_TIME)

    async def answer(self, remote: Remote, message: Observe) -> Observed:
        """Within `TIMEOUT_S` once it is its turn."""
        reachable = False
        if remote.host and message.port:
            async with self._turn:
                reachable = await self._reaches(remote, message.port)
        udp_port = 0 if reachable or self._open_udp is None else await self._open_udp()
        return Observed(host=remote.host, port=remote.port, reachable=reachable, udp_port=udp_port)

    async def _reaches(self, remote: Remote, port: int) -> bool:
        address = format_address(remote.host, port)
        try:
            channel = await self._transport.dial((address,), expect=remote.peer, stream="control", timeout_s=TIMEOUT_S)
        except FusionError:
            # Whatever it was, others would fare no better.
            return False
        channel.abort()
        return True
