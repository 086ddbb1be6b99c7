"""What a daemon and its worker say to each other: one question, one answer, tensors in shared memory.

Questions and answers are msgpack with a schema per method (`METHODS`) on a pair of pipes. Tensors lie one after the
other in an `Arena` that both processes map: those of the question first, those of the answer behind them. Neither side
believes the other: places are checked against the arena, and shapes against bytes, before a tensor is touched; the
daemon copies what it keeps, because the worker can write to the arena at any time.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import msgspec
import numpy as np

from fusionai.backends.interface import Call, DeviceReport, Speeds
from fusionai.backends.state import ProgramSize
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor, layout_fits, tensor_bytes
from fusionai.wire.messages import StageOptions
from fusionai.wire.serving import Segment, ServeOptions

ALIGNMENT_BYTES: Final = 64
NAMED_ARENAS: Final = sys.platform != "linux"
SMALLEST_ARENA_BYTES: Final = 1 << 20
KEPT_ARENA_BYTES: Final = 64 << 20
"""Shared memory that stays allocated between two calls; chosen."""
PIECE_BYTES: Final = 32 << 20
"""Tensors of a state that travel together. Larger tensors travel alone."""
LARGEST_MESSAGE_BYTES: Final = 1 << 28
"""Limit on a question or answer without its tensors: a graph's JSON is the largest part."""
MOST_TENSORS: Final = 1 << 16

Parts = tuple[Literal["model", "optimizer"], ...]


class LoadedProgram(msgspec.Struct, frozen=True):
    """A program that was loaded: the number that calls name it by, its size, and whether it repeats its bits
    (`interface.StageProgram`)."""

    number: int
    size: ProgramSize
    repeats: bool = True


METHODS: Final[Mapping[str, tuple[Any, Any]]] = {
    # The backend: target 0.
    "probe": (tuple[Speeds | None], DeviceReport),
    "warm_up": (tuple[()], None),
    "limit_memory": (tuple[int], bool),
    "unsupported": (tuple[tuple[str, ...]], tuple[str, ...]),
    "clip_scale": (tuple[tuple[float, ...], float], tuple[float, float]),
    "load": (tuple[bytes, tuple[str, ...], StageOptions, int | None], LoadedProgram),
    "serve": (tuple[bytes, ServeOptions, int | None], LoadedProgram),
    "drop": (tuple[int], None),
    # A stage that trains.
    "initialise": (tuple[()], tuple[str, ...]),
    "import_state": (tuple[()], None),
    "export_state": (tuple[Parts], bool),
    "export_more": (tuple[()], bool),
    "export_entries": (tuple[tuple[str, ...]], None),
    "forward": (tuple[Call, tuple[str, ...] | None], None),
    "backward": (tuple[Call, int], None),
    "weight_gradients": (tuple[Call], None),
    "gradient_norms": (tuple[()], dict[str, float]),
    "export_gradients": (tuple[tuple[str, ...]], None),
    "import_gradients": (tuple[bool], None),
    "apply": (tuple[float, float], None),
    "discard": (tuple[()], None),
    # A stage that serves.
    "import_weights": (tuple[()], None),
    "missing": (tuple[()], tuple[str, ...]),
    "joined": (tuple[tuple[str, ...]], tuple[str, ...]),
    "allocate": (tuple[()], None),
    "run": (tuple[tuple[Segment, ...], tuple[str, ...], tuple[int, ...] | None], None),
    "forget": (tuple[tuple[int, ...]], None),
    "forget_all": (tuple[()], None),
    "cached": (tuple[()], dict[int, int]),
    # Both.
}
"""Method of `backends.interface` -> types of its arguments and of its result. Tensors travel beside them."""
ARGUMENTS: Final = {name: msgspec.msgpack.Decoder(types[0]) for name, types in METHODS.items()}
RESULTS: Final = {name: msgspec.msgpack.Decoder(types[1]) for name, types in METHODS.items()}
"""Decoders by method. They are made once, because making one takes longer than a small call."""


class TensorPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor and its place in the arena, in bytes from its start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: tuple[int, ...]
    offset: int


class WorkerCall(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A call. `target`: 0 for the backend, else the number of a loaded program."""

    target: int
    method: str
    arguments: msgspec.Raw
    tensors: tuple[TensorPlace, ...] = ()
    arena_bytes: int = 0


class Failure(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An error of the backend, by the name of its class in `primitives.errors`."""

    kind: str
    message: str
    hint: str | None


class WorkerReply(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A call's result. `used_s`: processor time that the call took, in seconds. `resident_bytes`: memory of the program
    that was called, None if the call can't have changed it."""

    result: msgspec.Raw
    tensors: tuple[TensorPlace, ...] = ()
    arena_bytes: int = 0
    used_s: float = 0.0
    resident_bytes: int | None = None
    failure: Failure | None = None


CALLS: Final = msgspec.msgpack.Decoder(WorkerCall)
REPLIES: Final = msgspec.msgpack.Decoder(WorkerReply)
ENCODER: Final = msgspec.msgpack.Encoder()


class Arena:
    """Memory that a daemon and its worker share. It only grows, up to `limit_bytes`.

    On Linux it has no name, and neither side can shrink it: reading a shrunk mapping would end the process. On other
    systems it is a file in the worker's own directory, at `path`, which the worker opens by name: Windows passes no
    descriptors on.
    """

    def __init__(self, descriptor: int, limit_bytes: int, path: Path | None = None) -> None:
        self.descriptor = descriptor
        self.limit_bytes = limit_bytes
        self.path = path
        self._map: mmap.mmap | None = None
        self.nbytes = 0

    @classmethod
    def new(cls, limit_bytes: int, directory: Path) -> Arena:
        """Return an arena for the worker with this directory."""
        if sys.platform == "linux" and not NAMED_ARENAS:
            import fcntl

            descriptor = os.memfd_create("fusionai", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            arena = cls(descriptor, limit_bytes)
        else:
            arena = cls.at(directory / "arena", limit_bytes)
        arena.grow(SMALLEST_ARENA_BYTES)
        return arena

    @classmethod
    def at(cls, path: Path, limit_bytes: int) -> Arena:
        """Open the arena that is a file."""
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
        return cls(os.open(path, flags, 0o600), limit_bytes, path)

    def grow(self, nbytes: int) -> None:
        """Make room for `nbytes` in all. Raises `ExecutionError` above the limit."""
        if nbytes <= self.nbytes:
            return
        if nbytes > self.limit_bytes:
            raise ExecutionError(
                f"expected at most {self.limit_bytes} bytes of tensors in one call of the worker, got {nbytes}."
            )
        size = max(nbytes, min(2 * self.nbytes, self.limit_bytes))
        size += -size % mmap.PAGESIZE
        if os.fstat(self.descriptor).st_size < size:
            os.ftruncate(self.descriptor, size)
        self._remap(size)

    def follow(self, nbytes: int) -> None:
        """Map what the other side has made room for. Raises `ExecutionError` if it says more than there is."""
        if nbytes > self.nbytes:
            if nbytes > min(os.fstat(self.descriptor).st_size, self.limit_bytes + mmap.PAGESIZE):
                raise ExecutionError(f"the other process speaks of {nbytes} shared bytes, but there are fewer.")
            self._remap(nbytes)

    def _remap(self, nbytes: int) -> None:
        # Views of the old mapping may live on; it is unmapped with the last of them.
        self._map = mmap.mmap(self.descriptor, nbytes)
        self.nbytes = nbytes

    def put(
        self, tensors: Mapping[str, HostTensor] | Sequence[tuple[str, HostTensor]], start: int
    ) -> list[TensorPlace]:
        """Copy tensors behind byte `start` and return their places."""
        entries = list(tensors.items()) if isinstance(tensors, Mapping) else tensors
        offset, places = start, list[TensorPlace]()
        for name, tensor in entries:
            offset += -offset % ALIGNMENT_BYTES
            places.append(TensorPlace(name, tensor.dtype, tensor.shape, tensor.layout, offset))
            offset += tensor.nbytes
        self.grow(offset)
        assert self._map is not None
        view = memoryview(self._map)
        for place, (_, tensor) in zip(places, entries, strict=True):
            view[place.offset : place.offset + tensor.nbytes] = tensor.data
        return places

    def take(self, places: Sequence[TensorPlace], *, copy: bool) -> list[tuple[str, HostTensor]]:
        """Return the tensors at `places`. With `copy` they share no memory with the arena. Raises `ExecutionError` if a
        place does not lie in the arena, or a tensor's shape does not fit its bytes."""
        if len(places) > MOST_TENSORS:
            raise ExecutionError(f"expected at most {MOST_TENSORS} tensors in one call, got {len(places)}.")
        assert self._map is not None
        view, taken = memoryview(self._map), list[tuple[str, HostTensor]]()
        for place in places:
            try:
                nbytes = tensor_bytes(place.dtype, place.shape)
            except ValueError as error:
                raise ExecutionError(f"tensor {place.name[:64]!r} between daemon and worker: {error}.") from None
            if not (place.offset >= 0 and place.offset + nbytes <= self.nbytes):
                raise ExecutionError(f"tensor {place.name[:64]!r} does not lie in the memory shared with the worker.")
            if place.layout and not layout_fits(place.shape, place.layout):
                raise ExecutionError(f"tensor {place.name[:64]!r} has a layout that does not fit its shape.")
            data = view[place.offset : place.offset + nbytes]
            taken.append(
                (place.name, host_tensor(place.dtype, place.shape, copied(data) if copy else data, place.layout))
            )
        return taken

    def release(self) -> None:
        """Return the memory beyond `KEPT_ARENA_BYTES` to the system. What it held is lost; the addresses stay."""
        if self._map is not None and self.nbytes > KEPT_ARENA_BYTES and sys.platform == "linux":
            with suppress(OSError):  # a file system may not punch holes
                self._map.madvise(mmap.MADV_REMOVE, KEPT_ARENA_BYTES, self.nbytes - KEPT_ARENA_BYTES)

    def close(self) -> None:
        os.close(self.descriptor)


def copied(data: memoryview) -> memoryview:
    """Return the bytes in memory of their own, aligned as backends use tensors in place."""
    room = np.empty(data.nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -room.ctypes.data % ALIGNMENT_BYTES
    own = room[start : start + data.nbytes]
    own[:] = np.frombuffer(data, np.uint8)
    return own.data


def end_of(places: Sequence[TensorPlace]) -> int:
    """Return the byte behind the last of `places`, which are in order."""
    return places[-1].offset + tensor_bytes(places[-1].dtype, places[-1].shape) if places else 0


def send(pipe: BinaryIO, message: WorkerCall | WorkerReply) -> None:
    data = ENCODER.encode(message)
    pipe.write(len(data).to_bytes(4, "little") + data)
    pipe.flush()


def receive(pipe: BinaryIO) -> bytes | None:
    """Return the next message's bytes; None if the other side has ended. Raises `ExecutionError` above the limit."""
    head = pipe.read(4)
    if len(head) < 4:
        return None
    size = int.from_bytes(head, "little")
    if size > LARGEST_MESSAGE_BYTES:
        raise ExecutionError(f"expected a message of at most {LARGEST_MESSAGE_BYTES} bytes, got one of {size}.")
    data = pipe.read(size)
    return data if len(data) == size else None
