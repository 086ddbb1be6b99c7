"""A frame: 16 fixed bytes, a message as msgpack, the raw bytes of the tensors it names. Pure functions.

    offset  size  field
    0       2     magic b"FA"
    2       1     frame version
    3       1     flags, none defined: must be 0
    4       4     header_length: bytes of the msgpack message
    8       8     body_length: bytes of all tensors together
                  (all little-endian; then the message, then the body, tensors in order and unpadded)

Decides what is a well-formed frame and how large each part may be. Every size is checked against a cap and against
what the message says *before* anybody allocates for it. Never reads a socket and never allocates a body.
Neighbours: `wire.messages` has the schemas, `wire.frame` assembles frames from bytes as they come, `transport` moves
them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from fusionai.primitives.errors import WireError
from fusionai.primitives.tensors import HostTensor, layout_fits, tensor_bytes
from fusionai.wire import messages
from fusionai.wire.messages import MAX_PLACEMENT_BYTES, MAX_PROBE_BYTES, Message, Stream, TensorHeader

MAGIC: Final = b"FA"
FRAME_VERSION: Final = 1
HEADER_BYTES: Final = 16
_HEADER: Final = struct.Struct("<2sBBIQ")


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """Caps on the message and the body of a frame, for one phase of a connection."""

    message_bytes: int
    body_bytes: int


GREETING_LIMITS: Final = FrameLimits(message_bytes=1024, body_bytes=0)
"""Caps until the handshake is over (`Hello`, `Welcome`, `Refused`)."""

STRANGER_LIMITS: Final = FrameLimits(message_bytes=4096, body_bytes=0)
"""Caps for a side without a certificate: enough for `JoinRequest`."""

DOOR_LIMITS: Final = FrameLimits(message_bytes=MAX_PLACEMENT_BYTES + 8192, body_bytes=MAX_PROBE_BYTES)
"""Caps for a member that has dialled and not shown a valid ticket: enough for `OpenJob` with a signed placement, and
for a bandwidth probe."""

BROKER_LIMITS: Final = FrameLimits(message_bytes=16 * 2**20, body_bytes=MAX_PROBE_BYTES)
"""Caps for a member that has dialled its broker: enough for a plan and for a bandwidth probe."""

STREAM_LIMITS: Final[Mapping[Stream, FrameLimits]] = {
    "control": FrameLimits(message_bytes=16 * 2**20, body_bytes=64 * 2**20),
    "tensors": FrameLimits(message_bytes=2**20, body_bytes=4 * 2**30),
    "state": FrameLimits(message_bytes=16 * 2**20, body_bytes=4 * 2**30),
}
"""Caps between members. Control bodies are graphs and link probes; larger content belongs on the other streams."""


class FrameHeader(msgspec.Struct, frozen=True):
    """Lengths of the two parts that follow the fixed header."""

    message_bytes: int
    body_bytes: int


class TensorSlot(msgspec.Struct, frozen=True):
    """Position of one tensor's bytes in the body."""

    header: TensorHeader
    offset_bytes: int
    nbytes: int


def parse_header(data: bytes | bytearray | memoryview, limits: FrameLimits) -> FrameHeader:
    """Parse the first 16 bytes. Raises `WireError` on foreign bytes, another version, unknown flags or a size above its
    cap."""
    if len(data) != HEADER_BYTES:
        raise WireError(f"expected a frame header of {HEADER_BYTES} bytes, got {len(data)}.")
    magic, version, flags, message_bytes, body_bytes = _HEADER.unpack(data)
    if magic != MAGIC:
        raise WireError(f"expected a frame starting with {MAGIC!r}, got {magic!r}: another protocol.")
    if version != FRAME_VERSION:
        raise WireError(f"expected frame version {FRAME_VERSION}, got {version}: the two sides' versions differ.")
    if flags != 0:
        raise WireError(f"expected frame flags 0, got {flags}.")
    if message_bytes > limits.message_bytes:
        raise WireError(
            f"expected a message of at most {limits.message_bytes} bytes here, got {message_bytes} announced."
        )
    if body_bytes > limits.body_bytes:
        raise WireError(f"expected a body of at most {limits.body_bytes} bytes here, got {body_bytes} announced.")
    return FrameHeader(message_bytes, body_bytes)


def decode_message(data: bytes | bytearray | memoryview, limits: FrameLimits) -> Message:
    """Decode a message from its msgpack bytes and check it against the schema. Raises only `WireError`."""
    if len(data) > limits.message_bytes:
        raise WireError(f"expected a message of at most {limits.message_bytes} bytes here, got {len(data)}.")
    try:
        # Copied, because `msgspec.Raw` fields keep a view of their source and receive buffers are reused.
        return messages.decode(bytes(data))
    except msgspec.ValidationError as error:
        raise WireError(f"expected a message of the protocol, got one that breaks its schema: {error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError) as error:
        raise WireError(f"expected a message as msgpack, got bytes that are not: {error}.") from error
    except RecursionError as error:
        raise WireError("expected a message of the protocol, got one nested too deeply.") from error


def tensor_headers(message: Message) -> tuple[TensorHeader, ...]:
    """Return the tensors that a message announces; empty for messages without the field."""
    return getattr(message, "tensors", ())


def tensor_layout(message: Message, body_bytes: int) -> tuple[TensorSlot, ...]:
    """Return the position of each announced tensor in a body of `body_bytes`. Raises `WireError` on an unknown dtype,
    on a duplicate name, or when shapes and body length disagree."""
    slots: list[TensorSlot] = []
    names: set[str] = set()
    offset_bytes = 0
    for header in tensor_headers(message):
        if header.name in names:
            raise WireError(f"expected each tensor once, got {header.name!r} twice in {_tag(message)}.")
        names.add(header.name)
        try:
            nbytes = tensor_bytes(header.dtype, header.shape)
        except ValueError as error:
            raise WireError(f"tensor {header.name!r} in {_tag(message)}: {error}.") from error
        if header.layout and not layout_fits(header.shape, header.layout):
            raise WireError(
                f"tensor {header.name!r} in {_tag(message)}: {list(header.shape)} can't lie in memory as "
                f"{list(header.layout)}."
            )
        slots.append(TensorSlot(header, offset_bytes, nbytes))
        offset_bytes += nbytes
    if offset_bytes != body_bytes:
        raise WireError(
            f"expected a body of {offset_bytes} bytes from the shapes in {_tag(message)}, got {body_bytes} announced."
        )
    return tuple(slots)


def encode_header(message_bytes: int, body_bytes: int) -> bytes:
    """Return the 16 fixed bytes."""
    return _HEADER.pack(MAGIC, FRAME_VERSION, 0, message_bytes, body_bytes)


def encode_frame_head(message: Message, tensors: Sequence[HostTensor], limits: FrameLimits) -> bytes:
    """Return the fixed header and the message of a frame whose body is the bytes of `tensors` in order. Raises
    `WireError` when `message.tensors` does not describe `tensors`, or when a size exceeds the receiver's caps."""
    announced = tensor_headers(message)
    body_bytes = 0
    fits = len(announced) == len(tensors)
    # Equal lengths were just checked; this runs for every frame.
    for header, tensor in zip(announced, tensors, strict=False):
        fits = fits and (header.dtype, header.shape, header.layout) == (tensor.dtype, tensor.shape, tensor.layout)
        body_bytes += tensor.nbytes
    if not fits:
        got = [(tensor.dtype, tensor.shape) for tensor in tensors[:8]]
        expected = [(header.dtype, header.shape) for header in announced[:8]]
        raise WireError(f"expected the tensors {_tag(message)} announces, {expected}, got {got}.")
    data = messages.encode(message)
    if len(data) > limits.message_bytes or body_bytes > limits.body_bytes:
        raise WireError(
            f"expected {_tag(message)} to fit {limits.message_bytes} bytes and its body {limits.body_bytes} bytes, "
            f"got {len(data)} and {body_bytes}."
        )
    return encode_header(len(data), body_bytes) + data


def describe(name: str, tensor: HostTensor) -> TensorHeader:
    """Return the header that announces `tensor` in a message."""
    return TensorHeader(name, tensor.dtype, tensor.shape, tensor.layout)


def headers(tensors: Mapping[str, HostTensor]) -> tuple[TensorHeader, ...]:
    """Return the headers that announce a message's tensors, in order."""
    return tuple(describe(name, tensor) for name, tensor in tensors.items())


def by_name(message: Message, tensors: Sequence[HostTensor]) -> dict[str, HostTensor]:
    """Return a message's tensors by the names in its headers."""
    return {header.name: tensor for header, tensor in zip(getattr(message, "tensors", ()), tensors, strict=True)}


def _tag(message: Message) -> str:
    return str(message.__struct_config__.tag)


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
        self._ended = False

    @property
    def midway(self) -> bool:
        """Return whether a frame has begun and is not complete."""
        return self._header is not None or self._end > self._start

    def end(self) -> None:
        """Release the incomplete frame and read no more, because the connection has ended. An object that keeps the
        connection, such as the traceback of its last error, must not keep its memory."""
        self._ended = True
        self._target = None

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
        if self._ended:
            return None
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
        while rest.nbytes and not self._ended:
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
                why = f": {error}" if error.args else ""
                raise WireError(f"can't allocate the {length} bytes that the other side announced{why}.") from error
            self._filled = min(here, length)
            self._target[: self._filled] = self._take(self._filled)
        if self._filled < self._target.nbytes:
            return None
        whole, self._target, self._filled = self._target, None, 0
        return whole
