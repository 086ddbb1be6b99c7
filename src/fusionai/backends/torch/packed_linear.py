"""Matrices of a serving stage in packed form, and products with them. Owns layout, rounding, and rows per call.

A product gives a row the same bits whatever other rows are in the call: sessions share calls, and must neither see nor
influence each other. `row_products` sums in a fixed order of its own. A library's kernels are called only with numbers
of rows that `steady_calls` tried when the matrix was loaded. Packed bytes never leave the process. Neighbours:
`packed_graph` says which nodes are products.

Libraries choose kernels by the processor and the number of rows, and another kernel may sum in another order. The
kernel follows from a call's sizes alone, never from the values. So a few sizes are tried when a matrix is loaded, and
later calls use only sizes that passed: rows are padded or split. A trial must reveal another order of sums even if
results are rounded to bfloat16, so its rows are made such that the exact product is zero: the result then consists of
rounding errors only."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from fusionai.backends.torch import row_blocks
from fusionai.backends.torch.blocked_linear import blocked_product
from fusionai.backends.torch.card_matrix import CardMatrix, below_each_other, stacked
from fusionai.backends.torch.row_code import Factor
from fusionai.ir.levels import Array, LevelLayout, Levels
from fusionai.primitives.errors import ExecutionError
from fusionai.wire.serving import WeightFormat

FLOAT16_LARGEST: Final = 65504.0
"""Largest finite float16."""
INT4_GROUPS: Final = tuple(row_blocks.GROUPS)
"""Weights that share a scale; the smallest size that divides a row is used, because it is the most accurate."""
INT8_COLUMNS: Final = 32
"""Multiple to which columns are padded: the eight-bit kernel reads whole vectors without checks and would otherwise
read beyond the matrix."""
_FLOATS: Final[dict[WeightFormat, tuple[torch.dtype, Factor]]] = {
    "fp32": (torch.float32, Factor.FP32),
    "packed": (torch.float32, Factor.FP32),
    "bf16": (torch.bfloat16, Factor.BF16),
    "fp16": (torch.float16, Factor.FP16),
}
_EXACT_IN_FLOAT32: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Dtypes whose values round the same whether or not they are converted to float32 first."""
_TRIED_INSTEAD: Final = 2**22
"""Elements up to which a matrix of random numbers is tried instead of the loaded one: sums of a special matrix, such as
zeros, may be exact in any order and so prove nothing. Chosen."""
_ROUNDED_ROWS: Final = 64
"""Rows quantised at a time: whole blocks, few enough that intermediate values stay in the processor's cache."""
_PROBE_TOLERANCE: Final = 1e-3
"""Largest relative error of a float32 kernel that counts as working."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A packed matrix and its product. `counts`: allowed numbers of rows per call; None: any. `blocks`: the blocked
    matrix, if it is stored in blocks."""

    product: Product
    bias: Tensor | None
    nbytes: int
    counts: Counts | None = None
    blocks: row_blocks.Blocks | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return [..., out] in x's dtype for x [..., in]."""
        flat = x.reshape(-1, x.shape[-1])
        y = self.product(flat) if self.counts is None else in_steady_calls(self.product, self.counts, flat)
        y = y.reshape(*x.shape[:-1], y.shape[-1])
        if y.dtype != x.dtype:
            y = y.to(x.dtype)
        return y if self.bias is None else y + self.bias


def pack(
    weight: Tensor,
    bias: Tensor | None,
    form: WeightFormat,
    key: str,
    *,
    in_blocks: bool = False,
    pages: row_blocks.WidePages | None = None,
) -> PackedLinear:
    """Return `weight` [out, in], of floats, packed as `form`; the caller releases the original. `in_blocks`: store it
    in blocks, as compiled row products read it, in `pages`. Raises `ExecutionError` if values do not fit the form."""
    if not (in_blocks and weight.dtype in _EXACT_IN_FLOAT32):
        weight = weight.to(torch.float32)
    if weight.device.type != "cpu":
        product, nbytes = _on_accelerator(weight, form, key)
        return PackedLinear(product, bias, nbytes)
    if in_blocks:
        blocks = _in_blocks(weight, form, key, pages)
        return PackedLinear(blocked_product(blocks), bias, blocks.data.nbytes, blocks=blocks)
    kind, product, nbytes = _on_cpu(weight, form, key)
    shape = (weight.shape[0], weight.shape[1])

    def trial() -> tuple[Product, Tensor]:
        if weight.numel() > _TRIED_INSTEAD:
            return product, _as_read(weight, form)
        stand_in = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        return _on_cpu(stand_in, form, key)[1], _as_read(stand_in, form)

    return PackedLinear(product, bias, nbytes, steady_counts(kind, shape, trial))


def together(products: Sequence[PackedLinear]) -> list[PackedLinear]:
    """Return the products with the matrices of experts; on a card these matrices then follow each other in memory."""
    matrices = [one.product for one in products if isinstance(one.product, CardMatrix)]
    if len(matrices) < len(products):
        return list(products)
    return [replace(one, product=made) for one, made in zip(products, stacked(matrices), strict=True)]


def by_parts(device: torch.device) -> bool:
    """Return whether the parts of a stacked matrix are packed one by one here, so that no whole one is ever in memory
    unpacked: levels of a row don't depend on other rows."""
    return device.type != "cpu"


def merged(parts: Sequence[PackedLinear]) -> PackedLinear:
    """Return the product with a matrix of which these are the parts, for a device that packs by parts."""
    whole = below_each_other([part.product for part in parts if isinstance(part.product, CardMatrix)])
    return PackedLinear(whole, None, whole.nbytes)


def for_levels(shape: Sequence[int], layout: LevelLayout, pages: row_blocks.WidePages | None = None) -> PackedLinear:
    """Return memory, and the product, for a matrix [out, in] of a quantised file."""
    rows, columns = shape
    factor = row_blocks.LEVELS[layout]
    blocks = row_blocks.Blocks(factor, rows, columns, _block_data(factor, rows, columns, pages))
    return PackedLinear(blocked_product(blocks), None, blocks.data.nbytes, blocks=blocks)


def fill_levels(
    blocks: row_blocks.Blocks, first: int, rows: int, rows_of: Callable[[Array], Levels], layout: LevelLayout
) -> None:
    """Write `rows` rows from row `first`, a multiple of 16, of a matrix of a quantised file. `rows_of`: from
    `ir.levels.levels_of`."""
    for row in range(0, rows, _ROUNDED_ROWS):
        made = row_blocks.levels_in_blocks(rows_of(np.arange(row, min(rows, row + _ROUNDED_ROWS))), layout)
        block = (first + row) // row_blocks.WIDTH
        blocks.data[block : block + made.shape[0]] = made


def packed_bytes(
    rows: int, columns: int, form: WeightFormat, *, in_blocks: bool = False, layout: LevelLayout | None = None
) -> int:
    """Return the approximate bytes of a packed matrix [rows, columns], before it exists; kernels may round sizes up.
    `layout`: that of a matrix that is kept as its file holds it."""
    if in_blocks:
        return -(-rows // row_blocks.WIDTH) * row_blocks.block_bytes(_factor(rows, columns, form, layout), columns)
    match form:
        case "fp32" | "packed":
            return 4 * rows * columns
        case "bf16" | "fp16":
            return 2 * rows * columns
        case "int8":
            return rows * (columns + -columns % INT8_COLUMNS) + 2 * rows
        case "int4":
            group = int4_group(rows, columns)
            return (
                packed_bytes(rows, columns, "int8") if group is None else rows * (columns // 2 + 4 * columns // group)
            )


def block_pages(
    matrices: Iterable[tuple[Sequence[int], LevelLayout | None]], form: WeightFormat
) -> row_blocks.WidePages:
    """Return memory for matrices of shapes [out, in] in blocks; with a layout, they are kept as their files hold
    them."""
    return row_blocks.WidePages(
        sum(
            row_blocks.blocks_bytes(_factor(rows, columns, form, layout), rows, columns)
            for (rows, columns), layout in matrices
        )
    )


def int4_group(rows: int, columns: int) -> int | None:
    """Return the weights per scale; None if the four-bit kernel can't handle such a matrix, which is then kept in eight
    bits."""
    return next((group for group in INT4_GROUPS if columns % group == 0), None) if rows % 16 == 0 else None


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (int8 [out, in], bfloat16 scale per row [out]). Values are rounded against the bfloat16 scale that is
    kept."""
    scales = _divided(weight.abs().amax(dim=1), 127.0).clamp_min(torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
    return (weight / scales.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


def quantise_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return (int32 [out, in] of 0..15, bfloat16 [in / group, out, 2] of scale and middle). A value is (level - 8) *
    scale + middle."""
    grouped = weight.reshape(weight.shape[0], -1, group)
    low, high = grouped.amin(dim=2), grouped.amax(dim=2)
    scale = _divided(high - low, 15.0).clamp_min(torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
    middle = (low + 8.0 * scale.float()).to(torch.bfloat16)
    steps = (grouped - middle.float()[..., None]) / scale.float()[..., None] + 8.0
    levels = steps.round_().clamp_(0, 15).to(torch.int32).reshape(weight.shape)
    return levels, torch.stack([scale, middle], dim=2).transpose(0, 1).contiguous()


def _divided(x: Tensor, by: float) -> Tensor:
    """Return x / by. By a number that is on the host, a card would multiply by its reciprocal, which rounds otherwise
    than every processor's division."""
    return x / x.new_full((), by)


def rounded(weight: Tensor, form: WeightFormat) -> Tensor:
    """Return the float32 numbers that a stage multiplies by, for a matrix [out, in] of float32 packed as `form`."""
    if form in _FLOATS:
        return weight.to(_FLOATS[form][0]).to(torch.float32)
    group = int4_group(*weight.shape) if form == "int4" else None
    if group is None:
        levels, scales = quantise_rows(weight)
        return levels * scales.float()[:, None]
    levels, of_groups = quantise_groups(weight, group)
    scale, middle = of_groups.float().transpose(0, 1).repeat_interleave(group, 1).unbind(2)
    return (levels - 8) * scale + middle


def _on_cpu(weight: Tensor, form: WeightFormat, key: str) -> tuple[str, Product, int]:
    """Return (kernel's name, product, bytes)."""
    match form:
        case "fp32" | "bf16" | "packed":
            return _onednn(weight, _FLOATS[form][0])
        case "fp16":
            _check_float16(weight, key)
            if not _fbgemm_works():
                return _plain(weight, torch.float16)
            packed: Any = torch.ops.quantized.linear_prepack_fp16(weight, None)
            return "fbgemm", lambda x: torch.ops.quantized.linear_dynamic_fp16(x, packed), 2 * weight.numel()
        case "int8":
            levels, scales = quantise_rows(weight)
            compute = torch.ops.aten._weight_int8pack_mm.default
            missing = -weight.shape[1] % INT8_COLUMNS
            if not missing:
                nbytes = levels.nbytes + scales.nbytes
                return "int8pack", lambda x: compute(x.to(torch.bfloat16), levels, scales), nbytes
            padded = pad(levels, (0, missing))
            nbytes = padded.nbytes + scales.nbytes
            return "int8pack", lambda x: compute(pad(x.to(torch.bfloat16), (0, missing)), padded, scales), nbytes
        case "int4":
            group = int4_group(*weight.shape)
            if group is None:
                return _on_cpu(weight, "int8", key)
            levels, scales_and_middles = quantise_groups(weight, group)
            quarter = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default(levels, 1)
            compute = torch.ops.aten._weight_int4pack_mm_for_cpu.default
            nbytes = quarter.nbytes + scales_and_middles.nbytes
            return "int4pack", lambda x: compute(x.to(torch.bfloat16), quarter, group, scales_and_middles), nbytes


def _as_read(weight: Tensor, form: WeightFormat) -> Tensor:
    """Return the matrix whose values the product multiplies by, in float32, without a row's scale."""
    match form:
        case "fp32" | "packed":
            return weight
        case "fp16":
            return weight.to(torch.float16).to(torch.float32)
        case "int8":
            return quantise_rows(weight)[0].to(torch.float32)
        case "bf16" | "int4":
            return weight.to(torch.bfloat16).to(torch.float32)


def _onednn(weight: Tensor, dtype: torch.dtype) -> tuple[str, Product, int]:
    if not _onednn_works(dtype):
        return _plain(weight, dtype)
    # No hint of the number of rows: the layout for one row is slower at every number of rows.
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype))
    compute = torch.ops.mkldnn._linear_pointwise.default
    nbytes = int(torch.ops.mkldnn._nbytes(packed))
    if dtype == torch.float32:
        return "onednn float32", lambda x: compute(x, packed, None, "none", [], ""), nbytes
    return f"onednn {dtype}", lambda x: compute(x.to(dtype), packed, None, "none", [], ""), nbytes


def _factor(rows: int, columns: int, form: WeightFormat, layout: LevelLayout | None = None) -> Factor:
    """Return the storage form of a matrix in blocks."""
    if layout is not None:
        return row_blocks.LEVELS[layout]
    if form in _FLOATS:
        return _FLOATS[form][1]
    group = int4_group(rows, columns) if form == "int4" else None
    return Factor.INT8 if group is None else row_blocks.GROUPS[group]


def _in_blocks(weight: Tensor, form: WeightFormat, key: str, pages: row_blocks.WidePages | None) -> row_blocks.Blocks:
    if form in _FLOATS:
        if form == "fp16":
            _check_float16(weight, key)
        return row_blocks.floats_in_blocks(weight.to(_FLOATS[form][0]), pages)
    rows, columns = weight.shape
    factor = _factor(rows, columns, form)
    data = _block_data(factor, rows, columns, pages)
    for first in range(0, rows, _ROUNDED_ROWS):
        part = weight[first : first + _ROUNDED_ROWS].to(torch.float32)
        if factor is Factor.INT8:
            made = row_blocks.eight_bits_in_blocks(*quantise_rows(part))
        else:
            made = row_blocks.four_bits_in_blocks(*quantise_groups(part, int4_group(rows, columns) or 0))
        data[first // row_blocks.WIDTH : first // row_blocks.WIDTH + made.data.shape[0]] = made.data
    return row_blocks.Blocks(factor, rows, columns, data)


def _block_data(factor: Factor, rows: int, columns: int, pages: row_blocks.WidePages | None) -> Tensor:
    shape = (-(-rows // row_blocks.WIDTH), row_blocks.block_bytes(factor, columns))
    return torch.empty(shape, dtype=torch.uint8) if pages is None else pages.take(shape, torch.uint8)


def _plain(weight: Tensor, dtype: torch.dtype) -> tuple[str, Product, int]:
    kept = weight.to(dtype)
    return f"plain {dtype}", lambda x: linear(x.to(dtype), kept), kept.nbytes


def _on_accelerator(weight: Tensor, form: WeightFormat, key: str) -> tuple[CardMatrix, int]:
    """Return (product, bytes) on another device: it multiplies in the wanted dtype."""
    rows, columns = weight.shape
    group = int4_group(rows, columns) if form == "int4" else None
    if form in _FLOATS:
        if form == "fp16":
            _check_float16(weight, key)
        dtype, factor = _FLOATS[form]
        made = CardMatrix(factor, weight.to(dtype))
    elif group is None:
        made = CardMatrix(Factor.INT8, *quantise_rows(weight))
    else:
        levels, of_groups = quantise_groups(weight, group)
        pairs = (levels[:, 0::2] | (levels[:, 1::2] << 4)).to(torch.uint8)
        made = CardMatrix(row_blocks.GROUPS[group], pairs, of_groups.transpose(0, 1).contiguous(), group)
    return made, made.nbytes


def _check_float16(weight: Tensor, key: str) -> None:
    largest = float(weight.abs().amax()) if weight.numel() else 0.0
    if not largest <= FLOAT16_LARGEST:
        raise ExecutionError(
            f"{key} holds {largest:g}, above float16's limit {FLOAT16_LARGEST:g}.", hint="Serve bf16 or fp32 weights."
        )


@cache
def _onednn_works(dtype: torch.dtype) -> bool:
    """Return whether oneDNN's operators work here. They are torch internals and may be missing in a later torch or on
    this processor."""
    try:
        weight, x = _trial()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype))
        got = torch.ops.mkldnn._linear_pointwise.default(x.to(dtype), packed, None, "none", [], "")
        torch.ops.mkldnn._nbytes(packed)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return _close(got, linear(x.to(dtype), weight.to(dtype)))


@cache
def _fbgemm_works() -> bool:
    try:
        weight, x = _trial()
        got = torch.ops.quantized.linear_dynamic_fp16(x, torch.ops.quantized.linear_prepack_fp16(weight, None))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return _close(got, linear(x, weight.half().float()))


def _trial() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn((48, 32), generator=generator), torch.randn((3, 32), generator=generator)


def _close(got: Tensor, expected: Tensor) -> bool:
    scale = float(expected.abs().amax())
    tolerance = _PROBE_TOLERANCE if got.dtype == torch.float32 else 2e-2
    return float((got.float() - expected.float()).abs().amax()) <= tolerance * scale


Product = Callable[[Tensor], Tensor]
"""Maps [rows, in] to [rows, out] in the product's own dtype."""
Counts = tuple[int, ...]
"""Numbers of rows, ascending. Calls with these numbers of rows give a row the same bits at every place."""

TRIED: Final[Counts] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of rows that are tried; chosen."""
TRIED_OF_LARGE: Final[Counts] = (1, 2, 4, 8, 16, 32)
"""Fewer sizes for large matrices, because a trial's time is proportional to the elements."""
LARGE_ELEMENTS: Final = 2**21
"""Elements above which a matrix counts as large; chosen."""
_ROWS: Final = 8
"""Distinct rows of a trial: the first half cancels to zero, the others are random, of different magnitudes."""
_ALIGNMENT_BYTES: Final = 64
_KNOWN: Final[dict[Hashable, Counts]] = {}
"""(kind, shape, threads) -> numbers of rows that passed."""


def steady_counts(kind: str, shape: tuple[int, int], make: Callable[[], tuple[Product, Tensor]]) -> Counts:
    """Return the numbers of rows for products of one `kind` with matrices of `shape` [out, in]. `make` returns such a
    product, and the matrix in float32 as the product reads it (integer levels if quantised). It is called only if the
    answer is not known yet."""
    key = (kind, shape, torch.get_num_threads())
    known = _KNOWN.get(key)
    if known is None:
        product, matrix = make()
        known = _KNOWN[key] = tried(product, matrix)
    return known


def in_steady_calls(product: Product, counts: Counts, x: Tensor) -> Tensor:
    """Return `product` of x [rows, in], computed in calls of `counts` rows."""
    rows, most = x.shape[0], counts[-1]
    whole = rows - rows % most
    parts = [product(aligned(part)) for part in x[:whole].split(most)] if whole else []
    if whole < rows or not parts:
        rest = rows - whole
        size = next(count for count in counts if count >= rest)
        last = x[whole:]
        parts.append(product(aligned(pad(last, (0, 0, 0, size - rest)) if size > rest else last))[:rest])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def tried(product: Product, matrix: Tensor) -> Counts:
    """Return the numbers of rows that agree with the largest one that passes. One row always passes."""
    x = trial_rows(matrix)
    by_bits: list[tuple[Tensor, list[int]]] = []
    for count in TRIED if matrix.numel() <= LARGE_ELEMENTS else TRIED_OF_LARGE:
        made = _steady(product, x, count)
        if made is None:
            continue
        for other, counts in by_bits:
            if torch.equal(made, other):
                counts.append(count)
                break
        else:
            by_bits.append((made, [count]))
    return tuple(max((counts for _, counts in by_bits), key=lambda counts: counts[-1]))


def trial_rows(matrix: Tensor) -> Tensor:
    """Return x [8, in] for a matrix [out, in]. Each of the first four has an exactly zero product with one row of the
    matrix."""
    generator = torch.Generator().manual_seed(1)
    columns = matrix.shape[1]
    x = torch.randn((_ROWS, columns), generator=generator)
    x *= torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 100.0, 0.01, 1.0])[:, None]
    places = torch.linspace(0, matrix.shape[0] - 1, _ROWS // 2).round().to(torch.int64)
    for number, row in enumerate(matrix[places.to(matrix.device)].to("cpu", torch.float32)):
        first, second = torch.randperm(columns, generator=generator)[: columns - columns % 2].reshape(2, -1)
        x[number] = 0.0
        x[number, first], x[number, second] = row[second], -row[first]
    return x.to(matrix.device)


def _steady(product: Product, x: Tensor, count: int) -> Tensor | None:
    """Return the results for the rows x in calls of `count` rows; None if they depend on a row's place or its
    neighbours."""
    # Tried at every place and with every neighbour: a row among copies of itself, and among different rows. Calls of
    # few rows can't hold all rows at once, so each row is tried among copies there.
    copies = range(_ROWS if count < _ROWS else 1)
    same = [product(x[row : row + 1].expand(count, -1).contiguous()) for row in copies]
    mixed = torch.cat([product(x[[place % _ROWS for place in places]]) for places in _calls(count)])
    made = mixed[:_ROWS]
    alike = all(torch.equal(one, made[row : row + 1].expand(count, -1)) for row, one in zip(copies, same, strict=True))
    return made if alike and torch.equal(mixed, made[[place % _ROWS for place in range(len(mixed))]]) else None


def _calls(count: int) -> list[range]:
    """Return row numbers in groups of `count`, until every row has occurred."""
    return [range(first, first + count) for first in range(0, _ROWS, count)]


def aligned(x: Tensor) -> Tensor:
    """Return x at an aligned address and contiguous, like fresh memory: libraries may also choose kernels by address
    and strides."""
    begins = x.is_contiguous() and x.data_ptr() % _ALIGNMENT_BYTES == 0
    return x if begins else x.clone(memory_format=torch.contiguous_format)
