"""On which ways gradients go back through a cut, and in which order they meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusionai.ir.gradients import ALIAS, GradientRoute, shared_uses
from fusionai.ir.partition import cut
from fusionai.ir.schema import Graph, Ref
from fusionai.ir.validate import validate


def chain(make: Callable[..., Any], readers: int) -> tuple[Graph, str]:
    """A value that so many nodes after each other read."""
    g = make()
    x = g.input("x", ("b", 4), "float32")
    value = y = g.node("aten.linear.default", x, g.param("w", (4, 4)), shape=("b", 4))
    for _ in range(readers):
        y = g.node("aten.add.Tensor", y, value, shape=("b", 4))
    g.outputs["y"] = y
    return g.graph(), value


def stages(*parts: set[int]) -> list[frozenset[int]]:
    return [frozenset(part) for part in parts]


def route(value: str, sender: int, receiver: int) -> GradientRoute:
    return GradientRoute(value=value, sender=sender, receiver=receiver)


def test_the_sum_goes_on_from_the_last_stage_to_the_first(make: Callable[..., Any]) -> None:
    graph, value = chain(make, 6)
    partition = cut(graph, stages({0, 1}, {2, 3}, {4, 5}, {6}))
    of_value = [one for one in partition.gradients if one.value == value]
    assert of_value == [route(value, 3, 2), route(value, 2, 1), route(value, 1, 0)]
    assert all(not stage.aliases and not stage.joins for stage in partition.stages)
    assert all(value in stage.grad_inputs for stage in partition.stages[1:])


def test_what_interleaves_travels_apart_to_its_place_at_the_producer(make: Callable[..., Any]) -> None:
    g = make()
    x = g.input("x", ("b", 4), "float32")
    value = g.node("aten.linear.default", x, g.param("w", (4, 4)), shape=("b", 4))
    early = g.node("aten.mul.Tensor", value, value, shape=("b", 4))
    middle = g.node("aten.exp.default", value, shape=("b", 4))
    late = g.node("aten.tanh.default", value, shape=("b", 4))
    both = g.node("aten.add.Tensor", early, late, shape=("b", 4))
    g.outputs["y"] = g.node("aten.add.Tensor", both, middle, shape=("b", 4))
    graph = g.graph()
    # The last use (tanh) in stage 1, the one before (exp) at home, the first (the product) in stage 1 again.
    partition = cut(graph, stages({0, 2}, {1, 3, 4, 5}))
    first, second = partition.stages
    assert partition.gradients[:1] == (route(value, 1, 0),)
    aliases = [one.value for one in partition.gradients if one.value in second.aliases]
    assert len(aliases) == 2
    assert set(second.aliases.values()) == {value}
    assert first.joins == tuple(aliases)
    product = next(node for node in second.graph.nodes if node.id == 1)
    assert list(product.args) == [Ref(aliases[0]), Ref(aliases[1])]
    # At home both aliases run before exp, the second operand's first: autograd comes back to them in reverse.
    order = [(node.op, node.outputs[0]) for node in first.graph.nodes]
    assert [name for op, name in order if op == ALIAS] == [aliases[1], aliases[0]]
    assert order.index((ALIAS, aliases[0])) < next(i for i, (op, _) in enumerate(order) if op == "aten.exp.default")
    for stage in partition.stages:
        validate(stage.graph)


def test_two_contributions_need_no_order(make: Callable[..., Any]) -> None:
    g = make()
    x = g.input("x", ("b", 4), "float32")
    value = g.node("aten.linear.default", x, g.param("w", (4, 4)), shape=("b", 4))
    away = g.node("aten.exp.default", value, shape=("b", 4))
    home = g.node("aten.tanh.default", value, shape=("b", 4))
    g.outputs["y"] = g.node("aten.add.Tensor", away, home, shape=("b", 4))
    partition = cut(g.graph(), stages({0, 2}, {1, 3}))
    assert all(not stage.aliases and not stage.joins for stage in partition.stages)


def shared(make: Callable[..., Any], width: int) -> Graph:
    g = make()
    weight = g.param("w", (width, width))
    y = g.input("x", ("b", width), "float32")
    for _ in range(3):
        y = g.node("aten.linear.default", y, weight, shape=("b", width))
    g.outputs["y"] = y
    return g.graph()


def test_a_small_shared_parameters_gradient_travels_with_each_microbatch(make: Callable[..., Any]) -> None:
    partition = cut(shared(make, 8), stages({0}, {1}, {2}))
    (one,) = partition.shared
    assert (one.stages, one.summed) == ((0, 1, 2), ())
    (value,) = partition.stages[0].graph.params
    assert [r for r in partition.gradients if r.value == value] == [route(value, 2, 1), route(value, 1, 0)]
    assert partition.cut_dependent == ()


def test_a_large_one_is_added_once_per_step_unless_one_machine_holds_it(make: Callable[..., Any]) -> None:
    graph = shared(make, 2048)
    apart = cut(graph, stages({0}, {1}, {2}))
    assert apart.shared[0].summed == (1, 2)
    assert [one.key for one in apart.cut_dependent] == ["w"]
    together = cut(graph, stages({0}, {1}, {2}), ["ada", "ada", "ada"])
    assert together.shared[0].summed == ()
    assert together.cut_dependent == ()


def test_shared_uses_are_listed_by_block(make: Callable[..., Any], model: Graph) -> None:
    assert shared_uses(shared(make, 8)) == [], "all in one block"
    from fusionai.ir.blocks import assign_blocks

    (tied,) = shared_uses(assign_blocks(model))
    assert (tied.key, tied.nbytes, tied.interleaves) == ("embed.weight", 16 * 8 * 4, False)
    assert tied.blocks[0] > tied.blocks[-1] == 0


def test_a_use_that_reaches_the_outputs_through_a_detached_value_only_sends_no_gradient(
    make: Callable[..., Any],
) -> None:
    """The stage in the middle would send a gradient of nothing, before the first one has begun the microbatch."""
    g = make()
    x = g.input("x", ("b", 4), "float32")
    shared = g.param("head", (4, 4))
    online = g.node("aten.linear.default", g.node("aten.tanh.default", x, shape=("b", 4)), shared, shape=("b", 4))
    teacher = g.node("aten.linear.default", x, shared, shape=("b", 4))
    fixed = g.node("aten.detach.default", teacher, shape=("b", 4))
    g.outputs["loss"] = g.node("aten.mse_loss.default", online, fixed)
    partition = cut(g.graph(), stages({0, 1}, {2}, {3, 4}))
    assert partition.gradients == (route(online, 2, 0),)
    assert [one.stages for one in partition.shared] == [(0, 1)]
