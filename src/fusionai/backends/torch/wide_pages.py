"""Memory for matrices in pages of two megabytes, if the system has them.

Reading a matrix from end to end needs the address of a new page every few instructions, and with pages of four
kilobytes these translations cost a noticeable part of the time. Asking for large pages costs nothing: a system without
them gives small ones. Neighbours: `serving_weights` requests the memory for its products, `row_products` reads the
matrices.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod
from typing import Final

import torch

PAGE_BYTES: Final = 2**21
"""Bytes of a large page."""
_LINE_BYTES: Final = 64
"""Bytes of a processor's cache line."""


class WidePages:
    """Memory for matrices of at most `nbytes` together. Pages are allocated when first written, and freed with the last
    tensor."""

    def __init__(self, nbytes: int) -> None:
        # Private memory, because most systems have no large pages for memory that can be shared.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self._memory = mmap.mmap(-1, nbytes + -nbytes % PAGE_BYTES + PAGE_BYTES, **private)
        advice = getattr(mmap, "MADV_HUGEPAGE", None)
        if advice is not None:
            with suppress(OSError):  # a kernel without large pages
                self._memory.madvise(advice)
        start = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._used_bytes = -start % PAGE_BYTES
        self._end_bytes = self._used_bytes + nbytes

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return zeros in this memory, or in ordinary memory once it is used up."""
        nbytes = taken_bytes(shape, dtype)
        if self._used_bytes + nbytes > self._end_bytes or not nbytes:
            return torch.zeros(shape, dtype=dtype)
        made = torch.frombuffer(self._memory, dtype=dtype, count=prod(shape), offset=self._used_bytes)
        self._used_bytes += nbytes
        return made.reshape(shape)


def taken_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a tensor rounded up to whole cache lines."""
    nbytes = prod(shape) * dtype.itemsize
    return nbytes + -nbytes % _LINE_BYTES
