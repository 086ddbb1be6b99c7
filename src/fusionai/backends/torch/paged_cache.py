"""Keys and values of a serving stage: pages shared by all sessions, and rings for layers with a window. Owns the
layout.

Once per pass, a `PassLayout` is computed: the slot of each row, and where each session's keys are. Layers then copy
rows in and read a session's keys as one tensor, without a copy if its pages are consecutive. Neighbours: `page_table`
assigns pages, `paged_attention` reads, `serving` allocates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from fusionai.backends.serving.page_table import CACHE_NAMES, LayerShape, RowSpan, first_key
from fusionai.backends.torch.host import DTYPES
from fusionai.wire.serving import ServeOptions

ALIGNMENT_BYTES: Final = 64
"""Cache-line alignment. Matrix kernels may round differently on memory with another alignment."""


@dataclass(frozen=True, slots=True)
class PassLayout:
    """Destinations of a pass's rows. `slots` [rows]: positions in the pages; `ring_slots`: window -> positions in the
    rings. `runs`: per span the page ids to gather, None if they are consecutive."""

    spans: tuple[RowSpan, ...]
    page_tokens: int
    slots: torch.Tensor | None
    ring_slots: Mapping[int, torch.Tensor]
    runs: tuple[torch.Tensor | None, ...]


def lay_out(
    spans: tuple[RowSpan, ...], options: ServeOptions, *, paged: bool, windows: Mapping[int, int], device: torch.device
) -> PassLayout:
    size = options.page_tokens
    slots: list[int] = []
    runs: list[torch.Tensor | None] = []
    if paged:
        for span in spans:
            slots += [span.pages[position // size] * size + position % size for position in range(span.start, span.end)]
            consecutive = span.pages == tuple(range(span.pages[0], span.pages[0] + len(span.pages)))
            runs.append(None if consecutive else torch.tensor(span.pages, device=device))
    rings = {
        window: torch.tensor(
            [span.ring * capacity + at % capacity for span in spans for at in range(span.start, span.end)],
            device=device,
        )
        for window, capacity in windows.items()
    }
    return PassLayout(spans, size, torch.tensor(slots, device=device) if paged else None, rings, tuple(runs))


class LayerCache:
    """Keys and values of one attention node."""

    def __init__(self, shape: LayerShape, options: ServeOptions, device: torch.device) -> None:
        self.shape = shape
        self.page_tokens = options.page_tokens
        self.dtype = DTYPES[CACHE_NAMES[options.cache]]
        self.window = shape.window
        blocks, per_block = shape.blocks(options)
        self.capacity = 0 if shape.window is None else per_block
        widths = (shape.key_width, shape.value_width)
        # Zeroed, because a hostile caller may have a page read before it was written: it must not show old memory.
        self._blocks = [
            torch.zeros((blocks, per_block, shape.heads, width), dtype=self.dtype, device=device) for width in widths
        ]
        self._rows = [block.view(blocks * per_block, shape.heads, -1) for block in self._blocks]
        self._heads_first = [rows.transpose(0, 1)[None] for rows in self._rows]

    @property
    def nbytes(self) -> int:
        return sum(block.untyped_storage().nbytes() for block in self._blocks)

    @property
    def addresses(self) -> tuple[int, int]:
        """Addresses of the keys and of the values, both [positions, heads, width]."""
        keys, values = (rows.data_ptr() for rows in self._rows)
        return keys, values

    def write(self, layout: PassLayout, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values of the pass, each [1, heads, rows, width]."""
        slots = layout.slots if self.window is None else layout.ring_slots[self.window]
        assert slots is not None
        for rows, new in zip(self._rows, (keys, values), strict=True):
            given = new[0].transpose(0, 1)
            rows.index_copy_(0, slots, given if given.dtype == rows.dtype else given.to(rows.dtype))

    def read(self, layout: PassLayout, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (keys, values), float32 [1, heads, positions, width], that span `number` may see."""
        span = layout.spans[number]
        if self.window is not None:
            keys, values = (self._ringed(half, span) for half in self._heads_first)
        elif (pages := layout.runs[number]) is None:
            first = span.pages[0] * layout.page_tokens
            keys, values = (cut(half, first, first + span.end) for half in self._heads_first)
        else:
            keys, values = (
                block.index_select(0, pages).view(-1, *block.shape[2:])[: span.end].transpose(0, 1)[None]
                for block in self._blocks
            )
        return (keys, values) if keys.dtype == torch.float32 else (keys.float(), values.float())

    def _ringed(self, half: torch.Tensor, span: RowSpan) -> torch.Tensor:
        first = first_key(span.start, self.window)
        base = span.ring * self.capacity
        begin, end = first % self.capacity, (span.end - 1) % self.capacity + 1
        if begin < end:
            return cut(half, base + begin, base + end)
        late, early = half[0, :, base + begin : base + self.capacity], half[0, :, base : base + end]
        return torch.cat([late.transpose(0, 1), early.transpose(0, 1)]).transpose(0, 1)[None]


def cut(rows: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Return positions `first` to `end` of [1, heads, positions, width], aligned in memory as if they were alone."""
    if first == 0 and end == rows.shape[2]:
        return rows
    part = rows.narrow(2, first, end - first)
    # Positions are contiguous, so all kernels give the same bits if the first one is aligned.
    if first and part.storage_offset() * part.element_size() % ALIGNMENT_BYTES:
        part = part[0].transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)[None]
    return part
