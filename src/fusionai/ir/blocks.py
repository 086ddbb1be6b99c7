"""Finds blocks, the repeated layers of a model, from module paths. Decides `Node.block`.

Block 0 is everything before the first layer, 1..L are the layers, L+1 comes after them, L+2 is the loss. A layer is
named by its path up to the first number (`model.layers.7`, `transformer.h.3`, `layer1.0`). A model without such paths
is grouped by the children of its root, and one without paths is split where a single value crosses.

If one block then holds most nodes (a small numbered head beside named modules; a whole encoder as one member of a
Sequential), only that block is split: by the next number, by the children of its modules, or where a single value
crosses. A part that a model lacks gets no number, so the first block is always 0 and the loss, if there is one, is the
last. Numbers never decrease along a data dependency (except for cheap nodes, which every stage repeats), so that any
range of blocks is a legal stage.

`capture` calls `assign_blocks`, `ir.partition` cuts between blocks, `block_hashes` identifies equal layers for costs
and compiled code.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Final

import msgspec

from fusionai.ir.graph import cheap_nodes, consumers, needed_nodes, nodes_by_block, producers, reads, renamed
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Graph, Node, ParamSpec, Ref, ValueSpec
from fusionai.ir.serving import COPY, IMAGE_ROWS, LOGITS
from fusionai.primitives.tensors import tensor_bytes

LABELS: Final = "labels"
"""Input whose dependants belong to the loss, as do those of the logits."""

_LAYER: Final = re.compile(r"^(?:[^.]+\.)*?\d+(?=\.|$)")
_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")

_MOST: Final = 2 / 3
"""Share of the nodes with arithmetic above which a block is split, if a split is found."""
_SMALL: Final = 8
"""Number of nodes with arithmetic up to which a block is never split."""
_BETTER: Final = 3 / 4
"""Largest share of the nodes that the largest block may keep for a split to be accepted."""

_encode: Final = msgspec.json.Encoder(order="deterministic").encode


def assign_blocks(graph: Graph) -> Graph:
    """Return the same graph with every node's block number set from its path and its position in the data flow."""
    loss = _loss_nodes(graph)
    cheap = cheap_nodes(graph)
    body = [node for node in graph.nodes if node.id not in loss and node.id not in cheap]
    working = [node for node in body if _computes(node)]
    layer_of = _layers(graph, body)
    found = _numbered(graph, loss, cheap, layer_of)
    while len(largest := _largest(found, working)) > max(_SMALL, _MOST * len(working)):
        inside = {found[node.id] for node in largest}
        for parts in _parts(graph, [node for node in body if found[node.id] in inside], layer_of):
            finer = _renumbered(body, layer_of, parts)
            tried = _numbered(graph, loss, cheap, finer)
            if len(_largest(tried, working)) <= _BETTER * len(largest):
                layer_of, found = finer, tried
                break
        else:
            break
    first = _in_front(graph)
    nodes = tuple(
        msgspec.structs.replace(node, block=0 if node.id in first else found[node.id]) for node in graph.nodes
    )
    return msgspec.structs.replace(graph, nodes=nodes)


def _in_front(graph: Graph) -> frozenset[int]:
    """Return the ids of nodes that put rows in the place of embeddings, and of what they need: with the embedding they
    stay where the tokens are, also if the first layer does it."""
    putting = [value for node in graph.nodes if IMAGE_ROWS in reads(node) for value in node.outputs]
    return frozenset(node.id for node in needed_nodes(graph, putting))


def _numbered(graph: Graph, loss: frozenset[int], cheap: frozenset[int], layer_of: dict[int, int]) -> dict[int, int]:
    """Return node id -> block, from the layers of some nodes and the data flow of all."""
    floor = _raised(graph, cheap, layer_of)
    last = max(layer_of.values(), default=0)
    feeding = _feeding_layers(graph, layer_of, cheap)
    needed = {node.id for node in needed_nodes(graph, graph.outputs.values())}
    blocks: dict[int, int] = {}
    for node in graph.nodes:
        if node.id in loss:
            blocks[node.id] = last + 2
        elif node.id in cheap:
            blocks[node.id] = 0
        elif node.id in feeding or node.id not in needed:
            blocks[node.id] = floor[node.id]
        else:
            # Includes what only the end needs of the beginning, such as the scale `1 + weight` of a last norm.
            blocks[node.id] = last + 1
    blocks.update(_beside_their_module(graph, blocks, cheap))
    blocks.update(_beside_their_readers(graph, blocks, cheap))
    blocks.update(_beside_their_buffers(graph, blocks, cheap))
    return _dense(blocks, {node.id for node in graph.nodes if node.id not in cheap})


def _largest(blocks: dict[int, int], working: Sequence[Node]) -> list[Node]:
    """Return the nodes with arithmetic of the block that has most of them."""
    members: dict[int, list[Node]] = {}
    for node in working:
        members.setdefault(blocks[node.id], []).append(node)
    return max(members.values(), key=len) if members else []


def _computes(node: Node) -> bool:
    # An unfinished graph may hold operators that are not known yet.
    operator = OPERATORS.get(node.op)
    return operator is None or operator.flops != "none"


def _parts(graph: Graph, block: Sequence[Node], layer_of: dict[int, int]) -> Iterator[dict[int, int]]:
    """Yield ways to split a block, best first: node id -> part, from 1. A layer is split only by a further number."""
    free = [node for node in block if node.id not in layer_of]
    if 2 * len(free) <= len(block):
        for count in range(2, 1 + max(len(_NUMBER.findall(node.path)) for node in block)):
            yield _named(block, partial(_up_to_number, count))
        return
    yield _named(free, _child_of_root(free))
    yield _narrow_layers(graph, free)


def _renumbered(body: Sequence[Node], layer_of: dict[int, int], parts: dict[int, int]) -> dict[int, int]:
    """Combine the layers with `parts`, numbered from 1 in order of first appearance."""
    numbers: dict[tuple[int, int], int] = {}
    found: dict[int, int] = {}
    for node in body:
        key = (layer_of.get(node.id, 0), parts.get(node.id, 0))
        if key != (0, 0):
            found[node.id] = numbers.setdefault(key, len(numbers) + 1)
    return found


def block_hashes(graph: Graph) -> tuple[str, ...]:
    """Return one SHA-256 per block, equal for blocks that compute the same; index: block number. Names, node ids and
    layer numbers are masked, and cheap nodes (shared by all layers) are left out."""
    cheap = cheap_nodes(graph)
    return tuple(_hash(graph, [node for node in nodes if node.id not in cheap]) for nodes in nodes_by_block(graph))


def _layers(graph: Graph, body: Sequence[Node]) -> dict[int, int]:
    """Return node id -> number of its layer, from 1 in order of first appearance. Nodes of no layer are absent."""
    for key in (_numbered_layer, _child_of_root(body)):
        if found := _named(body, key):
            return found
    return _narrow_layers(graph, body)


def _named(nodes: Iterable[Node], key: Callable[[str], str | None]) -> dict[int, int]:
    numbers: dict[str, int] = {}
    found: dict[int, int] = {}
    for node in nodes:
        name = key(node.path)
        if name is not None:
            found[node.id] = numbers.setdefault(name, len(numbers) + 1)
    return found


def _numbered_layer(path: str) -> str | None:
    # What torch puts around a weight (`head.parametrizations.weight.0`) is no layer of the model.
    match = _LAYER.match(path.partition(".parametrizations.")[0])
    return None if match is None else match[0]


def _up_to_number(count: int, path: str) -> str | None:
    """Return the path up to its number `count`, counted from 1; None if it has fewer numbers."""
    ends = [match.end() for match in _NUMBER.finditer(path)]
    return path[: ends[count - 1]] if len(ends) >= count else None


def _child_of_root(body: Iterable[Node]) -> Callable[[str], str | None]:
    """Return a function that names modules by one component more than all paths have in common."""
    paths = {tuple(node.path.split(".")) for node in body if node.path}
    shortest = min((len(path) for path in paths), default=0)
    common = 0
    while common < shortest - 1 and len({path[: common + 1] for path in paths}) == 1:
        common += 1

    def child(path: str) -> str | None:
        parts = path.split(".")
        return ".".join(parts[: common + 1]) if path and len(parts) > common else None

    return child


def _narrow_layers(graph: Graph, body: Sequence[Node]) -> dict[int, int]:
    """Layers of a model without paths: a new layer starts after each position that only one value crosses."""
    inside = {node.id for node in body}
    order = {node.id: place for place, node in enumerate(body)}
    last_read = {
        value: max(order[reader.id] for reader in readers if reader.id in inside)
        for value, readers in consumers(graph).items()
        if any(reader.id in inside for reader in readers)
    }
    found: dict[int, int] = {}
    layer = 1
    live: set[str] = set()
    for place, node in enumerate(body):
        found[node.id] = layer
        live.update(value for value in node.outputs if last_read.get(value, -1) > place)
        live = {value for value in live if last_read[value] > place}
        # Views and casts stay with the node they follow.
        if len(live) <= 1 and _computes(node):
            layer += 1
    return found


def _raised(graph: Graph, cheap: frozenset[int], layer_of: dict[int, int]) -> dict[int, int]:
    """Return node id -> its layer, raised to the highest of its inputs' layers."""
    maker = producers(graph)
    floor: dict[int, int] = {}
    for node in graph.nodes:
        if node.id in cheap:
            continue
        block = layer_of.get(node.id, 0)
        for value in reads(node):
            made_by = maker.get(value)
            if made_by is not None and made_by.id not in cheap:
                block = max(block, floor[made_by.id])
        floor[node.id] = block
    return floor


def _feeding_layers(graph: Graph, layer_of: dict[int, int], cheap: frozenset[int]) -> frozenset[int]:
    """Nodes that some layer depends on: they belong before or between layers, not after them."""
    wanted: set[str] = set()
    found: set[int] = set()
    for node in reversed(graph.nodes):
        if node.id in cheap:
            continue
        if node.id in layer_of or not wanted.isdisjoint(node.outputs):
            found.add(node.id)
            wanted.update(reads(node))
    return frozenset(found)


def _beside_their_module(graph: Graph, blocks: dict[int, int], cheap: frozenset[int]) -> dict[int, int]:
    """Put nodes that only update state from state (BatchNorm's step counter) into the block of their module."""
    counting = {
        node.id
        for node in graph.nodes
        if all(value in graph.state_writes for value in node.outputs)
        and all(value in graph.params for value in reads(node))
    }
    beside: dict[str, int] = {}
    for node in graph.nodes:
        if node.id not in cheap and node.id not in counting:
            beside.setdefault(node.path, blocks[node.id])
    return {node.id: beside[node.path] for node in graph.nodes if node.id in counting and node.path in beside}


def _beside_their_readers(graph: Graph, blocks: dict[int, int], cheap: frozenset[int]) -> dict[int, int]:
    """Put nodes that no input of the graph reaches (weights computed from parameters, as spectral normalisation does)
    into the first block that reads them: a stage of such nodes alone would receive nothing to begin with."""
    reached = set(graph.inputs)
    apart: list[Node] = []
    for node in graph.nodes:
        if not reached.isdisjoint(reads(node)):
            reached.update(node.outputs)
        elif node.id not in cheap:
            apart.append(node)
    left = {node.id for node in apart}
    first = min((block for node_id, block in blocks.items() if node_id not in cheap and node_id not in left), default=0)
    readers = consumers(graph)
    found: dict[int, int] = {}
    for node in reversed(apart):
        after = {reader.id for value in node.outputs for reader in readers.get(value, ()) if reader.id not in cheap}
        found[node.id] = max(first, blocks[node.id], min((found.get(one, blocks[one]) for one in after), default=0))
    return found


def _beside_their_buffers(graph: Graph, blocks: dict[int, int], cheap: frozenset[int]) -> dict[int, int]:
    """Put all nodes that read or write one buffer into the highest of their blocks, and what depends on them there or
    after it: a cut must not separate them."""
    written = set(graph.state_writes.values())
    keys = {value: spec.key for value, spec in graph.params.items() if spec.key in written} | graph.state_writes
    nodes = [node for node in graph.nodes if node.id not in cheap]
    found = {value: blocks[node.id] for node in nodes for value in node.outputs}
    placed = {node.id: blocks[node.id] for node in nodes}
    at: dict[str, int] = {}
    before: dict[str, int] | None = None
    while before != at:
        before = dict(at)
        for node in nodes:
            touched = {keys[value] for value in (*reads(node), *node.outputs) if value in keys}
            lowest = [*(at.get(key, 0) for key in touched), *(found.get(value, 0) for value in reads(node))]
            placed[node.id] = max(placed[node.id], *lowest, 0)
            found.update(dict.fromkeys(node.outputs, placed[node.id]))
            at.update(dict.fromkeys(touched, placed[node.id]))
    return placed


def _loss_nodes(graph: Graph) -> frozenset[int]:
    """Nodes that depend on the labels, or on the logits without being needed for them."""
    logits = {graph.outputs[LOGITS]} if LOGITS in graph.outputs else set[str]()
    found = _dependants(graph, logits | ({LABELS} & set(graph.inputs)))
    # In a model that reads the labels in its layers (teacher forcing), not everything that depends on them is loss.
    if any(node.id in found and _numbered_layer(node.path) is not None for node in graph.nodes):
        return _dependants(graph, logits)
    return found


def _dependants(graph: Graph, values: set[str]) -> frozenset[int]:
    tainted = set(values)
    found: set[int] = set()
    for node in graph.nodes:
        if any(value in tainted for value in reads(node)):
            tainted.update(node.outputs)
            found.add(node.id)
    return frozenset(found)


def _dense(blocks: dict[int, int], working: set[int]) -> dict[int, int]:
    """Renumber without gaps, so that every block has nodes: a model may have nothing before its first layer."""
    numbers = sorted({blocks[node_id] for node_id in working})
    return {node_id: min(bisect_left(numbers, block), max(0, len(numbers) - 1)) for node_id, block in blocks.items()}


def _hash(graph: Graph, nodes: Sequence[Node]) -> str:
    names: dict[str, str] = {}
    digest = hashlib.sha256()
    for node in nodes:
        for value in (*reads(node), *node.outputs):
            if value not in names:
                names[value] = f"v{len(names)}"
                digest.update(_encode((names[value], _described(graph, value))))
        same = renamed(node, names)
        writes = [value in graph.state_writes for value in node.outputs]
        digest.update(_encode((node.op, same.args, same.kwargs, same.outputs, writes, _masked(node.path))))
    return digest.hexdigest()


def _described(graph: Graph, value: str) -> ValueSpec | ParamSpec:
    spec = graph.params.get(value)
    if spec is None:
        return graph.values[value]
    return msgspec.structs.replace(
        spec, key=_masked(spec.key), aliases=tuple(_masked(alias) for alias in spec.aliases), order=0
    )


def _masked(path: str) -> str:
    """Mask only the first number, which is the layer's; `experts.3` inside it stays."""
    return _NUMBER.sub("#", path, count=1)


def held_in_front(graph: Graph) -> Graph:
    """Return a graph of the same computation. Node ids stay; the copies have higher ids and come first."""
    learning = {value for value, spec in graph.params.items() if spec.trainable}
    readers: dict[str, Node] = {}
    for node in graph.nodes:
        for value in reads(node):
            if node.block > 0 and value in learning:
                readers.setdefault(value, node)
    names = {value: _free(f"{value}_sent", graph.values) for value in readers}
    first = 1 + max((node.id for node in graph.nodes), default=-1)
    copies = [
        Node(id=first + number, op=COPY, args=(Ref(value),), outputs=(names[value],), path=node.path, block=0)
        for number, (value, node) in enumerate(readers.items())
    ]
    later = [renamed(node, names) if node.block > 0 else node for node in graph.nodes]
    values = {names[value]: ValueSpec(graph.values[value].shape, graph.values[value].dtype) for value in readers}
    return msgspec.structs.replace(graph, nodes=(*copies, *later), values={**graph.values, **values})


def sent_bytes(graph: Graph) -> int:
    """Return the bytes of the copies that a graph of `held_in_front` sends per microbatch; as many return as
    gradients."""
    copied = [value for node in graph.nodes if node.op == COPY and node.block == 0 for value in reads(node)]
    specs = [graph.params[value] for value in copied if value in graph.params and graph.params[value].trainable]
    return sum(tensor_bytes(spec.dtype, spec.shape) for spec in specs if prod(spec.shape))


def _free(name: str, taken: Mapping[str, object]) -> str:
    while name in taken:
        name += "_"
    return name
