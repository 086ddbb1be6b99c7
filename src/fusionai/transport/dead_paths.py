"""Detects connections whose other side has silently gone. The channel then drops the connection.

TCP_USER_TIMEOUT is unsuitable: Linux also applies it to a live receiver that has merely stopped reading (a closed
window), so a stage that computes for longer than the timeout would lose its connections. Instead the kernel's
statistics are read: data is unacknowledged, was retransmitted at least once, and no acknowledgement came since. Idle
connections are probed by keep-alive, which a closed window does not disturb.

`tcp_channel` checks once a second while data it sent is unacknowledged.
"""

from __future__ import annotations

import socket
import struct
import sys
from typing import Final

DEAD_AFTER_S: Final = 3.0
"""Seconds without an acknowledgement, although data was retransmitted, after which the other side counts as gone."""
CHECK_EVERY_S: Final = 1.0
_KEEPALIVE_OPTIONS: Final = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3))
"""Idle time before the first probe (s), time between probes (s), and unanswered probes that end the connection."""
_TCP_INFO: Final = struct.Struct("=8B13I84xI")
"""Layout of the beginning of Linux's `struct tcp_info` (linux/tcp.h), of which four fields are used."""
_RETRANSMITS, _UNACKED, _LAST_ACK_RECEIVED_MS, _NOT_SENT = 2, 8 + 4, 8 + 12, 8 + 13


def set_options(sock: socket.socket) -> None:
    """Disable Nagle's algorithm, and probe idle connections where the platform allows setting the interval."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE_OPTIONS:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def silent_s(sock: socket.socket) -> float:
    """Seconds for which the other side has owed an acknowledgement; 0 if it owes none or the platform does not report
    it.
    """
    return unacknowledged_s(sock) or 0.0


def unacknowledged_s(sock: socket.socket) -> float | None:
    """The same, but None if the kernel holds no unacknowledged data or the platform does not report it."""
    fields = _account(sock)
    if fields is None or not (fields[_UNACKED] or fields[_NOT_SENT]):
        return None
    return fields[_LAST_ACK_RECEIVED_MS] / 1000 if _owes(fields) else 0.0


def acknowledges(sock: socket.socket) -> bool | None:
    """Return whether the other machine owes no acknowledgement; None for a closed socket or where this is unknown."""
    fields = _account(sock)
    return None if fields is None else not _owes(fields)


def _owes(fields: tuple[int, ...]) -> bool:
    return fields[_UNACKED] > 0 and fields[_RETRANSMITS] > 0


def _account(sock: socket.socket) -> tuple[int, ...] | None:
    """The kernel's `struct tcp_info`; None where it can't be read."""
    if sys.platform != "linux":
        return None
    try:
        account = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except (OSError, ValueError):  # a socket that the event loop has closed: uvloop raises either
        return None
    # A kernel before 4.6 does not report unsent bytes: the missing field counts as 0.
    return _TCP_INFO.unpack(account.ljust(_TCP_INFO.size, b"\0"))
