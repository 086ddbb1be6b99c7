"""Routes of gradients through a cut graph, chosen so that each sum has the same bits as in one process.

Autograd in one process adds the contributions to a value's gradient one by one, in the reverse order of the value's
uses. A stage continues the sum that later stages began: the last stage that uses a value sends its sum to the next
lower one, which adds its own uses, down to the stage that made the value (or is home to the parameter). This is the
same order unless a stage holds a use between two uses of another stage.

Where uses interleave, the sum is passed on as far as the order allows, and every later contribution travels separately:
its use reads an alias of the value, and the producer has an `aten.alias` node at that use's place in the order of
execution, whose gradient is the contribution.

`ir.partition` calls `gradient_uses` and `route_values`; `execution.training.boundary` makes ports of the routes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import msgspec

from fusionai.ir.graph import needing_gradient, reads, rewired
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Graph, Node, Ref
from fusionai.primitives.tensors import tensor_bytes

ALIAS: Final = "aten.alias.default"


class GradientRoute(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Stage `sender` sends its gradient of `value` to stage `receiver`, which made the value or continues its sum.
    `value` is a boundary value, an alias of one, or a parameter's value."""

    value: str
    sender: int
    receiver: int


@dataclass(frozen=True, slots=True)
class OperandUse:
    """One operand of one node. `place` is the node's position in the whole graph."""

    stage: int
    place: int
    operand: int


@dataclass(slots=True)
class Rewritten:
    """Changes to a stage's graph. `aliases`: input -> the value it repeats. `joins`: outputs only for gradients."""

    aliases: dict[str, str] = field(default_factory=dict[str, str])
    operands: dict[int, dict[int, str]] = field(default_factory=dict[int, dict[int, str]])
    """Place of a node -> operand -> the alias that it reads instead."""
    joins: dict[str, tuple[OperandUse, str]] = field(default_factory=dict[str, tuple[OperandUse, str]])
    """Output -> (the use whose gradient it receives, the value it is an alias of)."""


def gradient_uses(
    graph: Graph, held: Sequence[Collection[int]], values: Collection[str]
) -> dict[str, list[OperandUse]]:
    """Return the uses through which gradients of these values flow, in autograd's order. `held`: node ids by stage.

    A use that reaches the outputs through a detached value only is none: its stage would send a gradient of nothing,
    and might do so before the receiver has begun the microbatch, because no loss waits for both."""
    flowing = _flowing(graph)
    found: dict[str, list[OperandUse]] = {}
    stages_of: dict[int, list[int]] = {}
    for stage, ids in enumerate(held):
        for node_id in ids:
            stages_of.setdefault(node_id, []).append(stage)
    for place in reversed(range(len(graph.nodes))):
        node = graph.nodes[place]
        if not OPERATORS[node.op].differentiable or flowing.isdisjoint(node.outputs):
            continue
        for operand, value in enumerate(reads(node)):
            if value in values:
                found.setdefault(value, []).extend(
                    OperandUse(stage, place, operand) for stage in stages_of.get(node.id, ())
                )
    return found


def _flowing(graph: Graph) -> frozenset[str]:
    """Values that need a gradient and get one: differentiable operators lead from them to an output of the graph."""
    needs_grad, found = needing_gradient(graph), set(graph.outputs.values())
    for node in reversed(graph.nodes):
        if OPERATORS[node.op].differentiable and any(value in found and value in needs_grad for value in node.outputs):
            found.update(reads(node))
    return needs_grad & found


@dataclass(frozen=True, slots=True)
class SharedUses:
    """A trainable parameter that several blocks read. `blocks`: block of each use, in the order in which autograd adds
    them. `interleaves`: the order returns to a higher block, so the sum can't pass from last to first."""

    key: str
    nbytes: int
    blocks: tuple[int, ...]

    @property
    def interleaves(self) -> bool:
        return any(later < earlier for later, earlier in pairwise(self.blocks))


def shared_uses(graph: Graph) -> list[SharedUses]:
    """Return the trainable parameters of the whole graph that several blocks read, sorted by key."""
    trained = {value: spec for value, spec in graph.params.items() if spec.trainable}
    uses = gradient_uses(graph, [{node.id for node in graph.nodes}], trained)
    found = [
        SharedUses(spec.key, tensor_bytes(spec.dtype, spec.shape), tuple(graph.nodes[one.place].block for one in own))
        for value, own in uses.items()
        for spec in (trained[value],)
    ]
    return sorted((one for one in found if len({*one.blocks}) > 1), key=lambda one: one.key)


def in_stage_order(uses: Sequence[OperandUse]) -> tuple[Sequence[OperandUse], Sequence[OperandUse]]:
    """Return (uses whose sum stages can pass on from last to first, other uses), in the order of autograd. The first
    two contributions may be swapped, because a sum of two does not depend on their order."""
    ordered = list(uses)
    if len(ordered) > 1 and ordered[0].stage < ordered[1].stage:
        ordered[:2] = ordered[1], ordered[0]
    end = 1
    while end < len(ordered) and ordered[end].stage <= ordered[end - 1].stage:
        end += 1
    return ordered[:end], ordered[end:]


def passed_on(value: str, uses: Iterable[OperandUse], last: int) -> list[GradientRoute]:
    """Return the routes that pass the sum of these uses from stage to stage, down to `last`."""
    stages = sorted({use.stage for use in uses} | {last}, reverse=True)
    return [GradientRoute(value=value, sender=sender, receiver=receiver) for sender, receiver in pairwise(stages)]


def route_values(
    uses: Mapping[str, Sequence[OperandUse]], producers: Mapping[str, int], taken: Collection[str]
) -> tuple[list[GradientRoute], dict[int, Rewritten]]:
    """Return the routes of gradients of boundary values, and the changes to the stages' graphs. `producers`: the stage
    that makes each value. `taken`: names that aliases must not have."""
    routes: list[GradientRoute] = []
    changes: dict[int, Rewritten] = {}
    for value, producer in producers.items():
        if value not in uses:
            continue
        begun, apart = in_stage_order(uses[value])
        routes += passed_on(value, begun, producer)
        number = 0
        for use in apart:
            if use.stage == producer:
                continue  # autograd in that stage adds it in its place
            while (alias := f"{value}~{number}") in taken:
                number += 1
            number += 1
            consumer, maker = (changes.setdefault(stage, Rewritten()) for stage in (use.stage, producer))
            consumer.aliases[alias] = value
            consumer.operands.setdefault(use.place, {})[use.operand] = alias
            maker.joins[alias] = (use, value)
            routes.append(GradientRoute(value=alias, sender=use.stage, receiver=producer))
    return routes, changes


def rewritten(whole: Graph, part: Graph, change: Rewritten) -> Graph:
    """Return the stage's graph with its aliases. New node ids are above all ids of the whole graph."""
    place_of = {node.id: place for place, node in enumerate(whole.nodes)}
    block_of = {value: node.block for node in part.nodes for value in node.outputs}
    next_id = 1 + max(place_of)
    # Autograd adds the first of a node's operands first, so its alias must run last.
    waiting = sorted(change.joins.items(), key=lambda item: (item[1][0].place, -item[1][0].operand))
    nodes: list[Node] = []
    for node in part.nodes:
        while waiting and waiting[0][1][0].place < place_of[node.id]:
            nodes.append(_alias(*waiting.pop(0), next_id + len(nodes), block_of))
        if instead := change.operands.get(place_of[node.id]):
            names = iter([instead.get(number, value) for number, value in enumerate(reads(node))])
            node = rewired(node, lambda _value, names=names: next(names))
        nodes.append(node)
    while waiting:
        nodes.append(_alias(*waiting.pop(0), next_id + len(nodes), block_of))
    repeated = change.aliases | {alias: value for alias, (_, value) in change.joins.items()}
    return msgspec.structs.replace(
        part,
        inputs=(*part.inputs, *change.aliases),
        outputs={**part.outputs, **{alias: alias for alias in change.joins}},
        values={**part.values, **{alias: whole.values[value] for alias, value in repeated.items()}},
        nodes=tuple(nodes),
    )


def _alias(name: str, joined: tuple[OperandUse, str], node_id: int, block_of: Mapping[str, int]) -> Node:
    _, value = joined
    return Node(id=node_id, op=ALIAS, args=(Ref(value),), outputs=(name,), block=block_of[value])
