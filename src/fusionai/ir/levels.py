"""Packed matrices as integer levels: what a product needs that multiplies by the numbers of a quantised file unopened.

In most forms of `ir.packed` a number is `(level - middle) * factor`: the level has 4 or 8 bits, and a group of columns
shares the other two. In GGUF's K-quants several groups share a factor and a base, and each has a scale of a few bits:
`level * (factor * scale) - base * middle`. Their factors have half precision, so that all these products are exact in
float32. Codes of small floats (FP8, FP4) and of a table (NF4) have a factor for each group. So each number is rounded
once, as the form's library rounds it: they are those of `ir.unpacking.unpacked`, bit for bit. Other forms have no
layout and are unpacked.

Neighbours: `ir.packed` has the forms, `backends.torch.row_blocks` lays levels out for products, `ir.serving_cost`
counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from fusionai.ir.packed import packed_bytes, part_arrays
from fusionai.ir.schema import Packing, ParamSpec
from fusionai.ir.unpacking import FLOATS, TABLES, awq_codes, bits_of, code_scales, floats_of, fp4_scales, nibbles
from fusionai.primitives.errors import GraphError

Array = npt.NDArray[Any]
SmallFloat = Literal["e4m3", "e5m2", "e2m1", "nf4", "fp4"]


@dataclass(frozen=True, slots=True)
class LevelLayout:
    """`bits` of a level: 4 (0 to 15) or 8 (signed). `group`: columns that share a middle. `groups`: how many of these
    share a factor; if more than one, they have scales and a base. `floats`: the codes are of this type, and have
    factors only."""

    bits: int
    group: int
    groups: int = 1
    floats: SmallFloat | None = None

    @property
    def shared(self) -> int:
        """Columns that share a factor."""
        return self.group * self.groups

    @property
    def shared_bytes(self) -> int:
        """Bytes of these columns of one row: levels, factor in float32, and middle or base, scales and middles."""
        beside = 4 if self.floats else 5 if self.groups == 1 else 8 + 2 * self.groups
        return beside + self.shared * self.bits // 8


@dataclass(frozen=True, slots=True)
class Levels:
    """Rows of a matrix. `levels`: [rows, columns] uint8, or int8 for eight bits. `factors` and `bases`: float32 [rows,
    shared]. `middles` and `scales`: int8 [rows, groups]. None: the layout has none."""

    levels: Array
    factors: Array
    middles: Array | None = None
    bases: Array | None = None
    scales: Array | None = None


GROUPS: Final = (128, 64, 32)
"""Groups of layouts whose scales are not scaled themselves, largest first."""
_K_QUANTS: Final = {
    "Q2_K": LevelLayout(4, 16, 16),
    "Q3_K": LevelLayout(4, 16, 16),
    "Q4_K": LevelLayout(4, 32, 8),
    "Q5_K": LevelLayout(8, 32, 8),
    "Q6_K": LevelLayout(8, 16, 16),
    "IQ4_XS": LevelLayout(8, 32, 8),
}
_PLAIN_QUANTS: Final = {
    "Q4_0": LevelLayout(4, 32), "Q5_0": LevelLayout(8, 32), "Q8_0": LevelLayout(8, 32), "IQ4_NL": LevelLayout(8, 32)
}  # fmt: skip
"""The codes of IQ4 are places in a table of 16 whole numbers, which are the levels."""
_FP4_GROUPS: Final = (32, 16)
_TABLE_GROUPS: Final = (64, 32)
LAYOUTS: Final = (
    *(LevelLayout(bits, group) for bits in (4, 8) for group in GROUPS),
    *dict.fromkeys(_K_QUANTS.values()),
    *(LevelLayout(8, group, floats="e4m3") for group in GROUPS),
    LevelLayout(8, GROUPS[-1], floats="e5m2"),
    *(LevelLayout(4, group, floats="e2m1") for group in _FP4_GROUPS),
    *(LevelLayout(4, group, floats="nf4") for group in _TABLE_GROUPS),
    *(LevelLayout(4, group, floats="fp4") for group in _TABLE_GROUPS),
)
"""Layouts in the order of their formats in `backends.torch.row_code`."""


def level_layout(spec: ParamSpec, *, transposed: bool = False) -> LevelLayout | None:
    """Return the layout in which a matrix [out, in], or a stack of such matrices, can be multiplied by as it is packed;
    None if it must be unpacked. `transposed`: the matrices are [in, out]."""
    layouts = {_layout(packing) for packing in _matrices(spec, transposed=transposed)}
    return layouts.pop() if len(layouts) == 1 else None


def _matrices(spec: ParamSpec, *, transposed: bool) -> list[Packing]:
    """Return packings of matrices that are the parameter's rows, one below the other; none if its rows are divided."""
    found = [_flat(packing, transposed=transposed) for packing in spec.packed]
    columns = spec.shape[-2 if transposed else -1] if len(spec.shape) in (2, 3) else 0
    whole = [packing for packing in found if packing is not None and packing.shape[1] == columns]
    rows = sum(packing.shape[0] for packing in whole)
    return whole if len(whole) == len(found) and rows * columns == prod(spec.shape) else []


def _flat(packing: Packing, *, transposed: bool) -> Packing | None:
    """Return the packing as that of a matrix [all rows, columns]; None if there is none."""
    if transposed and len(packing.shape) > 1:
        shape = (*packing.shape[:-2], packing.shape[-1], packing.shape[-2])
        packing = msgspec.structs.replace(packing, shape=shape, turned=not packing.turned)
    match packing.shape:
        case (_, _):
            return packing
        case (count, rows, columns) if (
            packing.form in _ROWS_ALONE and not packing.turned and rows % (packing.block or (1,))[0] == 0
        ):
            return msgspec.structs.replace(packing, shape=(count * rows, columns))
        case _:
            return None


_ROWS_ALONE: Final = frozenset({"gguf", "float8", "float4"})
"""Forms whose rows are stored one by one, so that a stack of matrices is one matrix with all rows."""


def _layout(packing: Packing) -> LevelLayout | None:
    """Return the layout of a matrix."""
    sizes = [prod(part.shape) for part in packing.parts]
    rows, columns = packing.shape
    if packing.heads and rows % (2 * packing.heads):
        return None
    match packing.form:
        case "gguf" if not packing.turned:
            return _K_QUANTS.get(packing.kind) or _PLAIN_QUANTS.get(packing.kind)
        case "gptq" if packing.turned and not sizes[3]:
            return _grouped(packing.bits, columns, sizes[2] // rows)
        case "awq" if packing.turned:
            return _grouped(4, columns, sizes[2] // rows)
        case "packed_int" if not packing.turned and not sizes[3]:
            return _grouped(packing.bits, columns, sizes[1] // rows)
        case "float8" if not packing.turned:
            kind: SmallFloat = "e5m2" if packing.parts[0].dtype == "float8_e5m2" else "e4m3"
            sizes_of_groups = GROUPS if kind == "e4m3" else GROUPS[-1:]
            return _floats(8, kind, sizes_of_groups, packing.block[1] if packing.block else columns, columns)
        case "float4" if not packing.turned:
            return _floats(4, "e2m1", _FP4_GROUPS, columns // (sizes[1] // rows), columns)
        case "codes4" if not packing.turned and packing.kind in TABLES and columns % packing.group == 0:
            return _floats(4, "fp4" if packing.kind == "fp4" else "nf4", _TABLE_GROUPS, packing.group, columns)
        case "int8" if not packing.turned and packing.factor == 1.0 and not sizes[2]:
            return _grouped(8, columns, max(1, sizes[1] // rows))
        case _:
            return None


def _floats(bits: int, kind: SmallFloat, groups: Sequence[int], width: int, columns: int) -> LevelLayout | None:
    """Return the layout for codes of which `width` in a row share a factor."""
    group = next((size for size in groups if width % size == 0), None)
    return None if group is None or columns % width else LevelLayout(bits, group, floats=kind)


def _grouped(bits: int, columns: int, groups: int) -> LevelLayout | None:
    """Return the layout for `groups` equal groups in each row."""
    if not groups or columns % groups:
        return None
    group = next((size for size in GROUPS if columns // groups % size == 0), None)
    return None if group is None else LevelLayout(4 if bits <= 4 else 8, group)


# Numbers that are not finite are found by their users.
@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def levels_of(
    spec: ParamSpec, layout: LevelLayout, data: memoryview, *, transposed: bool = False
) -> Callable[[Array], Levels]:
    """Return a function that returns some rows, by number, of a parameter with this layout; those of a stack of
    matrices follow one another. `data`: the bytes of its parts, which `ir.packed.check_packing` has accepted. Raises
    `GraphError` if their number is wrong, and for FP8 codes that are no numbers."""
    readers: list[_Rows] = []
    ends: list[int] = []
    first_byte = 0
    for packing in _matrices(spec, transposed=transposed):
        end_byte = first_byte + packed_bytes([packing])
        readers.append(_reader(packing, layout, part_arrays(packing, data[first_byte:end_byte])))
        ends.append(packing.shape[0] + (ends[-1] if ends else 0))
        first_byte = end_byte
    if first_byte != data.nbytes:
        raise GraphError(f"a packed weight takes {first_byte} bytes, {data.nbytes} came.")
    if len(readers) == 1:
        return readers[0]

    def numbers(rows: Array) -> Levels:
        matrices = np.searchsorted(ends, rows, side="right")
        where = {int(matrix): np.flatnonzero(matrices == matrix) for matrix in dict.fromkeys(matrices)}
        parts = [readers[matrix](rows[here] - (ends[matrix - 1] if matrix else 0)) for matrix, here in where.items()]
        order = np.argsort(np.concatenate(list(where.values())))
        return _joined(parts, order)

    return numbers


def _joined(parts: Sequence[Levels], order: Array) -> Levels:
    """Return the rows of all parts, in this order."""

    def one(arrays: Sequence[Array | None]) -> Array | None:
        present = [array for array in arrays if array is not None]
        return np.concatenate(present)[order] if present else None

    return Levels(
        np.concatenate([part.levels for part in parts])[order],
        np.concatenate([part.factors for part in parts])[order],
        one([part.middles for part in parts]),
        one([part.bases for part in parts]),
        one([part.scales for part in parts]),
    )


def _reader(packing: Packing, layout: LevelLayout, arrays: list[Array]) -> _Rows:
    order = _rows_in_order(packing)
    rows_of = _READERS[packing.form](packing, layout, arrays)
    return lambda rows: rows_of(order[rows])


@np.errstate(over="ignore", invalid="ignore")
def numbers_of(levels: Levels, layout: LevelLayout) -> npt.NDArray[np.float32]:
    """Return the numbers [rows, columns] that levels stand for."""
    if layout.floats is not None:
        return FLOATS[layout.floats][levels.levels] * np.repeat(levels.factors, layout.group, axis=1)
    assert levels.middles is not None
    if levels.bases is None or levels.scales is None:
        steps = levels.levels.astype(np.float32) - np.repeat(levels.middles, layout.group, axis=1)
        return steps * np.repeat(levels.factors, layout.group, axis=1)
    scales = np.repeat(levels.factors, layout.groups, axis=1) * levels.scales
    offsets = np.repeat(levels.bases, layout.groups, axis=1) * levels.middles
    return levels.levels * np.repeat(scales, layout.group, axis=1) - np.repeat(offsets, layout.group, axis=1)


def _rows_in_order(packing: Packing) -> Array:
    """Stored row of each row: llama.cpp keeps the two halves of a rotation beside each other."""
    rows = np.arange(packing.shape[0])
    return rows.reshape(packing.heads, -1, 2).swapaxes(1, 2).reshape(-1) if packing.heads else rows


_Rows = Callable[[Array], Levels]
"""Returns the levels of these stored rows."""


@dataclass(frozen=True, slots=True)
class _Fields:
    """Where a block of a GGUF type has its factor, its base and its scales, in bytes. `unit`: scales that are all 1."""

    factor: slice
    base: slice | None = None
    scales: slice | None = None
    unit: bytes = b""


_UNIT_OF_K4: Final = b"\1\1\1\1\0\0\0\0\1\1\1\1"
"""Scales of 6 bits that are 1, and middles that are 0, as Q4_K and Q5_K pack them."""
_FIELDS: Final = {
    "Q4_0": _Fields(slice(0, 2)),
    "Q5_0": _Fields(slice(0, 2)),
    "Q8_0": _Fields(slice(0, 2)),
    "IQ4_NL": _Fields(slice(0, 2)),
    "Q2_K": _Fields(slice(80, 82), slice(82, 84), slice(0, 16), b"\1" * 16),
    "Q3_K": _Fields(slice(108, 110), None, slice(96, 108), b"\x11" * 8 + b"\xaa" * 4),
    "Q4_K": _Fields(slice(0, 2), slice(2, 4), slice(4, 16), _UNIT_OF_K4),
    "Q5_K": _Fields(slice(0, 2), slice(2, 4), slice(4, 16), _UNIT_OF_K4),
    "Q6_K": _Fields(slice(208, 210), None, slice(192, 208), b"\1" * 16),
    "IQ4_XS": _Fields(slice(0, 2), None, slice(2, 8), b"\xaa" * 2 + b"\x11" * 4),
}
_ONE: Final = np.frombuffer(np.float16(1).tobytes(), np.uint8)


def _gguf(packing: Packing, layout: LevelLayout, parts: list[Array]) -> _Rows:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    raw = parts[0].reshape(packing.shape[0], -1)
    fields, kind, columns = _FIELDS[packing.kind], GGMLQuantizationType[packing.kind], packing.shape[1]
    block_bytes = raw.shape[1] * layout.shared // columns
    lift = {"Q4_0": 8, "Q3_K": 4}.get(packing.kind, 0)

    def numbers(rows: Array) -> Levels:
        blocks = raw[rows].reshape(-1, block_bytes)
        factors, count = _half_floats(blocks, fields.factor), len(rows)
        # The reader of the format returns the levels themselves if factor and scales are 1 and there is no base.
        unit = blocks.copy()
        unit[:, fields.factor] = _ONE
        if fields.base is not None:
            unit[:, fields.base] = 0
        if fields.scales is not None:
            unit[:, fields.scales] = np.frombuffer(fields.unit, np.uint8)
        # The blocks are given as one row, because the reader splits rows into groups of 16.
        levels = (dequantize(unit.reshape(1, -1), kind) + lift).astype(np.int8 if layout.bits == 8 else np.uint8)
        levels, shared = levels.reshape(count, columns), factors.reshape(count, -1)
        if fields.scales is None:
            return Levels(levels, shared, np.full(shared.shape, lift, np.int8))
        scales, middles = _scales_of(packing.kind, blocks, layout)
        bases = lift * factors if fields.base is None else _half_floats(blocks, fields.base)
        return Levels(levels, shared, middles.reshape(count, -1), bases.reshape(count, -1), scales.reshape(count, -1))

    return numbers


def _half_floats(blocks: Array, where: slice) -> Array:
    return np.ascontiguousarray(blocks[:, where]).view("<f2").astype(np.float32)


def _scales_of(kind: str, blocks: Array, layout: LevelLayout) -> tuple[Array, Array]:
    """Return the scales and middles of each block's groups, int8. Where a type has no base, the scales are the middles:
    its base is a multiple of the factor."""
    from gguf import GGMLQuantizationType
    from gguf.quants import Q4_K, dequantize

    where = _FIELDS[kind].scales
    assert where is not None
    packed = np.ascontiguousarray(blocks[:, where])
    match kind:
        case "Q2_K":
            return (packed & 15).astype(np.int8), (packed >> 4).astype(np.int8)
        case "Q6_K":
            return packed.view(np.int8), packed.view(np.int8)
        case "Q3_K" | "IQ4_XS":  # levels of 1 and a factor of 1: the first number of each group is its scale
            unit = np.full(blocks.shape, 0x55 if kind == "Q3_K" else 0x88, np.uint8)
            if kind == "Q3_K":
                unit[:, :32] = 0xFF
            unit[:, where], unit[:, _FIELDS[kind].factor] = packed, _ONE
            scales = dequantize(unit, GGMLQuantizationType[kind])[:, :: layout.group].astype(np.int8)
            return scales, scales
        case _:
            scales, middles = Q4_K.get_scale_min(packed)
            return scales.astype(np.int8), middles.astype(np.int8)


def _with_zeros(layout: LevelLayout, codes: Array, zeros: Array, scales: Array) -> Levels:
    """Return levels of which a number is (code - zero) * scale. `zeros`, `scales`: [rows, groups]."""
    groups = codes.shape[1] // layout.group
    each = groups // scales.shape[1]
    lowered = 128 if layout.bits == 8 else 0
    factors = np.repeat(scales, each, axis=1)
    middles = np.repeat(zeros.astype(np.int16) - lowered, each, axis=1).astype(np.int8)
    levels = codes.astype(np.uint8) if not lowered else (codes.astype(np.int16) - lowered).astype(np.int8)
    return Levels(levels, factors, middles)


def _gptq(packing: Packing, layout: LevelLayout, parts: list[Array]) -> _Rows:
    rows, columns = packing.shape
    words, scales = parts[0].reshape(-1, rows), floats_of(packing.parts[2], parts[2]).reshape(-1, rows)
    packed = parts[1].reshape(scales.shape[0], -1)
    mask = np.uint32((1 << packing.bits) - 1)

    def numbers(chosen: Array) -> Levels:
        codes = bits_of(words[:, chosen], packing.bits, np.arange(columns)).T
        zeros = (bits_of(packed.T, packing.bits, chosen) + np.uint32(packing.offset)) & mask
        return _with_zeros(layout, codes, zeros, scales[:, chosen].T)

    return numbers


def _awq(packing: Packing, layout: LevelLayout, parts: list[Array]) -> _Rows:
    rows, columns = packing.shape
    scales = floats_of(packing.parts[2], parts[2]).reshape(-1, rows)
    zeros = awq_codes(parts[1].reshape(scales.shape[0], -1))
    words = parts[0].reshape(columns, -1)

    def numbers(chosen: Array) -> Levels:
        first, last = int(chosen.min()) // 8, int(chosen.max()) // 8 + 1
        codes = awq_codes(words[:, first:last])[:, chosen - 8 * first].T
        return _with_zeros(layout, codes, zeros[:, chosen].T, scales[:, chosen].T)

    return numbers


def _packed_int(packing: Packing, layout: LevelLayout, parts: list[Array]) -> _Rows:
    rows, columns = packing.shape
    bits = packing.bits
    words, scales = parts[0].reshape(rows, -1), floats_of(packing.parts[1], parts[1]).reshape(rows, -1)
    packed = parts[2].reshape(-1, scales.shape[1]) if parts[2].size else None

    def numbers(chosen: Array) -> Levels:
        codes = bits_of(words[chosen].T, bits, np.arange(columns)).T
        if packed is None:
            zeros = np.full((len(chosen), scales.shape[1]), 1 << (bits - 1))
        else:
            zeros = bits_of(packed, bits, chosen)
        return _with_zeros(layout, codes, zeros, scales[chosen])

    return numbers


def _int8(packing: Packing, layout: LevelLayout, parts: list[Array]) -> _Rows:
    rows, columns = packing.shape
    codes, scales = parts[0].reshape(rows, columns), floats_of(packing.parts[1], parts[1])
    each = np.broadcast_to(scales.reshape(1, 1), (rows, 1)) if scales.size == 1 else scales.reshape(rows, -1)
    zeros = np.full(each.shape, 128)
    return lambda chosen: _with_zeros(layout, codes[chosen].astype(np.int16) + 128, zeros[chosen], each[chosen])


def _float8(packing: Packing, layout: LevelLayout, parts: list[Array]) -> _Rows:
    rows, columns = packing.shape
    codes, scales = parts[0].reshape(rows, columns), floats_of(packing.parts[1], parts[1])
    if layout.floats == "e4m3" and ((codes & 0x7F) == 0x7F).any():
        raise GraphError("a weight has numbers that are not finite.", hint="Its file is damaged: fetch it again.")
    if packing.block:
        height, width = packing.block
        grid, of_row = scales.reshape(-(-rows // height), -1), np.arange(rows) // height
    else:
        width, grid = columns, scales.reshape(-1, 1)
        of_row = np.arange(rows) * len(grid) // rows
    each = width // layout.group
    return lambda chosen: Levels(codes[chosen], np.repeat(grid[of_row[chosen]], each, axis=1))


def _float4(packing: Packing, layout: LevelLayout, parts: list[Array]) -> _Rows:
    rows, columns = packing.shape
    codes, scales = parts[0].reshape(rows, columns // 2), fp4_scales(packing, parts).reshape(rows, -1)
    each = columns // scales.shape[1] // layout.group
    return lambda chosen: Levels(nibbles(codes[chosen]), np.repeat(scales[chosen], each, axis=1))


def _codes4(packing: Packing, layout: LevelLayout, parts: list[Array]) -> _Rows:
    rows, columns = packing.shape
    if not np.array_equal(floats_of(packing.parts[2], parts[2]).reshape(-1), TABLES[packing.kind]):
        raise GraphError(
            f"a weight of the kind {packing.kind} has another table of numbers than that kind.",
            hint="Its file is damaged: fetch it again.",
        )
    codes, scales = parts[0].reshape(rows, columns // 2), code_scales(packing, parts).reshape(rows, -1)
    each = columns // scales.shape[1] // layout.group
    return lambda chosen: Levels(nibbles(codes[chosen], high_first=True), np.repeat(scales[chosen], each, axis=1))


_READERS: Final = {
    "gguf": _gguf,
    "gptq": _gptq,
    "awq": _awq,
    "packed_int": _packed_int,
    "int8": _int8,
    "float8": _float8,
    "float4": _float4,
    "codes4": _codes4,
}
