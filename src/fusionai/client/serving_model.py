"""From the name of a model to what can be served: its files, its graph, the list of its weights.

MODEL is a directory in Hugging Face layout, a hub id, or what `fusion train` left: a job's directory (its newest
checkpoint is taken) or one of its checkpoints. Decides what a model is called and what of its configuration counts.
Reads no weights but to hash them.

Neighbours: `capture` makes the graph, `ir.serving` says whether it can be served, `storage.weight_manifest` hashes,
`serving.model_text` reads the tokenizer; `client.serve` calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fusionai.capture.adapter_slots import slots_of
from fusionai.capture.capture import Captured, capture
from fusionai.capture.causality import require_causal
from fusionai.capture.huggingface import model_directory
from fusionai.capture.source import DirectorySource, HubSource, parse_source
from fusionai.client.serving_adapters import CHECKPOINTS, ServedAdapter
from fusionai.ir.schema import Graph
from fusionai.ir.serving import LOGITS, SEQUENCE, require_servable, serving_graph
from fusionai.primitives.errors import GraphError, ModelError
from fusionai.serving.graph import weight_keys
from fusionai.serving.model_text import ModelText
from fusionai.serving.text import read_json
from fusionai.storage.adapter_files import CONFIG_FILE
from fusionai.storage.reader import open_latest
from fusionai.storage.weight_manifest import ModelWeights, manifest
from fusionai.storage.weight_store import WeightStore

SAFE_WEIGHTS_INDEX: Final = "model.safetensors.index.json"
"""Says which tensor lies in which part, where a model's weights are several files."""
LONGEST_PASS: Final = 2048
"""The graph takes passes of so many positions, where the model sets no limit of its own."""


@dataclass(frozen=True, slots=True)
class ServedFiles:
    """`directory` holds configuration, weights and tokenizer; `name` is what clients call the model."""

    directory: Path
    name: str


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`graph`: the part that serves. `positions`: the longest context, None where the model has no limit.
    `windows`: some layers keep a window only. `whole`: no cache can serve it, texts are computed anew."""

    files: ServedFiles
    captured: Captured
    graph: Graph
    vocabulary: int
    positions: int | None
    texts: ModelText
    windows: bool
    whole: bool
    adapters: tuple[ServedAdapter, ...] = ()


def find_model(text: str) -> ServedFiles:
    """Blocking: may download. Raises `ModelError` where `text` names no weights."""
    path = Path(text).expanduser()
    if (path / CHECKPOINTS).is_dir():
        newest = open_latest(path / CHECKPOINTS)
        if newest is None:
            raise ModelError(
                f"the job in {path} has no checkpoint yet.",
                hint="Let it train on, or set checkpoint_every in its recipe.",
            )
        if (newest.directory / CONFIG_FILE).is_file():
            raise _only_adapter(text)
        return ServedFiles(newest.directory, path.resolve().name)
    if not path.exists() and (path.is_absolute() or text.startswith((".", "~"))):
        raise ModelError(f"there is no directory {text}.", hint="Check the path, or give a hub id such as owner/name.")
    source = parse_source(text)
    match source:
        case DirectorySource() | HubSource():
            directory = model_directory(source)
        case _:
            raise ModelError(
                f"{text!r} has a configuration but no weights and no tokenizer.",
                hint="Serve a directory in Hugging Face layout, a hub id, or the directory of a trained job.",
            )
    _check_weights(directory, text, is_hub=isinstance(source, HubSource))
    # A checkpoint is called by its step: people know the job.
    step = isinstance(source, DirectorySource) and directory.resolve().parent.name == CHECKPOINTS
    place = directory.resolve().parent.parent if step else directory.resolve()
    return ServedFiles(directory, text if isinstance(source, HubSource) else place.name)


def _only_adapter(text: str) -> ModelError:
    return ModelError(
        f"{text} holds an adapter, not a whole model.",
        hint=f"Serve the model it was trained on, with this beside it: fusion serve BASE --adapter NAME={text}",
    )


def _check_weights(directory: Path, text: str, *, is_hub: bool) -> None:
    """That there are any, and no part is missing. Raises `ModelError`."""
    if (directory / CONFIG_FILE).is_file() and not any(directory.glob("model*.safetensors")):
        raise _only_adapter(text)
    again = "Connect to the network and try again." if is_hub else "Copy the model again."
    if not any(directory.glob("*.safetensors")):
        hint = (
            "Choose a model whose repository has *.safetensors: other weights are never loaded."
            if is_hub
            else "Save the model with save_pretrained, weights included."
        )
        raise ModelError(f"{text} holds no weights (*.safetensors).", hint=hint)
    parts = read_json(directory / SAFE_WEIGHTS_INDEX).get("weight_map", {})
    if not isinstance(parts, dict):
        raise ModelError(f"{text}: {SAFE_WEIGHTS_INDEX} has no list of its parts.", hint=again)
    missing = sorted({str(name) for name in parts.values() if not (directory / str(name)).is_file()})
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{text} lacks a part of its weights: {missing[0]}{more}.", hint=again)


def open_model(files: ServedFiles, adapters: tuple[ServedAdapter, ...] = ()) -> ServedModel:
    """Blocking: captures, with `adapters` beside the model. Raises `ModelError` or `GraphError`, with the reason, where
    it can't be served."""
    texts = ModelText.load(files.directory)
    source = DirectorySource(files.directory)
    slots = slots_of([adapter.files for adapter in adapters])
    captured = capture(source, batch=(1, 2), sequence=(1, LONGEST_PASS), train=False, adapter=slots)
    graph = serving_graph(captured.graph)
    whole = not _has_caches(graph, captured)
    size = graph.values[graph.outputs[LOGITS]].shape[-1]
    if not isinstance(size, int):
        raise ModelError(f"{files.name}: the size of the vocabulary is not fixed.")
    positions = _positions(captured.config or {})
    if whole:
        positions = min(positions or LONGEST_PASS, graph.symbols.get(SEQUENCE, (1, LONGEST_PASS))[1])
    return ServedModel(
        files=files,
        captured=captured,
        graph=graph,
        vocabulary=size,
        positions=positions,
        texts=texts,
        windows=not whole
        and any(node.op == "fusion.attention" and node.kwargs.get("window") is not None for node in graph.nodes),
        whole=whole,
        adapters=adapters,
    )


def _has_caches(graph: Graph, captured: Captured) -> bool:
    """Whether keys and values are all that later positions need; else it must at least be causal. Raises
    `ModelError`, `GraphError`."""
    try:
        require_servable(graph, attention_nodes=captured.attention_nodes, attention_layers=captured.attention_layers)
    except GraphError:
        if graph.state_writes:
            raise
        require_causal(captured)
        return False
    return True


def hash_weights(
    model: ServedModel, store: WeightStore, memory: Path, on_progress: Callable[[int, int], None]
) -> ModelWeights:
    """Blocking: reads all weights once; `memory` remembers the hashes of files that do not change."""
    checkpoint = model.captured.source.checkpoint
    return manifest(
        weight_keys(model.captured.graph),
        model.captured.state,
        store,
        located=None if checkpoint is None else checkpoint.entries,
        assembled=None if checkpoint is None else checkpoint.assembled,
        files=None if checkpoint is None else checkpoint.files,
        memory=memory,
        on_progress=on_progress,
    )


def job_name(model: str) -> str:
    """As a job may be called."""
    plain = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    return plain[:80].strip("-") or "model"


def _positions(config: Mapping[str, Any]) -> int | None:
    texts = config.get("text_config")
    for fields in (config, texts if isinstance(texts, Mapping) else {}):
        for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
            size = fields.get(name)
            if isinstance(size, int) and size > 0:
                return size
    return None
