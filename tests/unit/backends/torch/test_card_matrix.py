"""Products by the kernels for cards, in Triton's interpreter, against PyTorch's operators and the packed numbers."""

from __future__ import annotations

import logging
from collections.abc import Generator
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.backends.torch import card_launch, card_matrix, packed_linear
from fusionai.backends.torch.card_matrix import CardMatrix, SpacedRows, look_up, multiply_experts, stacked
from fusionai.backends.torch.packed_linear import PackedLinear, merged, rounded
from fusionai.wire.serving import WeightFormat

pytest.importorskip("triton", reason="Triton is for Linux")

from harness.interpreted_card import interpreted

pytestmark = pytest.mark.slow
FORMS: tuple[WeightFormat, ...] = ("fp32", "bf16", "fp16", "int8", "int4")


@pytest.fixture(autouse=True)
def _interpreted() -> Generator[None]:
    with interpreted():
        yield


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(weight: torch.Tensor, form: WeightFormat) -> CardMatrix:
    return packed_linear._on_accelerator(weight, form, "w")[0]


@pytest.mark.parametrize("form", FORMS)
def test_one_row_is_multiplied_by_the_numbers_of_the_packing(form: WeightFormat) -> None:
    """To the bit: each row of the identity gives one number of each column, and zeros add nothing."""
    weight = drawn(32, 64, seed=1) * 3
    matrix = packed(weight, form)
    made = torch.cat([matrix(row[None]) for row in torch.eye(64)]).t()
    assert torch.equal(made, rounded(weight, form))


@pytest.mark.parametrize("form", FORMS)
def test_several_rows_are_multiplied_as_by_operators(form: WeightFormat) -> None:
    agrees(rows=19, columns=48, count=160, form=form, seed=2)


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 70), columns=st.integers(1, 150), count=st.integers(1, 300), form=st.sampled_from(FORMS),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_products_of_any_sizes_are_those_of_operators(
    rows: int, columns: int, count: int, form: WeightFormat, seed: int
) -> None:
    agrees(rows, columns, count, form, seed)
    agrees(rows, 16 * -(-columns // 16), 32 * -(-count // 32), form, seed)


def agrees(rows: int, columns: int, count: int, form: WeightFormat, seed: int) -> None:
    matrix = packed(drawn(columns, count, seed=seed), form)
    x = drawn(rows, count, seed=seed + 1)
    expected = matrix.by_operators(x).float()
    # In half floats operators round their results too.
    tolerance = {"bf16": 1e-2, "fp16": 2e-3}.get(form, 2e-5)
    torch.testing.assert_close(matrix(x).float(), expected, rtol=tolerance, atol=tolerance * count**0.5)


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_multiplied_by_the_matrices_of_their_experts(form: WeightFormat) -> None:
    weights = [drawn(16, 32, seed=at) for at in range(5)]
    matrices = stacked([packed(weight, form) for weight in weights])
    chosen = torch.tensor([[0.0, 4.0], [2.0, 2.0], [5.0, 1.0]])  # the sixth does not exist
    memory = torch.zeros((3, 100))
    memory[:, :64] = drawn(3, 64, seed=9)
    memory[:, 64:66] = chosen
    x, y = SpacedRows(memory.view(-1), 100), SpacedRows(memory.view(-1)[66:], 100)
    whole = matrices[0].stack
    assert whole is not None
    places = torch.tensor([0, 1, 2], dtype=torch.int32)
    multiply_experts(whole, x, y, places, 3, memory.view(-1)[64:], (2, 32, 5))
    made = memory[:, 66:98].reshape(3, 2, 16)
    for row in range(3):
        for number in range(2):
            expert = int(chosen[row, number])
            if expert == 5:
                assert made[row, number].isnan().all()
                continue
            expected = matrices[expert].by_operators(memory[row : row + 1, 32 * number : 32 * number + 32])[0].float()
            torch.testing.assert_close(made[row, number], expected, rtol=1e-2, atol=2e-2)


def test_operators_serve_and_one_warning_is_given_if_a_kernel_fails(caplog: pytest.LogCaptureFixture) -> None:
    matrix, x = packed(drawn(16, 32, seed=1), "int4"), drawn(2, 32, seed=2)
    failure = card_launch._Failure()
    with (
        patch.object(card_launch, "_FAILED", failure),
        patch.object(card_launch, "unused", lambda device: failure.reason),
        patch.object(card_launch, "launch", side_effect=RuntimeError("ptxas fatal: no such card\nmore")) as launch,
        patch.object(card_matrix.card_launch, "failed", FAILED),
        caplog.at_level(logging.WARNING),
    ):
        for _ in range(2):
            assert torch.equal(matrix(x), matrix.by_operators(x))
    assert launch.call_count == 1
    (said,) = caplog.messages
    assert said.endswith("unavailable, using slower operators: RuntimeError: ptxas fatal: no such card")


FAILED = card_launch.failed


def test_only_cards_with_triton_run_the_kernels() -> None:
    with patch.object(card_launch, "unused", UNUSED):
        assert card_launch.unused(torch.device("cpu")) == "the kernels are for CUDA and ROCm, not for cpu"
        assert card_launch.unused(torch.device("cuda", 1)) is None
        with patch.object(card_launch, "find_spec", lambda name: None):
            assert card_launch.unused(torch.device("cuda")) == "the package triton is not installed"


UNUSED = card_launch.unused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_a_table_are_looked_up_and_one_that_is_not_there_is_nan(dtype: torch.dtype) -> None:
    table = drawn(7, 40, seed=1).to(dtype)
    memory = torch.zeros((3, 48))
    memory[:, 0] = torch.tensor([6.0, 0.0, 7.0])
    places = torch.tensor([0, 1, 2], dtype=torch.int32)
    look_up(table, SpacedRows(memory.view(-1), 48), SpacedRows(memory.view(-1)[8:], 48), places, 3)
    assert torch.equal(memory[:2, 8:], table[[6, 0]].float())
    assert memory[2, 8:].isnan().all()


@pytest.mark.parametrize("form", FORMS)
def test_a_matrix_packed_in_parts_is_the_one_packed_whole(form: WeightFormat) -> None:
    weight = drawn(48, 64, seed=3)
    parts = [PackedLinear(packed(part, form), None, 0) for part in weight.split((16, 32))]
    product, whole = merged(parts).product, packed(weight, form)
    assert isinstance(product, CardMatrix)
    assert (product.factor, product.group) == (whole.factor, whole.group)
    assert torch.equal(product.data, whole.data)
    assert whole.scales is None if product.scales is None else torch.equal(product.scales, whole.scales)
