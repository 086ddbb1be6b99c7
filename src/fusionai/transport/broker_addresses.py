"""Where a pool's broker can be reached, also after it has moved: known addresses, and those that it announces.

A broker gets a new address when its router assigns one, or when its home is moved to another machine. Members and job
owners dial the known addresses. If none of them answers at once, they also look for the pool in the local network
(`discovery`). A broker also says at which addresses the pool's brokers are. No address proves anything: TLS shows
whether the machine at that address is the broker, at each address alike. An announced address that worked is tried
first from then on, and kept with the membership.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from fusionai.primitives.errors import FusionError, TransportError, TrustError
from fusionai.transport.discovery import NearbyPool, nearby_pools
from fusionai.transport.interface import Channel, Transport
from fusionai.transport.routes.addresses import format_address, host_of, is_loopback
from fusionai.wire.messages import Stream

_LOG: Final = logging.getLogger(__name__)
HEAD_START_S: Final = 1.0
"""Time for the known addresses before the local network is asked, in seconds: longer than a handshake over a slow
line."""
MAX_KNOWN: Final = 16
"""Most addresses that are kept; those that worked longest ago are dropped."""
MAX_TRIED: Final = 64
"""Most announced addresses that are tried at once."""
LOOKED_FOR_S: Final = 4.0


async def _announced_pool(key: bytes) -> tuple[NearbyPool, ...]:
    return await nearby_pools(LOOKED_FOR_S, key=key)


@dataclass(slots=True)
class BrokerAddresses:
    """`known`: best first. `authority_key`: key of the pool that is looked for; empty: only known addresses are
    dialled. `on_learned` is called with the known addresses when there is a new one."""

    known: tuple[str, ...]
    authority_key: bytes = field(default=b"", compare=False)
    on_learned: Callable[[tuple[str, ...]], None] = field(default=lambda _: None, compare=False, repr=False)
    find: Callable[[bytes], Awaitable[tuple[NearbyPool, ...]]] = field(
        default=_announced_pool, compare=False, repr=False
    )
    _reached: bool = field(default=False, init=False, compare=False, repr=False)
    _first: int = field(default=0, init=False, compare=False, repr=False)
    """Which of the known addresses is tried first."""

    @property
    def is_beside(self) -> bool:
        """Whether the broker is on this machine."""
        return bool(self.known) and is_loopback(host_of(self.known[0]))

    async def dial(self, transport: Transport, *, stream: Stream = "control", timeout_s: float = 10.0) -> Channel:
        """Return a connection to the broker. Raises as `Transport.dial`, for the known addresses. Once the broker was
        reached, another machine at its address is no `TrustError`: it may have got the address that the broker had."""
        try:
            channel = await self._dial(transport, stream, timeout_s)
        except TrustError as error:
            if not self._reached:
                raise
            raise TransportError(f"another machine answers where the broker was: {error.message}") from error
        self._reached = True
        return channel

    def learn(self, addresses: Sequence[str]) -> None:
        """Know these addresses of the pool's brokers too, after those that are known."""
        known = (*self.known, *(place for place in dict.fromkeys(addresses) if place not in self.known))[:MAX_KNOWN]
        if known != self.known:
            self._keep(known)

    def pass_over(self) -> None:
        """Begin with the next address from now on: the broker that answers can't serve at present, and another one may
        have taken over."""
        self._first += 1

    async def _dial(self, transport: Transport, stream: Stream, timeout_s: float) -> Channel:
        first = self._first % max(1, len(self.known))
        order = self.known[first:] + self.known[:first]
        known = asyncio.create_task(transport.dial(order, expect=None, stream=stream, timeout_s=timeout_s))
        tried = [known]
        channel: Channel | None = None
        try:
            await asyncio.wait(tried, timeout=HEAD_START_S if self._may_move else None)
            if self._may_move and (not known.done() or isinstance(known.exception(), TransportError | TrustError)):
                tried.append(asyncio.create_task(self._dial_announced(transport, stream, timeout_s)))
                await asyncio.wait(tried, return_when=asyncio.FIRST_COMPLETED)
                if not any(_succeeded(one) for one in tried):
                    await asyncio.wait(tried)
            channel = next((one for one in tried if _succeeded(one)), known).result()
            return channel
        finally:
            for task in tried:
                task.cancel()
            for outcome in await asyncio.gather(*tried, return_exceptions=True):
                if not isinstance(outcome, BaseException) and outcome is not channel:
                    outcome.abort()

    @property
    def _may_move(self) -> bool:
        """Whether the broker may be elsewhere. One that is known at loopback addresses only announces nothing."""
        return bool(self.authority_key) and not all(is_loopback(host_of(one)) for one in self.known)

    async def _dial_announced(self, transport: Transport, stream: Stream, timeout_s: float) -> Channel:
        found = [place for pool in await self.find(self.authority_key) for place in pool.addresses]
        new = [place for place in dict.fromkeys(found) if place not in self.known][:MAX_TRIED]
        if not new:
            raise TransportError("the broker announces no other address in the local network.")
        _LOG.info("the broker may be at %s now", ", ".join(new))
        try:
            channel = await transport.dial(new, expect=None, stream=stream, timeout_s=timeout_s)
        except FusionError as error:
            # Anybody may announce anything, so that a false address is no finding about the pool.
            raise TransportError(f"at the announced addresses the broker was not found: {error.message}") from error
        address = format_address(channel.remote.host, channel.remote.port)
        _LOG.info("the broker is at %s now", address)
        self._keep((address, *self.known)[:MAX_KNOWN])
        return channel

    def _keep(self, known: tuple[str, ...]) -> None:
        self.known = known
        self.on_learned(known)


def _succeeded(task: asyncio.Task[Channel]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
