"""Capture a head that guesses tokens from the states of a served model: a graph, and where its weights are.

The graph is served like any model's, as a whole, in the job owner's process. Its inputs are the tokens after the
positions, and the states of the positions; its outputs are logits, and the states from which it guesses on.

Neighbours: `capture.models.heads` makes the modules, `capture.capture` captures, `ir.serving.head_graph` cleans the
graph, `serving.heads` guesses with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from fusionai.capture.capture import Captured, aliases, capture
from fusionai.capture.models.build import Construct
from fusionai.capture.models.eagle import EagleFiles, FeatureProjection, construct_eagle
from fusionai.capture.models.heads import ConstructedHead, construct_mtp, find_head, has_unknown_head
from fusionai.capture.models.source import FactorySource
from fusionai.capture.models.state import CapturedState, Checkpoint, index_checkpoint, tensor_shapes
from fusionai.capture.served import LONGEST_PASS
from fusionai.capture.tasks import ExampleInput
from fusionai.ir.features import with_features
from fusionai.ir.schema import Graph, ParamSpec, Ref
from fusionai.ir.serving import BATCH, FEATURES, SEQUENCE, STATES, head_graph, serving_graph, state_graph
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
