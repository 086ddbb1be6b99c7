"""Frozen weights kept smaller than they are computed with: which, how large, and their bytes. Decides nothing else.

A weight that is not trained may be kept in bfloat16, in 8 bits (a scale per row) or in 4 bits (a scale and a middle per
group of a row, the smallest and largest value of the group being representable but for rounding). Whoever computes with
it makes float32 of it again, where it is used. What is kept, sent and put into snapshots is the packed bytes alone, so
that nobody packs twice. QLoRA (T. Dettmers et al. 2023, arXiv 2305.14314) does so with a table of 16 normal quantiles;
here levels are even, and a group has its own middle.

A row is everything along the last dimension. Bytes: 8 bits: the codes, row by row, then a bfloat16 scale per row; 4
bits: two codes a byte, the first in the low half, then scale and middle, bfloat16, per group. bfloat16: the numbers'
upper halves. Neighbours: `schema.ParamSpec.stored` names the form, backends make float32 of it in their own way,
tests hold
them to `pack_stored`.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from fusionai.ir.init import bfloat16_bits
from fusionai.ir.schema import Graph, ParamSpec, Stored
from fusionai.primitives.errors import GraphError

GROUPS: Final = (64, 32)
"""Weights that share a scale, the first that divides a row."""
SMALLEST: Final = 4096
"""Elements: what is smaller (norms, biases, short rows) is worth nothing and stays as it is."""
_PAIR: Final = 4
"""Bytes of a group's scale and middle."""
_TINY: Final = np.float32(2.0**-126)

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def with_stored(graph: Graph, form: Stored, *, but: Collection[str] = ()) -> Graph:
    """The same graph, every frozen float32 weight of it kept as `form` as far as it can be."""
    if form == "":
        return graph
    params = {
        value: msgspec.structs.replace(spec, stored=form_of(spec, form)) if spec.key not in but else spec
        for value, spec in graph.params.items()
    }
    return msgspec.structs.replace(graph, params=params)


def form_of(spec: ParamSpec, wanted: Stored) -> Stored:
    """What this parameter can be kept as; "" where it stays as it is."""
    frozen = spec.kind == "parameter" and not spec.trainable and spec.dtype == "float32"
    if wanted == "" or not frozen or len(spec.shape) < 2 or prod(spec.shape) < SMALLEST:
        return ""
    return "int8" if wanted == "int4" and group_of(spec.shape) is None else wanted


def group_of(shape: tuple[int, ...]) -> int | None:
    """Weights per group of 4-bit numbers; None where a row can't be divided."""
    return next((group for group in GROUPS if shape[-1] % group == 0), None)


def stored_bytes(shape: tuple[int, ...], form: Stored) -> int:
    """Of a weight that is kept in a form ("" excluded). Raises `GraphError` for a shape that the form does not take."""
    count, rows = prod(shape), prod(shape[:-1])
    match form:
        case "bf16":
            return 2 * count
        case "int8":
            return count + 2 * rows
        case "int4" if (group := group_of(shape)) is not None:
            return count // 2 + _PAIR * count // group
        case _:
            raise GraphError(f"a weight of shape {list(shape)} can't be kept as {form or 'it is'!r} in bytes.")


def pack_stored(values: npt.NDArray[Any], form: Stored) -> Bytes:
    """float32 [..., columns] -> bytes, `stored_bytes` of them. Not finite numbers raise `GraphError`."""
    weight = np.ascontiguousarray(values, np.float32)
    if not np.isfinite(weight).all():
        raise GraphError("a weight with numbers that are not finite can't be packed.")
    rows = weight.reshape(-1, weight.shape[-1])
    match form:
        case "bf16":
            return bfloat16_bits(rows.copy()).view(np.uint8).reshape(-1)
        case "int8":
            scales = bfloat16_bits(np.maximum(np.abs(rows).max(axis=1) / np.float32(127), _TINY))
            codes = np.clip(np.rint(rows / _floats(scales)[:, None]), -127, 127).astype(np.int8)
            return np.concatenate([codes.view(np.uint8).reshape(-1), scales.view(np.uint8)])
        case "int4" if (group := group_of(weight.shape)) is not None:
            return _pack_groups(rows, group)
        case _:
            raise GraphError(f"a weight of shape {list(weight.shape)} can't be packed as {form or 'it is'!r}.")


def _pack_groups(rows: Floats, group: int) -> Bytes:
    """A value is (level - 8) * scale + middle, level in 0..15; rounded against the scale and middle that are kept."""
    grouped = rows.reshape(-1, group)
    low, high = grouped.min(axis=1), grouped.max(axis=1)
    scales = bfloat16_bits(np.maximum((high - low) / np.float32(15), _TINY))
    middles = bfloat16_bits(low + np.float32(8) * _floats(scales))
    steps = (grouped - _floats(middles)[:, None]) / _floats(scales)[:, None] + np.float32(8)
    levels = np.clip(np.rint(steps), 0, 15).astype(np.uint8).reshape(-1, 2)
    codes = levels[:, 0] | (levels[:, 1] << np.uint8(4))
    return np.concatenate([codes, np.stack([scales, middles], axis=1).reshape(-1).view(np.uint8)])


def _floats(halves: npt.NDArray[np.uint16]) -> Floats:
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
