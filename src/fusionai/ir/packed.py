"""Which bytes a packed matrix of a quantised model has.

A matrix of a quantised model is several tensors in its files (codes, scales, zero points). Its bytes travel and are
cached as they lie there, one tensor behind the other (`Packing.parts`).

Neighbours: `storage.quantised_files` and `capture.models.gguf` find the parts in files, `ir.validate` calls
`check_packing` on received graphs, `ir.unpacking` has the numbers that the bytes stand for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, prod
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from fusionai.ir.schema import Graph, PackedForm, PackedPart, Packing
from fusionai.primitives.errors import GraphError

Array = npt.NDArray[Any]
WORD_BITS: Final = 32
_ITEMSIZE_BYTES: Final = {
    "uint8": 1,
    "int8": 1,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
}
_SCALES: Final = frozenset({"float16", "bfloat16", "float32"})
_DTYPES: Final[Mapping[PackedForm, tuple[frozenset[str], ...]]] = {
    "gguf": (frozenset({"uint8"}),),
    "float8": (frozenset({"float8_e4m3fn", "float8_e5m2"}), _SCALES | {"float8_e8m0fnu"}),
    "float4": (frozenset({"uint8"}), _SCALES | {"float8_e8m0fnu", "float8_e4m3fn"}, _SCALES),
    "gptq": (frozenset({"int32"}), frozenset({"int32"}), _SCALES, frozenset({"int32"})),
    "awq": (frozenset({"int32"}), frozenset({"int32"}), _SCALES),
    "packed_int": (frozenset({"int32"}), _SCALES, frozenset({"int32"}), frozenset({"int32"})),
    "int8": (frozenset({"int8"}), _SCALES, frozenset({"int8"})),
    "codes4": (frozenset({"uint8"}), _SCALES | {"uint8"}, _SCALES, _SCALES, _SCALES),
    "hqq": (frozenset({"uint8", "int32"}), _SCALES, _SCALES),
}
"""Which types each part may have; a part that is not there has any."""


def with_packed(graph: Graph, packings: Mapping[str, tuple[Packing, ...]]) -> Graph:
    """Return the graph with the weights of these keys, which are then frozen, as their files hold them."""
    packed = {
        value: msgspec.structs.replace(spec, packed=packings[spec.key], trainable=False)
        for value, spec in graph.params.items()
        if spec.key in packings
    }
    return msgspec.structs.replace(graph, params={**graph.params, **packed})


def packed_bytes(packings: Sequence[Packing]) -> int:
    """Return the bytes of a parameter's parts."""
    return sum(part_bytes(part) for packing in packings for part in packing.parts)


def part_bytes(part: PackedPart) -> int:
    """Return the bytes of one tensor in the files."""
    return prod(part.shape) * _ITEMSIZE_BYTES[part.dtype]


def part_arrays(packing: Packing, data: memoryview) -> list[Array]:
    """Return the parts of one packing, as they lie in `data`; 8-bit and brain floats as their bits. Raises `GraphError`
    if the number of bytes is wrong."""
    if data.nbytes != packed_bytes([packing]):
        raise GraphError(f"a packed weight takes {packed_bytes([packing])} bytes, {data.nbytes} came.")
    arrays: list[Array] = []
    first = 0
    for part in packing.parts:
        end = first + part_bytes(part)
        arrays.append(_array(part, data[first:end]))
        first = end
    return arrays


def check_packing(packing: Packing) -> None:
    """Raise `GraphError` unless the parts have the dtypes and shapes that numbers of this shape take in this form."""
    *outer, rows, columns = stored_shape(packing)
    shapes = [part.shape for part in packing.parts]
    sizes = (packing.group, packing.heads, *(size for shape in shapes for size in shape))
    if min(sizes) < 0 or min(packing.block or (1,)) < 1 or not isfinite(packing.offset + packing.factor):
        raise _wrong(packing)
    allowed = _DTYPES[packing.form]
    if len(allowed) != len(shapes) or any(part.dtype not in _ITEMSIZE_BYTES for part in packing.parts):
        raise _wrong(packing)
    if any(prod(part.shape) and part.dtype not in one for part, one in zip(packing.parts, allowed, strict=True)):
        raise _wrong(packing)
    expected = _expected(packing, prod(outer), rows, columns, shapes)
    if expected is None or [prod(shape) for shape in shapes] != [prod(shape) for shape in expected]:
        raise _wrong(packing)


def stored_shape(packing: Packing) -> tuple[int, ...]:
    """Shape in which the file holds the numbers: at least two dimensions, the last two exchanged if `turned`."""
    shape = packing.shape
    if not shape or any(size < 1 for size in shape):
        raise _wrong(packing)
    if len(shape) == 1:
        return (1, shape[0])
    return (*shape[:-2], shape[-1], shape[-2]) if packing.turned else shape


def _expected(
    packing: Packing, outer: int, rows: int, columns: int, shapes: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]] | None:
    """Shapes of the parts; None if there can't be such numbers, or too few parts."""
    bits = packing.bits
    count = outer * rows
    match packing.form, shapes:
        case "gguf", [_]:
            block, block_bytes = _gguf_sizes(packing.kind)
            return [(count, columns // block * block_bytes)] if columns % block == 0 else None
        case "float8", [_, scales]:
            block = packing.block
            if block:
                return [(count, columns), (outer, -(-rows // block[0]), -(-columns // block[1]))]
            return [(count, columns), scales] if prod(scales) in (1, outer, count) else None
        case "float4", [_, scales, factors]:
            groups = prod(scales) // count if count else 0
            fits = columns % 2 == 0 and groups and columns % groups == 0
            return [(count, columns // 2), (count, groups), factors[:1]] if fits and prod(factors) <= 1 else None
        case "gptq", [_, _, scales, order]:
            groups = prod(scales) // columns
            if not (bits in (2, 3, 4, 8) and outer == 1 and groups and (rows * bits) % WORD_BITS == 0):
                return None
            packed_columns = columns * bits // WORD_BITS
            words = rows * bits // WORD_BITS
            ordered = prod(order) == rows or (not prod(order) and rows % groups == 0)
            ordered = ordered and packing.group in (0, -(-rows // groups)) and packing.offset in (0.0, 1.0)
            return [(words, columns), (groups, packed_columns), (groups, columns), order] if ordered else None
        case "awq", [_, _, scales]:
            groups = prod(scales) // columns
            fits = outer == 1 and columns % 8 == 0 and groups and rows % groups == 0
            fits = fits and packing.group in (0, rows // groups)
            return [(rows, columns // 8), (groups, columns // 8), (groups, columns)] if fits else None
        case "packed_int", [_, scales, zeros, order]:
            groups = prod(scales) // count if count else 0
            if not 1 <= bits <= 8 or not groups or (not prod(order) and columns % groups):
                return None
            zero = (-(-count * bits // WORD_BITS), groups) if prod(zeros) else (0,)
            ordered = (columns,) if prod(order) else (0,)
            return [(count, -(-columns * bits // WORD_BITS)), (count, groups), zero, ordered]
        case "int8", [_, scales, zeros]:
            groups = prod(scales) // count if count else 0
            whole = prod(scales) == 1 or (groups and prod(scales) == groups * count and columns % groups == 0)
            return [(count, columns), scales, scales if prod(zeros) else (0,)] if whole else None
        case "codes4", [_, largest, _, nested, _]:
            numbers = count * columns
            per_scale = packing.group
            if not per_scale or prod(largest) != -(-numbers // per_scale) or numbers % 2:
                return None
            if (packing.parts[1].dtype == "uint8") != bool(prod(nested)):
                return None
            tables = (256,) if prod(nested) else (0,)
            ends = (-(-prod(largest) // NESTED),) if prod(nested) else (0,)
            return [(numbers // 2,), largest, (16,), ends, tables]
        case "hqq", [_, _, _]:
            return _hqq_shapes(packing, count * columns) if outer == 1 else None
        case _:
            return None


def _hqq_shapes(packing: Packing, numbers: int) -> list[tuple[int, ...]] | None:
    per, group = HQQ_LEVELS.get(packing.bits, 0), packing.group
    if not per or packing.kind not in ("0", "1") or group < 1 or numbers % group:
        return None
    groups = numbers // group
    lines, across = hqq_view(packing, groups)
    fits = packing.bits == 3 or lines % per == 0
    if not fits or (packing.parts[0].dtype == "int32") != (packing.bits == 3):
        return None
    return [(-(-lines // per), across), (groups,), (groups,)]


HQQ_LEVELS: Final[Mapping[int, int]] = {1: 8, 2: 4, 3: 10, 4: 2, 8: 1}
"""Bits of an HQQ level -> how many lie in a word: in bytes, or for three bits in 32-bit words."""


def hqq_view(packing: Packing, groups: int) -> tuple[int, int]:
    """Return the rows and columns of the table of levels, in which a group is a row (axis 1) or a column (axis 0)."""
    return (groups, packing.group) if packing.kind == "1" else (packing.group, groups)


NESTED: Final = 256
"""Scales that share a scale of their own, in bitsandbytes' nested form."""


def _wrong(packing: Packing) -> GraphError:
    parts = ", ".join(f"{part.dtype}{list(part.shape)}" for part in packing.parts)
    return GraphError(
        f"a weight of shape {list(packing.shape)} can't be packed as {packing.form} {packing.kind} in parts {parts}.",
        hint="The model's files and its config.json belong to different models, or a file is damaged.",
    )


def _array(part: PackedPart, data: memoryview) -> Array:
    """The part's numbers; 8-bit and brain floats as their bits, because numpy has no such types."""
    as_held = {"bfloat16": "<u2", "float16": "<f2", "float32": "<f4", "int32": "<u4", "int8": "i1"}
    return np.frombuffer(data, as_held.get(part.dtype, "u1")).reshape(part.shape)


def _gguf_sizes(kind: str) -> tuple[int, int]:
    """Numbers of a block, and its bytes."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if kind not in GGMLQuantizationType.__members__:
        raise GraphError(f"GGUF has no type {kind!r}.", hint="Update the `gguf` package, or use another file.")
    return GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
