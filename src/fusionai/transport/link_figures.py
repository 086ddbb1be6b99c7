"""Statistics that the kernel or the QUIC library keeps about a connection's path. For display, never for decisions.

Linux counts them for every TCP connection; on other platforms TCP has none. Rates are delivery rates, so an idle
connection shows a low one: the highest rate seen is a lower bound of the link's bandwidth. `tcp_channel` and
`quic_channel` provide the figures, `ways` aggregates them by peer.
"""

from __future__ import annotations

import socket
import struct
import sys
from dataclasses import dataclass
from typing import Final

_TCP_INFO_BYTES: Final = 168
_RESENT_AT, _LEAST_RTT_AT, _SENT_AT, _DELIVERED_AT = 100, 148, 156, 160
"""Byte offsets of fields in Linux's `struct tcp_info` (linux/tcp.h)."""


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """Statistics of one connection; 0.0 means unknown. `loss`: fraction of packets that were retransmitted."""

    round_trip_s: float = 0.0
    bandwidth_bytes_per_s: float = 0.0
    loss: float = 0.0


UNKNOWN: Final = LinkFigures()


def tcp_figures(sock: socket.socket) -> LinkFigures:
    """Return the kernel's statistics, `UNKNOWN` on platforms other than Linux. Raises `OSError` for a closed socket."""
    if sys.platform != "linux":
        return UNKNOWN
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _TCP_INFO_BYTES:
        return UNKNOWN
    (resent,) = struct.unpack_from("=I", info, _RESENT_AT)
    least_us, _, sent = struct.unpack_from("=3I", info, _LEAST_RTT_AT)
    (delivered,) = struct.unpack_from("=Q", info, _DELIVERED_AT)
    # Before the first acknowledgement the kernel reports the largest 32-bit number as the minimum round trip.
    round_trip_s = least_us / 1e6 if least_us < 2**32 - 1 else 0.0
    return LinkFigures(round_trip_s, float(delivered), part(resent, sent))


def part(lost: int, sent: int) -> float:
    return min(1.0, lost / sent) if sent > 0 else 0.0
