"""Keys and values of a serving stage as numpy arrays in host memory, for backends whose framework has no caches.

Layout: consecutive positions, [positions, heads, width], addressed through the session table's pages and rings.
Reading copies the positions that a session may see, as float32. Neighbours: `layer_shapes` says which caches a stage
needs, `host_attention` reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fusionai.backends.layer_shapes import LayerShape, first_key, ring_tokens
from fusionai.backends.paged_table import Span
from fusionai.wire.serving import CacheFormat, ServeOptions

Array = npt.NDArray[Any]
_CODED: Final[dict[CacheFormat, Any]] = {"fp32": np.float32, "bf16": np.uint16, "fp16": np.float16}
"""numpy has no bfloat16: its values are stored as their bits."""


class HostCache:
    """Key and value cache of one attention node."""

    def __init__(self, shape: LayerShape, options: ServeOptions) -> None:
        self.window = shape.window
        self._format: CacheFormat = options.cache
        self._page_tokens = options.page_tokens
        self._capacity = 0 if shape.window is None else ring_tokens(shape.window, options)
        count = options.pages * options.page_tokens if shape.window is None else options.sessions * self._capacity
        widths = (shape.key_width, shape.value_width)
        # Zeroed, because a hostile caller may have a page read before it was written: it must not show old memory.
        self._halves = [np.zeros((count, shape.heads, width), _CODED[options.cache]) for width in widths]

    @property
    def nbytes(self) -> int:
        return sum(half.nbytes for half in self._halves)

    def write(self, spans: Sequence[Span], keys: Array, values: Array) -> None:
        """Store keys and values of a pass, float32 [positions, heads, width] each."""
        for span in spans:
            slots = self._slots(span, span.start)
            for half, new in zip(self._halves, (keys, values), strict=True):
                half[slots] = _coded(new[span.first : span.first + span.length], self._format)

    def read(self, span: Span) -> tuple[Array, Array]:
        """Return (keys, values), float32 [positions, heads, width], from the earliest position that any position of the
        span sees."""
        slots = self._slots(span, first_key(span.start, self.window))
        keys, values = (_decoded(half[slots], self._format) for half in self._halves)
        return keys, values

    def _slots(self, span: Span, first: int) -> npt.NDArray[np.int64]:
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


def _decoded(values: Array, form: CacheFormat) -> Array:
    match form:
        case "fp32":
            return values
        case "fp16":
            return values.astype(np.float32)
        case "bf16":
            return (values.astype(np.uint32) << 16).view(np.float32)
