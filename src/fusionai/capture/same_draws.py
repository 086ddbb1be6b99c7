"""Make a module draw the dropout masks and random numbers of its graph, so that both can be compared in training.

A module makes its draws in the order of its forward; the graph computes each from counters (`backends.torch.dropout`).
While `SameDraws` is open, the module's draws are replaced by the graph's draws in order.

Neighbours: `capture.self_check` compares the two, `capture.draws` computes torch's draws from uniform numbers.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusionai.backends.counters import DropoutKey
from fusionai.backends.torch.dropout import scaled_mask, uniform
from fusionai.capture.draws import IN_PLACE, draws, leaky_by_chance
from fusionai.ir.graph import needed_nodes
from fusionai.ir.schema import Arg, Graph, Node

_ARGUMENT: Final = {"fusion.dropout": "p", "fusion.attention": "dropout"}
_UNIFORM: Final = "fusion.uniform"
_IN_TRAINING: Final = "fusion.in_training"
_LEAKY_BY_CHANCE: Final = (torch.ops.aten.rrelu_with_noise.default, torch.ops.aten.rrelu_with_noise_.default)
_MIDDLE: Final = 0.5
"""Replaces every uniform number if nothing is drawn."""


class SameDraws(TorchDispatchMode):
    """Replaces the module's draws, in training or in evaluation, by those of `graph` at `key`. Without a key nothing is
    dropped and every uniform number is 0.5, as in `without_draws`."""

    def __init__(self, graph: Graph, key: DropoutKey | None, *, training: bool = True) -> None:
        super().__init__()
        self._nodes = [node for node in _needed(in_mode(graph, training=training)) if _draws(node, training)]
        self._key = key
        self._drawn = 0
        self._fits = True
        self._table = draws(self._uniform)

    @property
    def all_replayed(self) -> bool:
        """Return whether every draw of the module had a counterpart in the graph, and the reverse."""
        return self._fits and self._drawn == len(self._nodes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operands: list[Any] = list(args)
        if func is torch.ops.aten.bernoulli_.float:
            kept = float(operands[1]) if len(operands) > 1 else 0.5
            if (mask := self._mask(operands[0], kept)) is not None:
                return operands[0].copy_(mask)
        if func in _LEAKY_BY_CHANCE:
            made, slopes = leaky_by_chance(self._uniform, *operands, **(kwargs or {}))
            operands[1].copy_(slopes)
            return operands[0].copy_(made) if func in IN_PLACE else made
        computed = self._table.get(IN_PLACE.get(func, func))
        if computed is None:
            return func(*args, **(kwargs or {}))
        made = computed(*operands, **(kwargs or {}))
        return operands[0].copy_(made) if func in IN_PLACE else made

    def _mask(self, noise: torch.Tensor, kept: float) -> torch.Tensor | None:
        """Return the mask of plain dropout; None if this is another kind of draw. Dropout divides the mask by the
        probability of keeping an element, so a mask filled with that probability drops nothing."""
        if self._key is None:
            dropped = any(_like(_probability(node), 1.0 - kept) for node in self._nodes if node.op != _UNIFORM)
            return torch.full_like(noise, kept) if dropped else None
        node = self._nodes[self._drawn] if self._drawn < len(self._nodes) else None
        if node is not None and node.op == _UNIFORM:
            return None
        self._drawn += 1
        if node is None or not _like(_probability(node), 1.0 - kept):
            self._fits = False
            return torch.full_like(noise, kept)
        p = _probability(node)
        return scaled_mask(tuple(noise.shape), p, self._key, node.id, dtype=torch.float32, device=noise.device) != 0

    def _uniform(self, like: torch.Tensor) -> torch.Tensor:
        place, self._drawn = self._drawn, self._drawn + 1
        if self._key is not None and place < len(self._nodes) and self._nodes[place].op == _UNIFORM:
            return uniform(like, self._key, self._nodes[place].id)
        self._fits = self._key is None
        return torch.full_like(like, _MIDDLE)


def without_draws(graph: Graph) -> Graph:
    """Return the same graph with every dropout probability 0 and every uniform number 0.5."""

    def kept(node: Node) -> Node:
        if node.op == _UNIFORM:
            return msgspec.structs.replace(node, op="aten.full_like.default", args=(*node.args, _MIDDLE))
        if _probability(node) == 0.0:
            return node
        kwargs: dict[str, Arg] = {**node.kwargs, _ARGUMENT[node.op]: 0.0}
        return msgspec.structs.replace(node, kwargs=kwargs)

    return msgspec.structs.replace(graph, nodes=tuple(kept(node) for node in graph.nodes))


def in_mode(graph: Graph, *, training: bool) -> Graph:
    """Return `graph` with each selection by mode replaced by the operand of that mode."""

    def chosen(node: Node) -> Node:
        if node.op != _IN_TRAINING:
            return node
        return msgspec.structs.replace(node, op="aten.alias.default", args=(node.args[0 if training else 1],))

    return msgspec.structs.replace(graph, nodes=tuple(chosen(node) for node in graph.nodes))


def drawn_in_evaluation(graph: Graph) -> tuple[Node, ...]:
    """Return the nodes that draw random numbers in evaluation."""
    return tuple(node for node in _needed(in_mode(graph, training=False)) if node.op == _UNIFORM)


def _draws(node: Node, training: bool) -> bool:
    return node.op == _UNIFORM or (training and _probability(node) > 0.0)


def _needed(graph: Graph) -> tuple[Node, ...]:
    return needed_nodes(graph, {*graph.outputs.values(), *graph.state_writes})


def _like(one: float, other: float) -> bool:
    return math.isclose(one, other, abs_tol=1e-9)


def _probability(node: Node) -> float:
    value = node.kwargs.get(_ARGUMENT.get(node.op, ""), 0.0)
    return float(value) if isinstance(value, int | float) else 0.0
