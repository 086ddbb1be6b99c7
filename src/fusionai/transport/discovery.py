"""Pools in the local network: brokers announce theirs by mDNS and DNS-SD (RFC 6762, 6763), other machines list them.

An announcement holds the pool's name, its authority's public key, the number of its machines, and addresses. Nothing of
it is secret, and anybody in the network can announce anything. It is therefore a hint where to dial and no more: a
machine uses only a broker whose TLS proves a certificate of the announced authority, and a newcomer only after the
exchange of `security.code_exchange`. What is received is checked here; addresses outside local networks are dropped, so
that an announcement can't make machines dial into the internet.

`broker.announcing` announces, `cli.pool.join` lists, `broker_addresses` looks for a pool whose broker has moved.
`zeroconf` is imported when it is needed.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fusionai.primitives.errors import TransportError
from fusionai.primitives.ids import PeerId, short
from fusionai.transport.routes.addresses import (
    candidates,
    format_address,
    host_of,
    ip_of,
    is_loopback,
    is_near,
    parse_address,
)
from fusionai.transport.security.certificates import MAX_POOL_NAME_LENGTH
from fusionai.transport.security.identity import PUBLIC_KEY_BYTES, peer_of

if TYPE_CHECKING:
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

_LOG: Final = logging.getLogger(__name__)
_LIBRARY_LOG: Final = logging.getLogger("zeroconf")
SERVICE: Final = "_fusionai._tcp.local."
LISTED_AFTER_S: Final = 2.5
"""Seconds for which answers are collected. Brokers answer within 0.12 s (RFC 6762, section 6); lost questions are sent
again after 1 s."""
_DETAILS_S: Final = 1.5
_GRACE_S: Final = 0.5
"""Once a pool that is looked for has been found, answers are collected for this long, in seconds: another machine may
have announced it falsely, and sooner."""
MAX_SERVICES: Final = 64
"""Most announcements that one look-up considers."""
MAX_HOSTS: Final = 16
"""Most addresses taken from one announcement."""
MAX_MACHINES: Final = 1_000_000
_NAME_BYTES: Final = 200
"""A TXT entry holds 255 bytes, with its key."""


@dataclass(frozen=True, slots=True)
class NearbyPool:
    """What was announced. `machines` None: it was not said. Nothing of it is proven."""

    name: str
    authority_key: bytes
    addresses: tuple[str, ...]
    machines: int | None = None

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.authority_key)


def fingerprint(authority_key: bytes) -> str:
    """Return the beginning of a pool's key, by which people tell two pools of the same name apart."""
    return short(PeerId(peer_of(authority_key)))


def announced(properties: Mapping[bytes, bytes | None], hosts: Sequence[str], port: int) -> NearbyPool | None:
    """Return the pool of a received announcement; None if it is malformed or names no address that may be dialled."""
    try:
        name = (properties.get(b"pool") or b"").decode()
        key = base64.b64decode(properties.get(b"key") or b"", altchars=b"-_", validate=True)
        machines = int(properties.get(b"machines") or b"-1")
    except (UnicodeDecodeError, binascii.Error, ValueError):
        return None
    if not 0 < len(name) <= MAX_POOL_NAME_LENGTH or not name.isprintable() or len(key) != PUBLIC_KEY_BYTES:
        return None
    near = [host for host in hosts[:MAX_HOSTS] if ip_of(host) is not None and is_near(host)]
    if not near or not 0 < port < 65_536:
        return None
    addresses = tuple(dict.fromkeys(format_address(host, port) for host in near))
    return NearbyPool(name, key, addresses, machines if 0 <= machines <= MAX_MACHINES else None)


def _properties(pool: NearbyPool) -> dict[str, str | bytes]:
    known: dict[str, str | bytes] = {
        "pool": pool.name.encode()[:_NAME_BYTES].decode(errors="ignore"),
        "key": base64.urlsafe_b64encode(pool.authority_key),
    }
    return known if pool.machines is None else {**known, "machines": str(pool.machines)}


def own_hosts() -> list[str]:
    """Return the addresses of this machine's interfaces at which mDNS is spoken: IPv4, without loopback."""
    hosts = [host_of(address) for address in candidates("0.0.0.0", 1)]
    return [host for host in hosts if not is_loopback(host)]


class Announcer:
    """Announces one pool on this machine's interfaces. Call `announce` again when something has changed."""

    def __init__(self) -> None:
        self._zeroconf: AsyncZeroconf | None = None
        self._info: AsyncServiceInfo | None = None
        self._hosts: list[str] = []

    async def announce(self, pool: NearbyPool, hosts: list[str]) -> None:
        """Announce `pool` on the interfaces with these addresses; withdraw it if it has none itself. Raises
        `TransportError`."""
        from zeroconf.asyncio import AsyncServiceInfo

        targets = [target for address in pool.addresses if (target := parse_address(address)) is not None]
        if not targets:
            await self.close()
            return
        if hosts != self._hosts:
            # Sockets are bound to the addresses that the interfaces had.
            await self.close()
        info = AsyncServiceInfo(
            SERVICE,
            f"{pool.fingerprint}-{targets[0][1]}.{SERVICE}",
            parsed_addresses=[host for host, _ in targets],
            port=targets[0][1],
            properties=_properties(pool),
            server=f"fusionai-{pool.fingerprint}.local.",
        )
        try:
            if self._zeroconf is None or self._info is None:
                self._zeroconf = await _opened(hosts)
                self._hosts = hosts
                await (await self._zeroconf.async_register_service(info, allow_name_change=True))
            else:
                info.name = self._info.name
                await (await self._zeroconf.async_update_service(info))
        except Exception as error:
            await self.close()
            raise TransportError(f"announcing the pool in the local network failed: {error!r}.") from error
        self._info = info

    async def close(self) -> None:
        """Withdraw the announcement. Raises nothing."""
        zeroconf, self._zeroconf, self._info, self._hosts = self._zeroconf, None, None, []
        if zeroconf is not None:
            try:
                await zeroconf.async_close()
            except Exception as error:  # noqa: BLE001 - the network may have gone
                _LOG.debug("an announcement could not be withdrawn: %r", error)


async def nearby_pools(wait_s: float = LISTED_AFTER_S, *, key: bytes | None = None) -> tuple[NearbyPool, ...]:
    """Return the pools that are announced within `wait_s`, by name, one for each key. With `key`, return that pool's as
    soon as it is found. Empty if this machine can't ask, which is logged."""
    found: list[NearbyPool] = []
    arrived = asyncio.Event()

    def take(pool: NearbyPool | None) -> None:
        if pool is not None and key in (None, pool.authority_key):
            found.append(pool)
            arrived.set()

    try:
        async with _browsing(take):
            try:
                async with asyncio.timeout(wait_s):
                    await (arrived.wait() if key is not None else asyncio.Event().wait())
                    await asyncio.sleep(_GRACE_S)
            except TimeoutError:
                pass
    except TransportError as error:
        _LOG.info("%s", error)
    return merged(found)


def merged(found: Sequence[NearbyPool]) -> tuple[NearbyPool, ...]:
    """Return one pool for each key, by name, with the addresses of all its announcements."""
    pools: dict[bytes, NearbyPool] = {}
    for pool in found:
        known = pools.get(pool.authority_key, pool)
        addresses = tuple(dict.fromkeys((*known.addresses, *pool.addresses)))
        pools[pool.authority_key] = NearbyPool(known.name, pool.authority_key, addresses, known.machines)
    return tuple(sorted(pools.values(), key=lambda pool: (pool.name, pool.fingerprint)))


@asynccontextmanager
async def _browsing(take: Callable[[NearbyPool | None], None]) -> AsyncIterator[None]:
    """Call `take` with every announcement, or None for a malformed one, until the end. Raises `TransportError`."""
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo

    seen: set[str] = set()
    asking: set[asyncio.Task[None]] = set()

    async def ask(name: str) -> None:
        info = AsyncServiceInfo(SERVICE, name)
        if await info.async_request(zeroconf.zeroconf, _DETAILS_S * 1000):
            take(announced(info.properties, info.parsed_addresses(), info.port or 0))

    def changed(*, name: str, **_: object) -> None:
        if name not in seen and len(seen) < MAX_SERVICES:
            seen.add(name)
            asking.add(asyncio.get_running_loop().create_task(ask(name)))

    zeroconf = await _opened(own_hosts())
    try:
        browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE, handlers=[changed])
        yield
        await browser.async_cancel()
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await zeroconf.async_close()


async def _opened(hosts: list[str]) -> AsyncZeroconf:
    """Open sockets for mDNS on the interfaces with these addresses. Raises `TransportError`."""
    from zeroconf import IPVersion
    from zeroconf.asyncio import AsyncZeroconf

    # It writes a traceback when an address is gone. What matters of its failures is raised.
    _LIBRARY_LOG.setLevel(logging.CRITICAL)
    if not hosts:
        raise TransportError("this machine is in no local network.")
    try:
        return AsyncZeroconf(interfaces=hosts, ip_version=IPVersion.V4Only)
    except Exception as error:
        raise TransportError(f"mDNS can't be used on this machine: {error!r}.") from error
