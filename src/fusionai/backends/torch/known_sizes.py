"""Remembers what runs without memory have found in this process, because a stage is loaded again after each
fault.

`compiled_stage` and `serving` run and name all that a result follows from, the graph's hash included.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf
from typing import Any, Final, TypeVar

T = TypeVar("T")
MOST_KNOWN: Final = 256
"""Sizes that are remembered (chosen): some hundred bytes each."""


class KnownSizes:
    """What runs without memory have found in this process, by all that it follows from."""

    def __init__(self) -> None:
        self._found: dict[object, tuple[float, Any]] = {}
        self._lock = threading.Lock()

    def of(self, key: object, limit_bytes: int | None, run: Callable[[], T]) -> T:
        """Return what `run` has returned for this key under the same limit or a tighter one, else run it. Failures are
        not remembered: they name what was too large."""
        limit = inf if limit_bytes is None else limit_bytes
        passed_under, found = self._found.get(key, (inf, None))
        if found is not None and passed_under <= limit:
            return found
        made = run()
        with self._lock:
            self._found.pop(key, None)
            self._found[key] = (limit, made)
            if len(self._found) > MOST_KNOWN:
                del self._found[next(iter(self._found))]
        return made


KNOWN: Final = KnownSizes()
