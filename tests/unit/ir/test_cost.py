"""Costs against sums done by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from fusionai.ir.blocks import assign_blocks
from fusionai.ir.cost import block_costs
from fusionai.ir.partition import FEED, cut_blocks
from fusionai.ir.schema import Graph, ListArg
from fusionai.primitives.errors import GraphError
from fusionai.primitives.tensors import ITEMSIZE_BYTES

SIZES = {"b": 3, "s": 5}


def test_linear_chain_by_hand(make: Callable[..., Any]) -> None:
    g = make()
    x = g.input("x", ("b", "s", 4), "float32")
    a = g.node("aten.linear.default", x, g.param("a", (6, 4)), g.param("bias", (6,)), shape=("b", "s", 6), block=0)
    r = g.node("aten.relu.default", a, shape=("b", "s", 6), block=0)
    g.outputs["y"] = g.node("aten.linear.default", r, g.param("c", (2, 6)), shape=("b", "s", 2), block=1)
    first, second = block_costs(g.graph(), SIZES, training=True)
    rows = 15
    assert first.forward_flops == 2 * rows * 6 * 4 + rows * 6
    # Data wants no gradient: one product for the weight, none for x; relu once.
    assert first.backward_flops == 2 * rows * 6 * 4 + rows * 6
    assert second.forward_flops == 2 * rows * 2 * 6
    assert second.backward_flops == 2 * (2 * rows * 2 * 6)
    assert first.parameter_bytes == first.trainable_bytes == 4 * (24 + 6)
    # x for the weight's gradient, relu's result.
    assert first.activation_bytes == 4 * rows * (4 + 6)
    assert second.activation_bytes == 4 * rows * 6
    assert first.output_bytes == first.gradient_bytes == 4 * rows * 6
    assert second.output_bytes == second.gradient_bytes == 0
    assert first.ops == ("aten.linear.default", "aten.relu.default")


def test_without_training_there_is_no_backward(model: Graph) -> None:
    for record in block_costs(assign_blocks(model), SIZES, training=False):
        assert record.backward_flops == 0
        assert record.activation_bytes == 0
        assert record.gradient_bytes == 0


def test_backward_depends_on_what_is_upstream(make: Callable[..., Any]) -> None:
    def costs(*, first_frozen: bool, second_frozen: bool) -> tuple[float, float]:
        g = make()
        x = g.input("x", ("b", 4), "float32")
        a = g.node("aten.mm.default", x, g.param("a", (4, 4), frozen=first_frozen), shape=("b", 4), block=0)
        g.outputs["y"] = g.node(
            "aten.mm.default", a, g.param("c", (4, 4), frozen=second_frozen), shape=("b", 4), block=1
        )
        first, second = block_costs(g.graph(), SIZES, training=True)
        forward = 2 * 3 * 4 * 4
        assert first.forward_flops == second.forward_flops == forward
        return first.backward_flops / forward, second.backward_flops / forward

    assert costs(first_frozen=False, second_frozen=False) == (1, 2)
    assert costs(first_frozen=True, second_frozen=False) == (0, 1)
    assert costs(first_frozen=False, second_frozen=True) == (1, 1)
    assert costs(first_frozen=True, second_frozen=True) == (0, 0)


def test_only_the_factor_that_is_needed_is_kept(make: Callable[..., Any]) -> None:
    def kept(*, frozen: bool) -> int:
        g = make()
        x = g.input("x", ("b", 4), "float32")
        a = g.node("aten.mm.default", x, g.param("a", (4, 4)), shape=("b", 4), block=0)
        g.outputs["y"] = g.node("aten.mm.default", a, g.param("c", (4, 6), frozen=frozen), shape=("b", 6), block=1)
        return block_costs(g.graph(), SIZES, training=True)[1].activation_bytes

    assert kept(frozen=False) == 4 * 3 * 4
    # The gradient of `a` needs the frozen weight only, which is there anyway.
    assert kept(frozen=True) == 0


def test_attention_by_hand(make: Callable[..., Any]) -> None:
    g = make()
    x = g.input("x", ("b", "s", 8), "float32")
    shape = ("b", 2, "s", 4)
    q = g.node("aten.reshape.default", g.node("aten.linear.default", x, g.param("q", (8, 8)), shape=("b", "s", 8)),
               ListArg((3, 2, 5, 4)), shape=shape)  # fmt: skip
    k = g.input("k", ("b", 1, "s", 4), "float32")
    v = g.input("v", ("b", 1, "s", 6), "float32")
    g.outputs["y"] = g.node("fusion.attention", q, k, v, causal=True, shape=("b", 2, "s", 6), block=1)
    _, record = block_costs(g.graph(), SIZES, training=True)
    assert record.forward_flops == 2 * 3 * 2 * 5 * 5 * (4 + 6)
    assert record.backward_flops == 2.5 * record.forward_flops
    # q under the name of what it is a view of, k, v and the result.
    assert record.activation_bytes == 4 * 3 * 5 * (8 + 4 + 6 + 12)


@pytest.mark.parametrize(
    ("op", "weight", "result", "extra", "expected"),
    [
        ("aten.conv2d.default", (8, 3, 3, 3), (2, 8, 6, 6), (None, 1, 0), 2 * (2 * 8 * 6 * 6) * (3 * 3 * 3)),
        ("aten.conv2d.default", (6, 1, 3, 3), (2, 6, 6, 6), (None, 1, 0, 1, 3), 2 * (2 * 6 * 6 * 6) * 9),
        ("aten.conv_transpose2d.input", (3, 8, 2, 2), (2, 8, 9, 9), (), 2 * (2 * 3 * 8 * 8) * (8 * 2 * 2)),
    ],
)
def test_convolutions_by_hand(
    make: Callable[..., Any],
    op: str,
    weight: tuple[int, ...],
    result: tuple[int, ...],
    extra: tuple[Any, ...],
    expected: int,
) -> None:
    g = make()
    x = g.input("x", (2, 3, 8, 8), "float32")
    g.outputs["y"] = g.node(op, x, g.param("w", weight), *extra, shape=result)
    (record,) = block_costs(g.graph(), {}, training=True)
    assert record.forward_flops == record.backward_flops == expected


def test_addmm_counts_its_product(make: Callable[..., Any]) -> None:
    g = make()
    x = g.input("x", ("b", 4), "float32")
    g.outputs["y"] = g.node("aten.addmm.default", g.param("bias", (6,)), x, g.param("w", (4, 6)), shape=("b", 6))
    (record,) = block_costs(g.graph(), SIZES, training=True)
    assert record.forward_flops == record.backward_flops == 2 * 3 * 6 * 4


def test_views_cost_nothing_and_share_memory(make: Callable[..., Any]) -> None:
    g = make()
    x = g.input("x", ("b", 4), "float32")
    a = g.node("aten.mm.default", x, g.param("w", (4, 4)), shape=("b", 4), block=0)
    flat = g.node("aten.reshape.default", a, ListArg((-1,)), shape=("b*4",), block=1)
    wide = g.node("aten.unsqueeze.default", flat, 0, shape=(1, "b*4"), block=1)
    g.outputs["y"] = g.node("aten.mul.Tensor", wide, flat, shape=(1, "b*4"), block=1)
    _, record = block_costs(g.graph(), SIZES, training=True)
    assert record.forward_flops == 12
    assert record.activation_bytes == 4 * 12


def test_cut_bytes_equal_what_routes_carry(transformer_of: Callable[[int], Graph]) -> None:
    graph = assign_blocks(transformer_of(3))
    records = block_costs(graph, SIZES, training=True)
    for cut_at in range(1, len(records)):
        partition = cut_blocks(graph, [(0, cut_at), (cut_at, len(records))])
        crossing = [route for route in partition.routes if route.producer != FEED]
        sizes = {r.value: _bytes(graph, r.value) for r in crossing}
        assert records[cut_at - 1].output_bytes == sum(sizes.values())
        assert records[cut_at - 1].gradient_bytes == sum(sizes[r.value] for r in crossing if r.needs_grad)


def _bytes(graph: Graph, value: str) -> int:
    spec = graph.values[value]
    size = ITEMSIZE_BYTES[spec.dtype]
    for dim in spec.shape:
        size *= SIZES[dim] if isinstance(dim, str) else dim
    return size


def test_equal_layers_cost_the_same(transformer_of: Callable[[int], Graph]) -> None:
    records = block_costs(assign_blocks(transformer_of(4)), SIZES, training=True)
    plain = {msgspec.structs.replace(record, block=0) for record in records[1:5]}
    assert len(plain) == 1
    # A tied table counts where it is held; the rotary buffer is in block 0 as well.
    assert records[0].trainable_bytes == records[5].trainable_bytes == 4 * 16 * 8
    assert records[0].parameter_bytes == 4 * (16 * 8 + 8)


def test_a_missing_symbol_is_named(model: Graph) -> None:
    with pytest.raises(GraphError, match="unknown symbol 's'"):
        block_costs(model, {"b": 1}, training=True)


def test_copies_of_weights_in_bfloat16_are_kept_by_every_microbatch(make: Callable[..., Any]) -> None:
    g = make()
    x = g.input("x", ("b", "s", 4), "float32")
    scaled = g.node("aten.mul.Tensor", x, g.param("scale", (4,)), shape=("b", "s", 4), block=0)
    g.outputs["y"] = g.node("aten.linear.default", scaled, g.param("c", (2, 4)), shape=("b", "s", 2), block=1)
    plain = block_costs(g.graph(), SIZES, training=True)
    copied = block_costs(g.graph(), SIZES, training=True, copies=True)
    more_bytes = [cost.activation_bytes - before.activation_bytes for cost, before in zip(copied, plain, strict=True)]
    assert more_bytes == [0, 2 * 8], "only products read copies"
