"""Capture a model as a graph of the IR: `capture(source, ...) -> Captured`.

Runs the steps in order: build without weights, trace, lower to the IR, number the blocks, validate. Allocates no
weights. The graph is plain data that may be sent to peers; everything else here stays in the job owner's process.

Neighbours: `capture.models.build`, `capture.tracing.export` and `capture.graph.lowering` do the steps;
`capture.checking.self_check` compares the graph with the module; `client` ships the graph and streams `Captured.state`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

from fusionai.capture.checking.comparison import drawn_in_evaluation
from fusionai.capture.graph.copies import Unlike
from fusionai.capture.graph.evaluation import Apart, with_evaluation
from fusionai.capture.graph.lowering import PREFIX, Lowered, Unsupported, lower
from fusionai.capture.graph.repetition import repeated_layers
from fusionai.capture.models.adapter import AdapterSlots, located
from fusionai.capture.models.build import Adapters, Built, build
from fusionai.capture.models.conversion import left_out
from fusionai.capture.models.images import AXES, has_axes, holder_of, take_images
from fusionai.capture.models.seq2seq import attention_layers, has_places, is_decoding, take_source
from fusionai.capture.models.source import SEEN_WHOLE, ModelSource
from fusionai.capture.models.state import CapturedState, Checkpoint, group, index_checkpoint
from fusionai.capture.tasks import ExampleInput, InputSpec, Task, TaskModule, input_specs, model_inputs
from fusionai.capture.tracing.by_mode import mode_reads
from fusionai.capture.tracing.export import export, output_dims
from fusionai.capture.tracing.layers import by_products, semantic_layers
from fusionai.ir.blocks import assign_blocks
from fusionai.ir.operators import OPERATORS
from fusionai.ir.packed import with_packed
from fusionai.ir.schema import Graph, ParamSpec
from fusionai.ir.serving import ADAPTERS, AXIS_POSITIONS, BATCH, IMAGE_ROWS, LAYER_ROWS, POSITIONS, SEQUENCE
from fusionai.ir.validate import validate
from fusionai.primitives.errors import ModelError
from fusionai.primitives.tensors import HostTensor
from fusionai.storage.assembly import Assembly

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Captured:
    """A model as a graph.

    `config`: its Hugging Face configuration, None for other modules. `attention_nodes` equals `attention_layers`
    exactly if every attention is the semantic operator, which serving with a cache needs. `owed`: keys of the graph
    without an initialisation program, whose bytes `state` yields. `private_keys`: buffers and constants of the graph
    that the module's own state dict leaves out. `unused`: parameters of the module that no output depends on.
    """

    graph: Graph
    config: Mapping[str, Any] | None
    n_parameters: int
    attention_layers: int
    attention_nodes: int
    owed: tuple[str, ...]
    private_keys: frozenset[str]
    unused: tuple[str, ...]
    notes: tuple[str, ...]
    inputs: tuple[InputSpec, ...]
    input_names: tuple[str, ...]
    """Names of the `inputs` that the module itself takes."""
    source: CapturedState
    task: Task
    train: bool
    evaluates: bool
    """Whether the graph, outside training, computes what the module computes in evaluation. If not, a note says why."""

    def state(self, keys: Iterable[str]) -> Iterator[tuple[str, HostTensor]]:
        """Yield buffers, constants, pretrained weights and parameters without an initialisation program, one at a time.
        Raises `ModelError`."""
        return self.source.tensors(keys)

    def as_filed(self) -> Captured:
        """Return the model with the weights that a quantised file holds packed as they lie there."""
        checkpoint = self.source.checkpoint
        packings = {} if checkpoint is None else {key: one.packings for key, one in checkpoint.packed.items()}
        return replace(self, graph=with_packed(self.graph, packings))

    def layout(self) -> dict[str, Assembly]:
        """Return name in `save_pretrained`'s files -> the parts of keys it consists of, unless it is one key."""
        keys = (spec.key for spec in self.graph.params.values())
        return self.source.layout([*(key for key in keys if key not in self.private_keys), *self.unread()])

    def unread(self) -> tuple[str, ...]:
        """Return the names in the module's state dict that the graph does not read (`CapturedState.unread`)."""
        params = self.graph.params.values()
        return self.source.unread({name for spec in params for name in (spec.key, *spec.aliases)})


@dataclass(frozen=True, slots=True)
class Draft:
    """A capture that may contain unsupported operations."""

    captured: Captured
    unsupported: tuple[Unsupported, ...]


class CaptureOptions(TypedDict, total=False):
    """Arguments of `capture`, with the meaning and defaults described there."""

    task: Task
    batch: Range
    sequence: Range
    seed: int
    train: bool
    example_inputs: Mapping[str, ExampleInput | torch.Tensor] | None
    adapter: Adapters | None
    whole: bool
    images: bool
    own_attention: bool


def capture(source: ModelSource, **options: Unpack[CaptureOptions]) -> Captured:
    """Capture `source` with its loss as a validated graph, for every batch and sequence size in the ranges (inclusive;
    by default up to 64 rows of 2048 tokens).

    With `adapter`, only the adapter's parameters are trainable. `images`: the graph also takes rows of images, or of
    the model's own encoder, behind which its decoder reads. `own_attention`: keep transformers' own attention, which no
    cache can serve. `whole`: trace every repeated layer instead of copying one, which takes longer and gives the same
    graph. Raises `ModelError` if the model can't be built, traced or expressed in the IR; the error names the
    operation, its place and a remedy.
    """
    made = draft(source, **options)
    if made.unsupported:
        first = made.unsupported[0]
        where = (f" in {first.path}" if first.path else "") + first.line
        more = len(made.unsupported) - 1
        others = f" and {more} other operation{'s' if more > 1 else ''}" if more else ""
        raise ModelError(
            f"{made.captured.graph.name} uses {first.op}{where}{others}, which can't be captured: {first.reason}.",
            hint="`fusion check` lists everything unsupported; replace these operations in the model.",
        )
    validate(made.captured.graph)
    return made.captured


def draft(
    source: ModelSource,
    *,
    task: Task = "causal_lm",
    batch: Range = (1, 64),
    sequence: Range = (1, 2048),
    seed: int = 0,
    train: bool = True,
    example_inputs: Mapping[str, ExampleInput | torch.Tensor] | None = None,
    adapter: Adapters | None = None,
    whole: bool = False,
    images: bool = False,
    own_attention: bool = False,
) -> Draft:
    """Capture like `capture`, but collect unsupported operations instead of raising, and do not validate the graph."""
    for name, (low, high) in (("batch", batch), ("sequence", sequence)):
        if not 1 <= low <= high:
            raise ModelError(
                f"the range of {name} sizes, {low} to {high}, is not valid.", hint="Give 1 <= smallest <= largest."
            )
    built = build(source, seed, adapter, own_attention=own_attention)
    specs, names = _inputs(built, task, example_inputs)
    if images:
        specs, names = _with_images(built.module, specs, names)
    notes = list(built.notes)
    symbols = _symbols(built, specs, batch, sequence, notes)
    checkpoint = _checkpoint(built)  # before the expensive tracing: weights of another model raise here
    built.module.train(train)
    by_products(built.module)
    run = _Run(built, task, train, specs, names, symbols, checkpoint, notes)
    with mode_reads() as reads:
        program, lowered = run.traced(whole=whole)
    constants = _constants(program, lowered)
    evaluates = True
    if train and reads and not lowered.unsupported:
        evaluates = run.take_evaluation(lowered, constants, reads[0], whole=whole)
    return run.assembled(lowered, {built.key(key): tensor for key, tensor in constants.items()}, evaluates)


def _inputs(
    built: Built, task: Task, given: Mapping[str, ExampleInput | torch.Tensor] | None
) -> tuple[tuple[InputSpec, ...], tuple[str, ...]]:
    """Return the graph's inputs, and the names of those that the module itself takes."""
    examples = given or built.example_inputs
    if examples is None and built.huggingface is not None and task not in ("causal_lm", "counted_lm", "masked_lm"):
        examples = model_inputs(built.module, built.huggingface.config)
    specs, names = input_specs(built.module, task, examples, output_dims)
    if isinstance(built.adapter, AdapterSlots):
        specs = (*specs, InputSpec(ADAPTERS, ("b", "s", sum(built.adapter.ranks)), torch.float32))
    return specs, names


def _with_images(
    module: nn.Module, specs: tuple[InputSpec, ...], names: tuple[str, ...]
) -> tuple[tuple[InputSpec, ...], tuple[str, ...]]:
    """Make `module` take rows of images, or of its own encoder, and return its inputs with them."""
    by_encoder = bool(getattr(module.config, "is_encoder_decoder", False))
    width, added = (take_source(module), 0) if by_encoder else take_images(module)
    specs = (*specs, InputSpec(IMAGE_ROWS, (BATCH, SEQUENCE, width), torch.float32))
    if added:
        specs = (*specs, InputSpec(LAYER_ROWS, (BATCH, SEQUENCE, added), torch.float32))
    if has_places(module) if by_encoder else has_axes(module):
        specs = tuple(spec for spec in specs if spec.name != POSITIONS)
        specs = (*specs, InputSpec(AXIS_POSITIONS, (BATCH, SEQUENCE, AXES), torch.int64))
        names = tuple(name for name in names if name != POSITIONS)
    return specs, names


def _symbols(
    built: Built, specs: tuple[InputSpec, ...], batch: Range, sequence: Range, notes: list[str]
) -> dict[str, Range]:
    """Return the ranges of the sizes that vary, within the positions that the model has."""
    used = {dim for spec in specs for dim in spec.dims if isinstance(dim, str)}
    symbols = {name: bounds for name, bounds in (("b", batch), ("s", sequence)) if name in used}
    if extra := sorted(used - set(symbols)):
        raise ModelError(
            f"the inputs name the size {extra[0]!r}.", hint="Sizes that vary are 'b' (batch) and 's' (sequence)."
        )
    limit = _longest_sequence(built)
    if "s" in symbols and limit is not None and limit < sequence[1]:
        if limit < sequence[0]:
            raise ModelError(
                f"{built.name} takes sequences of up to {limit} tokens, the job needs {sequence[0]} or more.",
                hint="Lower the sequence length, or raise max_position_embeddings.",
            )
        notes.append(f"Sequences are limited to the model's {limit} positions.")
        symbols["s"] = (sequence[0], limit)
    return symbols


def _checkpoint(built: Built) -> Checkpoint | None:
    started = located(built.adapter)
    if built.huggingface is not None and (built.huggingface.weights or built.huggingface.quantisation):
        return index_checkpoint(built.huggingface.weights, built, aliases(built.module), started)
    return Checkpoint(started) if started else None


@dataclass(frozen=True, slots=True)
class _Run:
    """One capture: the module, its inputs and their sizes, and the notes made so far."""

    built: Built
    task: Task
    train: bool
    specs: tuple[InputSpec, ...]
    names: tuple[str, ...]
    symbols: Mapping[str, Range]
    checkpoint: Checkpoint | None
    notes: list[str]

    def traced(self, *, whole: bool) -> tuple[ExportedProgram, Lowered]:
        """Trace and lower the module. Copies repeated layers unless `whole` or unless they turn out to differ."""
        module = self.built.module
        with semantic_layers(module), repeated_layers(module, whole=whole) as repetition:
            program = export(TaskModule(module, self.task, self.names), self.specs, self.symbols)
            try:
                if repetition.written:
                    raise Unlike("something writes to the result of a layer")
                for name in program.graph_signature.buffers_to_mutate.values():
                    if any(name.startswith(f"{PREFIX}{traced.path}.") for traced in repetition.traced):
                        raise Unlike(f"a layer writes its buffer {name}")
                return program, lower(program, self.specs, aliases(module), repetition)
            except Unlike:
                del program
        return self.traced(whole=True)

    def take_evaluation(
        self, lowered: Lowered, constants: dict[str, torch.Tensor], first_read: str, *, whole: bool
    ) -> bool:
        """Trace the module in evaluation too and add it to `lowered` and `constants`. Returns False, with a note, if
        that is not possible. `first_read`: code that reads `self.training`."""
        module = self.built.module
        try:
            module.eval()
            program, other = self.traced(whole=whole)
            if other.unsupported:
                raise Apart(f"it uses {other.unsupported[0].op}: {other.unsupported[0].reason}")
            constants |= with_evaluation(lowered, other, constants, _constants(program, other))
        except (Apart, ModelError) as error:
            self.notes.append(
                f"Evaluation computes as training does: {first_read} reads `self.training`, and its evaluation can't "
                f"be captured ({str(error).rstrip('.')})."
            )
            return False
        finally:
            module.train(self.train)
        return True

    def assembled(self, lowered: Lowered, constants: Mapping[str, torch.Tensor], evaluates: bool) -> Draft:
        built = self.built
        params = self._params(lowered)
        graph = Graph(
            name=built.name,
            symbols=dict(self.symbols),
            inputs=lowered.inputs,
            outputs=lowered.outputs,
            values=lowered.values,
            params=params,
            state_writes={value: built.key(name) for value, name in lowered.state_writes.items()},
            nodes=tuple(lowered.nodes),
        )
        graph = assign_blocks(graph)
        parameters, saved = built.parameters(), {built.key(name) for name in built.module.state_dict()}
        used = {built.key(name) for name in lowered.parameters.values()}
        unused = tuple(key for key in parameters if key not in used)
        nodes = sum(node.op == "fusion.attention" for node in graph.nodes)
        carrying = sum(OPERATORS[node.op].category == "scan" for node in graph.nodes if node.op in OPERATORS)
        layers = _attention_layers(built, graph, carrying)
        if unused and holder_of(built.module) is None:  # else they are the encoder's
            self.notes.append(f"{len(unused)} parameters do not affect the outputs, first {unused[0]}.")
        buffers = built.buffers()
        self.notes.extend(
            f"Files store the complex buffer {key} as its real and imaginary parts in a last dimension of 2."
            for key in map(built.key, lowered.buffers.values())
            if key in saved and buffers[key].is_complex()
        )
        if self.task not in ("none", "seq2seq_lm") and (nodes < layers or (nodes != layers and not carrying)):
            self.notes.append(f"{nodes} of {layers} attention layers were recognised: no cache can serve it.")
        if carrying:
            self.notes.append(f"{carrying} layers carry a state from position to position.")
        if self.train:
            self.notes.extend(_training_notes(built, graph))
        without_program = [key for key, program in built.programs.items() if program is None]
        captured = Captured(
            graph=graph,
            config=None if built.huggingface is None else built.huggingface.config.to_dict(),
            n_parameters=sum(parameter.numel() for parameter in parameters.values()),
            attention_layers=layers,
            attention_nodes=nodes,
            owed=tuple(spec.key for spec in params.values() if spec.init is None),
            private_keys=frozenset(spec.key for spec in params.values()) - (saved - left_out(built.module)),
            unused=unused,
            notes=tuple(self.notes),
            inputs=self.specs,
            input_names=self.names,
            source=CapturedState(built, constants, group(without_program, parameters, built.families), self.checkpoint),
            task=self.task,
            train=self.train,
            evaluates=evaluates,
        )
        return Draft(captured, tuple(lowered.unsupported))

    def _params(self, lowered: Lowered) -> dict[str, ParamSpec]:
        built, parameters = self.built, self.built.parameters()
        ties = {
            built.key(first): tuple(built.key(other) for other in others)
            for first, others in aliases(built.module).items()
        }
        stored = frozenset[str]() if self.checkpoint is None else self.checkpoint.keys
        if isinstance(built.adapter, AdapterSlots):
            stored |= built.adapter.keys
        order = {key: index for index, key in enumerate(parameters)}
        params: dict[str, ParamSpec] = {}
        tables: tuple[tuple[Literal["parameter", "buffer", "constant"], dict[str, str]], ...]
        tables = (("parameter", lowered.parameters), ("buffer", lowered.buffers), ("constant", lowered.constants))
        for kind, table in tables:
            for value, name in table.items():
                spec, key = lowered.values[value], built.key(name)
                own: dict[str, Any] = {}
                if kind == "parameter":
                    own = {"trainable": parameters[key].requires_grad, "order": order[key]}
                    own["init"] = None if key in stored else built.programs[key]
                shape = tuple(int(size) for size in spec.shape)
                params[value] = ParamSpec(
                    key=key, kind=kind, shape=shape, dtype=spec.dtype, aliases=ties.get(key, ()), **own
                )
        return params


def _training_notes(built: Built, graph: Graph) -> Iterator[str]:
    if any(node.path.endswith(".experts") and node.op == "aten.bmm.default" for node in graph.nodes):
        yield "The experts' weights are gathered per token: correct, but slower than grouped products."
    if any(getattr(child, "sparse", None) is True for child in built.module.modules()):
        yield "Sparse embeddings get dense gradients: an optimizer updates every row, unlike SparseAdam."
    if drawn := drawn_in_evaluation(graph):
        where = f", first in {drawn[0].path}" if drawn[0].path else ""
        yield f"The model draws random numbers in evaluation too, {len(drawn)} times{where}."


def _constants(program: ExportedProgram, lowered: Lowered) -> dict[str, torch.Tensor]:
    held = program.constants
    return {
        key: _tensor_constant(held[f"{PREFIX}{key}" if f"{PREFIX}{key}" in held else key])
        for key in lowered.constants.values()
    }


def _tensor_constant(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        raise ModelError(
            f"the model keeps a constant of type {type(value).__name__}, whose value a graph can't hold.",
            hint="Register it as a buffer in the module's constructor.",
        )
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def aliases(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return first name -> further names of the same parameter or buffer."""
    names: dict[int, list[str]] = {}
    for iterate in (module.named_parameters, module.named_buffers):
        for name, tensor in iterate(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    return {found[0]: tuple(found[1:]) for found in names.values() if len(found) > 1}


def _attention_layers(built: Built, graph: Graph, carrying: int) -> int:
    """Return how many attention layers the model has. A Hugging Face configuration states it. If it does not separate
    attention layers from recurrent ones, the recurrent ones (`carrying`) are subtracted. For other modules every
    softmax operator counts as attention, so an uncertain case disables serving with a cache."""
    if built.huggingface is None:
        return sum(
            node.op == "fusion.attention" or "softmax" in node.op.replace("log_softmax", "") or "scaled_dot" in node.op
            for node in graph.nodes
        )
    if is_decoding(built.module):
        return attention_layers(built.module)
    config = built.huggingface.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if isinstance(kinds, list | tuple):
        return sum("attention" in kind and "linear" not in kind for kind in kinds)
    return max(0, int(getattr(config, "num_hidden_layers", 0)) - carrying)


def _longest_sequence(built: Built) -> int | None:
    """Return how many positions the model has learned embeddings for, or its attention sees; None for other models,
    which have no limit. Where padding has a row of its own in the table (RoBERTa), positions begin behind it."""
    if is_decoding(built.module):  # positions of text are counted behind the encoder's rows
        return None
    positions = [
        child.num_embeddings - (0 if child.padding_idx is None else child.padding_idx + 1)
        for name, child in built.module.named_modules()
        if isinstance(child, nn.Embedding)
        and name.rsplit(".", 1)[-1] in ("wpe", "position_embeddings", "embed_positions", "positions_embed")
    ]
    config = None if built.huggingface is None else built.huggingface.config.get_text_config()
    seen = (getattr(config, name, None) for name in SEEN_WHOLE)
    return min([*positions, *(size for size in seen if isinstance(size, int))], default=None)
