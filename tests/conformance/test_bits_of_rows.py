"""What torch's own operators promise to serving, tried on this processor: a row's and an element's bits are its own.

Kernels of vectors end in scalar loops, and reductions go another way for few rows on some processors: what a stage that
serves relies on is tried here for every operator that it may hold, at every level that `test_levels` runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

from fusionai.backends.torch.operators import PLAIN
from fusionai.backends.torch.packed_graph import (
    _TAILED,
    gated,
    one_by_one,
    whole_blocks,
)
from fusionai.ir.operators import OPERATORS

pytestmark = pytest.mark.levels

ELEMENTS: Final = 1003
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Call = Callable[[Callable[..., torch.Tensor], Operands], list[torch.Tensor]]
ARGUMENTS: Final[dict[str, Call]] = {
    "aten.pow.Tensor_Scalar": lambda f, x: [f(x[0].abs(), e) for e in (0.5, -0.5, 2, 3, 1.7, -1, -2)],
    "aten.pow.Tensor_Tensor": lambda f, x: [f(x[0].abs(), x[1]), f(x[0].abs(), x[1][:1])],
    "aten.pow.Scalar": lambda f, x: [f(2.5, x[0])],
    "aten.log.default": lambda f, x: [f(x[0].abs())],
    "aten.log1p.default": lambda f, x: [f(x[0].abs())],
    "aten.sqrt.default": lambda f, x: [f(x[0].abs())],
    "aten.rsqrt.default": lambda f, x: [f(x[0].abs())],
    "aten.gelu.default": lambda f, x: [f(x[0]), f(x[0], approximate="tanh")],
    "aten.lerp.Scalar": lambda f, x: [f(x[0], x[1], 0.3)],
    "aten.add.Tensor": lambda f, x: [f(x[0], x[1]), f(x[0], x[1], alpha=0.3)],
    "aten.sub.Tensor": lambda f, x: [f(x[0], x[1]), f(x[0], x[1], alpha=0.3)],
    "aten.rsub.Scalar": lambda f, x: [f(x[0], 1.7), f(x[0], 1.7, 0.3)],
    "aten.where.self": lambda f, x: [f(x[0] > 0, x[1], x[2])],
    "aten.where.ScalarOther": lambda f, x: [f(x[0] > 0, x[1], 1.7)],
    "aten.where.ScalarSelf": lambda f, x: [f(x[0] > 0, 1.7, x[1])],
    "aten.masked_fill.Scalar": lambda f, x: [f(x[0], x[1] > 0, 1.7)],
    "aten.masked_fill.Tensor": lambda f, x: [f(x[0], x[1] > 0, torch.tensor(1.7))],
    "aten.div.Tensor_mode": lambda f, x: [f(x[0], x[1], rounding_mode="floor")],
    "aten.div.Scalar_mode": lambda f, x: [f(x[0], 1.7, rounding_mode="floor")],
    "aten.prelu.default": lambda f, x: [f(x[0], torch.tensor([0.3]))],
    "aten.addcmul.default": lambda f, x: [f(x[0], x[1], x[2]), f(x[0], x[1], x[2], value=0.3)],
    "aten.addcdiv.default": lambda f, x: [f(x[0], x[1], x[2]), f(x[0], x[1], x[2], value=0.3)],
    "aten.lerp.Tensor": lambda f, x: [f(x[0], x[1], x[2])],
    "aten.threshold.default": lambda f, x: [f(x[0], 0.1, 0.3)],
    "aten.glu.default": lambda f, x: [f(torch.cat([x[0], x[1]]), 0), f(torch.stack([x[0], x[1]], 1))[:, 0]],
    "aten.linalg_cross.default": lambda f, x: [f(torch.stack(x, 1), torch.stack([x[1], x[2], x[0]], 1))[:, 0]],
    **{
        f"aten.{name}.default": lambda f, x: [f(x[0], x[1])]
        for name in ("atan2", "fmax", "fmin", "heaviside", "hypot", "logaddexp")
    },
}
OF_WHOLE_NUMBERS: Final = ("aten.bitwise_", "aten.__", "aten.logical_")
ELEMENTWISE: Final = sorted(
    name
    for name, operator in OPERATORS.items()
    if operator.category == "elementwise" and name in PLAIN and not name.startswith(OF_WHOLE_NUMBERS)
)


def operands() -> Operands:
    generator = torch.Generator().manual_seed(2)
    x, y, z = (torch.randn(ELEMENTS, generator=generator) for _ in range(3))
    return x * torch.exp2(torch.randint(-3, 3, (ELEMENTS,), generator=generator).float()), y, z


def call_of(name: str) -> Call:
    """With as many operands as the operator takes."""
    if name in ARGUMENTS:
        return ARGUMENTS[name]
    kind = name.rsplit(".", 1)[1]
    if kind == "Scalar":
        return lambda f, x: [f(x[0], 1.7)]
    two = ("Tensor", "Tensor_Tensor")
    binary = kind in two or any(word in name for word in ("maximum", "minimum", "floor_divide"))
    if name == "aten.clamp.Tensor":
        return lambda f, x: [f(x[0], x[1], x[2])]
    if name in ("aten.clamp.default", "aten.clamp_min.default", "aten.clamp_max.default"):
        return lambda f, x: [f(x[0], 0.1)]
    return (lambda f, x: [f(x[0], x[1])]) if binary else (lambda f, x: [f(x[0])])


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_element_has_the_same_bits_wherever_it_stands(name: str) -> None:
    compute = whole_blocks(PLAIN[name]) if name in _TAILED else PLAIN[name]
    compute = gated(compute) if name == "aten.glu.default" else compute
    call, given = call_of(name), operands()

    def some(choose: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        x, y, z = (choose(one) for one in given)
        return call(compute, (x, y, z))

    whole = some(lambda x: x)
    # At the beginning, behind the last whole vector, unaligned, with steps, one by one.
    views: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], slice]] = {
        "offset": (lambda x: x[3:], slice(3, None)),
        "short": (lambda x: x[:5], slice(5)),
        "strided": (lambda x: torch.stack([x, x], 1)[:, 0], slice(None)),
        **{
            f"alone {at}": (lambda x, at=at: x[at : at + 1].clone(), slice(at, at + 1)) for at in range(0, ELEMENTS, 31)
        },
    }
    if name == "aten.pow.Tensor_Tensor":
        views = {"strided": views["strided"]}  # the broadcast operand is the first element's
    for view, (choose, place) in views.items():
        for got, expected in zip(some(choose), whole, strict=True):
            assert torch.equal(torch.nan_to_num(got), torch.nan_to_num(expected[place])), view


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(1, x.shape[1], 4, -1)


_ATEN: Final[Any] = torch.ops.aten
REDUCTIONS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "sum": lambda x: _ATEN.sum.dim_IntList(x, [-1]),
    "mean": lambda x: _ATEN.mean.dim(x, [-1], True),
    "mean of heads": lambda x: _ATEN.mean.dim(_heads(x).transpose(1, 2), [-1]).transpose(1, 2),
    "sum over heads": lambda x: _ATEN.sum.dim_IntList(_heads(x), [-2]),
    "cumsum": lambda x: _ATEN.cumsum.default(x, -1),
    "var": lambda x: _ATEN.var.correction(x, [-1], correction=0, keepdim=True),
    "std": lambda x: _ATEN.std.correction(x, [-1], correction=1),
    "logsumexp": lambda x: _ATEN.logsumexp.default(x, [-1]),
    "vector norm": lambda x: _ATEN.linalg_vector_norm.default(x, 2, [-1]),
    "softmax": lambda x: _ATEN._softmax.default(x, -1, False),
    "log softmax": lambda x: _ATEN._log_softmax.default(x, -1, False),
    "layer norm": lambda x: _ATEN.native_layer_norm.default(x, [x.shape[-1]], None, None, 1e-5)[0],
    "rms norm": lambda x: _ATEN.rms_norm.default(x, [x.shape[-1]], None, 1e-5),
    "norm of heads": lambda x: _ATEN.native_layer_norm.default(_heads(x), [x.shape[-1] // 4], None, None, 1e-5)[0],
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_row_is_reduced_to_the_same_bits_among_any_number(name: str) -> None:
    compute = REDUCTIONS[name]
    for width in (24, 100, 2048, 5000):
        x = torch.randn((1, 37, width), generator=torch.Generator().manual_seed(width))
        whole = compute(x)
        for rows in (1, 2, 3, 5, 16, 33):
            for start in (0, 37 - rows):
                got = compute(x[:, start : start + rows].contiguous())
                assert torch.equal(got, whole[:, start : start + rows]), (width, rows)


@pytest.mark.parametrize("items", [1, 2, 3, 7, 16, 40])
@pytest.mark.parametrize("shape", [(24, 33), (48, 64), (64, 256)])
def test_a_product_of_batches_is_the_same_among_any_number(items: int, shape: tuple[int, int]) -> None:
    """Modules that choose a matrix for every row multiply so: a batch of products of one row each."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn((40, *shape), generator=generator)
    x = torch.randn((40, shape[1], 1), generator=generator)
    multiply = one_by_one(torch.bmm)
    whole, some = multiply(weight, x), multiply(weight[-items:].clone(), x[-items:].clone())
    assert torch.allclose(whole, torch.bmm(weight, x), atol=1e-4)
    assert torch.equal(some, whole[-items:])
    # Scans multiply so with a dimension more.
    assert torch.equal(multiply(weight[None, -items:], x[None, -items:]), whole[None, -items:])
