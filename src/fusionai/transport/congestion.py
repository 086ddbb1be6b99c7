"""How a connection's bulk goes: a little slower than would make the line queue, and by BBR where packets get lost.

What fills a line keeps the router's queue full, and whatever else shares the line waits with it: tokens, heartbeats,
somebody's game. So bulk is paced just below what the machine's line was measured to carry. Where that is not known, or
another line is what is full, the kernel's account is followed: while the round trip says that a queue stands, pacing is
capped just below what was delivered; then the cap rises until it stands again.

Senders that take a lost packet for a full line all but stop on long paths that lose a few: 0.5 % on 80 ms leaves some
hundredths of a 100 Mbit/s line. BBR (Cardwell et al. 2016) paces by what was delivered and fills most of it. It is not
used where nothing is lost but what overflowed: tensors go in bursts, beside other tensors, and after some rounds of
those BBR takes what it got for all that there is; a 20 Mbit/s line stood at 0.4 for seconds.

Neighbours: `bulk` asks while large frames are sent; `splice` for what it passes on.
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
QUEUE_OF_ROUND_TRIP: Final = 0.4
LEAST_QUEUE_S: Final = 0.004
"""A shorter queue is noise, and hurts nobody."""
BACK_OFF: Final = 0.96
RISE: Final = 0.02
MOST_RISE: Final = 0.16
"""A rise doubles from look to look up to here while nothing waits: after others have had the line, it is taken again
in some looks, and boundary tensors are sent in one or two each."""
OWN_LIMIT: Final = 0.9
"""Who delivers so much of the cap was held by the cap, which says nothing of the line."""
LEAST_OF_BEST: Final = 0.8
"""What waits may be others': bulk gives way to them, but not all of the line."""
LOSSY: Final = 1.6
LOSS_MEMORY: Final = 0.92
"""Two looks that find a loss within a third of a second, or three within one, make a path one that loses packets."""
MOST_SINGLE: Final = 5
"""Paths lose packets one by one; more in one look have overflowed somewhere."""
OF_LINE: Final = 0.97
LONG_QUEUE_LOOKS: Final = 30
"""A queue that stands for so long, though the machine's own line has none, is that of another line."""
UNCAPPED_LOOKS: Final = 10
"""Before anything is known of a line it is left to TCP for a second, so that a probe finds out what it carries."""
BEST_OF_LOOKS: Final = 100
"""Ten seconds of sending. Shorter, and a tensor that met others on its way would be all that is known of the line."""
_NOT_CAPPED: Final = 2**32 - 1
_SO_MAX_PACING_RATE: Final = 47
_TCP_INFO_BYTES: Final = 168
_APP_LIMITED_AT, _MSS_AT, _UNACKED_AT, _RTT_AT = 7, 16, 24, 68
_RESENT_AT, _UNSENT_AT, _MIN_RTT_AT, _DELIVERED_AT = 100, 144, 148, 160
"""Of fields in Linux's `struct tcp_info` (linux/tcp.h)."""


@dataclass(frozen=True, slots=True)
class KernelView:
    """What the kernel says of a connection. `limited_here`: the sender had nothing to send now and then."""

    rtt_s: float
    jitter_s: float
    """How far round trips are from their mean, in the mean."""
    least_rtt_s: float
    delivered_bytes_per_s: float
    limited_here: bool
    unsent_bytes: int = 0
    in_flight_bytes: int = 0
    resent_segments: int = 0

    @property
    def queues(self) -> bool:
        """Whether packets wait in front of the line."""
        queue_s = self.rtt_s - self.jitter_s - self.least_rtt_s
        return queue_s > max(QUEUE_OF_ROUND_TRIP * self.least_rtt_s, LEAST_QUEUE_S)


class Pacing:
    """Decides the cap of one connection's bulk; `bytes_per_s` None: none."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self._best_before = self._best_now = 0.0
        """Delivered at most, in a hundred looks and in those since."""
        self._looks = 0
        self._rise = RISE
        self._standing = 0
        self._slower = False
        """What limits this connection is not the machine's own line."""

    @property
    def keeps_line(self) -> bool:
        """Whether the cap is that of the machine's own line."""
        return self.bytes_per_s is not None and not self._slower

    def look(self, view: KernelView, line_bytes_per_s: float | None = None) -> None:
        """`line_bytes_per_s`: what this machine's line was measured to carry away."""
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
        """Just below what is delivered, while there is a queue."""
        reached = view.delivered_bytes_per_s
        held = self.bytes_per_s is not None and reached >= OWN_LIMIT * self.bytes_per_s
        # Were the best forgotten while the cap holds, cap and best would pull each other down to nothing wherever
        # something else keeps the queue standing, be it only the same machine's other connection.
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
    """Decides whether a path loses packets by itself: looks that find a few resent ones where no queue stands."""

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
    """From now on this side's bytes go that way. False where it can't be had: no such kernel, module or permission."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return False
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, way.encode())
    except OSError:
        return False
    return True


def kernel_view(sock: socket.socket) -> KernelView | None:
    """None where the platform can't say."""
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
    """At most so much from now on; None: as the congestion control has it."""
    cap = _NOT_CAPPED if bytes_per_s is None else min(_NOT_CAPPED - 1, int(bytes_per_s))
    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=I", cap))


def bulk_is_available() -> bool:
    """Whether this process may have it."""
    with socket.socket() as tried:
        return use_for_bulk(tried)
