"""Runs a stage's passes on a card: the row program's lines, products and attention as a few launches for each layer.

All rows of a pass are computed together, up to `BATCH_ROWS` at a time, whatever the number of sessions: prompts and
decoding differ only in their tiles of attention. What the host sends (values, places in the caches, pages) is one copy,
and what it gets another; nothing else waits. Neighbours: `row_plan` writes the program, `card_lines` divides it into
launches, `serving` chooses between this and operators.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fusionai.backends.serving.base import CheckedPass, array_of
from fusionai.backends.serving.page_table import LayerShape, RowSpan, first_key
from fusionai.backends.torch import card_launch
from fusionai.backends.torch.card_lines import Attend, CardCode, LookUp, Multiply, Run, card_code
from fusionai.backends.torch.card_matrix import CardMatrix, SpacedRows, look_up, multiply, multiply_experts
from fusionai.backends.torch.host import to_host, to_torch
from fusionai.backends.torch.packed_graph import PackedParameter, ProductWeight
from fusionai.backends.torch.paged_attention import FORMS, LayerCache
from fusionai.backends.torch.row_code import LINE, Field, Form, Unplanned
from fusionai.backends.torch.row_plan import RowPlan, plan_rows
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire.serving import ServeOptions

log = logging.getLogger(__name__)

BATCH_ROWS: Final = 128
"""Most rows computed at once: enough that products are not bound by memory; chosen."""
_KEYS: Final = 32
"""Keys that attention reads in one step; chosen."""
OF_LINES: Final[Mapping[str, Any]] = {"num_warps": 8, "enable_fp_fusion": False}
"""Settings of the compiler for `card_rows.lines`: rounding after each operation, as processors do."""
OF_ATTENTION: Final[Mapping[str, Any]] = {"KEYS": _KEYS, "num_stages": 1}
"""Constants and settings for `card_attention.attend`."""
_SHARE_KEYS: Final = 256
"""Fewest keys of a share, when the keys of a text are divided among groups of threads; chosen."""
_BUSY: Final = 256
"""Groups of threads that occupy a card; chosen."""
LANES: Final = (16, 32)
"""Queries of a tile: for few positions of each session or wide heads, and for prompts. More would not fit the memory
that a group of threads has on every card (64 KiB on AMD's)."""

WIDE_HEADS: Final = 128
"""Elements of a head from which on tiles are small."""

Ints = npt.NDArray[np.int32]
Params = Callable[[Sequence[str]], Mapping[str, Tensor | PackedParameter]]


def planned_for_card(
    graph: Graph, wanted: Sequence[str], uses: Mapping[int, ProductWeight], device: torch.device
) -> RowPlan | None:
    """Return the plan that computes the outputs `wanted` by kernels; None if operators must."""
    reason = card_launch.unused(device)
    if reason is None and uses:
        try:
            plan = plan_rows(graph, wanted, uses, tables=True)
            card_code(plan)
            return plan
        except Unplanned as problem:
            reason = str(problem)
    log.debug("stage of %s runs operator by operator: %s", graph.name, reason)
    return None


def needed_bytes(plan: RowPlan, options: ServeOptions, layers: Sequence[LayerShape]) -> int:
    """Return the most bytes that a program of this plan needs besides weights and caches."""
    rows = min(BATCH_ROWS, options.pass_tokens)
    widths = [shape.query_heads // shape.heads * (shape.value_width + 2) for shape in layers]
    shares = 2 * _BUSY * LANES[-1] * max(widths, default=0)
    return 4 * (plan.fixed + rows * plan.width + shares)


@dataclass(frozen=True, slots=True)
class _Sent:
    """What a pass needs on the card, as parts of one tensor: `places` of each name. `pages`: page ids in a row of the
    table."""

    whole: Tensor
    places: Mapping[str, tuple[int, int]]
    pages: int

    def ints(self, name: str) -> Tensor:
        begin, length = self.places[name]
        return self.whole[begin : begin + length]

    def floats(self, name: str) -> Tensor:
        return self.ints(name).view(torch.float32)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows [first, first + count) of a pass. `chosen`: how many of them are wanted, of which `before` are given before
    this batch. `spans`: the sessions' parts, with their number among the pass's."""

    first: int
    count: int
    chosen: int
    before: int
    number: int
    spans: tuple[tuple[int, RowSpan], ...]


class CardProgram:
    """A plan with its memory on a card. `values`: returns parameters as the interpreter takes them; all must be loaded.
    `caches`: node id of an attention -> its cache."""

    def __init__(
        self,
        plan: RowPlan,
        uses: Mapping[int, ProductWeight],
        values: Params,
        caches: Mapping[int, LayerCache],
        options: ServeOptions,
        device: torch.device,
    ) -> None:
        self._plan = plan
        self._device = device
        self._code: CardCode = card_code(plan)
        self._lines = to_torch(_sent_as("int32", self._code.code), device)
        self._rows = min(BATCH_ROWS, options.pass_tokens)
        self._memory = torch.zeros(plan.fixed + self._rows * plan.width, dtype=torch.float32, device=device)
        self._own = self._memory[plan.fixed :]
        self._every = torch.arange(self._rows, dtype=torch.int32, device=device)
        self._caches = [caches[node] for node in plan.attentions]
        self._tables = {
            launch.table: _plain(values, launch.table) for launch in self._code.launches if isinstance(launch, LookUp)
        }
        self._products: dict[int, CardMatrix] = {}
        for launch in self._code.launches:
            if isinstance(launch, Multiply):
                weight = uses[launch.node].weight
                held = values([weight])[weight]
                assert isinstance(held, PackedParameter)
                matrix = self._products[launch.line] = _matrix(held, launch.node)
                line = self._code.code[launch.line].tolist()
                columns, count = line[Field.DIMS : Field.DIMS + 2]
                known = line[Field.EXTRA + 2] if launch.experts else 1
                # The kernels check nothing themselves.
                assert (matrix.columns, matrix.count) == (known * columns, count)
        self._fill(values)

    def _fill(self, values: Params) -> None:
        numbers = np.zeros(self._plan.fixed, dtype=np.float32)
        for place, what in self._plan.constants.items():
            if not isinstance(what, str):
                numbers[place] = what
        if self._plan.fixed:
            self._memory[: self._plan.fixed].copy_(to_torch(_sent_as("float32", numbers), self._device))
        for place, what in self._plan.constants.items():
            if isinstance(what, str):
                plain = _plain(values, what)
                self._memory[place : place + plain.numel()].copy_(plain.detach().reshape(-1))

    @property
    def nbytes(self) -> int:
        """Bytes besides weights and caches."""
        return self._memory.nbytes + self._lines.nbytes

    def run(self, work: CheckedPass) -> dict[str, HostTensor]:
        """Return the wanted rows of a pass, [1, rows, ...] by meaning."""
        order = np.argsort(np.array(work.chosen, dtype=np.int64), kind="stable")
        chosen = [work.chosen[at] for at in order]
        batches = self._batches(work, chosen)
        with torch.inference_mode():
            sent = self._send(work, batches, chosen)
            made = torch.empty((len(chosen), self._code.given_width), dtype=torch.float32, device=self._device)
            for batch in batches:
                self._compute(batch, sent, made)
            whole = array_of(to_host(made))
        if (order != np.arange(len(order))).any():
            whole = whole[np.argsort(order)]
        results: dict[str, HostTensor] = {}
        for meaning, (place, floats) in self._code.given.items():
            _, shape = self._plan.outputs[meaning]
            own = np.ascontiguousarray(whole[:, place : place + floats]).reshape(1, len(chosen), *shape)
            results[meaning] = host_tensor("float32", own.shape, own.data)
        return results

    def _batches(self, work: CheckedPass, chosen: Sequence[int]) -> list[_Batch]:
        batches: list[_Batch] = []
        before = 0
        for first in range(0, work.positions, self._rows):
            end = min(work.positions, first + self._rows)
            own = sum(first <= row < end for row in chosen)
            spans = tuple(
                (number, span)
                for number, span in enumerate(work.spans)
                if span.first < end and first < span.first + span.length
            )
            if own or spans:
                batches.append(_Batch(first, end - first, own, before, len(batches), spans))
            before += own
        return batches

    def _send(self, work: CheckedPass, batches: Sequence[_Batch], chosen: Sequence[int]) -> _Sent:
        """Copy everything that the pass needs to the card, in one piece."""
        fed = np.zeros((work.positions, max(1, self._code.fed_width)), dtype=np.float32)
        for launch in self._code.launches:
            if isinstance(launch, LookUp):
                self._check_rows(launch, array_of(work.inputs[launch.index]))
        for name, (place, floats) in self._code.fed.items():
            fed[:, place : place + floats] = array_of(work.inputs[name])[0].reshape(work.positions, floats)
        parts: dict[str, Ints] = {"fed": fed.view(np.int32)}
        pages = max((len(span.pages) for span in work.spans), default=1) or 1
        table = np.zeros((max(1, len(work.spans)), pages), dtype=np.int32)
        for row, span in zip(table, work.spans, strict=False):
            row[: len(span.pages)] = span.pages
        parts["table"] = table
        parts["rings"] = np.array([max(0, span.ring) for span in work.spans] or [0], dtype=np.int32)
        for capacity in {cache.capacity for cache in self._caches}:
            parts[f"slots {capacity}"] = self._slots(work.spans, capacity)
        for number, batch in enumerate(batches):
            own = chosen[batch.before : batch.before + batch.chosen]
            parts[f"chosen {number}"] = np.array(own, dtype=np.int32) - batch.first
            for groups, lanes in {self._lanes(cache.shape, batch) for cache in self._caches}:
                parts[f"tiles {number} {groups} {lanes}"] = _tiles(batch, lanes // groups)
        places: dict[str, tuple[int, int]] = {}
        size = 0
        for name, part in parts.items():
            places[name] = size, part.size
            size += part.size + -part.size % 16
        whole = np.zeros(max(1, size), dtype=np.int32)
        for name, part in parts.items():
            whole[places[name][0] : places[name][0] + part.size] = part.reshape(-1)
        return _Sent(to_torch(_sent_as("int32", whole), self._device), places, pages)

    def _check_rows(self, launch: LookUp, numbers: npt.NDArray[Any]) -> None:
        known = self._tables[launch.table].shape[0]
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < known:
            outside = next(int(one) for one in numbers.reshape(-1) if not 0 <= one < known)
            raise ExecutionError(f"{launch.table} has {known} rows, row {outside} was looked up.")

    def _slots(self, spans: Sequence[RowSpan], capacity: int) -> Ints:
        """Return each row's place in pages, or in rings of `capacity` positions."""
        size = self._caches[0].page_tokens
        if capacity:
            slots = [span.ring * capacity + at % capacity for span in spans for at in range(span.start, span.end)]
        else:
            slots = [span.pages[at // size] * size + at % size for span in spans for at in range(span.start, span.end)]
        return np.array(slots, dtype=np.int32)

    def _lanes(self, shape: LayerShape, batch: _Batch) -> tuple[int, int]:
        """Return (queries that share a key head, lanes of a tile)."""
        groups = shape.query_heads // shape.heads
        few = all(span.length * groups <= LANES[0] for _, span in batch.spans)
        lanes = LANES[0] if few or _wide(shape) > WIDE_HEADS else LANES[1]
        return groups, max(lanes, _power(groups))

    def _compute(self, batch: _Batch, sent: _Sent, made: Tensor) -> None:
        chosen = sent.ints(f"chosen {batch.number}")
        for at, launch in enumerate(self._code.launches):
            # After the last attention only the wanted rows are computed.
            late = at >= self._code.late
            rows, places = (batch.chosen, chosen) if late else (batch.count, self._every)
            if not rows:
                return
            match launch:
                case Run():
                    self._run(launch, batch, sent, made, (places, rows))
                case Multiply():
                    self._multiply(launch, places, rows)
                case LookUp():
                    line = self._code.code[launch.line].tolist()
                    x, y = (SpacedRows(self._own[line[field] :], self._plan.width) for field in (Field.B, Field.OUT))
                    look_up(self._tables[launch.table], x, y, places, rows)
                case Attend():
                    self._attend(launch, batch, sent)

    def _run(self, run: Run, batch: _Batch, sent: _Sent, made: Tensor, rows: tuple[Tensor, int]) -> None:
        from fusionai.backends.torch import card_rows as kernels

        plan, places = self._plan, self._memory
        keys, values, slots, form, wide = places, places, sent.whole, int(Form.FP32), _NARROWEST
        if self._caches:
            # Runs that keep nothing take a cache too, so that fewer kernels are compiled.
            cache = self._caches[max(0, run.kept)]
            keys, values = cache.vectors
            slots = sent.ints(f"slots {cache.capacity}")
            form, wide = int(FORMS[cache.dtype]), _wide(cache.shape)
        given = made[batch.before :] if batch.before else made
        card_launch.launch(
            kernels.lines, (rows[1], run.parts), self._lines, run.first, run.count, places, plan.fixed, plan.width,
            rows[0], batch.first, sent.floats("fed"), self._code.fed_width, given, self._code.given_width,
            keys, values, slots, FORM=form, WIDE=wide, **OF_LINES,
        )  # fmt: skip

    def _multiply(self, launch: Multiply, places: Tensor, rows: int) -> None:
        line = self._code.code[launch.line].tolist()
        width = self._plan.width
        x, y = self._own[line[Field.A] :], self._own[line[Field.OUT] :]
        matrix = self._products[launch.line]
        if launch.experts:
            chosen, known = line[Field.DIMS + 2], line[Field.EXTRA + 2]
            experts = chosen, line[Field.A_STRIDES], known
            indices = self._own[line[Field.B] :]
            multiply_experts(matrix, SpacedRows(x, width), SpacedRows(y, width), places, rows, indices, experts)
            return
        bias = line[Field.EXTRA + 2]
        added = None if bias < 0 else self._memory[bias:]
        multiply(matrix, SpacedRows(x, width), SpacedRows(y, width), places, rows, added)

    def _attend(self, launch: Attend, batch: _Batch, sent: _Sent) -> None:
        from fusionai.backends.torch import card_attention as kernels

        cache = self._caches[launch.index]
        shape, window = cache.shape, cache.window or 0
        groups, lanes = self._lanes(shape, batch)
        tiles = sent.ints(f"tiles {batch.number} {groups} {lanes}")
        count = tiles.shape[0] // _TILE
        longest = max(_keys_of(span, batch, cache.window) for _, span in batch.spans)
        shares = max(1, min(-(-longest // _SHARE_KEYS), _BUSY // (count * shape.heads)))
        chunk = -(-longest // shares)
        chunk += -chunk % _KEYS
        line = self._lines.view(-1)[launch.line * LINE :]
        keys, values = cache.vectors
        parts = self._memory
        if shares > 1:
            floats = shares * batch.count * shape.query_heads * (shape.value_width + 2)
            parts = torch.empty(floats, dtype=torch.float32, device=self._device)
        memory = self._memory, self._plan.fixed, self._plan.width
        table = sent.ints("table")
        card_launch.launch(
            kernels.attend, (count, shape.heads, shares), *memory, line, tiles, table, sent.pages, cache.page_tokens,
            sent.ints("rings"), cache.capacity, window, keys, values, parts, chunk, batch.count, int(shares > 1),
            FORM=int(FORMS[cache.dtype]), LANES=lanes, WIDE=_wide(shape), PRECISION=card_launch.precision(),
            **OF_ATTENTION,
        )  # fmt: skip
        if shares > 1:
            card_launch.launch(
                kernels.combine, (batch.count, shape.query_heads), *memory, line, parts, batch.count, shares,
                WIDE=_wide(shape),
            )  # fmt: skip


_NARROWEST: Final = 64
"""Elements that a vector of a cache takes at least, so that fewer kernels are compiled; chosen."""
_TILE: Final = 4
"""Numbers that describe a tile of attention."""


def _tiles(batch: _Batch, most: int) -> Ints:
    """Return, for tiles of at most `most` positions of one session, the first row of the batch, the rows, the session's
    number and the first position."""
    tiles: list[tuple[int, int, int, int]] = []
    for number, span in batch.spans:
        first = max(span.first, batch.first)
        end = min(span.first + span.length, batch.first + batch.count)
        for row in range(first, end, most):
            tiles.append((row - batch.first, min(most, end - row), number, span.start + row - span.first))
    return np.array(tiles, dtype=np.int32)


def _keys_of(span: RowSpan, batch: _Batch, window: int | None) -> int:
    """Return the most keys that a tile of the session's rows in this batch may see."""
    until = min(span.end, span.start + batch.first + batch.count - span.first)
    if window is None:
        return until
    start = max(span.start, span.start + batch.first - span.first)
    return until - first_key(start, window)


def _plain(values: Params, name: str) -> Tensor:
    held = values([name])[name]
    plain = held.plain if isinstance(held, PackedParameter) else held
    assert plain is not None
    return plain.detach().contiguous()


def _matrix(held: PackedParameter, node: int) -> CardMatrix:
    """Return the matrix of a product, or those of all experts below each other."""
    found = [product.product for product in held.packed[node]]
    first = found[0]
    assert isinstance(first, CardMatrix)
    return first if first.stack is None else first.stack


def _wide(shape: LayerShape) -> int:
    return max(_NARROWEST, _power(max(shape.key_width, shape.value_width)))


def _power(number: int) -> int:
    """Return the smallest power of two that is not below a number."""
    return 1 << (number - 1).bit_length()


def _sent_as(dtype: str, array: npt.NDArray[Any]) -> HostTensor:
    own = np.ascontiguousarray(array)
    return host_tensor(dtype, own.shape, own.data)
