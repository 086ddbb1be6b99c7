"""Optimizer state in 8 bits a number: what a number becomes, and back. Decides the code; keeps no state.

Blocks of `BLOCK` numbers share one float32 scale, their largest magnitude; a number is the nearest of 256 values
between -1 and 1 times that. These lie as dynamic tree quantisation has them (T. Dettmers et al., "8-bit optimizers via
block-wise quantization", 2022, arXiv 2110.02861, section 2): seven decades, each with twice as many steps as the one
below, so that small numbers beside large ones are not lost. Second moments are never negative: they get a table without
signs and twice the steps. Blocks are 256 numbers, as bitsandbytes has them by now, instead of the paper's 2048, which
costs 1.6 % more memory. Both known libraries ask for more than these hundred lines: one for a compiler on every
machine, the other for a hundred megabytes of kernels; and their bits would not be ours to keep.

Neighbours: `optimizers` keeps codes and scales as state entries, `backends.state` names them.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

from fusionai.backends.state import EIGHT_BIT_BLOCK as BLOCK

_LEVELS: Final = 256
_DECADES: Final = 7
_CELLS: Final = 1 << 16
"""A float32's upper half (sign, exponent, seven bits more) finds its two possible codes without a search."""


def encode(values: torch.Tensor, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [n] -> (codes uint8 [n], scales float32 [ceil(n / BLOCK)])."""
    count = values.numel()
    blocks = -(-count // BLOCK)
    padded = values if count == blocks * BLOCK else torch.nn.functional.pad(values, (0, blocks * BLOCK - count))
    rows = padded.view(blocks, BLOCK)
    scales = rows.abs().amax(dim=1)
    # A block of zeros has scale 0, and gives zeros back whatever its codes.
    scaled = (rows / torch.where(scales == 0, 1.0, scales)[:, None]).view(-1)
    low, threshold = _cells(signed, values.device)
    cell = (scaled.view(torch.int32) >> 16) + (_CELLS >> 1)
    codes = low.index_select(0, cell).add_(scaled > threshold.index_select(0, cell))
    return codes[:count], scales


def decode(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """What `encode` gave, as float32 [n]."""
    values = _levels(signed, codes.device).index_select(0, codes.to(torch.int32))
    return values.mul_(scales.repeat_interleave(BLOCK)[: codes.numel()])


def zero_code(*, signed: bool) -> int:
    """The code of 0.0."""
    return int((_levels(signed, torch.device("cpu")) == 0).nonzero()[0])


@cache
def _levels(signed: bool, device: torch.device) -> torch.Tensor:
    """The 256 values, ascending."""
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        steps = 2**decade if signed else 2 ** (decade + 1)
        width = 0.9 / steps
        middles = [(0.1 + width * (step + 0.5)) * 10.0 ** (decade - _DECADES + 1) for step in range(steps)]
        found += middles
        found += [-middle for middle in middles] if signed else []
    assert len(found) == _LEVELS
    return torch.tensor(sorted(found), dtype=torch.float32, device=device)


@cache
def _cells(signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Per upper half of a float32, in the order of signed integers: the lower of its codes, and from where on (not
    included) it is the next one."""
    levels = _levels(signed, torch.device("cpu"))
    middles = (levels[1:] + levels[:-1]) / 2
    upper = torch.arange(-(_CELLS >> 1), _CELLS >> 1, dtype=torch.int32) << 16
    ends = torch.stack([upper.view(torch.float32), (upper | 0xFFFF).view(torch.float32)])
    # Of what is no number nothing comes but its scale, which is none either.
    ends = torch.where(ends.isfinite().all(dim=0), ends, 0.0)
    low = torch.bucketize(ends.amin(dim=0), middles)
    high = torch.bucketize(ends.amax(dim=0), middles)
    # No cell is so wide that three values would be nearest somewhere in it.
    assert bool((high - low <= 1).all())
    threshold = torch.where(high > low, middles[low.clamp(max=_LEVELS - 2)], float("inf"))
    return low.to(torch.uint8).to(device), threshold.to(device)
