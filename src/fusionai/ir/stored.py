"""Storage formats of frozen weights that are smaller than the dtype used for computing: sizes, packing and unpacking.

A frozen weight may be stored in bfloat16, in 8 bits (a scale per row) or in 4 bits (a scale and a middle per group of a
row, so that the group's smallest and largest value are representable up to rounding). Backends convert it to float32
where it is used. Only the packed bytes are stored, sent and put into snapshots, so that a weight is packed once. QLoRA
(T. Dettmers et al. 2023, arXiv 2305.14314) uses a table of 16 normal quantiles instead; here levels are evenly spaced
and every group has its own middle.

A row is everything along the last dimension. Layout in 8 bits: the codes, row by row, then a bfloat16 scale per row. In
4 bits: two codes per byte, the first in the low half, then scale and middle in bfloat16 per group. In bfloat16: the
upper halves of the numbers. `schema.ParamSpec.stored` names the format; `pack_stored` is the reference;
backends unpack to float32 in their own way.
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
"""Weights that share a scale: the first size that divides a row is used."""
SMALLEST: Final = 4096
"""Elements below which a tensor stays as it is: packing norms, biases and short rows saves too little."""
_PAIR: Final = 4
"""Bytes of a group's scale and middle."""
_TINY: Final = np.float32(2.0**-126)

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def with_stored(graph: Graph, form: Stored, *, but: Collection[str] = ()) -> Graph:
    """Return the graph with every frozen float32 weight stored as `form`, where possible, except the keys in `but`."""
    if form == "":
        return graph
    params = {
        value: msgspec.structs.replace(spec, stored=form_of(spec, form)) if spec.key not in but else spec
        for value, spec in graph.params.items()
    }
    return msgspec.structs.replace(graph, params=params)


def form_of(spec: ParamSpec, wanted: Stored) -> Stored:
    """Return the format in which this parameter can be stored; "" if it stays as it is."""
    frozen = spec.kind == "parameter" and not spec.trainable and spec.dtype == "float32"
    if wanted == "" or not frozen or len(spec.shape) < 2 or prod(spec.shape) < SMALLEST:
        return ""
    return "int8" if wanted == "int4" and group_of(spec.shape) is None else wanted


def group_of(shape: tuple[int, ...]) -> int | None:
    """Return the weights per group of the 4-bit format; None if a row can't be divided into groups."""
    return next((group for group in GROUPS if shape[-1] % group == 0), None)


def stored_bytes(shape: tuple[int, ...], form: Stored) -> int:
    """Return the bytes of a weight stored in a format (not ""). Raises `GraphError` if the shape does not fit the
    format."""
    count, rows = prod(shape), prod(shape[:-1])
    match form:
        case "bf16":
            return 2 * count
        case "int8":
            return count + 2 * rows
        case "int4" if (group := group_of(shape)) is not None:
            return count // 2 + _PAIR * count // group
        case _:
            raise GraphError(
                f"a weight of shape {list(shape)} can't be kept as {form!r}: expected rows of a multiple of 32."
            )


def pack_stored(values: npt.NDArray[Any], form: Stored) -> Bytes:
    """Pack float32 [..., columns] into `stored_bytes` bytes. Raises `GraphError` for numbers that are not finite."""
    weight = np.ascontiguousarray(values, np.float32)
    if not np.isfinite(weight).all():
        raise GraphError(
            f"a weight of shape {list(weight.shape)} has numbers that are not finite, so it can't be packed.",
            hint="Fetch or save the weights again.",
        )
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
            raise GraphError(f"a weight of shape {list(weight.shape)} can't be packed as {form!r}.")


def _pack_groups(rows: Floats, group: int) -> Bytes:
    """Pack in groups: a value is (level - 8) * scale + middle with level 0..15, rounded against the stored scale and
    middle."""
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
