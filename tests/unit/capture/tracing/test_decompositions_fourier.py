"""Fourier transforms as products, against PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fusionai.capture.capture import Captured, capture
from fusionai.capture.checking.self_check import self_check
from fusionai.capture.models.source import FactorySource
from fusionai.capture.tasks import ExampleInput
from fusionai.capture.tracing.decompositions import LARGEST_TRANSFORM
from fusionai.capture.tracing.functions import Functions
from fusionai.primitives.errors import ModelError
from harness.complex_models import FourierMixing, FrequencyFilters

pytestmark = pytest.mark.slow

NORMS = [None, "backward", "ortho", "forward"]
ONE = ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"]
MANY = ["fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn", "rfftn", "irfftn"]
REAL_ONLY = ("rfft", "ihfft", "rfft2", "rfftn")


def numbers(*sizes: int, kind: str = "real") -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.complex64 if kind == "complex" else torch.float32
    return torch.randn(sizes, generator=generator, dtype=dtype)


def alike(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    for products in (False, True):
        given = x.clone().requires_grad_()
        if products:
            with Functions():
                result = call(given)
        else:
            result = call(given)
        flat = torch.view_as_real(result.resolve_conj()) if result.is_complex() else result
        weights = torch.arange(flat.numel(), dtype=torch.float32).reshape(flat.shape).cos()
        (gradient,) = torch.autograd.grad((flat * weights).sum(), given)
        results.append((result.detach(), gradient))
    (wanted, wanted_gradient), (found, found_gradient) = results
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= 2e-6 * wanted.abs().max()
    assert (found_gradient - wanted_gradient).abs().max() <= 2e-6 * wanted_gradient.abs().max()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ONE)
def test_one_dimension_is_pytorchs(name: str, norm: str | None) -> None:
    function = getattr(torch.fft, name)
    for kind in ("real",) if name in REAL_ONLY else ("real", "complex"):
        for length in (7, 12):
            for asked in ({}, {"n": 5}, {"n": 8}, {"n": 15}, {"dim": 1}, {"dim": -2, "n": 6}):
                alike(lambda x, asked=asked: function(x, norm=norm, **asked), numbers(3, 6, length, kind=kind))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", MANY)
def test_several_dimensions_are_pytorchs(name: str, norm: str | None) -> None:
    function = getattr(torch.fft, name)
    asked: list[dict[str, Any]] = [{}, {"s": (5, 9)}, {"dim": (1, 2)}, {"dim": (0, 2), "s": (4, 4)}, {"s": (-1, 6)}]
    for kind in ("real",) if name in REAL_ONLY else ("real", "complex"):
        for given in asked:
            # PyTorch wants the dimensions named where sizes are.
            given = {"dim": (-2, -1), **given} if "s" in given else given
            alike(lambda x, given=given: function(x, norm=norm, **given), numbers(3, 6, 7, kind=kind))


def test_a_long_dimension_is_as_exact_as_a_short_one() -> None:
    x = numbers(2, 3001)
    with Functions():
        found = torch.fft.rfft(x)
    wanted = torch.fft.rfft(x.double())
    assert (found - wanted).abs().max() <= 2e-6 * wanted.abs().max()


def test_whole_numbers_are_transformed_as_floating_ones() -> None:
    x = torch.arange(12).reshape(3, 4)
    with Functions():
        found = torch.fft.fft(x)
    torch.testing.assert_close(found, torch.fft.fft(x))


def test_what_is_too_large_for_a_matrix_is_refused() -> None:
    with Functions(), pytest.raises(ModelError, match="too large for a product"):
        torch.fft.rfft(torch.zeros(LARGEST_TRANSFORM + 1))


class Correlation(nn.Module):
    """As Autoformer: correlation of sequences by their spectra, of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = torch.fft.rfft(self.query(x), dim=1), torch.fft.rfft(self.key(x), dim=1)
        return torch.fft.irfft(query * torch.conj(key), n=x.shape[1], dim=1)


def checked(made: Captured) -> None:
    result = self_check(made)
    assert result.forward_diff <= 2e-6
    assert result.gradient_diff is not None
    assert result.gradient_diff <= 1e-5


def test_a_model_that_mixes_by_transforms_is_captured_for_every_length() -> None:
    ids = ExampleInput(torch.arange(36).reshape(4, 9) * 7 % 31, ("b", "s"))
    made = capture(
        FactorySource(FourierMixing),
        task="masked_lm",
        batch=(1, 8),
        sequence=(1, 40),
        example_inputs={"input_ids": ids},
    )
    assert made.graph.symbols == {"b": (1, 8), "s": (1, 40)}
    checked(made)


def test_filters_of_frequencies_are_captured() -> None:
    example = {"image": numbers(2, 6, 6, 5)}
    checked(capture(FactorySource(FrequencyFilters), task="regression", batch=(1, 8), example_inputs=example))


def test_a_correlation_by_spectra_is_captured_for_every_length() -> None:
    example = {"x": ExampleInput(numbers(2, 9, 5), ("b", "s", None))}
    made = capture(
        FactorySource(Correlation), task="regression", batch=(1, 8), sequence=(2, 20), example_inputs=example
    )
    assert made.graph.symbols["s"] == (2, 20)
    checked(made)
