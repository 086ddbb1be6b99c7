"""The interface of a stage that serves, and its framework-free part: checks passes, keeps sessions. Computes nothing.

A stage is paged memory and a program. The caller says which session has which pages and what is dropped
(`coordination.serving.driver` decides it for the whole pipeline). Tokens of many sessions are packed along the sequence
of one call, with batch size 1. Positions follow from the segments. A pass is checked as a whole before anything changes
or is allocated, with the same error messages on every backend. Neighbours: `page_table` keeps the sessions and sizes
the caches, `backends.torch.serving` and the other backends' programs compute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from fusionai.backends.binding import bind_symbols, describe, largest
from fusionai.backends.serving.page_table import RowSpan, SessionTable, layer_shapes, ring_tokens
from fusionai.backends.state import ProgramSize
from fusionai.ir.graph import needed_nodes, reads
from fusionai.ir.schema import Graph, ParamSpec
from fusionai.ir.serving import ADAPTERS, BATCH, FROM_SEGMENTS, POSITIONS, RANDOM, SEQUENCE
from fusionai.ir.states import StateShape, state_shapes
from fusionai.ir.unpacking import unpacked
from fusionai.primitives.errors import ExecutionError, GraphError, nearest
from fusionai.primitives.tensors import FLOAT_DTYPES, HostTensor, host_tensor
from fusionai.wire.serving import Segment, ServeOptions

MOST_POSITIONS: Final = 2**40
"""More than any text has: positions must fit into 64 bits also when they are multiplied."""


@dataclass(frozen=True, slots=True)
class CheckedPass:
    """One pass of packed sessions. `spans` is empty if the stage keeps nothing. `inputs`: all that the graph reads.
    `wanted`: graph output meanings. `rows`: the positions whose results are wanted; None: all `positions`."""

    spans: tuple[RowSpan, ...]
    inputs: Mapping[str, HostTensor]
    wanted: frozenset[str]
    rows: Sequence[int] | None
    positions: int

    @property
    def chosen(self) -> list[int]:
        return list(range(self.positions) if self.rows is None else self.rows)


class PlacedCache(Protocol):
    """A cache of one node."""

    def copy_place(self, source: int, target: int) -> None:
        """Copy what one place holds to another. A cache in pages has no places and copies nothing."""


class ServingProgram(ABC):
    """One loaded stage with its weights and caches.

    `fusion.attention` nodes append their keys and values to the cache of each segment's session and attend to all
    positions of that session up to each position. Layers with a window keep one ring per session, as long as the window
    plus a pass; other layers are paged by the session's page table. Nodes that carry a state (`ir.states`) keep the
    states after a session's last two passes; a session continues at one of these positions, or at 0. A session may
    begin as a copy of another, and may be kept as a copy (`wire.serving.Segment`). The bits of a session's rows do not
    depend on what else is in the pass, nor on whether up to `FEW_POSITIONS` positions after the session's first pass
    come together or one by one.
    """

    def __init__(self, graph: Graph, options: ServeOptions, *, whole: bool = False) -> None:
        """`whole`: the stage keeps its inputs instead of keys and values. Raises `ExecutionError` on an attention that
        can't use a cache, and on an operator that draws random numbers: its keys would differ from pass to pass."""
        for node in graph.nodes:
            if node.op == RANDOM:
                raise ExecutionError(f"{describe(node)}: a serving stage can't draw random numbers.")
        self._graph = graph
        self._options = options
        self._layers = () if whole else layer_shapes(graph, options)
        self._states = () if whole else _states_of(graph)
        self._keeps = whole or bool(self._layers or self._states)
        self._windows = {
            shape.window: ring_tokens(shape.window, options) for shape in self._layers if shape.window is not None
        }
        self._paged = whole or any(shape.window is None for shape in self._layers)
        self._table = SessionTable(options, paged=self._paged, windows=self._windows, states=bool(self._states))
        self._inputs: dict[frozenset[str], frozenset[str]] = {}
        self.size = ProgramSize()

        self._specs = {spec.key: spec for spec in graph.params.values()}
        self._waiting = set(self._specs)
        """Keys of weights that were not imported yet."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Keys of weights that were not imported yet, sorted."""
        return tuple(sorted(self._waiting))

    def import_weights(self, entries: Iterable[tuple[str, HostTensor]]) -> None:
        """Load weights, keyed by `ParamSpec.key`, in any order, each once, with the dtypes of the model's files. Each
        weight is converted, packed or quantised in turn, and its source is released. Once all are there, weights may be
        replaced, together with those that `joined` names; caches stay. Raises `ExecutionError` on an unknown key, a
        wrong shape, or a dtype that can't be converted."""
        for key, tensor in entries:
            if key not in self._specs:
                raise ExecutionError(f"the stage has no weight {key!r}; {nearest(key, self._specs)}")
            if key not in self._waiting:
                if self._waiting:
                    raise ExecutionError(f"weight {key!r} came twice.")
                self._forget_compiled()
            spec = self._specs[key]
            if not spec.packed:
                _check_weight(spec, tensor)
                self._import_weight(spec, tensor)
            else:
                self._import_packed(spec, tensor)
            self._waiting.discard(key)

    def joined(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Return the keys of weights that can only be replaced together with `keys`, these included, sorted."""
        return tuple(sorted(keys))

    def _forget_compiled(self) -> None:  # noqa: B027
        """Drop what was compiled with the present weights."""

    def _import_packed(self, spec: ParamSpec, tensor: HostTensor) -> None:
        """Take a weight that came as a quantised file holds it."""
        if tensor.dtype != "uint8":
            raise ExecutionError(f"weight {spec.key!r} came as {tensor.dtype}, expected the packed bytes of its files.")
        try:
            if not self._keep_packed(spec, tensor.data):
                numbers = unpacked(spec.packed, tensor.data)
                self._import_weight(spec, host_tensor("float32", spec.shape, numbers.data))
        except GraphError as problem:  # the bytes contradict the packing, whose own sizes were checked with the graph
            raise ExecutionError(f"weight {spec.key!r}: {problem.message}", hint=problem.hint) from problem

    def _keep_packed(self, spec: ParamSpec, data: memoryview) -> bool:
        """Keep a weight in the packed bytes that came, and return True; False if its numbers are needed. Raises
        `GraphError` if the bytes contradict the packing."""
        del spec, data
        return False

    @abstractmethod
    def _import_weight(self, spec: ParamSpec, tensor: HostTensor) -> None:
        """Convert a weight that fits `spec` to the form in which it is kept."""

    @abstractmethod
    def allocate(self) -> None:
        """Allocate the caches. A standby stage has none until it is promoted. A second call does nothing."""

    @property
    @abstractmethod
    def resident_bytes(self) -> int:
        """Bytes of the weights as they are kept, and of the caches."""

    def _copy_places(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy rings and states from one session's place to another's, for (from, to)."""
        for source, target in pairs:
            for cache in self._placed():
                cache.copy_place(source, target)

    def _placed(self) -> Iterable[PlacedCache]:
        """Return the caches with a place for each session."""
        return ()

    @abstractmethod
    def _computed(self, work: CheckedPass) -> dict[str, HostTensor]:
        """Return the wanted values of a pass."""

    def run(
        self,
        segments: Sequence[Segment],
        inputs: Mapping[str, HostTensor],
        *,
        wanted: Sequence[str],
        rows: Sequence[int] | None = None,
    ) -> dict[str, HostTensor]:
        """Return the values `wanted` (graph output meanings) for the packed positions of `segments`.

        `inputs`: the graph's inputs except `position_ids`, with shapes [1, positions, ...]. `rows`: return only these
        positions of each result. A graph without attention keeps nothing and takes any rows; `segments` may be empty
        then. Sizes are checked before anything is allocated. Raises `ExecutionError` if a segment starts beyond the
        cached positions, if its pages do not suffice or do not exist, or if more sessions need a ring than there are
        rings.
        """
        names = frozenset(wanted)
        fed = self._checked_inputs(segments, inputs, self._needed(names))
        positions = self._positions(segments, fed)
        if rows is not None and any(not 0 <= row < positions for row in rows):
            raise ExecutionError(f"the pass has {positions} positions, but rows up to {max(rows)} are requested.")
        self.allocate()
        spans = self._table.place(segments) if self._keeps else ()
        self._copy_places([(span.source, span.ring) for span in spans if span.source >= 0])
        results = self._computed(CheckedPass(spans, fed, names, rows, positions))
        self._copy_places(self._table.computed(spans))
        return results

    def forget(self, sessions: Iterable[int]) -> None:
        """Drop the page tables and rings of these sessions; unknown ones are ignored."""
        self._table.forget(sessions)

    def forget_all(self) -> None:
        self._table.forget_all()

    @property
    def cached(self) -> dict[int, int]:
        """Session -> number of cached positions."""
        return self._table.cached

    # -------------------------------------------------------------------------------------------------------- checks

    @property
    def _planned_bytes(self) -> int:
        """Bytes of all caches and states, allocated or not."""
        states_bytes = self._options.sessions * sum(shape.session_bytes for shape in self._states)
        return states_bytes + sum(shape.nbytes(self._options) for shape in self._layers)

    def _needed(self, wanted: frozenset[str]) -> frozenset[str]:
        """Return the graph inputs that these outputs need."""
        for name in wanted:
            if name not in self._graph.outputs:
                raise ExecutionError(f"the stage has no output {name!r}; {nearest(name, self._graph.outputs)}")
        if self.missing:
            raise ExecutionError(
                f"{len(self.missing)} weights have not been imported, among them {self.missing[0]}.",
                hint="Import them first.",
            )
        if wanted not in self._inputs:
            values = [self._graph.outputs[name] for name in wanted]
            nodes = needed_nodes(self._graph, values)
            # A pass that skipped an attention node would leave a gap in its cache.
            done = {node.id for node in nodes}
            left_out = [shape.node for shape in (*self._layers, *self._states) if shape.node not in done]
            if left_out:
                raise ExecutionError(
                    f"{', '.join(sorted(wanted)) or 'nothing'} does not need node {left_out[0]}, whose cache every "
                    "pass must fill."
                )
            read = {value for node in nodes for value in reads(node)} | set(values)
            self._inputs[wanted] = frozenset(read.intersection(self._graph.inputs))
        return self._inputs[wanted]

    def _checked_inputs(
        self, segments: Sequence[Segment], inputs: Mapping[str, HostTensor], needed: frozenset[str]
    ) -> dict[str, HostTensor]:
        """Return the inputs, with positions and adapters added, after checking their sizes against the graph's
        declarations."""
        for name in FROM_SEGMENTS:
            if name in inputs:
                raise ExecutionError(f"{name} is computed from the segments, it can't be an input.")
        length = sum(segment.length for segment in segments)
        if self._keeps and not segments:
            raise ExecutionError("a stage with caches needs at least one segment, got none.")
        if length > self._options.pass_tokens:
            raise ExecutionError(f"a pass takes {self._options.pass_tokens} positions at most, this has {length}.")
        fed = dict(inputs)
        if not segments and (missing := FROM_SEGMENTS & needed):
            raise ExecutionError(f"the stage computes {min(missing)} from segments, got none.")
        if POSITIONS in needed:
            if (last := max(segment.start + segment.length for segment in segments)) > MOST_POSITIONS:
                raise ExecutionError(f"a text has {MOST_POSITIONS} positions at most, a segment ends at {last}.")
            fed[POSITIONS] = _positions_of(segments)
        if ADAPTERS in needed:
            fed[ADAPTERS] = _adapters_of(segments, self._options.adapter_ranks)
        symbols = bind_symbols(self._graph, fed, needed)
        if symbols.get(BATCH, 1) != 1:
            raise ExecutionError(f"a pass packs its sessions along the sequence, got a batch of {symbols[BATCH]}.")
        found = symbols.get(SEQUENCE, length)
        if found > self._options.pass_tokens:
            raise ExecutionError(f"a pass takes {self._options.pass_tokens} positions at most, this has {found}.")
        if segments and found != length and (self._keeps or not FROM_SEGMENTS.isdisjoint(fed)):
            raise ExecutionError(f"the segments have {length} positions, the inputs {found}.")
        return fed

    def _positions(self, segments: Sequence[Segment], fed: Mapping[str, HostTensor]) -> int:
        for name, tensor in fed.items():
            for dim, size in zip(self._graph.values[name].shape, tensor.shape, strict=True):
                if dim == SEQUENCE:
                    return size
        return sum(segment.length for segment in segments)


def _states_of(graph: Graph) -> tuple[StateShape, ...]:
    try:
        return state_shapes(graph)
    except GraphError as error:
        raise ExecutionError(error.message) from error


def largest_pass(graph: Graph, options: ServeOptions) -> dict[str, int]:
    """Return the size of every symbol in the largest pass."""
    symbols = largest(graph)
    if SEQUENCE in symbols:
        symbols[SEQUENCE] = max(graph.symbols[SEQUENCE][0], min(symbols[SEQUENCE], options.pass_tokens))
    if BATCH in symbols:
        symbols[BATCH] = graph.symbols[BATCH][0]
    return symbols


def _check_weight(spec: ParamSpec, tensor: HostTensor) -> None:
    """Raise `ExecutionError` unless `tensor` may be the weight that `spec` describes."""
    if tensor.shape != spec.shape:
        raise ExecutionError(f"expected weight {spec.key!r} of shape {list(spec.shape)}, got {list(tensor.shape)}.")
    floats = spec.dtype in FLOAT_DTYPES and tensor.dtype in FLOAT_DTYPES
    if tensor.dtype != spec.dtype and not floats:
        raise ExecutionError(f"weight {spec.key!r} came as {tensor.dtype}, which can't become {spec.dtype}.")


def array_of(tensor: HostTensor) -> npt.NDArray[Any]:
    """Return a numpy view of the tensor's memory; its dtype must be one that numpy has."""
    return np.frombuffer(tensor.data, dtype=tensor.dtype).reshape(tensor.shape)


def _positions_of(segments: Sequence[Segment]) -> HostTensor:
    """Return the position of every row: int64 [1, positions]."""
    ranges = [np.arange(segment.start, segment.start + segment.length, dtype=np.int64) for segment in segments]
    flat = np.concatenate(ranges)
    return host_tensor("int64", (1, flat.size), flat.data)


def _adapters_of(segments: Sequence[Segment], ranks: Sequence[int]) -> HostTensor:
    """Return which adapter ranks apply at which position, as 0 or 1: float32 [1, positions, sum of all ranks]. Raises
    `ExecutionError` if a segment names an adapter that is not loaded."""
    offsets = np.cumsum([0, *ranks])
    mask = np.zeros((1, sum(segment.length for segment in segments), int(offsets[-1])), np.float32)
    at = 0
    for segment in segments:
        if segment.adapter > len(ranks):
            raise ExecutionError(f"session {segment.session} needs adapter {segment.adapter}, there are {len(ranks)}.")
        if segment.adapter:
            mask[0, at : at + segment.length, offsets[segment.adapter - 1] : offsets[segment.adapter]] = 1.0
        at += segment.length
    return host_tensor("float32", mask.shape, mask.reshape(-1).data)
