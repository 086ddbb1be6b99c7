"""Products by blocks of columns: the layout, float64 as the judge, and bits that belong to a row alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import pad

pytest.importorskip("numba", reason="row products are machine code, made by numba")

from fusionai.backends.torch.packed_linear import IN_BLOCKS, PackedLinear, Product, pack
from fusionai.backends.torch.row_code import Factor
from fusionai.backends.torch.row_products import HALVES, as_blocks, factor_of, multiply
from fusionai.wire.serving import WeightFormat

BLOCKED: tuple[WeightFormat, ...] = ("fp32", "bf16")
WAYS = [Factor.FP32, Factor.BF16]
if HALVES:
    WAYS.append(Factor.HALVES)
SIZES = [
    *((columns, 24, 5) for columns in (1, 2, 15, 16, 17, 31, 48, 64, 65, 100, 128, 129, 130, 144, 176, 250, 257)),
    *((33, count, 3) for count in (1, 2, 3, 15, 16, 17, 31, 64, 101)),
    *((139, 21, rows) for rows in range(1, 20)),
    (1, 1, 1),
    (1, 2, 17),
    (16, 1, 8),
    (300, 257, 16),
    (1, 301, 9),
]
"""Columns, summands, rows: every kernel of 1 to 4 blocks by 1 to 8 rows, and what is left over of each."""


def drawn(columns: int, count: int, rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix and rows for it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((columns, count), generator=generator), torch.randn((rows, count), generator=generator)


def packed(weight: torch.Tensor, form: WeightFormat, bias: torch.Tensor | None = None) -> PackedLinear:
    return pack(weight, bias, form, "weight", in_blocks=True)


def made(way: Factor, weight: torch.Tensor) -> Product:
    """The product with a matrix in blocks, on memory that is NaN wherever nothing was written."""
    blocks = as_blocks(weight.to(kept(way)))
    columns, count = weight.shape

    def product(x: torch.Tensor) -> torch.Tensor:
        rows = fed(way, x)
        y = torch.full((x.shape[0], 16 * blocks.shape[0]), float("nan"))
        step = rows.shape[1] * rows.element_size()
        multiply(
            int(way), blocks.data_ptr(), rows.data_ptr(), step, y.data_ptr(), 4 * y.shape[1], len(x), columns, count
        )
        return y[:, :columns]

    return product


def kept(way: Factor) -> torch.dtype:
    return torch.float32 if way is Factor.FP32 else torch.bfloat16


def fed(way: Factor, x: torch.Tensor) -> torch.Tensor:
    """Rows as `multiply` takes them."""
    return pad(x.to(torch.bfloat16), (0, x.shape[1] % 2)) if way is Factor.HALVES else x.contiguous()


def exact(way: Factor, weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64 of what is really multiplied, and how far float32 sums in any order may be from it."""
    wide = weight.to(kept(way)).double()
    rows = fed(way, x)[:, : x.shape[1]].double()
    return rows @ wide.t(), (rows.abs() @ wide.abs().t()) * (weight.shape[1] + 1) * 2.0**-24


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


@pytest.mark.parametrize(("columns", "count"), [(1, 1), (15, 3), (16, 4), (17, 5), (40, 7), (32, 2)])
def test_blocks_of_float32_hold_sixteen_columns_of_each_summand_in_turn(columns: int, count: int) -> None:
    weight, _ = drawn(columns, count, 1)
    blocks = as_blocks(weight)
    assert blocks.shape == (-(-columns // 16), count, 16)
    assert blocks.is_contiguous()
    whole = torch.zeros((16 * blocks.shape[0], count))
    whole[:columns] = weight
    for block, column in ((block, lane) for block in range(blocks.shape[0]) for lane in range(16)):
        assert torch.equal(blocks[block, :, column], whole[16 * block + column])


@pytest.mark.parametrize(("columns", "count"), [(1, 1), (15, 3), (16, 4), (17, 5), (40, 7), (32, 2)])
def test_blocks_of_bfloat16_hold_pairs_of_summands(columns: int, count: int) -> None:
    weight = drawn(columns, count, 1)[0].to(torch.bfloat16)
    blocks = as_blocks(weight)
    assert blocks.dtype == torch.bfloat16
    assert blocks.shape == (-(-columns // 16), -(-count // 2), 16, 2)
    assert blocks.is_contiguous()
    whole = torch.zeros((16 * blocks.shape[0], count + count % 2), dtype=torch.bfloat16)
    whole[:columns, :count] = weight
    for block, column in ((block, lane) for block in range(blocks.shape[0]) for lane in range(16)):
        assert torch.equal(blocks[block, :, column].reshape(-1), whole[16 * block + column])


@pytest.mark.parametrize("way", WAYS)
def test_products_of_many_sizes_are_float64s(way: Factor) -> None:
    for columns, count, rows in SIZES:
        weight, x = drawn(columns, count, rows, seed=columns + count + rows)
        product = made(way, weight)
        got = product(x)
        assert got.shape == (rows, columns)
        assert got.dtype == torch.float32
        # Weights are rounded once, when they are packed: products and sums are float32's.
        expected, bound = exact(way, weight, x)
        assert bool(((got.double() - expected).abs() <= bound).all()), (columns, count, rows)


@pytest.mark.parametrize("way", WAYS)
def test_small_whole_numbers_are_exact(way: Factor) -> None:
    """Every weight and every summand is where it belongs: sums of whole numbers round nowhere."""
    generator = torch.Generator().manual_seed(2)
    for columns, count, rows in [(1, 1, 1), (17, 3, 2), (130, 9, 11), (48, 64, 8), (257, 31, 5)]:
        weight = torch.randint(-9, 10, (columns, count), generator=generator).float()
        x = torch.randint(-9, 10, (rows, count), generator=generator).float()
        assert torch.equal(made(way, weight)(x).double(), x.double() @ weight.double().t())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("columns", "count"), [(1, 7), (16, 33), (139, 21), (320, 50)])
def test_a_rows_bits_are_the_same_whatever_rows_are_with_it(way: Factor, columns: int, count: int) -> None:
    weight, x = drawn(columns, count, 34, seed=4)
    product = made(way, weight)
    alone = torch.cat([product(row[None]) for row in x])
    for rows in range(1, 18):
        for offset in range(x.shape[0] - rows + 1):
            assert same_bits(product(x[offset : offset + rows]), alone[offset : offset + rows]), (rows, offset)
    order = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(1))
    assert same_bits(product(x[order]), alone[order])


@pytest.mark.parametrize("way", WAYS)
def test_a_columns_bits_do_not_depend_on_the_columns_beside_it(way: Factor) -> None:
    """Stacked matrices give what each gives."""
    weight, x = drawn(177, 19, 13)
    whole = made(way, weight)(x)
    for first, end in ((0, 1), (0, 48), (5, 138), (16, 177), (176, 177)):
        assert same_bits(made(way, weight[first:end].contiguous())(x), whole[:, first:end])


@pytest.mark.parametrize("way", WAYS)
def test_no_rows_are_no_rows(way: Factor) -> None:
    weight, x = drawn(20, 6, 0)
    assert made(way, weight)(x).shape == (0, 20)
    product = packed(weight, "fp32" if way is Factor.FP32 else "bf16")
    assert product(x).shape == (0, 20)
    assert product(x.reshape(1, 0, 6)).shape == (1, 0, 20)


@pytest.mark.parametrize("way", WAYS)
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
            assert torch.equal(torch.sign(got[4]), torch.sign(weight.to(kept(way)).float()[:, 8] * value))
        others = [row for row in range(11) if row != 4]
        assert same_bits(got[others], clean[others])
        holed = weight.clone()
        holed[33, 8] = value
        got = made(way, holed)(x)
        assert not bool(torch.isfinite(got[:, 33]).any())
        assert bool(torch.isnan(got[:, 33]).all()) == (value != value)
        columns = [column for column in range(35) if column != 33]
        assert same_bits(got[:, columns], clean[:, columns])


@pytest.mark.parametrize("way", [Factor.FP32, Factor.BF16])
def test_what_fills_blocks_up_is_no_part_of_a_sum(way: Factor) -> None:
    """With an odd number of summands the pair's second is none: what lies behind a row is not read into it."""
    weight, x = drawn(18, 5, 12)
    behind = torch.full((12, 6), float("nan"))
    behind[:, :5] = x
    blocks = as_blocks(weight.to(kept(way)))
    y = torch.full((12, 40), 7.0)
    multiply(int(way), blocks.data_ptr(), behind.data_ptr(), 24, y.data_ptr(), 160, 12, 18, 5)
    assert same_bits(y[:, :18], made(way, weight)(x))
    assert bool((y[:, 18:32] == 0).all()), "the rest of the last block is of zeros"
    assert bool((y[:, 32:] == 7).all()), "nothing behind it is written"


@pytest.mark.parametrize("form", BLOCKED)
def test_operators_get_the_products_that_row_programs_run(form: WeightFormat) -> None:
    for columns, count, rows in [(1, 1, 1), (17, 5, 9), (40, 8, 2), (139, 21, 17)]:
        weight, x = drawn(columns, count, rows)
        product = packed(weight, form)
        assert product.blocks is not None
        assert torch.equal(product.blocks, as_blocks(weight.to(IN_BLOCKS[form])))
        assert same_bits(product(x), made(factor_of(product.blocks), weight)(x))


@pytest.mark.parametrize("form", BLOCKED)
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


@pytest.mark.parametrize("form", BLOCKED)
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
    for form in BLOCKED:
        product = packed(across, form)
        assert same_bits(product(x), packed(weight, form)(x))
        assert product.blocks is not None
        assert product.nbytes == 32 * 10 * (4 if form == "fp32" else 2) == product.blocks.nbytes


@pytest.mark.parametrize("form", ["fp16", "int8", "int4"])
def test_other_formats_are_not_kept_in_blocks(form: WeightFormat) -> None:
    weight, _ = drawn(32, 64, 1)
    assert packed(weight, form).blocks is None
