"""The graph for serving: logits and hidden states before the head, no loss. Decides which graphs can be served.

Generation packs tokens of many sessions along the sequence and caches what later tokens need of earlier ones: keys and
values of attention, states of the nodes in `ir.states`. So only causal attention and such nodes may mix positions.
Graphs that violate this are refused with the reason. Encoders and classifiers of texts compute a whole text at once, so
any of their nodes may. `capture` makes the graph, `ir.partition` cuts the result,
backends serve it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from functools import partial
from typing import Final, Literal

import msgspec

from fusionai.ir.graph import SYMINT, cheap_nodes, consumers, needed_nodes, producers, prune, reads, renamed, restrict
from fusionai.ir.operators import OPERATORS
from fusionai.ir.positions import POSITIONS, by_positions
from fusionai.ir.schema import Graph, ListArg, Node, Ref, ValueSpec
from fusionai.ir.shapes import evaluate, symbols_of
from fusionai.ir.states import CONVOLUTION, carries, may_carry, state_shapes
from fusionai.primitives.errors import GraphError

Purpose = Literal["generate", "embed", "score"]
"""What a served model gives: the next token's logits at every position, a vector for each position of a whole text, or
scores of whole texts."""
LOGITS: Final = "logits"
HIDDEN: Final = "hidden"
LAST_STATES: Final = "last_hidden_state"
"""Output of transformers' models without a head."""
BATCH: Final = "b"
"""Symbol of the batch size, which is 1 in serving."""
SEQUENCE: Final = "s"
TOKEN_TYPES: Final = "token_type_ids"
"""Input [1, s] of classifiers that are given two texts: 0 in the first one, 1 in the second."""
ADAPTERS: Final = "adapters"
"""Input [1, s, all ranks] of a graph with adapters: 1 in the columns of the position's adapter, 0 elsewhere."""
IMAGE_ROWS: Final = "image_rows"
"""Input [1, s, hidden size] of a graph that takes images: the embeddings of the positions at which a token is below
0."""
LAYER_ROWS: Final = "image_layer_rows"
"""Input [1, s, layers * hidden size] of a graph that takes images and adds features of them to the results of its first
layers; 0 at positions of text."""
AXIS_POSITIONS: Final = "axis_positions"
"""Input [1, s, 3] of a graph that takes images and has a position in time, height and width for each token."""
FEATURES: Final = "features"
"""Output of a graph whose layers' states a head reads (`capture.heads`): [1, s, layers * hidden size]."""
STATES: Final = "states"
"""Input [1, s, size] of a head that guesses tokens: the served model's states at the positions before `input_ids`."""
FROM_SEGMENTS: Final = frozenset({POSITIONS, ADAPTERS})
"""Inputs that are computed from a pass's segments and never sent."""

ATTENTION: Final = "fusion.attention"
PRODUCTS: Final = frozenset({"aten.linear.default", "aten.mm.default", "aten.matmul.default", "aten.addmm.default"})
EXPERT_PRODUCT: Final = "fusion.expert_linear"
_IDENTITIES: Final = frozenset({"fusion.dropout", "aten.alias.default", "aten.detach.default", "aten.clone.default"})
"""Operators that return their first operand outside training."""
COPY: Final = "aten.clone.default"
BY_MODE: Final = "fusion.in_training"
RANDOM: Final = "fusion.uniform"
_ALONG_ALL: Final = frozenset({"aten.sum.default", "aten.mean.default", "aten.max.default", "aten.min.default"})


def serving_graph(graph: Graph) -> Graph:
    """Return `graph` without loss, labels and dropout, in the form of what it gives (`purpose_of`).

    A causal language model has the outputs `logits` and `hidden`; `hidden` is the operand of the head's product, [1, s,
    hidden size]. `features` stay an output (`capture.heads`). An encoder has the output `hidden` alone, a classifier of
    whole texts `logits` [1, labels] alone. Node ids and blocks stay; nodes that are added have new ids. Raises
    `GraphError` if there is no such output, or if random numbers are drawn, because a token would then depend on the
    tokens computed together with it."""
    if LOGITS in graph.outputs:
        plain = _plain(graph, LOGITS, *({FEATURES} & graph.outputs.keys()))
        if row_dimension(plain, plain.outputs[LOGITS]) is None:
            return _with_own_tables(plain)
        plain = _without_identities(by_positions(plain))
        plain = plain if serves_from_caches(plain) else _with_own_tables(plain)
        return _with_head_operand(msgspec.structs.replace(plain, outputs={**plain.outputs, HIDDEN: _hidden(plain)}))
    made = next((name for name in (LAST_STATES, HIDDEN) if name in graph.outputs), None)
    if made is None or row_dimension(graph, graph.outputs[made]) != 1:
        raise GraphError(
            f"graph {graph.name!r} has no output 'logits' or {LAST_STATES!r} with a row per position, only "
            f"{', '.join(graph.outputs) or 'none'}.",
            hint="Serve a causal language model, an encoder, or a classifier of texts.",
        )
    plain = _plain(graph, made)
    return _with_tail(_with_own_tables(msgspec.structs.replace(plain, outputs={HIDDEN: plain.outputs[made]})))


def head_graph(graph: Graph) -> Graph:
    """Return the captured graph of a head that guesses tokens, in the form in which it is served: with the outputs
    `logits` and `hidden`, its own states. Raises `GraphError` if it can't be served from a cache."""
    plain = _plain(graph, LOGITS, HIDDEN)
    plain = _without_identities(by_positions(plain))
    require_servable(plain, attention_nodes=sum(node.op == ATTENTION for node in plain.nodes), attention_layers=1)
    if carries(plain):
        raise GraphError(f"{graph.name} carries states, which can't drop a rejected guess.")
    return plain


def state_graph(graph: Graph) -> Graph:
    """Return the captured graph of what makes states `hidden` of states, row by row, in the form in which it is
    served."""
    return _plain(graph, HIDDEN)


def purpose_of(graph: Graph) -> Purpose:
    """Return what `graph` (from `serving_graph`) is for."""
    if HIDDEN not in graph.outputs:
        return "score"
    return "generate" if LOGITS in graph.outputs else "embed"


def works_by_rows(graph: Graph) -> bool:
    """Return whether a stage of an encoder computes each position by itself, as the tail does."""
    return all(node.op == COPY for node in graph.nodes)


def _plain(graph: Graph, *outputs: str) -> Graph:
    plain = _by_rows(_without_identities(prune(graph, list(outputs))))
    drawing = next((node for node in plain.nodes if node.op == RANDOM), None)
    if drawing is not None:
        raise GraphError(
            f"graph {graph.name!r} draws random numbers outside training, in {drawing.path or 'its forward'}.",
            hint="Draw in training only: `if self.training:`.",
        )
    return plain


def _with_tail(graph: Graph) -> Graph:
    """Add a last block that only passes the hidden states on. It is the part of an encoder that stays with the job
    owner, so that all layers can run on other machines, and it needs only the rows that vectors are made of."""
    return _passed_on(graph, 1 + max(node.block for node in graph.nodes))


def _with_head_operand(graph: Graph) -> Graph:
    """Let the head's block pass its operand on if a layer makes it, as in models without a norm behind the last layer:
    outputs come from the last stage alone."""
    made_by = producers(graph)
    makers = [made_by.get(graph.outputs[name]) for name in (HIDDEN, LOGITS)]
    before, head = (None if node is None else node.block for node in makers)
    return graph if before is None or head is None or before == head else _passed_on(graph, head)


def _passed_on(graph: Graph, block: int) -> Graph:
    """Let `block` pass the hidden states on."""
    made = graph.outputs[HIDDEN]
    passed = f"{made}:tail"
    tail = Node(id=1 + max(node.id for node in graph.nodes), op=COPY, args=(Ref(made),), outputs=(passed,), block=block)
    values = {**graph.values, passed: graph.values[made]}
    outputs = {**graph.outputs, HIDDEN: passed}
    return msgspec.structs.replace(graph, nodes=(*graph.nodes, tail), values=values, outputs=outputs)


def _with_own_tables(graph: Graph) -> Graph:
    """Let each block compute for itself what it reads from another block without a row per position, if that depends on
    parameters and positions only, such as T5's and MPNet's biases. Only rows can travel between stages."""
    cheap, made_by = cheap_nodes(graph), producers(graph)
    following = itertools.count(1 + max(node.id for node in graph.nodes))
    fixed: set[str] = set()
    values, nodes = dict(graph.values), list[Node]()
    own: dict[tuple[str, int], str] = {}
    for node in graph.nodes:
        reading = tuple(reads(node))
        if node.id in cheap or all(
            value in fixed or value in graph.params or (value in made_by and made_by[value].id in cheap)
            for value in reading
        ):
            fixed.update(node.outputs)

    def brought(value: str, block: int) -> str:
        """Return the name of `value` computed in `block`."""
        maker = made_by.get(value)
        if maker is None or maker.id in cheap or maker.block == block or value not in fixed:
            return value
        if (value, block) not in own:
            named = {operand: brought(operand, block) for operand in reads(maker)}
            made = {output: f"{output}:{block}" for output in maker.outputs}
            values.update((made[output], graph.values[output]) for output in maker.outputs)
            own.update(((output, block), made[output]) for output in maker.outputs)
            copied = msgspec.structs.replace(renamed(maker, {**named, **made}), id=next(following), block=block)
            nodes.append(copied)
        return own[value, block]

    for node in graph.nodes:
        if node.id in cheap:
            nodes.append(node)
            continue
        foreign = [value for value in reads(node) if value in fixed and row_dimension(graph, value) != 1]
        names = {value: brought(value, node.block) for value in foreign}
        nodes.append(renamed(node, names))
    return prune(msgspec.structs.replace(graph, nodes=tuple(nodes), values=values), list(graph.outputs))


def require_servable(graph: Graph, *, attention_nodes: int, attention_layers: int) -> None:
    """Raise `GraphError` with the reason unless `graph` (from `serving_graph`) can be served from caches. The counts
    come from the capture: an attention layer that is not the semantic operator would not see cached tokens. Layers with
    states may have attention as well, and configurations then count some of them only."""
    states = state_shapes(graph)
    if attention_nodes < attention_layers or (
        not states and (attention_nodes > attention_layers or not attention_nodes)
    ):
        raise GraphError(
            f"{graph.name}: {attention_nodes} of {attention_layers} attention layers are the semantic operator "
            "fusion.attention; the others can't read the KV cache.",
            hint="Serve a model whose attention goes through transformers' attention interface.",
        )
    if graph.state_writes:
        raise GraphError(
            f"{graph.name} can't be served: it changes the buffer {min(graph.state_writes.values())!r} while it runs."
        )
    cheap = cheap_nodes(graph)
    for node in graph.nodes:
        reason = _obstacle(graph, node) or (_mixture(graph, node, cheap) if states else None)
        if reason is not None:
            raise GraphError(
                f"{graph.name} can't be served from caches: node {node.id} ({node.op}, {node.path}) {reason}.",
                hint="Serve a model in which only causal attention and states look at other positions.",
            )


def serves_from_caches(graph: Graph) -> bool:
    """Return whether `graph` (from `serving_graph`) can be served from caches, judged by the graph alone: attention
    that is not the semantic operator shows by a softmax along the sequence."""
    nodes = sum(node.op == ATTENTION for node in graph.nodes)
    try:
        require_servable(graph, attention_nodes=nodes, attention_layers=nodes)
    except GraphError:
        return False
    return True


def split_behind_attention(graph: Graph, wanted: Collection[str]) -> tuple[Graph, Graph] | None:
    """Split the graph into the part that fills the caches and the part that computes `wanted` from it, row by row.

    Returns None if nothing is gained. The outputs of the first graph are inputs of the second under their own names,
    besides inputs of `graph`. To compute some rows only, pass those rows of every input of the second graph that has
    rows (`row_dimension`). Sizes are recomputed in the second graph. Raises `KeyError` for an unknown output.
    """
    outputs = {meaning: graph.outputs[meaning] for meaning in wanted}
    made_by, used = producers(graph), consumers(graph)
    needed = needed_nodes(graph, outputs.values())
    cut = {reader.id for node in needed if node.op == CONVOLUTION for reader in used.get(node.outputs[0], ())}
    mixed = [
        value for node in needed if node.op == ATTENTION or may_carry(node) or node.id in cut for value in node.outputs
    ]
    front = {node.id for node in needed_nodes(graph, mixed)}
    behind = {node.id for node in needed} - front
    if not front or not any(OPERATORS[node.op].category == "matmul" for node in needed if node.id in behind):
        return None
    waiting = [*(value for node in needed if node.id in behind for value in reads(node)), *outputs.values()]
    crossing: dict[str, None] = {}
    while waiting:
        value = waiting.pop()
        node = made_by.get(value)
        if value in graph.params or (node is not None and node.id in behind):
            continue
        if node is not None and graph.values[value].dtype == SYMINT:
            behind.add(node.id)
            waiting += reads(node)
            continue
        if [dim for dim in graph.values[value].shape if SEQUENCE in symbols_of(dim)] not in ([], [SEQUENCE]):
            return None
        crossing[value] = None
    made_before = {value: value for value in crossing if value in made_by}
    first = [node for node in graph.nodes if node.id in front]
    second = [node for node in graph.nodes if node.id in behind]
    before = restrict(graph, first, inputs=graph.inputs, outputs=made_before, state_writes={})
    after = restrict(graph, second, inputs=tuple(crossing), outputs=outputs, state_writes={})
    # A wanted value that is made before the cut is read by no node behind it.
    passed = [value for value in outputs.values() if value in crossing and value not in after.inputs]
    specs = {value: graph.values[value] for value in passed}
    after = msgspec.structs.replace(after, inputs=(*after.inputs, *passed), values={**after.values, **specs})
    return before, after


def row_dimension(graph: Graph, value: str) -> int | None:
    """Return the dimension of a value along which its rows are; None if it has no rows."""
    shape = graph.values[value].shape
    return shape.index(SEQUENCE) if SEQUENCE in shape else None


def _obstacle(graph: Graph, node: Node) -> str | None:
    """Return why this node would mix packed sessions; None if it does not."""
    if node.op == ATTENTION:
        if node.kwargs.get("causal", False) is not True:
            return "sees later positions"
        return None if node.kwargs.get("key_mask") is None else "takes a padding mask"
    if may_carry(node):
        return None  # `state_shapes` has checked it
    match OPERATORS[node.op].category:
        case "create":
            if any(symbols_of(dim) for value in node.outputs for dim in graph.values[value].shape) and (
                ".arange." in node.op
            ):
                return "counts positions of the pack instead of taking position_ids"
        case "conv" | "pool":
            return "mixes neighbouring positions"
        case "reduce" | "softmax" if _along_sequence(graph, node):
            return "reduces along the sequence"
        case _:
            pass
    return None


_REORDERED: Final = frozenset(f"aten.{name}.default" for name in ("flip", "roll", "tril", "triu"))
_LENGTHS: Final = (7, 13)
"""Two lengths of a text without a common divisor."""


def _mixture(graph: Graph, node: Node, cheap: frozenset[int]) -> str | None:
    """Return why a node beside nodes with states may mix positions. There the number of attention layers does not say
    whether all of them were recognised, so every result must have as many rows as the text has positions, or a fixed
    number of rows for each, along one dimension."""
    if node.id in cheap or node.op == CONVOLUTION:
        return None
    if node.op in _REORDERED:
        return "moves positions"
    grows = any(SEQUENCE in symbols_of(dim) for value in reads(node) for dim in graph.values[value].shape)
    for value in node.outputs:
        spec = graph.values[value]
        if spec.dtype == SYMINT:
            continue
        along = [dim for dim in spec.shape if SEQUENCE in symbols_of(dim)]
        symbols = dict.fromkeys(graph.symbols, 1)
        rows = [evaluate(dim, {**symbols, SEQUENCE: length}) / length for dim in along for length in _LENGTHS]
        if len(along) > 1 or len({*rows}) > 1 or any(not row.is_integer() for row in rows):
            return "has other rows than one for each position"
        if grows and not along:
            return "sums over positions"
    return None


def _along_sequence(graph: Graph, node: Node) -> bool:
    """Return whether a reduction includes a dimension whose size depends on the sequence."""
    source = next(iter(reads(node)), None)
    if source is None:
        return False
    shape = graph.values[source].shape
    varying = {position for position, dim in enumerate(shape) if SEQUENCE in symbols_of(dim)}
    if node.op in _ALONG_ALL:
        return bool(varying)
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", -1)
    if node.op == "aten.topk.default":
        dims = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", -1)
    given = dims.items if isinstance(dims, ListArg) else (dims,)
    positions = {dim % len(shape) for dim in given if isinstance(dim, int) and not isinstance(dim, bool) and shape}
    return bool(positions & varying)


def _without_identities(graph: Graph) -> Graph:
    """Remove identity operators: their readers read the operand instead. Attention gets dropout 0."""
    origin: dict[str, str] = {}
    kept: list[Node] = []
    outputs = set(graph.outputs.values())
    for node in graph.nodes:
        if node.op in (*_IDENTITIES, BY_MODE) and outputs.isdisjoint(node.outputs):
            source = node.args[1 if node.op == BY_MODE else 0]
            if isinstance(source, Ref) and graph.values[source.name] == graph.values[node.outputs[0]]:
                origin[node.outputs[0]] = origin.get(source.name, source.name)
                continue
        node = renamed(node, origin)
        if node.op == ATTENTION:
            node = msgspec.structs.replace(node, kwargs={**node.kwargs, "dropout": 0.0})
        kept.append(node)
    return prune(msgspec.structs.replace(graph, nodes=tuple(kept)), list(graph.outputs))


def _by_rows(graph: Graph) -> Graph:
    """Write products weight @ x, whose columns are positions, as products of rows with the weight. Backends keep such
    weights in the asked-for format, and a row's bits do not depend on the number of rows."""
    values = dict(graph.values)
    following = 1 + max((node.id for node in graph.nodes), default=0)
    nodes: list[Node] = []
    for node in graph.nodes:
        match node.op, node.args:
            case (("aten.matmul.default" | "aten.mm.default"), (Ref(weight), Ref(x))) if (
                weight in graph.params and x not in graph.params and len(values[weight].shape) == 2
            ):
                *outer, inner, rows = values[x].shape
                last, (made,) = len(outer) + 1, node.outputs
                turned, product = f"{made}:x", f"{made}:rows"
                values[turned] = ValueSpec((*outer, rows, inner), values[x].dtype)
                values[product] = ValueSpec((*outer, rows, values[weight].shape[0]), values[made].dtype)
                turn = partial(msgspec.structs.replace, node, op="aten.transpose.int")
                nodes += [
                    turn(id=following, args=(Ref(x), last - 1, last), outputs=(turned,)),
                    msgspec.structs.replace(
                        node, op="aten.linear.default", args=(Ref(turned), Ref(weight)), outputs=(product,)
                    ),
                    turn(id=following + 1, args=(Ref(product), last - 1, last)),
                ]
                following += 2
            case _:
                nodes.append(node)
    return msgspec.structs.replace(graph, nodes=tuple(nodes), values=values)


def _hidden(graph: Graph) -> str:
    """Return the operand of the head: that of the last product with a parameter before the logits, not yet
    flattened."""
    made_by = producers(graph)
    node = made_by.get(graph.outputs[LOGITS])
    while node is not None and not (node.op in PRODUCTS and any(value in graph.params for value in reads(node))):
        node = made_by.get(next(reads(node), ""))
    if node is None:
        raise GraphError(f"graph {graph.name!r}: no product with a parameter makes the logits.")
    operand = node.args[1 if node.op == "aten.addmm.default" else 0]
    name = operand.name if isinstance(operand, Ref) else ""
    while len(graph.values[name].shape) == 2 and name in made_by and OPERATORS[made_by[name].op].view:
        name = next(reads(made_by[name]), name)
    return name
