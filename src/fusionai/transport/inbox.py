"""Envelopes that have arrived and wait for `receive`. Decides when the network must be told to wait.

Neighbours: the channels of `memory` and `tcp` fill it from their reading side and end it when the connection ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from fusionai.primitives.errors import ChannelClosed, FusionError
from fusionai.transport.interface import Envelope

HIGH_WATER_BYTES: Final = 8 * 2**20
"""Above this much waiting, reading pauses; one frame may be larger, two never wait on top of each other then."""
HIGH_WATER_FRAMES: Final = 256
"""Small frames weigh more than their bytes."""


class Inbox:
    """One per channel. `pause` and `resume` are called when the high-water mark is crossed."""

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
        """An arrived frame; ignored after the end."""
        if self._end is not None:
            return
        self._waiting.append((envelope, nbytes))
        self._waiting_bytes += nbytes
        if not self._paused and self._above():
            self._paused = True
            self._pause()
        self._wake_one()

    def end(self, error: FusionError, *, discard: bool = False) -> None:
        """Nothing more will come: what waits is still delivered (unless `discard`), then `error` is raised."""
        if discard:
            self._waiting.clear()
            self._waiting_bytes = 0
        if self._end is None or discard:
            self._end = error
        for getter in self._getters:
            if not getter.done():
                getter.set_result(None)

    async def get(self) -> Envelope:
        """The next envelope. Raises the error of the end: a `WireError` once, `ChannelClosed` ever after."""
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
                # Woken and cancelled at once: pass the wake-up on, or another receiver would wait for ever.
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
