"""The JAX backend: CPU and CUDA. Sets device, threads and numerics for the whole process.

Integers have 64 bits as everywhere else in a job, and float32 products keep float32 precision, on GPUs too. Neighbours:
`program` is a loaded stage, `probe` measures the device, `operators` lists what can run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fusionai.primitives.environment import limit_xla_threads
from fusionai.primitives.errors import ExecutionError, UsageError

import jax  # isort: skip
import numpy as np  # isort: skip

from fusionai.backends.interface import DeviceReport, Speeds, WorksIn
from fusionai.backends.jax.operators import CONTEXTUAL, PLAIN
from fusionai.backends.jax.probe import calls_per_s, describe_device, measure_speeds
from fusionai.backends.jax.program import JaxStageProgram
from fusionai.backends.jax.promotion import Device
from fusionai.backends.jax.serving import KEPT_AS, JaxServingProgram
from fusionai.backends.pace import with_pace
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Graph
from fusionai.wire.messages import StageOptions
from fusionai.wire.serving import ServeOptions

_KINDS = {"cpu": "cpu", "cuda": "gpu"}
"""Device name in FusionAI -> device name in JAX."""


class JaxBackend:
    """Implements `backends.interface.Backend`. `threads` limits this process's threads; it has an effect only before
    JAX is first used."""

    name = "jax"

    def __init__(self, device: str = "auto", threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise UsageError(f"expected at least one thread, got {threads}.")
        self._threads = limit_xla_threads(threads)
        jax.config.update("jax_enable_x64", True)
        jax.config.update("jax_default_matmul_precision", "highest")
        self._device, self.device = _choose(device)

    @property
    def works_in(self) -> WorksIn:
        return "threads" if self.device == "cpu" else "device"

    def probe(self, speeds: Speeds | None = None) -> DeviceReport:
        """Take about a second and some compilations; less with `speeds`."""
        known = speeds or with_pace(measure_speeds(self._device, self.device), self, lambda call: 1 / calls_per_s(call))
        report = describe_device(self._device, self.device, self._threads, known)
        return replace(report, unsupported_ops=self.unsupported(OPERATORS), weight_formats=tuple(KEPT_AS))

    def warm_up(self) -> None:
        """Compile a trivial function: the compiler starts with the first compilation."""
        jax.jit(lambda x: x * x)(jax.device_put(np.zeros(1, np.float32), self._device)).block_until_ready()

    def unsupported(self, ops: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted({op for op in ops if op not in PLAIN and op not in CONTEXTUAL}))

    def load(
        self,
        graph: Graph,
        *,
        grad_inputs: Sequence[str],
        options: StageOptions,
        memory_limit_bytes: int | None = None,
    ) -> JaxStageProgram:
        missing = self.unsupported(node.op for node in graph.nodes)
        if missing:
            raise ExecutionError(f"this backend has no operator {', '.join(missing)}.")
        return JaxStageProgram(
            graph,
            grad_inputs=grad_inputs,
            options=options,
            device=self._device,
            memory_limit_bytes=memory_limit_bytes,
        )

    def serve(self, graph: Graph, *, options: ServeOptions, memory_limit_bytes: int | None = None) -> JaxServingProgram:
        """See `backends.serving.ServingBackend`."""
        missing = self.unsupported(node.op for node in graph.nodes)
        if missing:
            raise ExecutionError(f"this backend has no operator {', '.join(missing)}.")
        return JaxServingProgram(graph, options=options, device=self._device, memory_limit_bytes=memory_limit_bytes)

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
