"""One attempt to reach a peer with the broker's help, shared by the routes that need an introduction.

The broker is asked once, by the first route that needs it. QUIC gets a head start before the relay, unless the relay
is what worked last time. `peer_transport` creates one per dial; `introductions` asks the broker.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fusionai.primitives.errors import RefusedError, TransportError
from fusionai.primitives.ids import PeerId, short
from fusionai.transport.introductions import Introduction, Introductions


class Meeting:
    """Shared state of the routes of one dial. Must be created inside an event loop."""

    def __init__(self, introductions: Introductions, peer: PeerId) -> None:
        self.peer = peer
        self._introductions = introductions
        self._asking: asyncio.Lock = asyncio.Lock()
        self._introduction: Introduction | None = None
        self._quic_over = asyncio.Event()
        self._quic_over.set()
        self._waived = False

    async def introduction(self, addresses: tuple[str, ...] = ()) -> Introduction:
        """Return the broker's introduction, asked for at the first call.

        `addresses`: where this side can be reached by UDP, for the other side to send to. Raises `TransportError`,
        `TrustError`.
        """
        async with self._asking:
            if self._introduction is None:
                try:
                    self._introduction = await self._introductions.ask(self.peer, addresses)
                except RefusedError as error:
                    # The broker's refusal to introduce says nothing about the routes that need no introduction.
                    raise TransportError(f"the broker could not introduce {short(self.peer)}: {error}") from error
            return self._introduction

    async def head_start(self, seconds: float) -> None:
        """Wait until the QUIC attempt is over, at most `seconds`."""
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
