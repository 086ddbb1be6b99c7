"""A peer's side of a relayed connection: from a pairing token to a socket whose other end is the other peer.

The relay is not trusted: TLS runs over the socket as over any other connection. `relay` is the relay's side,
`peer_transport` uses the socket.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Final

from fusionai.primitives.errors import TransportError
from fusionai.transport.addresses import format_address
from fusionai.transport.identity import Identity
from fusionai.transport.pairing import prove_holding
from fusionai.transport.relay_greeting import JOINED, REFUSALS, greeting

_CONNECT_S: Final = 3.0


async def through_relay(relays: Sequence[tuple[str, int]], token: bytes, identity: Identity) -> socket.socket:
    """Return a socket connected to the other peer through a relay.

    Waits for the other peer. The relays are tried in order until one accepts the connection. Raises `TransportError`
    with the reason if none does, or if the relay does not join the two sides.
    """
    problem = TransportError("expected at least one relay to connect through, got none.")
    for host, port in relays:
        try:
            async with asyncio.timeout(_CONNECT_S):
                sock = await _connected(host, port)
        except (OSError, TimeoutError) as error:
            problem = TransportError(f"the relay at {format_address(host, port)} did not answer ({error}).")
            continue
        try:
            await _joined(sock, token, identity, format_address(host, port))
        except OSError as error:
            sock.close()
            raise TransportError(
                f"the relay at {format_address(host, port)} broke the connection ({error})."
            ) from error
        except BaseException:
            sock.close()
            raise
        return sock
    raise problem


async def _connected(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    problem: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, target in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, target)
        except OSError as error:
            sock.close()
            problem = error
            continue
        except BaseException:
            sock.close()
            raise
        return sock
    raise problem


async def _joined(sock: socket.socket, token: bytes, identity: Identity, where: str) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, greeting(token, prove_holding(token, identity.key)))
    answer = await loop.sock_recv(sock, 1)
    if not answer:
        raise TransportError(f"the relay at {where} closed the connection.")
    if answer[0] != JOINED:
        reason = REFUSALS.get(answer[0], f"it answered with the unknown byte {answer[0]}.")
        raise TransportError(f"the relay at {where} did not join the two sides: {reason}")
