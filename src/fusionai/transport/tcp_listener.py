"""An open TCP door. Decides how many may stand in it unproven and for how long.

Whoever has not finished the handshake, and every stranger, counts as half open: their number is bounded, and when it
is reached the oldest is dropped, so that silent connections can't keep members out. Each has a deadline too.
Neighbours: `tcp` makes listeners, `tcp_channel` is what they let in.
"""

from __future__ import annotations

import asyncio
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
from fusionai.transport.tcp_channel import GOODBYE_TIMEOUT_S, TcpChannel

_LOG = logging.getLogger(__name__)
_BACKLOG: Final = 256
_RETRY_ACCEPT_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """`greeting_s`: TLS and `Hello` together. `stranger_s`: all a stranger has. `half_open`: of both together."""

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
    ) -> None:
        host, port = sock.getsockname()[:2]
        self.addresses = candidates(host, port)
        self._socket = sock
        self._credentials = credentials
        self._role: Role = credentials.role
        self._context = credentials.listening_context(strangers=strangers)
        self._limits = limits
        self._rates = rates
        self._accepted = AcceptedTasks(accept, stranger_lifetime_s=limits.stranger_s)
        self._half_open: dict[asyncio.Task[None], None] = {}
        self._door = asyncio.get_running_loop().create_task(self._stand_at_door())

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
                # Out of descriptors or memory, or the caller has gone already: the door stays open.
                _LOG.debug("accepting a connection failed: %s", error)
                await asyncio.sleep(_RETRY_ACCEPT_S)
                continue
            sock.setblocking(False)
            if len(self._half_open) >= self._limits.half_open:
                oldest = next(iter(self._half_open))
                del self._half_open[oldest]
                oldest.cancel()
            task = self._accepted.start(self._serve(sock))
            self._half_open[task] = None
            task.add_done_callback(lambda done: self._half_open.pop(done, None))

    async def _serve(self, sock: socket.socket) -> None:
        channel = TcpChannel(self._credentials, self._role, None, self._rates)
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
            _LOG.debug("a caller did not get in: %r", error)
            if isinstance(error, FusionError):
                # A refusal may still be on its way out.
                await channel.close()
            channel.abort()
            sock.close()
            if isinstance(error, asyncio.CancelledError):
                raise
            return
        if channel.remote.role != "stranger":
            current = asyncio.current_task()
            assert current is not None, "a coroutine of this listener runs as a task"
            self._half_open.pop(current, None)
        await self._accepted.run(channel)


async def open_door(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `UsageError` naming the port or host that can't be had."""
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
