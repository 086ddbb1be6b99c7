"""A link between two machines: measurement, statistics, and detection of a silent other side.

Round trip and bandwidth are measured with probes. Statistics are those that the kernel or the QUIC library keeps for a
connection; they are shown and never decide anything. Linux counts them for every TCP connection, other platforms have
none for TCP. Rates are delivery rates, so an idle connection shows a low one.

A dead path is a connection whose other side has silently gone; its channel drops it. TCP_USER_TIMEOUT is unsuitable,
because Linux also applies it to a live receiver that has merely stopped reading.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import WireError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.transport.interface import Channel, Envelope
from fusionai.wire.frame import describe
from fusionai.wire.messages import MAX_PROBE_BYTES, Message, Ping, Pong, Probe, TensorHeader

_TCP_INFO: Final = struct.Struct("=8B24I4Q6IQ")
"""Layout of Linux's `struct tcp_info` (linux/tcp.h), up to the delivery rate."""
RETRANSMITS, FLAGS = 2, 7
MSS, UNACKED, LAST_ACK_RECEIVED_MS, RTT_US, JITTER_US, RESENT = (8 + word for word in (2, 4, 12, 15, 16, 23))
NOT_SENT, LEAST_RTT_US, SENT, DELIVERED = 38, 39, 41, 42
"""Positions of the fields that are used."""


def tcp_info(sock: socket.socket) -> tuple[int, ...] | None:
    """Return the fields of the kernel's `struct tcp_info`, 0 for those that an old kernel lacks. None for a closed
    socket and on platforms other than Linux."""
    if sys.platform != "linux":
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except (OSError, ValueError):  # a socket that the event loop has closed: uvloop raises either
        return None
    return _TCP_INFO.unpack(info.ljust(_TCP_INFO.size, b"\0"))


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """Statistics of one connection; 0.0 means unknown. `loss`: fraction of packets that were retransmitted."""

    round_trip_s: float = 0.0
    bandwidth_bytes_per_s: float = 0.0
    loss: float = 0.0


UNKNOWN: Final = LinkFigures()


def tcp_figures(sock: socket.socket) -> LinkFigures:
    """Return the kernel's statistics; `UNKNOWN` where there are none."""
    info = tcp_info(sock)
    if info is None:
        return UNKNOWN
    # Before the first acknowledgement the kernel reports the largest 32-bit number as the minimum round trip.
    round_trip_s = info[LEAST_RTT_US] / 1e6 if info[LEAST_RTT_US] < 2**32 - 1 else 0.0
    return LinkFigures(round_trip_s, float(info[DELIVERED]), part(info[RESENT], info[SENT]))


def part(lost: int, sent: int) -> float:
    return min(1.0, lost / sent) if sent > 0 else 0.0


FIRST_PROBE_BYTES: Final = 256 * 2**10
"""Size of the first probe in bytes."""
ENOUGH_ROUND_TRIPS: Final = 4
"""Round trips that a probe must last to measure the bandwidth."""
SLOW: Final = 4
"""The first probe suffices if it takes this many times longer than a probe must take."""


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """Result of a measurement. `latency_s` is one way: half the fastest round trip. `bandwidth_bytes_per_s` is from
    this side to the other, `back_bytes_per_s` the opposite direction, None if it was not requested."""

    round_trip_s: float
    latency_s: float
    bandwidth_bytes_per_s: float
    probed_bytes: int
    back_bytes_per_s: float | None = None


async def measure_link(
    channel: Channel,
    clock: Clock,
    *,
    pings: int = 8,
    largest_probe_bytes: int = MAX_PROBE_BYTES,
    enough_s: float = 0.25,
    back: bool = False,
) -> LinkMeasurement:
    """Measure a link. No other task may use `channel` meanwhile, and its other side must call `answer_probe`. Raises
    `ChannelClosed` if the link breaks, `WireError` if the other side answers with anything else."""
    asking = _Asking(channel, clock)
    round_trip_s = min([await asking.pinged() for _ in range(pings)])
    there = await _bandwidth(asking.sent, round_trip_s, largest_probe_bytes, enough_s)
    if not back:
        return LinkMeasurement(round_trip_s, round_trip_s / 2, *there)
    returned, _ = await _bandwidth(asking.fetched, round_trip_s, largest_probe_bytes, enough_s)
    return LinkMeasurement(round_trip_s, round_trip_s / 2, *there, back_bytes_per_s=returned)


async def _bandwidth(
    carried: Callable[[int], Awaitable[float]], round_trip_s: float, largest_bytes: int, enough_s: float
) -> tuple[float, int]:
    """Return bytes per second and the size of the probe that was timed."""
    enough_s = max(enough_s, ENOUGH_ROUND_TRIPS * round_trip_s)
    size, is_open = min(FIRST_PROBE_BYTES, largest_bytes), False
    while True:
        took_s = await carried(size)
        is_long = took_s >= enough_s
        if (is_long and (is_open or took_s >= SLOW * enough_s)) or size >= largest_bytes:
            # The answer's way back is not part of the transfer. At least a tenth is kept, so that noise can't make it
            # zero.
            return size / max(took_s - round_trip_s, took_s / 10, 1e-9), size
        size, is_open = size if is_long else min(size * 2, largest_bytes), True


async def answer_probe(channel: Channel, envelope: Envelope) -> bool:
    """Answer a `Ping` or `Probe` and return True; ignore any other message and return False."""
    match envelope.message:
        case Ping(sequence=sequence, sent_at_s=sent_at_s):
            await channel.send(Pong(sequence=sequence, sent_at_s=sent_at_s))
        case Probe(sequence=sequence, sent_at_s=sent_at_s, back_bytes=size):
            named = _payload(size)
            await channel.send(Pong(sequence=sequence, sent_at_s=sent_at_s, tensors=_described(named)), named)
        case _:
            return False
    return True


class _Asking:
    """The asking side of a measurement. Times every question."""

    def __init__(self, channel: Channel, clock: Clock) -> None:
        self._channel = channel
        self._clock = clock
        self._sequence = 0

    async def pinged(self) -> float:
        return await self._ask(Ping(sequence=self._sequence, sent_at_s=self._clock.now_s()), (), 0)

    async def sent(self, size: int) -> float:
        named = _payload(size)
        probe = Probe(sequence=self._sequence, sent_at_s=self._clock.now_s(), tensors=_described(named))
        return await self._ask(probe, named, 0)

    async def fetched(self, size: int) -> float:
        return await self._ask(Probe(sequence=self._sequence, sent_at_s=self._clock.now_s(), back_bytes=size), (), size)

    async def _ask(self, message: Ping | Probe, tensors: tuple[HostTensor, ...], back_bytes: int) -> float:
        """Return the seconds from sending to the answer."""
        self._sequence += 1
        started_s = self._clock.now_s()
        await self._channel.send(message, tensors)
        envelope = await self._channel.receive()
        answer: Message = envelope.message
        if not isinstance(answer, Pong) or answer.sequence != message.sequence:
            raise WireError(f"expected pong {message.sequence}, got {answer.__struct_config__.tag}.")
        came = sum(tensor.nbytes for tensor in envelope.tensors.values())
        if came != back_bytes:
            raise WireError(f"expected {back_bytes} bytes with pong {message.sequence}, got {came}.")
        return self._clock.now_s() - started_s


def _payload(size: int) -> tuple[HostTensor, ...]:
    return (host_tensor("uint8", (size,), bytes(size)),) if size else ()


def _described(tensors: tuple[HostTensor, ...]) -> tuple[TensorHeader, ...]:
    return tuple(describe("probe", tensor) for tensor in tensors)


DEAD_AFTER_S: Final = 3.0
"""Seconds without an acknowledgement, although data was retransmitted, after which the other side counts as gone. It is
noticed at most `CHECK_EVERY_S` later."""
CHECK_EVERY_S: Final = 1.0
_KEEPALIVE_OPTIONS: Final = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3))
"""Idle time before the first probe (s), time between probes (s), and unanswered probes that end the connection."""


def set_options(sock: socket.socket) -> None:
    """Disable Nagle's algorithm, and probe idle connections where the platform allows setting the interval."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE_OPTIONS:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def silent_s(sock: socket.socket) -> float:
    """Seconds for which the other side has owed an acknowledgement; 0 if it owes none or the platform does not report
    it."""
    return unacknowledged_s(sock) or 0.0


def unacknowledged_s(sock: socket.socket) -> float | None:
    """The same, but None if the kernel holds no unacknowledged data or the platform does not report it."""
    fields = tcp_info(sock)
    if fields is None or not (fields[UNACKED] or fields[NOT_SENT]):
        return None
    return fields[LAST_ACK_RECEIVED_MS] / 1000 if _owes(fields) else 0.0


def acknowledges(sock: socket.socket) -> bool | None:
    """Return whether the other machine owes no acknowledgement; None for a closed socket or where this is unknown."""
    fields = tcp_info(sock)
    return None if fields is None else not _owes(fields)


def _owes(fields: tuple[int, ...]) -> bool:
    return fields[UNACKED] > 0 and fields[RETRANSMITS] > 0
