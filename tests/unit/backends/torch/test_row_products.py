"""Products by blocks of columns: the layout, float64 as the judge, and bits that belong to a row alone."""

from __future__ import annotations

from ctypes import CFUNCTYPE, c_int64
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="row products are machine code, made by numba")

from fusionai.backends.torch.blocked_linear import blocked_product, kernels, scratch_bytes
from fusionai.backends.torch.packed_linear import PackedLinear, Product, block_pages, pack, packed_bytes
from fusionai.backends.torch.row_blocks import (
    GROUPS,
    LAYOUT_OF,
    LEVELS,
    Blocks,
    block_bytes,
    eight_bits_in_blocks,
    floats_in_blocks,
    four_bits_in_blocks,
    levels_in_blocks,
)
from fusionai.backends.torch.row_code import Factor
from fusionai.backends.torch.row_products import FEW_ROWS, HALVES, ROWS, SUMMANDS
from fusionai.ir.levels import LevelLayout, Levels
from fusionai.ir.unpacking import FLOATS as CODED
from fusionai.wire.serving import WeightFormat

FORMS: tuple[WeightFormat, ...] = ("fp32", "bf16", "fp16", "int8", "int4")
FLOATS: tuple[WeightFormat, ...] = ("fp32", "bf16", "fp16")
DTYPES = {
    Factor.FP32: torch.float32,
    Factor.BF16: torch.bfloat16,
    Factor.HALVES: torch.bfloat16,
    Factor.FP16: torch.float16,
}
USUAL = {
    *(Factor.LEVELS4_128, Factor.LEVELS4_32_8, Factor.LEVELS8_16_16),
    *(Factor.LEVELS_E4M3_128, Factor.LEVELS_E2M1_32, Factor.LEVELS_NF4_64),
}
"""Formats of quantised files that stand for the others, whose code differs in sizes only."""
AT_LEVELS = {
    *(Factor.FP32, Factor.BF16, Factor.FP16, Factor.INT8, Factor.INT4_32),
    *(Factor.LEVELS4_32_8, Factor.LEVELS_E4M3_128),
}
"""Formats that are tried at lower instruction sets too: the code of others differs from theirs in sizes and tables.
Each is compiled for every instruction set, which takes seconds in a new clone."""


def _marks(way: Factor) -> list[pytest.MarkDecorator]:
    is_like_others = way in LAYOUT_OF and way not in USUAL
    return [pytest.mark.long] * is_like_others + [pytest.mark.levels] * (way in AT_LEVELS)


WAYS = [pytest.param(way, marks=_marks(way)) for way in Factor if way is not Factor.HALVES or HALVES]
SIZES = [
    *((columns, 24, 5) for columns in (1, 2, 15, 16, 17, 31, 48, 64, 65, 100, 128, 129, 130, 144, 176, 250, 257)),
    *((33, count, 3) for count in (1, 2, 3, 15, 16, 17, 31, 64, 101)),
    *((139, 21, rows) for rows in range(1, 20)),
    (1, 1, 1),
    (1, 2, 17),
    (16, 1, 8),
    (300, 257, 16),
    (1, 301, 9),
    *((50, 257, rows) for rows in (17, 18, 23, 40)),
    (20, 700, 33),
]
"""Columns, summands, rows: every kernel of 1 to 4 blocks by 1 to 8 rows, what is left over of each, and many rows."""


def drawn(columns: int, count: int, rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix and rows for it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((columns, count), generator=generator), torch.randn((rows, count), generator=generator)


def packed(weight: torch.Tensor, form: WeightFormat, bias: torch.Tensor | None = None) -> PackedLinear:
    return pack(weight, bias, form, "weight", in_blocks=True)


def laid(way: Factor, weight: torch.Tensor) -> tuple[Blocks, torch.Tensor]:
    """In blocks, and the numbers that these stand for."""
    columns, count = weight.shape
    if way in DTYPES:
        kept = weight.to(DTYPES[way])
        return floats_in_blocks(kept), kept.float()
    if way is Factor.INT8:
        levels, scales = (weight * 20).round().clamp(-127, 127).to(torch.int8), torch.arange(1.0, columns + 1) / 64
        return eight_bits_in_blocks(levels, scales), levels.float() * scales[:, None]
    if way in LAYOUT_OF:
        return of_levels(LAYOUT_OF[way], weight)
    group = group_of(way)
    levels = (weight * 4 + 8).round().clamp(0, 15)
    pairs = (
        torch.arange(1.0, 1 + 2 * columns * (count // group)).reshape(-1, columns, 2).remainder(37).to(torch.bfloat16)
    )
    scales, middles = (pairs[..., at].float().t().repeat_interleave(group, 1) for at in (0, 1))
    return four_bits_in_blocks(levels.to(torch.int32), pairs), (levels - 8) * scales + middles


def of_levels(layout: LevelLayout, weight: torch.Tensor) -> tuple[Blocks, torch.Tensor]:
    """Levels as a quantised file has them, with factors of half precision, and their numbers."""
    columns, count = weight.shape
    groups, generator = count // layout.group, np.random.default_rng(count)
    if layout.floats is not None:
        return of_codes(layout, columns, count, generator)
    levels = (weight.numpy() * (4 if layout.bits == 4 else 40) + (8 if layout.bits == 4 else 0)).round()
    # Where groups have scales, levels have up to 6 bits, so that all products are exact.
    levels = levels.clip(*((0, 15) if layout.bits == 4 else (-128, 127) if layout.groups == 1 else (-32, 31)))
    factors, bases = (
        generator.normal(size=(columns, count // layout.shared)).astype(np.float16).astype(np.float32) for _ in range(2)
    )
    scales, middles = (generator.integers(-128, 128, (columns, groups)).astype(np.int8) for _ in range(2))
    whole = levels.astype(np.uint8 if layout.bits == 4 else np.int8)
    held = Levels(whole, factors, middles) if layout.groups == 1 else Levels(whole, factors, middles, bases, scales)
    blocks = Blocks(LEVELS[layout], columns, count, levels_in_blocks(held, layout))
    wide = [np.repeat(values, layout.groups, axis=1).astype(np.float64) for values in (factors, bases)]
    if layout.groups == 1:
        wide, scales = [wide[0], wide[0]], np.ones_like(scales)
    scale, offset = (np.repeat(values, layout.group, axis=1) for values in (wide[0] * scales, wide[1] * middles))
    return blocks, torch.from_numpy((levels * scale - offset).astype(np.float32))


def of_codes(
    layout: LevelLayout, columns: int, count: int, generator: np.random.Generator
) -> tuple[Blocks, torch.Tensor]:
    """Random codes of a small float, all but infinities and what is no number."""
    assert layout.floats is not None
    values = CODED[layout.floats]
    codes = generator.choice(np.flatnonzero(np.isfinite(values)), (columns, count)).astype(np.uint8)
    factors = generator.normal(size=(columns, count // layout.group)).astype(np.float32) / np.abs(values[codes]).max()
    held = Levels(codes, factors)
    numbers = values[codes] * np.repeat(factors, layout.group, axis=1)
    return Blocks(LEVELS[layout], columns, count, levels_in_blocks(held, layout)), torch.from_numpy(numbers)


def group_of(way: Factor) -> int:
    """Number of summands that share a scale."""
    if way in LAYOUT_OF:
        return LAYOUT_OF[way].shared
    return next((group for group, known in GROUPS.items() if known is way), 1)


def sizes(way: Factor) -> list[tuple[int, int, int]]:
    group = group_of(way)
    return [
        (columns, -(-count // group) * group, rows) for columns, count, rows in (SIZES if group == 1 else SIZES[::3])
    ]


def made(way: Factor, weight: torch.Tensor) -> Product:
    return blocked_product(laid(way, weight)[0])


def fed(way: Factor, x: torch.Tensor) -> torch.Tensor:
    """Rows as they are multiplied: rounded where the processor multiplies bfloat16 by bfloat16."""
    return x.to(torch.bfloat16).float() if way is Factor.HALVES or (HALVES and way is Factor.BF16) else x


def by_kernel(way: Factor, blocks: Blocks, x: torch.Tensor) -> torch.Tensor:
    """One row after the other by the kernel of this way, also where `blocked_product` would take another one."""
    padded = 16 * blocks.data.shape[0]
    y = torch.zeros((x.shape[0], padded))
    for row, out in zip(x, y, strict=True):
        CFUNCTYPE(None, *[c_int64] * 8)(known().products(way).few)(
            *(blocks.data.data_ptr(), row.data_ptr(), 4 * x.shape[1]),
            *(out.data_ptr(), 4 * padded, 1, blocks.columns, blocks.count),
        )
    return y[:, : blocks.columns]


def exact(way: Factor, weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64 of what is really multiplied, and how far float32 sums in any order may be from it."""
    wide, rows = laid(way, weight)[1].double(), fed(way, x).double()
    return rows @ wide.t(), (rows.abs() @ wide.abs().t()) * (weight.shape[1] + 16) * 2.0**-24


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


@pytest.mark.parametrize(("columns", "count"), [(1, 1), (15, 3), (16, 4), (17, 5), (40, 7), (32, 2)])
def test_blocks_of_float32_hold_sixteen_columns_of_each_summand_in_turn(columns: int, count: int) -> None:
    weight, _ = drawn(columns, count, 1)
    blocks = floats_in_blocks(weight).data
    assert blocks.shape == (-(-columns // 16), count, 16)
    assert blocks.is_contiguous()
    whole = torch.zeros((16 * blocks.shape[0], count))
    whole[:columns] = weight
    for block, column in ((block, lane) for block in range(blocks.shape[0]) for lane in range(16)):
        assert torch.equal(blocks[block, :, column], whole[16 * block + column])


@pytest.mark.parametrize(("columns", "count"), [(1, 1), (15, 3), (16, 4), (17, 5), (40, 7), (32, 2)])
def test_blocks_of_bfloat16_hold_pairs_of_summands(columns: int, count: int) -> None:
    weight = drawn(columns, count, 1)[0].to(torch.bfloat16)
    blocks = floats_in_blocks(weight).data
    assert blocks.dtype == torch.bfloat16
    assert blocks.shape == (-(-columns // 16), -(-count // 2), 16, 2)
    assert blocks.is_contiguous()
    whole = torch.zeros((16 * blocks.shape[0], count + count % 2), dtype=torch.bfloat16)
    whole[:columns, :count] = weight
    for block, column in ((block, lane) for block in range(blocks.shape[0]) for lane in range(16)):
        assert torch.equal(blocks[block, :, column].reshape(-1), whole[16 * block + column])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_products_of_many_sizes_are_float64s(way: Factor) -> None:
    for columns, count, rows in sizes(way):
        weight, x = drawn(columns, count, rows, seed=columns + count + rows)
        product = made(way, weight)
        got = product(x)
        assert got.shape == (rows, columns)
        assert got.dtype == torch.float32
        # Weights are rounded once, when they are packed: products and sums are float32's.
        expected, bound = exact(way, weight, x)
        assert bool(((got.double() - expected).abs() <= bound).all()), (columns, count, rows)


@pytest.mark.parametrize("way", [way for way in WAYS if way.values[0] not in LAYOUT_OF])
def test_small_whole_numbers_are_exact(way: Factor) -> None:
    """Every weight and every summand is where it belongs: sums of whole numbers round nowhere."""
    generator = torch.Generator().manual_seed(2)
    for columns, count, rows in [(1, 1, 1), (17, 3, 2), (130, 9, 11), (48, 64, 8), (257, 31, 5)]:
        weight = torch.randint(-9, 10, (columns, count), generator=generator).float()
        x = torch.randint(-9, 10, (rows, count), generator=generator).float()
        if count % group_of(way) == 0:
            expected = x.double() @ laid(way, weight)[1].double().t()
            assert torch.equal(made(way, weight)(x).double(), expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("columns", "count"), [(1, 7), (16, 33), (139, 21), (320, 50)])
def test_a_rows_bits_are_the_same_whatever_rows_are_with_it(way: Factor, columns: int, count: int) -> None:
    group = group_of(way)
    weight, x = drawn(columns, -(-count // group) * group if way in LAYOUT_OF else count * group, 34, seed=4)
    product = made(way, weight)
    alone = torch.cat([product(row[None]) for row in x])
    for rows in range(1, 20):
        for offset in range(0, x.shape[0] - rows + 1, 1 if rows < 10 else 5):
            assert same_bits(product(x[offset : offset + rows]), alone[offset : offset + rows]), (rows, offset)
    order = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(1))
    assert same_bits(product(x[order]), alone[order])


@pytest.mark.parametrize("way", WAYS)
def test_a_rows_bits_are_the_same_among_hundreds_and_on_threads(way: Factor) -> None:
    """More rows than share widened blocks, and more summands than are widened at a time."""
    weight, x = drawn(150, 2 * SUMMANDS + group_of(way), ROWS + 30, seed=5)
    product = made(way, weight)
    whole = product(x)
    some = [0, 1, FEW_ROWS, 300, ROWS - 1, ROWS, ROWS + 29]
    assert same_bits(torch.cat([product(x[row : row + 1]) for row in some]), whole[some])
    assert same_bits(product(x[200:256]), whole[200:256])
    assert bool(((whole.double() - exact(way, weight, x)[0]).abs() <= exact(way, weight, x)[1]).all())
    before, few = torch.get_num_threads(), x[:FEW_ROWS].repeat(1, 1)
    torch.set_num_threads(3)
    try:
        assert scratch_bytes() == 3 * known().scratch_bytes()
        assert same_bits(product(x), whole)
        assert same_bits(product(few), whole[:FEW_ROWS])
    finally:
        torch.set_num_threads(before)


def known() -> Any:
    found = kernels()
    assert found is not None
    return found


@pytest.mark.parametrize("way", [way for way in DTYPES if way is not Factor.HALVES or HALVES])
def test_a_columns_bits_do_not_depend_on_the_columns_beside_it(way: Factor) -> None:
    """Stacked matrices give what each gives."""
    weight, x = drawn(177, 19, 13)
    whole = made(way, weight)(x)
    for first, end in ((0, 1), (0, 48), (5, 138), (16, 177), (176, 177)):
        assert same_bits(made(way, weight[first:end].contiguous())(x), whole[:, first:end])


@pytest.mark.parametrize("way", [way for way in WAYS if way.values[0] in LAYOUT_OF])
@pytest.mark.parametrize("rows", [1, 3, 8, FEW_ROWS + 7])
def test_levels_of_a_quantised_file_give_the_bits_of_the_numbers_they_stand_for(way: Factor, rows: int) -> None:
    """So a machine that keeps a matrix as its file holds it, and one that unpacks it, agree in every bit."""
    weight, x = drawn(139, 3 * SUMMANDS, rows, seed=6)
    blocks, numbers = laid(way, weight)
    assert blocks.data.shape == (9, block_bytes(way, 3 * SUMMANDS))
    assert same_bits(blocked_product(blocks)(x), made(Factor.FP32, numbers)(x))


@pytest.mark.parametrize("way", [way for way in WAYS if LAYOUT_OF.get(way.values[0], LevelLayout(8, 0)).floats])
def test_each_code_of_a_small_float_has_its_value(way: Factor) -> None:
    """Infinities too; codes of E4M3 that are no numbers are refused when they come."""
    layout = LAYOUT_OF[way]
    assert layout.floats is not None
    values = CODED[layout.floats]
    codes = np.zeros((len(values), layout.group), np.uint8)
    codes[:, 0] = np.arange(len(values))
    data = levels_in_blocks(Levels(codes, np.ones((len(values), 1), np.float32)), layout)
    x = torch.zeros((1, layout.group))
    x[0, 0] = 1.0
    made = blocked_product(Blocks(way, len(values), layout.group, data))(x)[0].numpy()
    known = np.isfinite(values) if layout.floats == "e4m3" else np.ones(len(values), bool)
    assert np.array_equal(made[known], values[known], equal_nan=True)


@pytest.mark.parametrize("way", WAYS)
def test_no_rows_are_no_rows(way: Factor) -> None:
    weight, x = drawn(20, 6 * group_of(way), 0)
    assert made(way, weight)(x).shape == (0, 20)


@pytest.mark.parametrize("form", FORMS)
def test_no_rows_are_no_rows_of_a_packed_product(form: WeightFormat) -> None:
    weight, x = drawn(20, 6, 0)
    product = packed(weight, form)
    assert product(x).shape == (0, 20)
    assert product(x.reshape(1, 0, 6)).shape == (1, 0, 20)


@pytest.mark.parametrize("way", [way for way in DTYPES if way is not Factor.HALVES or HALVES])
def test_what_is_no_number_passes_through_and_stays_in_its_row_and_column(way: Factor) -> None:
    weight, x = drawn(35, 9, 11)
    clean = made(way, weight)(x)
    for value in (float("nan"), float("inf"), -float("inf")):
        spoilt = x.clone()
        spoilt[4, 8] = value
        got = made(way, weight)(spoilt)
        assert not bool(torch.isfinite(got[4]).any())
        assert bool(torch.isnan(got[4]).all()) == (value != value)
        if value == value:
            assert torch.equal(torch.sign(got[4]), torch.sign(weight.to(DTYPES[way]).float()[:, 8] * value))
        others = [row for row in range(11) if row != 4]
        assert same_bits(got[others], clean[others])
        holed = weight.clone()
        holed[33, 8] = value
        got = made(way, holed)(x)
        assert not bool(torch.isfinite(got[:, 33]).any())
        assert bool(torch.isnan(got[:, 33]).all()) == (value != value)
        columns = [column for column in range(35) if column != 33]
        assert same_bits(got[:, columns], clean[:, columns])


@pytest.mark.parametrize("rows", [1, 12, 20])
@pytest.mark.parametrize("way", [Factor.FP32, Factor.BF16, Factor.FP16, Factor.INT8])
def test_what_fills_blocks_up_is_no_part_of_a_sum(way: Factor, rows: int) -> None:
    """Memory behind a row does not enter the last pair of an odd number of summands."""
    weight, x = drawn(18, 5, rows)
    behind = torch.full((rows, 6), float("nan"))
    behind[:, :5] = x
    blocks, compiled = laid(way, weight)[0], known().products(way)
    y = torch.full((rows, 40), 7.0)
    given = (blocks.data.data_ptr(), behind.data_ptr(), 24, y.data_ptr(), 160, rows, 18, 5)
    if rows <= FEW_ROWS:
        CFUNCTYPE(None, *[c_int64] * 8)(compiled.few)(*given)
    else:
        y[:, :32] = 0
        scratch = torch.full((known().scratch_bytes() + 64,), 255, dtype=torch.uint8)
        CFUNCTYPE(None, *[c_int64] * 9)(compiled.many)(*given, scratch.data_ptr())
        assert bool((scratch[-64:] == 255).all()), "nothing behind the scratch buffer is written"
    assert same_bits(y[:, :18], by_kernel(way, blocks, x))
    assert bool((y[:, 18:32] == 0).all()), "the rest of the last block is of zeros"
    assert bool((y[:, 32:] == 7).all()), "nothing behind it is written"


def test_the_scratch_buffer_is_enough_for_the_largest_piece() -> None:
    weight, x = drawn(50, SUMMANDS, ROWS)
    blocks = floats_in_blocks(weight.to(torch.bfloat16))
    y, scratch = torch.zeros((ROWS, 64)), torch.full((known().scratch_bytes() + 64,), 255, dtype=torch.uint8)
    CFUNCTYPE(None, *[c_int64] * 9)(known().products(Factor.BF16).many)(
        blocks.data.data_ptr(), x.data_ptr(), 4 * SUMMANDS, y.data_ptr(), 256, ROWS, 50, SUMMANDS, scratch.data_ptr()
    )
    assert same_bits(y[:1, :50], by_kernel(Factor.BF16, blocks, x[:1]))
    assert bool((scratch[-64:] == 255).all())


@pytest.mark.parametrize("form", FORMS)
def test_packed_matrices_take_what_was_planned(form: WeightFormat) -> None:
    for columns, count in [(1, 1), (17, 5), (48, 64), (139, 96), (32, 256)]:
        weight, x = drawn(columns, count, 20)
        pages = block_pages([((columns, count), None)], form)
        product = pack(weight, None, form, "weight", in_blocks=True, pages=pages)
        assert product.blocks is not None
        assert product.nbytes == packed_bytes(columns, count, form, in_blocks=True)
        assert product.blocks.data.is_contiguous()
        assert same_bits(product(x), packed(weight, form)(x))


@pytest.mark.parametrize(
    ("form", "error"), [("int8", 0.02), ("int4", 0.2), ("fp16", 1e-3), ("bf16", 1e-2), ("fp32", 1e-6)]
)
def test_products_are_near_those_of_the_weights_that_came(form: WeightFormat, error: float) -> None:
    weight, x = drawn(64, 256, 20)
    expected = x @ weight.t()
    assert float((packed(weight, form)(x) - expected).norm() / expected.norm()) < error


@pytest.mark.parametrize("form", FORMS)
def test_rows_may_lie_anyhow_and_have_more_dimensions(form: WeightFormat) -> None:
    weight, x = drawn(21, 10, 12)
    product = packed(weight, form)
    expected = product(x)
    across = x.t().contiguous().t()
    spaced = torch.zeros((24, 30))
    spaced[::2, ::3] = x
    assert not across.is_contiguous()
    assert same_bits(product(across), expected)
    assert same_bits(product(spaced[::2, ::3]), expected)
    assert same_bits(product(x.reshape(3, 4, 10).transpose(0, 1)), expected.reshape(3, 4, 21).transpose(0, 1))
    assert same_bits(product(x[0].expand(5, 10)), expected[:1].expand(5, 21))


@pytest.mark.parametrize("form", FORMS)
def test_biases_and_narrow_rows(form: WeightFormat) -> None:
    weight, x = drawn(21, 10, 3)
    bias = torch.arange(21.0)
    assert same_bits(packed(weight, form, bias)(x), packed(weight, form)(x) + bias)
    narrow = x.to(torch.bfloat16)
    got = packed(weight, form)(narrow)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, packed(weight, form)(narrow.float()).to(torch.bfloat16))


def test_a_matrix_that_lies_anyhow_is_packed_as_it_reads_and_said_to_be_as_large_as_it_is() -> None:
    weight, x = drawn(21, 10, 3)
    across = weight.t().contiguous().t()
    for form in FORMS:
        product = packed(across, form)
        assert same_bits(product(x), packed(weight, form)(x))
        assert product.blocks is not None
        assert product.nbytes == product.blocks.data.nbytes
    for form in FLOATS:
        assert packed(across, form).nbytes == 32 * 10 * (4 if form == "fp32" else 2)
