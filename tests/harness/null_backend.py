"""A backend that computes nothing: right shapes, zero values. Tests of pools run stages on it in no time and with no
framework; the conformance suite of backends runs on it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fusionai.backends.binding import bind_symbols, largest
from fusionai.backends.interface import (
    NOTHING_BEGUN,
    Call,
    DeviceReport,
    Speeds,
    StageProgram,
    WorksIn,
    check_gradient,
    key_of,
)
from fusionai.backends.state import StateEntry, check_entry
from fusionai.ir.cost import block_costs
from fusionai.ir.graph import needed_nodes, reads
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Graph
from fusionai.ir.shapes import evaluate
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor, tensor_bytes
from fusionai.wire.messages import StageOptions


@dataclass(frozen=True, slots=True)
class NullBackend:
    """Implements `backends.interface.Backend` for a machine of made-up speeds."""

    name: str = "null"
    device: str = "none"

    @property
    def works_in(self) -> WorksIn:
        return "caller"

    def probe(self, speeds: Speeds | None = None) -> DeviceReport:
        """`speeds`, or made-up ones; nothing is measured."""
        known = speeds or Speeds(1e11, 2e10)
        return DeviceReport(
            backend=self.name,
            backend_version="1",
            device=self.device,
            device_name="no device",
            flops_per_s=known.flops_per_s,
            memory_bandwidth_bytes_per_s=known.memory_bandwidth_bytes_per_s,
            memory_bytes=16_000_000_000,
            free_bytes=16_000_000_000,
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
        return NullStageProgram(graph, grad_inputs=grad_inputs, options=options, memory_limit_bytes=memory_limit_bytes)

    def clip_scale(self, norms: Sequence[float], max_norm: float) -> tuple[float, float]:
        """As `clip_grad_norm_` in float32, without its exact bits."""
        total = np.sqrt(np.sum(np.square(np.asarray(norms, dtype=np.float32)), dtype=np.float32), dtype=np.float32)
        return float(total), float(min(np.float32(1.0), np.float32(max_norm) / (total + np.float32(1e-6))))


class NullStageProgram(StageProgram):
    """Implements `backends.interface.StageProgram` without arithmetic. Every value is zero, every norm 1.0. Holds
    imported state, no zeros."""

    def __init__(
        self,
        graph: Graph,
        *,
        grad_inputs: Sequence[str],
        options: StageOptions,
        memory_limit_bytes: int | None,
    ) -> None:
        super().__init__(graph, grad_inputs=grad_inputs, options=options)
        self._imported: dict[str, HostTensor] = {}
        self._summed: set[str] = set()
        self._needed: dict[frozenset[str], frozenset[str]] = {}
        self._check_memory(memory_limit_bytes)

    def initialise(self) -> tuple[str, ...]:
        self._require_idle("initialise")
        self._summed.clear()
        self._imported.clear()
        self._unset = {key for key, spec in self._specs.items() if spec.init is None}
        return tuple(f"model/{key}" for key in sorted(self._unset))

    def _put(self, entry: StateEntry, value: HostTensor) -> None:
        self._imported[entry.name] = host_tensor(value.dtype, value.shape, bytes(value.data))

    def _copy(self, entry: StateEntry) -> HostTensor:
        return self._imported.get(entry.name) or _zeros(entry.dtype, entry.shape)

    def forward(
        self, call: Call, inputs: Mapping[str, HostTensor], wanted: Sequence[str] | None = None
    ) -> dict[str, HostTensor]:
        names = self._begin(call, wanted)
        half_floats = self._options.precision == "bf16"
        symbols = bind_symbols(self._graph, inputs, self._needed_inputs(names), half_floats=half_floats)
        if call.mode == "train":
            self._contexts[key_of(call)] = symbols
        return {name: self._value(value, symbols) for name, value in self._graph.outputs.items() if name in names}

    def backward(
        self, call: Call, gradients: Mapping[str, HostTensor], begun: Mapping[str, HostTensor] = NOTHING_BEGUN
    ) -> dict[str, HostTensor]:
        symbols = self._take(call, gradients, begun)
        for name, gradient in gradients.items():
            expected = self._value(self._graph.outputs[name], symbols)
            check_gradient(name, gradient, expected.shape, expected.dtype)
        for name, gradient in begun.items():
            expected = self._value(name, symbols)
            check_gradient(name, gradient, expected.shape, expected.dtype)
        if not gradients and not begun:
            return {}
        self._summed.update(key for value, key in self._trained_values.items() if value not in self._grad_inputs)
        return {name: self._value(name, symbols) for name in sorted(self._grad_inputs)}

    def weight_gradients(self, call: Call) -> None:
        """Nothing is left undone here."""

    def gradient_norms(self) -> dict[str, float]:
        return dict.fromkeys(sorted(self._summed), 1.0)

    def export_gradients(self, keys: Sequence[str]) -> list[tuple[str, HostTensor]]:
        for key in keys:
            self._require_trainable(key)
        entries = [(key, self._entries[f"model/{key}"]) for key in keys if key in self._summed]
        return [(key, _zeros(entry.dtype, entry.shape)) for key, entry in entries]

    def import_gradients(self, entries: Iterable[tuple[str, HostTensor]], *, add: bool) -> None:
        del add  # Zeros replaced by or added to zeros.
        for key, tensor in entries:
            self._require_trainable(key)
            check_entry(self._entries, f"model/{key}", tensor)
            self._summed.add(key)

    def apply(self, *, scale: float, learning_rate: float) -> None:
        del scale, learning_rate  # Nothing is scaled and nothing is learnt.
        self._require_idle("apply")
        self._require_optimizer()
        self._summed.clear()

    def discard(self) -> None:
        self._contexts.clear()
        self._summed.clear()

    @property
    def resident_bytes(self) -> int:
        """What a real backend would hold."""
        gradients = sum(self._entries[f"model/{key}"].nbytes for key in self._summed)
        return gradients + sum(entry.nbytes for entry in self._entries.values())

    def _check_memory(self, limit_bytes: int | None) -> None:
        training = self._options.optimizer is not None
        symbols = largest(self._graph)
        needed_bytes = self._state_bytes()
        self._require_room(needed_bytes, limit_bytes)
        records = block_costs(self._graph, symbols, training=training)
        needed_bytes += max((record.workspace_bytes for record in records), default=0)
        kept_bytes = sum(record.activation_bytes for record in records)
        if self._options.recompute:
            needed_bytes += max((record.activation_bytes for record in records), default=0)
            kept_bytes = sum(record.output_bytes for record in records)
        needed_bytes += kept_bytes * max(1, self._options.in_flight)
        needed_bytes += max((self._value_bytes(name, symbols) for name in self._graph.values), default=0)
        if limit_bytes is not None and needed_bytes > limit_bytes:
            raise ExecutionError(
                f"the stage needs {needed_bytes} bytes, the limit is {limit_bytes}.",
                hint="Use smaller microbatches, give this peer fewer blocks or lend more memory.",
            )

    def _needed_inputs(self, names: frozenset[str]) -> frozenset[str]:
        needed = self._needed.get(names)
        if needed is None:
            values = [self._graph.outputs[name] for name in names]
            read = {value for node in needed_nodes(self._graph, values) for value in reads(node)}
            needed = self._needed[names] = frozenset(read.intersection(self._graph.inputs))
        return needed

    def _value(self, name: str, symbols: Mapping[str, int]) -> HostTensor:
        spec = self._graph.values[name]
        if spec.dtype == "symint":
            return _zeros("int64", ())
        return _zeros(spec.dtype, tuple(evaluate(dim, symbols) for dim in spec.shape))

    def _value_bytes(self, name: str, symbols: Mapping[str, int]) -> int:
        spec = self._graph.values[name]
        if spec.dtype == "symint":
            return 0
        return tensor_bytes(spec.dtype, tuple(evaluate(dim, symbols) for dim in spec.shape))


def _zeros(dtype: str, shape: tuple[int, ...]) -> HostTensor:
    return host_tensor(dtype, shape, bytearray(tensor_bytes(dtype, shape)))
