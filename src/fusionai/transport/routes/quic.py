"""QUIC by iroh: UDP connections that get through NATs because both sides send at the same time.

The machine's Ed25519 key is its identity in QUIC too, so the connection itself proves who is at the other end. No
third-party service is used: no discovery and no foreign relay. Each channel is a connection of its own. All of them
share one UDP port, which stays open as long as a channel or the listener uses it. Addresses are
`quic://peer@host:port`.

`channels.quic` moves bytes, `peer_transport` decides when QUIC is tried.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.metadata
import logging
import secrets
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any, Final

from fusionai.coordination.doorkeeping import prefix_of
from fusionai.primitives.errors import TransportError, TrustError, UsageError
from fusionai.primitives.ids import PeerId, short
from fusionai.transport.channels.accepting import AcceptedTasks, AcceptLimits
from fusionai.transport.channels.framed import Dialling
from fusionai.transport.channels.quic import QuicChannel
from fusionai.transport.channels.uplink import TransferLimits
from fusionai.transport.interface import Accept
from fusionai.transport.routes.addresses import Attempt, RacingTransport, candidates, format_address, parse_address
from fusionai.transport.security.certificates import Credentials, MemberCredentials
from fusionai.transport.security.identity import public_key_of

VERSION: Final = "1.2.0"
_SAMPLES: Final = (b"", b"\x00", bytes(range(256)), b"\xff" * 15, b"ab" * 8, bytes(range(251)) * 40)
"""Test data, written one after another into one buffer that has to grow meanwhile."""
_INSTALL: Final = "Install it with `pip install 'fusionai[quic]'`; without it links go by TCP or over the relay."


def load() -> ModuleType:
    """Return the library with its copying repaired. Raises `TransportError` saying what is missing."""
    try:
        version = importlib.metadata.version("iroh")
        from iroh import iroh_ffi
    except (ImportError, OSError) as error:
        raise TransportError(f"QUIC needs the package iroh, which can't be loaded ({error}).", hint=_INSTALL) from error
    if version != VERSION:
        raise TransportError(f"QUIC needs iroh {VERSION}, {version} is installed.", hint=_INSTALL)
    _repair(iroh_ffi)
    return iroh_ffi


def available() -> bool:
    try:
        load()
    except TransportError:
        return False
    return True


def _repair(library: Any) -> None:
    """Replace the binding's copy, once per process. Raises `TransportError`, and leaves the library unchanged, if the
    replacement gives another result."""
    builder = library._UniffiRustBufferBuilder
    if builder.write is _write_at_once:
        return
    original = builder.write
    wanted = _written(library, original)
    if wanted != b"".join(_SAMPLES) or _written(library, _write_at_once) != wanted:
        raise TransportError(
            f"iroh {VERSION} is installed, but its Python binding is not the one expected.", hint=_INSTALL
        )
    builder.write = _write_at_once


def _written(library: Any, write: Any) -> bytes:
    """Return the content of a buffer after the samples have been written into it."""
    builder = library._UniffiRustBufferBuilder()
    try:
        for sample in _SAMPLES:
            write(builder, sample)
        return builder.rbuf.data[0 : builder.rbuf.len]
    finally:
        builder.discard()


def _write_at_once(self: Any, value: bytes) -> None:
    """Replacement of the binding's `write`: append `value` to the buffer, after reserving room for it."""
    with self._reserve(len(value)):
        if value:
            start = ctypes.cast(self.rbuf.data, ctypes.c_void_p).value or 0
            ctypes.memmove(start + self.rbuf.len, bytes(value), len(value))


SCHEME: Final = "quic"
ALPN: Final = b"fusionai/1"
_LOG: Final = logging.getLogger(__name__)


def parse_quic(address: str) -> tuple[PeerId, str, int] | None:
    """Peer, host and port of a `quic://` address; None for another scheme and for an address without a valid key.
    Raises `UsageError` for malformed addresses."""
    target = parse_address(address, SCHEME)
    if target is None:
        return None
    peer, _, host = target[0].rpartition("@")
    try:
        public_key_of(peer)
    except TrustError:
        return None
    return PeerId(peer), host, target[1]


def format_quic(peer: PeerId, host: str, port: int) -> str:
    return format_address(f"{peer}@{host}", port, SCHEME)


class QuicTransport(RacingTransport[QuicChannel]):
    """Implements `Transport`. The constructor raises `TransportError` if the library is missing."""

    scheme = SCHEME

    def __init__(
        self,
        credentials: Credentials,
        *,
        accept_limits: AcceptLimits | None = None,
        rates: TransferLimits | None = None,
    ) -> None:
        self._library: Any = load()
        super().__init__(credentials, accept_limits=accept_limits, rates=rates)
        self._endpoint: Any = None
        self._opening = asyncio.Lock()
        self._users = 0
        self._listener: QuicListener | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, accept: Accept, *, host: str, port: int, strangers: bool = False) -> QuicListener:
        credentials = self._member()
        if self._endpoint is not None:
            raise UsageError("expected to listen before anything is dialled: there is one UDP port for both.")
        endpoint = await self._enter(f"{host}:{port}")
        self._listener = QuicListener(self, endpoint, credentials, accept, host, strangers, self._accept_limits)
        return self._listener

    def attempts(self, addresses: Sequence[str], dialling: Dialling, timeout_s: float) -> list[Attempt[QuicChannel]]:
        targets = [target for address in addresses if (target := parse_quic(address)) is not None]
        return [Attempt(format_quic(*target), partial(self._try, *target, dialling, timeout_s)) for target in targets]

    async def knock(self, peer: PeerId, places: Sequence[tuple[str, int]], timeout_s: float) -> None:
        """Send packets to a peer that is dialling this machine, so that this side's NAT lets the peer's packets in."""
        endpoint = await self._enter()
        try:
            async with asyncio.timeout(timeout_s):
                connection = await endpoint.connect(self._addr(peer, places), ALPN)
                connection.close(0, b"")
        except (TimeoutError, self._library.IrohError) as error:
            # Only the other side's attempt has to succeed.
            _LOG.debug("knocking at %s: %r", short(peer), error)
        finally:
            self._leave()

    def channel(
        self, connection: Any, dialling: Dialling | None, host: str, port: int, *, strangers: bool = False
    ) -> QuicChannel:
        return QuicChannel(
            *(connection, self._credentials, self._role, dialling, self._rates, self._library.IrohError, host, port),
            strangers=strangers,
        )

    @property
    def errors(self) -> type[Exception]:
        return self._library.IrohError

    async def _try(self, peer: PeerId, host: str, port: int, dialling: Dialling, timeout_s: float) -> QuicChannel:
        if dialling.expect is not None and dialling.expect != peer:
            raise TrustError(f"expected peer {short(dialling.expect)}, got an address of {short(peer)}.")
        endpoint = await self._enter()
        channel: QuicChannel | None = None
        try:
            async with asyncio.timeout(timeout_s):
                connection = await endpoint.connect(self._addr(peer, [(host, port)]), ALPN)
                channel = self.channel(connection, dialling, host, port)
                channel.start(await connection.open_bi())
                await channel.opened
        except self._library.IrohError as error:
            self._leave()
            raise TransportError(
                f"no answer from {format_quic(peer, host, port)} ({str(error.message()).splitlines()[0]})."
            ) from error
        except BaseException as error:
            if channel is not None:
                channel.abort()
            self._leave()
            if isinstance(error, TimeoutError):
                raise TransportError(
                    f"no answer from {format_quic(peer, host, port)} within {timeout_s:g} s."
                ) from None
            raise
        self._watch(channel)
        return channel

    def _addr(self, peer: PeerId, places: Sequence[tuple[str, int]]) -> Any:
        library = self._library
        hosts = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in places]
        return library.EndpointAddr(library.EndpointId.from_bytes(public_key_of(peer)), None, hosts)

    def _watch(self, channel: QuicChannel) -> None:
        """Keep the UDP port open while `channel` is."""
        task = asyncio.get_running_loop().create_task(self._until_gone(channel))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _until_gone(self, channel: QuicChannel) -> None:
        await channel.gone()
        self._leave()

    async def _enter(self, bind: str = "0.0.0.0:0") -> Any:
        """Return the endpoint, opened at the first call. Each call must be matched by one of `_leave`."""
        async with self._opening:
            if self._endpoint is None:
                self._endpoint = await self._bound(bind)
            self._users += 1
            return self._endpoint

    async def _bound(self, bind: str) -> Any:
        library = self._library
        key = (
            self._credentials.identity.key.private_bytes_raw()
            if isinstance(self._credentials, MemberCredentials)
            else secrets.token_bytes(32)
        )
        options = library.EndpointOptions(
            preset=library.preset_minimal(),
            bind_addr=bind,
            secret_key=key,
            alpns=[ALPN],
            relay_mode=library.RelayMode.disabled(),
        )
        try:
            return await library.Endpoint.bind(options)
        except library.IrohError as error:
            host, _, port = bind.rpartition(":")
            reason = str(error.message())
            raise UsageError(
                f"port {port} on {host} is already in use by another program."
                if "in use" in reason
                else f"can't listen on {host} port {port}: {reason.splitlines()[-1].strip()}.",
                hint="Choose another port (0 takes any free one).",
            ) from error

    def _leave(self) -> None:
        self._users -= 1
        if self._users == 0:
            endpoint, self._endpoint = self._endpoint, None
            task = asyncio.get_running_loop().create_task(endpoint.close())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def left(self) -> None:
        """Release the listener's use of the endpoint."""
        self._listener = None
        self._leave()
        closing = [task for task in self._tasks if task is not asyncio.current_task()]
        if self._users == 0:
            await asyncio.gather(*closing, return_exceptions=True)


class QuicListener:
    """Implements `Listener`. Closing it ends the channels it accepted."""

    def __init__(
        self,
        transport: QuicTransport,
        endpoint: Any,
        credentials: MemberCredentials,
        accept: Accept,
        host: str,
        strangers: bool,
        limits: AcceptLimits,
    ) -> None:
        port = int(endpoint.bound_sockets()[0].rpartition(":")[2])
        self.port = port
        peer = credentials.identity.peer
        places = [parse_address(address) for address in candidates(host, port)]
        self.addresses = tuple(format_quic(peer, *place) for place in places if place and ":" not in place[0])
        self._transport = transport
        self._endpoint = endpoint
        self._strangers = strangers
        self._accepted = AcceptedTasks(accept, limits, (transport.errors,))
        self._accepting = asyncio.get_running_loop().create_task(self._accept_all())

    async def close(self) -> None:
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        await self._accepted.close()
        await self._transport.left()

    async def _accept_all(self) -> None:
        while (incoming := await self._endpoint.accept_next()) is not None:
            if self._accepted.crowded and not await incoming.remote_addr_validated():
                # A forged source address would count against a prefix that is not the sender's.
                await incoming.retry()
                continue
            host, port = _place(await incoming.remote_addr())
            prefix = prefix_of(host)
            connect = partial(self._connected, incoming, host, port)
            self._accepted.start(self._accepted.serve(connect, prefix), prefix)

    async def _connected(self, incoming: Any, host: str, port: int) -> QuicChannel:
        connection = await (await incoming.accept()).connect()
        channel = self._transport.channel(connection, None, host, port, strangers=self._strangers)
        try:
            channel.start(await connection.accept_bi())
        except BaseException:
            channel.abort()
            raise
        return channel


def _place(address: Any) -> tuple[str, int]:
    """Host and port of the remote address that the library reports; ("", 0) if it is not an IP address."""
    if not address.is_ip():
        return "", 0
    host, _, port = address.addr.rpartition(":")
    return host.strip("[]").removeprefix("::ffff:"), int(port)
