"""Opens a model for serving: finds its files, captures its graph, hashes its weights.

Also finds adapters to serve with the model, and opens the encoder of an encoder-decoder model on the job owner's
machine.

MODEL is a directory in Hugging Face layout, a GGUF file, a hub id, or the output of `fusion train`: a job's directory
(its newest checkpoint is used) or one of its checkpoints. Weights are read only to hash them.

`capture` makes the graph, `ir.serving` checks whether it can be served, `storage.weight_manifest` hashes,
`serving.model_text` reads the tokenizer; `client.serving.guessing` opens what guesses tokens; `capture.models.sources`
runs the encoder, `serving.sources` says how requests use it; `client.serving.serve` calls this.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Final

from fusionai.capture.capture import Captured
from fusionai.capture.checking.check import require_causal
from fusionai.capture.heads import featured
from fusionai.capture.models.adapter import AdapterSlots
from fusionai.capture.models.build import build
from fusionai.capture.models.eagle import EagleFiles
from fusionai.capture.models.huggingface import has_image_input, model_directory
from fusionai.capture.models.images import ImageEncoder, NoImages
from fusionai.capture.models.seq2seq import is_decoding
from fusionai.capture.models.source import DirectorySource, HubSource, stated_positions
from fusionai.capture.models.sources import SourceEncoder
from fusionai.capture.models.state import rounding
from fusionai.capture.served import LONGEST_PASS, capture_served
from fusionai.client.serving.names import CHECKPOINTS, model_name, source_of
from fusionai.ir.packed import packed_bytes
from fusionai.ir.schema import Graph, Ref
from fusionai.ir.serving import LOGITS, SEQUENCE, Purpose, purpose_of, require_servable, serving_graph
from fusionai.ir.serving_cost import EMBEDDING, WeightFormat
from fusionai.ir.states import carries
from fusionai.ir.weights import SMALLEST
from fusionai.primitives.errors import GraphError, ModelError
from fusionai.serving.images import ImageMarks, ImageReader
from fusionai.serving.job import weight_keys
from fusionai.serving.model_text import ModelText
from fusionai.serving.sources import DecoderRules, Source, SpeechTokens, source_positions
from fusionai.serving.text import read_json
from fusionai.storage.adapter_files import CONFIG_FILE, AdapterFiles, read_adapter
from fusionai.storage.reader import open_latest
from fusionai.storage.weight_manifest import ModelWeights, manifest
from fusionai.storage.weight_store import WeightStore

SAFE_WEIGHTS_INDEX: Final = "model.safetensors.index.json"
"""File that maps tensors to weight files, if a model's weights are in several files."""
MEASURED: Final = 4
"""Matrices on which rounding is measured; chosen."""
LARGEST_MEASURED: Final = 2**25
"""Most numbers of such a matrix: it is in memory several times, in float32; chosen."""


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter. Clients request it by `name` instead of the model's name."""

    name: str
    files: AdapterFiles

    @property
    def words(self) -> str:
        """Description in one line."""
        return f"adapter {self.name}: rank {self.files.rank} on {len(self.files.layers)} layers"


def find_adapters(named: Sequence[tuple[str, Path]]) -> tuple[ServedAdapter, ...]:
    """Return the adapters. Blocking. Raises `ModelError` for a directory that is not an adapter, `StorageError` for a
    damaged checkpoint."""
    return tuple(ServedAdapter(name, read_adapter(_directory(path))) for name, path in named)


def _directory(path: Path) -> Path:
    if not path.is_dir():
        raise ModelError(f"there is no directory {path}.", hint="Check the path of --adapter NAME=DIR.")
    return _newest(path) if (path / CHECKPOINTS).is_dir() else path


def _newest(job: Path) -> Path:
    """Return the newest checkpoint of a job's directory."""
    newest = open_latest(job / CHECKPOINTS)
    if newest is None:
        raise ModelError(
            f"the job in {job} has no checkpoint yet.",
            hint="Let it train further, or set checkpoint_every in its recipe.",
        )
    return newest.directory


@dataclass(frozen=True, slots=True)
class ServedFiles:
    """Files of a model. `directory` has configuration, weights and tokenizer; `name` is the model's name for
    clients."""

    directory: Path
    name: str


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A captured model. `graph`: the part that serves. `positions`: longest context, None if unlimited. `whole`: it
    can't use caches, so whole texts are recomputed."""

    files: ServedFiles
    captured: Captured
    graph: Graph
    vocabulary: int
    positions: int | None
    texts: ModelText
    whole: bool
    adapters: tuple[ServedAdapter, ...] = ()
    slots: AdapterSlots | None = None
    """Places of the adapters in the graph, also of those that are loaded later."""

    @property
    def purpose(self) -> Purpose:
        """What it gives."""
        return purpose_of(self.graph)

    @property
    def at_once(self) -> bool:
        """Whether each text is computed once, as a whole."""
        return self.purpose != "generate"

    @property
    def states(self) -> bool:
        """Whether stages keep states of some layers."""
        return not (self.whole or self.at_once) and carries(self.graph)

    @property
    def packed(self) -> str | None:
        """How its files hold quantised matrices, in words; None if they hold none."""
        specs = [spec for spec in self.captured.graph.params.values() if spec.packed]
        if not specs:
            return None
        forms = sorted({packing.kind or packing.form for spec in specs for packing in spec.packed})
        numbers = sum(prod(spec.shape) for spec in specs)
        per_number = sum(packed_bytes(spec.packed) for spec in specs) / numbers
        return f"{len(specs)} weights as {', '.join(forms)}, {per_number:.2f} bytes per number"


def find_model(text: str) -> ServedFiles:
    """Return the files of the model `text`. Blocking; may download. Raises `ModelError` if it has no weights."""
    name, path = model_name(text), Path(text).expanduser()
    if (path / CHECKPOINTS).is_dir():
        newest = _newest(path)
        if (newest / CONFIG_FILE).is_file():
            raise _only_adapter(text)
        return ServedFiles(newest, name)
    source = source_of(text)
    directory = model_directory(source)
    match source:
        case DirectorySource() | HubSource(gguf=""):
            _check_weights(directory, text, is_hub=isinstance(source, HubSource))
        case _:
            pass
    return ServedFiles(directory, name)


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
            "Choose a model whose repository has *.safetensors, or name a GGUF file there (owner/name:Q4_K_M)."
            if is_hub
            else "Save the model with save_pretrained, weights included."
        )
        pickled = sorted(path.name for path in directory.glob("pytorch_model*.bin"))
        if pickled and not is_hub:
            hint = (
                "Convert it where you trust it: transformers' from_pretrained, then save_pretrained, which writes "
                "*.safetensors."
            )
        also = f", only {pickled[0]}, which is never read because a pickle can run code" if pickled else ""
        raise ModelError(f"{text} holds no weights (*.safetensors){also}.", hint=hint)
    parts = read_json(directory / SAFE_WEIGHTS_INDEX).get("weight_map", {})
    if not isinstance(parts, dict):
        raise ModelError(f"{text}: {SAFE_WEIGHTS_INDEX} has no weight_map.", hint=again)
    missing = sorted({str(name) for name in parts.values() if not (directory / str(name)).is_file()})
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{text} lacks a weight file: {missing[0]}{more}.", hint=again)


def open_model(
    files: ServedFiles,
    adapters: tuple[ServedAdapter, ...] = (),
    room: Sequence[int] = (),
    *,
    images: bool = True,
    head: EagleFiles | None = None,
) -> ServedModel:
    """Capture the model with `adapters`, and with empty places of the ranks `room` for others; with `images`, if it
    takes any, and load their encoder; with the features that `head` reads. Blocking. Raises `ModelError` or
    `GraphError`, with the reason, if it can't be served."""
    texts = ModelText.load(files.directory)
    captured, slots, reader = _captured(files, adapters, room, images=images)
    if head is not None:
        captured = featured(head, captured)
    texts = replace(texts, images=reader)
    if captured.source.built.huggingface is not None and is_decoding(captured.source.built.module):
        texts = with_source(files.directory, captured, texts)
    graph = serving_graph(captured.graph)
    purpose = purpose_of(graph)
    whole = purpose == "generate" and not _has_caches(graph, captured)
    size = graph.values[graph.outputs[LOGITS]].shape[-1] if purpose == "generate" else _table_rows(graph)
    if not isinstance(size, int):
        raise ModelError(f"{files.name}: the size of the vocabulary is not fixed.")
    if purpose == "score" and (labels := graph.values[graph.outputs[LOGITS]].shape[-1]) != 1:
        raise ModelError(
            f"{files.name} classifies texts by {labels} labels, and only models with one (rerankers) are served.",
            hint="Serve a cross-encoder whose config.json has one label.",
        )
    positions = stated_positions(captured.config or {}) if texts.source is None else _both_positions(texts.source)
    if whole or purpose != "generate":
        longest = graph.symbols.get(SEQUENCE, (1, LONGEST_PASS))[1]
        positions = min(positions or longest, texts.sentences.longest_tokens or longest, longest)
    return ServedModel(
        files=files,
        captured=captured,
        graph=graph,
        vocabulary=size,
        positions=positions,
        texts=texts,
        whole=whole,
        adapters=adapters,
        slots=slots,
    )


def _captured(
    files: ServedFiles, adapters: tuple[ServedAdapter, ...], room: Sequence[int], *, images: bool
) -> tuple[Captured, AdapterSlots | None, ImageReader | None]:
    """Capture the model; with its encoder of images, if it has one that can be used."""
    source = DirectorySource(files.directory)
    reason: NoImages | None = None
    if images and has_image_input(files.directory):
        seeing = replace(source, architecture="image_text")
        slots = _slots(seeing, adapters, room)
        try:
            captured = capture_served(seeing, slots, images=True)
            if not _has_caches(serving_graph(captured.graph), captured):
                raise NoImages(f"no cache can serve {files.name}.")
            encoder = ImageEncoder(captured, files.directory)
        except NoImages as error:
            reason = error
        else:
            marks = ImageMarks(encoder.processor.placeholder, encoder.token, encoder.together)
            return captured, slots, ImageReader(encoder.encode, marks)
    slots = _slots(source, adapters, room)
    captured = capture_served(source, slots)
    if reason is not None:
        captured = replace(captured, notes=(*captured.notes, f"Images are refused: {reason}"))
    return captured, slots, None


def _slots(source: DirectorySource, adapters: tuple[ServedAdapter, ...], room: Sequence[int]) -> AdapterSlots | None:
    module = build(source, seed=0).module if room else None
    return AdapterSlots.of([one.files for one in adapters], room, module) if adapters or room else None


def _table_rows(graph: Graph) -> int | None:
    """Return how many tokens the table knows that an encoder looks them up in."""
    tables = [
        graph.params[table.name].shape[0]
        for node in graph.nodes
        if node.op == EMBEDDING
        for table, rows in (node.args[:2],)
        if isinstance(table, Ref) and table.name in graph.params and rows == Ref("input_ids")
    ]
    return min(tables, default=None)


def _has_caches(graph: Graph, captured: Captured) -> bool:
    """Return whether the model can use caches, that is, later positions need only keys, values and states. Otherwise it
    must at least be causal. Raises `ModelError`, `GraphError`."""
    try:
        require_servable(graph, attention_nodes=captured.attention_nodes, attention_layers=captured.attention_layers)
    except GraphError:
        if graph.state_writes:
            raise
        if not is_decoding(captured.source.built.module):  # those were tried when they were captured
            require_causal(captured)
        return False
    return True


def rounding_words(model: ServedModel, form: WeightFormat) -> str | None:
    """Say by how much `form` changes the numbers of the model's files, measured on some of the matrices; None if it
    keeps them, or if all are too large to be measured. Blocking."""
    matrices = sorted(
        spec.key
        for spec in model.captured.graph.params.values()
        if spec.kind == "parameter" and len(spec.shape) == 2 and SMALLEST <= prod(spec.shape) <= LARGEST_MEASURED
    )
    some = matrices[:: max(1, len(matrices) // MEASURED)][:MEASURED]
    if form in ("fp32", "packed") or not some:
        return None
    change = rounding(model.captured.source, some, form)
    return f"--weights {form} changes the weights by {change:.2%} (root mean square, measured on {len(some)} of them)"


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
        packed=None if checkpoint is None else checkpoint.packed,
        memory=memory,
        on_progress=on_progress,
    )


def job_name(model: str) -> str:
    """Return the model's name as a valid job name."""
    plain = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    return plain[:80].strip("-") or "model"


def _both_positions(source: Source) -> int | None:
    """Return the longest sequence of an encoder's rows and of the tokens behind them."""
    sizes = (source.longest, source.rules.positions)
    return None if None in sizes else sum(size for size in sizes if size is not None)


def with_source(directory: Path, captured: Captured, texts: ModelText) -> ModelText:
    """Return the model's text with its encoder, loaded and tried. Blocking. Raises `ModelError`."""
    encoder = SourceEncoder(captured, directory)
    rules = DecoderRules.load(directory)
    speech = SpeechTokens.load(directory, texts.tokenizer) if encoder.hears else None
    source = Source(encoder, rules, speech, source_positions(captured.config or {}))
    samples = read_json(directory / "generation_config.json").get("do_sample") is True
    sampling = texts.sampling if samples else replace(texts.sampling, temperature=0.0)
    return replace(texts, source=source, sampling=sampling)


def encoder_notes(name: str, texts: ModelText) -> Iterator[str]:
    """Yield what the encoders of the model `name` read, and what the answers differ in from transformers' defaults."""
    if texts.images is not None:
        yield f"{name} reads images; this machine encodes them"
    if texts.source is not None:
        yield f"{name} reads {'text' if texts.source.speech is None else 'speech'} with its encoder, on this machine"
        yield from (f"{name}: {words}" for words in texts.source.rules.words)


def close_encoders(texts: ModelText) -> None:
    """End the encoders' threads."""
    for reader in (texts.images, texts.source):
        if reader is not None:
            reader.close()
