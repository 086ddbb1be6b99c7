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


@pytest.mark.parametrize("settings", [([1, 1, 1],), (1, [1, 1, 1]), (1, 1, 1, 1, [2, 2, 2]), ([],)])
def test_convolutions_refuse_settings_of_another_number_of_dimensions(settings: tuple[object, ...]) -> None:
    with pytest.raises(ExecutionError, match=r"expected settings of 1 or 2 sizes, got \["):
        RULES["aten.conv_transpose2d.input"](X, W, None, *settings)


def test_a_cumulative_sum_of_exponentials_needs_floats() -> None:
    with pytest.raises(ExecutionError, match="a tensor of floating-point numbers"):
        RULES["aten.logcumsumexp.default"](torch.zeros(3, dtype=torch.int64), 0)
    RULES["aten.logcumsumexp.default"](torch.zeros(3), 0)


@pytest.mark.parametrize("sizes", [[2**31 - 1, 2], [1, 2**31], LARGEST_STRIDE + 1])
def test_a_pooling_makes_a_limited_number_of_places(sizes: list[int] | int) -> None:
    with pytest.raises(ExecutionError, match=f"at most {LARGEST_STRIDE} places in each dimension"):
        RULES["aten.adaptive_avg_pool2d.default"](X, sizes)
    RULES["aten.adaptive_avg_pool2d.default"](X, [3, LARGEST_STRIDE])


def test_a_tensor_is_cut_into_a_limited_number_of_pieces() -> None:
    with pytest.raises(ExecutionError, match="at most 4096 pieces"):
        RULES["aten.chunk.default"](torch.zeros(0, 2), 2**31 - 1)
    RULES["aten.chunk.default"](torch.zeros(0, 2), 4096)


def test_a_norm_of_no_elements_is_refused() -> None:
    with pytest.raises(ExecutionError, match="at least one element"):
        RULES["aten._weight_norm_interface.default"](torch.zeros(1, 0), torch.zeros(1, 0), 1)
    RULES["aten._weight_norm_interface.default"](torch.zeros(2, 3), torch.zeros(2, 1), 0)


def test_a_cross_entropy_has_a_target_per_element() -> None:
    rule, x = RULES["aten.binary_cross_entropy.default"], torch.zeros(4, 3)
    for target, weight in ((torch.zeros(0, 4), None), (x, torch.zeros(4)), (x, torch.zeros(1, 1, 3))):
        with pytest.raises(ExecutionError, match=r"expected (targets of sizes|weights that broadcast to) \[4, 3\]"):
            rule(x, target, weight, 2)
    for weight in (None, torch.zeros(3), torch.zeros(4, 1), x):
        rule(x, x, weight, 2)


def test_differences_are_taken_a_limited_number_of_times() -> None:
    rule = RULES["aten.diff.default"]
    for x, n in ((torch.zeros(5), 6), (torch.zeros(5), 2**31), (torch.zeros(5), -1), (torch.zeros(100), 65)):
        with pytest.raises(ExecutionError, match="times, got"):
            rule(x, n)
    with pytest.raises(ExecutionError, match="a dimension of the operand"):
        rule(torch.zeros(5), 1, 1)
    for x, n in ((torch.zeros(5), 1), (torch.zeros(5, 2), 2), (torch.zeros(0), 1), (torch.zeros(5), 0)):
        rule(x, n)
