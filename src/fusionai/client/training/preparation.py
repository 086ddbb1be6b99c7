"""Prepares a recipe for planning: opens the data, captures the model, builds the planning problem.

Translates the recipe's settings into a model configuration, a capture and a planning problem. Runs in the job owner's
process, which sends nothing to peers at this point.

`corpus` reads the data, `capture` captures the model, `scheduling` plans, `client.training.train` calls this.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Final

import msgspec

from fusionai.backends.state import state_bytes_ratio, trained
from fusionai.capture.capture import Captured, capture
from fusionai.capture.checking.self_check import self_check
from fusionai.capture.checking.shrinking import TooLarge
from fusionai.capture.models.adapter import Lora, StartedLora, adapter_config
from fusionai.capture.models.source import (
    CodeSource,
    ConfigSource,
    DirectorySource,
    HubSource,
    ModelSource,
    architecture_of,
)
from fusionai.capture.tasks import examples_of
from fusionai.capture.tracing.export import OneLength
from fusionai.client.pool.faults import stages_in_words
from fusionai.client.pool.session import PoolMember, near_links
from fusionai.corpus.chat_source import ChatSource
from fusionai.corpus.recipe import Recipe
from fusionai.corpus.source import TensorSource, TokenSource, open_source
from fusionai.corpus.tables import (
    ChatData,
    ConfigModel,
    FactoryModel,
    HubModel,
    KnownAdapter,
    LocalModel,
    NewAdapter,
    TextData,
)
from fusionai.ir.blocks import held_in_front, sent_bytes
from fusionai.ir.cost import block_costs
from fusionai.ir.graph import needing_gradient
from fusionai.ir.partition import ends
from fusionai.ir.schema import Graph, content_hash
from fusionai.ir.weights import stored_bytes, with_stored
from fusionai.primitives.errors import ModelError, RecipeError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.privacy import keeps_ends
from fusionai.primitives.tensors import tensor_bytes
from fusionai.primitives.units import format_bytes
from fusionai.scheduling.problem.types import PeerProfile, Plan, Problem, RolePlacement
from fusionai.scheduling.standby.continuation import numerics
from fusionai.scheduling.training.cut_bits import shared_weights
from fusionai.storage.adapter_files import CONFIG_FILE, encode_adapter_config
from fusionai.storage.checkpoint import CheckpointHeader
from fusionai.storage.rundir import RunDirectory

_SIZES: Final = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
"""Sizes in a configuration that are checked here, because transformers accepts any number and builds a broken model."""
_PEFT_TASKS: Final = {
    "causal_lm": "CAUSAL_LM",
    "seq2seq_lm": "SEQ_2_SEQ_LM",
    "classification": "SEQ_CLS",
}
"""PEFT's names of tasks. PEFT has no names for the other tasks that are trained here."""


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A recipe with its data and graph. `symbols`: sizes of one microbatch. `tokens_per_microbatch`: tokens, or records
    if the data has no tokens."""

    recipe: Recipe
    source: TokenSource | TensorSource | ChatSource
    captured: Captured
    graph_hash: str
    symbols: dict[str, int]
    tokens_per_microbatch: int
    base: dict[str, str] = field(default_factory=dict[str, str])
    """If only an adapter is trained: SHA-256 of the base model's weight files, by name."""

    @property
    def files(self) -> dict[str, bytes]:
        """Files that are written beside the weights of a checkpoint, so that transformers can load it."""
        files: dict[str, bytes] = {}
        if self.recipe.adapter is not None:
            files[CONFIG_FILE] = _adapter_file(self.recipe, self.captured)
        elif self.captured.config is not None:
            files["config.json"] = json.dumps(dict(self.captured.config), indent=2, default=str).encode()
        if isinstance(self.source, TokenSource | ChatSource):
            files |= self.source.tokenizer.files
        return files


def prepare(recipe: Recipe, directory: RunDirectory, progress: Callable[[str], None]) -> PreparedJob:
    """Read the data, train a tokenizer if the recipe says so, and capture the model. Blocking. `progress` receives
    lines for the user. Raises `RecipeError`, `DataError`, `ModelError` or `GraphError`."""
    progress("reading the data")
    source = open_source(recipe, directory.tokens)
    progress(f"data: {source.describe()}")
    for note in source.notes if isinstance(source, ChatSource) else ():
        progress(note)
    progress("capturing the model")
    first = source.microbatch(0, 0)
    rows = recipe.train.microbatch_size
    symbols, task, tokenizer, examples = {"b": rows}, recipe.model.task, None, None
    if isinstance(source, TokenSource | ChatSource):
        tokenizer, symbols["s"] = source.tokenizer, first["input_ids"].shape[1]
        task = "counted_lm" if isinstance(source, ChatSource) else task
    else:
        examples = examples_of(first)
    capture_of = partial(
        capture,
        model_source(recipe, *((None, None) if tokenizer is None else (tokenizer.vocabulary, tokenizer.end_id))),
        task=task,
        batch=(1, rows),
        seed=recipe.job.seed,
        adapter=adapter_of(recipe),
        example_inputs=examples,
    )
    length = symbols.get("s")
    try:
        captured = capture_of() if length is None else capture_of(sequence=(1, length))
    except OneLength:  # windows and loops over positions; all rows of a job are equally long
        if length is None:
            raise
        captured = capture_of(sequence=(length, length))
        progress(f"The model works at one length only: captured for rows of {length} tokens.")
    _check_length(recipe, captured)
    missing = [name for name in captured.graph.inputs if name not in first]
    if missing:
        raise RecipeError(
            f"the model needs the inputs {', '.join(missing)}, but the data has {', '.join(first)}.",
            hint="Name the columns in [data] columns, or change the model's inputs.",
        )
    _require_gradient(captured.graph)
    for note in captured.notes:
        progress(note)
    _compare(captured, progress)
    base: dict[str, str] = {}
    if recipe.adapter is not None:
        base = _hashes(captured)
        form = recipe.adapter.base
        captured = replace(captured, graph=with_stored(captured.graph, "" if form == "fp32" else form))
        progress(f"adapter: {trained(captured.graph, recipe.optimizer).words}{_kept(captured)}")
        if recipe.adapter.holder == "owner":
            captured = replace(captured, graph=held_in_front(captured.graph))
            sent = format_bytes(recipe.train.microbatches * sent_bytes(captured.graph))
            progress(f"the adapter stays on this machine: each step sends {sent} of it to peers and receives as much")
    return PreparedJob(recipe, source, captured, content_hash(captured.graph), symbols, prod(symbols.values()), base)


def _require_gradient(graph: Graph) -> None:
    if graph.outputs["loss"] not in needing_gradient(graph):
        raise ModelError(
            f"the loss of {graph.name} depends on no parameter that is trained.",
            hint="Check requires_grad of its parameters, and that forward neither detaches the loss nor runs it under "
            "torch.no_grad().",
        )


def _compare(captured: Captured, progress: Callable[[str], None]) -> None:
    """Compare the graph with the module. Report the differences, or why no comparison was possible."""
    try:
        checked = self_check(captured, progress=progress)
    except TooLarge as error:
        progress(f"warning: the graph was NOT compared with the module: {error}")
        return
    for note in checked.notes:
        progress(note)
    progress(f"self-check{checked.how}: {checked.words}")


def model_source(recipe: Recipe, vocabulary: int | None, end_id: int | None) -> ModelSource:
    """Return the model's source. A configuration without `vocab_size` gets the tokenizer's."""
    architecture = architecture_of(recipe.model.task)
    match recipe.model.source:
        case ConfigModel(config=config):
            return ConfigSource(_with_tokenizer(config, vocabulary, end_id), architecture)
        case LocalModel(path=path):
            return DirectorySource(_model_directory(Path(path)), architecture)
        case HubModel(hub=hub):
            return HubSource(hub, architecture=architecture)
        case FactoryModel(module=module, function=function, directory=directory):
            if directory not in sys.path:
                sys.path.insert(0, directory)  # the job owner's code, imported only in the job owner's process
            return CodeSource(f"{module}:{function}")


def _hashes(captured: Captured) -> dict[str, str]:
    """Return the hashes of the base model's weight files, because an adapter's checkpoint is valid only with these."""
    huggingface = captured.source.built.huggingface
    found: dict[str, str] = {}
    for path in () if huggingface is None else huggingface.weights:
        with path.open("rb") as handle:
            found[path.name] = hashlib.file_digest(handle, "sha256").hexdigest()
    return found


def _kept(captured: Captured) -> str:
    frozen = [spec for spec in captured.graph.params.values() if spec.stored]
    if not frozen:
        return ""
    packed_bytes = sum(stored_bytes(spec.shape, spec.stored) for spec in frozen)
    form = ", ".join(sorted({spec.stored for spec in frozen}))
    whole_bytes = sum(tensor_bytes(spec.dtype, spec.shape) for spec in frozen)
    return f" The base is kept in {form}: {format_bytes(packed_bytes)} instead of {format_bytes(whole_bytes)}."


def adapter_of(recipe: Recipe) -> Lora | StartedLora | None:
    """Return the adapter that the recipe adds to the model, None without one."""
    match recipe.adapter:
        case None:
            return None
        case NewAdapter(rank=rank, alpha=alpha, dropout=dropout, targets=targets, rslora=rslora):
            return Lora(rank, alpha, dropout, "all-linear" if targets is None else targets, rslora)
        case KnownAdapter(path=path, dropout=dropout):
            return StartedLora(Path(path), dropout)


def _adapter_file(recipe: Recipe, captured: Captured) -> bytes:
    adapter = adapter_of(recipe)
    assert adapter is not None
    match recipe.model.source:
        case LocalModel(path=base) | HubModel(hub=base):
            pass
        case _:
            base = None
    return encode_adapter_config(
        adapter_config(captured.source.built.module, adapter), base=base, task=_PEFT_TASKS.get(recipe.model.task)
    )


def _model_directory(path: Path) -> Path:
    if not path.is_dir():
        raise ModelError(f"there is no model directory {path}.", hint="Correct [model] path in the recipe.")
    if not (path / "config.json").is_file():
        raise ModelError(
            f"the directory {path} has no config.json, so it is not a model in Hugging Face layout.",
            hint="Save the model there with save_pretrained, or correct [model] path in the recipe.",
        )
    return path


def _check_length(recipe: Recipe, captured: Captured) -> None:
    """Raise `RecipeError` if rows are longer than the model's positions. Otherwise it would fail much later, or train
    positions that can't be used."""
    config = captured.config or {}
    limit = config.get("max_position_embeddings", config.get("n_positions"))
    match recipe.data:
        case TextData(sequence_length=length) | ChatData(sequence_length=length) if (
            isinstance(limit, int) and length > limit
        ):
            raise RecipeError(
                f"{Path(recipe.path).name}: [data] sequence_length is {length}, but the model has {limit} positions.",
                hint="Lower sequence_length, or raise max_position_embeddings of a new model.",
            )
        case _:
            return


def _with_tokenizer(config: Mapping[str, Any], vocabulary: int | None, end_id: int | None) -> dict[str, Any]:
    completed = dict(config)
    for name in _SIZES:
        size = completed.get(name)
        if isinstance(size, int) and size < 1:
            raise RecipeError(f"[model] config: {name} is {size}; expected a whole number >= 1.")
    if vocabulary is None:
        return completed
    size = completed.setdefault("vocab_size", vocabulary)
    if isinstance(size, int) and size < vocabulary:
        raise RecipeError(
            f"[model] vocab_size is {size}, but the tokenizer has {vocabulary} entries.",
            hint="Raise vocab_size, leave it out, or train a smaller tokenizer.",
        )
    for name in ("bos_token_id", "eos_token_id"):
        completed.setdefault(name, end_id)
    return completed


def problem_for(
    prepared: PreparedJob, members: tuple[PoolMember, ...], owner: PeerProfile, note: Callable[[str], None]
) -> Problem:
    """Return the problem for a job's first plan: the graph's costs at the job's sizes over the free peers. Raises
    `RecipeError` for a required peer that is absent; `note` receives a warning for an excluded one."""
    recipe = prepared.recipe
    required = tuple(_named(name, members, recipe) for name in recipe.placement.required)
    for name in recipe.placement.excluded:
        if not _called(name, members):
            note(f"warning: [placement] excluded: no peer {name!r} is free in the pool at present")
    return msgspec.structs.replace(
        standing_problem(prepared, members, owner),
        excluded=excluded_peers(recipe, members),
        required=tuple(dict.fromkeys(required)),
    )


def standing_problem(prepared: PreparedJob, members: tuple[PoolMember, ...], owner: PeerProfile) -> Problem:
    """Return the problem without required and excluded peers, for later plans: a job continues if a required peer is
    lost."""
    recipe = prepared.recipe
    first, last = kept_ends(recipe, prepared.captured.graph)
    return Problem(
        graph_hash=prepared.graph_hash,
        blocks=block_costs(
            prepared.captured.graph, prepared.symbols, training=True, copies=recipe.train.precision == "bf16"
        ),
        peers=tuple(member.profile for member in members),
        owner=owner,
        links=near_links(members),
        roles=(RolePlacement(role="feed"), RolePlacement(role="loss", place=recipe.placement.loss)),
        kept_first=first,
        kept_last=last,
        stages=recipe.placement.stages,
        replicas=recipe.summed,
        microbatches=recipe.train.microbatches,
        microbatch_tokens=prepared.tokens_per_microbatch,
        optimizer_bytes_per_trainable_byte=state_bytes_ratio(recipe.optimizer),
        takeover=numerics(recipe.faults.takeover),
        precision=recipe.train.precision,
        compression=recipe.train.compression,
        recompute=recipe.train.recompute,
        offload=recipe.train.offload,
        offload_weights=recipe.train.offload_weights,
        shared_weights=shared_weights(
            prepared.captured.graph, recipe.train.microbatches, half_floats=recipe.train.precision == "bf16"
        ),
    )


def kept_ends(recipe: Recipe, graph: Graph) -> tuple[int, int]:
    """Return the numbers of first and last blocks that stay with the job owner by the recipe's privacy level, 0 if it
    keeps none. Raises `GraphError` if the model can't be split like that."""
    privacy = recipe.privacy
    if not keeps_ends(privacy.level):
        return 0, 0
    return ends(graph, first_layers=privacy.first, last_layers=privacy.last)


def excluded_peers(recipe: Recipe, members: tuple[PoolMember, ...]) -> tuple[PeerId, ...]:
    """Return those of `members` that the recipe excludes: all peers with a name, because excluding one too many is
    safe, using an excluded one is not."""
    return tuple(dict.fromkeys(peer for name in recipe.placement.excluded for peer in _called(name, members)))


def _called(name: str, members: tuple[PoolMember, ...]) -> list[PeerId]:
    """Return the peers with this name, id, or id as shortened in tables."""
    return [
        peer for member in members if name in (member.profile.name, peer := PeerId(member.profile.peer), short(peer))
    ]


def _named(name: str, members: tuple[PoolMember, ...], recipe: Recipe) -> PeerId:
    found = _called(name, members)
    if len(found) == 1:
        return found[0]
    if found:
        ids = ", ".join(short(peer) for peer in found)
        raise RecipeError(
            f"{Path(recipe.path).name}: [placement] required: {len(found)} peers have the name {name!r} ({ids}).",
            hint="Give the id of the one you mean.",
        )
    there = ", ".join(sorted(member.profile.name for member in members))
    raise RecipeError(
        f"{Path(recipe.path).name}: [placement] required: no peer {name!r} is free in the pool; free peers: {there}.",
        hint="Correct the name, or wait until the peer has joined; `fusion pool` lists the members.",
    )


def checkpoint_header(recipe: Recipe, prepared: PreparedJob) -> CheckpointHeader:
    params = prepared.captured.graph.params.values()
    return CheckpointHeader(
        graph_hash=prepared.graph_hash,
        data_fingerprint=prepared.source.fingerprint,
        recipe=msgspec.to_builtins(recipe),
        aliases={alias: spec.key for spec in params for alias in spec.aliases},
        private_keys=prepared.captured.private_keys,
        adapter_keys=frozenset() if recipe.adapter is None else frozenset(one.key for one in params if one.trainable),
        base=prepared.base,
        layout={} if recipe.adapter is not None else prepared.captured.layout(),
    )


def checking(recipe: Recipe, plan: Plan) -> str:
    """Return a sentence about which stages are spot-checked."""
    if not recipe.checks:
        return "the peers' results are not checked"
    checked = {standby.stage for standby in plan.standbys if not standby.beside}
    working = [stage.stage for stage in plan.stages if stage.peer != plan.feed]
    bare = [stage for stage in working if stage not in checked]
    if not checked:
        return "the peers' results are not checked: there is no warm standby on another machine to recompute them"
    text = f"spot checks: warm standbys recompute part of the work of {stages_in_words(sorted(checked))}"
    return text if not bare else f"{text}; not checked: {stages_in_words(bare)}"
