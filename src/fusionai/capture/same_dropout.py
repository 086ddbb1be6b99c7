"""Give a module the dropout masks of its graph, so that both can be compared in training.

A module draws every mask by one call, in the order of its forward; the graph computes each from counters
(`backends.torch.dropout`). While `SameDropout` is open, the module's draws are replaced by the graph's masks in order.

Neighbours: `capture.self_check` compares the two.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusionai.backends.counters import DropoutKey
from fusionai.backends.torch.dropout import scaled_mask
from fusionai.ir.schema import Arg, Graph, Node

_ARGUMENT: Final = {"fusion.dropout": "p", "fusion.attention": "dropout"}


class SameDropout(TorchDispatchMode):
    """Answers the module's draws by the masks of `graph` at `key`; without a graph nothing is dropped."""

    def __init__(self, graph: Graph | None, key: DropoutKey) -> None:
        super().__init__()
        self._drops = graph is not None
        self._nodes = [] if graph is None else [(node.id, p) for node in graph.nodes if (p := _probability(node)) > 0.0]
        self._key = key
        self._drawn = 0
        self._fits = True

    @property
    def all_replayed(self) -> bool:
        """Whether every draw of the module had its mask in the graph, and every mask its draw."""
        return self._fits and self._drawn == len(self._nodes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten.bernoulli_.float:
            return func(*args, **(kwargs or {}))
        noise, kept = args[0], float(args[1]) if len(args) > 1 else 0.5
        if not self._drops:
            # What is kept is divided by the probability to be kept.
            return noise.fill_(kept)
        place, self._drawn = self._drawn, self._drawn + 1
        if place >= len(self._nodes) or not math.isclose(self._nodes[place][1], 1.0 - kept, abs_tol=1e-9):
            self._fits = False
            return noise.fill_(kept)
        node, p = self._nodes[place]
        mask = scaled_mask(tuple(noise.shape), p, self._key, node, dtype=torch.float32, device=noise.device)
        return noise.copy_(mask != 0)


def without_dropout(graph: Graph) -> Graph:
    """The same graph with every probability 0."""

    def kept(node: Node) -> Node:
        if _probability(node) == 0.0:
            return node
        kwargs: dict[str, Arg] = {**node.kwargs, _ARGUMENT[node.op]: 0.0}
        return msgspec.structs.replace(node, kwargs=kwargs)

    return msgspec.structs.replace(graph, nodes=tuple(kept(node) for node in graph.nodes))


def _probability(node: Node) -> float:
    value = node.kwargs.get(_ARGUMENT.get(node.op, ""), 0.0)
    return float(value) if isinstance(value, int | float) else 0.0
