"""Arguments of operators, normalised as torch normalises them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fusionai.backends.semantics import adaptive_windows, by_name, conv_pads, pad_widths, slice_bounds


@pytest.mark.parametrize("start", [None, 0, 2, 7, 99, -1, -3, -99])
@pytest.mark.parametrize("end", [None, 0, 2, 7, 99, -1, -3, -99, 2**63 - 1])
def test_slices_are_clamped(start: int | None, end: int | None) -> None:
    first, last = slice_bounds(7, start, end)
    assert torch.ops.aten.slice.Tensor(torch.arange(7), 0, start, end).tolist() == list(range(first, last))


def test_pads_are_given_from_the_last_dimension_on() -> None:
    before_and_after = pad_widths([1, 2, 3, 4], 3)
    assert before_and_after == [(0, 0), (3, 4), (1, 2)]
    padded = F.pad(torch.zeros(2, 5, 7), [1, 2, 3, 4])
    assert padded.shape == tuple(size + sum(pair) for size, pair in zip((2, 5, 7), before_and_after, strict=True))


@pytest.mark.parametrize(("padding", "expected"), [("valid", [(0, 0)]), ("same", [(1, 2)]), (3, [(3, 3)])])
def test_pads_of_convolutions(padding: int | str, expected: list[tuple[int, int]]) -> None:
    assert conv_pads([4], [1], padding) == expected


def test_windows_of_adaptive_pools_are_torchs() -> None:
    x = torch.randn(1, 1, 7)
    means = [x[..., first:end].mean() for first, end in adaptive_windows(7, 3)]
    torch.testing.assert_close(F.adaptive_avg_pool1d(x, 3).flatten(), torch.stack(means))


def test_later_arguments_are_passed_by_name() -> None:
    run = by_name(lambda x, **options: (x, options), ("stride", "groups"), behind=1, transposed=True)
    assert run(5, 2) == (5, {"stride": 2, "transposed": True})
    assert run(5, 2, groups=3) == (5, {"stride": 2, "groups": 3, "transposed": True})
