"""Nodes that carry a state along a text, with the states of many sessions: one short convolution, two kinds of scans.

Each session of a pass is computed by itself, from its state before its first position, so its bits do not depend on the
others. Scans go position by position; linear attention goes by tiles that end at multiples of `TILE_POSITIONS`, and
position by position for a few positions after others. So prompt pieces that end at such multiples give the same bits
whatever their lengths. Arithmetic is float32.

Neighbours: `ir.states` finds these nodes, `page_table` says which slot holds which state, `semantic` has the same
operators for whole texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusionai.backends.serving.page_table import RowSpan, one_by_one
from fusionai.backends.torch.paged_attention import tiles
from fusionai.backends.torch.semantic import carried_attention
from fusionai.ir.states import STATES_PER_SESSION, StateShape
from fusionai.primitives.errors import ExecutionError
from fusionai.wire.serving import ServeOptions


class NodeStates:
    """The states of one node, of all sessions."""

    def __init__(self, shape: StateShape, options: ServeOptions, device: torch.device) -> None:
        self.shape = shape
        slots = options.sessions * STATES_PER_SESSION
        self._slots = torch.zeros((slots, *shape.shape), dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        return self._slots.untyped_storage().nbytes()

    def copy_place(self, source: int, target: int) -> None:
        places = self._slots.unflatten(0, (-1, STATES_PER_SESSION))
        places[target] = places[source]

    def before(self, span: RowSpan) -> Tensor:
        """Return the state before the span."""
        return self._slots.new_zeros(self.shape.shape) if span.state < 0 else self._slots[span.state]

    def keep(self, span: RowSpan, state: Tensor) -> None:
        """Store the state after the span."""
        self._slots[span.next_state] = state


def kernel(
    shape: StateShape, states: Callable[[], NodeStates], spans: Callable[[], Sequence[RowSpan]]
) -> Callable[..., Tensor]:
    """Return the function to call instead of the node's operator. `spans`: those of the pass being computed."""
    compute = {"window": _convolution, "scan": _scan, "matrix": _linear_attention}[shape.kind]

    def run(*args: Any, **kwargs: Any) -> Tensor:
        return compute(states(), spans(), *args, **kwargs)

    return run


def _convolution(
    states: NodeStates, spans: Sequence[RowSpan], x: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any
) -> Tensor:
    """x [1, channels, rows], weight [channels, 1, size]; returns [1, channels, rows + size - 1], as the operator does,
    whose last columns no node reads."""
    channels, behind = states.shape.shape
    _require(x.shape[:2] == (1, channels) and weight.shape == (channels, 1, behind + 1), x, weight)
    _require(bias is None or bias.shape == (channels,), x, bias)
    factors = weight[:, 0, :, None].unbind(1)
    pieces: list[Tensor] = []
    for span in spans:
        rows = x[0, :, span.first : span.first + span.length]
        seen = torch.cat([states.before(span), rows], dim=1)
        # Products and sums are rounded one by one: the same bits at every position.
        made = seen[:, : span.length] * factors[0]
        for at in range(1, behind + 1):
            made += seen[:, at : at + span.length] * factors[at]
        pieces.append(made if bias is None else made.add_(bias[:, None]))
        states.keep(span, seen[:, span.length :])
    return torch.cat([*pieces, x.new_zeros(channels, behind)], dim=1)[None]


def _scan(states: NodeStates, spans: Sequence[RowSpan], decay: Tensor, x: Tensor) -> Tensor:
    """decay, x and the result [1, rows, ...]."""
    _require(decay.shape == x.shape and x.shape[2:] == states.shape.shape and x.shape[0] == 1, decay, x)
    made = torch.empty_like(x, memory_format=torch.contiguous_format)
    for span in spans:
        state = states.before(span)
        for row in range(span.first, span.first + span.length):
            state = torch.add(torch.mul(decay[0, row], state), x[0, row], out=made[0, row])
        states.keep(span, state)
    return made


def _linear_attention(
    states: NodeStates,
    spans: Sequence[RowSpan],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    decay: Tensor,
    beta: Tensor | None = None,
) -> Tensor:
    """query, key [1, rows, heads, width], value and the result [1, rows, heads, value width], decay and beta [1, rows,
    heads], decay also with the key's width."""
    heads, width, value_width = states.shape.shape
    _require(query.shape == key.shape and key.shape[2:] == (heads, width) and key.shape[0] == 1, query, key)
    _require(value.shape == (*key.shape[:3], value_width), value)
    _require(decay.shape in (key.shape, key.shape[:3]) and (beta is None or beta.shape == key.shape[:3]), decay, beta)
    made = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    for span in spans:
        state = states.before(span)[None]
        singly = one_by_one(span)
        parts = ((at, at + 1) for at in range(span.start, span.end)) if singly else tiles(span)
        for begin, end in parts:
            rows = slice(span.first + begin - span.start, span.first + end - span.start)
            q, k, v, fading = (one[:, rows].clone() for one in (query, key, value, decay))
            share = None if beta is None else beta[:, rows].clone()
            made[:, rows], state = carried_attention(q, k, v, fading, share, state)
        states.keep(span, state[0])
    return made


def _require(fits: bool, *operands: Tensor | None) -> None:
    if not fits:
        sizes = [None if one is None else list(one.shape) for one in operands]
        raise ExecutionError(f"operands of sizes {sizes} don't fit the state that the node keeps.")
