"""Assembles frames from byte chunks of any size. Tensor bytes are written directly into their final buffer.

Small parts share one scratch buffer. A body gets a buffer of its own once its length has passed every check of
`wire.frame`. The reader never reads a socket and never waits. After a `WireError` it can't be used any more.

Neighbours: `transport` reads from the network into `buffer()` and calls `advance()`. Callers that already have the
bytes call `feed()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from fusionai.primitives.errors import WireError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.frame import (
    HEADER_BYTES,
    FrameHeader,
    FrameLimits,
    TensorSlot,
    decode_message,
    parse_header,
    tensor_layout,
)
from fusionai.wire.messages import Message

SCRATCH_BYTES: Final = 64 * 2**10

Allocate = Callable[[int], memoryview]
"""Returns a writable flat buffer of the given number of bytes, with arbitrary content."""


def allocate_bytes(count: int) -> memoryview:
    return memoryview(bytearray(count))


class Frame(msgspec.Struct, frozen=True):
    """A complete message with its tensors, which own their memory. `nbytes` is the frame's length on the wire."""

    message: Message
    tensors: dict[str, HostTensor]
    nbytes: int


class FrameReader:
    """Reads the frames of one connection in one direction. `limits` may be changed between frames (after the
    handshake)."""

    def __init__(self, limits: FrameLimits, allocate: Allocate = allocate_bytes) -> None:
        self.limits = limits
        self._allocate = allocate
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._start = 0
        self._end = 0
        self._header: FrameHeader | None = None
        self._message: Message | None = None
        self._slots: tuple[TensorSlot, ...] = ()
        # Buffer of a message or body that is too large for the scratch buffer, while it fills.
        self._target: memoryview | None = None
        self._filled = 0

    @property
    def midway(self) -> bool:
        """Return whether a frame has begun and is not complete."""
        return self._header is not None or self._end > self._start

    def buffer(self) -> memoryview:
        """Return the buffer for the next bytes. It is never empty if the caller calls `next` until that returns
        None."""
        if self._target is not None:
            return self._target[self._filled :]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == SCRATCH_BYTES or self._start > SCRATCH_BYTES // 2:
            left = self._end - self._start
            self._scratch[:left] = self._scratch[self._start : self._end].tobytes()
            self._start, self._end = 0, left
        return self._scratch[self._end :]

    def advance(self, count: int) -> None:
        """Record that `count` bytes were written to the start of the last `buffer()`."""
        if self._target is not None:
            self._filled += count
        else:
            self._end += count

    def next(self) -> Frame | None:
        """Return the next complete frame, or None until more bytes come. Raises `WireError` on malformed input."""
        if self._header is None:
            if self._end - self._start < HEADER_BYTES:
                return None
            self._header = parse_header(self._take(HEADER_BYTES), self.limits)
        if self._message is None:
            data = self._part(self._header.message_bytes, scratch=True)
            if data is None:
                return None
            self._message = decode_message(data, self.limits)
            self._slots = tensor_layout(self._message, self._header.body_bytes)
        body = self._part(self._header.body_bytes, scratch=False)
        if body is None:
            return None
        tensors: dict[str, HostTensor] = {}
        for slot in self._slots:
            header, offset = slot.header, slot.offset_bytes
            tensors[header.name] = HostTensor(
                header.dtype, header.shape, body[offset : offset + slot.nbytes], header.layout
            )
        frame = Frame(self._message, tensors, HEADER_BYTES + self._header.message_bytes + self._header.body_bytes)
        self._header, self._message, self._slots = None, None, ()
        return frame

    def feed(self, data: bytes | memoryview) -> Iterator[Frame]:
        """Copy `data` in, whatever its size. Yields each frame as it completes (`limits` may change in between)."""
        rest = memoryview(data)
        while rest.nbytes:
            room = self.buffer()
            count = min(room.nbytes, rest.nbytes)
            room[:count] = rest[:count]
            self.advance(count)
            rest = rest[count:]
            while (frame := self.next()) is not None:
                yield frame

    def _take(self, count: int) -> memoryview:
        taken = self._scratch[self._start : self._start + count]
        self._start += count
        return taken

    def _part(self, length: int, *, scratch: bool) -> memoryview | None:
        """Return the next `length` bytes once all are there, else None. With `scratch`, a short-lived view if they fit
        the scratch buffer."""
        if self._target is None:
            here = self._end - self._start
            if scratch and length <= SCRATCH_BYTES // 2:
                return self._take(length) if here >= length else None
            if here >= length:
                # Small and complete: copied once, out of the scratch buffer.
                return memoryview(bytearray(self._take(length)))
            try:
                self._target = self._allocate(length)
            except MemoryError as error:
                raise WireError(f"expected room for {length} bytes announced by the other side, got none.") from error
            self._filled = min(here, length)
            self._target[: self._filled] = self._take(self._filled)
        if self._filled < self._target.nbytes:
            return None
        whole, self._target, self._filled = self._target, None, 0
        return whole
