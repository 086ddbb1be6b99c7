"""The network transport: mutual TLS 1.3 over TCP.

Candidate addresses are raced in order. Decides which errors a failed connection raises. Runs on any asyncio event
loop, faster on uvloop. `racing` decides which attempt wins, `tcp_channel` moves the bytes, `tcp_listener` accepts
connections, `credentials` proves this machine's identity.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from functools import partial

from fusionai.primitives.errors import TransportError, TrustError, UsageError
from fusionai.primitives.ids import PeerId
from fusionai.transport.addresses import format_address, parse_address
from fusionai.transport.credentials import Credentials, StrangerCredentials
from fusionai.transport.framed import Dialling
from fusionai.transport.interface import Accept, Role
from fusionai.transport.racing import Attempt, first_to_answer
from fusionai.transport.rate_limit import Limits
from fusionai.transport.relay import Relay
from fusionai.transport.tcp_channel import GOODBYE_TIMEOUT_S, TcpChannel
from fusionai.transport.tcp_listener import DoorLimits, TcpListener, open_door
from fusionai.wire.messages import Stream


class TcpTransport:
    """Implements `Transport` for one machine.

    May be created outside an event loop; it keeps no connection. `rates` limit all its connections together.
    """

    def __init__(
        self, credentials: Credentials, *, door_limits: DoorLimits | None = None, rates: Limits | None = None
    ) -> None:
        self._credentials = credentials
        self._rates = rates or Limits()
        self._role: Role = credentials.role
        self._context = credentials.dialling_context()
        self._door_limits = door_limits or DoorLimits()

    async def listen(
        self, accept: Accept, *, host: str, port: int, strangers: bool = False, relay: Relay | None = None
    ) -> TcpListener:
        """Listen. With `relay`, connections for the relay may come to the same port.

        Raises `UsageError` if the port or host can't be used, `TrustError` if this machine has not joined a pool.
        """
        if isinstance(self._credentials, StrangerCredentials):
            raise TrustError("a machine outside any pool can't listen.", hint="Join with an invitation first.")
        sock = await open_door(host, port)
        return TcpListener(sock, self._credentials, accept, strangers, self._door_limits, self._rates, relay)

    async def dial(
        self, addresses: Sequence[str], *, expect: PeerId | None, stream: Stream, timeout_s: float = 10.0
    ) -> TcpChannel:
        attempts = self.attempts(addresses, Dialling(expect, stream), timeout_s)
        if not attempts:
            raise UsageError(f"expected at least one tcp:// address to dial, got {list(addresses)}.")
        return await first_to_answer(attempts, timeout_s=timeout_s)

    def attempts(self, addresses: Sequence[str], dialling: Dialling, timeout_s: float) -> list[Attempt[TcpChannel]]:
        """Return one attempt per `tcp://` address, in order. Raises `UsageError` for malformed addresses."""
        targets = [target for address in addresses if (target := parse_address(address)) is not None]
        return [
            Attempt(format_address(*target), partial(self._try, *target, dialling, timeout_s)) for target in targets
        ]

    async def dial_over(self, sock: socket.socket, dialling: Dialling, timeout_s: float, *, where: str) -> TcpChannel:
        """Dial over a connected socket, e.g. through a relay, and take the socket over.

        The machine at the other end proves its identity as on any connection.
        """
        channel = TcpChannel(self._credentials, self._role, dialling, self._rates, relayed=True)
        return await self._shake_hands(channel, where, timeout_s, sock=sock, server_hostname="")

    async def _try(self, host: str, port: int, dialling: Dialling, timeout_s: float) -> TcpChannel:
        channel = TcpChannel(self._credentials, self._role, dialling, self._rates)
        return await self._shake_hands(channel, format_address(host, port), timeout_s, host=host, port=port)

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
                f"nobody answered at {address} ({error.strerror or error}).",
                hint="Check that the other machine is on and that its port is reachable.",
            ) from error
        except BaseException:
            channel.abort()
            raise
        return channel
