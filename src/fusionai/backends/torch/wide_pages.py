"""Memory for matrices in pages of two megabytes, where the system has them. Decides where a matrix lies, not whether.

Who reads a matrix once from end to end needs the address of a new page every few instructions, and with pages of four
kilobytes finding those takes a part of the time. Asking costs nothing: where there are no such pages, others are given.
Neighbours: `serving_weights` asks for what its products need, `row_products` lays matrices out here.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod
from typing import Final

import torch

PAGE_BYTES: Final = 2**21
_LINE_BYTES: Final = 64
"""Of a processor's cache."""


class WidePages:
    """`nbytes` at most, all matrices together; memory is taken as it is written to and given back with the last
    tensor."""

    def __init__(self, nbytes: int) -> None:
        # Memory that could be shared has no wide pages on most systems.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self._memory = mmap.mmap(-1, nbytes + -nbytes % PAGE_BYTES + PAGE_BYTES, **private)
        advice = getattr(mmap, "MADV_HUGEPAGE", None)
        if advice is not None:
            with suppress(OSError):  # a kernel without them
                self._memory.madvise(advice)
        start = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._used_bytes = -start % PAGE_BYTES
        self._end_bytes = self._used_bytes + nbytes

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros in place of their own, or of memory elsewhere once all is taken."""
        nbytes = taken_bytes(shape, dtype)
        if self._used_bytes + nbytes > self._end_bytes or not nbytes:
            return torch.zeros(shape, dtype=dtype)
        made = torch.frombuffer(self._memory, dtype=dtype, count=prod(shape), offset=self._used_bytes)
        self._used_bytes += nbytes
        return made.reshape(shape)


def taken_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Of a tensor that begins with a cache line."""
    nbytes = prod(shape) * dtype.itemsize
    return nbytes + -nbytes % _LINE_BYTES
