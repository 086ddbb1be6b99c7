"""The backend interface: what a framework implements to run stages (the paper's execution plane), and what all share.

Backends compute; jobs, networks and time belong to their callers. Each implementation has a folder in this package, and
one conformance suite tests them all. All calls block and come from one thread at a time. Tensors are passed in and out
as `HostTensor`. What is out of order is rejected here, with the same messages on every backend. A backend's program
adds tensors: the value of a parameter or slot (`_copy`, `_put`), and what its forward keeps for backward.

Also finds the parameters that may be offloaded between uses. The result of some operators may share memory with an
operand, so a node that reads such a result reads the parameter. A parameter stays in place if a value that shares its
memory leaves the stage. Buffers stay in place because steps rewrite them.

Neighbours: `binding` binds sizes, `state` names entries, `serving.base` is the interface of a stage that serves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal

from fusionai.backends.serving.base import ServingProgram
from fusionai.backends.state import ProgramSize, StateEntry, check_entry, gradient_bytes, initial_value, state_entries
from fusionai.ir.graph import reads
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Graph, ParamSpec
from fusionai.primitives.errors import ExecutionError, nearest
from fusionai.primitives.pace import ServingSpeed, TrainingSpeed
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.messages import Mode, Saving, StageOptions
from fusionai.wire.serving import ServeOptions

Tensors = Mapping[str, HostTensor]
"""Values by name."""
Entries = Iterable[tuple[str, HostTensor]]
"""State entries: `model/<key>` and `optimizer/<key>/<slot>`, keys as in `ParamSpec.key`."""
ContextKey = tuple[int, int, int]
"""(step, replica, microbatch)."""
WorksIn = Literal["caller", "threads", "device"]
"""Where a backend's work runs: on the calling thread (and threads that it starts to help), on other threads of this
process while the caller waits, or on a device besides the processor."""


@dataclass(frozen=True, slots=True)
class Call:
    """Identifies the microbatch of a call. Dropout is keyed by (seed of the job, step, microbatch, node id)."""

    mode: Mode
    step: int
    microbatch: int
    """Global index within the step, over all replicas."""
    replica: int = 0


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of a device: the part of a device report that takes time to measure and may be cached."""

    flops_per_s: float
    """Sustained float32 matrix-product speed with the allowed threads."""
    memory_bandwidth_bytes_per_s: float
    scratch_bytes_per_s: float = 0.0
    """Speed of reading and writing the file that optimizer state may be offloaded to; 0: not measured."""
    pace: TrainingSpeed | None = None
    """Pace of training (`backends.measurement`); None: not measured."""
    serving: tuple[ServingSpeed, ...] = ()
    """One entry per weight format; empty: not measured."""
    attention_flops_per_s: float = 0.0
    """Speed of a prompt chunk's attention over cached keys and values; 0: not measured."""
    host_copy_bytes_per_s: float = 0.0
    """Speed of copies between the device and the machine's memory, the mean of both directions; 0: there are none, or
    it was not measured."""
    launch_s: float = 0.0
    """Seconds of the processor's time that starting a kernel takes, however small; 0: not measured."""

    def figures(self) -> dict[str, Any]:
        """Return the speeds by name."""
        return {speed.name: getattr(self, speed.name) for speed in fields(Speeds)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport(Speeds):
    """Properties and speeds of a backend's device, as `Backend.probe` found them."""

    backend: str
    backend_version: str
    device: str
    device_name: str
    memory_bytes: int
    free_bytes: int
    """Memory of the device that no program used when it was probed."""
    threads: int
    fingerprint: str
    """Hash of versions, instruction set, threads and the exact bits of a probe computation. Equal fingerprints mean
    bit-equal results; an empty one promises nothing, so that results are compared with tolerance."""
    card: str = ""
    """Name of the card that all processes of the machine share; empty for a device that is no card."""
    unsupported_ops: tuple[str, ...] = ()
    """Operators of the allow-list that this backend lacks."""
    tasks: tuple[Literal["train", "serve"], ...] = ("train", "serve")
    weight_formats: tuple[str, ...] = ()
    """Weight formats for serving; empty: all formats."""
    savings: tuple[Saving, ...] = ("recompute", "offload", "offload_weights")
    """Memory-saving techniques that this backend supports in training."""

    @property
    def speeds(self) -> Speeds:
        return Speeds(**self.figures())


NOTHING_BEGUN: Final[Tensors] = MappingProxyType({})
"""Default of `begun` in `StageProgram.backward`: no contributions of later stages."""


class StageProgram(ABC):
    """One loaded stage with its parameters, contexts of microbatches in flight and partial gradient sums."""

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
        self._contexts: dict[ContextKey, Any] = {}
        """What forward keeps of a microbatch for its backward."""
        self._tensors: dict[str, Any] = {}
        self.size = ProgramSize()
        """Parameters by key."""
        self._committed: dict[str, Any] = {}
        """Buffers rewritten since the last apply: their values at that apply."""
        self._optimizer: Any = None
        self.repeats = True
        """Whether this stage keeps the promise of the device's fingerprint. If not, it reports an empty one."""

    # ------------------------------------------------------------------------------------------------------ computing

    @abstractmethod
    def forward(self, call: Call, inputs: Tensors, wanted: Sequence[str] | None = None) -> dict[str, HostTensor]:
        """Return the values of `wanted` (graph output meanings; None: all). In mode `train` the context is kept until
        `backward`; in other modes nothing is kept. Sizes are checked against the graph's symbols before anything is
        allocated."""

    @abstractmethod
    def backward(self, call: Call, gradients: Tensors, begun: Tensors = NOTHING_BEGUN) -> dict[str, HostTensor]:
        """Add this microbatch's parameter gradients to the sums and return the gradients of the values in
        `grad_inputs`.

        Those values are inputs, or parameters by their value names; gradients of such parameters are returned and not
        added. `gradients`: graph output meaning -> gradient; an output that is not named has none. `begun`: input or
        parameter value -> sum of the contributions of later stages to its gradient. This stage adds its own
        contributions one by one, those of the last use first, as a single process would.
        """

    @abstractmethod
    def weight_gradients(self, call: Call) -> None:
        """Compute the weight gradients that `backward` of this microbatch deferred.

        `backward` may return input gradients first, so that the previous stage can go on, and leave weight gradients to
        a moment at which this stage would wait (zero bubble, arXiv 2401.10241). Called once per microbatch, in order,
        if `options.weight_lag` is above 0, and never otherwise. The sums have the same bits either way. A backend that
        defers nothing does nothing here.
        """

    @abstractmethod
    def gradient_norms(self) -> dict[str, float]:
        """Return trainable parameter key -> Euclidean norm of the summed gradient, with the exact bits of the float32
        norm. A parameter without a gradient is absent."""

    @abstractmethod
    def export_gradients(self, keys: Sequence[str]) -> list[tuple[str, HostTensor]]:
        """Return copies of the sums of these parameters, in this order; those without a gradient are absent."""

    @abstractmethod
    def import_gradients(self, entries: Entries, *, add: bool) -> None:
        """Replace the gradient sums of these parameters (or add to them): for tied weights and replicas. A single
        process adds the uses of a tied weight within a microbatch before it adds microbatches. Stages that share a
        weight get the same bits by exporting their part after each microbatch and replacing their sum by zeros."""

    @abstractmethod
    def apply(self, *, scale: float, learning_rate: float) -> None:
        """Scale the sums, take one optimizer step, clear the sums."""

    def discard(self) -> None:
        """Drop contexts and partial sums; state stays."""
        self._contexts.clear()
        self._clear_gradients()
        self._tensors.update(self._committed)
        self._committed.clear()

    @property
    @abstractmethod
    def resident_bytes(self) -> int:
        """Bytes of the parameters, optimizer state and gradients held now."""

    # ------------------------------------------------------------------------------------------------------- state

    def export_state(self, parts: Sequence[Literal["model", "optimizer"]]) -> Iterator[tuple[str, HostTensor]]:
        """Stream copies of the state as of the last applied step, in canonical (sorted) order, even while the next
        step is in flight."""
        for name, entry in self._entries.items():
            if ("optimizer" if entry.slot else "model") in parts:
                yield name, self._exported(entry)

    def export_entries(self, names: Sequence[str]) -> list[tuple[str, HostTensor]]:
        """Return copies of these state entries, in this order. Raises `ExecutionError` on an unknown name."""
        if unknown := [name for name in names if name not in self._entries]:
            raise ExecutionError(f"unknown state entry {unknown[0]!r}; {nearest(unknown[0], self._entries)}")
        return [(name, self._exported(self._entries[name])) for name in names]

    def initialise(self) -> tuple[str, ...]:
        """Set every parameter from (options.seed, key). Returns state entries that have no initialisation rule and
        must be imported."""
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

    def import_state(self, entries: Entries) -> None:
        """Overwrite state. Raises `ExecutionError` on an unknown entry, a wrong shape or dtype."""
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

    def _clear_gradients(self) -> None:  # noqa: B027 - a backend that only evaluates has none
        """Drop gradient sums."""

    def _reset(self) -> None:
        """Drop gradient sums, rewritten buffers and optimizer state."""
        self._clear_gradients()
        self._committed.clear()
        if self._optimizer is not None:
            self._optimizer.reset()

    def _rewrite(self, writes: Mapping[str, Any]) -> None:
        """Rebind buffers, so that a discarded step leaves no trace. A context may still hold the old values."""
        for buffer, value in writes.items():
            self._committed.setdefault(buffer, self._tensors[buffer])
            self._tensors[buffer] = value

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

    def _take(self, call: Call, gradients: Tensors, begun: Tensors = NOTHING_BEGUN) -> Any:
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
                raise ExecutionError(f"the stage has no gradient sum of {name!r}; {nearest(name, known)}")
        return held

    def _require_output(self, name: str) -> None:
        if name not in self._graph.outputs:
            raise ExecutionError(f"the stage has no output {name!r}; {nearest(name, self._graph.outputs)}")

    def _require_trainable(self, key: str) -> None:
        spec = self._specs.get(key)
        if spec is None or not spec.trainable:
            known = [known for known, spec in self._specs.items() if spec.trainable]
            raise ExecutionError(f"no trainable parameter {key!r} in this stage; {nearest(key, known)}")

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
                raise ExecutionError(f"the stage has no input {name!r}; {nearest(name, self._graph.inputs)}")
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
        in_file = self._options.offload
        held_bytes = sum(entry.nbytes for entry in self._entries.values() if not (entry.slot and in_file))
        if self._options.offload_weights:
            blocks = block_weights(self._graph)
            held_bytes -= self._weight_bytes({key for keys in blocks.values() for key in keys})
            held_bytes += max(map(self._weight_bytes, blocks.values()), default=0)
        return held_bytes + (gradient_bytes(self._graph) if self._options.optimizer is not None else 0)

    def _weight_bytes(self, keys: Collection[str]) -> int:
        return sum(self._entries[f"model/{key}"].nbytes for key in keys)

    def _require_room(self, held_bytes: int, limit_bytes: int | None) -> None:
        """Raise `ExecutionError` if the state alone exceeds the limit, whatever is in flight."""
        self.size = ProgramSize(held_bytes)
        if limit_bytes is not None and held_bytes > limit_bytes:
            raise ExecutionError(
                f"the stage's parameters, gradients and optimizer state take {held_bytes} bytes, "
                f"the limit is {limit_bytes}.",
                hint="Give this peer fewer blocks or lend more memory.",
            )

    def _require_room_in_flight(self, needed_bytes: int, microbatches: int, limit_bytes: int | None) -> None:
        """Raise `ExecutionError` if the stage exceeds the limit with `microbatches` in flight."""
        self.size = ProgramSize(self.size.kept_bytes, max(0, needed_bytes - self.size.kept_bytes))
        if limit_bytes is not None and needed_bytes > limit_bytes:
            raise ExecutionError(
                f"the stage needs {needed_bytes} bytes with {microbatches} microbatches in flight, "
                f"the limit is {limit_bytes}.",
                hint="Use smaller or fewer microbatches in flight, give this peer fewer blocks or lend more memory.",
            )


class Backend(ABC):
    """A framework on a device. `operators`: names of the operators it has. `stage` and `served`: make the programs of a
    stage in training and of a stage in serving, from the arguments of `load` and `serve`."""

    name: str
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
    def used_s(self) -> Callable[[], float] | None:
        """Clock of the processor time that the work took in another process; None if it is done in this one."""
        return None

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the names of the devices that this backend sees, as `registry.open_backend` takes them: all cards, or
        `cpu` if there is none."""
        return (self.device,)

    @property
    def isolation(self) -> tuple[str, ...]:
        """Return what protects this machine from the work (`worker.confinement`); empty: nothing does."""
        return ()

    def limit_memory(self, memory_bytes: int) -> None:  # noqa: B027 - a backend in this process has no limit of its own
        """Limit the private memory of the process that computes, beyond what it has now."""

    def release_memory(self) -> None:  # noqa: B027 - a processor's allocator is the process's own
        """Give memory that no program uses back to the device."""

    def close(self) -> None:  # noqa: B027 - nothing is left of a backend in this process
        """End the process that computes, if it is another."""

    @property
    def works_in(self) -> WorksIn:
        return self._works_on_cpu if self.device == "cpu" else "device"

    @abstractmethod
    def probe(self, speeds: Speeds | None = None) -> DeviceReport:
        """Measure the device; takes a few seconds at most. Given the `speeds` of an earlier probe, measure everything
        but those; the fingerprint is always computed afresh."""

    @abstractmethod
    def warm_up(self) -> None:
        """Do now what a framework would otherwise do in its first training step, which takes some seconds, so that a
        spare can take over at once."""

    @abstractmethod
    def clip_scale(self, norms: Sequence[float], max_norm: float) -> tuple[float, float]:
        """Return (total norm, scale), exactly as `torch.nn.utils.clip_grad_norm_` computes them from per-parameter
        norms in `model.parameters()` order."""

    def unsupported(self, ops: Iterable[str]) -> tuple[str, ...]:
        """Return the operators among `ops` that this backend can't run, sorted."""
        return tuple(sorted({op for op in ops if op not in self._operators}))

    def load(
        self, graph: Graph, *, grad_inputs: Sequence[str], options: StageOptions, memory_limit_bytes: int | None = None
    ) -> StageProgram:
        """Prepare a stage of a *validated* graph. Every value's size at the symbols' largest values is computed without
        allocating, and checked against the graph's declaration and the limit. Raises `ExecutionError` if a check
        fails."""
        self._require_operators(graph)
        return self._stage(graph, grad_inputs=grad_inputs, options=options, memory_limit_bytes=memory_limit_bytes)

    def serve(self, graph: Graph, *, options: ServeOptions, memory_limit_bytes: int | None = None) -> ServingProgram:
        """Prepare a stage of a validated graph. The sizes of weights and caches are computed first and checked against
        the limit; raises `ExecutionError` if they exceed it. Parameters that two stages share (tied weights) are held
        by both."""
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
