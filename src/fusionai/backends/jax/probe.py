"""Measures a device with JAX, and computes the fingerprint by which two peers know that they compute the same bits.

This backend's fingerprints never equal another backend's: a stage that moves between frameworks is compared with a
tolerance. Neighbours: `backend.JaxBackend.probe` calls this.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from fusionai.backends.arithmetic import arithmetic
from fusionai.backends.interface import DeviceReport, Speeds
from fusionai.backends.jax.promotion import Device
from fusionai.backends.scratch import scratch_bytes_per_s

MEASURE_S: Final = 0.2
"""Time for each measurement, in seconds; chosen."""
MATRIX_SIZE: Final = {"cpu": 512, "cuda": 4096}
"""Rows and columns of the measured matrix product, per device; chosen."""
COPY_BYTES: Final = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Bytes of the measured copy, per device; chosen."""


def describe_device(device: Device, kind: str, threads: int, speeds: Speeds) -> DeviceReport:
    """Return a report with the given speeds; everything else is determined now. `kind`: FusionAI's name of the
    device."""
    return DeviceReport(
        backend="jax",
        backend_version=jax.__version__,
        device=kind,
        device_name=device_name(device, kind),
        flops_per_s=speeds.flops_per_s,
        memory_bandwidth_bytes_per_s=speeds.memory_bandwidth_bytes_per_s,
        memory_bytes=memory_bytes(device, kind),
        threads=threads,
        fingerprint=fingerprint(device, kind, threads),
        scratch_bytes_per_s=speeds.scratch_bytes_per_s,
        savings=("recompute",),
        pace=speeds.pace,
    )


def measure_speeds(device: Device, kind: str) -> Speeds:
    """Measure speeds with the threads this process may use now."""
    size = MATRIX_SIZE[kind]
    left = jax.device_put(jnp.ones((size, size), jnp.float32), device)
    multiply = jax.jit(jnp.matmul)
    flops_per_s = 2.0 * size**3 * calls_per_s(lambda: multiply(left, left))
    source = jax.device_put(jnp.zeros(COPY_BYTES[kind] // 4, jnp.float32), device)
    copy = jax.jit(lambda x: x + 1)
    # A copy reads and writes every byte.
    return Speeds(flops_per_s, 2.0 * source.nbytes * calls_per_s(lambda: copy(source)), scratch_bytes_per_s())


def device_name(device: Device, kind: str) -> str:
    """Return the device's product name."""
    if kind != "cpu":
        return str(device.device_kind)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def memory_bytes(device: Device, kind: str) -> int:
    """Return the device's total memory, free or not."""
    if kind == "cpu":
        return psutil.virtual_memory().total
    stats: dict[str, Any] = device.memory_stats() or {}
    return int(stats.get("bytes_limit", 0))


def fingerprint(device: Device, kind: str, threads: int) -> str:
    """Return a hex SHA-256 over versions, instruction set, device, threads and the bits of a small training
    computation."""
    described = ("jax", jax.__version__, *arithmetic(), kind, device_name(device, kind), str(threads))
    digest = hashlib.sha256("\n".join(described).encode())
    for value in jax.jit(_probe_computation)(*(jax.device_put(one, device) for one in _patterns())):
        digest.update(np.asarray(value).tobytes())
    return digest.hexdigest()


def _patterns() -> list[np.ndarray[Any, Any]]:
    """Return inputs that are exact in float32 on every device: multiples of 2**-10 below 1."""
    shapes = ((3, 67, 96), (160, 96), (96, 160))
    return [
        ((np.arange(np.prod(shape), dtype=np.int64) * 2_654_435_761 % 2_039 - 1_019) / 1_024)
        .astype(np.float32)
        .reshape(shape)
        for shape in shapes
    ]


def _probe_computation(x: jax.Array, first: jax.Array, second: jax.Array) -> list[jax.Array]:
    def loss_of(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        y = x + jax.nn.silu(x @ first.T) @ second.T
        logits = (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).reshape(201, 96) @ second
        return jnp.mean(jax.nn.logsumexp(logits, -1)) + jnp.sum(jnp.square(jnp.exp(jax.nn.softmax(logits, -1))))

    loss, gradients = jax.value_and_grad(loss_of, (0, 1, 2))(x, first, second)
    return [loss, *gradients]


def calls_per_s(call: Callable[[], object]) -> float:
    """Return how many calls per second run one after the other, each completed before the next starts."""
    jax.block_until_ready(call())
    calls, start_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - start_s) < MEASURE_S or not calls:
        jax.block_until_ready(call())
        calls += 1
    return calls / elapsed_s
