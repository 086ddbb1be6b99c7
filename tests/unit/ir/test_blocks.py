"""Numbers of blocks from paths, and hashes that tell equal layers apart from different ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from fusionai.ir.blocks import assign_blocks, block_hashes
from fusionai.ir.graph import cheap_nodes, producers, reads
from fusionai.ir.partition import FEED, cut_blocks
from fusionai.ir.schema import Graph, ListArg, Node


def numbers(graph: Graph) -> dict[int, int]:
    return {node.id: node.block for node in graph.nodes}


def chain(make: Callable[..., Any], *paths: str, width: int = 4) -> Graph:
    """One product per path."""
    g = make()
    x = g.input("x", ("b", width), "float32")
    for i, path in enumerate(paths):
        x = g.node("aten.linear.default", x, g.param(f"w{i}", (width, width)), shape=("b", width), path=path)
    g.outputs["y"] = x
    return g.graph()


def test_a_transformer(transformer_of: Callable[[int], Graph]) -> None:
    graph = assign_blocks(transformer_of(3))
    cheap = cheap_nodes(graph)
    blocks: dict[int, set[str]] = {}
    for node in graph.nodes:
        if node.id not in cheap:
            blocks.setdefault(node.block, set()).add(node.path.rsplit(".", 1)[0] if "norm" in node.path else node.path)
    assert blocks[0] == {"embed"}
    for layer in range(3):
        assert blocks[layer + 1] == {f"layers.{layer}", f"layers.{layer}.linear"}
    assert blocks[4] == {"head"}
    assert blocks[5] == {""}
    assert max(blocks) == 5


def test_every_block_boundary_is_a_legal_cut(transformer_of: Callable[[int], Graph]) -> None:
    graph = assign_blocks(transformer_of(3))
    partition = cut_blocks(graph, [(i, i + 1) for i in range(6)])
    assert sum(route.producer != FEED for route in partition.routes) == 5


def test_equal_layers_have_one_hash(transformer_of: Callable[[int], Graph]) -> None:
    hashes = block_hashes(assign_blocks(transformer_of(22)))
    assert len(hashes) == 25
    assert len(set(hashes[1:23])) == 1
    assert len(set(hashes)) == 4


def test_a_different_layer_has_another_hash(transformer_of: Callable[[int], Graph]) -> None:
    graph = assign_blocks(transformer_of(4))

    def with_third(change: Callable[[Node], Node]) -> Graph:
        nodes = tuple(change(n) if n.block == 3 and n.op == "aten.layer_norm.default" else n for n in graph.nodes)
        return msgspec.structs.replace(graph, nodes=nodes)

    def eps(node: Node) -> Node:
        return msgspec.structs.replace(node, args=(*node.args[:-1], 1e-6))

    hashes = block_hashes(with_third(eps))
    assert hashes[1] == hashes[2] == hashes[4]
    assert hashes[3] != hashes[1]
    # Parameters count too: a frozen layer is another layer.
    params = {
        value: msgspec.structs.replace(spec, trainable=spec.trainable and not spec.key.startswith("layers.1."))
        for value, spec in graph.params.items()
    }
    hashes = block_hashes(msgspec.structs.replace(graph, params=params))
    assert hashes[1] == hashes[3] == hashes[4] != hashes[2]


def test_hash_sees_which_value_is_read(make: Callable[..., Any]) -> None:
    def graph(second: bool) -> Graph:
        g = make()
        x = g.input("x", ("b", 4), "float32")
        a = g.node("aten.linear.default", x, g.param("w", (4, 4)), shape=("b", 4))
        c = g.node("aten.linear.default", x, g.param("v", (4, 4)), shape=("b", 4))
        g.outputs["y"] = g.node("aten.sub.Tensor", *((a, c) if second else (c, a)), shape=("b", 4))
        return g.graph()

    assert block_hashes(graph(True)) != block_hashes(graph(False))


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (("wte", "h.0.attn", "h.0.mlp", "h.1.attn", "ln_f"), [0, 1, 1, 2, 3]),
        (("0", "1", "2"), [0, 1, 2]),
        (("stem", "layer1.0.conv", "layer1.1.conv", "layer2.0.conv", "fc"), [0, 1, 2, 3, 4]),
        (("m.layers.7.experts.0", "m.layers.7.experts.1", "m.layers.9.experts.0"), [0, 0, 1]),
        # The same layer called again after another can't go back.
        (("h.0", "h.1", "h.0", "h.1"), [0, 1, 1, 1]),
        # No numbers: children of the root, below what all have in common.
        (("conv1", "conv1", "norm1", "conv2", "head"), [0, 0, 1, 2, 3]),
        (("net.a.x", "net.a.y", "net.b.x"), [0, 0, 1]),
        # A functional operator stays with what it follows.
        (("conv1", "", "conv2", ""), [0, 0, 1, 2]),
        # No paths at all: each place a single value crosses.
        (("", "", ""), [0, 1, 2]),
    ],
)
def test_paths(make: Callable[..., Any], paths: tuple[str, ...], expected: list[int]) -> None:
    graph = assign_blocks(chain(make, *paths))
    assert [node.block for node in graph.nodes] == expected
    assert len(cut_blocks(graph, [(i, i + 1) for i in range(max(expected) + 1)]).stages) == max(expected) + 1


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        # A small numbered head, or stem, beside named modules: those are split by their names.
        ([*(f"conv{i}" for i in range(12)), "head.0", "head.1"], list(range(14))),
        (["stem.0", "stem.1", *(f"conv{i}" for i in range(12))], list(range(14))),
        # Named modules that hold named modules.
        (
            [*(f"net.{part}.{name}" for part in "abcd" for name in ("q", "k", "v")), "net.head.0"],
            [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4],
        ),
        (["head.0", *(f"net.body.part{i}" for i in range(10))], list(range(11))),
        # A whole encoder as one member of a Sequential.
        (
            ["0", *(f"1.layers.{i // 3}.x" for i in range(12)), "1.norm", "2"],
            [0, *(1 + i // 3 for i in range(12)), 5, 6],
        ),
        (["0", *(f"1.stages.0.layers.{i // 2}.x" for i in range(10)), "2"], [0, *(1 + i // 2 for i in range(10)), 6]),
        # Functional operators beside one numbered head.
        ([*("" for _ in range(10)), "head.0"], list(range(11))),
        # A layer without a numbered part is one layer.
        (["embed", *(f"layers.0.{name}" for name in "abcdefghijkl")], [0] + [1] * 12),
    ],
)
def test_a_block_of_most_nodes_is_split(make: Callable[..., Any], paths: list[str], expected: list[int]) -> None:
    graph = assign_blocks(chain(make, *paths))
    assert [node.block for node in graph.nodes] == expected
    assert len(cut_blocks(graph, [(i, i + 1) for i in range(max(expected) + 1)]).stages) == max(expected) + 1
    assert assign_blocks(graph) == graph


def test_without_paths_a_residual_is_not_cut_open(make: Callable[..., Any]) -> None:
    g = make()
    x = g.input("x", ("b", 4), "float32")
    for i in range(2):
        skip = x
        x = g.node("aten.linear.default", x, g.param(f"a{i}", (4, 4)), shape=("b", 4))
        x = g.node("aten.relu.default", x, shape=("b", 4))
        x = g.node("aten.linear.default", x, g.param(f"b{i}", (4, 4)), shape=("b", 4))
        x = g.node("aten.add.Tensor", x, skip, shape=("b", 4))
    g.outputs["y"] = x
    graph = assign_blocks(g.graph())
    last = max(node.block for node in graph.nodes)
    partition = cut_blocks(graph, [(i, i + 1) for i in range(last + 1)])
    crossing = [(r.producer, c) for r in partition.routes if r.producer != FEED for c in r.consumers]
    assert all(c == p + 1 for p, c in crossing)
    assert last >= 1


def test_what_only_the_end_needs_is_at_the_end(make: Callable[..., Any]) -> None:
    g = make()
    x = g.input("x", ("b", 4), "float32")
    scale = g.node("aten.add.Scalar", g.param("norm.weight", (4,)), 1.0, shape=(4,), path="norm")
    for i in range(2):
        x = g.node("aten.linear.default", x, g.param(f"w{i}", (4, 4)), shape=("b", 4), path=f"layers.{i}")
    g.outputs["y"] = g.node("aten.mul.Tensor", x, scale, shape=("b", 4), path="norm")
    assert [node.block for node in assign_blocks(g.graph()).nodes] == [2, 0, 1, 2]


def test_a_step_counter_stays_with_its_module(make: Callable[..., Any]) -> None:
    g = make()
    x = g.input("x", ("b", 4), "float32")
    count = g.param("norm.count", (), kind="buffer")
    g.state_writes[g.node("aten.add.Scalar", count, 1.0, path="norm")] = "norm.count"
    x = g.node("aten.layer_norm.default", x, ListArg((4,)), g.param("norm.w", (4,)), shape=("b", 4), path="norm")
    for i in range(2):
        x = g.node("aten.linear.default", x, g.param(f"w{i}", (4, 4)), shape=("b", 4), path=f"layers.{i}")
    g.outputs["y"] = g.node("aten.relu.default", x, shape=("b", 4))
    assert [node.block for node in assign_blocks(g.graph()).nodes] == [0, 0, 1, 2, 3]


def test_weights_computed_from_parameters_are_where_they_are_read(make: Callable[..., Any]) -> None:
    """A stage of such nodes alone would receive nothing to begin with."""
    g = make()
    x = g.input("x", ("b", 4), "float32")
    scaled = g.node("aten.exp.default", g.param("scales", (4, 4)), shape=(4, 4))
    x = g.node("aten.linear.default", x, g.param("w", (4, 4)), shape=("b", 4), path="layers.0")
    x = g.node("aten.linear.default", x, scaled, shape=("b", 4), path="layers.1")
    g.outputs["y"] = g.node("aten.relu.default", x, shape=("b", 4))
    graph = assign_blocks(g.graph())
    assert [node.block for node in graph.nodes] == [1, 0, 1, 2]
    assert all(stage.graph.inputs for stage in cut_blocks(graph, [(0, 1), (1, 2), (2, 3)]).stages)


def test_what_torch_puts_around_a_weight_is_no_layer(make: Callable[..., Any]) -> None:
    g = make()
    x = g.input("x", ("b", 4), "float32")
    for name in ("enter", "leave"):
        weight = g.param(f"{name}.original", (4, 4))
        weight = g.node("aten.tanh.default", weight, shape=(4, 4), path=f"{name}.parametrizations.weight.0")
        x = g.node("aten.linear.default", x, weight, shape=("b", 4), path=name)
    x = g.node("aten.linear.default", x, g.param("w", (4, 4)), shape=("b", 4), path="last")
    g.outputs["y"] = x
    assert [node.block for node in assign_blocks(g.graph()).nodes] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("writer", "expected"),
    [
        # A mean of one layer's results that the module itself keeps is beside that layer, wherever it is written.
        (1, [0, 1, 1, 1, 2, 3]),
        # Between a reader in the second layer and a writer after the last one there is no place for a cut.
        (2, [0, 1, 2, 2, 2, 3]),
    ],
)
def test_a_buffer_is_read_and_written_in_one_block(make: Callable[..., Any], writer: int, expected: list[int]) -> None:
    g = make()
    mean = g.param("mean", (4,), kind="buffer")
    x = g.input("x", ("b", 4), "float32")
    made: list[str] = []
    for i in range(3):
        x = g.node("aten.linear.default", x, g.param(f"w{i}", (4, 4)), shape=("b", 4), path=f"layers.{i}")
        if i == 1:
            x = g.node("aten.sub.Tensor", x, mean, shape=("b", 4), path="layers.1")
        made.append(x)
    g.state_writes[g.node("aten.lerp.Scalar", mean, made[writer], 0.1, shape=("b", 4))] = "mean"
    g.outputs["y"] = g.node("aten.relu.default", x, shape=("b", 4))
    graph = assign_blocks(g.graph())
    numbered = [node.block for node in graph.nodes]
    assert [*numbered[:3], numbered[4], numbered[3], numbered[5]] == expected
    assert cut_blocks(graph, [(i, i + 1) for i in range(max(expected) + 1)])


def test_labels_inside_the_layers_are_an_input(make: Callable[..., Any]) -> None:
    g = make()
    labels = g.input("labels", ("b",))
    x = g.node("aten.embedding.default", g.param("table", (5, 4)), labels, shape=("b", 4), path="embed")
    for i in range(2):
        x = g.node("aten.linear.default", x, g.param(f"w{i}", (4, 4)), shape=("b", 4), path=f"layers.{i}")
    g.outputs["loss"] = g.node("aten.sum.default", x)
    assert [node.block for node in assign_blocks(g.graph()).nodes] == [0, 1, 2, 3]


def test_numbers_never_fall_along_the_data(transformer_of: Callable[[int], Graph]) -> None:
    graph = assign_blocks(transformer_of(4))
    cheap, maker, block = cheap_nodes(graph), producers(graph), numbers(graph)
    for node in graph.nodes:
        for value in reads(node):
            if value in maker and maker[value].id not in cheap and node.id not in cheap:
                assert block[maker[value].id] <= block[node.id]


def test_numbering_twice_changes_nothing(model: Graph) -> None:
    assert assign_blocks(assign_blocks(model)) == assign_blocks(model)


def test_an_empty_graph() -> None:
    assert assign_blocks(Graph()) == Graph()
    assert block_hashes(Graph()) == ()
