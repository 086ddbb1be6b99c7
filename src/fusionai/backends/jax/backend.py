"""The JAX backend: CPU and CUDA, training and serving. Sets device, threads and numerics for the whole process.

Integers have 64 bits as everywhere else in a job, and float32 products keep float32 precision, on GPUs too. A serving
stage keeps weights in the job's format and compiles each part for each number of rows. Neighbours: `program` is a
loaded training stage, `serving.parted` cuts a serving stage's graph and has caches and attention, `tracing` runs nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from fusionai.backends import measurement
from fusionai.backends.binding import with_rows
from fusionai.backends.interface import Backend, DeviceReport, Speeds
from fusionai.backends.jax.dtypes import DTYPES, Device, is_floating, to_jax
from fusionai.backends.jax.program import JaxStageProgram
from fusionai.backends.jax.tracing import CONTEXTUAL, PLAIN, JaxContext, Value, abstract, footprint_bytes, program_of
from fusionai.backends.serving.base import largest_pass
from fusionai.backends.serving.parted import Array, Compute, PartedServing, ProgramPart
from fusionai.backends.state import ProgramSize
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Graph, ParamSpec
from fusionai.ir.serving import BATCH
from fusionai.primitives.environment import limit_xla_threads
from fusionai.primitives.errors import ExecutionError, UsageError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.serving import ServeOptions, WeightFormat

KEPT_AS: Final[dict[WeightFormat, Any]] = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
"""Supported weight formats -> JAX dtypes."""
_CONTEXT: Final = JaxContext(training=False, keys={})


class JaxServingProgram(PartedServing):
    """A serving stage whose parts JAX compiles."""

    def __init__(self, graph: Graph, *, options: ServeOptions, device: Device, memory_limit_bytes: int | None) -> None:
        super().__init__(graph, options)
        if options.weights not in KEPT_AS:
            raise ExecutionError(
                f"this backend keeps weights as {', '.join(KEPT_AS)}, not as {options.weights}.",
                hint="Use one of those formats, or let machines with backend torch serve the model.",
            )
        self._device = device
        self._whole = program_of(graph, graph.outputs, with_state_writes=False, mixed=False, recompute=False)
        self._check_memory(memory_limit_bytes)
        self._tensors: dict[str, jax.Array] = {}
        """Weights by key, in the format they are kept in."""
        self._sizes: dict[int, dict[str, int]] = {}

    def _import_weight(self, spec: ParamSpec, tensor: HostTensor) -> None:
        self._tensors[spec.key] = self._kept(spec.key, to_jax(tensor, self._device).astype(DTYPES[spec.dtype]))

    @property
    def resident_bytes(self) -> int:
        return self._cache_bytes + sum(tensor.nbytes for tensor in self._tensors.values())

    def _weight(self, key: str) -> Array:
        return np.asarray(self._tensors[key])

    def _compiled(self, part: ProgramPart, rows: int) -> Compute:
        sizes = self._sizes_at(rows)
        dtypes = {name: DTYPES[self._graph.params[name].dtype] for name in part.params}
        params = {name: self._tensors[self._graph.params[name].key] for name in part.params}

        @jax.jit
        def compute(params: dict[str, jax.Array], given: dict[str, Array]) -> dict[str, jax.Array]:
            widened = {name: value.astype(dtypes[name]) for name, value in params.items()}
            values: dict[str, Value] = {
                **sizes,
                **{name: jnp.asarray(value) for name, value in given.items()},
                **widened,
            }
            self._whole.advance(_CONTEXT, part.nodes, values)
            return {name: jnp.asarray(values[name]) for name in part.makes}

        def run(given: Mapping[str, Array]) -> dict[str, Array]:
            placed = {name: jax.device_put(value, self._device) for name, value in given.items()}
            return {name: np.asarray(value) for name, value in compute(params, placed).items()}

        return run

    def _sizes_at(self, rows: int) -> dict[str, int]:
        """Return every size that the graph computes for this number of rows."""
        if rows not in self._sizes:
            given = abstract(
                self._graph, (*self._whole.inputs, *self._whole.params), {**with_rows(self._graph, rows), BATCH: 1}
            )
            found: dict[str, int] = {}

            def run(values: dict[str, jax.Array]) -> None:
                known: dict[str, Value] = dict(values)
                self._whole.advance(_CONTEXT, self._whole.nodes, known)
                found.update({name: value for name, value in known.items() if isinstance(value, int)})

            jax.eval_shape(run, given)
            self._sizes[rows] = found
        return self._sizes[rows]

    def _kept(self, key: str, value: jax.Array) -> jax.Array:
        """Return a weight in the format it is kept in: matrices in the job's format, everything else in the graph's
        dtype."""
        narrow = KEPT_AS[self._options.weights]
        if value.ndim < 2 or not is_floating(value.dtype) or narrow == jnp.float32:
            return value
        kept = value.astype(narrow)
        if not bool(jnp.isfinite(kept).all()) and bool(jnp.isfinite(value).all()):
            most = float(jnp.abs(value).max())
            raise ExecutionError(f"{key} holds {most:g}, out of range for {self._options.weights}.")
        return kept

    def _check_memory(self, limit_bytes: int | None) -> None:
        """Check the limit: weights as kept, caches, and inputs and outputs of the largest pass."""
        width = jnp.dtype(KEPT_AS[self._options.weights]).itemsize
        weights_bytes = 0
        for spec in self._specs.values():
            dtype = jnp.dtype(DTYPES[spec.dtype])
            narrow = len(spec.shape) > 1 and is_floating(dtype)
            weights_bytes += int(np.prod(spec.shape)) * (min(width, dtype.itemsize) if narrow else dtype.itemsize)
        cache_bytes = self._planned_bytes
        self.size = ProgramSize(weights_bytes, cache_bytes)
        if limit_bytes is not None and weights_bytes + cache_bytes > limit_bytes:
            raise ExecutionError(
                f"the stage takes {weights_bytes} bytes of weights as {self._options.weights} and {cache_bytes} of "
                f"caches; the limit is {limit_bytes}.",
                hint="Use fewer pages or sessions, a smaller weight format or fewer blocks here, or lend more memory.",
            )
        symbols = largest_pass(self._graph, self._options)
        pass_bytes = footprint_bytes(self._graph, self._whole, symbols, (), training=False)
        if limit_bytes is not None and weights_bytes + cache_bytes + pass_bytes > limit_bytes:
            raise ExecutionError(
                f"the stage needs {weights_bytes + cache_bytes + pass_bytes} bytes with the largest pass, the limit is "
                f"{limit_bytes}.",
                hint="Make passes smaller, give this peer fewer blocks or lend more memory.",
            )


_KINDS = {"cpu": "cpu", "cuda": "gpu"}
"""Device name in FusionAI -> device name in JAX."""


class JaxBackend(Backend):
    """JAX on one device. `threads` limits this process's threads; it has an effect only before
    JAX is first used."""

    name = "jax"
    _works_on_cpu = "threads"

    def __init__(self, device: str = "auto", threads: int | None = None) -> None:
        measurement.require_threads(threads)
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

    @property
    def devices(self) -> tuple[str, ...]:
        if self.device == "cpu":
            return ("cpu",)
        return tuple(f"{self.device}:{place}" for place in range(len(jax.devices(_KINDS[self.device]))))

    def probe(self, speeds: Speeds | None = None) -> DeviceReport:
        """Take about a second and some compilations; less with `speeds`."""
        known = speeds or measurement.with_pace(
            measure_speeds(self._device, self.device), self, lambda call: 1 / _calls_per_s(call)
        )
        on_cpu = self.device == "cpu"
        device_name = measurement.processor_name() if on_cpu else str(self._device.device_kind)
        stats: dict[str, Any] = {} if on_cpu else self._device.memory_stats() or {}
        described = ("jax", jax.__version__, *measurement.arithmetic(), self.device, device_name, str(self._threads))
        given = (
            jax.device_put(measurement.probe_pattern(*shape), self._device)
            for shape in ((3, 67, 96), (160, 96), (96, 160))
        )
        probed = jax.jit(_probe_computation)(*given)
        total_bytes = psutil.virtual_memory().total if on_cpu else int(stats.get("bytes_limit", 0))
        return DeviceReport(
            backend=self.name,
            backend_version=jax.__version__,
            device=self.device,
            device_name=device_name,
            **known.figures(),
            memory_bytes=total_bytes,
            free_bytes=psutil.virtual_memory().available if on_cpu else total_bytes - int(stats.get("bytes_in_use", 0)),
            threads=self._threads,
            # XLA's kernels on cards add in no fixed order: nothing is promised there.
            fingerprint=measurement.hashed(described, (np.asarray(value).tobytes() for value in probed))
            if on_cpu
            else "",
            unsupported_ops=self.unsupported(OPERATORS),
            weight_formats=tuple(KEPT_AS),
            savings=("recompute",),
        )

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
    asked, place = measurement.card_of(device, "jax", tuple(_KINDS))
    for kind in ("cuda", "cpu") if asked == "auto" else (asked,):
        try:
            return jax.devices(_KINDS[kind])[place or 0], kind
        except (RuntimeError, IndexError):
            continue
    raise UsageError(f"JAX sees no {device} device here.", hint="Install it with CUDA: pip install 'jax[cuda12]'.")


def measure_speeds(device: Device, kind: str) -> Speeds:
    """Measure speeds with the threads this process may use now."""
    size = measurement.MATRIX_SIZE[kind]
    left = jax.device_put(jnp.ones((size, size), jnp.float32), device)
    multiply = jax.jit(jnp.matmul)
    flops_per_s = 2.0 * size**3 * _calls_per_s(lambda: multiply(left, left))
    source = jax.device_put(jnp.zeros(measurement.COPY_BYTES[kind] // 4, jnp.float32), device)
    copy = jax.jit(lambda x: x + 1)
    # A copy reads and writes every byte.
    return Speeds(
        flops_per_s, 2.0 * source.nbytes * _calls_per_s(lambda: copy(source)), measurement.scratch_bytes_per_s()
    )


def _probe_computation(x: jax.Array, first: jax.Array, second: jax.Array) -> list[jax.Array]:
    def loss_of(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        y = x + jax.nn.silu(x @ first.T) @ second.T
        logits = (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).reshape(201, 96) @ second
        return jnp.mean(jax.nn.logsumexp(logits, -1)) + jnp.sum(jnp.square(jnp.exp(jax.nn.softmax(logits, -1))))

    loss, gradients = jax.value_and_grad(loss_of, (0, 1, 2))(x, first, second)
    return [loss, *gradients]


def _calls_per_s(call: Callable[[], object]) -> float:
    return measurement.calls_per_s(lambda: jax.block_until_ready(call()))
