"""Copies bytes between two sockets in both directions, and decides when that ends.

Each direction has one buffer: while the receiving side takes nothing, nothing is read from the sending side. Copying
ends when both sides have closed their direction, when a connection breaks, when no byte has moved for too long, or
when a side has silently gone. If one side breaks, the other is broken at once too. The bytes are never inspected.

`relay` decides who is spliced, `dead_paths` detects silent failures, `rate_limit` limits the rate, `congestion` sets
the congestion control.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass, field
from typing import Final

from fusionai.transport.congestion import use_for_bulk
from fusionai.transport.dead_paths import CHECK_EVERY_S, DEAD_AFTER_S, silent_s
from fusionai.transport.rate_limit import RateLimit

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
    """Time of the last byte between two peers, over all their connections.

    Shared, because a job may leave one connection silent for long while it sends something four times a second on
    another.
    """

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
    """Copy in both directions until that ends and return the reason; empty if both sides ended normally.

    Closes nothing: after a break call `hang_up` on both sides.
    """
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
        try:
            if any(silent_s(flow.source) > DEAD_AFTER_S for flow in flows):
                return f"a side has acknowledged nothing for {DEAD_AFTER_S:g} s"
        except OSError as error:
            return f"a side broke ({error})"


def hang_up(sock: socket.socket) -> None:
    """Close with a reset: the other side learns at once that the connection is broken and its data incomplete."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _HANG_UP)
    sock.close()
