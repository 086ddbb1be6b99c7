"""Numbers as quantised files hold them: which bytes a packed matrix has, and the numbers that they stand for.

A matrix of a quantised model is several tensors in its files (codes, scales, zero points). Its bytes travel and are
cached as they lie there, one tensor behind the other (`Packing.parts`); a stage unpacks them to float32 when it imports
the weight. Each form's numbers are those that the library which wrote the file computes in float32. Work is done in
pieces of a few million numbers, so that the memory needed is the result and little more.

Neighbours: `storage.quantised_files` and `capture.models.gguf` find the parts in files, `ir.validate` calls
`check_packing` on received graphs, `backends.serving.base` unpacks.

Sources of the layouts: GGUF: the `gguf` package, which also decodes it. FP8: DeepSeek-V3's `inference/kernel.py`
(`weight_dequant`). MXFP4: OCP Microscaling Formats v1.0, and transformers' `integrations/mxfp4.py`. GPTQ: AutoGPTQ's
`QuantLinear.pack`; zero points are stored less one up to its version 1. AWQ: llm-awq's "gemm" order. 4-bit codes of
bitsandbytes: Dettmers et al. 2023, arXiv 2305.14314. `compressed-tensors`: its `pack_quantized` and `nvfp4` modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite, prod
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from fusionai.ir.schema import Graph, PackedForm, PackedPart, Packing
from fusionai.ir.weights import floats_of_bfloat16
from fusionai.primitives.errors import GraphError

Float32s = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

_PIECE: Final = 1 << 21
"""Numbers unpacked at a time, at least one row."""
_WORD_BITS: Final = 32
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
}
"""Which types each part may have; a part that is not there has any."""
_FP4: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_AWQ_ORDER: Final = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Position within its word of each of eight consecutive numbers."""


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
    *outer, rows, columns = _stored_shape(packing)
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


def _stored_shape(packing: Packing) -> tuple[int, ...]:
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
            if not (bits in (2, 3, 4, 8) and outer == 1 and groups and (rows * bits) % _WORD_BITS == 0):
                return None
            packed_columns = columns * bits // _WORD_BITS
            words = rows * bits // _WORD_BITS
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
            zero = (-(-count * bits // _WORD_BITS), groups) if prod(zeros) else (0,)
            ordered = (columns,) if prod(order) else (0,)
            return [(count, -(-columns * bits // _WORD_BITS)), (count, groups), zero, ordered]
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
            ends = (-(-prod(largest) // _NESTED),) if prod(nested) else (0,)
            return [(numbers // 2,), largest, (16,), ends, tables]
        case _:
            return None


_NESTED: Final = 256
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
    *outer, rows, columns = _stored_shape(packing)
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


def _gguf_sizes(kind: str) -> tuple[int, int]:
    """Numbers of a block, and its bytes."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if kind not in GGMLQuantizationType.__members__:
        raise GraphError(f"GGUF has no type {kind!r}.", hint="Update the `gguf` package, or use another file.")
    return GGML_QUANT_SIZES[GGMLQuantizationType[kind]]


def _scaled_float8(packing: Packing, arrays: Sequence[Array], count: int, columns: int) -> Rows:
    table = _E5M2 if packing.parts[0].dtype == "float8_e5m2" else _E4M3
    codes, scales = arrays[0].reshape(count, columns), floats_of(packing.parts[1], arrays[1])
    if not packing.block:
        each = np.repeat(scales.reshape(-1), count // scales.size)[:, None]
        return lambda first, last: table[codes[first:last]] * each[first:last]
    height, width = packing.block
    rows = _stored_shape(packing)[-2]
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
    low, shift = at // _WORD_BITS, (at % _WORD_BITS).astype(np.uint32)[:, None]
    values = words[low] >> shift
    beyond = at % _WORD_BITS + bits > _WORD_BITS
    if beyond.any():
        rest = words[low[beyond] + 1] << (np.uint32(_WORD_BITS) - shift[beyond])
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
    ends = np.repeat(floats_of(packing.parts[3], nested).reshape(-1), _NESTED)[: scales.size]
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


_READERS: Final = {
    "gguf": _gguf,
    "float8": _scaled_float8,
    "float4": _scaled_float4,
    "gptq": _gptq,
    "awq": _awq,
    "packed_int": _packed_int,
    "int8": _int8,
    "codes4": _codes4,
}
