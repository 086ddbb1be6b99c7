"""Make a smaller model of the same kind, to compare a graph with its module if the whole does not fit in memory.

The layers, vocabulary and experts of a Hugging Face configuration are always reduced, then the widths. A candidate
counts only if its graph has the same operators as the whole model's graph.

Or make a copy of the module with fewer of its repeated layers at full width, if comparing all of it would take too
long: each list of modules keeps the first few layers of every kind and the last layer. Such a candidate counts only if
every block of the whole model's graph has an equal one (`ir.blocks.block_hashes`) in the candidate's graph, so each
operator of the whole model occurs at its real widths."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.adapter import Lora, StartedLora
from fusionai.capture.models.build import Adapters, Built, Construct, build
from fusionai.capture.models.source import ConfigSource, FactorySource, ModelSource
from fusionai.capture.tasks import ExampleInput
from fusionai.ir.blocks import block_hashes
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import FusionError, ModelError
from fusionai.primitives.units import format_count
from fusionai.storage.adapter_files import read_adapter

DEPTH: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers")
DEPTH_OF_PART: Final = ("num_decoder_layers", "num_encoder_layers", "encoder_num_hidden_layers")
VOCABULARY: Final = 512
"""Largest vocabulary of a smaller model (chosen)."""
LAYERS: Final = (2, 3, 4, 5, 6, 8, 12)
"""Numbers of layers to try: hybrids and mixtures have their other kinds of layer only after the first few."""
DIVISORS: Final = (1, 4, 8, 16, 32, 64)
"""Divisors of the widths and heads, tried in this order."""
_EXPERTS: Final = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_FEWEST_EXPERTS: Final = 16
"""Experts of a smaller model, if the model has more and no token needs more than 8 of them."""
_WIDTHS: Final = frozenset(
    {"hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "d_model", "d_ff"}
    | {"n_embd", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "word_embed_proj_dim", "embedding_size"}
    | {"q_lora_rank", "kv_lora_rank", "ffn_hidden_size", "lru_width", "dense_intermediate_size"}
)
_HEADS: Final = frozenset(
    {"num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads", "num_kv_heads"}
    | {"encoder_attention_heads", "decoder_attention_heads"}
)


class TooLarge(ModelError):
    """A model that can't be compared with its graph on this machine."""


def smaller(captured: Captured, most_parameters: int) -> Captured:
    """Return a capture of the same kind with at most `most_parameters` parameters. Raises `TooLarge`."""
    huggingface = captured.source.built.huggingface
    wanted = _operators(captured.graph)
    why = "it has no configuration that could be made smaller"
    if huggingface is not None and captured.config is not None:
        why = "no smaller configuration has the same operators"
        examples = {
            spec.name: spec.example
            if spec.example.is_floating_point() or spec.example.dtype == torch.bool
            else spec.example % VOCABULARY  # tokens within the small vocabulary
            for spec in captured.inputs
            if spec.example is not None and spec.name in captured.input_names
        }
        too_large, too_few = set[int](), set[int]()
        for layers, divisor in itertools.product(LAYERS, DIVISORS):
            if divisor in too_large or layers in too_few:
                continue
            source = ConfigSource(reduced(captured.config, layers, divisor), huggingface.architecture)
            try:
                built = build(source, captured.source.built.seed)
                if sum(parameter.numel() for parameter in built.module.parameters()) > most_parameters:
                    too_large.add(divisor)
                    continue
                made = _again(captured, source, examples, _anew(captured.source.built.adapter))
            except FusionError as error:
                why = error.message
                continue
            if made.n_parameters <= most_parameters and _operators(made.graph) == wanted:
                return made
            # Other widths do not add the operators that only further layers have.
            too_few.add(layers)
    raise TooLarge(
        f"{captured.graph.name} has {captured.n_parameters} parameters, too many to check in memory, and {why}.",
        hint=f"Check a smaller model built the same way, with at most {most_parameters} parameters.",
    )


def reduced(config: Mapping[str, Any], layers: int, divisor: int = 1) -> dict[str, Any]:
    """Return the configuration with few layers and experts, a small vocabulary, widths and heads over `divisor`."""
    fields = {name: value for name, value in config.items() if not name.endswith("_token_id")}
    depth = max((_size(fields.get(name)) for name in (*DEPTH, *DEPTH_OF_PART)), default=0)
    for name, value in fields.items():
        if name in DEPTH or name in DEPTH_OF_PART:
            fields[name] = min(_size(value), layers) or value
        elif isinstance(value, list) and len(value) == depth > layers:
            fields[name] = value[:layers]
        elif isinstance(value, Mapping) and any(key in value for key in (*DEPTH, "hidden_size")):
            fields[name] = reduced(value, layers, divisor)
        elif name == "vocab_size":
            fields[name] = min(_size(value), VOCABULARY) or value
        elif name in _EXPERTS and _size(value) > _FEWEST_EXPERTS:
            fields[name] = max(_FEWEST_EXPERTS, 2 * _size(fields.get("num_experts_per_tok")))
        elif divisor > 1 and name in _WIDTHS and _size(value) % divisor == 0 and _size(value) >= 8 * divisor:
            fields[name] = _size(value) // divisor
        elif divisor > 1 and name in _HEADS and _size(value):
            fields[name] = max(1, _size(value) // divisor)
    return fields


def _again(
    captured: Captured, source: ModelSource, examples: Mapping[str, torch.Tensor], adapter: Adapters | None = None
) -> Captured:
    """Capture another model as `captured` was, with these example inputs."""
    built, ranges = captured.source.built, captured.graph.symbols
    dims = {spec.name: tuple(dim if isinstance(dim, str) else None for dim in spec.dims) for spec in captured.inputs}
    return capture(
        source,
        task=captured.task,
        batch=ranges.get("b", (1, 1)),
        sequence=ranges.get("s", (1, 1)),
        seed=built.seed,
        train=captured.train,
        example_inputs={name: ExampleInput(example, dims[name]) for name, example in examples.items()} or None,
        adapter=adapter,
    )


def _anew(adapter: Adapters | None) -> Adapters | None:
    """Return a new adapter of the same form for one loaded from files, whose weights do not fit a smaller model."""
    if not isinstance(adapter, StartedLora):
        return adapter
    files = read_adapter(adapter.directory)
    ends = tuple(sorted({name.rpartition(".")[2] for name in files.layers}))
    found = files.config
    return Lora(found.rank, found.alpha, adapter.dropout, ends, found.rank_stabilised)


def _operators(graph: Graph) -> frozenset[str]:
    free = {name for name, operator in OPERATORS.items() if operator.category in ("size", "view")}
    return frozenset(node.op for node in graph.nodes) - free


def _size(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


_OF_A_KIND: Final = (2, 3, 4, 6, 8)
"""Numbers of layers per kind to try. At least two: the code after a layer differs from that after the embedding."""


def with_fewer_layers(captured: Captured, most_parameters: int) -> Captured:
    """Return a capture of the same module with at most `most_parameters` parameters. Raises `TooLarge`."""
    built = captured.source.built
    why = "none of its lists of modules has layers to leave out"
    if built.huggingface is not None:
        why = "it comes from a configuration"
    elif built.adapter is not None:
        why = "it has an adapter"
    else:
        wanted = set(block_hashes(captured.graph))
        examples = {spec.name: spec.example for spec in captured.inputs if spec.example is not None}
        for count in _OF_A_KIND:
            kept = dict(_kept(built.module, count))
            if not kept:
                break
            try:
                made = _again(captured, FactorySource(_shortened(built, kept)), examples)
            except ModelError as error:
                why = f"with fewer layers it can't be captured ({error.message.rstrip('.')})"
                continue
            if made.n_parameters > most_parameters:
                why = f"{count} layers of each kind are still too many"
                break
            if wanted <= set(block_hashes(made.graph)):
                return made
            why = "with fewer layers its blocks differ"
    raise TooLarge(
        f"{captured.graph.name} has {format_count(captured.n_parameters)} parameters, more than the "
        f"{format_count(most_parameters)} that are compared, and a part of it does not stand for the whole: {why}.",
        hint="Check a smaller model built the same way first.",
    )


def _kept(module: nn.Module, count: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (path, indices that stay) of each outermost list of modules that becomes shorter."""
    done: list[str] = []
    for path, child in module.named_modules():
        if type(child) not in (nn.ModuleList, nn.Sequential) or any(path.startswith(f"{outer}.") for outer in done):
            continue
        entries = list(child.children())
        seen = Counter[object]()
        places: list[int] = []
        for place, entry in enumerate(entries):
            kind = _kind(entry)
            seen[kind] += 1
            if seen[kind] <= count or place == len(entries) - 1:
                places.append(place)
        if path and len(places) < len(entries):
            done.append(path)
            yield path, tuple(places)


def _kind(module: nn.Module) -> object:
    tensors = (*module.named_parameters(), *module.named_buffers())
    shapes = tuple((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors)
    return type(module), repr(module), shapes


def _shortened(built: Built, kept: Mapping[str, tuple[int, ...]]) -> Construct:
    def construct() -> nn.Module | tuple[nn.Module, Mapping[str, Any]]:
        result = built.construct()
        module = result if isinstance(result, nn.Module) else result[0]
        for path, places in kept.items():
            entries = list(module.get_submodule(path).children())
            parent, _, name = path.rpartition(".")
            left = [entries[place] for place in places]
            is_list = type(module.get_submodule(path)) is nn.ModuleList
            setattr(module.get_submodule(parent), name, nn.ModuleList(left) if is_list else nn.Sequential(*left))
        return result

    return construct
