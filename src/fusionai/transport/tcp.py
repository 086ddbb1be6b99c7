"""The network transport: mutual TLS 1.3 over TCP. Decides which of a peer's addresses is used and what a failure means.

Candidates are tried in order, each a moment after the one before it; the first whose other side proves to be the
expected one wins. Works on any asyncio event loop, faster on uvloop.
Neighbours: `tcp_channel` moves the bytes, `tcp_listener` lets others in, `credentials` says who we are.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from typing import Final

from fusionai.primitives.errors import FusionError, RefusedError, TransportError, TrustError, UsageError
from fusionai.primitives.ids import PeerId
from fusionai.transport.addresses import format_address, parse_address
from fusionai.transport.credentials import Credentials, StrangerCredentials
from fusionai.transport.framed import Dialling
from fusionai.transport.interface import Accept, Role
from fusionai.transport.rate_limit import Limits
from fusionai.transport.tcp_channel import GOODBYE_TIMEOUT_S, TcpChannel
from fusionai.transport.tcp_listener import DoorLimits, TcpListener, open_door
from fusionai.wire.messages import Stream

STAGGER_S: Final = 0.25
"""A candidate gets this head start before the next one is tried beside it."""


class TcpTransport:
    """Implements `Transport` for one machine. Make it before or inside an event loop; it keeps no connection. `rates`
    bound all its connections together."""

    def __init__(
        self, credentials: Credentials, *, door_limits: DoorLimits | None = None, rates: Limits | None = None
    ) -> None:
        self._credentials = credentials
        self._rates = rates or Limits()
        self._role: Role = credentials.role
        self._context = credentials.dialling_context()
        self._door_limits = door_limits or DoorLimits()

    async def listen(self, accept: Accept, *, host: str, port: int, strangers: bool = False) -> TcpListener:
        """Raises `UsageError` when the port or host can't be had, `TrustError` before this machine joined a pool."""
        if isinstance(self._credentials, StrangerCredentials):
            raise TrustError("a machine outside any pool can't listen.", hint="Join with an invitation first.")
        sock = await open_door(host, port)
        return TcpListener(sock, self._credentials, accept, strangers, self._door_limits, self._rates)

    async def dial(
        self, addresses: Sequence[str], *, expect: PeerId | None, stream: Stream, timeout_s: float = 10.0
    ) -> TcpChannel:
        targets = [target for address in addresses if (target := parse_address(address)) is not None]
        if not targets:
            raise UsageError(f"expected at least one tcp:// address to dial, got {list(addresses)}.")
        dialling = Dialling(expect, stream)
        waiting = targets[::-1]
        running: set[asyncio.Task[TcpChannel]] = set()
        failures: list[FusionError] = []
        try:
            async with asyncio.timeout(timeout_s):
                while waiting or running:
                    if waiting:
                        running.add(asyncio.create_task(self._try(*waiting.pop(), dialling, timeout_s)))
                    done, running = await asyncio.wait(
                        running, timeout=STAGGER_S if waiting else None, return_when=asyncio.FIRST_COMPLETED
                    )
                    # Two may succeed at once: the first is used, the others go the way of the losers.
                    for task in sorted(done, key=lambda task: task.exception() is not None):
                        match task.exception():
                            case None:
                                running |= done - {task}
                                return task.result()
                            case RefusedError() as error:
                                raise error
                            case FusionError() as error:
                                failures.append(error)
                            case error:
                                raise error
        except TimeoutError:
            tried = ", ".join(format_address(*target) for target in targets)
            failures.append(
                TransportError(
                    f"nobody answered at {tried} within {timeout_s:g} s.",
                    hint="Check that the other machine is on and that its port is reachable.",
                )
            )
        finally:
            await _drop(running)
        # Somebody else answering is the more important news than nobody answering elsewhere.
        raise next((error for error in failures if isinstance(error, TrustError)), failures[-1])

    async def _try(self, host: str, port: int, dialling: Dialling, timeout_s: float) -> TcpChannel:
        channel = TcpChannel(self._credentials, self._role, dialling, self._rates)
        address = format_address(host, port)
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: channel,
                host,
                port,
                ssl=self._context,
                ssl_handshake_timeout=timeout_s,
                ssl_shutdown_timeout=GOODBYE_TIMEOUT_S,
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


async def _drop(tasks: set[asyncio.Task[TcpChannel]]) -> None:
    """End attempts that lost the race, whatever has become of them."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, TcpChannel):
            outcome.abort()
