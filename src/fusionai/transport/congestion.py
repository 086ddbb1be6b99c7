"""How a connection's bulk goes: by BBR where the kernel has it, and a little slower than would make the line queue.

Senders that take a lost packet for a full line all but stop on long paths that lose a few: 0.5 % on 80 ms leaves some
hundredths of a 100 Mbit/s line. BBR (Cardwell et al. 2016) paces by what was delivered and fills most of it. Small
messages stay with the system's own way, on connections of their own.

But BBR, too, may keep as much again waiting in the router as is on its way, and whatever else shares the line waits
with it: tokens, heartbeats, somebody's game. So the kernel's account is read while bulk is sent, and where the round
trip says that a queue stands, pacing is capped just below what was delivered; then the cap rises until it stands again.

Neighbours: `tcp_channel` asks while it sends large frames; `splice` for what it passes on.
"""

from __future__ import annotations

import socket
import struct
import sys
from dataclasses import dataclass
from typing import Final

BULK: Final = "bbr"
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
_FORGET: Final = 0.995
_NOT_CAPPED: Final = 2**32 - 1
_SO_MAX_PACING_RATE: Final = 47
_TCP_INFO_BYTES: Final = 168
_APP_LIMITED_AT, _RTT_AT, _MIN_RTT_AT, _DELIVERED_AT = 7, 68, 148, 160
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


class Pacing:
    """Decides the cap of one connection's bulk; `bytes_per_s` None: none."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self._best = 0.0
        """Delivered, of late."""
        self._rise = RISE

    def look(self, view: KernelView) -> None:
        held = self.bytes_per_s is not None and view.delivered_bytes_per_s >= OWN_LIMIT * self.bytes_per_s
        # Were the best forgotten while the cap holds, cap and best would pull each other down to nothing wherever
        # something else keeps the queue standing, be it only the same machine's other connection.
        self._best = max(self._best * (1.0 if held else _FORGET), view.delivered_bytes_per_s)
        queue_s = view.rtt_s - view.jitter_s - view.least_rtt_s
        if queue_s > max(QUEUE_OF_ROUND_TRIP * view.least_rtt_s, LEAST_QUEUE_S):
            if not view.limited_here:
                reached = view.delivered_bytes_per_s
                lower = min(reached, reached if self.bytes_per_s is None else self.bytes_per_s) * BACK_OFF
                self.bytes_per_s = max(lower, self._best * LEAST_OF_BEST)
                self._rise = RISE
        elif self.bytes_per_s is not None:
            risen = self.bytes_per_s * (1 + self._rise)
            self._rise = min(2 * self._rise, MOST_RISE)
            self.bytes_per_s = None if risen > 2 * self._best else risen


def use_for_bulk(sock: socket.socket) -> bool:
    """From now on this side's bytes go by BBR. False where that can't be had: no such kernel, module or permission."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return False
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, BULK.encode())
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
    (least_us,) = struct.unpack_from("=I", info, _MIN_RTT_AT)
    (delivered,) = struct.unpack_from("=Q", info, _DELIVERED_AT)
    return KernelView(rtt_us / 1e6, jitter_us / 1e6, least_us / 1e6, float(delivered), bool(info[_APP_LIMITED_AT] & 1))


def pace(sock: socket.socket, bytes_per_s: float | None) -> None:
    """At most so much from now on; None: as the congestion control has it."""
    cap = _NOT_CAPPED if bytes_per_s is None else min(_NOT_CAPPED - 1, int(bytes_per_s))
    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=I", cap))


def bulk_is_available() -> bool:
    """Whether this process may have it."""
    with socket.socket() as tried:
        return use_for_bulk(tried)
