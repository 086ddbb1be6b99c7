"""The JAX backend: CPU and CUDA. Sets device, threads and numerics for the whole process.

Integers have 64 bits as everywhere else in a job, and float32 products keep float32 precision, on GPUs too. Neighbours:
`program` is a loaded stage, `operators` lists what can run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from fusionai.backends.interface import DeviceReport, Speeds
from fusionai.backends.jax.dtypes import Device
from fusionai.backends.jax.operators import CONTEXTUAL, PLAIN
from fusionai.backends.jax.program import JaxStageProgram
from fusionai.backends.jax.serving import KEPT_AS, JaxServingProgram
from fusionai.backends.measurement import (
    arithmetic,
    calls_per_s,
    hashed,
    probe_pattern,
    processor_name,
    require_threads,
    scratch_bytes_per_s,
    with_pace,
)
from fusionai.backends.stage_base import FrameworkBackend
from fusionai.ir.operators import OPERATORS
from fusionai.primitives.environment import limit_xla_threads
from fusionai.primitives.errors import UsageError

_KINDS = {"cpu": "cpu", "cuda": "gpu"}
"""Device name in FusionAI -> device name in JAX."""


class JaxBackend(FrameworkBackend):
    """Implements `backends.interface.Backend`. `threads` limits this process's threads; it has an effect only before
    JAX is first used."""

    name = "jax"
    _works_on_cpu = "threads"

    def __init__(self, device: str = "auto", threads: int | None = None) -> None:
        require_threads(threads)
        self._threads = limit_xla_threads(threads)
        jax.config.update("jax_enable_x64", True)
        jax.config.update("jax_default_matmul_precision", "highest")
        self._device, kind = _choose(device)
        super().__init__(
            kind,
            PLAIN.keys() | CONTEXTUAL,
            partial(JaxStageProgram, device=self._device),
            partial(JaxServingProgram, device=self._device),
        )

    def probe(self, speeds: Speeds | None = None) -> DeviceReport:
        """Take about a second and some compilations; less with `speeds`."""
        known = speeds or with_pace(
            measure_speeds(self._device, self.device), self, lambda call: 1 / _calls_per_s(call)
        )
        return describe_device(self._device, self.device, self._threads, known, self.unsupported(OPERATORS))

    def warm_up(self) -> None:
        """Compile a trivial function: the compiler starts with the first compilation."""
        jax.jit(lambda x: x * x)(jax.device_put(np.zeros(1, np.float32), self._device)).block_until_ready()

    def clip_scale(self, norms: Sequence[float], max_norm: float) -> tuple[float, float]:
        """Return (total norm, scale) in float32, as torch computes them; the last bit may differ."""
        if not norms:
            return 0.0, 1.0
        total = np.sqrt(np.sum(np.square(np.asarray(norms, np.float32)), dtype=np.float32))
        scale = np.minimum(np.float32(max_norm) / (total + np.float32(1e-6)), np.float32(1.0))
        return float(total), float(scale)


def _choose(device: str) -> tuple[Device, str]:
    if device not in ("auto", *_KINDS):
        raise UsageError(f"expected a device auto, cpu or cuda for backend jax, got {device!r}.")
    for kind in ("cuda", "cpu") if device == "auto" else (device,):
        try:
            return jax.devices(_KINDS[kind])[0], kind
        except RuntimeError:
            continue
    raise UsageError(f"JAX sees no {device} device here.", hint="Install it with CUDA: pip install 'jax[cuda12]'.")


MATRIX_SIZE: Final = {"cpu": 512, "cuda": 4096}
"""Rows and columns of the measured matrix product, per device; chosen."""
COPY_BYTES: Final = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Bytes of the measured copy, per device; chosen."""


def describe_device(
    device: Device, kind: str, threads: int, speeds: Speeds, unsupported: tuple[str, ...]
) -> DeviceReport:
    """Return a report with the given speeds; everything else is determined now. `kind`: FusionAI's name of the
    device."""
    return DeviceReport(
        backend="jax",
        backend_version=jax.__version__,
        device=kind,
        device_name=device_name(device, kind),
        **speeds.figures(),
        memory_bytes=memory_bytes(device, kind),
        threads=threads,
        fingerprint=fingerprint(device, kind, threads),
        unsupported_ops=unsupported,
        weight_formats=tuple(KEPT_AS),
        savings=("recompute",),
    )


def measure_speeds(device: Device, kind: str) -> Speeds:
    """Measure speeds with the threads this process may use now."""
    size = MATRIX_SIZE[kind]
    left = jax.device_put(jnp.ones((size, size), jnp.float32), device)
    multiply = jax.jit(jnp.matmul)
    flops_per_s = 2.0 * size**3 * _calls_per_s(lambda: multiply(left, left))
    source = jax.device_put(jnp.zeros(COPY_BYTES[kind] // 4, jnp.float32), device)
    copy = jax.jit(lambda x: x + 1)
    # A copy reads and writes every byte.
    return Speeds(flops_per_s, 2.0 * source.nbytes * _calls_per_s(lambda: copy(source)), scratch_bytes_per_s())


def device_name(device: Device, kind: str) -> str:
    """Return the device's product name."""
    return processor_name() if kind == "cpu" else str(device.device_kind)


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
    given = (jax.device_put(probe_pattern(*shape), device) for shape in ((3, 67, 96), (160, 96), (96, 160)))
    return hashed(described, (np.asarray(value).tobytes() for value in jax.jit(_probe_computation)(*given)))


def _probe_computation(x: jax.Array, first: jax.Array, second: jax.Array) -> list[jax.Array]:
    def loss_of(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        y = x + jax.nn.silu(x @ first.T) @ second.T
        logits = (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).reshape(201, 96) @ second
        return jnp.mean(jax.nn.logsumexp(logits, -1)) + jnp.sum(jnp.square(jnp.exp(jax.nn.softmax(logits, -1))))

    loss, gradients = jax.value_and_grad(loss_of, (0, 1, 2))(x, first, second)
    return [loss, *gradients]


def _calls_per_s(call: Callable[[], object]) -> float:
    return calls_per_s(lambda: jax.block_until_ready(call()))
