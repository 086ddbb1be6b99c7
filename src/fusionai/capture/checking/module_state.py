"""Refuses modules whose forward keeps state where a captured graph has none.

A graph changes buffers and nothing else. A counter of Python, a list of earlier results, a generator of random numbers
outside torch or two parameters in one memory would train otherwise on a pool than in one process, without a word. The
module itself shows this: it is run twice, from the same buffers and with the same draws.

Neighbours: `capture.checking.self_check` calls this for modules in memory; `capture.tasks` writes assigned buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from fusionai.capture.checking import comparison
from fusionai.primitives.errors import ModelError

_SHOWN = 3
"""Most attributes named in a message."""


@contextmanager
def restored_buffers(module: nn.Module) -> Iterator[None]:
    """Give the module's buffers the values back that they have now."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    yield
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(before[name])


def refuse_shared_memory(module: nn.Module) -> None:
    """Raise `ModelError` if two parameters are one memory: one process trains them together, with the gradient of
    either, which stages that hold them apart can't."""
    owners: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        if not parameter.numel() or not parameter.requires_grad:
            continue
        owner = owners.setdefault(parameter.untyped_storage().data_ptr(), name)
        if owner != name:
            raise ModelError(
                f"the parameters {owner} and {name} share memory without being one parameter.",
                hint="Tie them by assigning the parameter itself (b.weight = a.weight), or separate them by a copy "
                "(b.weight = nn.Parameter(a.weight.detach().clone())).",
            )


def refuse_hidden_state(name: str, module: nn.Module, run: Callable[[], Mapping[str, torch.Tensor]]) -> str | None:
    """Run the module twice. Raise `ModelError` if its outputs differ; return a note if only its attributes do."""
    with restored_buffers(module):
        first = run()
    before = _attributes(module)
    with restored_buffers(module):
        second = run()
    changed = [f"{key} ({before[key]!r} becomes {value!r})" for key, value in _attributes(module).items()
               if key in before and before[key] != value]  # fmt: skip
    named = ", ".join(changed[:_SHOWN])
    if any(comparison.relative_difference(second[key], value) > 0.0 for key, value in first.items()):
        where = f", which changes its attributes {named}" if named else ""
        raise ModelError(
            f"{name} gives other results on the same inputs when it runs again{where}: a graph keeps no state except "
            "registered buffers.",
            hint="Keep counters and earlier results in buffers (register_buffer), and draw random numbers with torch.",
        )
    return f"The module changes its attributes {named} while it runs; the graph keeps their values." if named else None


def _attributes(module: nn.Module) -> dict[str, object]:
    """Return the numbers and texts that the module and those in it hold as attributes, by path."""
    return {
        f"{path}.{key}".lstrip("."): value
        for path, child in module.named_modules()
        for key, value in vars(child).items()
        if isinstance(value, int | float | str) and key != "training"
    }
