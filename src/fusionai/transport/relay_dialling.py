"""A peer's side of a relayed connection: from a pairing token to a socket whose other end is the other peer.

The relay is not trusted: TLS runs over the socket as over any other connection. `relay` is the relay's side,
`peer_transport` uses the socket.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence
from typing import Final

from fusionai.primitives.errors import TransportError, WireError
from fusionai.transport.identity import Identity
from fusionai.transport.routes import format_address
from fusionai.transport.signed import MAX_TOKEN_BYTES, SIGNATURE_BYTES, prove_holding

MAGIC: Final = b"FR"
VERSION: Final = 1
HEADER_BYTES: Final = 6
_HEADER: Final = struct.Struct("<2sBBH")

JOINED: Final = 0
REFUSALS: Final = {
    1: "it does not support this version of the relay greeting.",
    2: "the pairing token is invalid or was used before.",
    3: "it has no room for another pair now.",
    4: "the other side did not connect in time.",
}
"""Reason of each refusal, keyed by the byte that the relay sends."""
BAD_GREETING, BAD_TOKEN, FULL, ALONE = REFUSALS


def greeting(token: bytes, proof: bytes) -> bytes:
    return _HEADER.pack(MAGIC, VERSION, 0, len(token)) + token + proof


def bytes_to_come(header: bytes) -> int:
    """Return how many bytes follow the header. Raises `WireError` before anything is allocated for them."""
    magic, version, reserved, token_length = _HEADER.unpack(header)
    if magic != MAGIC or version != VERSION or reserved:
        raise WireError("expected a greeting for a relay of this version, got other bytes.")
    if not SIGNATURE_BYTES < token_length <= MAX_TOKEN_BYTES:
        raise WireError(f"expected a pairing token of at most {MAX_TOKEN_BYTES} bytes, got {token_length}.")
    return token_length + SIGNATURE_BYTES


_CONNECT_S: Final = 3.0


async def through_relay(relays: Sequence[tuple[str, int]], token: bytes, identity: Identity) -> socket.socket:
    """Return a socket connected to the other peer through a relay. Waits for the other peer. The relays are tried in
    order until one accepts the connection. Raises `TransportError` with the reason if none does, or if the relay does
    not join the two sides."""
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
