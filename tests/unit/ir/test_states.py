"""Which nodes carry a state that can be continued, and how large it is."""

from __future__ import annotations

from typing import Any

import pytest

from fusionai.ir.schema import Graph, ListArg, Node, Ref, ValueSpec
from fusionai.ir.serving import require_servable
from fusionai.ir.states import StateShape, carries, state_shapes
from fusionai.primitives.errors import GraphError


def _graph(nodes: list[Node], values: dict[str, tuple[Any, ...]]) -> Graph:
    return Graph(
        name="test",
        symbols={"b": (1, 2), "s": (1, 64)},
        inputs=("x",),
        values={name: ValueSpec(shape, "float32") for name, shape in values.items()},
        nodes=tuple(nodes),
    )


def _convolution(*, padding: int = 3, groups: int = 6, cut: Any = "s") -> Graph:
    one = ListArg((1,))
    args = (Ref("x"), Ref("w"), None, one, ListArg((padding,)), one, groups)
    return _graph(
        [
            Node(id=3, op="aten.conv1d.default", args=args, outputs=("wide",), path="layer.conv"),
            Node(id=4, op="aten.slice.Tensor", args=(Ref("wide"), 2, None, Ref("n")), outputs=("made",)),
        ],
        {"x": ("b", 6, "s"), "w": (6, 1, 4), "wide": ("b", 6, "(3+s)"), "made": ("b", 6, cut)},
    )


def test_a_causal_convolution_keeps_its_last_inputs() -> None:
    graph = _convolution()
    assert carries(graph)
    assert state_shapes(graph) == (StateShape(3, "window", (6, 3)),)
    assert state_shapes(graph)[0].session_bytes == 2 * 4 * 18
    require_servable(graph, attention_nodes=0, attention_layers=0)


@pytest.mark.parametrize("changed", [{"padding": 1}, {"groups": 1}, {"cut": "(3+s)"}])
def test_any_other_convolution_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(GraphError, match=r"node 3 \(aten.conv1d.default, layer.conv\) mixes neighbouring positions"):
        state_shapes(_convolution(**changed))


def test_scans_keep_their_last_state() -> None:
    scan = Node(id=1, op="fusion.linear_scan", args=(Ref("d"), Ref("x")), outputs=("h",))
    graph = _graph([scan], dict.fromkeys(("d", "x", "h"), ("b", "s", 4, 2)))
    assert state_shapes(graph) == (StateShape(1, "scan", (4, 2)),)
    rule = Node(
        id=2, op="fusion.linear_attention", args=(Ref("q"), Ref("q"), Ref("v")), outputs=("y",),
        kwargs={"decay": Ref("g"), "beta": None},
    )  # fmt: skip
    values = {"q": (1, "s", 3, 4), "v": (1, "s", 3, 5), "y": (1, "s", 3, 5), "g": (1, "s", 3)}
    assert state_shapes(_graph([rule], values)) == (StateShape(2, "matrix", (3, 4, 5)),)


def test_a_scan_over_blocks_of_positions_is_refused() -> None:
    scan = Node(id=1, op="fusion.linear_scan", args=(Ref("d"), Ref("x")), outputs=("h",))
    graph = _graph([scan], dict.fromkeys(("d", "x", "h"), ("b", "((7+s)//8)", 4)))
    with pytest.raises(GraphError, match="between other positions"):
        state_shapes(graph)


@pytest.mark.parametrize(
    ("node", "made", "reason"),
    [
        (Node(id=9, op="aten.flip.default", args=(Ref("made"), ListArg((2,))), outputs=("z",)), ("b", 6, "s"), "moves"),
        (
            Node(id=9, op="aten.matmul.default", args=(Ref("made"), Ref("turned")), outputs=("z",)),
            ("b", 6, 6),
            "sums over positions",
        ),
        (
            Node(id=9, op="aten.matmul.default", args=(Ref("turned"), Ref("made")), outputs=("z",)),
            ("b", "s", "s"),
            "has other rows",
        ),
        (
            Node(id=9, op="aten.cat.default", args=(ListArg((Ref("made"), Ref("made"))), 2), outputs=("z",)),
            ("b", 6, "(s+1)"),
            "has other rows",
        ),
    ],
)
def test_beside_states_nothing_else_may_mix_positions(node: Node, made: tuple[Any, ...], reason: str) -> None:
    """There the number of attention layers proves nothing."""
    graph = _convolution()
    values = {name: spec.shape for name, spec in graph.values.items()} | {"turned": ("b", "s", 6), "z": made}
    turned = Node(id=8, op="aten.transpose.int", args=(Ref("made"), 1, 2), outputs=("turned",))
    with pytest.raises(GraphError, match=reason):
        require_servable(_graph([*graph.nodes, turned, node], values), attention_nodes=0, attention_layers=0)
