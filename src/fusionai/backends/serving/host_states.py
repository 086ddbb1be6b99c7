"""Nodes that carry a state along a text, in numpy, position by position, for frameworks without caches.

The same arithmetic as `backends.torch.carried_states` has for single positions. A session's positions go one after the
other from its state, so its bits depend neither on other sessions nor on the length of its pieces. Neighbours:
`ir.states` finds these nodes, `page_table` says which slot holds which state, `parted` calls this between its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fusionai.backends.serving.page_table import RowSpan
from fusionai.ir.states import STATES_PER_SESSION, StateShape
from fusionai.primitives.errors import ExecutionError
from fusionai.wire.serving import ServeOptions

Array = npt.NDArray[Any]


class HostStates:
    """The states of one node, of all sessions."""

    def __init__(self, shape: StateShape, options: ServeOptions) -> None:
        self.shape = shape
        self._slots = np.zeros((options.sessions * STATES_PER_SESSION, *shape.shape), np.float32)

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes

    def run(self, spans: Sequence[RowSpan], operands: Sequence[Array | None]) -> Array:
        """Return the node's result at the rows of the pass, cut to them for a convolution. `operands`: the node's
        tensors in the order of its operator, None for one that is absent."""
        tensors = [None if one is None else np.ascontiguousarray(one, np.float32) for one in operands]
        step = {"window": self._convolve, "scan": self._scan, "matrix": self._attend}[self.shape.kind]
        return step(spans, *tensors)

    def copy_place(self, source: int, target: int) -> None:
        places = self._slots.reshape(-1, STATES_PER_SESSION, *self.shape.shape)
        places[target] = places[source]

    def _before(self, span: RowSpan) -> Array:
        return np.zeros(self.shape.shape, np.float32) if span.state < 0 else self._slots[span.state]

    def _convolve(self, spans: Sequence[RowSpan], x: Array, weight: Array, bias: Array | None) -> Array:
        """x [1, channels, rows], weight [channels, 1, size]; returns [1, channels, rows]."""
        channels, behind = self.shape.shape
        self._require(x.shape[:2] == (1, channels) and weight.shape == (channels, 1, behind + 1))
        made = np.empty_like(x)
        for span in spans:
            rows = slice(span.first, span.first + span.length)
            seen = np.concatenate([self._before(span), x[0, :, rows]], axis=1)
            total = seen[:, : span.length] * weight[:, 0, :1]
            for at in range(1, behind + 1):
                total += seen[:, at : at + span.length] * weight[:, 0, at : at + 1]
            made[0, :, rows] = total if bias is None else total + bias[:, None]
            self._slots[span.next_state] = seen[:, span.length :]
        return made

    def _scan(self, spans: Sequence[RowSpan], decay: Array, x: Array) -> Array:
        self._require(decay.shape == x.shape == (1, x.shape[1], *self.shape.shape))
        made = np.empty_like(x)
        for span in spans:
            state = self._before(span)
            for row in range(span.first, span.first + span.length):
                state = made[0, row] = decay[0, row] * state + x[0, row]
            self._slots[span.next_state] = state
        return made

    def _attend(
        self, spans: Sequence[RowSpan], query: Array, key: Array, value: Array, decay: Array, beta: Array | None
    ) -> Array:
        heads, width, value_width = self.shape.shape
        rows = value.shape[1]
        self._require(query.shape == key.shape == (1, rows, heads, width))
        self._require(value.shape == (1, rows, heads, value_width) and decay.shape in (key.shape, key.shape[:3]))
        fading = np.exp(decay[0])[..., None] if decay.ndim == key.ndim else np.exp(decay[0])[..., None, None]
        made = np.empty_like(value)
        for span in spans:
            state = self._before(span)
            for row in range(span.first, span.first + span.length):
                state = state * fading[row]
                taken = value[0, row]
                if beta is not None:
                    held = (key[0, row, :, :, None] * state).sum(axis=1)
                    taken = (taken - held) * beta[0, row, :, None]
                state = state + key[0, row, :, :, None] * taken[:, None]
                made[0, row] = (query[0, row, :, :, None] * state).sum(axis=1)
            self._slots[span.next_state] = state
        return made

    def _require(self, fits: bool) -> None:
        if not fits:
            raise ExecutionError(f"node {self.shape.node}: its operands don't fit a state of {list(self.shape.shape)}.")
