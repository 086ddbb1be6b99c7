"""Products with the chosen experts' matrices in a serving graph: their numbers, their bits, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusionai.backends.torch.packed_graph import PackedParameter, kernels, only_packed, products
from fusionai.backends.torch.packed_linear import pack
from fusionai.ir.schema import Graph, Node, ParamSpec, Ref, ValueSpec
from fusionai.primitives.errors import ExecutionError
from fusionai.wire.serving import WeightFormat

EXPERTS, WIDTH, OUT = 5, 24, 40


def graph(*, transposed: bool) -> Graph:
    """Two rows of width 24 for each position, each multiplied by one of five matrices [40, 24]."""
    shape = (EXPERTS, WIDTH, OUT) if transposed else (EXPERTS, OUT, WIDTH)
    return Graph(
        name="experts",
        symbols={"s": (1, 64)},
        inputs=("x", "experts"),
        outputs={"made": "made"},
        values={
            "x": ValueSpec(("2*s", WIDTH), "float32"),
            "experts": ValueSpec(("2*s",), "int64"),
            "weight": ValueSpec(shape, "float32"),
            "made": ValueSpec(("2*s", OUT), "float32"),
        },
        params={"weight": ParamSpec(key="weight", kind="parameter", shape=shape, dtype="float32")},
        nodes=(
            Node(
                id=7,
                op="fusion.expert_linear",
                args=(Ref("x"), Ref("weight"), Ref("experts")),
                kwargs={"transposed": True} if transposed else {},
                outputs=("made",),
                block=1,
            ),
        ),
    )


def kernel(weight: torch.Tensor, form: WeightFormat, *, transposed: bool) -> Callable[..., torch.Tensor]:
    """The product of rows with their experts' matrices, packed; weight [5, 40, 24]."""
    made = graph(transposed=transposed)
    uses = products(made)
    assert only_packed(made, uses) == {"weight"}
    assert uses[7].transposed == transposed
    run: Callable[..., Any] = kernels(made, uses, frozenset())[7]
    parameter = PackedParameter(None, {7: [pack(one, None, form, "weight", in_blocks=True) for one in weight]})
    return lambda x, experts: run(x, parameter, experts, transposed=transposed)


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    return torch.randn((EXPERTS, OUT, WIDTH), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("transposed", [False, True])
def test_each_row_is_multiplied_by_the_matrix_of_its_expert(transposed: bool, weight: torch.Tensor):
    run = kernel(weight, "fp32", transposed=transposed)
    x = torch.randn((12, WIDTH), generator=torch.Generator().manual_seed(1))
    experts = torch.tensor([3, 3, 0, 4, 0, 3, 1, 1, 4, 0, 0, 3])
    torch.testing.assert_close(run(x, experts), torch.einsum("ri,roi->ro", x, weight[experts]))
    assert run(x[:0], experts[:0]).shape == (0, OUT)


@pytest.mark.parametrize("form", ["fp32", "bf16", "int8"])
def test_a_rows_bits_are_the_same_whoever_goes_to_its_expert(form: WeightFormat, weight: torch.Tensor):
    run = kernel(weight, form, transposed=False)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn((64, WIDTH), generator=generator)
    experts = torch.randint(0, EXPERTS, (64,), generator=generator)
    alone = torch.cat([run(x[row : row + 1], experts[row : row + 1]) for row in range(64)])
    assert torch.equal(run(x, experts), alone)
    order = torch.randperm(64, generator=generator)[:23]
    assert torch.equal(run(x[order], experts[order]), alone[order])


def test_operands_that_do_not_fit_are_refused_before_memory_is_read(weight: torch.Tensor):
    run = kernel(weight, "fp32", transposed=False)
    x, experts = torch.ones(4, WIDTH), torch.tensor([0, 1, 2, 4])
    for wrong in (experts[:3], experts[None], torch.tensor([0, 1, 2, 5]), torch.tensor([0, -1, 2, 4])):
        with pytest.raises(ExecutionError, match="expected"):
            run(x, wrong)
    with pytest.raises(ExecutionError, match="rows as wide as the experts take"):
        run(x[:, :20], experts)
