"""Finds a connection whose other side has silently gone. Decides what counts as gone; the channel then drops it.

TCP_USER_TIMEOUT would seem made for this, but Linux also applies it to a receiver that is alive and has merely stopped
reading (a closed window): a stage that computes for longer than the timeout would lose its connections. So the kernel's
own account is read instead: something unacknowledged, sent again at least once, and no acknowledgement since.
An idle connection is probed by keep-alive, which a closed window does not disturb.
Neighbours: `tcp_channel` asks once a second while something it sent is not acknowledged.
"""

from __future__ import annotations

import socket
import struct
import sys
from typing import Final

DEAD_AFTER_S: Final = 3.0
CHECK_EVERY_S: Final = 1.0
_KEEPALIVE_OPTIONS: Final = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3))
"""Idle for a second, then a probe a second; three unanswered ones end the connection."""
_TCP_INFO: Final = struct.Struct("=8B13I84xI")
"""The beginning of Linux's `struct tcp_info` (linux/tcp.h): one of the bytes and three of the words are of interest."""
_RETRANSMITS, _UNACKED, _LAST_ACK_RECEIVED_MS, _NOT_SENT = 2, 8 + 4, 8 + 12, 8 + 13


def set_options(sock: socket.socket) -> None:
    """No delay for small frames; idle connections are probed where the platform lets us say how often."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE_OPTIONS:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def silent_s(sock: socket.socket) -> float:
    """Seconds for which the other side has owed an acknowledgement; 0 when it owes none or nobody can say."""
    return unacknowledged_s(sock) or 0.0


def unacknowledged_s(sock: socket.socket) -> float | None:
    """The same, but None when the kernel holds nothing that is still to be acknowledged, and where nobody can say."""
    fields = _account(sock)
    if fields is None or not (fields[_UNACKED] or fields[_NOT_SENT]):
        return None
    return fields[_LAST_ACK_RECEIVED_MS] / 1000 if _owes(fields) else 0.0


def acknowledges(sock: socket.socket) -> bool | None:
    """Whether the other machine owes no acknowledgement; None for a closed socket and where the platform can't say."""
    fields = _account(sock)
    return None if fields is None else not _owes(fields)


def _owes(fields: tuple[int, ...]) -> bool:
    return fields[_UNACKED] > 0 and fields[_RETRANSMITS] > 0


def _account(sock: socket.socket) -> tuple[int, ...] | None:
    """The kernel's `struct tcp_info`; None where there is none."""
    if sys.platform != "linux":
        return None
    try:
        account = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except (OSError, ValueError):  # a socket that the event loop has closed: uvloop raises either
        return None
    # A kernel before 4.6 does not count what it has not sent yet: taken for none.
    return _TCP_INFO.unpack(account.ljust(_TCP_INFO.size, b"\0"))
