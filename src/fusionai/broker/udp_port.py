"""The broker's UDP port, by which machines behind routers learn how they are seen. Decides when it is opened.

At the first need, as most pools have none: with the port's number of TCP where that is free, so that one number is
forwarded. Without the library for QUIC there is none, and links that can't be dialled go over the relay.
Neighbours: `observer` needs it, `transport.quic` listens.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from fusionai.primitives.errors import FusionError
from fusionai.transport.credentials import MemberCredentials
from fusionai.transport.interface import Accept
from fusionai.transport.quic import QuicListener, QuicTransport

_LOG: Final = logging.getLogger(__name__)


class UdpPort:
    """`port`: that of TCP."""

    def __init__(self, credentials: MemberCredentials, accept: Accept, host: str, port: int) -> None:
        self._credentials = credentials
        self._accept = accept
        self._place = (host, port)
        self._opening = asyncio.Lock()
        self._tried = False
        self._listener: QuicListener | None = None

    async def opened(self) -> int:
        """Its number; 0 where there is none."""
        async with self._opening:
            if not self._tried:
                self._tried = True
                await self._open()
        return 0 if self._listener is None else self._listener.port

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()

    async def _open(self) -> None:
        host, port = self._place
        try:
            self._listener = await QuicTransport(self._credentials).listen(self._accept, host=host, port=port)
        except FusionError as error:
            _LOG.info("this broker has no UDP port: %s", error)
