"""One attempt to reach a peer with the broker's help: the ways that need an introduction share it. Decides who waits.

The broker is asked once, whichever way asks first. A way by UDP gets a head start before the relay, unless the relay is
what worked last time.
Neighbours: `peer_transport` makes one per dial; `introductions` asks the broker.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fusionai.primitives.errors import RefusedError, TransportError
from fusionai.primitives.ids import PeerId, short
from fusionai.transport.introductions import Introduction, Introductions


class Meeting:
    """Make it inside an event loop."""

    def __init__(self, introductions: Introductions, peer: PeerId) -> None:
        self.peer = peer
        self._introductions = introductions
        self._asking: asyncio.Lock = asyncio.Lock()
        self._introduction: Introduction | None = None
        self._quic_over = asyncio.Event()
        self._quic_over.set()
        self._waived = False

    async def introduction(self, addresses: tuple[str, ...] = ()) -> Introduction:
        """`addresses`: where this side is seen, for the other to send to. Raises `TransportError`, `TrustError`."""
        async with self._asking:
            if self._introduction is None:
                try:
                    self._introduction = await self._introductions.ask(self.peer, addresses)
                except RefusedError as error:
                    # The broker's refusal to introduce says nothing about the ways that do without it.
                    raise TransportError(f"the broker could not introduce {short(self.peer)}: {error}") from error
            return self._introduction

    async def head_start(self, seconds: float) -> None:
        """Until the way by UDP has had its time or is known to lead nowhere."""
        if not self._waived:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._quic_over.wait()

    def waive_head_start(self) -> None:
        self._waived = True

    def quic_is_tried(self) -> None:
        self._quic_over.clear()

    def quic_is_over(self) -> None:
        self._quic_over.set()
