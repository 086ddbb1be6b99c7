"""Checks a tensor message before a stage accepts it: names, dtypes and sizes must be ones its graph allows.

The check comes before anything is stored. The backend checks exact shapes once it knows the sizes of the microbatch.
`execution.training.runtime` calls it; `execution.training.boundary` and the graph define what is expected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fusionai.execution.training.boundary import FEED, Boundary
from fusionai.execution.training.codecs import Carried, Packed
from fusionai.ir.schema import Graph, ValueSpec
from fusionai.ir.shapes import bounds
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import FLOAT_DTYPES, ITEMSIZE_BYTES, HostTensor, tensor_bytes
from fusionai.wire import messages as wire
from fusionai.wire.codecs import Codec, PackedTensor, Packing, codec_between, follows, packing, packs


class Arrivals:
    """Checks tensor messages for one stage. Each method raises `ExecutionError` for a message the stage must not
    accept."""

    def __init__(self, graph: Graph, boundary: Boundary, codecs: Sequence[Codec] = ()) -> None:
        self._stage = boundary.stage
        self._codecs = codecs
        self._inputs = {port.other: port for port in boundary.receives}
        self._returns = {port.other: frozenset(port.values) for port in boundary.returned}
        own = boundary.stage
        self._replica = boundary.replica
        self._crosses = boundary.crosses
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

    def forward(self, message: wire.Forward, tensors: Mapping[str, Carried]) -> None:
        self._of_here(message)
        port = self._inputs.get(message.producer)
        expected = port.carried(message.mode) if port is not None else ()
        if set(tensors) != set(expected):
            raise ExecutionError(
                f"stage {self._stage} expected {list(expected)} from {_place(message.producer)}, got {list(tensors)}."
            )
        for name, carried in tensors.items():
            codec = codec_between(self._codecs, message.producer, self._stage)
            was = self._as_agreed(name, carried, packing(codec, forward=True), following=True)
            declared = "int64" if self._dtypes[name] == "symint" else self._dtypes[name]
            half = declared == "float32" and was.dtype == "bfloat16"
            if was.dtype != declared and not half:
                raise ExecutionError(f"stage {self._stage} expected {name!r} as {declared}, got {was.dtype}.")
            self._size(name, name, was)

    def backward(self, message: wire.Backward, tensors: Mapping[str, Carried]) -> None:
        self._of_here(message)
        self._named(message.consumer, "gradients", self._returns.get(message.consumer, frozenset()), tensors)
        for name, carried in tensors.items():
            codec = codec_between(self._codecs, self._stage, message.consumer)
            way = "none" if name in self._parameters else packing(codec, forward=False)
            was = self._as_agreed(name, carried, way)
            self._float(name, was)
            self._size(name, name, was)

    def shared(self, message: wire.SharedGradient, tensors: Mapping[str, Carried]) -> None:
        known = self._partials if message.phase == "partial" else self._totals
        if message.part >= message.parts:
            raise ExecutionError(
                f"stage {self._stage} got part {message.part} of {message.parts} of shared gradients, counted from 0."
            )
        self._named(message.sender, "shared gradients", known.get(message.sender, frozenset()), tensors)
        for key, carried in tensors.items():
            was = self._as_agreed(key, carried, "none")
            self._float(key, was)
            self._size(key, f"parameter {key}", was)

    def _as_agreed(
        self, name: str, carried: Carried, codec: Packing, *, following: bool = False
    ) -> HostTensor | PackedTensor:
        """Return the tensor as it was before packing, after checking its packing.

        Packing other than agreed is refused, because stages would then compute with different numbers.
        """
        was, found = (carried.was, carried.was.codec) if isinstance(carried, Packed) else (carried, "none")
        expected = codec if packs(codec, was.dtype, was.shape) else "none"
        if found != expected:
            raise ExecutionError(f"stage {self._stage} expected {name!r} packed as {expected}, got {found}.")
        follow = following and follows(expected, was.shape)
        if isinstance(was, PackedTensor) and was.following != follow:
            raise ExecutionError(
                f"stage {self._stage} expected rows of {name!r} "
                f"{'predicted from earlier rows' if follow else 'packed independently'}."
            )
        return was

    def _of_here(self, message: wire.Forward | wire.Backward) -> None:
        if message.replica != self._replica or not self._crosses(message.microbatch):
            raise ExecutionError(
                f"stage {self._stage} belongs to replica {self._replica}, "
                f"got microbatch {message.microbatch} of replica {message.replica}."
            )

    def _named(self, other: int, what: str, known: frozenset[str], tensors: Mapping[str, Carried]) -> None:
        """Refuse unknown names. Missing names are correct: a value that nothing depended on has no gradient."""
        if unknown := tensors.keys() - known:
            raise ExecutionError(
                f"stage {self._stage} expected {what} of {sorted(known)} from {_place(other)}, got {sorted(unknown)}."
            )

    def _float(self, name: str, tensor: HostTensor | PackedTensor) -> None:
        if tensor.dtype not in FLOAT_DTYPES:
            raise ExecutionError(f"stage {self._stage} expected a float gradient of {name!r}, got {tensor.dtype}.")

    def _size(self, name: str, limit: str, tensor: HostTensor | PackedTensor) -> None:
        """Limit the size after unpacking, because that is what will be allocated."""
        most, nbytes = self._limits_bytes[limit], tensor_bytes(tensor.dtype, tensor.shape)
        if nbytes > most:
            raise ExecutionError(f"stage {self._stage} expected at most {most} bytes of {name!r}, got {nbytes}.")


def _largest_bytes(graph: Graph, spec: ValueSpec) -> int:
    """Return the size of the value in bytes with every symbolic dimension at its upper bound."""
    highest = [dim if isinstance(dim, int) else max(0, bounds(dim, graph.symbols)[1]) for dim in spec.shape]
    return math.prod(highest) * ITEMSIZE_BYTES["int64" if spec.dtype == "symint" else spec.dtype]


def _place(stage: int) -> str:
    return "the data feed" if stage == FEED else f"stage {stage}"
