"""Constrained answers of models that think: the thinking is free, and the constraint applies to the text after it.

Neighbours: `constraint` compiles what applies to the text, `model_text` knows the tokens around a model's thinking.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from fusionai.primitives.errors import ExecutionError
from fusionai.serving.constraint import MatcherConstraint


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeThinking:
    """Tokens around thinking that comes before a constrained answer. `lead`: tokens that begin it; `opener`: token that
    begins it if the model chooses to think, None if the thinking has begun; `closer` ends it; `between`: tokens between
    `closer` and the constrained text; `gap`: tokens of line breaks only, which may come there."""

    closer: int
    opener: int | None = None
    lead: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    gap: frozenset[int] = frozenset()


class _Stage(Enum):
    """Place in an answer: before thinking that may begin, in the thinking, directly behind it, in the constrained
    text."""

    START = "start"
    THINKING = "thinking"
    BEHIND = "behind"
    TEXT = "text"


class ThinkingFirst:
    """Implements `interface.Constraint`: leaves thinking free and applies another constraint to the text after it. The
    thinking can't end the answer: it has no stop tokens."""

    def __init__(self, inner: MatcherConstraint, thinking: FreeThinking, *, vocabulary: int) -> None:
        self._inner = inner
        self._thinking = thinking
        self._forced = deque(thinking.lead)
        self._stage = _Stage.THINKING if thinking.opener is None else _Stage.START
        self._free = np.full((vocabulary + 31) // 32, 0xFFFFFFFF, np.uint32)
        for token in inner.stop_tokens:
            self._free[token // 32] &= ~np.uint32(1 << token % 32)

    def allowed(self) -> memoryview:
        """See `Constraint`."""
        thinking = self._thinking
        if self._forced:
            return self._with(np.zeros_like(self._free), (self._forced[0],))
        match self._stage:
            case _Stage.THINKING:
                return self._free.data
            case _Stage.START if thinking.opener is not None:
                return self._with(self._inner_words(), (thinking.opener,))
            case _Stage.BEHIND:
                return self._with(self._inner_words(), thinking.gap)
            case _:
                return self._inner.allowed()

    def accept(self, token: int) -> None:
        """See `Constraint`."""
        thinking = self._thinking
        if self._forced:
            if token != self._forced.popleft():
                raise ExecutionError(f"token {token} is not allowed by the constraint.")
        elif self._stage is _Stage.THINKING:
            if token == thinking.closer:
                self._forced.extend(thinking.between)
                self._stage = _Stage.BEHIND
        elif self._stage is _Stage.START and token == thinking.opener:
            self._stage = _Stage.THINKING
        else:
            is_gap = self._stage is _Stage.BEHIND and token in thinking.gap
            self._stage = _Stage.TEXT
            if not is_gap:
                self._inner.accept(token)

    @property
    def finished(self) -> bool:
        """See `Constraint`."""
        return self._stage is _Stage.TEXT and self._inner.finished

    def _inner_words(self) -> NDArray[np.uint32]:
        words = np.zeros_like(self._free)
        inner = np.frombuffer(self._inner.allowed(), np.uint32)[: len(words)]
        words[: len(inner)] = inner
        return words

    def _with(self, words: NDArray[np.uint32], tokens: Iterable[int]) -> memoryview:
        for token in tokens:
            words[token // 32] |= np.uint32(1 << token % 32)
        return words.data
