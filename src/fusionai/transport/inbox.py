"""Queue of envelopes that have arrived and wait for `receive`. Decides when reading from the network pauses.

The channels fill it from their reading side and end it when the connection ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from fusionai.primitives.errors import ChannelClosed, FusionError
from fusionai.transport.interface import Envelope

HIGH_WATER_BYTES: Final = 8 * 2**20
"""Queued bytes above which reading pauses.

One frame may be larger; a second frame is then not read before it is taken.
"""
HIGH_WATER_FRAMES: Final = 256
"""Queued frames above which reading pauses, because small frames cost more memory than their bytes."""


class Inbox:
    """Incoming queue of one channel. `pause` and `resume` are called when the high-water mark is crossed."""

    def __init__(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        self._pause = pause
        self._resume = resume
        self._waiting: deque[tuple[Envelope, int]] = deque()
        self._waiting_bytes = 0
        self._paused = False
        self._end: FusionError | None = None
        self._getters: deque[asyncio.Future[None]] = deque()

    @property
    def ended(self) -> bool:
        return self._end is not None

    def put(self, envelope: Envelope, nbytes: int) -> None:
        """Add an arrived frame. Ignored after the end."""
        if self._end is not None:
            return
        self._waiting.append((envelope, nbytes))
        self._waiting_bytes += nbytes
        if not self._paused and self._above():
            self._paused = True
            self._pause()
        self._wake_one()

    def end(self, error: FusionError, *, discard: bool = False) -> None:
        """End the queue: queued envelopes are still delivered (unless `discard`), then `error` is raised."""
        if discard:
            self._waiting.clear()
            self._waiting_bytes = 0
        if self._end is None or discard:
            self._end = error
        for getter in self._getters:
            if not getter.done():
                getter.set_result(None)

    async def get(self) -> Envelope:
        """Return the next envelope.

        After the end raises the end's error: a `WireError` once, then always `ChannelClosed`.
        """
        while not self._waiting:
            if self._end is not None:
                error = self._end
                if isinstance(error, ChannelClosed):
                    raise ChannelClosed(error.message, hint=error.hint)
                self._end = ChannelClosed(f"the channel is closed: {error.message}")
                raise error
            getter = asyncio.get_running_loop().create_future()
            self._getters.append(getter)
            try:
                await getter
            except asyncio.CancelledError:
                # The getter was woken and cancelled at the same time: wake another one, which would otherwise wait for
                # ever.
                if getter.done() and not getter.cancelled():
                    self._wake_one()
                raise
            finally:
                self._getters.remove(getter)
        envelope, nbytes = self._waiting.popleft()
        self._waiting_bytes -= nbytes
        if self._paused and not self._above():
            self._paused = False
            self._resume()
        return envelope

    def _above(self) -> bool:
        return self._waiting_bytes > HIGH_WATER_BYTES or len(self._waiting) > HIGH_WATER_FRAMES

    def _wake_one(self) -> None:
        for getter in self._getters:
            if not getter.done():
                getter.set_result(None)
                return
