"""A stage that computes nothing. Decides durations and counts operations; holds imported state, no zeros.

Neighbours: `backend` loads it, `ir.cost` prices its graph, `backends.binding` and `backends.state` check what comes in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusionai.backends.binding import bind_symbols, largest
from fusionai.backends.interface import NOTHING_BEGUN, Call
from fusionai.backends.stage_base import StageBase, check_gradient, key_of
from fusionai.backends.state import StateEntry, check_entry, gradient_bytes, trainable_keys
from fusionai.ir.cost import block_costs
from fusionai.ir.graph import needed_nodes, reads
from fusionai.ir.schema import Graph
from fusionai.ir.shapes import evaluate
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor, tensor_bytes
from fusionai.wire.messages import StageOptions


@dataclass(frozen=True, slots=True)
class NullCosts:
    """The machine that is pretended."""

    flops_per_s: float = 1e11
    memory_bandwidth_bytes_per_s: float = 2e10
    memory_bytes: int = 16_000_000_000


@dataclass(frozen=True, slots=True)
class _Work:
    """Operations of one microbatch at some sizes."""

    forward_flops: float
    backward_flops: float


class NullStageProgram(StageBase[dict[str, int]]):
    """Implements `backends.interface.StageProgram` without arithmetic. Every value is zero, every norm 1.0."""

    def __init__(
        self,
        graph: Graph,
        *,
        grad_inputs: Sequence[str],
        options: StageOptions,
        costs: NullCosts,
        memory_limit_bytes: int | None,
    ) -> None:
        super().__init__(graph, grad_inputs=grad_inputs, options=options)
        self._costs = costs
        self._trainable = trainable_keys(graph)
        self._imported: dict[str, HostTensor] = {}
        self._summed: set[str] = set()
        self._work: dict[tuple[tuple[str, int], ...], _Work] = {}
        self._needed: dict[frozenset[str], frozenset[str]] = {}
        self.last_duration_s = 0.0
        """How long the last forward, backward or apply would have taken."""
        self.total_flops = 0.0
        """Operations of all calls so far."""
        self._check_memory(memory_limit_bytes)

    def initialise(self) -> tuple[str, ...]:
        self._require_idle("initialise")
        self._summed.clear()
        self._imported.clear()
        self._unset = {key for key, spec in self._specs.items() if spec.init is None}
        return tuple(f"model/{key}" for key in sorted(self._unset))

    def import_state(self, entries: Iterable[tuple[str, HostTensor]]) -> None:
        self._require_idle("import state")
        for name, tensor in entries:
            entry = check_entry(self._entries, name, tensor)
            self._imported[name] = host_tensor(tensor.dtype, tensor.shape, bytes(tensor.data))
            if not entry.slot:
                self._unset.discard(entry.key)

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
        self._spend(self._priced(symbols).forward_flops)
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
        self._spend(self._priced(symbols).backward_flops)
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
        # An update reads gradients and reads and writes all state.
        moved_bytes = gradient_bytes(self._graph) + 2 * sum(
            entry.nbytes for entry in self._entries.values() if entry.key in self._trainable
        )
        self.last_duration_s = moved_bytes / self._costs.memory_bandwidth_bytes_per_s
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

    def _priced(self, symbols: Mapping[str, int]) -> _Work:
        key = tuple(sorted(symbols.items()))
        work = self._work.get(key)
        if work is None:
            training = self._options.optimizer is not None
            # A symbol that the fed inputs do not show counts at its largest.
            sizes = {**largest(self._graph), **symbols}
            records = block_costs(self._graph, sizes, training=training)
            again = 1 if self._options.recompute else 0
            work = self._work[key] = _Work(
                sum(record.forward_flops for record in records),
                sum(record.backward_flops + again * record.forward_flops for record in records),
            )
        return work

    def _spend(self, flops: float) -> None:
        self.total_flops += flops
        self.last_duration_s = flops / self._costs.flops_per_s

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
