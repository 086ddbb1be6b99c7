"""The numbers that packed matrices of quantised files stand for.

A stage unpacks them to float32 when it imports the weight. Each form's numbers are those that the library which wrote
the file computes in float32. Work is done in pieces of a few million numbers, so that the memory needed is the result
and little more.

Neighbours: `ir.packed` has the forms and their bytes, `ir.levels` multiplies by many of them unopened,
`backends.serving.base` unpacks.

Sources of the layouts: GGUF: the `gguf` package, which also decodes it. FP8: DeepSeek-V3's `inference/kernel.py`
(`weight_dequant`). MXFP4: OCP Microscaling Formats v1.0, and transformers' `integrations/mxfp4.py`. GPTQ: AutoGPTQ's
`QuantLinear.pack`; zero points are stored less one up to its version 1. AWQ: llm-awq's "gemm" order. 4-bit codes of
bitsandbytes: Dettmers et al. 2023, arXiv 2305.14314. `compressed-tensors`: its `pack_quantized` and `nvfp4` modules.
HQQ: its `BitPack` and `Quantizer.dequantize`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

from fusionai.ir.packed import (
    HQQ_LEVELS,
    NESTED,
    WORD_BITS,
    Array,
    check_packing,
    hqq_view,
    packed_bytes,
    part_arrays,
    stored_shape,
)
from fusionai.ir.schema import PackedPart, Packing
from fusionai.ir.weights import floats_of_bfloat16
from fusionai.primitives.errors import GraphError

Float32s = npt.NDArray[np.float32]

_PIECE: Final = 1 << 21
"""Numbers unpacked at a time, at least one row."""
_FP4: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_AWQ_ORDER: Final = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Position within its word of each of eight consecutive numbers."""


def unpacked(packings: Sequence[Packing], data: memoryview) -> Float32s:
    """Return the numbers of a parameter, flat: those of each packing follow one another. `data`: its parts' bytes.
    Raises `GraphError` for a packing that contradicts itself or its bytes."""
    for packing in packings:
        check_packing(packing)
    if data.nbytes != packed_bytes(packings):
        raise GraphError(f"a packed weight takes {packed_bytes(packings)} bytes, {data.nbytes} came.")
    made = np.empty(sum(prod(packing.shape) for packing in packings), np.float32)
    first_byte = first = 0
    for packing in packings:
        nbytes = packed_bytes([packing])
        arrays = part_arrays(packing, data[first_byte : first_byte + nbytes])
        first_byte += nbytes
        count = prod(packing.shape)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # numbers are checked by their users
            _unpack(packing, arrays, made[first : first + count])
        first += count
    return made


def floats_of(part: PackedPart, array: Array) -> Float32s:
    """Return a part's values in float32."""
    match part.dtype:
        case "bfloat16":
            return floats_of_bfloat16(array)
        case "float8_e4m3fn":
            return _E4M3[array]
        case "float8_e5m2":
            return _E5M2[array]
        case "float8_e8m0fnu":
            return _E8M0[array]
        case _:
            return array.astype(np.float32)


def _float8(exponent_bits: int, bias: int) -> Float32s:
    """All 256 values of an 8-bit float. E4M3FN has no infinities: only its largest code of each sign is no number."""
    mantissa_bits = 7 - exponent_bits
    codes = np.arange(256)
    exponents = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissas = (codes & ((1 << mantissa_bits) - 1)) / 2.0**mantissa_bits
    values = np.where(exponents == 0, mantissas * 2.0 ** (1 - bias), (1 + mantissas) * 2.0 ** (exponents - bias))
    if exponent_bits == 4:
        values[(codes & 0x7F) == 0x7F] = np.nan
    else:
        values[exponents == 31] = np.where(mantissas[exponents == 31] == 0, np.inf, np.nan)
    return np.where(codes & 0x80, -values, values).astype(np.float32)


_E4M3: Final = _float8(4, 7)
_E5M2: Final = _float8(5, 15)
TABLES: Final = {
    "nf4": np.array([
        -1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0, 0.0795803, 0.1609302,
        0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1
    ], np.float32),
    "fp4": np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / np.float32(12),
}  # fmt: skip
"""The tables of bitsandbytes' two kinds of 4-bit codes; a file has the table that it uses."""
FLOATS: Final = {"e4m3": _E4M3, "e5m2": _E5M2, "e2m1": _FP4, **TABLES}
"""Values of all codes of the small floats."""
_E8M0: Final = np.append(2.0 ** np.arange(-127.0, 128.0), np.nan).astype(np.float32)
"""Exponents alone."""


def _unpack(packing: Packing, arrays: Sequence[Array], made: Float32s) -> None:
    """Write the numbers of one packing to `made`, flat."""
    *outer, rows, columns = stored_shape(packing)
    count = prod(outer) * rows
    rows_of = _READERS[packing.form](packing, arrays, count, columns)
    turned = made.reshape(-1, columns, rows) if packing.turned else None
    plain = made.reshape(count, columns)
    for first, last in _pieces(count, columns, within=rows if turned is not None else count):
        numbers = rows_of(first, last)
        if turned is not None:
            turned[first // rows, :, first % rows : (last - 1) % rows + 1] = numbers.T
        else:
            plain[first:last] = numbers
    if packing.heads:
        _undo_rotation_order(made.reshape(packing.shape[0], -1), packing.heads)


def _pieces(count: int, columns: int, *, within: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of at most `_PIECE` numbers, at multiples of 32 rows, none across a multiple of `within`."""
    step = max(32, _PIECE // columns // 32 * 32)
    for start in range(0, count, within):
        for first in range(start, min(start + within, count), step):
            yield first, min(first + step, start + within, count)


def _undo_rotation_order(matrix: Float32s, heads: int) -> None:
    """Reorder the rows of each head: llama.cpp keeps the two halves of a rotation beside each other."""
    rows = matrix.shape[0]
    if rows % (2 * heads):
        raise GraphError(f"a matrix of {rows} rows can't have {heads} heads.")
    matrix[:] = matrix.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(matrix.shape)


Rows = Callable[[int, int], Float32s]
"""Returns the numbers of the stored rows [first, last)."""


def _gguf(packing: Packing, arrays: Sequence[Array], count: int, columns: int) -> Rows:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[packing.kind]
    raw = arrays[0].reshape(count, -1)
    if packing.kind == "BF16":
        return lambda first, last: floats_of(PackedPart("bfloat16", ()), raw[first:last].view("<u2"))
    if packing.kind in ("F16", "F32"):
        held = "<f2" if packing.kind == "F16" else "<f4"
        offset = np.float32(packing.offset)
        return lambda first, last: raw[first:last].view(held).astype(np.float32) + offset
    return lambda first, last: dequantize(raw[first:last], kind).reshape(last - first, columns)


def _scaled_float8(packing: Packing, arrays: Sequence[Array], count: int, columns: int) -> Rows:
    table = _E5M2 if packing.parts[0].dtype == "float8_e5m2" else _E4M3
    codes, scales = arrays[0].reshape(count, columns), floats_of(packing.parts[1], arrays[1])
    if not packing.block:
        each = np.repeat(scales.reshape(-1), count // scales.size)[:, None]
        return lambda first, last: table[codes[first:last]] * each[first:last]
    height, width = packing.block
    rows = stored_shape(packing)[-2]
    grid = scales.reshape(count // rows, -(-rows // height), -(-columns // width))

    def numbers(first: int, last: int) -> Float32s:
        at = np.arange(first, last)
        factors = grid[at // rows, at % rows // height]
        return table[codes[first:last]] * np.repeat(factors, width, axis=1)[:, :columns]

    return numbers


def fp4_scales(packing: Packing, arrays: Sequence[Array]) -> Float32s:
    """Return the scales of 4-bit floats, with the one that all share."""
    scales = floats_of(packing.parts[1], arrays[1])
    return scales / floats_of(packing.parts[2], arrays[2]).reshape(()) if arrays[2].size else scales


def _scaled_float4(packing: Packing, arrays: Sequence[Array], count: int, columns: int) -> Rows:
    codes = arrays[0].reshape(count, columns // 2)
    scales = fp4_scales(packing, arrays).reshape(count, -1)

    def numbers(first: int, last: int) -> Float32s:
        values = _FP4[nibbles(codes[first:last])]
        return values * np.repeat(scales[first:last], columns // scales.shape[1], axis=1)

    return numbers


def nibbles(codes: Array, *, high_first: bool = False) -> Array:
    """Return both halves of each byte [..., n], as [..., 2 n]."""
    halves = (codes >> 4, codes & 15) if high_first else (codes & 15, codes >> 4)
    return np.stack(halves, axis=-1).reshape(*codes.shape[:-1], -1)


def bits_of(words: Array, bits: int, positions: Array) -> Array:
    """Return the numbers of `bits` bits at `positions` of a stream of 32-bit words along the first dimension, lowest
    bits first."""
    at = positions * bits
    low, shift = at // WORD_BITS, (at % WORD_BITS).astype(np.uint32)[:, None]
    values = words[low] >> shift
    beyond = at % WORD_BITS + bits > WORD_BITS
    if beyond.any():
        rest = words[low[beyond] + 1] << (np.uint32(WORD_BITS) - shift[beyond])
        values[beyond] |= rest
    return values & np.uint32((1 << bits) - 1)


def _gptq(packing: Packing, arrays: Sequence[Array], count: int, columns: int) -> Rows:
    words, scales = arrays[0].reshape(-1, columns), floats_of(packing.parts[2], arrays[2]).reshape(-1, columns)
    groups, bits = scales.shape[0], packing.bits
    packed = arrays[1].reshape(groups, -1)
    # Zero points are packed along the columns, so they are read with words along the first dimension and turned.
    zeros = bits_of(packed.T, bits, np.arange(columns)).T + np.uint32(packing.offset)
    zeros = (zeros & np.uint32((1 << bits) - 1)).astype(np.float32)  # less one, a zero point of 0 is the largest code
    order = arrays[3].reshape(-1).astype(np.int64) if arrays[3].size else np.arange(count) // (count // groups)
    _check_order(packing, order, groups)

    def numbers(first: int, last: int) -> Float32s:
        codes = bits_of(words, bits, np.arange(first, last)).astype(np.float32)
        of = order[first:last]
        return (codes - zeros[of]) * scales[of]

    return numbers


def _check_order(packing: Packing, order: Array, groups: int) -> None:
    if order.size and not 0 <= int(order.min()) <= int(order.max()) < groups:
        raise GraphError(
            f"a weight packed as {packing.form} names group {int(order.max())} of {groups}.",
            hint="A file is damaged: fetch or save it again.",
        )


def awq_codes(words: Array) -> Array:
    """Return the codes of words [rows, words] in the order of the numbers: [rows, 8 * words]."""
    codes = (words[..., None] >> (4 * _AWQ_ORDER).astype(np.uint32)) & np.uint32(15)
    return codes.reshape(words.shape[0], -1)


def _awq(packing: Packing, arrays: Sequence[Array], count: int, columns: int) -> Rows:
    def opened(words: Array) -> Float32s:
        return awq_codes(words).astype(np.float32)

    words, scales = arrays[0].reshape(count, -1), floats_of(packing.parts[2], arrays[2]).reshape(-1, columns)
    group = count // scales.shape[0]
    zeros = opened(arrays[1].reshape(scales.shape[0], -1))

    def numbers(first: int, last: int) -> Float32s:
        of = np.arange(first, last) // group
        return (opened(words[first:last]) - zeros[of]) * scales[of]

    return numbers


def _packed_int(packing: Packing, arrays: Sequence[Array], count: int, columns: int) -> Rows:
    bits = packing.bits
    words, scales = arrays[0].reshape(count, -1), floats_of(packing.parts[1], arrays[1]).reshape(count, -1)
    groups = scales.shape[1]
    order = arrays[3].reshape(-1).astype(np.int64) if arrays[3].size else np.arange(columns) // (columns // groups)
    _check_order(packing, order, groups)
    packed = arrays[2].reshape(-1, groups) if arrays[2].size else None

    def numbers(first: int, last: int) -> Float32s:
        steps = bits_of(words[first:last].T, bits, np.arange(columns)).T.astype(np.float32)
        if packed is None:
            steps -= np.float32(1 << (bits - 1))
        else:  # zero points are packed along the rows
            steps -= bits_of(packed, bits, np.arange(first, last)).astype(np.float32)[:, order]
        return steps * scales[first:last][:, order]

    return numbers


def _int8(packing: Packing, arrays: Sequence[Array], count: int, columns: int) -> Rows:
    codes = arrays[0].reshape(count, columns)
    scales = floats_of(packing.parts[1], arrays[1])
    zeros = floats_of(packing.parts[2], arrays[2]) if arrays[2].size else np.zeros(1, np.float32)

    def spread(of: Float32s, first: int, last: int) -> Float32s:
        if of.size == 1:
            return of.reshape(1, 1)
        rows = of.reshape(count, -1)[first:last]
        return np.repeat(rows, columns // rows.shape[1], axis=1)

    def numbers(first: int, last: int) -> Float32s:
        steps = codes[first:last].astype(np.float32) - spread(zeros, first, last)
        return steps * spread(scales, first, last) * np.float32(packing.factor)

    return numbers


def code_scales(packing: Packing, arrays: Sequence[Array]) -> Float32s:
    """Return the scale of each group of 4-bit codes, flat."""
    _, largest, _, nested, nested_table = arrays
    scales = floats_of(packing.parts[1], largest).reshape(-1)
    if not nested.size:
        return scales
    ends = np.repeat(floats_of(packing.parts[3], nested).reshape(-1), NESTED)[: scales.size]
    return floats_of(packing.parts[4], nested_table)[largest.reshape(-1)] * ends + np.float32(packing.offset)


def _codes4(packing: Packing, arrays: Sequence[Array], count: int, columns: int) -> Rows:
    codes, _, table, _, _ = arrays
    scales = code_scales(packing, arrays)
    values = floats_of(packing.parts[2], table).reshape(-1)
    flat = codes.reshape(count * columns // 2)

    def numbers(first: int, last: int) -> Float32s:
        start, end = first * columns, last * columns
        some = values[nibbles(flat[start // 2 : -(-end // 2)], high_first=True)]
        some = some[start % 2 : start % 2 + end - start]
        return (some * scales[np.arange(start, end) // packing.group]).reshape(last - first, columns)

    return numbers


def _hqq(packing: Packing, arrays: Sequence[Array], _count: int, columns: int) -> Rows:
    """Words hold levels of lines that are far apart: the first word has the first line's level in its highest bits,
    then that of the line after as many lines as there are words, and so on."""
    words, scales, zeros = arrays[0], *(floats_of(packing.parts[at], arrays[at]).reshape(-1) for at in (1, 2))
    lines, across = hqq_view(packing, scales.size)
    per, bits = HQQ_LEVELS[packing.bits], packing.bits
    step = -(-lines // per)
    table = words.reshape(step, across)

    def numbers(first: int, last: int) -> Float32s:
        line, column = np.divmod(np.arange(first * columns, last * columns), across)
        shifts = (bits * (per - 1 - line // step)).astype(np.uint32)
        levels = (table[line % step, column].astype(np.uint32) >> shifts) & np.uint32((1 << bits) - 1)
        group = line if packing.kind == "1" else column
        return ((levels.astype(np.float32) - zeros[group]) * scales[group]).reshape(last - first, columns)

    return numbers


_READERS: Final = {
    "gguf": _gguf,
    "float8": _scaled_float8,
    "float4": _scaled_float4,
    "gptq": _gptq,
    "awq": _awq,
    "packed_int": _packed_int,
    "int8": _int8,
    "codes4": _codes4,
    "hqq": _hqq,
}
