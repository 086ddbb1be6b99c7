"""The network transport: mutual TLS 1.3 over TCP.

Candidate addresses are raced in order. Decides which errors a failed connection raises. Runs on any asyncio event
loop, faster on uvloop. `addresses` decides which attempt wins, `channels.tcp` moves the bytes, `certificates` proves
this machine's identity.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Sequence
from functools import partial
from typing import Final

from fusionai.coordination.doorkeeping import prefix_of
from fusionai.primitives.errors import TransportError, TrustError, UsageError
from fusionai.primitives.ids import PeerId
from fusionai.transport.channels.accepting import AcceptedTasks, AcceptLimits
from fusionai.transport.channels.framed import Dialling
from fusionai.transport.channels.tcp import GOODBYE_TIMEOUT_S, TcpChannel
from fusionai.transport.channels.uplink import TransferLimits
from fusionai.transport.interface import Accept, Role
from fusionai.transport.routes.addresses import (
    SCHEME,
    Attempt,
    RacingTransport,
    candidates,
    format_address,
    ip_of,
    is_dialable,
    parse_address,
)
from fusionai.transport.routes.relay import MAGIC, Relay
from fusionai.transport.security.certificates import Credentials, MemberCredentials

_LOG = logging.getLogger(__name__)
_BACKLOG: Final = 256
_RETRY_ACCEPT_S: Final = 0.2
_POLL_S: Final = 0.01


class TcpListener:
    """Implements `Listener`. Closing it ends the channels it accepted."""

    def __init__(
        self,
        sock: socket.socket,
        credentials: MemberCredentials,
        accept: Accept,
        strangers: bool,
        limits: AcceptLimits,
        rates: TransferLimits,
        relay: Relay | None = None,
    ) -> None:
        self._place: tuple[str, int] = sock.getsockname()[:2]
        self.addresses = self.candidates_now()
        self._socket = sock
        self._credentials = credentials
        self._role: Role = credentials.role
        self._context = credentials.listening_context(strangers=strangers)
        self._limits = limits
        self._rates = rates
        self._relay = relay
        self._accepted = AcceptedTasks(accept, limits)
        self._accepting = asyncio.get_running_loop().create_task(self._accept_all())

    def candidates_now(self) -> tuple[str, ...]:
        """Return the addresses at which this machine can be dialled now. Its network may have changed since the
        listener opened."""
        return candidates(*self._place)

    async def close(self) -> None:
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        self._socket.close()
        await self._accepted.close()

    async def _accept_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, place = await loop.sock_accept(self._socket)
            except OSError as error:
                # Out of descriptors or memory, or the caller has already gone: go on accepting.
                _LOG.debug("accepting a connection failed: %s", error)
                await asyncio.sleep(_RETRY_ACCEPT_S)
                continue
            sock.setblocking(False)
            self._start(sock, prefix_of(str(place[0])), relayed=False)

    def admit_relayed(self, sock: socket.socket, peer: PeerId) -> None:
        """Admit `peer` at the far end of an outgoing relayed connection, as if it had connected to this listener. All
        relayed connections come from the relay's address, so each counts for the peer that the broker named."""
        self._start(sock, f"relay to {peer}", relayed=True)

    def _start(self, sock: socket.socket, prefix: str, *, relayed: bool) -> None:
        self._accepted.start(self._serve(sock, prefix, relayed=relayed), prefix)

    async def _serve(self, sock: socket.socket, prefix: str, *, relayed: bool) -> None:
        if self._relay is not None and not relayed:
            try:
                tls = await self._speaks_tls(sock)
            except asyncio.CancelledError:
                sock.close()
                raise
            if not tls:
                await self._relay.serve(sock, self._accepted.proven)
                return
        await self._accepted.serve(partial(self._connected, sock, relayed=relayed), prefix)

    async def _connected(self, sock: socket.socket, *, relayed: bool) -> TcpChannel:
        channel = TcpChannel(self._credentials, self._role, None, self._rates, relayed=relayed)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: channel,
                sock,
                ssl=self._context,
                ssl_handshake_timeout=self._limits.greeting_s,
                ssl_shutdown_timeout=GOODBYE_TIMEOUT_S,
            )
        except BaseException:
            channel.abort()
            sock.close()
            raise
        return channel

    async def _speaks_tls(self, sock: socket.socket) -> bool:
        """Return whether the first byte, which stays in the socket, is TLS. A silent caller is left to TLS, whose
        handshake times out."""
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(self._limits.greeting_s):
                return await first_byte(sock) != MAGIC[:1]
        return True


async def _machine(host: str, port: int, *, beside: bool) -> str:
    """Return the address that a member's host name stands for. Raises `TransportError` if it stands for none that may
    be dialled: a name must not lead to this machine's own services."""
    if ip_of(host) is not None:
        return host
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise TransportError(f"the name {host} is not known ({error.strerror or error}).") from error
    for *_, target in found:
        if is_dialable(str(target[0]), beside=beside):
            return str(target[0])
    raise TransportError(f"the name {host} stands for no address at which a member may be dialled.")


async def open_listener(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises `UsageError` naming the port or host that can't be used."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(
            f"expected an address of this machine to listen on, got {host!r}: {error.strerror}."
        ) from error
    family, _, _, _, target = found[0]
    try:
        sock = socket.create_server((str(target[0]), port), family=family, backlog=_BACKLOG)
    except OSError as error:
        match error.errno:
            case errno.EADDRINUSE:
                raise UsageError(
                    f"port {port} on {host} is already in use by another program.",
                    hint="Stop that program, or choose another port (0 takes any free one).",
                ) from error
            case errno.EACCES:
                raise UsageError(
                    f"this user may not listen on port {port}.", hint="Choose a port from 1024 to 65535."
                ) from error
            case _:
                raise UsageError(
                    f"can't listen on {host} port {port}: {error.strerror}.",
                    hint="Choose an address of this machine, or 0.0.0.0 for all of them.",
                ) from error
    sock.setblocking(False)
    return sock


async def first_byte(sock: socket.socket) -> bytes:
    """Return the first byte, left in the socket; empty if the caller closed at once."""
    loop = asyncio.get_running_loop()
    while True:
        with contextlib.suppress(BlockingIOError):
            return sock.recv(1, socket.MSG_PEEK)
        readable = asyncio.Event()
        try:
            loop.add_reader(sock, readable.set)
        except NotImplementedError:  # Windows' event loop reports completed reads only
            await asyncio.sleep(_POLL_S)
            continue
        try:
            await readable.wait()
        finally:
            loop.remove_reader(sock)


class TcpTransport(RacingTransport[TcpChannel]):
    """Implements `Transport` for one machine. Keeps no connection."""

    scheme = SCHEME

    def __init__(
        self,
        credentials: Credentials,
        *,
        accept_limits: AcceptLimits | None = None,
        rates: TransferLimits | None = None,
    ) -> None:
        super().__init__(credentials, accept_limits=accept_limits, rates=rates)
        self._context = credentials.dialling_context()

    async def listen(
        self, accept: Accept, *, host: str, port: int, strangers: bool = False, relay: Relay | None = None
    ) -> TcpListener:
        """Listen. With `relay`, connections for the relay may come to the same port. Raises `UsageError` if the port or
        host can't be used, `TrustError` if this machine has not joined a pool."""
        credentials = self._member()
        sock = await open_listener(host, port)
        return TcpListener(sock, credentials, accept, strangers, self._accept_limits, self._rates, relay)

    def attempts(self, addresses: Sequence[str], dialling: Dialling, timeout_s: float) -> list[Attempt[TcpChannel]]:
        targets = [target for address in addresses if (target := parse_address(address)) is not None]
        return [
            Attempt(format_address(*target), partial(self._try, *target, dialling, timeout_s)) for target in targets
        ]

    async def dial_over(self, sock: socket.socket, dialling: Dialling, timeout_s: float, *, where: str) -> TcpChannel:
        """Dial over a connected socket, e.g. through a relay, and take the socket over. The machine at the other end
        proves its identity as on any connection."""
        channel = TcpChannel(self._credentials, self._role, dialling, self._rates, relayed=True)
        return await self._shake_hands(channel, where, timeout_s, sock=sock, server_hostname="")

    async def _try(self, host: str, port: int, dialling: Dialling, timeout_s: float) -> TcpChannel:
        address = format_address(host, port)
        if dialling.expect is not None:
            host = await _machine(host, port, beside=dialling.beside)
        channel = TcpChannel(self._credentials, self._role, dialling, self._rates)
        return await self._shake_hands(channel, address, timeout_s, host=host, port=port)

    async def _shake_hands(
        self, channel: TcpChannel, address: str, timeout_s: float, **connection: object
    ) -> TcpChannel:
        """Run TLS and the handshake. `connection`: arguments of the event loop's `create_connection`."""
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: channel,
                ssl=self._context,
                ssl_handshake_timeout=timeout_s,
                ssl_shutdown_timeout=GOODBYE_TIMEOUT_S,
                **connection,  # pyright: ignore[reportArgumentType,reportCallIssue] - its overloads are many
            )
            await channel.opened
        except ssl.SSLCertVerificationError as error:
            raise TrustError(
                f"the machine at {address} is not of this pool ({error.verify_message}).",
                hint="Check the address and that both machines joined the same pool.",
            ) from error
        except ssl.SSLError as error:
            raise TransportError(
                f"the program at {address} does not speak this protocol ({error.reason or error}).",
                hint="Check the port number.",
            ) from error
        except OSError as error:
            raise TransportError(
                f"no answer from {address} ({error.strerror or error}).",
                hint="Check that the other machine is on and that its port is reachable.",
            ) from error
        except BaseException:
            channel.abort()
            raise
        return channel
