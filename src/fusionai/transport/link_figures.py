"""What a connection's own account says of the line it goes over: for people, never for decisions.

Linux counts for every TCP connection; other platforms say nothing here. Rates are what was delivered, so an idle
connection shows little: the most that was seen is the least the line can.
Neighbours: `tcp_channel` and `quic_channel` give these, `ways` sums them up by peer.
"""

from __future__ import annotations

import socket
import struct
import sys
from dataclasses import dataclass
from typing import Final

_TCP_INFO_BYTES: Final = 168
_RESENT_AT, _LEAST_RTT_AT, _SENT_AT, _DELIVERED_AT = 100, 148, 156, 160
"""Of fields in Linux's `struct tcp_info` (linux/tcp.h)."""


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """0.0 is unknown. `loss`: the part of packets that had to be sent again."""

    round_trip_s: float = 0.0
    bandwidth_bytes_per_s: float = 0.0
    loss: float = 0.0


UNKNOWN: Final = LinkFigures()


def tcp_figures(sock: socket.socket) -> LinkFigures:
    """Raises `OSError` for a socket that is closed."""
    if sys.platform != "linux":
        return UNKNOWN
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _TCP_INFO_BYTES:
        return UNKNOWN
    (resent,) = struct.unpack_from("=I", info, _RESENT_AT)
    least_us, _, sent = struct.unpack_from("=3I", info, _LEAST_RTT_AT)
    (delivered,) = struct.unpack_from("=Q", info, _DELIVERED_AT)
    # Before anything has been acknowledged the least round trip is the largest number there is.
    round_trip_s = least_us / 1e6 if least_us < 2**32 - 1 else 0.0
    return LinkFigures(round_trip_s, float(delivered), part(resent, sent))


def part(lost: int, sent: int) -> float:
    return min(1.0, lost / sent) if sent > 0 else 0.0
