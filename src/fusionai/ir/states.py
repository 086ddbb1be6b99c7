"""Nodes that carry a state along a text, and what they keep of a session: a short convolution's last inputs, the state
of a scan.

A graph runs over whole texts. To continue a text, each such node needs only its state after the earlier positions, as
attention needs their keys and values; everything else works position by position. This module finds these nodes, says
why a node can't be continued, and sizes the states. `backends.serving.states` keeps and computes them,
`ir.serving` decides about whole graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from fusionai.ir.graph import consumers
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Dim, Graph, ListArg, Node, Ref
from fusionai.primitives.errors import GraphError

CONVOLUTION: Final = "aten.conv1d.default"
LINEAR_ATTENTION: Final = "fusion.linear_attention"
STATES_PER_SESSION: Final = 2
"""States that are kept of each session: after its newest pass, and after the pass before, to which a fault may return
it."""
STATE_ITEM_BYTES: Final = 4
"""States are kept as float32."""
_SEQUENCE: Final = "s"
_BATCHES: Final = ("b", 1)


@dataclass(frozen=True, slots=True)
class StateShape:
    """What node `node` keeps of a session. `kind`: `window` [channels, positions], the last inputs of a convolution;
    `scan` [...], the last result; `matrix` [heads, key width, value width]."""

    node: int
    kind: Literal["window", "scan", "matrix"]
    shape: tuple[int, ...]

    @property
    def session_bytes(self) -> int:
        """Bytes that are kept of one session."""
        return STATES_PER_SESSION * STATE_ITEM_BYTES * prod(self.shape)


def may_carry(node: Node) -> bool:
    """Return whether the node is of a kind that combines neighbouring or all earlier positions."""
    return node.op == CONVOLUTION or (node.op in OPERATORS and OPERATORS[node.op].category == "scan")


def carries(graph: Graph) -> bool:
    """Return whether a node of the graph carries a state."""
    return any(may_carry(node) for node in graph.nodes)


def state_shapes(graph: Graph) -> tuple[StateShape, ...]:
    """Return what each node that carries a state keeps, in graph order. Raises `GraphError` on one that can't be
    continued."""
    used = consumers(graph)
    return tuple(_state_of(graph, node, used) for node in graph.nodes if may_carry(node))


def _state_of(graph: Graph, node: Node, used: dict[str, tuple[Node, ...]]) -> StateShape:
    if node.op == CONVOLUTION:
        return _window(graph, node, used)
    shapes = [graph.values[arg.name].shape if isinstance(arg, Ref) else () for arg in node.args]
    match node.op, shapes:
        case ("fusion.linear_scan", [(batch, "s", *rest), other]) if batch in _BATCHES and other == (batch, "s", *rest):
            return StateShape(node.id, "scan", _fixed(node, rest))
        case ("fusion.linear_attention", [query, (batch, "s", heads, width), (_, "s", others, value_width)]) if (
            batch in _BATCHES and query == (batch, "s", heads, width) and heads == others
        ):
            return StateShape(node.id, "matrix", _fixed(node, (heads, width, value_width)))
        case _:
            pass
    raise _refused(node, "carries a state between other positions than those of the text")


def _window(graph: Graph, node: Node, used: dict[str, tuple[Node, ...]]) -> StateShape:
    """Return the window of a convolution of each channel with itself that sees no later position: padded on both sides
    by all but one position of its kernel, and cut to the length of the text."""
    given = [*node.args, *(None,) * 7][:7]
    x, kernel = (graph.values[arg.name].shape if isinstance(arg, Ref) else () for arg in given[:2])
    stride, padding, dilation = (arg.items if isinstance(arg, ListArg) else () for arg in given[3:6])
    match x, kernel:
        case (batch, int(channels), "s"), (int(filters), 1, int(size)) if batch in _BATCHES and size > 1:
            fits = filters == channels == given[6] and padding == (size - 1,)
            fits = fits and stride in ((), (1,)) and dilation in ((), (1,)) and not node.kwargs
            if fits and _cut_to_text(graph, node, used):
                return StateShape(node.id, "window", _fixed(node, (channels, size - 1)))
        case _:
            pass
    raise _refused(node, "mixes neighbouring positions in a way that can't be continued")


def _cut_to_text(graph: Graph, node: Node, used: dict[str, tuple[Node, ...]]) -> bool:
    """Return whether all readers take the first positions of the result, as many as the text has."""
    value = node.outputs[0]
    readers = used.get(value, ())
    return (
        bool(readers)
        and value not in graph.outputs.values()
        and all(
            reader.op == "aten.slice.Tensor"
            and not reader.kwargs
            and reader.args[0] == Ref(value)
            and reader.args[1] == 2
            and reader.args[2] in (None, 0)
            and len(reader.args) < 5
            and graph.values[reader.outputs[0]].shape[2] == _SEQUENCE
            for reader in readers
        )
    )


def _fixed(node: Node, sizes: Sequence[Dim]) -> tuple[int, ...]:
    fixed = tuple(size for size in sizes if isinstance(size, int) and size > 0)
    if len(fixed) != len(sizes):
        raise _refused(node, f"carries a state whose sizes {list(sizes)} are not fixed")
    return fixed


def _refused(node: Node, reason: str) -> GraphError:
    return GraphError(f"node {node.id} ({node.op}, {node.path}) {reason}.")
