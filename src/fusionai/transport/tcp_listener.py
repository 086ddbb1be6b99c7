"""An open TCP listener. Decides how many unauthenticated connections it holds and for how long.

Every connection that has not finished the handshake, and every stranger, counts as half open. Their number is bounded:
at the limit the oldest is dropped, so that silent connections can't keep members out. Each also has a deadline. A
connection whose first byte is not TLS goes to the relay, if this listener has one.

`tcp` creates listeners, `tcp_channel` handles their connections, `relay` joins two of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from dataclasses import dataclass
from typing import Final

from fusionai.primitives.errors import FusionError, UsageError
from fusionai.transport.accepting import AcceptedTasks
from fusionai.transport.addresses import candidates
from fusionai.transport.credentials import MemberCredentials
from fusionai.transport.interface import Accept, Role
from fusionai.transport.rate_limit import Limits
from fusionai.transport.relay import Relay
from fusionai.transport.relay_greeting import MAGIC
from fusionai.transport.tcp_channel import GOODBYE_TIMEOUT_S, TcpChannel

_LOG = logging.getLogger(__name__)
_BACKLOG: Final = 256
_RETRY_ACCEPT_S: Final = 0.2
_POLL_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """Limits of half-open connections.

    `greeting_s`: time for TLS and `Hello` together. `stranger_s`: total time of a stranger. `half_open`: number of both
    together.
    """

    greeting_s: float = 5.0
    stranger_s: float = 20.0
    half_open: int = 128


class TcpListener:
    """Implements `Listener`. Closing it ends the channels it accepted."""

    def __init__(
        self,
        sock: socket.socket,
        credentials: MemberCredentials,
        accept: Accept,
        strangers: bool,
        limits: DoorLimits,
        rates: Limits,
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
        self._accepted = AcceptedTasks(accept, stranger_lifetime_s=limits.stranger_s)
        self._half_open: dict[asyncio.Task[None], None] = {}
        self._door = asyncio.get_running_loop().create_task(self._stand_at_door())

    def candidates_now(self) -> tuple[str, ...]:
        """Return the addresses at which this machine can be dialled now.

        Its network may have changed since the listener opened.
        """
        return candidates(*self._place)

    async def close(self) -> None:
        self._door.cancel()
        await asyncio.wait([self._door])
        self._socket.close()
        await self._accepted.close()

    async def _stand_at_door(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._socket)
            except OSError as error:
                # Out of descriptors or memory, or the caller has already gone: go on accepting.
                _LOG.debug("accepting a connection failed: %s", error)
                await asyncio.sleep(_RETRY_ACCEPT_S)
                continue
            sock.setblocking(False)
            self._let_in(sock, relayed=False)

    def admit_relayed(self, sock: socket.socket) -> None:
        """Admit the peer at the far end of an outgoing relayed connection, as if it had connected to this listener."""
        self._let_in(sock, relayed=True)

    def _let_in(self, sock: socket.socket, *, relayed: bool) -> None:
        if len(self._half_open) >= self._limits.half_open:
            oldest = next(iter(self._half_open))
            del self._half_open[oldest]
            oldest.cancel()
        task = self._accepted.start(self._serve(sock, relayed=relayed))
        self._half_open[task] = None
        task.add_done_callback(lambda done: self._half_open.pop(done, None))

    async def _serve(self, sock: socket.socket, *, relayed: bool) -> None:
        if self._relay is not None and not relayed:
            try:
                tls = await self._speaks_tls(sock)
            except asyncio.CancelledError:
                sock.close()
                raise
            if not tls:
                await self._relay.serve(sock, self._proven)
                return
        channel = TcpChannel(self._credentials, self._role, None, self._rates, relayed=relayed)
        try:
            async with asyncio.timeout(self._limits.greeting_s):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: channel,
                    sock,
                    ssl=self._context,
                    ssl_handshake_timeout=self._limits.greeting_s,
                    ssl_shutdown_timeout=GOODBYE_TIMEOUT_S,
                )
                await channel.opened
        except (OSError, TimeoutError, FusionError, asyncio.CancelledError) as error:
            _LOG.debug("an incoming connection was rejected: %r", error)
            if isinstance(error, FusionError):
                # A refusal may still be in the send queue.
                await channel.close()
            channel.abort()
            sock.close()
            if isinstance(error, asyncio.CancelledError):
                raise
            return
        if channel.remote.role != "stranger":
            self._proven()
        await self._accepted.run(channel)

    def _proven(self) -> None:
        """Stop counting the current task's connection as half open."""
        current = asyncio.current_task()
        assert current is not None, "a coroutine of this listener runs as a task"
        self._half_open.pop(current, None)

    async def _speaks_tls(self, sock: socket.socket) -> bool:
        """Return whether the first byte, which stays in the socket, is TLS.

        A silent caller is left to TLS, whose handshake times out.
        """
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(self._limits.greeting_s):
                return await first_byte(sock) != MAGIC[:1]
        return True


async def open_door(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises `UsageError` naming the port or host that can't be used."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(f"expected an address of this machine to listen on, got {host!r}: {error}.") from error
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
