"""Follows the addresses of the broker's machine while it runs, and announces the pool in the local network.

Home routers change addresses. Invitations made later name the new ones, and so does the announcement, by which members
find the broker again (`transport.broker_addresses`). A network without multicast costs the announcement only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fusionai.primitives.errors import StorageError, TransportError
from fusionai.transport.discovery import Announcer, NearbyPool, own_hosts
from fusionai.transport.routes.addresses import host_of, is_near

_LOG: Final = logging.getLogger(__name__)
CHECK_S: Final = 3.0
"""Time between two looks at this machine's addresses, in seconds: a quarter of a member's lease, so that members find a
broker that has moved before their leases end."""


def announceable(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Return the addresses that other machines of a local network may dial."""
    return tuple(address for address in addresses if is_near(host_of(address)))


@dataclass
class AddressWatch:
    """`addresses_now` returns the addresses of the broker's listener, `moved` is called when they have changed.
    `describe` returns the pool as it is announced at addresses. `announcer` None: nothing is announced."""

    addresses_now: Callable[[], tuple[str, ...]]
    moved: Callable[[tuple[str, ...]], None]
    describe: Callable[[tuple[str, ...]], NearbyPool]
    announcer: Announcer | None
    _addresses: tuple[str, ...] = ()
    _announced: tuple[NearbyPool, list[str]] | None = None
    _failure: str = ""

    async def run(self) -> None:
        """Watch until cancelled; then withdraw the announcement."""
        self._addresses = self.addresses_now()
        try:
            while True:
                await self._look()
                await asyncio.sleep(CHECK_S)
        finally:
            if self.announcer is not None:
                await self.announcer.close()

    async def _look(self) -> None:
        addresses = self.addresses_now()
        if addresses != self._addresses:
            _LOG.info("this broker can be reached elsewhere now: %s", ", ".join(addresses))
            self._addresses = addresses
            try:
                self.moved(addresses)
            except StorageError as error:
                _LOG.error("programs of this machine may not find the broker at its new address: %s", error)
        if self.announcer is None:
            return
        wanted = self.describe(announceable(addresses)), own_hosts()
        if wanted == self._announced:
            return
        try:
            await self.announcer.announce(*wanted)
        except TransportError as error:
            if error.message != self._failure:
                _LOG.warning("machines nearby can't find this broker by themselves: %s", error.message)
            self._announced, self._failure = None, error.message
        else:
            self._announced, self._failure = wanted, ""
