"""Measures this device's serving speed: matrix products per weight format, and attention.

For each format there are two figures: operations per second for a prompt chunk, and bytes of weights per second that a
single row reads. On a CPU, the single row is multiplied by a small matrix repeated until it exceeds the processor's
caches. Attention is that of a prompt chunk to the text before it, which dominates long prompts. The measurement takes
about 0.3 s. Neighbours: `probe` calls this, `packed_linear` makes the products, `scheduling.problem.calibration` plans
with the figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol, get_args

import torch

from fusionai.backends.layer_shapes import LayerShape
from fusionai.backends.paged_table import Span
from fusionai.backends.torch.blocked_linear import blocked_product, kernels
from fusionai.backends.torch.packed_linear import PackedLinear, pack
from fusionai.backends.torch.paged_attention import cached_attention
from fusionai.backends.torch.paged_cache import LayerCache, lay_out
from fusionai.primitives.pace import ServingPace
from fusionai.wire.serving import ServeOptions, WeightFormat

MEASURE_S: Final = 0.02
"""Computing time for each measurement, in seconds; chosen."""
PROMPT_ROWS: Final = 256
"""Rows of a prompt chunk."""
READ_BYTES: Final = 2**25
"""Bytes of weights that a single row reads; chosen to exceed a core's caches."""
_PAGE_TOKENS: Final = 16
_SIDE: Final = {"cpu": 1024, "cuda": 8192, "mps": 4096}
"""Rows and columns of the measured matrix, per device; chosen."""
HEAD_WIDTH: Final = 64
"""Width of an attention head."""
GROUPS: Final = 4
"""Queries that share a key head."""
ATTENDED: Final = {"cpu": (1, 1024), "cuda": (8, 8192), "mps": (8, 4096)}
"""Number of key heads, and of positions including the chunk."""


class _CallsPerS(Protocol):
    def __call__(self, call: Callable[[], object], device: torch.device, measure_s: float) -> float: ...


def measured_serving(device: torch.device, calls_per_s: _CallsPerS) -> tuple[ServingPace, ...]:
    """Return the measured speeds, one per weight format, in the formats' order."""
    side = _SIDE[device.type]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((side, side), generator=generator).to(device)
    rows = torch.randn((PROMPT_ROWS, side), generator=generator).to(device)
    one = rows[:1].clone()
    in_blocks = device.type == "cpu" and kernels() is not None
    found: list[ServingPace] = []
    with torch.inference_mode():
        for form in get_args(WeightFormat):
            packed = pack(weight, None, form, "the probe's weight", in_blocks=in_blocks)
            flops = 2.0 * PROMPT_ROWS * weight.numel()
            flops_per_s = flops * calls_per_s(lambda packed=packed: packed(rows), device, MEASURE_S)
            long = _repeated(packed)
            bytes_per_s = long.nbytes * calls_per_s(lambda long=long: long(one), device, MEASURE_S)
            found.append(ServingPace(form=form, flops_per_s=flops_per_s, bytes_per_s=bytes_per_s))
    return tuple(found)


def measured_attention(device: torch.device, calls_per_s: _CallsPerS) -> float:
    """Return attention's operations per second, counting two products for each query and visible key."""
    shared, positions = ATTENDED[device.type]
    start = positions - PROMPT_ROWS
    pages = positions // _PAGE_TOKENS
    options = ServeOptions(page_tokens=_PAGE_TOKENS, pages=pages, sessions=1, pass_tokens=PROMPT_ROWS)
    cache = LayerCache(LayerShape(0, GROUPS * shared, shared, HEAD_WIDTH, HEAD_WIDTH, None), options, device)
    span = Span(0, 0, start, PROMPT_ROWS, tuple(range(pages)), -1)
    layout = lay_out((span,), options, paged=True, windows={}, device=device)
    generator = torch.Generator().manual_seed(0)
    shape = (1, GROUPS * shared, PROMPT_ROWS, HEAD_WIDTH)
    q = torch.randn(shape, generator=generator).to(device)
    k, v = q[:, :shared].clone(), q[:, -shared:].clone()

    def attend() -> torch.Tensor:
        return cached_attention(layout, cache, q, k, v, scale=HEAD_WIDTH**-0.5, softcap=None, sinks=None)

    seen = PROMPT_ROWS * (start + (PROMPT_ROWS + 1) / 2)
    with torch.inference_mode():
        return 4.0 * HEAD_WIDTH * GROUPS * shared * seen * calls_per_s(attend, device, MEASURE_S)


def _repeated(packed: PackedLinear) -> PackedLinear:
    """Return the product with its columns repeated until caches can't hold them."""
    blocks = packed.blocks
    if blocks is None:
        return packed
    times = max(1, READ_BYTES // packed.nbytes)
    data = blocks.data.repeat(times, *[1] * (blocks.data.dim() - 1))
    long = replace(blocks, columns=blocks.columns * times, data=data)
    return replace(packed, product=blocked_product(long), nbytes=data.nbytes, blocks=long)
