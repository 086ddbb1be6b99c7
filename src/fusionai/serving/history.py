"""Counts of the tokens that a generation has seen, from which penalties are computed.

Neighbours: `sampling` reads the counts, the engine adds each emitted token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ROOM = 64


class TokenHistory:
    """Distinct tokens of prompt and answer. Adding a token takes constant time, whatever the text's length."""

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        distinct = np.unique(np.asarray(prompt, dtype=np.int64))
        self._slots = {int(token): slot for slot, token in enumerate(distinct)}
        self._ids = np.concatenate([distinct, np.zeros(_ROOM, dtype=np.int64)])
        self._counts = np.zeros(len(self._ids), dtype=np.int64)
        self.generated_tokens = 0

    def add(self, token: int) -> None:
        """Add a token of the answer."""
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        self._counts[slot] += 1
        self.generated_tokens += 1

    @property
    def seen(self) -> NDArray[np.int64]:
        """Distinct tokens of prompt and answer, in order of first occurrence; a view."""
        return self._ids[: len(self._slots)]

    @property
    def generated_counts(self) -> NDArray[np.int64]:
        """How often each token of `seen` is in the answer; a view."""
        return self._counts[: len(self._slots)]
