"""Rules that the fuzzer on guarded memory asked for: the operands that crashed a kernel, and their legal neighbours."""

from __future__ import annotations

import pytest
import torch

from fusionai.backends.operands import LARGEST_STRIDE, RULES
from fusionai.primitives.errors import ExecutionError

X, W = torch.zeros(2, 3, 6, 6), torch.zeros(4, 3, 3, 3)


@pytest.mark.parametrize("widths", [[2, -3], [-3, 1], [-1, -1]])
def test_circular_padding_that_cuts_is_refused(widths: list[int]) -> None:
    with pytest.raises(ExecutionError, match=r"expected circular padding of 0 or more, got \["):
        RULES["aten.pad.default"](X, widths, "circular")
    RULES["aten.pad.default"](X, widths, "constant", 0.0)
    RULES["aten.pad.default"](X, [abs(width) for width in widths], "circular")


@pytest.mark.parametrize(
    ("operator", "settings"),
    [
        ("conv1d.default", ([2**31 - 1],)),
        ("conv2d.default", ([1, 1], [0, 0], [1, 2**31])),
        ("conv1d.padding", ([2**31 - 1], "valid")),
        ("conv2d.padding", (2**31 - 1, "valid")),
        ("convolution.default", ([1, 2**31 - 1], [1, 1], [1, 1], False, [0, 0], 1)),
        ("conv_transpose2d.input", ([1, 1], [-(2**31), 0])),
    ],
)
def test_convolutions_refuse_strides_that_overflow(operator: str, settings: tuple[object, ...]) -> None:
    with pytest.raises(ExecutionError, match=f"strides, paddings and dilations up to {LARGEST_STRIDE}"):
        RULES[f"aten.{operator}"](X, W, None, *settings)
    RULES[f"aten.{operator}"](X, W, None)
    RULES[f"aten.{operator}"](X, W, None, [LARGEST_STRIDE, 1], "same", True)
