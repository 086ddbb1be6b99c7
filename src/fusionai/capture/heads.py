"""Capture a head that guesses tokens from the states of a served model: a graph, and where its weights are.

The graph is served like any model's, as a whole, in the job owner's process. Its inputs are the tokens after the
positions, and the states of the positions; its outputs are logits, and the states from which it guesses on.

A head for multi-token prediction (MTP) lies in a model's own files, in one of two layouts, and is a module of
transformers' classes. It reads the model's state at a position and the token after it, and predicts the token after
that: both are normalised, joined and projected to one state, a decoder layer of the model's own class computes it, and
a norm follows. Embedding and head matrix are the model's own (DeepSeek-V3, arXiv 2412.19437, section 2.2). For further
guesses, the head reads its own result in place of the model's state.

An EAGLE-3 head (arXiv 2503.01840) reads the states between some of the model's layers, side by side. They become one
further output of the model's graph, made in the last block, so that partitions carry them over all cuts to the stage
that has the model's own head.

Neighbours: `capture.models.huggingface` makes the model, `capture.models.eagle` heads in directories of their own,
`capture.capture` captures, `ir.serving` cleans the graph and keeps the output, `serving.heads` guesses with it."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fusionai.capture.capture import Captured, aliases, capture
from fusionai.capture.models.build import Construct
from fusionai.capture.models.eagle import EagleFiles, FeatureProjection, construct_eagle
from fusionai.capture.models.huggingface import HuggingFaceModel
from fusionai.capture.models.source import FactorySource
from fusionai.capture.models.state import CapturedState, Checkpoint, index_checkpoint, tensor_shapes
from fusionai.capture.served import LONGEST_PASS
from fusionai.capture.tasks import ExampleInput
from fusionai.ir.graph import producers, reads
from fusionai.ir.schema import Graph, ListArg, Node, ParamSpec, Ref, ValueSpec
from fusionai.ir.serving import BATCH, FEATURES, LOGITS, SEQUENCE, STATES, head_graph, serving_graph, state_graph
from fusionai.ir.serving_cost import EMBEDDING
from fusionai.primitives.errors import GraphError, ModelError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.serving import StateOutput

_ROWS: Final = 2
_POSITIONS: Final = 8
"""Sizes of the inputs that are traced."""


@dataclass(frozen=True, slots=True)
class CapturedPart:
    """A graph with the source of its weights. `shared`: keys of the served model's parameters, which the source does
    not have."""

    graph: Graph
    source: CapturedState
    shared: frozenset[str] = frozenset()

    def tensors(self) -> Iterator[tuple[str, HostTensor]]:
        """Yield the weights that are the head's own, one at a time. Raises `ModelError`."""
        keys = {spec.key for spec in self.graph.params.values()}
        yield from self.source.tensors(keys - self.shared)


@dataclass(frozen=True, slots=True)
class CapturedHead:
    """A captured head. `name`: what it is, for people. `reads`: the served model's output that the head reads.
    `projection`: makes the states that `part` reads of that output, row by row; None: it is read as it is. `tokens`:
    the token of each column of the logits; None: they are the model's."""

    name: str
    reads: StateOutput
    part: CapturedPart
    projection: CapturedPart | None = None
    tokens: NDArray[np.int64] | None = None


def mtp_head(model: Captured) -> CapturedHead | None:
    """Capture the head in the served model's own files; None if they hold none. Raises `ModelError`, `GraphError` with
    the reason if it can't be used."""
    huggingface = model.source.built.huggingface
    if huggingface is None or not huggingface.weights:
        return None
    names = tensor_shapes(huggingface.weights)
    layers = int(getattr(huggingface.config.get_text_config(), "num_hidden_layers", 0))
    files = find_head(names, layers)
    if files is None:
        if has_unknown_head(names):
            raise ModelError(
                "the model's files hold tensors of a head for multi-token prediction in a layout that is not known.",
                hint="Guess with a draft model: --draft MODEL.",
            )
        return None
    made: list[ConstructedHead] = []

    def construct() -> tuple[torch.nn.Module, Mapping[str, ExampleInput]]:
        made.append(construct_mtp(huggingface))
        texts = huggingface.config.get_text_config()
        return made[-1].module, _examples(int(texts.vocab_size), int(texts.hidden_size))

    captured = _traced(construct, "MTP head")
    built, head = replace(captured.source.built, huggingface=huggingface), made[0]
    checkpoint = index_checkpoint(
        huggingface.weights,
        built,
        aliases(built.module),
        {},
        shared=frozenset(head.shared),
        conversions=head.conversions,
        holds=files.holds,
    )
    source = replace(captured.source, built=built, checkpoint=checkpoint)
    return CapturedHead("its own MTP head", "hidden", _with_model(captured, head.shared, model, source))


def eagle_head(files: EagleFiles, model: Captured) -> CapturedHead:
    """Capture an EAGLE-3 head for the served `model`, whose graph has the features. Raises `ModelError`, `GraphError`
    with the reason if it can't be used."""
    embedding = _embedding(model)
    vocabulary, width = embedding.shape
    features = serving_graph(model.graph)
    size = int(features.values[features.outputs[FEATURES]].shape[-1])
    examples = _examples(vocabulary, files.width)
    captured = _traced(lambda: (construct_eagle(files, vocabulary), examples), "EAGLE-3 head")
    projected = _traced(
        lambda: (FeatureProjection(size, files.width), {STATES: _examples(vocabulary, size)[STATES]}),
        "EAGLE-3 projection",
    )
    shared: dict[str, str] = {}
    if "embed_tokens.weight" not in files.names:
        if width != files.width:
            raise ModelError(
                f"the head in {files.path} has no embedding, and the model's has rows of {width} numbers where the "
                f"head expects {files.width}.",
                hint="The head belongs to another model.",
            )
        shared["embed_tokens.weight"] = embedding.key
    part = _with_model(captured, shared, model, _filed(captured, files, shared))
    projection = CapturedPart(state_graph(projected.graph), _filed(projected, files, {}))
    return CapturedHead(f"the EAGLE-3 head {files.path.name}", "features", part, projection, files.targets(vocabulary))


def featured(files: EagleFiles, model: Captured) -> Captured:
    """Return the served `model` with the features that an EAGLE-3 head reads. Raises `ModelError`, `GraphError`."""
    config = model.config or {}
    texts = config.get("text_config") or config
    count, size = (int(texts.get(field) or 0) for field in ("num_hidden_layers", "hidden_size"))
    if files.shapes["fc.weight"] != (files.width, 3 * size):
        raise ModelError(
            f"'fc.weight' of the head in {files.path} has the shape {list(files.shapes['fc.weight'])}, expected "
            f"{[files.width, 3 * size]} for the served model, whose states have {size} numbers.",
            hint="The head belongs to another model.",
        )
    return replace(model, graph=with_features(model.graph, files.layers(count), size))


def _embedding(model: Captured) -> ParamSpec:
    """Return the served model's table of embeddings."""
    graph = serving_graph(model.graph)
    for node in graph.nodes:
        if node.op == EMBEDDING and isinstance(table := node.args[0], Ref) and table.name in graph.params:
            return graph.params[table.name]
    raise GraphError(f"{graph.name} looks its tokens up in no table, so no head can read them.")


def _filed(captured: Captured, files: EagleFiles, shared: Mapping[str, str]) -> CapturedState:
    """Return the source of a part's weights in the head's files. Raises `ModelError` for a weight that is missing or
    has another shape."""
    entries: dict[str, tuple[Path, str]] = {}
    for key, parameter in captured.source.built.parameters().items():
        if key in shared:
            continue
        if key not in files.names:
            raise ModelError(
                f"the head in {files.path} lacks {key!r}, expected with the shape {list(parameter.shape)}.",
                hint="Fetch the head's files again, or take another head.",
            )
        if files.shapes[key] != tuple(parameter.shape):
            raise ModelError(
                f"{files.names[key][1]!r} of the head in {files.path} has the shape {list(files.shapes[key])}, "
                f"expected {list(parameter.shape)}.",
                hint="The head's configuration and weights, or the served model, do not belong together.",
            )
        entries[key] = files.names[key]
    return replace(captured.source, checkpoint=Checkpoint(entries))


def _examples(vocabulary: int, width: int) -> dict[str, ExampleInput]:
    """Return inputs for tracing; `width`: size of a position's states."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (_ROWS, _POSITIONS), generator=random)
    positions = torch.arange(_POSITIONS).expand(_ROWS, _POSITIONS).contiguous()
    states = torch.randn((_ROWS, _POSITIONS, width), generator=random)
    return {
        "input_ids": ExampleInput(tokens, (BATCH, SEQUENCE)),
        "position_ids": ExampleInput(positions, (BATCH, SEQUENCE)),
        STATES: ExampleInput(states, (BATCH, SEQUENCE, None)),
    }


def _traced(construct: Construct, name: str) -> Captured:
    return capture(FactorySource(construct, name), task="none", batch=(1, 2), sequence=(1, LONGEST_PASS), train=False)


def _with_model(captured: Captured, shared: Mapping[str, str], model: Captured, source: CapturedState) -> CapturedPart:
    """Return the head with the parameters that are the served model's own as the model's graph has them. Raises
    `GraphError` if the head can't be served."""
    graph = head_graph(captured.graph)
    own = _by_key(serving_graph(model.graph))
    params: dict[str, ParamSpec] = {}
    taken: set[str] = set()
    for value, spec in graph.params.items():
        key = shared.get(spec.key)
        if key is None:
            params[value] = spec
            continue
        if key not in own:
            raise GraphError(f"the served model has no weight {key!r}, which its head needs.")
        params[value] = own[key]
        taken.add(own[key].key)
    return CapturedPart(msgspec.structs.replace(graph, params=params), source, frozenset(taken))


def _by_key(graph: Graph) -> dict[str, ParamSpec]:
    """Return the parameters by key, also by the further names of tied ones."""
    return {name: spec for spec in graph.params.values() for name in (*spec.aliases, spec.key)}


_INDEXED: Final = re.compile(r"(?:\w+\.)*?layers\.(\d+)\.eh_proj\.weight")
"""Projection of a head that is filed behind the model's last layer (DeepSeek-V3, GLM-4.5)."""
_APART: Final = re.compile(r"(?:model\.)?mtp\.fc\.weight")
"""Projection of a head that is filed under a name of its own (Qwen3-Next, Mellum)."""
_UNKNOWN: Final = re.compile(r"(?:^|\.)(?:mtp|nextn)\w*\.")
"""Names in files of heads in any layout."""


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """Where a model's files hold its first head: under names of their own (`apart`), or as layer `number`."""

    apart: bool
    number: int

    def holds(self, name: str) -> bool:
        """Return whether a tensor in the files belongs to the head."""
        if not self.apart:
            return re.search(rf"(?:^|\.)layers\.{self.number}\.", name) is not None
        own = re.search(r"(?:^|\.)mtp\.(?:layers\.(\d+)\.)?", name)
        return own is not None and own[1] in (None, "0")


def find_head(names: Iterable[str], layers: int) -> HeadFiles | None:
    """Return where files with tensors of these names hold the head of a model with this number of layers; None if they
    hold none in a known layout."""
    for name in names:
        if _APART.fullmatch(name):
            return HeadFiles(True, 0)
        if (found := _INDEXED.fullmatch(name)) is not None and int(found[1]) == layers:
            return HeadFiles(False, layers)
    return None


def has_unknown_head(names: Iterable[str]) -> bool:
    """Return whether tensors of these names seem to belong to a head."""
    return any(_UNKNOWN.search(name) for name in names)


class _Called(nn.Module):
    """Base class put before transformers' `MtpModel`: called as a stage that serves is called."""

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, states: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return logits, and the states for the next guess. `input_ids` [b, s]: the tokens after the positions whose
        `states` [b, s, hidden size] come with them."""
        model: Any = self
        hidden = model.forward_layer(0, states, position_ids, None, input_ids=input_ids)
        return {"logits": model._project_to_logits(hidden), "hidden": hidden}


@cache
def _called(kind: type[nn.Module]) -> type[nn.Module]:
    return type("MtpHead", (_Called, kind), {})


@dataclass(frozen=True, slots=True)
class ConstructedHead:
    """`shared`: the head's parameters that are the model's own, by the head's names. `conversions`: transformers'
    transforms from the files' names to the module's; None: those of the module itself."""

    module: nn.Module
    shared: dict[str, str]
    conversions: list[Any] | None = None


def construct_mtp(model: HuggingFaceModel) -> ConstructedHead:
    """Construct the head on its model. Raises `ModelError` if transformers can't make it."""
    from transformers.modeling_layers import MtpModel

    main: Any = replace(model, config=_described(model.config)).construct()
    try:
        made: Any = MtpModel(main, 1)
        conversions = list(made.get_weight_conversions(main))
    except (ValueError, AttributeError, TypeError, IndexError, StopIteration) as error:
        raise ModelError(
            f"transformers makes no MTP head for {type(main).__name__}: {type(error).__name__}: {error}.",
            hint="Serve the model with --speculate off, or guess with a draft model: --draft MODEL.",
        ) from error
    made.__class__ = _called(MtpModel)
    names = {id(parameter): name for name, parameter in main.named_parameters()}
    shared = {name: names[id(one)] for name, one in made.named_parameters() if id(one) in names}
    return ConstructedHead(made, shared, conversions)


def _described(config: Any) -> Any:
    """Return the configuration with what transformers needs to make one layer of the head, where it does not say it
    yet: the head's layer has full attention, and the experts of the model's last layer."""
    described = copy.deepcopy(config)
    texts: Any = described.get_text_config()
    for field, own in (("layer_types", "mtp_layer_types"), ("mlp_layer_types", "mtp_mlp_layer_types")):
        kinds = getattr(texts, field, None)
        if kinds and not getattr(texts, own, None):
            setattr(texts, own, ["full_attention" if field == "layer_types" else kinds[-1]])
    texts.num_mtp_layers = 1
    return described


def with_features(graph: Graph, layers: Sequence[int], size: int) -> Graph:
    """Return a captured causal language model with the output `features` [b, s, layers * size]: what enters each of
    these layers, in this order. Raises `GraphError` if a layer's input of this size is not found."""
    values = [_entering(graph, layer, size) for layer in layers]
    logits = producers(graph)[graph.outputs[LOGITS]]
    joined = f"{graph.outputs[LOGITS]}:{FEATURES}"
    spec = graph.values[values[0]]
    node = Node(
        id=1 + max(one.id for one in graph.nodes),
        op="aten.cat.default",
        args=(ListArg(tuple(Ref(value) for value in values)), -1),
        outputs=(joined,),
        block=logits.block,
    )
    place = graph.nodes.index(logits)
    return msgspec.structs.replace(
        graph,
        nodes=(*graph.nodes[:place], node, *graph.nodes[place:]),
        values={**graph.values, joined: ValueSpec((*spec.shape[:-1], size * len(layers)), spec.dtype)},
        outputs={**graph.outputs, FEATURES: joined},
    )


def _entering(graph: Graph, layer: int, size: int) -> str:
    """Return the value that enters a layer: the first of the layers' width that its nodes read from elsewhere."""
    path = re.compile(rf"(?:^|\.)(?:layers|h|blocks)\.{layer}(?:\.|$)")
    inside = [node for node in graph.nodes if path.search(node.path)]
    made = {value for node in inside for value in node.outputs}
    for node in inside:
        for value in reads(node):
            if value not in made and value not in graph.params and graph.values[value].shape[2:] == (size,):
                return value
    raise GraphError(
        f"{graph.name} has no layer {layer} that reads states of {size} numbers, which the head guesses from.",
        hint="The head belongs to another model.",
    )
