"""Rows that a stage sent on, kept by cache page, from which the next stage's cache can be recomputed.

A page is overwritten when the driver assigns it to other positions; asking for rows that are no longer here raises an
error. The driver numbers pages for all stages alike, so no more rows are kept than there are pages.

`packed` makes the passes that rebuild caches. A session is cut at the same positions as if it were alone, so that its
bits do not depend on the other sessions. The pieces are packed together, because a pass costs more than its positions
alone.

Used by `execution.serving.stage`; `serving.driver` packs tokens with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fusionai.execution.serving.boundary import RowSpec
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.messages import Segment

Bytes = npt.NDArray[np.uint8]


class RetainedRows:
    """Retained rows of one stage. `specs`: the values sent on. Rows are kept as bytes, since they are not computed
    with."""

    def __init__(self, specs: Sequence[RowSpec], page_tokens: int) -> None:
        self._specs = tuple(specs)
        self._page_tokens = page_tokens
        self._tables: dict[int, list[int]] = {}
        """Session -> its pages, in order of positions."""
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
            self._tables.pop(session, None)

    def clear(self) -> None:
        for kept in (self._tables, self._pages, self._filled):
            kept.clear()

    def place(self, segment: Segment) -> None:
        """Adopt the pages that a segment brings."""
        table = self._tables.setdefault(segment.session, [])
        if segment.first_page > len(table):
            raise ExecutionError(
                f"session {segment.session} has {len(table)} pages here, the segment's start at {segment.first_page}."
            )
        table[segment.first_page :] = segment.pages

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

    def rows(self, segments: Sequence[Segment], pages: Sequence[int] | None = None) -> dict[str, HostTensor]:
        """Return the segments' positions one after the other, as they were sent. `pages`: the page table to use instead
        of the session's own. Raises `ExecutionError` for positions not kept (any more)."""
        parts: list[list[Bytes]] = [[] for _ in self._specs]
        for segment in segments:
            table = self._tables.get(segment.session, []) if pages is None else pages
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
    def held_bytes(self) -> int:
        return len(self._pages) * self._page_tokens * sum(spec.row_bytes for spec in self._specs)


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
    pieces: list[Segment] = []
    for done in range(0, segment.length, limit):
        length = min(limit, segment.length - done)
        first, pages = (segment.first_page + len(segment.pages), ()) if done else (segment.first_page, segment.pages)
        pieces.append(Segment(segment.session, segment.start + done, length, first, pages, segment.adapter))
    return pieces
