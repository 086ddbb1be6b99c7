"""Replace attributes of other libraries' modules, classes and objects while a model is built, traced or checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_MISSING: Final = object()


@contextmanager
def patched(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """While open, `replacements` (place, attribute, value) are in force. An attribute that a place inherits, or finds
    by `__getattr__`, is deleted from it afterwards."""
    originals = [(place, name, vars(place).get(name, _MISSING)) for place, name, _ in replacements]
    try:
        for place, name, value in replacements:
            setattr(place, name, value)
        yield
    finally:
        for place, name, original in originals:
            if original is _MISSING:
                delattr(place, name)
            else:
                setattr(place, name, original)
