"""Serving for frameworks without caches: the framework computes the parts between attention nodes and nodes with a
state, numpy computes these nodes.

Everything else works row by row, so the graph is cut at these nodes. numpy computes attention over caches in host
memory, and states in `host_states`. The bits of a row must not depend on the other rows of the pass. So the rows of a
long segment are computed together in a group whose size follows from the segment alone, and all others in groups of
`CHUNK`, padded with zeros. After the last of these nodes, only rows whose results are wanted are computed.

This module owns parts, row groups and caches. Neighbours: `base` checks passes, `backends.jax` and
`backends.onnxruntime` compute parts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fusionai.backends.binding import check_indices, shape_of, with_rows
from fusionai.backends.semantics import Scores, visible_keys
from fusionai.backends.serving.base import CheckedPass, PlacedCache, ServingProgram, array_of
from fusionai.backends.serving.host_states import HostStates
from fusionai.backends.serving.page_table import (
    LEVELS,
    LayerShape,
    RowSpan,
    first_key,
    keys_until,
    one_by_one,
    stored_width,
)
from fusionai.ir.graph import consumers, needed_nodes, reads
from fusionai.ir.schema import Arg, Graph, Node, Ref
from fusionai.ir.serving import SEQUENCE, row_dimension
from fusionai.ir.serving_cost import INT8_SCALE_BYTES
from fusionai.ir.shapes import symbols_of
from fusionai.ir.states import CONVOLUTION, LINEAR_ATTENTION, may_carry
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire.serving import CacheFormat, ServeOptions

ALIGNMENT_BYTES: Final = 64
"""Bytes of a cache line, to which operands of matrix products are aligned."""


def cached_attention(spans: Sequence[RowSpan], cache: HostCache, q: Array, k: Array, v: Array, scores: Scores) -> Array:
    """Write the pass's k and v to the cache and return the attention's output [T, Hq, Dv]. q [T, Hq, D], k [T, Hkv, D],
    v [T, Hkv, Dv], all float32."""
    cache.write(spans, k, v)
    out = np.empty((q.shape[0], q.shape[1], v.shape[2]), np.float32)
    for span in spans:
        keys, values = cache.read(span)
        begin, end = span.first, span.first + span.length
        offset = first_key(span.start, cache.window)
        if not one_by_one(span):
            at, of = np.arange(span.start, span.end)[:, None], np.arange(offset, span.end)
            if span.together:
                mask = of < keys_until(span)[:, None]
                mask &= True if cache.window is None else of > at - cache.window
            else:
                mask = visible_keys(at, of, causal=True, window=cache.window)
            out[begin:end] = _attend(q[begin:end], keys, values, mask, scores)
            continue
        for row in range(span.length):
            seen = slice(first_key(span.start + row, cache.window) - offset, span.start + row + 1 - offset)
            one = q[begin + row : begin + row + 1]
            out[begin + row] = _attend(one, keys[seen], values[seen], None, scores)[0]
    return out


def _attend(q: Array, keys: Array, values: Array, mask: Array | None, scores: Scores) -> Array:
    """Return [S, Hq, Dv] for q [S, Hq, D], keys [T, Hkv, D], values [T, Hkv, Dv] and mask [S, T], True where a key is
    visible."""
    scale, softcap, sinks = scores
    queries, heads, width = q.shape
    shared = keys.shape[1]
    grouped = _aligned(q.reshape(queries, shared, heads // shared, width).transpose(1, 2, 0, 3))
    weights = np.matmul(grouped.reshape(shared, -1, width), _aligned(keys.transpose(1, 2, 0))).reshape(
        shared, heads // shared, queries, -1
    ) * np.float32(scale)
    if softcap is not None:
        weights = np.tanh(weights / np.float32(softcap)) * np.float32(softcap)
    if mask is not None:
        weights = np.where(mask, weights, np.finfo(np.float32).min)
    largest = weights.max(axis=-1, keepdims=True)
    column = None if sinks is None else sinks.astype(np.float32).reshape(shared, heads // shared, 1, 1)
    if column is not None:
        largest = np.maximum(largest, column)
    weights = np.exp(weights - largest)
    total = weights.sum(axis=-1, keepdims=True)
    if column is not None:
        total = total + np.exp(column - largest)
    weights = _aligned((weights / total).reshape(shared, -1, keys.shape[0]))
    mixed = np.matmul(weights, _aligned(values.transpose(1, 0, 2)))
    return mixed.reshape(shared, heads // shared, queries, -1).transpose(2, 0, 1, 3).reshape(queries, heads, -1)


def _aligned(values: Array) -> Array:
    """Return a contiguous copy of `values` that begins on a cache-line boundary."""
    nbytes = prod(values.shape) * values.itemsize
    memory = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT_BYTES
    copy = memory[begin : begin + nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


_CODED: Final[dict[CacheFormat, Any]] = {"fp32": np.float32, "bf16": np.uint16, "fp16": np.float16, "int8": np.uint8}
"""numpy has no bfloat16: its values are stored as their bits."""


class HostCache:
    """Key and value cache of one attention node."""

    def __init__(self, shape: LayerShape, options: ServeOptions) -> None:
        self.window = shape.window
        self._format: CacheFormat = options.cache
        self._page_tokens = options.page_tokens
        blocks, self._capacity = shape.blocks(options)
        widths = (shape.key_width, shape.value_width)
        # Zeroed, because a hostile caller may have a page read before it was written: it must not show old memory.
        self._halves = [
            np.zeros((blocks * self._capacity, shape.heads, stored_width(width, options.cache)), _CODED[options.cache])
            for width in widths
        ]

    @property
    def nbytes(self) -> int:
        return sum(half.nbytes for half in self._halves)

    def write(self, spans: Sequence[RowSpan], keys: Array, values: Array) -> None:
        """Store keys and values of a pass, float32 [positions, heads, width] each."""
        for span in spans:
            slots = self._slots(span, span.start)
            for half, new in zip(self._halves, (keys, values), strict=True):
                half[slots] = _coded(new[span.first : span.first + span.length], self._format)

    def read(self, span: RowSpan) -> tuple[Array, Array]:
        """Return (keys, values), float32 [positions, heads, width], from the earliest position that any position of the
        span sees."""
        slots = self._slots(span, first_key(span.start, self.window))
        keys, values = (_decoded(half[slots], self._format) for half in self._halves)
        return keys, values

    def copy_place(self, source: int, target: int) -> None:
        if self.window is not None:
            for half in self._halves:
                rings = half.reshape(-1, self._capacity, *half.shape[1:])
                rings[target] = rings[source]

    def _slots(self, span: RowSpan, first: int) -> npt.NDArray[np.int64]:
        """Return the cache slots of positions `first` to the end of the span."""
        positions = np.arange(first, span.end)
        if self.window is not None:
            return span.ring * self._capacity + positions % self._capacity
        pages = np.asarray(span.pages, np.int64)
        return pages[positions // self._page_tokens] * self._page_tokens + positions % self._page_tokens


def _coded(values: Array, form: CacheFormat) -> Array:
    match form:
        case "fp32":
            return values
        case "fp16":
            return values.astype(np.float16)
        case "bf16":
            # Round to nearest, ties to even; NaN stays NaN.
            bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
        case "int8":
            largest = np.abs(values).max(axis=-1, keepdims=True).astype(np.float32)
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                step = np.where(largest > 0, np.float32(LEVELS) / largest, np.float32(0))
                levels = np.clip(np.rint(values * step), -LEVELS, LEVELS).astype(np.int8)
            return np.concatenate([levels.view(np.uint8), (largest / np.float32(LEVELS)).view(np.uint8)], axis=-1)


def _decoded(values: Array, form: CacheFormat) -> Array:
    match form:
        case "fp32":
            return values
        case "fp16":
            return values.astype(np.float32)
        case "bf16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        case "int8":
            scales = np.ascontiguousarray(values[..., -INT8_SCALE_BYTES:]).view(np.float32)
            return values[..., :-INT8_SCALE_BYTES].view(np.int8) * scales


Array = npt.NDArray[Any]
Compute = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Maps the values a part reads, at the rows of a group, to the values it makes."""
CHUNK: Final = 16
"""Rows of a group that may mix sessions."""
_ATTENTION: Final = "fusion.attention"


@dataclass(frozen=True, slots=True)
class ProgramPart:
    """Nodes between two nodes that numpy computes, without those that compute sizes. `given`: values that earlier parts
    made; `makes`: values that are used later; `cut`: the node after this part, None for the last."""

    nodes: tuple[Node, ...]
    params: tuple[str, ...]
    given: tuple[str, ...]
    makes: tuple[str, ...]
    cut: Node | None


class PartedServing(ServingProgram):
    """A serving stage in parts. A backend imports weights and compiles parts."""

    def __init__(self, graph: Graph, options: ServeOptions) -> None:
        super().__init__(graph, options)
        self._caches: dict[int, HostCache] | None = None
        self._held: dict[int, HostStates] = {}
        convolved = {value for node in graph.nodes if node.op == CONVOLUTION for value in node.outputs}
        self._cuts = {value: nodes for value, nodes in consumers(graph).items() if value in convolved}
        """Result of a convolution -> the nodes that cut it to the length of the text, whose results numpy makes."""
        self._parts: dict[frozenset[str], tuple[ProgramPart, ...]] = {}
        self._computes: dict[tuple[frozenset[str], int, int], Compute] = {}

    @abstractmethod
    def _weight(self, key: str) -> Array:
        """Return a parameter that a node computed by numpy reads."""

    @abstractmethod
    def _compiled(self, part: ProgramPart, rows: int) -> Compute:
        """Return the part compiled for groups of `rows` rows."""

    def _forget_compiled(self) -> None:
        self._computes.clear()

    def allocate(self) -> None:
        if self._caches is None:
            self._caches = {shape.node: HostCache(shape, self._options) for shape in self._layers}
            self._held = {shape.node: HostStates(shape, self._options) for shape in self._states}

    def _placed(self) -> Iterable[PlacedCache]:
        return (*(self._caches or {}).values(), *self._held.values())

    @property
    def _cache_bytes(self) -> int:
        """Bytes of the allocated caches."""
        return sum(cache.nbytes for cache in (*(self._caches or {}).values(), *self._held.values()))

    # ------------------------------------------------------------------------------------------------------ computing

    def _computed(self, work: CheckedPass) -> dict[str, HostTensor]:
        spans, wanted, chosen = work.spans, work.wanted, work.chosen
        check_indices(self._graph, self._graph.nodes, work.inputs)
        values: dict[str, Array] = {name: array_of(tensor) for name, tensor in work.inputs.items()}
        *before, last = self._parts_of(wanted)
        for number, part in enumerate(before):
            assert part.cut is not None, "parts are cut there"
            values.update(self._run(wanted, number, part, values, groups(spans)))
            if part.cut.op == _ATTENTION:
                values[part.cut.outputs[0]] = self._attend(part.cut, spans, values)
            else:
                made = self._continued(part.cut, spans, values)
                values.update(dict.fromkeys(self._results_of(part.cut), made))
        made = self._run(wanted, len(before), last, values, chunks(chosen))
        return {name: self._result(self._graph.outputs[name], values, made, chosen) for name in wanted}

    def _run(
        self,
        wanted: frozenset[str],
        number: int,
        part: ProgramPart,
        values: Mapping[str, Array],
        row_groups: Iterable[tuple[Sequence[int], int]],
    ) -> dict[str, Array]:
        """Return what the part makes, the rows of all groups in order. A group is (its rows, its padded size)."""
        made: dict[str, list[Array]] = {name: [] for name in part.makes}
        for rows, size in row_groups:
            at = (wanted, number, size)
            if at not in self._computes:
                self._computes[at] = self._compiled(part, size)
            given = {name: self._rows_of(name, values[name], rows, size) for name in part.given}
            for name, found in self._computes[at](given).items():
                along = row_dimension(self._graph, name)
                made[name].append(found if along is None else found.take(range(len(rows)), axis=along))
        return {name: self._joined(name, pieces) for name, pieces in made.items()}

    def _attend(self, node: Node, spans: tuple[RowSpan, ...], values: Mapping[str, Array]) -> Array:
        assert self._caches is not None
        q, k, v = (
            np.ascontiguousarray(values[arg.name][0].transpose(1, 0, 2), np.float32)
            for arg in node.args
            if isinstance(arg, Ref)
        )
        options: dict[str, Any] = dict(node.kwargs)
        sinks = options.get("sinks")
        if isinstance(sinks, Ref):
            sinks = self._value(sinks, values)
        scores = Scores(options["scale"], options.get("softcap"), sinks)
        out = cached_attention(spans, self._caches[node.id], q, k, v, scores)
        return out.transpose(1, 0, 2)[None]

    def _continued(self, node: Node, spans: tuple[RowSpan, ...], values: Mapping[str, Array]) -> Array:
        tensors = 3 if node.op == CONVOLUTION else len(node.args)
        named = [node.kwargs.get(name) for name in ("decay", "beta")] if node.op == LINEAR_ATTENTION else []
        operands = [self._value(arg, values) for arg in (*node.args[:tensors], *named)]
        return self._held[node.id].run(spans, operands)

    def _value(self, arg: Arg, values: Mapping[str, Array]) -> Array | None:
        if not isinstance(arg, Ref):
            return None
        param = self._graph.params.get(arg.name)
        return values[arg.name] if param is None else self._weight(param.key)

    def _results_of(self, node: Node) -> Iterator[str]:
        """Yield the values that a node with a state gives: of a convolution those that are cut to the text's length."""
        if node.op != CONVOLUTION:
            yield node.outputs[0]
            return
        for reader in self._cuts.get(node.outputs[0], ()):
            yield reader.outputs[0]

    def _result(
        self, value: str, values: Mapping[str, Array], made: Mapping[str, Array], chosen: Sequence[int]
    ) -> HostTensor:
        """Return an output at the chosen rows. The last part made it at those rows only; an earlier part made it at all
        rows."""
        along = row_dimension(self._graph, value)
        found = made[value] if value in made else values[value]
        if value not in made and along is not None:
            found = found.take(chosen, axis=along)
        return host_tensor(self._graph.values[value].dtype, found.shape, np.ascontiguousarray(found).tobytes())

    # -------------------------------------------------------------------------------------------------------- parts

    def _parts_of(self, wanted: frozenset[str]) -> tuple[ProgramPart, ...]:
        """Return the graph's parts, cut at each attention; the last part ends with the outputs."""
        if wanted not in self._parts:
            outputs = {self._graph.outputs[name] for name in wanted}
            beside = {reader.id for readers in self._cuts.values() for reader in readers}
            nodes = [
                node for node in needed_nodes(self._graph, outputs) if not self._is_size(node) and node.id not in beside
            ]
            cut: list[list[Node]] = [[]]
            for node in nodes:
                cut[-1].append(node)
                if self._is_cut(node):
                    cut.append([])
            later = set(outputs)
            """Outputs, and values that later parts read."""
            parts: list[ProgramPart] = []
            for group in reversed(cut):
                last = group[-1] if group and self._is_cut(group[-1]) else None
                plain = tuple(node for node in group if node is not last)
                if last is not None:
                    later |= set(reads(last))
                made = {value for node in plain for value in node.outputs}
                read = self._tensors_among({value for node in plain for value in reads(node)} - made)
                params, given = read & self._graph.params.keys(), read - self._graph.params.keys()
                makes = self._tensors_among(made & later)
                parts.append(
                    ProgramPart(plain, tuple(sorted(params)), tuple(sorted(given)), tuple(sorted(makes)), last)
                )
                later |= read
            for value in {value for part in parts for value in (*part.given, *part.makes)}:
                self._require_rows(value)
            self._parts[wanted] = tuple(reversed(parts))
        return self._parts[wanted]

    def _tensors_among(self, names: set[str]) -> set[str]:
        return {name for name in names if self._graph.values[name].dtype != "symint"}

    def _is_cut(self, node: Node) -> bool:
        return node.op == _ATTENTION or may_carry(node)

    def _is_size(self, node: Node) -> bool:
        return not self._tensors_among(set(node.outputs))

    def _require_rows(self, value: str) -> None:
        shape = self._graph.values[value].shape
        if [dim for dim in shape if SEQUENCE in symbols_of(dim)] not in ([], [SEQUENCE]):
            raise ExecutionError(f"value {value!r} of shape {list(shape)} can't be split into rows.")

    def _rows_of(self, name: str, value: Array, rows: Sequence[int], size: int) -> Array:
        """Return these rows, padded with zeros to `size` rows."""
        along = row_dimension(self._graph, name)
        if along is None:
            return value
        padded = np.zeros((*value.shape[:along], size, *value.shape[along + 1 :]), value.dtype)
        padded[(slice(None),) * along + (slice(0, len(rows)),)] = value.take(rows, axis=along)
        return padded

    def _joined(self, name: str, pieces: Sequence[Array]) -> Array:
        along = row_dimension(self._graph, name)
        if not pieces:
            return np.zeros(shape_of(self._graph, name, with_rows(self._graph, 0)), self._graph.values[name].dtype)
        return pieces[0] if along is None or len(pieces) == 1 else np.concatenate(pieces, axis=along)


def groups(spans: Iterable[RowSpan]) -> list[tuple[Sequence[int], int]]:
    """Return the row groups of a pass, in order. The rows of a long segment form a group of their own size."""
    found: list[tuple[Sequence[int], int]] = []
    waiting: list[int] = []
    for span in spans:
        rows = range(span.first, span.first + span.length)
        if one_by_one(span):
            waiting += rows
            continue
        found += chunks(waiting)
        waiting = []
        size = CHUNK
        while size < span.length:
            size *= 2
        found.append((rows, size))
    return [*found, *chunks(waiting)]


def chunks(rows: Sequence[int]) -> Iterator[tuple[Sequence[int], int]]:
    for begin in range(0, len(rows), CHUNK):
        yield rows[begin : begin + CHUNK], CHUNK
