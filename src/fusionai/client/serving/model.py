"""Opens a model for serving: finds its files, captures its graph, hashes its weights.

MODEL is a directory in Hugging Face layout, a hub id, or the output of `fusion train`: a job's directory (its newest
checkpoint is used) or one of its checkpoints. Weights are read only to hash them.

`capture` makes the graph, `ir.serving` checks whether it can be served, `storage.weight_manifest` hashes,
`serving.model_text` reads the tokenizer; `client.serving.serve` calls this.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fusionai.capture.capture import Captured, capture
from fusionai.capture.checking.check import require_causal
from fusionai.capture.models.adapter import slots_of
from fusionai.capture.models.huggingface import model_directory
from fusionai.capture.models.source import DirectorySource, HubSource, parse_source
from fusionai.client.serving.adapters import CHECKPOINTS, ServedAdapter
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
"""File that maps tensors to weight files, if a model's weights are in several files."""
LONGEST_PASS: Final = 2048
"""Most positions per pass for which the graph is captured (chosen), unless the model has a lower limit."""


@dataclass(frozen=True, slots=True)
class ServedFiles:
    """Files of a model. `directory` has configuration, weights and tokenizer; `name` is the model's name for
    clients."""

    directory: Path
    name: str


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A captured model. `graph`: the part that serves. `positions`: longest context, None if unlimited. `windows`: some
    layers have sliding windows. `whole`: it can't use a KV cache, so whole texts are recomputed."""

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
    """Return the files of the model `text`. Blocking; may download. Raises `ModelError` if it has no weights."""
    path = Path(text).expanduser()
    if (path / CHECKPOINTS).is_dir():
        newest = open_latest(path / CHECKPOINTS)
        if newest is None:
            raise ModelError(
                f"the job in {path} has no checkpoint yet.",
                hint="Let it train further, or set checkpoint_every in its recipe.",
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
    # A checkpoint's directory is named after its step; the name of the job is more useful.
    step = isinstance(source, DirectorySource) and directory.resolve().parent.name == CHECKPOINTS
    place = directory.resolve().parent.parent if step else directory.resolve()
    return ServedFiles(directory, text if isinstance(source, HubSource) else place.name)


def _only_adapter(text: str) -> ModelError:
    return ModelError(
        f"{text} holds an adapter, not a whole model.",
        hint=f"Serve it with the model that it was trained on: fusion serve BASE --adapter NAME={text}",
    )


def _check_weights(directory: Path, text: str, *, is_hub: bool) -> None:
    """Check that the directory has weights and that no file of them is missing. Raises `ModelError`."""
    if (directory / CONFIG_FILE).is_file() and not any(directory.glob("model*.safetensors")):
        raise _only_adapter(text)
    again = "Connect to the network and try again." if is_hub else "Copy the model again."
    if not any(directory.glob("*.safetensors")):
        hint = (
            "Choose a model whose repository has *.safetensors files: other weights are never loaded."
            if is_hub
            else "Save the model with save_pretrained, weights included."
        )
        raise ModelError(f"{text} holds no weights (*.safetensors).", hint=hint)
    parts = read_json(directory / SAFE_WEIGHTS_INDEX).get("weight_map", {})
    if not isinstance(parts, dict):
        raise ModelError(f"{text}: {SAFE_WEIGHTS_INDEX} has no weight_map.", hint=again)
    missing = sorted({str(name) for name in parts.values() if not (directory / str(name)).is_file()})
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{text} lacks a weight file: {missing[0]}{more}.", hint=again)


def open_model(files: ServedFiles, adapters: tuple[ServedAdapter, ...] = ()) -> ServedModel:
    """Capture the model with `adapters`. Blocking. Raises `ModelError` or `GraphError`, with the reason, if it can't be
    served."""
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
    """Return whether the model can use a KV cache, that is, later positions need only keys and values. Otherwise it
    must at least be causal. Raises `ModelError`, `GraphError`."""
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
    """Hash all weights, which reads them once. Blocking. `memory`: file that caches the hashes of unchanged files."""
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
    """Return the model's name as a valid job name."""
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
