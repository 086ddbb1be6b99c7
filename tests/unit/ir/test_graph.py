"""Questions about a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fusionai.ir.graph import cheap_nodes, consumers, producers, prune, reads
from fusionai.ir.schema import Graph, ListArg, Ref
from fusionai.ir.validate import validate
from fusionai.primitives.errors import GraphError


def test_prune_keeps_what_is_wanted(model: Graph) -> None:
    logits = validate(prune(model, ["logits"]))
    assert set(logits.outputs) == {"logits"}
    assert logits.inputs == ("input_ids", "position_ids")
    assert "aten.cross_entropy_loss.default" not in {node.op for node in logits.nodes}
    assert prune(model, ["logits", "loss"]) == model
    with pytest.raises(GraphError, match="no output 'hidden'; it has logits, loss"):
        prune(model, ["hidden"])


def test_prune_leaves_state_writes_unless_asked(make: Callable[..., Any]) -> None:
    g = make()
    x = g.input("x", (4,), "float32")
    count = g.param("count", (), kind="buffer")
    g.state_writes[g.node("aten.add.Scalar", count, 1)] = "count"
    g.outputs["y"] = g.node("aten.relu.default", x, shape=(4,))
    assert [node.id for node in prune(g.graph(), ["y"]).nodes] == [1]
    assert prune(g.graph(), ["y"]).params == {}
    assert prune(g.graph(), ["y"], state_writes=True) == g.graph()


def test_reads_go_through_lists_and_named_arguments(make: Callable[..., Any]) -> None:
    g = make()
    a, b, c = (g.input(name, (4,), "float32") for name in "abc")
    g.node("aten.cat.default", ListArg((Ref(a), Ref(b), Ref(a))), dim=Ref(c), shape=(12,))
    assert list(reads(g.nodes[0])) == ["a", "b", "a", "c"]


def test_producers_and_consumers(model: Graph) -> None:
    made, read = producers(model), consumers(model)
    assert "input_ids" not in made
    for value, nodes in read.items():
        assert all(value in set(reads(node)) for node in nodes)
        assert len({node.id for node in nodes}) == len(nodes)
    assert {value for value in made if value not in read} == {model.outputs["loss"]}


def test_cheap_nodes(model: Graph) -> None:
    cheap = cheap_nodes(model)
    assert {node.path for node in model.nodes if node.id in cheap and not node.path.startswith("layers")} == {
        "rotary",
        "",
    }
    assert all(node.id in cheap for node in model.nodes if node.op.endswith("sym_size.int"))
    assert not any(node.id in cheap for node in model.nodes if node.op == "aten.linear.default")


def test_dropout_and_written_buffers_are_not_cheap(make: Callable[..., Any]) -> None:
    g = make()
    positions = g.input("positions", (4,))
    g.node("fusion.dropout", positions, p=0.1, shape=(4,))
    count = g.param("count", (), kind="buffer")
    g.state_writes[g.node("aten.add.Scalar", count, 1)] = "count"
    g.node("aten.add.Scalar", g.param("fixed", (), kind="constant"), 1)
    g.node("aten.relu.default", g.input("image", (4,), "float32"), shape=(4,))
    assert cheap_nodes(g.graph()) == {2}
