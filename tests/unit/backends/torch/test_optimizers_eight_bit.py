"""8-bit codes of optimizer state: the nearest of the levels, zeros kept, what is no number not hidden."""

from __future__ import annotations

import pytest
import torch

from fusionai.backends.torch import optimizers as eight_bit
from fusionai.backends.torch.optimizers import BLOCK, decode, encode, zero_code

SIGNED = pytest.mark.parametrize("signed", [True, False])


def numbers(signed: bool, count: int = 40 * BLOCK + 17) -> torch.Tensor:
    """Over twelve decades."""
    made = torch.Generator().manual_seed(2)
    drawn = torch.randn(count, generator=made) * torch.exp(5 * torch.randn(count, generator=made))
    return drawn if signed else drawn.abs()


@SIGNED
def test_every_number_becomes_the_nearest_level(signed: bool):
    values = numbers(signed)
    codes, scales = encode(values, signed=signed)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, values.shape, (41,))
    levels = eight_bit._levels(signed, torch.device("cpu"))
    scaled = values / scales.repeat_interleave(BLOCK)[: len(values)]
    nearest = (scaled[:, None] - levels).abs().amin(dim=1)
    torch.testing.assert_close((scaled - levels[codes.long()]).abs(), nearest, rtol=0, atol=1e-7)
    assert torch.equal(
        decode(codes, scales, signed=signed), levels[codes.long()] * scales.repeat_interleave(BLOCK)[: len(values)]
    )


@SIGNED
def test_large_numbers_lose_a_hundredth_and_small_ones_are_not_lost_beside_them(signed: bool):
    values = torch.tensor([1.0, 0.5, 0.11, 0.01, 1e-4, 1e-6])
    found = decode(*encode(values, signed=signed), signed=signed)
    torch.testing.assert_close(found[:3], values[:3], rtol=0.07, atol=0)
    assert bool((found > 0).all())


@SIGNED
def test_zeros_stay_zeros(signed: bool):
    values = torch.zeros(BLOCK + 3)
    values[0] = 5.0
    codes, scales = encode(values, signed=signed)
    assert decode(codes, scales, signed=signed).tolist() == values.tolist()
    assert codes[1] == codes[-1] == zero_code(signed=signed)
    assert scales.tolist() == [5.0, 0.0]


@SIGNED
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_no_number_spoils_its_block_and_no_other(signed: bool, wrong: float):
    values = torch.ones(2 * BLOCK)
    values[3] = wrong
    found = decode(*encode(values, signed=signed), signed=signed)
    assert not bool(found[3].isfinite())
    assert found[BLOCK:].tolist() == [1.0] * BLOCK
