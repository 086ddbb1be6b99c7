"""Make a copy of a module with fewer of its repeated layers at full width, if comparing all of it would take too long.

Each list of modules keeps the first few layers of every kind and the last layer. A candidate counts only if every block
of the whole model's graph has an equal one (`ir.blocks.block_hashes`) in the candidate's graph, so each operator of the
whole model occurs at its real widths.

Neighbours: `capture.self_check` compares the smaller module, `capture.shrinking` makes smaller configurations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import nn

from fusionai.capture.build import Built, Construct
from fusionai.capture.capture import Captured, capture
from fusionai.capture.shrinking import TooLarge
from fusionai.capture.source import FactorySource
from fusionai.capture.tasks import ExampleInput
from fusionai.ir.blocks import block_hashes
from fusionai.primitives.errors import ModelError
from fusionai.primitives.units import format_count

_OF_A_KIND: Final = (2, 3, 4, 6, 8)
"""Numbers of layers per kind to try. At least two, because the code after a layer differs from the code after the
embedding."""


def with_fewer_layers(captured: Captured, most_parameters: int) -> Captured:
    """Return a capture of the same module with at most `most_parameters` parameters. Raises `TooLarge` if none can be
    made."""
    built = captured.source.built
    why = "none of its lists of modules has layers to leave out"
    if built.huggingface is not None:
        why = "it comes from a configuration"
    elif built.adapter is not None:
        why = "it has an adapter"
    else:
        wanted = set(block_hashes(captured.graph))
        for count in _OF_A_KIND:
            kept = dict(_kept(built.module, count))
            if not kept:
                break
            try:
                made = _captured(captured, kept)
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


def _captured(captured: Captured, kept: Mapping[str, tuple[int, ...]]) -> Captured:
    built, ranges = captured.source.built, captured.graph.symbols
    given = {
        spec.name: ExampleInput(spec.example, tuple(dim if isinstance(dim, str) else None for dim in spec.dims))
        for spec in captured.inputs
        if spec.example is not None
    }
    return capture(
        FactorySource(_shortened(built, kept)),
        task=captured.task,
        batch=ranges.get("b", (1, 1)),
        sequence=ranges.get("s", (1, 1)),
        seed=built.seed,
        train=captured.train,
        example_inputs=given or None,
    )


def _shortened(built: Built, kept: Mapping[str, tuple[int, ...]]) -> Construct:
    def construct() -> nn.Module | tuple[nn.Module, Mapping[str, Any]]:
        result = built.construct()
        module = result if isinstance(result, nn.Module) else result[0]
        for path, places in kept.items():
            entries = list(module.get_submodule(path).children())
            parent, _, name = path.rpartition(".")
            made = nn.ModuleList if type(module.get_submodule(path)) is nn.ModuleList else _sequential
            setattr(module.get_submodule(parent), name, made([entries[place] for place in places]))
        return result

    return construct


def _sequential(entries: list[nn.Module]) -> nn.Sequential:
    return nn.Sequential(*entries)
