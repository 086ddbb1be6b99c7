"""A tensor as bytes on the host: dtype name, shape, little-endian C-contiguous memory. No framework.

Decides which dtypes exist and how many bytes a shape takes. Never allocates from a size it has not been told to trust.
Neighbours: `wire` puts these in frames, `backends` turn them into framework tensors without copying where they can.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final

ITEMSIZE_BYTES: Final[dict[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Every dtype that may cross the wire. bfloat16 travels as raw bits."""

FLOAT_DTYPES: Final = frozenset({"float64", "float32", "float16", "bfloat16"})
MAX_RANK: Final = 16


@dataclass(frozen=True, slots=True)
class HostTensor:
    """`data` is a flat memoryview of `uint8`, C-contiguous, little-endian, exactly `nbytes` long."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        expected_bytes = tensor_bytes(self.dtype, self.shape)
        if self.data.nbytes != expected_bytes:
            raise ValueError(
                f"tensor {self.dtype}{list(self.shape)} takes {expected_bytes} bytes, its buffer has {self.data.nbytes}"
            )

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a dense tensor. Raises `ValueError` on an unknown dtype, a negative size or a rank above `MAX_RANK`."""
    itemsize = ITEMSIZE_BYTES.get(dtype)
    if itemsize is None:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(ITEMSIZE_BYTES)}")
    if len(shape) > MAX_RANK:
        raise ValueError(f"rank {len(shape)} is above the limit of {MAX_RANK}")
    if any(size < 0 for size in shape):
        raise ValueError(f"negative size in shape {list(shape)}")
    return prod(shape) * itemsize


def host_tensor(dtype: str, shape: tuple[int, ...], buffer: bytes | bytearray | memoryview) -> HostTensor:
    """Wrap a buffer (any contiguous layout of bytes) as a `HostTensor` without copying."""
    view = memoryview(buffer)
    # A memoryview with a zero in its shape can't be cast; an empty tensor has no bytes to share anyway.
    flat = memoryview(b"") if view.nbytes == 0 else view.cast("B")
    return HostTensor(dtype, shape, flat)
