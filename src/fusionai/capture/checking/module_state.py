"""Refuses modules whose forward keeps state where a captured graph has none.

A graph changes buffers and nothing else. A counter of Python, a list of earlier results, a generator of random numbers
outside torch or two parameters in one memory would train otherwise on a pool than in one process, without a word. The
module itself shows this: it is run several times, from the same buffers and with the same draws.

Neighbours: `capture.checking.self_check` calls this for modules in memory; `capture.tasks` writes assigned buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from fusionai.capture.checking import comparison
from fusionai.primitives.errors import ModelError

_SHOWN = 3
"""Most attributes named in a message."""


@contextmanager
def restored_buffers(module: nn.Module, written: list[str] | None = None) -> Iterator[None]:
    """Give the module's buffers the values back that they have now. `written` gets the names of those that changed."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    yield
    if written is not None:
        written += [name for name, buffer in module.named_buffers() if not torch.equal(buffer, before[name])]
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


def hidden_state_notes(
    name: str,
    module: nn.Module,
    run: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]],
    inputs: Mapping[str, torch.Tensor],
    earlier: Mapping[str, torch.Tensor],
    *,
    training: bool,
) -> Iterator[str]:
    """Run the module on `earlier` inputs, so that what it keeps of them shows when it is compared with the graph, and
    twice on `inputs`. Raise `ModelError` if the two outputs differ; yield notes if it changes attributes, or buffers in
    evaluation."""
    mode = "" if training else " in evaluation"
    with restored_buffers(module):
        run(earlier)
    written: list[str] = []
    with restored_buffers(module, written):
        first = run(inputs)
    before = attributes(module)
    with restored_buffers(module):
        second = run(inputs)
    named = changed_attributes(before, module)
    if any(comparison.relative_difference(second[key], value) > 0.0 for key, value in first.items()):
        where = f", which changes its attributes {named}" if named else ""
        raise ModelError(
            f"{name} gives other results{mode} on the same inputs when it runs again{where}: a graph keeps no state "
            "except registered buffers.",
            hint="Keep counters and earlier results in buffers (register_buffer), and draw random numbers with torch.",
        )
    if named and training:
        yield attributes_note(named)
    if written and not training:
        yield written_note(written)


def written_note(written: Sequence[str]) -> str:
    """Return the note about buffers that the module writes in evaluation."""
    named = ", ".join(written[:_SHOWN])
    return f"The module writes its buffers {named} in evaluation too. The evaluations of a job change no buffers."


def attributes_note(named: str) -> str:
    """Return the note about attributes that `changed_attributes` found."""
    return f"The module changes its attributes {named} while it runs; the graph keeps their values."


def changed_attributes(before: Mapping[str, object], module: nn.Module) -> str:
    """Return in words the first attributes that differ from those `before`; empty if none does."""
    now = attributes(module)
    changed = [
        f"{key} ({value!r} becomes {now[key]!r})" for key, value in before.items() if now.get(key, value) != value
    ]
    return ", ".join(changed[:_SHOWN])


def attributes(module: nn.Module) -> dict[str, object]:
    """Return the numbers and texts that the module and those in it hold as attributes, by path."""
    return {
        f"{path}.{key}".lstrip("."): value
        for path, child in module.named_modules()
        for key, value in vars(child).items()
        if isinstance(value, int | float | str) and key != "training"
    }
