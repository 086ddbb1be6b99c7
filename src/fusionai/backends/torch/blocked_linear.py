"""Matrix products over blocked matrices, and how compiled kernels are loaded and shared among threads.

A kernel's columns or heads are divided among threads. A sum does not depend on the thread that computes it, so any
number of threads gives the same bits. If numba is missing or does not know the processor, `packed_linear` uses the
framework's kernels.

Peers on one machine start together, and each would otherwise compile the same code for fifteen seconds of processor
time.
So one process compiles while the others wait, and then read the code from numba's disk cache. Neighbours:
`row_products` multiplies, `row_blocks` lays matrices out, `packed_linear` rounds them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from ctypes import CFUNCTYPE, c_int64
from functools import cache
from importlib import import_module
from typing import Any, Final

import platformdirs
import torch
from filelock import FileLock, Timeout
from torch import Tensor
from torch.nn.functional import pad

from fusionai.backends.torch.row_blocks import WIDTH, Blocks
from fusionai.backends.torch.row_code import Factor
from fusionai.scheduling.kernels.compiled import available

log = logging.getLogger(__name__)

LONGEST_S: Final = 60.0
"""Longest wait for the lock, in seconds; chosen. Afterwards this process compiles too, because the lock's holder may
hang."""


@cache
def kernel_module(module: str, what: str) -> Any | None:
    """Import a module that compiles kernels; None if numba is missing or fails, and then operators compute `what`."""
    if not available():
        return None
    try:
        with compiled_once(what):
            return import_module(module)
    except Exception as error:  # noqa: BLE001 - a compiler fails in many ways, and operators serve instead
        log.warning("compiled %s: unavailable, using slower operators: %s: %s", what, type(error).__name__, error)
        return None


@contextmanager
def compiled_once(name: str) -> Iterator[None]:
    """Hold the machine-wide lock `name`, which names the code and all that it depends on. Continue without waiting if
    the lock can't be had."""
    lock = None
    try:
        lock = FileLock(platformdirs.user_cache_path("fusionai", ensure_exists=True) / f"{name}.lock")
        lock.acquire(timeout=LONGEST_S)
    except (OSError, NotImplementedError, Timeout) as problem:
        log.info("compiling %s without waiting for other processes: %s", name, problem)
        lock = None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


_SHARED_WORK: Final = 2**20
"""Multiplications from which a product is worth waking several threads; chosen."""
_FEW, _MANY = (CFUNCTYPE(None, *[c_int64] * count) for count in (8, 9))
"""C function types: Python's global lock is released while these functions run."""


def kernels() -> Any | None:
    """Return the module of compiled products; None if the framework's products are used."""
    return kernel_module("fusionai.backends.torch.row_products", "products")


def scratch_bytes() -> int:
    """Return the scratch bytes that products need besides operands and results, for all threads together."""
    known = kernels()
    return 0 if known is None else known.scratch_bytes() * torch.get_num_threads()


def blocked_product(blocks: Blocks) -> Callable[[Tensor], Tensor]:
    """Return a function [rows, in] -> float32 [rows, out]. A row's bits never depend on other rows, so no trial run is
    needed."""
    known = kernels()
    assert known is not None
    kind = known.factor_of(blocks)
    compiled = known.products(kind)
    multiply, multiply_many = _FEW(compiled.few), _MANY(compiled.many)
    count, columns, many = blocks.count, blocks.columns, blocks.data.shape[0]
    padded = WIDTH * many

    def product(x: Tensor) -> Tensor:
        x = pad(x.to(torch.bfloat16), (0, count % 2)) if kind is Factor.HALVES else x.to(torch.float32)
        x = x.contiguous()
        rows, step = x.shape[0], x.shape[1] * x.element_size()
        few = rows <= known.FEW_ROWS
        y = (torch.empty if few else torch.zeros)((rows, padded), dtype=torch.float32)

        def share(first: int, end: int) -> None:
            """Compute blocks `first` to `end`."""
            given = (
                blocks.data.data_ptr() + first * blocks.block_bytes, x.data_ptr(), step,
                y.data_ptr() + 4 * WIDTH * first, 4 * padded, rows, WIDTH * (end - first), count,
            )  # fmt: skip
            if few:
                multiply(*given)
            else:
                scratch = torch.empty(known.scratch_bytes(), dtype=torch.uint8)
                multiply_many(*given, scratch.data_ptr())

        if rows * padded * count < _SHARED_WORK:
            share(0, many)
        else:
            in_threads(share, many)
        return y[:, :columns]

    return product


def in_threads(share: Callable[[int, int], None], count: int) -> None:
    """Call `share(first, end)` over `count` parts on torch's number of threads; each thread takes a contiguous
    range."""
    threads = min(torch.get_num_threads(), count)
    ends = [count * number // threads for number in range(threads + 1)]
    others = [_threads(threads - 1).submit(share, ends[n], ends[n + 1]) for n in range(1, threads)]
    share(ends[0], ends[1])
    wait(others)
    for other in others:
        other.result()


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="products")
