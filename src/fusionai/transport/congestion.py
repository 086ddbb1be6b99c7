"""Paces the bulk data of a TCP connection just below the rate at which packets queue, and uses BBR on lossy paths.

A connection that saturates a line keeps the router's queue full, and all other traffic on that line waits in the
queue: tokens, heartbeats, other people's games. So bulk is paced just below the measured uplink bandwidth. If that
bandwidth is unknown, or another line is the bottleneck, the kernel's statistics are used: while the round trip shows a
standing queue, the pace is capped just below the delivery rate; afterwards the cap rises until a queue stands again.

Loss-based congestion control nearly stops on long paths with random loss: with 0.5 % loss at 80 ms it uses a few
hundredths of a 100 Mbit/s line. BBR (Cardwell et al. 2016) paces by delivery rate and uses most of the line. It is not
used where packets are lost by overflow alone: tensors are sent in bursts that share the line with others, and after
some rounds BBR takes its own share for the whole bandwidth; a 20 Mbit/s line stayed at 0.4 of it for seconds.

`bulk` calls this while large frames are sent, `splice` for the data it relays.
"""

from __future__ import annotations

import socket
import struct
import sys
from dataclasses import dataclass
from typing import Final

CLEAN_PATHS: Final = "cubic"
LOSSY_PATHS: Final = "bbr"
LOOK_EVERY_S: Final = 0.1
"""Time between samples of the kernel's statistics, in seconds."""
QUEUE_OF_ROUND_TRIP: Final = 0.4
"""Queueing delay as a fraction of the minimum round trip above which a queue counts as standing."""
LEAST_QUEUE_S: Final = 0.004
"""Queueing delay in seconds below which a queue is treated as noise: it does not hurt other traffic."""
BACK_OFF: Final = 0.96
"""Factor on the cap per sample while a queue stands."""
RISE: Final = 0.02
"""First rise of the cap per sample without a queue, as a fraction."""
MOST_RISE: Final = 0.16
"""Largest rise of the cap per sample.

While no queue stands, the rise doubles from sample to sample up to this value, so that a line that others have released
is used again within a few samples; boundary tensors last one or two each.
"""
OWN_LIMIT: Final = 0.9
"""Fraction of the cap above which a delivery rate counts as limited by the cap, not by the line."""
LEAST_OF_BEST: Final = 0.8
"""Lowest cap as a fraction of the best delivery rate: a standing queue may be caused by others, and bulk yields to
them, but does not give up the line.
"""
LOSSY: Final = 1.6
LOSS_MEMORY: Final = 0.92
"""Decay of the loss score per sample.

A path counts as lossy once its score reaches `LOSSY`: after two samples with a loss at most 0.6 s apart, or three that
are each 1 s apart.
"""
MOST_SINGLE: Final = 5
"""Retransmissions per sample up to which they count as random loss.

More in one sample indicate an overflowing queue.
"""
OF_LINE: Final = 0.97
"""Pace as a fraction of the measured uplink bandwidth, so that no queue builds."""
LONG_QUEUE_LOOKS: Final = 30
"""Samples with a standing queue after which another line counts as the bottleneck, because the
pace of this machine makes no queue.
"""
UNCAPPED_LOOKS: Final = 10
"""Samples without a cap while the bandwidth is unknown: one second of plain TCP, so that a probe can find the
bandwidth.
"""
BEST_OF_LOOKS: Final = 100
"""Samples over which the best delivery rate is kept: ten seconds of sending.

In a shorter window, a tensor that shared the line would determine the estimate.
"""
_NOT_CAPPED: Final = 2**32 - 1
_SO_MAX_PACING_RATE: Final = 47
_TCP_INFO_BYTES: Final = 168
_APP_LIMITED_AT, _MSS_AT, _UNACKED_AT, _RTT_AT = 7, 16, 24, 68
_RESENT_AT, _UNSENT_AT, _MIN_RTT_AT, _DELIVERED_AT = 100, 144, 148, 160
"""Byte offsets of fields in Linux's `struct tcp_info` (linux/tcp.h)."""


@dataclass(frozen=True, slots=True)
class KernelView:
    """The kernel's statistics of a connection. `limited_here`: the sender sometimes had no data to send."""

    rtt_s: float
    jitter_s: float
    """Mean deviation of the round trip."""
    least_rtt_s: float
    delivered_bytes_per_s: float
    limited_here: bool
    unsent_bytes: int = 0
    in_flight_bytes: int = 0
    resent_segments: int = 0

    @property
    def queues(self) -> bool:
        """Whether packets wait in a queue on the path."""
        queue_s = self.rtt_s - self.jitter_s - self.least_rtt_s
        return queue_s > max(QUEUE_OF_ROUND_TRIP * self.least_rtt_s, LEAST_QUEUE_S)


class Pacing:
    """Computes the cap of one connection's bulk rate. `bytes_per_s` None means no cap."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self._best_before = self._best_now = 0.0
        """Highest delivery rate in the previous window of `BEST_OF_LOOKS` samples, and in the current one."""
        self._looks = 0
        self._rise = RISE
        self._standing = 0
        self._slower = False
        """Whether something other than the machine's own uplink limits this connection."""

    @property
    def keeps_line(self) -> bool:
        """Whether the cap is that of the machine's own uplink."""
        return self.bytes_per_s is not None and not self._slower

    def look(self, view: KernelView, line_bytes_per_s: float | None = None) -> None:
        """Update the cap from a sample.

        `line_bytes_per_s`: measured bandwidth of this machine's uplink, None if unknown.
        """
        self._standing = self._standing + 1 if view.queues and not view.limited_here else 0
        self._slower = line_bytes_per_s is None or self._slower or self._standing >= LONG_QUEUE_LOOKS
        self._looks += 1
        if line_bytes_per_s is None:
            if self._looks > UNCAPPED_LOOKS:
                self._follow(view)
            return
        most = OF_LINE * line_bytes_per_s
        if self._slower:
            self._follow(view)
            self._slower = self.bytes_per_s is not None and self.bytes_per_s < most
        if not self._slower:
            self.bytes_per_s = most

    def _follow(self, view: KernelView) -> None:
        """Set the cap just below the delivery rate while a queue stands, and raise it otherwise."""
        reached = view.delivered_bytes_per_s
        held = self.bytes_per_s is not None and reached >= OWN_LIMIT * self.bytes_per_s
        # The best rate is kept while the cap holds. Otherwise cap and best rate would pull each other down to nothing
        # wherever other traffic keeps the queue standing, even another connection of the same machine.
        best = max(self._best_before, self._best_now, reached)
        self._best_now = best if held else max(self._best_now, reached)
        if self._looks % BEST_OF_LOOKS == 0:
            self._best_before, self._best_now = self._best_now, 0.0
        if view.queues:
            if not view.limited_here:
                lower = min(reached, reached if self.bytes_per_s is None else self.bytes_per_s) * BACK_OFF
                self.bytes_per_s = max(lower, best * LEAST_OF_BEST)
                self._rise = RISE
        elif self.bytes_per_s is not None:
            risen = self.bytes_per_s * (1 + self._rise)
            self._rise = min(2 * self._rise, MOST_RISE)
            self.bytes_per_s = None if risen > 2 * best else risen


class Losses:
    """Detects paths with random loss: samples with a few retransmissions while no queue stands."""

    def __init__(self) -> None:
        self._resent = 0
        self._score = 0.0

    def look(self, view: KernelView) -> bool:
        lost = view.resent_segments - self._resent
        self._resent = view.resent_segments
        if lost > MOST_SINGLE:
            self._score = 0.0
        else:
            self._score = LOSS_MEMORY * self._score + (lost > 0 and not view.queues)
        return self._score >= LOSSY


def use_for_bulk(sock: socket.socket, way: str = LOSSY_PATHS) -> bool:
    """Use this congestion control for sending from now on.

    Returns False if the kernel does not offer it or permit it.
    """
    if not hasattr(socket, "TCP_CONGESTION"):
        return False
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, way.encode())
    except OSError:
        return False
    return True


def kernel_view(sock: socket.socket) -> KernelView | None:
    """Return the kernel's statistics; None where the platform has none."""
    if sys.platform != "linux":
        return None
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _TCP_INFO_BYTES:
        return None
    rtt_us, jitter_us = struct.unpack_from("=II", info, _RTT_AT)
    unsent, least_us = struct.unpack_from("=II", info, _UNSENT_AT)
    mss, unacked, resent = (struct.unpack_from("=I", info, at)[0] for at in (_MSS_AT, _UNACKED_AT, _RESENT_AT))
    (delivered,) = struct.unpack_from("=Q", info, _DELIVERED_AT)
    return KernelView(
        rtt_us / 1e6,
        jitter_us / 1e6,
        least_us / 1e6,
        float(delivered),
        bool(info[_APP_LIMITED_AT] & 1),
        unsent_bytes=unsent,
        in_flight_bytes=unacked * mss,
        resent_segments=resent,
    )


def pace(sock: socket.socket, bytes_per_s: float | None) -> None:
    """Limit the socket's sending rate from now on; None removes the limit."""
    cap = _NOT_CAPPED if bytes_per_s is None else min(_NOT_CAPPED - 1, int(bytes_per_s))
    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=I", cap))


def bulk_is_available() -> bool:
    """Return whether this process may use the congestion control for lossy paths."""
    with socket.socket() as tried:
        return use_for_bulk(tried)
