"""Tensors that arrive at a stage: checked when they come, then held, by step, for the work that uses them.

`Arrivals` checks a message before anything is stored: names, dtypes and sizes must be ones the graph allows. The
backend checks exact shapes once it knows the sizes of the microbatch. `WaitingTensors` limits the bytes that may wait:
credit bounds what well-behaved neighbours send, and the limit bounds the others. A replay delivers many steps at once.

`execution.training.runtime` calls both and first asks its stage machine whether a tensor is needed at all;
`execution.training.boundary` and the graph define what is expected.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, get_args

from fusionai.execution.memory_budget import MemoryBudget
from fusionai.execution.training.boundary import FEED, Boundary
from fusionai.execution.training.codecs import Carried, Packed, unpack_all
from fusionai.ir.schema import Graph, ValueSpec
from fusionai.ir.shapes import bounds
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import FLOAT_DTYPES, ITEMSIZE_BYTES, HostTensor, tensor_bytes
from fusionai.wire import messages as wire
from fusionai.wire.codecs import Codec, PackedTensor, Packing, codec_between, follows, packing, packs
from fusionai.wire.messages import Mode

Tensors = Mapping[str, Carried]


class Arrivals:
    """Checks tensor messages for one stage. Each method raises `ExecutionError` for a message the stage must not
    accept."""

    def __init__(self, graph: Graph, boundary: Boundary, codecs: Sequence[Codec] = ()) -> None:
        self._stage = boundary.stage
        self._codecs = codecs
        modes = get_args(Mode)
        self._inputs = {(mode, port.other): port.carried(mode) for mode in modes for port in boundary.receives}
        self._returns = {port.other: frozenset(port.values) for port in boundary.returned}
        own = boundary.stage
        self._replica = boundary.replica
        self._replicas = boundary.replicas
        self._partials = {other: boundary.summed_keys(own, other) for other in boundary.sums_of}
        self._totals = {home: boundary.shared_keys(home, own) for home in boundary.summed_by}
        known = {*graph.inputs, *graph.params}
        names = {name for port in (*boundary.receives, *boundary.sends, *boundary.returned) for name in port.values}
        self._parameters = boundary.parameters
        values = {name: graph.values[name if name in known else graph.outputs[name]] for name in names}
        self._dtypes = {name: spec.dtype for name, spec in values.items()}
        self._limits_bytes = {name: _largest_bytes(graph, spec) for name, spec in values.items()}
        for spec in graph.params.values():
            self._limits_bytes[f"parameter {spec.key}"] = math.prod(spec.shape) * ITEMSIZE_BYTES[spec.dtype]

    def check(self, message: wire.Forward | wire.Backward | wire.SharedGradient, tensors: Tensors) -> None:
        if not isinstance(message, wire.SharedGradient) and (
            message.replica != self._replica or message.microbatch % self._replicas != self._replica
        ):
            raise ExecutionError(
                f"stage {self._stage} belongs to replica {self._replica}, "
                f"got microbatch {message.microbatch} of replica {message.replica}."
            )
        match message:
            case wire.Forward():
                self.forward(message, tensors)
            case wire.Backward():
                self.backward(message, tensors)
            case wire.SharedGradient():
                self.shared(message, tensors)

    def forward(self, message: wire.Forward, tensors: Mapping[str, Carried]) -> None:
        expected = self._inputs.get((message.mode, message.producer), ())
        if set(tensors) != set(expected):
            raise ExecutionError(
                f"stage {self._stage} expected {list(expected)} from {_place(message.producer)}, got {list(tensors)}."
            )
        way = packing(codec_between(self._codecs, message.producer, self._stage), forward=True)
        for name, carried in tensors.items():
            self._tensor(name, carried, way, self._limits_bytes[name], declared=self._dtypes[name])

    def backward(self, message: wire.Backward, tensors: Mapping[str, Carried]) -> None:
        self._named(message.consumer, "gradients", self._returns.get(message.consumer, frozenset()), tensors)
        way = packing(codec_between(self._codecs, self._stage, message.consumer), forward=False)
        for name, carried in tensors.items():
            self._tensor(name, carried, "none" if name in self._parameters else way, self._limits_bytes[name])

    def shared(self, message: wire.SharedGradient, tensors: Mapping[str, Carried]) -> None:
        known = self._partials if message.phase == "partial" else self._totals
        if message.part >= message.parts:
            raise ExecutionError(
                f"stage {self._stage} got part {message.part} of {message.parts} of shared gradients, counted from 0."
            )
        self._named(message.sender, "shared gradients", known.get(message.sender, frozenset()), tensors)
        for key, carried in tensors.items():
            self._tensor(key, carried, "none", self._limits_bytes[f"parameter {key}"])

    def _tensor(self, name: str, carried: Carried, codec: Packing, most_bytes: int, *, declared: str = "") -> None:
        """Check packing, dtype and size of a tensor: of an activation with its `declared` dtype, or of a gradient.
        Packing other than agreed is refused, because stages would then compute with different numbers. The size is that
        after unpacking, because that is what will be allocated."""
        was, found = (carried.was, carried.was.codec) if isinstance(carried, Packed) else (carried, "none")
        expected = codec if packs(codec, was.dtype, was.shape) else "none"
        if found != expected:
            raise ExecutionError(f"stage {self._stage} expected {name!r} packed as {expected}, got {found}.")
        follow = bool(declared) and follows(expected, was.shape)
        if isinstance(was, PackedTensor) and was.following != follow:
            raise ExecutionError(
                f"stage {self._stage} expected rows of {name!r} "
                f"{'predicted from earlier rows' if follow else 'packed independently'}."
            )
        declared = "int64" if declared == "symint" else declared
        if not declared and was.dtype not in FLOAT_DTYPES:
            raise ExecutionError(f"stage {self._stage} expected a float gradient of {name!r}, got {was.dtype}.")
        if declared and was.dtype != declared and (declared, was.dtype) != ("float32", "bfloat16"):
            raise ExecutionError(f"stage {self._stage} expected {name!r} as {declared}, got {was.dtype}.")
        if (nbytes := tensor_bytes(was.dtype, was.shape)) > most_bytes:
            raise ExecutionError(f"stage {self._stage} expected at most {most_bytes} bytes of {name!r}, got {nbytes}.")

    def _named(self, other: int, what: str, known: frozenset[str], tensors: Mapping[str, Carried]) -> None:
        """Refuse unknown names. Missing names are correct: a value that nothing depended on has no gradient."""
        if unknown := tensors.keys() - known:
            raise ExecutionError(
                f"stage {self._stage} expected {what} of {sorted(known)} from {_place(other)}, got {sorted(unknown)}."
            )


def _largest_bytes(graph: Graph, spec: ValueSpec) -> int:
    """Return the size of the value in bytes with every symbolic dimension at its upper bound."""
    highest = [dim if isinstance(dim, int) else max(0, bounds(dim, graph.symbols)[1]) for dim in spec.shape]
    return math.prod(highest) * ITEMSIZE_BYTES["int64" if spec.dtype == "symint" else spec.dtype]


def _place(stage: int) -> str:
    return "the data feed" if stage == FEED else f"stage {stage}"


Some = TypeVar("Some", HostTensor, HostTensor | Packed)
Entries = list[tuple[str, HostTensor]]
ByConsumer = dict[str, dict[int, Carried]]
"""Value -> consumer stage -> its gradient."""


@dataclass(slots=True)
class _Shared:
    """Shared gradients from one stage, as far as they have arrived."""

    values: dict[str, HostTensor] = field(default_factory=dict[str, HostTensor])
    parts: set[int] = field(default_factory=set[int])


class WaitingTensors:
    """Waiting tensors of one stage. `arrivals` checks them; `keep` raises `ExecutionError` if the limit is exceeded,
    which all stages of the machine share."""

    def __init__(self, stage: int, arrivals: Arrivals, memory: MemoryBudget) -> None:
        self._stage = stage
        self.arrivals = arrivals
        self._memory = memory
        memory.join(self)
        self._inputs: defaultdict[tuple[Mode, int, int], dict[str, Carried]] = defaultdict(dict)
        self._gradients: defaultdict[tuple[int, int], ByConsumer] = defaultdict(lambda: defaultdict(dict))
        self._partials: defaultdict[int, dict[int, _Shared]] = defaultdict(dict)
        """Step -> sender -> its part of the shared gradients."""
        self._totals: defaultdict[int, dict[int, _Shared]] = defaultdict(dict)
        """Step -> home stage -> its sums."""
        self._bytes = 0

    @property
    def nbytes(self) -> int:
        return self._bytes

    @property
    def microbatches(self) -> int:
        """Number of microbatches whose inputs wait."""
        return len(self._inputs)

    def keep(self, message: wire.Forward | wire.Backward | wire.SharedGradient, tensors: Tensors) -> bool:
        """Store tensors that the stage machine needs, each at most once. Return whether the message is now complete."""
        match message:
            case wire.Forward():
                self._admit(tensors)
                self._inputs[message.mode, message.step, message.microbatch].update(tensors)
            case wire.Backward():
                self._admit(tensors)
                table = self._gradients[message.step, message.microbatch]
                for value, gradient in tensors.items():
                    table[value][message.consumer] = gradient
            case wire.SharedGradient():
                table = self._partials if message.phase == "partial" else self._totals
                known = table[message.step].setdefault(message.sender, _Shared())
                # A sender that resends after a fault sends the same values again, starting with the first part.
                self._freed({key: known.values.pop(key) for key in tensors.keys() & known.values.keys()})
                self._admit(tensors)
                known.values.update(unpack_all(tensors))
                known.parts.add(message.part)
                return len(known.parts) >= message.parts
        return True

    def take_inputs(self, mode: Mode, step: int, microbatch: int) -> dict[str, Carried]:
        return self._freed(self._inputs.pop((mode, step, microbatch)))

    def take_gradients(self, step: int, microbatch: int) -> ByConsumer:
        taken = self._gradients.pop((step, microbatch), {})
        for by_consumer in taken.values():
            self._bytes -= sum(tensor.nbytes for tensor in by_consumer.values())
        return taken

    def take_partials(self, step: int) -> list[tuple[int, Entries]]:
        """Return (sender, its part), in stage order."""
        return self._taken(self._partials, step)

    def take_totals(self, step: int) -> list[tuple[int, Entries]]:
        """Return (home stage, its sums). Empty if this stage's own sums are the totals."""
        return self._taken(self._totals, step)

    def _taken(self, table: dict[int, dict[int, _Shared]], step: int) -> list[tuple[int, Entries]]:
        taken = sorted(table.pop(step, {}).items())
        return [(sender, list(self._freed(shared.values).items())) for sender, shared in taken]

    def _admit(self, tensors: Tensors) -> None:
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        self._memory.require(nbytes, f"stage {self._stage}")
        self._bytes += nbytes

    def drop(self, below: int | None = None) -> None:
        """Drop everything, or the inputs of steps before `below`."""
        if below is None:
            for table in (self._inputs, self._gradients, self._partials, self._totals):
                table.clear()
            self._bytes = 0
            return
        for key in [key for key in self._inputs if key[1] < below]:
            self._freed(self._inputs.pop(key))

    def _freed(self, tensors: dict[str, Some]) -> dict[str, Some]:
        self._bytes -= sum(tensor.nbytes for tensor in tensors.values())
        return tensors
