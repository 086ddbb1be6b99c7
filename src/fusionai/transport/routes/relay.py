"""A blind relay: joins the connections of two peers that the broker has paired, and copies bytes between them.

Decides which peers may be joined (exactly the two that a pairing token of the pool names, each proving its key, each
token once), how many connections there may be, and how fast they are. The peers' TLS runs inside, so the relay sees
only ciphertext and stores nothing. It needs no trust: a peer checks the other's certificate as on any connection.

`tcp` hands over connections that begin with the relay greeting, `signed` defines the tokens. `through_relay` is a
peer's side: it turns a pairing token into a socket whose other end is the other peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import TransportError, TrustError, WireError
from fusionai.primitives.ids import PeerId, short
from fusionai.transport.channels.link import CHECK_EVERY_S, DEAD_AFTER_S, set_options, silent_s
from fusionai.transport.channels.uplink import RateLimit, use_for_bulk
from fusionai.transport.routes.addresses import format_address
from fusionai.transport.security.identity import Identity, public_key_of
from fusionai.transport.security.signed import (
    MAX_TOKEN_BYTES,
    SIGNATURE_BYTES,
    PairingToken,
    check_holder,
    prove_holding,
    verify_pairing,
)

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
_CONNECT_S: Final = 3.0
"""Time to connect to one relay before the next one is tried, in seconds."""


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


BUFFER_BYTES: Final = 128 * 2**10
"""Buffer of one direction in bytes; smaller if the rate limit is low."""
BULK_BYTES: Final = 2**20
"""Bytes sent in one direction after which the connection counts as bulk; small messages alone do not add up to it."""
LAST_WORDS_S: Final = 10.0
"""Time that one side has to end after the other has ended, in seconds."""
_HANG_UP: Final = struct.pack("ii", 1, 0)
"""SO_LINGER of zero seconds: closing resets the connection, so that the other side notices at once."""


@dataclass(slots=True)
class Activity:
    """Time of the last byte between two peers, over all their connections. Shared, because a job may leave one
    connection silent for long while it sends something four times a second on another."""

    moved_at_s: float = field(default_factory=lambda: asyncio.get_running_loop().time())


@dataclass(slots=True)
class Flow:
    """One direction of one connection."""

    source: socket.socket
    sink: socket.socket
    limit: RateLimit
    activity: Activity
    copied_bytes: int = 0
    ended: bool = False

    async def run(self) -> None:
        """Copy until the source ends its direction. Raises `OSError` if either side breaks."""
        loop = asyncio.get_running_loop()
        buffer = memoryview(bytearray(self.limit.slice_bytes(BUFFER_BYTES)))
        while count := await loop.sock_recv_into(self.source, buffer):
            await loop.sock_sendall(self.sink, buffer[:count])
            if self.copied_bytes < BULK_BYTES <= self.copied_bytes + count:
                use_for_bulk(self.sink)
            self.copied_bytes += count
            now_s = self.activity.moved_at_s = loop.time()
            due_s = self.limit.take(count, now_s)
            if due_s > 0:
                await asyncio.sleep(due_s)
        self.ended = True
        self.sink.shutdown(socket.SHUT_WR)


async def splice(flows: tuple[Flow, Flow], *, idle_s: float) -> str:
    """Copy in both directions until that ends and return the reason; empty if both sides ended normally. Closes
    nothing: after a break call `hang_up` on both sides."""
    tasks = [asyncio.create_task(flow.run()) for flow in flows]
    watch = asyncio.create_task(_watch(flows, idle_s))
    try:
        pending: set[asyncio.Task[None] | asyncio.Task[str]] = {*tasks, watch}
        while not all(flow.ended for flow in flows):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if watch in done:
                return watch.result()
            for task in done:
                if (error := task.exception()) is not None:
                    return f"a side broke ({error})"
        return ""
    finally:
        watch.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(watch, return_exceptions=True)


async def _watch(flows: tuple[Flow, Flow], idle_s: float) -> str:
    """Return the reason why the connection must end, as soon as there is one."""
    loop = asyncio.get_running_loop()
    half_ended_at_s: float | None = None
    while True:
        await asyncio.sleep(CHECK_EVERY_S)
        now_s = loop.time()
        if any(flow.ended for flow in flows):
            half_ended_at_s = now_s if half_ended_at_s is None else half_ended_at_s
            if now_s - half_ended_at_s > LAST_WORDS_S:
                return "one side ended and the other did not"
        if now_s - max(flow.activity.moved_at_s for flow in flows) > idle_s:
            return f"nothing has moved for {idle_s:g} s"
        if any(silent_s(flow.source) > DEAD_AFTER_S for flow in flows):
            return f"a side has acknowledged nothing for {DEAD_AFTER_S:g} s"


def hang_up(sock: socket.socket) -> None:
    """Close with a reset: the other side learns at once that the connection is broken and its data incomplete."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _HANG_UP)
    sock.close()


_LOG: Final = logging.getLogger(__name__)
PAIR_BYTES_PER_S: Final = 12.5e6
"""Default rate between two peers each way: 100 Mbit/s, chosen because it exceeds the uplink of most homes."""
MAX_REMEMBERED: Final = 10_000
"""Upper limit on remembered tokens: those that were used and have not expired yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """Limits of a relay.

    `pair_bytes_per_s`: rate between two peers each way, over all their connections. `connections`: joined pairs at a
    time. `peer_connections`: connections of one peer. `greeting_s`: time for the greeting. `waiting_s`: time to wait
    for the other side. `idle_s`: time without a byte between the two peers, over all their connections; peers of a job
    send something four times a second.
    """

    pair_bytes_per_s: float = PAIR_BYTES_PER_S
    connections: int = 512
    peer_connections: int = 64
    greeting_s: float = 5.0
    waiting_s: float = 10.0
    idle_s: float = 120.0


@dataclass(slots=True)
class RelayStats:
    """Counters since the relay's start."""

    joined: int = 0
    copied_bytes: int = 0
    """Bytes of connections that have ended; `Relay.copied_bytes` also counts open ones."""


@dataclass(slots=True)
class _Pair:
    """State shared by the connections between two peers. `rates` is keyed by sender."""

    rates: dict[str, RateLimit]
    activity: Activity = field(default_factory=Activity)
    connections: int = 0
    flows: list[Flow] = field(default_factory=list[Flow])


@dataclass(frozen=True, slots=True)
class _Waiting:
    token: PairingToken
    sock: socket.socket
    joined: asyncio.Future[asyncio.Future[None]]
    """Resolved by the other side's task, with a future that completes when the splice is over."""


class Relay:
    """Pass `serve` to a listener. `authority_key`: the 32 raw bytes of the key that signs pairing tokens."""

    def __init__(self, authority_key: bytes, clock: Clock, limits: RelayLimits | None = None) -> None:
        self.limits = limits or RelayLimits()
        self.stats = RelayStats()
        self._authority_key = authority_key
        self._clock = clock
        self._waiting: dict[bytes, _Waiting] = {}
        self._shown: dict[tuple[bytes, str], float] = {}
        """(meeting, side) -> when that token expires, in seconds since 1970."""
        self._connections: Counter[str] = Counter()
        """Number of joined and waiting connections by peer."""
        self._pairs: dict[frozenset[str], _Pair] = {}

    @property
    def copied_bytes(self) -> int:
        """Bytes copied since the start, those of open connections included."""
        flows = (flow for pair in self._pairs.values() for flow in pair.flows)
        return self.stats.copied_bytes + sum(flow.copied_bytes for flow in flows)

    async def serve(self, sock: socket.socket, greeted: Callable[[], None] = lambda: None) -> None:
        """Serve one connection from its greeting to its end, and close it. `greeted` is called once the caller has
        proven its key."""
        set_options(sock)
        try:
            async with asyncio.timeout(self.limits.greeting_s):
                token = await self._greeting(sock)
            if token is None:
                return
            greeted()
            self._connections[token.peer] += 1
            try:
                await self._meet(token, sock)
            finally:
                self._connections[token.peer] -= 1
                if not self._connections[token.peer]:
                    del self._connections[token.peer]
        except (OSError, TimeoutError) as error:
            _LOG.debug("a relayed connection ended: %r", error)
        finally:
            sock.close()

    async def _greeting(self, sock: socket.socket) -> PairingToken | None:
        """Return the caller's token if it is valid and there is room. Otherwise refuse the caller and return None."""
        try:
            rest = await _exactly(sock, bytes_to_come(await _exactly(sock, HEADER_BYTES)))
        except WireError as error:
            return await _refuse(sock, BAD_GREETING, str(error))
        data, proof = rest[:-SIGNATURE_BYTES], rest[-SIGNATURE_BYTES:]
        now_s = self._clock.wall_s()
        try:
            token = verify_pairing(data, self._authority_key, now_wall_s=now_s)
            check_holder(data, proof, public_key_of(token.peer))
        except TrustError as error:
            return await _refuse(sock, BAD_TOKEN, str(error))
        self._shown = {key: until_s for key, until_s in self._shown.items() if until_s > now_s}
        if (token.meeting, token.side) in self._shown:
            return await _refuse(sock, BAD_TOKEN, "the token was shown before")
        if (
            self._connections.total() >= 2 * self.limits.connections
            or self._connections[token.peer] >= self.limits.peer_connections
            or len(self._shown) >= MAX_REMEMBERED
        ):
            return await _refuse(sock, FULL, f"{short(PeerId(token.peer))} exceeds the relay's limits")
        self._shown[token.meeting, token.side] = token.expires_at_s
        return token

    async def _meet(self, token: PairingToken, sock: socket.socket) -> None:
        other = self._waiting.pop(token.meeting, None)
        if other is None:
            await self._wait(token, sock)
        elif (other.token.peer, other.token.other) != (token.other, token.peer):
            # The broker draws one meeting for exactly two peers, so tokens that name other peers are a mistake of the
            # broker.
            self._waiting[token.meeting] = other
            await _refuse(sock, BAD_TOKEN, "the two tokens of a meeting name other peers")
        else:
            over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            other.joined.set_result(over)
            try:
                await self._join(other, _Waiting(token, sock, other.joined))
            finally:
                over.set_result(None)

    async def _wait(self, token: PairingToken, sock: socket.socket) -> None:
        """Wait for the other side. The side that comes second copies for both."""
        waiting = _Waiting(token, sock, asyncio.get_running_loop().create_future())
        self._waiting[token.meeting] = waiting
        try:
            async with asyncio.timeout(self.limits.waiting_s):
                over = await asyncio.shield(waiting.joined)
        except TimeoutError:
            if not waiting.joined.done():
                await _refuse(sock, ALONE, f"{short(PeerId(token.other))} did not connect in time")
                return
            over = waiting.joined.result()
        finally:
            if self._waiting.get(token.meeting) is waiting:
                del self._waiting[token.meeting]
        await asyncio.shield(over)

    async def _join(self, one: _Waiting, two: _Waiting) -> None:
        """Copy between both sides until the connection ends, and close both sockets."""
        names = (one.token.peer, two.token.peer)
        pair = self._pairs.setdefault(
            frozenset(names), _Pair({name: RateLimit(self.limits.pair_bytes_per_s) for name in names})
        )
        pair.connections += 1
        try:
            loop = asyncio.get_running_loop()
            for side in (one, two):
                await loop.sock_sendall(side.sock, bytes([JOINED]))
            flows = (
                Flow(one.sock, two.sock, pair.rates[names[0]], pair.activity),
                Flow(two.sock, one.sock, pair.rates[names[1]], pair.activity),
            )
            self.stats.joined += 1
            pair.flows += flows
            try:
                why = await splice(flows, idle_s=self.limits.idle_s)
            finally:
                pair.flows = [one for one in pair.flows if all(one is not flow for flow in flows)]
                self.stats.copied_bytes += sum(flow.copied_bytes for flow in flows)
        except BaseException:
            hang_up(one.sock)
            hang_up(two.sock)
            raise
        finally:
            pair.connections -= 1
            if not pair.connections:
                del self._pairs[frozenset(names)]
        if why:
            _LOG.info("relaying between %s and %s ended: %s", *(short(PeerId(name)) for name in names), why)
            hang_up(one.sock)
            hang_up(two.sock)
        else:
            one.sock.close()
            two.sock.close()


async def _exactly(sock: socket.socket, count: int) -> bytes:
    """Read exactly `count` bytes. Raises `ConnectionError` if the other side ends before."""
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < count:
        piece = await loop.sock_recv(sock, count - len(data))
        if not piece:
            raise ConnectionError("the caller ended in the middle of its greeting")
        data += piece
    return data


async def _refuse(sock: socket.socket, code: int, why: str) -> None:
    _LOG.debug("the relay refused a connection: %s", why)
    await asyncio.get_running_loop().sock_sendall(sock, bytes([code]))
