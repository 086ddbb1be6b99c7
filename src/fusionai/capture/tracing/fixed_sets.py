"""Lets a model's code go through sets of texts in a fixed order while it is traced.

Python orders texts in a set anew at each start. Models that go through their kinds of layers that way (Gemma 3,
ModernBERT) were captured with their nodes in another order each time, so that an owner that started again had another
graph, with another hash, than its job."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from fusionai.capture.tracing.patching import patched


class _AnySet(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, set)


class FixedSet(set[Any], metaclass=_AnySet):
    """A set that yields texts in alphabetical order. A set with anything else in it keeps Python's order."""

    def __iter__(self) -> Iterator[Any]:
        found = list(super().__iter__())
        return iter(sorted(found) if _are_texts(found) else found)

    def __or__(self, other: Any) -> FixedSet:
        return FixedSet(super().__or__(other))

    def __and__(self, other: Any) -> FixedSet:
        return FixedSet(super().__and__(other))

    def __sub__(self, other: Any) -> FixedSet:
        return FixedSet(super().__sub__(other))


def _are_texts(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def fixed_sets(module: nn.Module) -> AbstractContextManager[None]:
    """While open, `set` in the code of the classes of `module` and its parts makes a `FixedSet`, and the parts' own
    sets of texts are such. Left alone: set displays, and lists that were made of a set when the module was built."""
    parts = list(module.modules())
    names = {type(part).__module__ for part in parts} | {"transformers.masking_utils"}
    spaces = [sys.modules[name] for name in sorted(names) if name in sys.modules and not name.startswith("torch.")]
    kept = [
        (part, name, FixedSet(value))
        for part in parts
        for name, value in vars(part).items()
        if type(value) is set and value and _are_texts(value)
    ]
    return patched(*((space, "set", FixedSet) for space in spaces), *kept)
