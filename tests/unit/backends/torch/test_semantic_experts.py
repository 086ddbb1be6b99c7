"""Products by experts equal products with one weight per row, whichever experts have rows."""

from __future__ import annotations

import pytest
import torch

from fusionai.backends.torch.semantic import expert_linear


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("chosen", [[0, 2, 0, 2, 2], [1, 1, 1, 1, 1], [2, 1, 0, 2, 1]])
def test_each_row_is_multiplied_by_its_experts_weight(chosen: list[int], transposed: bool) -> None:
    x, weight = drawn(5, 4), drawn(3, *((4, 6) if transposed else (6, 4)), seed=1)
    experts = torch.tensor(chosen)
    made = expert_linear(x, weight, experts, transposed=transposed)
    own = weight[experts] if transposed else weight[experts].transpose(1, 2)
    wanted = torch.bmm(x[:, None], own)[:, 0]
    torch.testing.assert_close(made, wanted)
    probe = drawn(5, 6, seed=2).detach()
    for found, expected in zip(
        torch.autograd.grad((made * probe).sum(), (x, weight)),
        torch.autograd.grad((wanted * probe).sum(), (x, weight)),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


def test_without_rows_there_is_nothing() -> None:
    assert expert_linear(drawn(0, 4), drawn(3, 6, 4), torch.zeros(0, dtype=torch.int64)).shape == (0, 6)
