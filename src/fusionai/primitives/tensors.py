"""A tensor as bytes on the host: dtype name, shape, little-endian C-contiguous memory. Needs no framework.

Decides which dtypes exist and how many bytes a shape takes; allocates nothing. `wire` puts these tensors into frames,
`backends` convert them to framework tensors, without copying where possible.
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
"""Every dtype that may cross the wire. bfloat16 is sent as raw bits."""

FLOAT_DTYPES: Final = frozenset({"float64", "float32", "float16", "bfloat16"})
MAX_RANK: Final = 16
LARGEST_SPREAD: Final = 4
"""Largest memory of a tensor with gaps between its rows (a part of a split), relative to a dense one. A sparser tensor
is sent as if it were dense."""
MAX_STRIDE: Final = 2**40
MAX_OFFSET: Final = 64
"""Upper limit on the offset from an aligned address, in elements: no relevant alignment is larger."""


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor on the host.

    `data` is a flat memoryview of `uint8`, C-contiguous, little-endian, exactly `nbytes` long. `layout` describes the
    tensor in its backend's memory: strides, then the offset from an aligned address, in elements; empty if it is the
    same as in `data`. It is kept because a backend may round differently with other strides.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    layout: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.layout and not layout_fits(self.shape, self.layout):
            raise ValueError(f"tensor {self.dtype}{list(self.shape)} can't have the memory layout {list(self.layout)}")
        expected_bytes = tensor_bytes(self.dtype, self.shape)
        if self.data.nbytes != expected_bytes:
            raise ValueError(
                f"tensor {self.dtype}{list(self.shape)} takes {expected_bytes} bytes, its buffer has {self.data.nbytes}"
            )

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a dense tensor. Raises `ValueError` for an unknown dtype, a negative size or a rank above
    `MAX_RANK`."""
    itemsize = ITEMSIZE_BYTES.get(dtype)
    if itemsize is None:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(ITEMSIZE_BYTES)}")
    if len(shape) > MAX_RANK:
        raise ValueError(f"rank {len(shape)} is above the limit of {MAX_RANK}")
    if any(size < 0 for size in shape):
        raise ValueError(f"negative size in shape {list(shape)}")
    return prod(shape) * itemsize


def layout_fits(shape: tuple[int, ...], layout: tuple[int, ...]) -> bool:
    """Return whether no two elements overlap (except in expanded dimensions of stride 0) and the memory is not too
    large. The limit is `LARGEST_SPREAD` times the memory of a dense tensor."""
    if len(layout) != len(shape) + 1 or not all(0 <= number < MAX_STRIDE for number in layout):
        return False
    extent = 1
    for stride, size in sorted((stride, size) for stride, size in zip(layout, shape, strict=False) if size > 1):
        if stride and stride < extent:
            return False
        extent += stride * (size - 1)
    return layout[-1] < MAX_OFFSET and extent <= LARGEST_SPREAD * prod(shape)


def host_tensor(
    dtype: str, shape: tuple[int, ...], buffer: bytes | bytearray | memoryview, layout: tuple[int, ...] = ()
) -> HostTensor:
    """Wrap a contiguous buffer of bytes as a `HostTensor` without copying."""
    view = memoryview(buffer)
    # A memoryview with a zero in its shape can't be cast, and an empty tensor has no bytes to share.
    flat = memoryview(b"") if view.nbytes == 0 else view.cast("B")
    return HostTensor(dtype, shape, flat, layout)
