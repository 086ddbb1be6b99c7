"""Resizing as selections and sums, against PyTorch's own operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusionai.capture.capture import capture
from fusionai.capture.checking.self_check import self_check
from fusionai.capture.models.source import FactorySource
from fusionai.capture.tracing.decompositions import resizing

OPERATORS = torch.ops.aten
ASKED: list[dict[str, Any]] = [
    {"scale": 2.0},
    {"scale": 1.7},
    {"scale": 0.6},
    {"size": 11},
    {"size": 3},
    {"size": 1},
]


@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_forward_and_gradients_are_pytorchs(asked: dict[str, Any], rank: int, dtype: torch.dtype) -> None:
    table = resizing()
    linear = {1: OPERATORS.upsample_linear1d, 2: OPERATORS.upsample_bilinear2d, 3: OPERATORS.upsample_trilinear3d}[rank]
    cases: list[tuple[Any, tuple[Any, ...]]] = [
        (getattr(OPERATORS, f"upsample_nearest{rank}d"), ()),
        (getattr(OPERATORS, f"_upsample_nearest_exact{rank}d"), ()),
        (linear, (False,)),
        (linear, (True,)),
    ]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, *(5, 7, 4)[:rank], generator=generator).to(dtype)
    size = [asked["size"]] * rank if "size" in asked else None
    factors = [asked["scale"]] * rank if "scale" in asked else None
    reached = size or [int(length * asked["scale"]) for length in x.shape[2:]]
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    for packet, corners in cases:
        for overload, arguments in (
            (packet.vec, (size, *corners, factors)),
            (packet.default, (reached, *corners, *(factors or [None] * rank))),
        ):
            results: list[tuple[torch.Tensor, torch.Tensor]] = []
            for function in (overload, table[overload]):
                given = x.clone().requires_grad_()
                result = function(given, *arguments)
                (gradient,) = torch.autograd.grad(result.float().square().sum(), given)
                results.append((result.detach(), gradient))
            (wanted, wanted_gradient), (found, found_gradient) = results
            assert found.dtype == dtype
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(found_gradient, wanted_gradient, rtol=10 * tolerance, atol=10 * tolerance)
            if "nearest" in str(packet):
                assert torch.equal(found, wanted)


class Resized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.up = nn.Upsample(scale_factor=2, mode="nearest")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.up(self.first(x)))
        x = F.interpolate(x, size=(9, 5), mode="bilinear", align_corners=False)
        return F.interpolate(x, scale_factor=1.5, mode="bilinear", align_corners=True)


@pytest.mark.slow
def test_a_module_that_resizes_is_captured() -> None:
    example = {"x": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))}
    made = capture(FactorySource(Resized), task="regression", batch=(1, 8), example_inputs=example)
    assert not [node.op for node in made.graph.nodes if "upsample" in node.op]
    result = self_check(made)
    assert result.forward_diff <= 1e-6
    assert result.gradient_diff is not None
    assert result.gradient_diff <= 1e-5
