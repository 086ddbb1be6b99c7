"""Blocked matrices as row products read them: contiguous blocks of 16 columns. Defines the layout of each format.

A block has the columns' weights of the first summand, then those of the second, and so on. In bfloat16, two summands
form one vector of pairs; in four bits, two summands share a byte, the first in its lower half. Eight bits: the columns'
scales (float32) follow the last summand. Four bits: each group of summands starts with the columns' scales and middles,
one bfloat16 each. Levels of a quantised file (`ir.levels`): summands that share a factor start with the columns'
factors and bases (float32), each group with its scales and middles (int8), as far as there are any. Padding is zeros.
This module needs no compiler, because memory is planned even where there is none.
Neighbours: `row_products` multiplies, `packed_linear` rounds weights to formats.

Matrices lie in pages of two megabytes, if the system has them: reading a matrix from end to end needs the address of a
new page every few instructions, and with pages of four kilobytes these translations cost a noticeable part of the time.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fusionai.backends.torch.row_code import Factor
from fusionai.ir.levels import LAYOUTS, LevelLayout, Levels

WIDTH: Final = 16
"""Columns of a block."""
GROUPS: Final = {32: Factor.INT4_32, 64: Factor.INT4_64, 128: Factor.INT4_128}
"""Number of weights that share a scale -> four-bit format."""
LEVELS: Final = dict(zip(LAYOUTS, (factor for factor in Factor if factor.name.startswith("LEVELS")), strict=True))
"""Layout of a quantised file's levels -> their format."""
LAYOUT_OF: Final = {factor: layout for layout, factor in LEVELS.items()}
_PLAIN: Final = {torch.float32: Factor.FP32, torch.bfloat16: Factor.BF16, torch.float16: Factor.FP16}


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix [columns, count] in `data`, contiguous; one block takes `block_bytes`."""

    factor: Factor
    columns: int
    count: int
    data: Tensor

    @property
    def block_bytes(self) -> int:
        return block_bytes(self.factor, self.count)


def block_bytes(factor: Factor, count: int) -> int:
    """Return the bytes of a block of 16 columns of `count` summands."""
    match factor:
        case Factor.FP32:
            return 4 * WIDTH * count
        case Factor.BF16 | Factor.HALVES:
            return 2 * WIDTH * (count + count % 2)
        case Factor.FP16:
            return 2 * WIDTH * count
        case Factor.INT8:
            return WIDTH * count + 4 * WIDTH
        case Factor.INT4_32 | Factor.INT4_64 | Factor.INT4_128:
            group = next(size for size, known in GROUPS.items() if known is factor)
            return count // group * (4 * WIDTH + WIDTH * group // 2)
        case _:
            layout = LAYOUT_OF[factor]
            return count // layout.shared * WIDTH * layout.shared_bytes


def blocks_bytes(factor: Factor, columns: int, count: int) -> int:
    """Return the bytes that a matrix takes of its pages."""
    return taken_bytes((-(-columns // WIDTH), block_bytes(factor, count)), torch.uint8)


def floats_in_blocks(matrix: Tensor, pages: WidePages | None = None) -> Blocks:
    """Return [columns, summands] float32, bfloat16 or float16 as [blocks, summands, 16] or [blocks, pairs, 16, 2]. The
    memory comes from `pages` if given."""
    columns, count = matrix.shape
    paired = matrix.dtype == torch.bfloat16
    whole = _filled(matrix, count % 2 if paired else 0)
    steps = whole.shape[1] // 2 if paired else count
    shape = (whole.shape[0] // WIDTH, steps, WIDTH, *([2] if paired else []))
    made = torch.empty(shape, dtype=matrix.dtype) if pages is None else pages.take(shape, matrix.dtype)
    # Pairs are copied as numbers of 32 bits, twenty times as fast as element by element.
    given, taken = (whole.view(torch.int32), made.view(torch.int32).squeeze(-1)) if paired else (whole, made)
    taken.copy_(given.reshape(-1, WIDTH, steps).transpose(1, 2))
    return Blocks(_PLAIN[matrix.dtype], columns, count, made)


def eight_bits_in_blocks(levels: Tensor, scales: Tensor) -> Blocks:
    """Return int8 [columns, summands] and a scale per column as uint8 [blocks, bytes]."""
    columns, count = levels.shape
    made = _room(Factor.INT8, columns, count)
    whole = _filled(levels, 0).view(torch.uint8).reshape(-1, WIDTH, count).transpose(1, 2)
    made[:, : WIDTH * count].unflatten(1, (count, WIDTH)).copy_(whole)
    wide = torch.zeros(made.shape[0] * WIDTH)
    wide[:columns] = scales
    made[:, WIDTH * count :] = wide.reshape(-1, WIDTH).view(torch.uint8)
    return Blocks(Factor.INT8, columns, count, made)


def four_bits_in_blocks(levels: Tensor, scales_and_middles: Tensor) -> Blocks:
    """Return levels 0..15 [columns, summands] and bfloat16 [summands / group, columns, 2] as uint8 [blocks, bytes]."""
    columns, count = levels.shape
    groups = scales_and_middles.shape[0]
    group = count // groups
    factor = GROUPS[group]
    made = _room(factor, columns, count).unflatten(1, (groups, -1))
    blocks = made.shape[0]
    whole = _filled(levels.to(torch.uint8), 0)
    pairs = whole[:, 0::2] | (whole[:, 1::2] << 4)
    made[:, :, 4 * WIDTH :].unflatten(2, (group // 2, WIDTH)).copy_(
        pairs.reshape(blocks, WIDTH, groups, group // 2).permute(0, 2, 3, 1)
    )
    words = scales_and_middles.new_zeros((groups, blocks * WIDTH, 2))
    words[:, :columns] = scales_and_middles
    bytes_of_words = words.reshape(groups, blocks, 2 * WIDTH).transpose(0, 1).contiguous().view(torch.uint8)
    made[:, :, : 4 * WIDTH] = bytes_of_words
    return Blocks(factor, columns, count, made.flatten(1))


def levels_in_blocks(levels: Levels, layout: LevelLayout) -> Tensor:
    """Return rows of a quantised file's matrix, a multiple of 16 of them or its last, as uint8 [blocks, bytes]."""
    rows, count = levels.levels.shape
    blocks, shares = -(-rows // WIDTH), count // layout.shared

    def across(values: npt.NDArray[Any], each: int) -> npt.NDArray[np.uint8]:
        """[rows, shares * each] as bytes [blocks, shares, each, bytes of 16 columns]."""
        whole = np.zeros((blocks * WIDTH, shares * each), values.dtype)
        whole[:rows] = values
        turned = np.ascontiguousarray(whole.reshape(blocks, WIDTH, shares, each).transpose(0, 2, 3, 1))
        return turned.view(np.uint8)

    made = np.empty((blocks, shares, WIDTH * layout.shared_bytes), np.uint8)
    shared = [values for values in (levels.factors, levels.bases) if values is not None]
    head = 4 * WIDTH * len(shared)
    for number, values in enumerate(shared):
        made[:, :, 4 * WIDTH * number : 4 * WIDTH * (number + 1)] = across(values, 1)[:, :, 0]
    groups = made[:, :, head:].reshape(blocks, shares, layout.groups, -1)
    grouped = [values for values in (levels.scales, levels.middles) if values is not None]
    for number, values in enumerate(grouped):
        groups[..., WIDTH * number : WIDTH * (number + 1)] = across(values, layout.groups)
    packed = across(levels.levels, layout.shared).reshape(blocks, shares, layout.groups, layout.group, WIDTH)
    if layout.bits == 4:
        packed = packed[..., 0::2, :] | packed[..., 1::2, :] << 4
    groups[..., WIDTH * len(grouped) :] = packed.reshape(*groups.shape[:3], -1)
    return torch.from_numpy(made.reshape(blocks, -1))


def _room(factor: Factor, columns: int, count: int) -> Tensor:
    return torch.zeros((-(-columns // WIDTH), block_bytes(factor, count)), dtype=torch.uint8)


def _filled(matrix: Tensor, behind: int) -> Tensor:
    """Return the matrix padded to whole blocks of columns, and with `behind` more summands."""
    columns, count = matrix.shape
    if columns % WIDTH == 0 and not behind:
        return matrix.contiguous()
    whole = matrix.new_zeros((columns + -columns % WIDTH, count + behind))
    whole[:columns, :count] = matrix
    return whole


PAGE_BYTES: Final = 2**21
"""Bytes of a large page."""
_LINE_BYTES: Final = 64
"""Bytes of a processor's cache line."""


class WidePages:
    """Memory for matrices of at most `nbytes` together. Pages are allocated when first written, and freed with the last
    tensor."""

    def __init__(self, nbytes: int) -> None:
        # Private memory, because most systems have no large pages for memory that can be shared.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if sys.platform != "win32" else {}
        self._memory = mmap.mmap(-1, nbytes + -nbytes % PAGE_BYTES + PAGE_BYTES, **private)
        if sys.platform == "linux":
            with suppress(OSError):  # a kernel without large pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        start = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._used_bytes = -start % PAGE_BYTES
        self._end_bytes = self._used_bytes + nbytes

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
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
