"""Measures a device, and computes the fingerprint by which two peers know that they compute the same bits.

Also measures serving speed: matrix products per weight format, and attention over a cache.

Neighbours: `backend.TorchBackend.probe` calls this; `scheduling` plans with the speeds, takeover compares fingerprints.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol, get_args

import psutil
import torch

from fusionai.backends.arguments import Scores
from fusionai.backends.interface import DeviceReport, Speeds
from fusionai.backends.measurement import (
    MEASURE_S,
    arithmetic,
    hashed,
    probe_pattern,
    processor_name,
    scratch_bytes_per_s,
)
from fusionai.backends.serving.page_table import LayerShape, RowSpan
from fusionai.backends.torch.blocked_linear import blocked_product, kernels
from fusionai.backends.torch.host import to_host
from fusionai.backends.torch.offloaded_weights import EMPTIED
from fusionai.backends.torch.packed_linear import PackedLinear, pack
from fusionai.backends.torch.paged_attention import cached_attention
from fusionai.backends.torch.paged_cache import LayerCache, lay_out
from fusionai.primitives.pace import ServingSpeed
from fusionai.wire.serving import ServeOptions, WeightFormat

LONGEST_MEASURE_S: Final = 2.0
"""Longest wall-clock time of a measurement, in seconds, for a machine too busy to give this process `MEASURE_S`;
chosen."""
MATRIX_SIZE: Final = {"cpu": 512, "cuda": 4096, "mps": 2048}
"""Rows and columns of the measured matrix product, per device; chosen."""
COPY_BYTES: Final = {"cpu": 64 << 20, "cuda": 256 << 20, "mps": 128 << 20}
"""Bytes of the measured copy, per device; chosen."""


def describe_device(device: torch.device, speeds: Speeds) -> DeviceReport:
    """Return a report with the given speeds; everything else is determined now."""
    return DeviceReport(
        backend="torch",
        backend_version=str(torch.__version__),  # a str subclass that msgspec refuses
        device=device.type,
        device_name=device_name(device),
        **speeds.figures(),
        memory_bytes=memory_bytes(device),
        threads=torch.get_num_threads(),
        fingerprint=fingerprint(device),
        savings=("recompute", "offload", *(("offload_weights",) if device.type in EMPTIED else ())),
    )


def measure_speeds(device: torch.device, scratch: Path | None = None) -> Speeds:
    """Measure speeds with the threads this process may use now. Takes about a second. `scratch`: directory for large
    temporary files."""
    size = MATRIX_SIZE[device.type]
    left = torch.ones(size, size, device=device)
    result = torch.empty_like(left)
    flops_per_s = 2.0 * size**3 * calls_per_s(lambda: torch.mm(left, left, out=result), device)
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    # A copy reads and writes every byte.
    bandwidth_bytes_per_s = 2.0 * source.nbytes * calls_per_s(lambda: target.copy_(source), device)
    return Speeds(
        flops_per_s,
        bandwidth_bytes_per_s,
        scratch_bytes_per_s(scratch),
        serving=measured_serving(device, calls_per_s),
        attention_flops_per_s=measured_attention(device, calls_per_s),
    )


def device_name(device: torch.device) -> str:
    """Return the device's product name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def memory_bytes(device: torch.device) -> int:
    """Return the device's total memory, free or not."""
    match device.type:
        case "cuda":
            return torch.cuda.mem_get_info(device)[1]
        case "mps":
            return torch.mps.recommended_max_memory()
        case _:
            return psutil.virtual_memory().total


def fingerprint(device: torch.device) -> str:
    """Return a hex SHA-256 over versions, instruction set, device, threads and the bits of a small training
    computation. The device's name is included because kernels choose their blocking by vendor and cache sizes, for more
    shapes than any probe can try."""
    described = (
        torch.__version__,
        str(torch.version.cuda),
        str(torch.backends.cudnn.version()),
        torch.backends.cpu.get_cpu_capability(),
        *arithmetic(),
        device.type,
        device_name(device),
        str(torch.get_num_threads()),
    )
    return hashed(described, (to_host(tensor).data for tensor in _probe_computation(device)))


def _probe_computation(device: torch.device) -> list[torch.Tensor]:
    """Compute matrix products of several shapes, softmax, exp, attention and their gradients, on inputs made from
    integers."""

    def pattern(*shape: int) -> torch.Tensor:
        return torch.tensor(probe_pattern(*shape), device=device, requires_grad=True)

    x, first, second = pattern(3, 67, 96), pattern(160, 96), pattern(96, 160)
    hidden = torch.nn.functional.silu(torch.nn.functional.linear(x, first))
    y = x + torch.nn.functional.linear(hidden, second)
    heads = torch.nn.functional.rms_norm(y, (96,)).reshape(3, 67, 4, 24).transpose(1, 2)
    attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    logits = attended.transpose(1, 2).reshape(201, 96) @ second
    loss = torch.logsumexp(logits, dim=-1).mean() + torch.softmax(logits, dim=-1).exp().square().sum()
    loss.backward()
    gradients = [leaf.grad for leaf in (x, first, second) if leaf.grad is not None]
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    return [logits, loss, *gradients, *norms]


def calls_per_s(call: Callable[[], object], device: torch.device, measure_s: float = MEASURE_S) -> float:
    """Return how many calls per second run one after the other, each completed before the next starts."""
    call()
    _synchronise(device)
    # A single thread is timed by its processor time: otherwise peers that start together on one machine would measure
    # how they disturb each other.
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    calls = 0
    start_s, deadline_s = clock(), time.perf_counter() + LONGEST_MEASURE_S
    while True:
        call()
        _synchronise(device)
        calls += 1
        elapsed_s = clock() - start_s
        if elapsed_s >= measure_s or (elapsed_s > 0 and time.perf_counter() >= deadline_s):
            return calls / elapsed_s


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


SERVING_MEASURE_S: Final = 0.02
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


def measured_serving(device: torch.device, calls_per_s: _CallsPerS) -> tuple[ServingSpeed, ...]:
    """Return the measured speeds, one per weight format, in the formats' order."""
    side = _SIDE[device.type]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((side, side), generator=generator).to(device)
    rows = torch.randn((PROMPT_ROWS, side), generator=generator).to(device)
    one = rows[:1].clone()
    in_blocks = device.type == "cpu" and kernels() is not None
    found: list[ServingSpeed] = []
    with torch.inference_mode():
        for form in get_args(WeightFormat):
            packed = pack(weight, None, form, "the probe's weight", in_blocks=in_blocks)
            flops = 2.0 * PROMPT_ROWS * weight.numel()
            flops_per_s = flops * calls_per_s(lambda packed=packed: packed(rows), device, SERVING_MEASURE_S)
            long = _repeated(packed)
            bytes_per_s = long.nbytes * calls_per_s(lambda long=long: long(one), device, SERVING_MEASURE_S)
            found.append(ServingSpeed(form=form, flops_per_s=flops_per_s, bytes_per_s=bytes_per_s))
    return tuple(found)


def measured_attention(device: torch.device, calls_per_s: _CallsPerS) -> float:
    """Return attention's operations per second, counting two products for each query and visible key."""
    shared, positions = ATTENDED[device.type]
    start = positions - PROMPT_ROWS
    pages = positions // _PAGE_TOKENS
    options = ServeOptions(page_tokens=_PAGE_TOKENS, pages=pages, sessions=1, pass_tokens=PROMPT_ROWS)
    cache = LayerCache(LayerShape(0, GROUPS * shared, shared, HEAD_WIDTH, HEAD_WIDTH, None), options, device)
    span = RowSpan(0, 0, start, PROMPT_ROWS, tuple(range(pages)), -1)
    layout = lay_out((span,), options, paged=True, windows={}, device=device)
    generator = torch.Generator().manual_seed(0)
    shape = (1, GROUPS * shared, PROMPT_ROWS, HEAD_WIDTH)
    q = torch.randn(shape, generator=generator).to(device)
    k, v = q[:, :shared].clone(), q[:, -shared:].clone()

    def attend() -> torch.Tensor:
        return cached_attention(layout, cache, q, k, v, Scores(HEAD_WIDTH**-0.5))

    seen = PROMPT_ROWS * (start + (PROMPT_ROWS + 1) / 2)
    with torch.inference_mode():
        return 4.0 * HEAD_WIDTH * GROUPS * shared * seen * calls_per_s(attend, device, SERVING_MEASURE_S)


def _repeated(packed: PackedLinear) -> PackedLinear:
    """Return the product with its columns repeated until caches can't hold them."""
    blocks = packed.blocks
    if blocks is None:
        return packed
    times = max(1, READ_BYTES // packed.nbytes)
    data = blocks.data.repeat(times, *[1] * (blocks.data.dim() - 1))
    long = replace(blocks, columns=blocks.columns * times, data=data)
    return replace(packed, product=blocked_product(long), nbytes=data.nbytes, blocks=long)
