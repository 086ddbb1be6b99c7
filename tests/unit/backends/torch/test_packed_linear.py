"""Numbers of rows for a library's product: what depends on places, neighbours or the number of rows is found out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusionai.backends.torch import card_matrix, packed_linear
from fusionai.backends.torch.packed_linear import (
    TRIED,
    in_steady_calls,
    pack,
    quantise_groups,
    quantise_rows,
    rounded,
    steady_counts,
    tried,
)
from fusionai.wire.serving import WeightFormat

IN, OUT = 48, 20
WEIGHT = torch.randn((OUT, IN), generator=torch.Generator().manual_seed(3))


def summed(x: torch.Tensor, columns: Iterable[int]) -> torch.Tensor:
    """One column after the other, in float32."""
    total = x.new_zeros((len(x), OUT))
    for column in columns:
        total += x[:, column, None] * WEIGHT[:, column]
    return total


def product(order: Callable[[int, int], bool], dtype: torch.dtype = torch.bfloat16) -> Callable[..., torch.Tensor]:
    """Sums a row backwards where `order` of (its place, rows in the call) says so; rounds to `dtype`."""

    def multiply(x: torch.Tensor) -> torch.Tensor:
        turned = torch.tensor([order(place, len(x)) for place in range(len(x))])
        return torch.where(turned[:, None], summed(x, reversed(range(IN))), summed(x, range(IN))).to(dtype)

    return multiply


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_order_of_sums_shows_although_results_are_rounded(dtype: torch.dtype) -> None:
    assert tried(product(lambda place, rows: False, dtype), WEIGHT) == TRIED
    assert tried(product(lambda place, rows: rows == 1, dtype), WEIGHT) == TRIED[1:]
    assert tried(product(lambda place, rows: rows > 8, dtype), WEIGHT) == tuple(n for n in TRIED if n > 8)
    # The last rows of a call that fill no tile of eight.
    odd = product(lambda place, rows: place >= rows - rows % 8, dtype)
    assert tried(odd, WEIGHT) == tuple(n for n in TRIED if n % 8 == 0)


def test_a_product_whose_rows_see_each_other_is_called_with_one_row() -> None:
    def coupled(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().max() / 127  # of all rows, as quantised activations have it
        return ((x / scale).round() * scale) @ WEIGHT.t()

    assert tried(coupled, WEIGHT) == (1,)
    assert tried(product(lambda place, rows: place > 0), WEIGHT) == (1,)


def test_calls_have_the_tried_numbers_of_rows_and_no_other() -> None:
    sizes: list[int] = []

    def multiply(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        assert x.is_contiguous()
        assert x.data_ptr() % 64 == 0
        return x @ WEIGHT.t()

    x = torch.randn((150, IN))
    for rows, expected in (
        (0, [3]),
        (1, [3]),
        (3, [3]),
        (4, [8]),
        (9, [48]),
        (48, [48]),
        (51, [48, 3]),
        (150, [48] * 3 + [8]),
    ):
        sizes.clear()
        made = in_steady_calls(multiply, (3, 8, 48), x[:rows])
        assert sizes == expected, rows
        assert made.shape == (rows, OUT)
        assert torch.allclose(made, x[:rows] @ WEIGHT.t(), atol=1e-4)


def test_one_matrix_answers_for_all_of_its_kind_and_shape() -> None:
    asked: list[int] = []

    def make() -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
        asked.append(1)
        return product(lambda place, rows: False), WEIGHT

    for _ in range(2):
        assert steady_counts("a kind of the test", (OUT, IN), make) == TRIED
    assert asked == [1]


@pytest.mark.parametrize("form", ["fp32", "bf16", "fp16", "int8", "int4"])
@pytest.mark.parametrize("in_blocks", [True, False])
def test_rounded_numbers_are_those_that_a_stage_multiplies_by(form: WeightFormat, in_blocks: bool) -> None:
    weight = torch.randn((64, 128), generator=torch.Generator().manual_seed(4))
    packed = pack(weight, None, form, "key", in_blocks=in_blocks)
    made = packed(torch.eye(128)).T
    # A library's kernels give sums in bfloat16; the product's own in float32.
    tolerance = 1e-6 if in_blocks else 2**-7
    torch.testing.assert_close(made, rounded(weight, form), rtol=tolerance, atol=tolerance)
    assert torch.equal(rounded(weight, form), weight) == (form == "fp32")


class _Divisors(TorchDispatchMode):
    """Notes divisions by a number of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.divisions, self.by_numbers = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # pyright: ignore
        if func._schema.name == "aten::div":
            self.divisions += 1
            self.by_numbers += not isinstance(args[1], torch.Tensor)
        return func(*args, **(kwargs or {}))


def test_levels_and_scales_are_the_same_on_every_device() -> None:
    """A card divides by a number of the host with its reciprocal, which rounds otherwise; by its own tensor it divides
    as every processor does."""
    weight = torch.randn((64, 128), generator=torch.Generator().manual_seed(6)) * 3
    with _Divisors() as seen:
        _, scales = quantise_rows(weight)
        quantise_groups(weight, 32)
    assert seen.divisions == 4
    assert seen.by_numbers == 0
    assert torch.equal(scales, (weight.abs().amax(dim=1) / 127.0).to(torch.bfloat16))


def test_four_bits_on_other_devices_are_the_same_numbers_whatever_multiplies_them() -> None:
    """They are computed in float32 and rounded once, not step by step in the dtype of the rows."""
    weight = torch.randn((16, 64), generator=torch.Generator().manual_seed(7)) + 3.0
    product, _ = packed_linear._on_accelerator(weight, "int4", "w")
    for dtype in (torch.float32, torch.bfloat16):
        numbers = product(torch.eye(64, dtype=dtype)).t()
        assert torch.equal(numbers, rounded(weight, "int4").to(dtype))


@pytest.mark.parametrize(("form", "bytes_per_number"), [("fp32", 4.0), ("fp16", 2.0), ("int8", 1.02), ("int4", 0.64)])
def test_other_devices_keep_what_the_form_says_and_multiply_by_its_numbers(
    form: WeightFormat, bytes_per_number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in pieces of a matrix. These are torch's plain operators, which are the same on every device."""
    weight = torch.randn((48, 128), generator=torch.Generator().manual_seed(4))
    x = torch.randn((2, 3, 128), generator=torch.Generator().manual_seed(5))
    for numbers in (2**24, 20 * 128):
        monkeypatch.setattr(card_matrix, "_NUMBERS_OF_A_PIECE", numbers)
        product, nbytes = packed_linear._on_accelerator(weight, form, "w")
        assert nbytes <= bytes_per_number * weight.numel()
        made = product(x.half() if form == "fp16" else x).float()
        expected = torch.nn.functional.linear(x, rounded(weight, form))
        torch.testing.assert_close(
            made, expected, rtol=2e-2 if form == "fp16" else 1e-4, atol=5e-2 if form == "fp16" else 1e-4
        )
