"""A backend that computes nothing: right shapes, zero values, virtual durations. Decides costs from `ir.cost` alone.

The simulator and tests of pools run stages on it in no time and with no framework. It never sleeps: `last_duration_s`
says how long the last call would have taken. Neighbours: `backends.torch` is the same interface for real.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fusionai.backends.interface import DeviceReport, Speeds, WorksIn
from fusionai.backends.null.program import NullCosts, NullStageProgram
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import ExecutionError
from fusionai.wire.messages import StageOptions


@dataclass(frozen=True, slots=True)
class NullBackend:
    """Implements `backends.interface.Backend` for a machine of the speeds in `costs`."""

    costs: NullCosts = field(default_factory=NullCosts)
    name: str = "null"
    device: str = "none"

    @property
    def works_in(self) -> WorksIn:
        return "caller"

    def probe(self, speeds: Speeds | None = None) -> DeviceReport:
        """What `costs` says, or `speeds`; nothing is measured."""
        known = speeds or Speeds(self.costs.flops_per_s, self.costs.memory_bandwidth_bytes_per_s)
        return DeviceReport(
            backend=self.name,
            backend_version="1",
            device=self.device,
            device_name="no device",
            flops_per_s=known.flops_per_s,
            memory_bandwidth_bytes_per_s=known.memory_bandwidth_bytes_per_s,
            memory_bytes=self.costs.memory_bytes,
            threads=1,
            fingerprint="null",
        )

    def warm_up(self) -> None:
        """Nothing is put off."""

    def unsupported(self, ops: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted({op for op in ops if op not in OPERATORS}))

    def load(
        self,
        graph: Graph,
        *,
        grad_inputs: Sequence[str],
        options: StageOptions,
        memory_limit_bytes: int | None = None,
    ) -> NullStageProgram:
        missing = self.unsupported(node.op for node in graph.nodes)
        if missing:
            raise ExecutionError(f"this backend has no operator {', '.join(missing)}.")
        return NullStageProgram(
            graph,
            grad_inputs=grad_inputs,
            options=options,
            costs=self.costs,
            memory_limit_bytes=memory_limit_bytes,
        )

    def clip_scale(self, norms: Sequence[float], max_norm: float) -> tuple[float, float]:
        """As `clip_grad_norm_` in float32, without its exact bits."""
        total = np.sqrt(np.sum(np.square(np.asarray(norms, dtype=np.float32)), dtype=np.float32), dtype=np.float32)
        return float(total), float(min(np.float32(1.0), np.float32(max_norm) / (total + np.float32(1e-6))))
