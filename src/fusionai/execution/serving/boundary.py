"""The values that travel along a serving pipeline, stage by stage, derived once from the partition, and the rows of
them that stages retain.

A pass goes from each stage to the next, so a value that only a later stage needs travels through the stages between.
Every value has one row per position: [1, positions, ...].

Rows that a stage sent on are kept by cache page, so that the next stage's cache can be recomputed. A page is
overwritten when the driver assigns it to other positions; asking for rows that are no longer here raises an error. The
driver numbers pages for all stages alike, so no more rows are kept than there are pages.

`packed` makes the passes that rebuild caches. A session is cut at the same positions as if it were alone, so that its
bits do not depend on the other sessions. The pieces are packed together, because a pass costs more than its positions
alone.

`serving.job` makes boundaries and sends them in `Load`; `execution.serving.stage` follows them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from fusionai.coordination.serving.together import between, pieces
from fusionai.ir.partition import FEED, Partition
from fusionai.ir.schema import Graph
from fusionai.ir.serving import FROM_SEGMENTS
from fusionai.ir.shapes import bounds
from fusionai.primitives.errors import ExecutionError, GraphError
from fusionai.primitives.tensors import ITEMSIZE_BYTES, HostTensor
from fusionai.wire.messages import Segment, ServeOptions

TABLES_BEYOND: Final = 64
"""Page tables that may be kept beyond two for each session (chosen): those of sessions that have just ended."""
PAGE_NUMBER_BYTES: Final = array("I").itemsize
LARGEST_ROW: Final = 2**24
"""Largest number of elements accepted in one row of a received boundary (chosen)."""


class RowSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A value that travels, of shape [1, positions, *row]."""

    name: str
    dtype: str
    row: tuple[int, ...] = ()

    @property
    def row_bytes(self) -> int:
        return ITEMSIZE_BYTES[self.dtype] * prod(self.row)

    def check(self, tensor: HostTensor, rows: int) -> str | None:
        """Return what is wrong with `tensor` as `rows` rows of this value; None if nothing is."""
        if tensor.dtype == self.dtype and tensor.shape == (1, rows, *self.row):
            return None
        shape = [1, rows, *self.row]
        return f"expected {self.name} as {self.dtype}{shape}, got {tensor.dtype}{list(tensor.shape)}"


class ServingBoundary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`receives`: values from the previous stage (the first stage receives from the driver). `sends`: values for the
    next stage, computed here or passed on. `outputs`: outputs the driver may ask for, e.g. `logits`."""

    stage: int
    receives: tuple[RowSpec, ...]
    sends: tuple[RowSpec, ...]
    outputs: tuple[str, ...] = ()

    def made(self, graph: Graph) -> tuple[str, ...]:
        """Return the values of `sends` that this stage computes itself."""
        return tuple(spec.name for spec in self.sends if spec.name in graph.outputs)

    def check(self, graph: Graph) -> None:
        """Raise `GraphError` if this boundary does not fit `graph`. It may come from the network and name anything."""
        place = f"the boundary of stage {self.stage}"
        received, sent = [spec.name for spec in self.receives], [spec.name for spec in self.sends]
        if len({*received}) != len(received) or len({*sent}) != len(sent):
            raise GraphError(f"{place} names a value twice.")
        for spec in (*self.receives, *self.sends):
            if spec.dtype not in ITEMSIZE_BYTES or any(size < 0 for size in spec.row) or prod(spec.row) > LARGEST_ROW:
                raise GraphError(
                    f"{place} has {spec.name} with an invalid row of {spec.dtype}{list(spec.row)} per position."
                )
        for what, named, known in (
            ("inputs of the stage", {*graph.inputs} - FROM_SEGMENTS, {*received}),
            ("values to send", {*sent}, {*graph.outputs, *received}),
            ("outputs", {*self.outputs}, {*graph.outputs}),
        ):
            if unknown := named - known:
                some = ", ".join(sorted(unknown)[:5])
                raise GraphError(f"{place} does not match the graph's {what}: {some}.")


def serving_boundaries(partition: Partition) -> tuple[ServingBoundary, ...]:
    """Return one boundary per stage, in order. Raises `GraphError` for a value that has no row per position."""
    count = len(partition.stages)
    crossing: list[dict[str, RowSpec]] = [{} for _ in range(count + 1)]
    """Values that enter stage i."""
    for route in partition.routes:
        if route.value in FROM_SEGMENTS:
            continue
        graph = partition.stages[route.consumers[0]].graph
        spec = _row_spec(graph, route.value)
        first = 0 if route.producer == FEED else route.producer + 1
        for stage in range(first, max(route.consumers) + 1):
            crossing[stage][route.value] = spec
    sent = {route.value for route in partition.routes}
    return tuple(
        ServingBoundary(
            stage=stage.stage,
            receives=_ordered(crossing[stage.stage]),
            sends=_ordered(crossing[stage.stage + 1]),
            outputs=tuple(
                sorted(
                    meaning for meaning, value in stage.graph.outputs.items() if meaning != value or value not in sent
                )
            ),
        )
        for stage in partition.stages
    )


def _ordered(specs: dict[str, RowSpec]) -> tuple[RowSpec, ...]:
    return tuple(specs[name] for name in sorted(specs))


def _row_spec(graph: Graph, value: str) -> RowSpec:
    """Return the value's row; its sizes must not depend on batch and positions."""
    spec = graph.values[value]
    if len(spec.shape) >= 2 and isinstance(spec.shape[1], str):
        sizes = [bounds(size, graph.symbols) for size in spec.shape[2:]]
        if all(smallest == largest for smallest, largest in sizes):
            return RowSpec(value, spec.dtype, tuple(largest for _, largest in sizes))
    raise GraphError(
        f"value {value} of shape {list(spec.shape)} crosses between stages but has no row per position.",
        hint="Cut this model at other places, or serve it on one machine.",
    )


Bytes = npt.NDArray[np.uint8]


class RetainedRows:
    """Retained rows of one stage. `specs`: the values sent on. Rows are kept as bytes, since they are not computed
    with."""

    def __init__(self, specs: Sequence[RowSpec], options: ServeOptions) -> None:
        self._specs = tuple(specs)
        self._page_tokens = options.page_tokens
        self._most_pages = options.pages
        self._most_tables = 2 * options.sessions + TABLES_BEYOND
        self._tables: dict[int, array[int]] = {}
        """Session -> its pages, in order of positions."""
        self._entries = 0
        """Length of all tables together."""
        self._pages: dict[int, tuple[Bytes, ...]] = {}
        """Page -> one array per value, [page_tokens, bytes of a row]."""
        self._filled: dict[int, int] = {}
        """Page -> number of valid rows, from the page's first position."""

    @staticmethod
    def capacity_bytes(specs: Iterable[RowSpec], pages: int, page_tokens: int) -> int:
        """Return the largest number of bytes that will be kept."""
        return pages * page_tokens * sum(spec.row_bytes for spec in specs)

    def forget(self, sessions: Iterable[int]) -> None:
        """Forget these sessions. Their pages stay until they are overwritten, because other sessions may share them."""
        for session in sessions:
            self._entries -= len(self._tables.pop(session, ()))

    def clear(self) -> None:
        for kept in (self._tables, self._pages, self._filled):
            kept.clear()
        self._entries = 0

    def place(self, segment: Segment) -> None:
        """Adopt the pages that a segment brings."""
        if segment.session not in self._tables and len(self._tables) >= self._most_tables:
            raise ExecutionError(f"the rows of {len(self._tables)} sessions are retained here; that is the limit.")
        table = self._tables.setdefault(segment.session, array("I"))
        if segment.first_page > len(table):
            raise ExecutionError(
                f"session {segment.session} has {len(table)} pages here, the segment's start at {segment.first_page}."
            )
        self._check(segment.session, segment.first_page + len(segment.pages), segment.pages)
        before = len(table)
        table[segment.first_page :] = array("I", segment.pages)
        self._entries += len(table) - before

    def keep(self, segments: Sequence[Segment], tensors: Mapping[str, HostTensor]) -> None:
        """Keep the packed rows of all segments, as sent. Raises `ExecutionError` if a segment has too few pages."""
        rows = [_rows(tensors[spec.name], spec) for spec in self._specs]
        taken = 0
        for segment in segments:
            self.place(segment)
            done = 0
            while done < segment.length:
                page, offset = self._at(segment.session, self._tables[segment.session], segment.start + done)
                count = min(self._page_tokens - offset, segment.length - done)
                if page not in self._pages:
                    self._pages[page] = tuple(
                        np.empty((self._page_tokens, spec.row_bytes), np.uint8) for spec in self._specs
                    )
                for kept, new in zip(self._pages[page], rows, strict=True):
                    kept[offset : offset + count] = new[taken : taken + count]
                # Rows at later positions of the page belong to other tokens or another session now.
                self._filled[page] = offset + count if offset <= self._filled.get(page, 0) else 0
                done += count
                taken += count

    def _check(self, session: int, count: int, pages: Sequence[int]) -> None:
        """Raise `ExecutionError` for a table of `count` pages, or pages, that the stage can't have. Otherwise a page
        named many times would be copied many times."""
        if count > self._most_pages or max(pages, default=0) >= self._most_pages:
            raise ExecutionError(
                f"the stage has {self._most_pages} pages; session {session} would have {count}, up to number "
                f"{max(pages, default=0)}."
            )

    def rows(self, segments: Sequence[Segment], pages: Sequence[int] | None = None) -> dict[str, HostTensor]:
        """Return the segments' positions one after the other, as they were sent. `pages`: the page table to use instead
        of the session's own. Raises `ExecutionError` for positions not kept (any more)."""
        parts: list[list[Bytes]] = [[] for _ in self._specs]
        if pages is not None:
            self._check(segments[0].session, len(pages), pages)
        for segment in segments:
            table = self._tables.get(segment.session, ()) if pages is None else pages
            done = 0
            while done < segment.length:
                page, offset = self._at(segment.session, table, segment.start + done)
                count = min(self._page_tokens - offset, segment.length - done)
                if self._filled.get(page, 0) < offset + count:
                    raise ExecutionError(
                        f"position {segment.start + done} of session {segment.session} is not retained here."
                    )
                for part, kept in zip(parts, self._pages[page], strict=True):
                    part.append(kept[offset : offset + count])
                done += count
        length = sum(segment.length for segment in segments)
        return {
            spec.name: HostTensor(spec.dtype, (1, length, *spec.row), np.concatenate(part).reshape(-1).data)
            for spec, part in zip(self._specs, parts, strict=True)
        }

    def _at(self, session: int, table: Sequence[int], position: int) -> tuple[int, int]:
        index, offset = divmod(position, self._page_tokens)
        if index >= len(table):
            raise ExecutionError(f"session {session} has no page for position {position} here.")
        return table[index], offset

    @property
    def row_bytes(self) -> int:
        """Bytes of the retained values of one position."""
        return sum(spec.row_bytes for spec in self._specs)

    @property
    def tables_bytes(self) -> int:
        return self._entries * PAGE_NUMBER_BYTES

    @property
    def held_bytes(self) -> int:
        return len(self._pages) * self._page_tokens * self.row_bytes


def _rows(tensor: HostTensor, spec: RowSpec) -> Bytes:
    return np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape[1], spec.row_bytes)


def packed(segments: Iterable[Segment], limit: int) -> list[tuple[Segment, ...]]:
    """Return passes of at most `limit` positions, in order. No pass has two pieces of one session."""
    passes: list[tuple[Segment, ...]] = []
    pack: list[Segment] = []
    room = limit
    for segment in segments:
        for part in _pieces(segment, limit):
            if part.length > room:
                passes.append(tuple(pack))
                pack, room = [], limit
            pack.append(part)
            room -= part.length
    return [*passes, tuple(pack)] if pack else passes


def _pieces(segment: Segment, limit: int) -> list[Segment]:
    """Cut a segment into pieces of at most `limit` positions. The first piece carries the pages."""
    found: list[Segment] = []
    for start, end in pieces(segment.together, segment.start, segment.start + segment.length, limit):
        first, pages = (segment.first_page + len(segment.pages), ()) if found else (segment.first_page, segment.pages)
        together = between(segment.together, start, end)
        found.append(Segment(segment.session, start, end - start, first, pages, segment.adapter, together=together))
    return found
