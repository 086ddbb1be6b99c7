"""Framework-free base of backends and stage programs: which calls are allowed, and names and error messages of state.

Rejects what is out of order, with the same messages on every backend; computes nothing. A backend's program adds
tensors: the value of a parameter or slot (`_copy`, `_put`), and what its forward keeps for backward (`Held`).

Also finds the parameters that may be offloaded between uses. The result of some operators may share memory with an
operand, so a node that reads such a result reads the parameter. A parameter stays in place if a value that shares its
memory leaves the stage. Buffers stay in place because steps rewrite them.

Neighbours: `binding` binds sizes, `state` names entries, `backends.torch.program` and the other backends' programs
compute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Final, Generic, Literal, TypeVar

from fusionai.backends.binding import nearest
from fusionai.backends.interface import NOTHING_BEGUN, Call, ServingProgram, StageProgram, WorksIn
from fusionai.backends.state import StateEntry, check_entry, gradient_bytes, initial_value, state_entries
from fusionai.ir.graph import reads
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Graph, ParamSpec
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.messages import StageOptions
from fusionai.wire.serving import ServeOptions

ContextKey = tuple[int, int, int]
"""(step, replica, microbatch)."""
Held = TypeVar("Held")
"""What a backend keeps of a microbatch between forward and backward."""


class StageBase(ABC, Generic[Held]):
    """Framework-independent part of `backends.interface.StageProgram`."""

    def __init__(self, graph: Graph, *, grad_inputs: Sequence[str], options: StageOptions) -> None:
        """Raises `ExecutionError` for a graph that contradicts itself."""
        self._graph = graph
        self._grad_inputs = frozenset(grad_inputs)
        self._options = options
        self._specs: dict[str, ParamSpec] = {spec.key: spec for spec in graph.params.values()}
        self._trained_values = {value: spec.key for value, spec in graph.params.items() if spec.trainable}
        """Value name -> parameter key."""
        self._check_declarations()
        self._entries = state_entries(graph, options.optimizer)
        self._unset = set(self._specs)
        """Keys of parameters without a value."""
        self._contexts: dict[ContextKey, Held] = {}

    # ------------------------------------------------------------------------------------------------------- state

    def export_state(self, parts: Sequence[Literal["model", "optimizer"]]) -> Iterator[tuple[str, HostTensor]]:
        """Yield the state as of the last applied step, even while the next step is in flight."""
        for name, entry in self._entries.items():
            if ("optimizer" if entry.slot else "model") in parts:
                yield name, self._exported(entry)

    def export_entries(self, names: Sequence[str]) -> list[tuple[str, HostTensor]]:
        if unknown := [name for name in names if name not in self._entries]:
            raise ExecutionError(f"unknown state entry {unknown[0]!r}{nearest(unknown[0], self._entries)}.")
        return [(name, self._exported(self._entries[name])) for name in names]

    def initialise(self) -> tuple[str, ...]:
        """See `StageProgram.initialise`."""
        self._require_idle("initialise")
        self._reset()
        missing: list[str] = []
        for key in sorted(self._specs):
            value = initial_value(self._specs[key], self._options.seed)
            if value is None:
                missing.append(f"model/{key}")
                self._unset.add(key)
            else:
                self._put(self._entries[f"model/{key}"], value)
                self._unset.discard(key)
        return tuple(missing)

    def import_state(self, entries: Iterable[tuple[str, HostTensor]]) -> None:
        """See `StageProgram.import_state`."""
        self._require_idle("import state")
        for name, tensor in entries:
            entry = check_entry(self._entries, name, tensor)
            self._put(entry, tensor)
            if not entry.slot:
                self._unset.discard(entry.key)

    def _exported(self, entry: StateEntry) -> HostTensor:
        if not entry.slot and entry.key in self._unset:
            raise ExecutionError(f"{entry.name} has no value yet.", hint="Import it first.")
        return self._copy(entry)

    @abstractmethod
    def _copy(self, entry: StateEntry) -> HostTensor:
        """Return a copy of an entry that has a value, as of the last applied step."""

    @abstractmethod
    def _put(self, entry: StateEntry, value: HostTensor) -> None:
        """Overwrite an entry with a copy of a value that fits it."""

    def _reset(self) -> None:
        """Drop gradient sums, rewritten buffers and optimizer state."""

    # ----------------------------------------------------------------------------------------------------- in order

    def _begin(self, call: Call, wanted: Sequence[str] | None) -> frozenset[str]:
        """Return the outputs that a forward must compute. Raises `ExecutionError` if the call is not allowed now."""
        names = frozenset(self._graph.outputs if wanted is None else wanted)
        for name in names:
            self._require_output(name)
        if self._unset:
            raise ExecutionError(
                f"{len(self._unset)} entries have no value yet, among them model/{min(self._unset)}.",
                hint="Call initialise or import_state first.",
            )
        if call.mode == "train" and key_of(call) in self._contexts:
            raise ExecutionError(f"microbatch {call.microbatch} of step {call.step} is already in flight.")
        return names

    def _take(
        self, call: Call, gradients: Mapping[str, HostTensor], begun: Mapping[str, HostTensor] = NOTHING_BEGUN
    ) -> Held:
        """Remove and return what forward kept of the microbatch whose backward comes now."""
        held = self._contexts.pop(key_of(call), None)
        if held is None:
            raise ExecutionError(
                f"no forward context of step {call.step}, replica {call.replica}, microbatch {call.microbatch}."
            )
        for name in gradients:
            self._require_output(name)
        for name in begun:
            if name not in self._grad_inputs and name not in self._trained_values:
                known = sorted({*self._grad_inputs, *self._trained_values})
                raise ExecutionError(f"the stage has no gradient sum of {name!r}{nearest(name, known)}.")
        return held

    def _require_output(self, name: str) -> None:
        if name not in self._graph.outputs:
            raise ExecutionError(f"the stage has no output {name!r}{nearest(name, self._graph.outputs)}.")

    def _require_trainable(self, key: str) -> None:
        spec = self._specs.get(key)
        if spec is None or not spec.trainable:
            known = [known for known, spec in self._specs.items() if spec.trainable]
            raise ExecutionError(f"no trainable parameter {key!r} in this stage{nearest(key, known)}.")

    def _require_optimizer(self) -> None:
        if self._options.optimizer is None:
            raise ExecutionError("this stage was loaded without an optimizer, it can't apply an update.")

    def _require_idle(self, action: str) -> None:
        if self._contexts:
            raise ExecutionError(
                f"can't {action} with {len(self._contexts)} microbatches in flight.",
                hint="Run their backward or discard them first.",
            )

    def _check_declarations(self) -> None:
        for name in self._grad_inputs:
            if name not in self._graph.inputs and name not in self._trained_values:
                raise ExecutionError(f"the stage has no input {name!r}{nearest(name, self._graph.inputs)}.")
        for value, spec in self._graph.params.items():
            if self._specs[spec.key] != spec:
                raise ExecutionError(f"the graph describes parameter {spec.key!r} in two ways (see {value!r}).")
        for key in self._graph.state_writes.values():
            if key not in self._specs or self._specs[key].trainable:
                raise ExecutionError(f"the graph writes {key!r}, which is no buffer of this stage.")

    # ------------------------------------------------------------------------------------------------------- memory

    def _state_bytes(self) -> int:
        """Return the bytes of parameters, gradients and optimizer state in memory. State in a file is not counted; of
        offloaded weights, only the largest block counts."""
        away = self._options.offload
        held_bytes = sum(entry.nbytes for entry in self._entries.values() if not (entry.slot and away))
        if self._options.offload_weights:
            blocks = block_weights(self._graph)
            held_bytes -= self._weight_bytes({key for keys in blocks.values() for key in keys})
            held_bytes += max(map(self._weight_bytes, blocks.values()), default=0)
        return held_bytes + (gradient_bytes(self._graph) if self._options.optimizer is not None else 0)

    def _weight_bytes(self, keys: Collection[str]) -> int:
        return sum(self._entries[f"model/{key}"].nbytes for key in keys)

    def _require_room(self, held_bytes: int, limit_bytes: int | None) -> None:
        """Raise `ExecutionError` if the state alone exceeds the limit, whatever is in flight."""
        if limit_bytes is not None and held_bytes > limit_bytes:
            raise ExecutionError(
                f"the stage's parameters, gradients and optimizer state take {held_bytes} bytes, "
                f"the limit is {limit_bytes}.",
                hint="Give this peer fewer blocks or lend more memory.",
            )

    def _require_room_in_flight(self, needed_bytes: int, microbatches: int, limit_bytes: int | None) -> None:
        """Raise `ExecutionError` if the stage exceeds the limit with `microbatches` in flight."""
        if limit_bytes is not None and needed_bytes > limit_bytes:
            raise ExecutionError(
                f"the stage needs {needed_bytes} bytes with {microbatches} microbatches in flight, "
                f"the limit is {limit_bytes}.",
                hint="Use smaller or fewer microbatches in flight, give this peer fewer blocks or lend more memory.",
            )


class FrameworkBackend:
    """The framework-independent part of `backends.interface.Backend` and `backends.interface.ServingBackend`.
    `operators`: names of the operators it has. `stage` and `served`: make the programs of a stage in training and of a
    stage in serving, from the arguments of `load` and `serve`."""

    _works_on_cpu: ClassVar[WorksIn] = "caller"

    def __init__(
        self,
        device: str,
        operators: Container[str],
        stage: Callable[..., StageProgram],
        served: Callable[..., ServingProgram],
    ) -> None:
        self.device = device
        self._operators = operators
        self._stage = stage
        self._served = served

    @property
    def works_in(self) -> WorksIn:
        return self._works_on_cpu if self.device == "cpu" else "device"

    def unsupported(self, ops: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted({op for op in ops if op not in self._operators}))

    def load(
        self,
        graph: Graph,
        *,
        grad_inputs: Sequence[str],
        options: StageOptions,
        memory_limit_bytes: int | None = None,
    ) -> StageProgram:
        self._require_operators(graph)
        return self._stage(graph, grad_inputs=grad_inputs, options=options, memory_limit_bytes=memory_limit_bytes)

    def serve(self, graph: Graph, *, options: ServeOptions, memory_limit_bytes: int | None = None) -> ServingProgram:
        self._require_operators(graph)
        return self._served(graph, options=options, memory_limit_bytes=memory_limit_bytes)

    def _require_operators(self, graph: Graph) -> None:
        if missing := self.unsupported(node.op for node in graph.nodes):
            raise ExecutionError(f"this backend has no operator {', '.join(missing)}.")


def key_of(call: Call) -> ContextKey:
    return call.step, call.replica, call.microbatch


def check_gradient(name: str, gradient: HostTensor, shape: tuple[int, ...], dtype: str) -> None:
    """Raise `ExecutionError` unless `gradient` has the output's shape and dtype."""
    if gradient.shape != shape or gradient.dtype != dtype:
        raise ExecutionError(
            f"expected the gradient of {name!r} as {dtype} {list(shape)}, got {gradient.dtype} {list(gradient.shape)}."
        )


_SHARING: Final = frozenset({"view", "copy", "dropout"})
"""Categories of operators whose result may share memory with an operand. Some copies are included, because they return
their operand where nothing changes."""


def movable_weights(graph: Graph) -> dict[str, frozenset[str]]:
    """Return value -> keys of the movable parameters that the value is, or whose memory it may share."""
    shared = {value: frozenset({spec.key}) for value, spec in graph.params.items() if spec.kind == "parameter"}
    for node in graph.nodes:
        if OPERATORS[node.op].category in _SHARING:
            keys = _of(shared, reads(node))
            shared.update(dict.fromkeys(node.outputs, keys) if keys else {})
    staying = _of(shared, [*graph.outputs.values(), *graph.state_writes]) | set(graph.state_writes.values())
    return {value: keys - staying for value, keys in shared.items() if keys - staying}


def block_weights(graph: Graph) -> dict[int, frozenset[str]]:
    """Return block -> keys of the movable parameters that its nodes read."""
    shared = movable_weights(graph)
    found: dict[int, frozenset[str]] = {}
    for node in graph.nodes:
        keys = _of(shared, reads(node))
        if keys:
            found[node.block] = found.get(node.block, frozenset()) | keys
    return found


def _of(shared: dict[str, frozenset[str]], values: Iterable[str]) -> frozenset[str]:
    return frozenset[str]().union(*(shared[value] for value in values if value in shared))
