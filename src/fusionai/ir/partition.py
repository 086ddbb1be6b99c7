"""Cuts a graph into stages. Decides which node, parameter and value belongs to which stage; places nothing on peers.

Any assignment of nodes to stages works as long as data flows forward. Cheap nodes (`ir.graph.cheap_nodes`) are computed
again in every stage that needs them, so that exactly one tensor crosses a layer boundary of a transformer. A value may
skip stages: any later stage can use it by name. A parameter read by several stages is held by each of them; trainable
ones are listed in `Partition.shared`, because their gradients must be summed over the holders.

Gradients travel as `ir.gradients` routes them, so that sums have the same bits as in one process. Parameters for which
no route achieves this are listed in `Partition.cut_dependent`.

`ir.blocks` numbers the blocks, `scheduling` chooses the ranges, `execution` moves boundary values.

Blocks that stay with the job owner (`ends`): at the front everything before the first layer, which
reads the job's inputs (or the first layer, if nothing comes before it); at the back the loss and everything from the
computation of the logits on, or the block before the loss if no output is named logits. Neither token ids nor logits
may leave the owner, so the blocks between may not read the job's inputs, except where texts begin and end (and, in
serving, which adapter they use), and may not compute the job's outputs. This is checked on the actual cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from fusionai.ir import gradients as routing
from fusionai.ir.graph import cheap_nodes, needing_gradient, nodes_by_block, producers, reads, restrict
from fusionai.ir.schema import Dim, Graph, Node, Ref
from fusionai.ir.serving import AXIS_POSITIONS, FROM_SEGMENTS, HIDDEN, LAYER_ROWS, LOGITS
from fusionai.ir.shapes import parse
from fusionai.primitives.errors import GraphError
from fusionai.primitives.tensors import tensor_bytes

FEED: Final = -1
"""The producer of a job's inputs."""

SIZE_OF: Final = "aten.sym_size.int"
PASSED_ON_BYTES: Final = 4 * 2**20
"""Largest gradient of a shared parameter that travels with every microbatch: this takes 1.7 s on a 20 Mbit/s line. A
larger gradient is sent once per step."""


class Route(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A boundary value: the stage that produces it (-1: the data feed) and all stages that read it. `needs_grad`:
    whether a gradient flows back from any of them, on the routes in `Partition.gradients`."""

    value: str
    producer: int
    consumers: tuple[int, ...]
    needs_grad: bool


class SharedParam(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A trainable parameter held by several stages. `stages[0]` is its home: its gradients are summed, its norm is
    counted and its bytes are saved there. `summed`: stages whose sums over the microbatches are added at home once per
    step; the gradients of the others travel with each microbatch (`Partition.gradients`)."""

    key: str
    stages: tuple[int, ...]
    summed: tuple[int, ...] = ()


class StageGraph(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One stage. `grad_inputs`: boundary inputs, aliases and parameters (by value name) whose gradient `backward` must
    return. `aliases`: input -> the boundary value that it repeats. `joins`: outputs that only receive gradients."""

    stage: int
    graph: Graph
    grad_inputs: tuple[str, ...]
    aliases: dict[str, str] = {}
    joins: tuple[str, ...] = ()


class CutDependent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A parameter whose gradient has other bits than in one process, and the reason."""

    key: str
    reason: str


class Partition(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Stages in order, routes between them, parameters that several stages hold, and routes of gradients."""

    stages: tuple[StageGraph, ...]
    routes: tuple[Route, ...]
    shared: tuple[SharedParam, ...]
    gradients: tuple[routing.GradientRoute, ...] = ()
    cut_dependent: tuple[CutDependent, ...] = ()


def cut_blocks(graph: Graph, ranges: Sequence[tuple[int, int]], hosts: Sequence[str] = ()) -> Partition:
    """Cut at block boundaries: stage i takes the blocks `ranges[i][0] <= block < ranges[i][1]`. `hosts`: see `cut`.
    Raises `GraphError` unless the ranges follow each other without gap or overlap and cover every block."""
    expected = 0
    for stage, (first, end) in enumerate(ranges):
        if first != expected or end <= first:
            raise GraphError(f"stage {stage} must take blocks from {expected} on, at least one, got [{first}, {end}).")
        expected = end
    blocks = len(nodes_by_block(graph))
    if expected != blocks:
        raise GraphError(f"graph {graph.name!r} has {blocks} blocks, the ranges cover {expected}.")
    held = [frozenset(node.id for node in graph.nodes if first <= node.block < end) for first, end in ranges]
    return cut(graph, held, hosts)


def cut(graph: Graph, assignment: Sequence[frozenset[int]], hosts: Sequence[str] = ()) -> Partition:
    """Cut a validated graph.

    `assignment[i]` holds the node ids of stage i, `hosts[i]` the machine that runs it (empty: one machine each).
    Between stages of one machine, gradients of shared parameters travel with each microbatch whatever their size. Nodes
    that no output needs are dropped. Raises `GraphError` if a node has no stage or two, if data would flow backward, if
    the nodes that read and write one buffer are separated, or if a stage has nothing to do.
    """
    return _Cut(graph, _stage_of_node(graph, assignment), len(assignment), hosts).partition()


def is_passed_on(graph: Graph, key: str) -> bool:
    """Return whether this parameter's gradient is small enough to travel between machines with each microbatch."""
    spec = next(spec for spec in graph.params.values() if spec.key == key)
    return tensor_bytes(spec.dtype, spec.shape) <= PASSED_ON_BYTES


def _stage_of_node(graph: Graph, assignment: Sequence[frozenset[int]]) -> dict[int, int]:
    stage_of: dict[int, int] = {}
    for stage, ids in enumerate(assignment):
        for node_id in sorted(ids):
            if node_id in stage_of:
                raise GraphError(f"node {node_id} is in stage {stage_of[node_id]} and in stage {stage}.")
            stage_of[node_id] = stage
    known = {node.id for node in graph.nodes}
    missing, unknown = sorted(known - set(stage_of)), sorted(set(stage_of) - known)
    if missing:
        raise GraphError(f"{len(missing)} nodes have no stage, the first is node {missing[0]}.")
    if unknown:
        raise GraphError(f"stage {stage_of[unknown[0]]} names node {unknown[0]}, which graph {graph.name!r} lacks.")
    return stage_of


class _Cut:
    """Cuts from the last stage to the first, because a stage must produce what later stages and the job need."""

    def __init__(self, graph: Graph, stage_of: dict[int, int], count: int, hosts: Sequence[str]) -> None:
        self.graph = graph
        self.count = count
        self.hosts = hosts
        self.cheap = cheap_nodes(graph)
        self.producer = producers(graph)
        self.home = {value: stage_of[node.id] for value, node in self.producer.items()}
        self.stage_of = stage_of
        self._check_order()
        self._check_state()

    def partition(self) -> Partition:
        graphs: list[Graph] = []
        demanded: dict[str, list[int]] = {}
        for stage in reversed(range(self.count)):
            part = self._stage(stage, demanded)
            graphs.append(part)
            for value in part.inputs:
                demanded.setdefault(value, []).append(stage)
        graphs.reverse()
        needs_grad = needing_gradient(self.graph)
        routes = tuple(
            Route(
                value=value,
                producer=FEED if value in self.graph.inputs else self.home[value],
                consumers=tuple(sorted(demanded[value])),
                needs_grad=value in needs_grad,
            )
            for value in self.graph.values
            if value in demanded
        )
        return self._with_gradients(graphs, routes)

    def _with_gradients(self, graphs: Sequence[Graph], routes: tuple[Route, ...]) -> Partition:
        shared = _shared(graphs)
        made_at = {route.value: route.producer for route in routes if route.needs_grad}
        value_of = {spec.key: value for value, spec in self.graph.params.items()}
        held = [{node.id for node in graph.nodes} for graph in graphs]
        uses = routing.gradient_uses(self.graph, held, made_at.keys() | {value_of[one.key] for one in shared})
        gradients, changes = routing.route_values(uses, made_at, self.graph.values.keys())
        returned = {route.value for route in gradients}
        routes = tuple(
            msgspec.structs.replace(route, needs_grad=route.needs_grad and route.value in returned) for route in routes
        )
        dependent: list[CutDependent] = []
        for number, one in enumerate(shared):
            value = value_of[one.key]
            found = uses.get(value, [])
            reason = ""
            at_one = self.hosts and len({self.hosts[stage] for stage in one.stages}) == 1
            if at_one or is_passed_on(self.graph, one.key):
                gradients += routing.passed_on(value, found, one.stages[0])
                if routing.in_stage_order(found)[1]:
                    reason = "its uses in several stages interleave"
            else:
                shared[number] = msgspec.structs.replace(one, summed=one.stages[1:])
                reason = "stages add it over the microbatches of a step before they add theirs to each other's"
            if reason:
                dependent.append(CutDependent(key=one.key, reason=reason))
        return Partition(
            stages=tuple(
                StageGraph(
                    stage=stage,
                    graph=routing.rewritten(self.graph, graph, change),
                    grad_inputs=tuple(route.value for route in gradients if route.sender == stage),
                    aliases=change.aliases,
                    joins=tuple(change.joins),
                )
                for stage, graph in enumerate(graphs)
                for change in (changes.get(stage, routing.Rewritten()),)
            ),
            routes=routes,
            shared=tuple(shared),
            gradients=tuple(gradients),
            cut_dependent=tuple(dependent),
        )

    def _stage(self, stage: int, demanded: dict[str, list[int]]) -> Graph:
        """Return the stage's graph, given the values that later stages demand."""
        outputs = {value: value for value in self.graph.values if value in demanded and self.home.get(value) == stage}
        for meaning, value in self.graph.outputs.items():
            if self.home[value] != stage:
                continue
            if outputs.get(meaning, value) != value:
                raise GraphError(f"output {meaning!r} has the name of another value that crosses the cut.")
            outputs[meaning] = value
        writes = {value: key for value, key in self.graph.state_writes.items() if self.home[value] == stage}
        nodes, inputs = self._needed(stage, [*outputs.values(), *writes])
        if not nodes:
            raise GraphError(f"stage {stage} has nothing to do: no output needs any of its nodes.")
        return restrict(self.graph, nodes, inputs=inputs, outputs=outputs, state_writes=writes)

    def _needed(self, stage: int, roots: list[str]) -> tuple[list[Node], list[str]]:
        """Return the stage's nodes (its own and cheap ones) that `roots` depend on, and the values it receives."""
        as_they_are: set[int] = set()
        while True:
            kept, outside = self._sweep(stage, roots, as_they_are)
            local = {value for node in kept.values() for value in node.outputs}
            unresolved: set[int] = set()
            for node in list(kept.values()):
                if node.op != SIZE_OF or _sized(node)[0] in local | outside or _sized(node)[0] in self.graph.params:
                    continue
                source = self._size_source(node, outside)
                if source is None:
                    unresolved.add(node.id)
                else:
                    kept[node.id] = source
                    outside.update(reads(source))
            if not unresolved:
                break
            as_they_are |= unresolved
        for value in outside:
            if self.home.get(value, FEED) >= stage:
                raise GraphError(f"stage {stage} reads a size of {value!r}, which is only made in a later stage.")
        ordered = [kept[node.id] for node in self.graph.nodes if node.id in kept]
        return ordered, [value for value in self.graph.values if value in outside]

    def _sweep(self, stage: int, roots: list[str], as_they_are: set[int]) -> tuple[dict[int, Node], set[str]]:
        """Collect nodes backward from the roots. A node that reads a tensor's size does not require that tensor unless
        it is in `as_they_are`: the size can be read from another tensor."""
        wanted = set(roots)
        kept: dict[int, Node] = {}
        for node in reversed(self.graph.nodes):
            if wanted.isdisjoint(node.outputs) or not (node.id in self.cheap or self.stage_of[node.id] == stage):
                continue
            kept[node.id] = node
            if node.op != SIZE_OF or node.id in as_they_are:
                wanted.update(reads(node))
        local = {value for node in kept.values() for value in node.outputs}
        return kept, {value for value in wanted - local if value not in self.graph.params}

    def _size_source(self, node: Node, outside: set[str]) -> Node | None:
        """Return `node` reading its size from a tensor the stage receives, else from a job input, if one has it."""
        tensor, dim = _sized(node)
        size = self.graph.values[tensor].shape[dim]
        candidates = [value for value in self.graph.values if value in outside]
        candidates += [value for value in self.graph.inputs if value not in outside]
        for value in candidates:
            position = _position(self.graph.values[value].shape, size)
            if position is not None:
                return msgspec.structs.replace(node, args=(Ref(value), position), kwargs={})
        return None

    def _check_order(self) -> None:
        for node in self.graph.nodes:
            if node.id in self.cheap:
                continue
            stage = self.stage_of[node.id]
            for value in reads(node):
                made_by = self.producer.get(value)
                if made_by is None or made_by.id in self.cheap or self.home[value] <= stage:
                    continue
                raise GraphError(
                    f"data would flow backward: node {node.id} ({node.op}, {node.path}) in stage {stage} reads"
                    f" {value!r} of node {made_by.id} ({made_by.op}, {made_by.path}) in stage {self.home[value]}."
                )

    def _check_state(self) -> None:
        stage_of_key = {key: self.home[value] for value, key in self.graph.state_writes.items()}
        keys = {value: spec.key for value, spec in self.graph.params.items() if spec.key in stage_of_key}
        for node in self.graph.nodes:
            for value in reads(node):
                if value in keys and self.stage_of[node.id] != stage_of_key[keys[value]]:
                    raise GraphError(
                        f"buffer {keys[value]!r} is read by node {node.id} ({node.op}) in stage"
                        f" {self.stage_of[node.id]} and written in stage {stage_of_key[keys[value]]};"
                        " a cut must not separate them."
                    )


def _sized(node: Node) -> tuple[str, int]:
    match node.args:
        case (Ref(tensor), int(dim)):
            return tensor, dim
        case _:
            raise GraphError(f"node {node.id}: expected sym_size(tensor, dim), got {node.args!r}.")


def _position(shape: tuple[Dim, ...], size: Dim) -> int | None:
    """Position of this size in `shape`. Compares parsed expressions, so that spacing and brackets do not matter."""
    wanted = size if isinstance(size, int) else parse(size)
    for position, dim in enumerate(shape):
        if (dim if isinstance(dim, int) else parse(dim)) == wanted:
            return position
    return None


def _shared(graphs: Sequence[Graph]) -> list[SharedParam]:
    readers: dict[str, list[int]] = {}
    for stage, graph in enumerate(graphs):
        for spec in graph.params.values():
            if spec.trainable:
                readers.setdefault(spec.key, []).append(stage)
    return [SharedParam(key=key, stages=tuple(at)) for key, at in sorted(readers.items()) if len(at) > 1]


PUBLIC_INPUTS: Final = FROM_SEGMENTS | {AXIS_POSITIONS, LAYER_ROWS, "position_ids", "attention_mask"}
"""Inputs that layers may read: they say where a text begins and ends, where images are and which adapter it uses, but
not its content. Features of images that layers add are no more than the hidden states that they are added to."""


def ends(graph: Graph, *, first_layers: int = 0, last_layers: int = 0, training: bool = True) -> tuple[int, int]:
    """Return the number of blocks at the front and at the back that stay with the owner. `first_layers` and
    `last_layers` are the layers among them. `training`: whether the graph has its loss. Raises `GraphError` if no block
    is left between, or if the blocks between read or compute what must stay."""
    count = len(nodes_by_block(graph))
    first = 1 + first_layers
    logits = producers(graph).get(graph.outputs.get(LOGITS, ""))
    # Logits may be made under another name, or passed to the loss directly.
    tail = min(count - 2 if training else count - 1, count if logits is None else logits.block)
    last = count - tail + last_layers
    if first + last >= count:
        raise GraphError(
            f"the model has {count} blocks, and {first + last} of them would stay with the job owner: nothing is left "
            "for the pool.",
            hint="Keep fewer layers, or choose the privacy level `encrypted`.",
        )
    _check(graph, first, count - last, count)
    return first, last


def _check(graph: Graph, first: int, end: int, count: int) -> None:
    partition = cut_blocks(graph, [(0, first), (first, end), (end, count)])
    fed = [route.value for route in partition.routes if route.producer == FEED and 1 in route.consumers]
    betrayed = [value for value in fed if value not in PUBLIC_INPUTS]
    if betrayed:
        raise GraphError(
            f"layers between the model's ends read {', '.join(betrayed)} of the job's data, so it would leave the job "
            "owner.",
            hint="Choose the privacy level `encrypted`, at which peers see it, or `trusted`.",
        )
    middle = partition.stages[1].graph
    inner = {value for node in middle.nodes for value in node.outputs}
    # `hidden` goes into the head and so to the owner anyway.
    made = [name for name, value in graph.outputs.items() if value in inner and name != HIDDEN]
    if made:
        raise GraphError(
            f"the output {', '.join(made)} is made between the model's ends, so it would leave a peer.",
            hint="Choose the privacy level `encrypted`, at which peers see it, or `trusted`.",
        )
