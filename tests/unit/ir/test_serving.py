"""The graph that serves, and the graphs that may not."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from fusionai.ir.schema import Graph, ListArg, Node, ParamSpec, Ref, ValueSpec
from fusionai.ir.serving import (
    require_servable,
    row_dimension,
    serves_from_caches,
    serving_graph,
    split_behind_attention,
)
from fusionai.ir.validate import validate
from fusionai.primitives.errors import GraphError

_ROWS = ValueSpec((1, "s", 8), "float32")
_HEADS = ValueSpec((1, 2, "s", 4), "float32")


def _graph(extra: Sequence[tuple[Node, ValueSpec]] = (), *, causal: bool = True, logits_of: str = "dropped") -> Graph:
    """Embedding, attention, dropout, flattened head with a scale, and a loss; `extra` stands before the head."""
    values = {
        "input_ids": ValueSpec((1, "s"), "int64"),
        "position_ids": ValueSpec((1, "s"), "int64"),
        "labels": ValueSpec((1, "s"), "int64"),
        "table": ValueSpec((11, 8), "float32"),
        "square": ValueSpec((8, 8), "float32"),
        "length": ValueSpec((), "symint"),
        "words": _ROWS,
        "split": ValueSpec((1, "s", 2, 4), "float32"),
        "heads": _HEADS,
        "mixed": _HEADS,
        "swapped": ValueSpec((1, "s", 2, 4), "float32"),
        "joined": _ROWS,
        "dropped": _ROWS,
        "flat": ValueSpec(("s", 8), "float32"),
        "product": ValueSpec(("s", 11), "float32"),
        "scaled": ValueSpec(("s", 11), "float32"),
        "logits": ValueSpec((1, "s", 11), "float32"),
        "classes": ValueSpec(("s",), "int64"),
        "loss": ValueSpec((), "float32"),
        **{node.outputs[0]: spec for node, spec in extra},
    }
    nodes = [
        Node(id=0, op="aten.sym_size.int", args=(Ref("position_ids"), 1), outputs=("length",)),
        Node(id=1, op="aten.embedding.default", args=(Ref("table"), Ref("input_ids")), outputs=("words",)),
        Node(
            id=2, op="aten.reshape.default", args=(Ref("words"), ListArg((1, Ref("length"), 2, 4))), outputs=("split",)
        ),
        Node(id=3, op="aten.transpose.int", args=(Ref("split"), 1, 2), outputs=("heads",)),
        Node(
            id=4,
            op="fusion.attention",
            args=(Ref("heads"), Ref("heads"), Ref("heads")),
            kwargs={"scale": 0.5, "causal": causal, "dropout": 0.1},
            outputs=("mixed",),
        ),
        Node(id=5, op="aten.transpose.int", args=(Ref("mixed"), 1, 2), outputs=("swapped",)),
        Node(
            id=6, op="aten.reshape.default", args=(Ref("swapped"), ListArg((1, Ref("length"), 8))), outputs=("joined",)
        ),
        Node(id=7, op="fusion.dropout", args=(Ref("joined"),), kwargs={"p": 0.1}, outputs=("dropped",)),
        *[node for node, _ in extra],
        Node(id=50, op="aten.reshape.default", args=(Ref(logits_of), ListArg((-1, 8))), outputs=("flat",)),
        Node(id=51, op="aten.linear.default", args=(Ref("flat"), Ref("table")), outputs=("product",)),
        Node(id=52, op="aten.mul.Tensor", args=(Ref("product"), 0.5), outputs=("scaled",)),
        Node(
            id=53, op="aten.reshape.default", args=(Ref("scaled"), ListArg((1, Ref("length"), 11))), outputs=("logits",)
        ),
        Node(id=54, op="aten.reshape.default", args=(Ref("labels"), ListArg((-1,))), outputs=("classes",)),
        Node(id=55, op="aten.cross_entropy_loss.default", args=(Ref("scaled"), Ref("classes")), outputs=("loss",)),
    ]
    return validate(
        Graph(
            name="tiny",
            symbols={"s": (1, 32)},
            inputs=("input_ids", "position_ids", "labels"),
            outputs={"logits": "logits", "loss": "loss"},
            values=values,
            params={
                name: ParamSpec(key=name, kind="parameter", shape=shape, dtype="float32")
                for name, shape in (("table", (11, 8)), ("square", (8, 8)))
            },
            nodes=tuple(nodes),
        )
    )


def test_what_is_drawn_in_training_only_is_gone_and_other_draws_are_refused() -> None:
    hidden = ValueSpec((1, "s", 8), "float32")
    drawn = (Node(id=8, op="fusion.uniform", args=(Ref("dropped"),), outputs=("noise",), path="layer.noise"), hidden)
    noisy = (Node(id=9, op="aten.add.Tensor", args=(Ref("dropped"), Ref("noise")), outputs=("noisy",)), hidden)
    chosen = (
        Node(id=10, op="fusion.in_training", args=(Ref("noisy"), Ref("dropped")), outputs=("chosen",)),
        hidden,
    )
    graph = serving_graph(_graph(extra=(drawn, noisy, chosen), logits_of="chosen"))
    assert [node.id for node in graph.nodes] == [0, 1, 2, 3, 4, 5, 6, 50, 51, 52, 53]
    with pytest.raises(GraphError, match=r"random numbers outside training, in layer\.noise"):
        serving_graph(_graph(extra=(drawn, noisy), logits_of="noisy"))


def test_loss_labels_and_dropout_are_gone_and_hidden_states_come_out() -> None:
    graph = validate(serving_graph(_graph()))
    assert graph.inputs == ("input_ids", "position_ids")
    # What dropout passed on, as it was before it was flattened for the head.
    assert graph.outputs == {"logits": "logits", "hidden": "joined"}
    assert [node.id for node in graph.nodes] == [0, 1, 2, 3, 4, 5, 6, 50, 51, 52, 53]
    assert graph.nodes[4].kwargs["dropout"] == 0.0
    require_servable(graph, attention_nodes=1, attention_layers=1)


def test_weights_before_their_operand_become_products_of_rows() -> None:
    """Mamba multiplies a weight by columns. As rows, they have the weight's format, and bits of their own."""
    columns = ValueSpec((1, 8, "s"), "float32")
    turned = (Node(id=8, op="aten.transpose.int", args=(Ref("dropped"), 1, 2), outputs=("columns",)), columns)
    before = (Node(id=9, op="aten.matmul.default", args=(Ref("square"), Ref("columns")), outputs=("made",)), columns)
    after = (
        Node(id=10, op="aten.transpose.int", args=(Ref("made"), 1, 2), outputs=("back",)),
        ValueSpec((1, "s", 8), "float32"),
    )
    graph = validate(serving_graph(_graph(extra=(turned, before, after), logits_of="back")))
    one, product, other = graph.nodes[graph.nodes.index(next(n for n in graph.nodes if n.id == 9)) - 1 :][:3]
    assert (product.op, product.args) == ("aten.linear.default", (Ref("made:x"), Ref("square")))
    assert graph.values[product.outputs[0]].shape == (1, "s", 8)
    assert (one.op, other.op, other.outputs) == ("aten.transpose.int", "aten.transpose.int", ("made",))
    assert len({node.id for node in graph.nodes}) == len(graph.nodes)


def test_a_graph_without_logits_or_head_is_refused() -> None:
    with pytest.raises(GraphError, match="no output 'logits'"):
        serving_graph(msgspec.structs.replace(_graph(), outputs={"loss": "loss"}))
    with pytest.raises(GraphError, match="no product with a parameter"):
        serving_graph(msgspec.structs.replace(_graph(), outputs={"logits": "split"}))


def test_attention_that_a_cache_can_not_feed_is_refused() -> None:
    with pytest.raises(GraphError, match="1 of 2 attention layers"):
        require_servable(serving_graph(_graph()), attention_nodes=1, attention_layers=2)
    with pytest.raises(GraphError, match="sees later positions"):
        require_servable(serving_graph(_graph(causal=False)), attention_nodes=1, attention_layers=1)


MIXING = {
    "reduces along the sequence": [
        (
            Node(id=20, op="aten.mean.dim", args=(Ref("dropped"), ListArg((1,)), True), outputs=("mean",)),
            ValueSpec((1, 1, 8), "float32"),
        ),
        (Node(id=21, op="aten.add.Tensor", args=(Ref("dropped"), Ref("mean")), outputs=("end",)), _ROWS),
    ],
    "counts positions of the pack": [
        (
            Node(id=20, op="aten.arange.default", args=(Ref("length"),), kwargs={}, outputs=("count",)),
            ValueSpec(("s",), "int64"),
        ),
        (Node(id=23, op="aten.index_select.default", args=(Ref("dropped"), 1, Ref("count")), outputs=("end",)), _ROWS),
    ],
}


@pytest.mark.parametrize("reason", MIXING)
def test_what_mixes_sessions_is_refused(reason: str) -> None:
    graph = serving_graph(_graph(MIXING[reason], logits_of="end"))
    with pytest.raises(GraphError, match=reason):
        require_servable(graph, attention_nodes=1, attention_layers=1)
    assert not serves_from_caches(graph)
    assert serves_from_caches(serving_graph(_graph()))


def test_behind_the_last_attention_rows_stand_for_themselves() -> None:
    graph = serving_graph(_graph())
    halves = split_behind_attention(graph, ["logits", "hidden"])
    assert halves is not None
    before, after = halves
    assert [node.id for node in before.nodes] == [0, 1, 2, 3, 4]
    assert before.outputs == {"mixed": "mixed"}
    # The head, and the number of its rows, counted anew.
    assert [node.id for node in after.nodes] == [0, 5, 6, 50, 51, 52, 53]
    assert set(after.inputs) == {"mixed", "position_ids"}
    assert row_dimension(graph, "mixed") == 2
    assert row_dimension(graph, "length") is None
    assert set(after.outputs) == {"logits", "hidden"}


def test_a_graph_without_attention_or_without_products_behind_it_is_not_split() -> None:
    graph = serving_graph(_graph())
    assert split_behind_attention(graph, []) is None
    only_attention = msgspec.structs.replace(graph, outputs={"mixed": "mixed"})
    assert split_behind_attention(only_attention, ["mixed"]) is None
    head = [node for node in graph.nodes if node.id > 4]
    assert split_behind_attention(msgspec.structs.replace(graph, nodes=tuple(head)), ["logits"]) is None
