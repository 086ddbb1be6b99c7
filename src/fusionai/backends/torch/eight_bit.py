"""Optimizer state in 8 bits per element: encoding and decoding. Keeps no state.

Blocks of `BLOCK` elements share one float32 scale, their largest magnitude. An element is stored as the nearest of 256
values between -1 and 1, times the scale. The values are those of dynamic tree quantisation (T. Dettmers et al., "8-bit
optimizers via block-wise quantization", 2022, arXiv 2110.02861, section 2): seven decades, each with twice as many
steps as the one below, so that small numbers among large ones are not lost. Second moments are never negative and use a
table without signs and with twice the steps. Blocks have 256 elements, as in current bitsandbytes, instead of the
paper's 2048; that costs 1.6 % more memory. The two known libraries are not used: one needs a compiler on every machine,
the other a hundred megabytes of kernels, and a new version of either could change the bits.

Neighbours: `optimizers` keeps codes and scales as state entries, `backends.state` names them.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

from fusionai.backends.state import EIGHT_BIT_BLOCK as BLOCK

_LEVELS: Final = 256
"""Values that 8 bits can code."""
_DECADES: Final = 7
"""Powers of ten that the values cover."""
_CELLS: Final = 1 << 16
"""Cells of the lookup table: the upper half of a float32 (sign, exponent, seven more bits) selects its two possible
codes."""


def encode(values: torch.Tensor, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes uint8 [n], scales float32 [ceil(n / BLOCK)]) of float32 [n]."""
    count = values.numel()
    blocks = -(-count // BLOCK)
    padded = values if count == blocks * BLOCK else torch.nn.functional.pad(values, (0, blocks * BLOCK - count))
    rows = padded.view(blocks, BLOCK)
    scales = rows.abs().amax(dim=1)
    # A block of zeros has scale 0 and decodes to zeros whatever its codes.
    scaled = (rows / torch.where(scales == 0, 1.0, scales)[:, None]).view(-1)
    low, threshold = _cells(signed, values.device)
    cell = (scaled.view(torch.int32) >> 16) + (_CELLS >> 1)
    codes = low.index_select(0, cell).add_(scaled > threshold.index_select(0, cell))
    return codes[:count], scales


def decode(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Return the float32 [n] that `encode` coded."""
    values = _levels(signed, codes.device).index_select(0, codes.to(torch.int32))
    return values.mul_(scales.repeat_interleave(BLOCK)[: codes.numel()])


def zero_code(*, signed: bool) -> int:
    """Return the code of 0.0."""
    return int((_levels(signed, torch.device("cpu")) == 0).nonzero()[0])


@cache
def _levels(signed: bool, device: torch.device) -> torch.Tensor:
    """Return the 256 values in ascending order."""
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
    """Return, for each upper half of a float32 in the order of signed integers, its lower code and the threshold above
    which the next code applies."""
    levels = _levels(signed, torch.device("cpu"))
    middles = (levels[1:] + levels[:-1]) / 2
    upper = torch.arange(-(_CELLS >> 1), _CELLS >> 1, dtype=torch.int32) << 16
    ends = torch.stack([upper.view(torch.float32), (upper | 0xFFFF).view(torch.float32)])
    # A NaN makes its block's scale NaN, so its code does not matter.
    ends = torch.where(ends.isfinite().all(dim=0), ends, 0.0)
    low = torch.bucketize(ends.amin(dim=0), middles)
    high = torch.bucketize(ends.amax(dim=0), middles)
    # No cell is so wide that it has three nearest values.
    assert bool((high - low <= 1).all())
    threshold = torch.where(high > low, middles[low.clamp(max=_LEVELS - 2)], float("inf"))
    return low.to(torch.uint8).to(device), threshold.to(device)
