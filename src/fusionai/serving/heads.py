"""A head, run by the owner, that guesses tokens from states of the served model (MTP heads, EAGLE-3).

The head's position p has the model's state at position p and the token at p + 1, and predicts the token at p + 2. Its
cache of keys and values, one for each session, begins with the first position whose states arrive: behind what was
found in the prefix cache, and behind images, whose rows are no tokens. Positions are counted from there, because its
attention depends on distances only. For further guesses it reads its own states; what they left in the cache is
computed again from the model's states once those arrive.

Like a draft model, it draws each token with the random number that the generation uses at that position. Decides which
sessions it follows and from where on.

Neighbours: it implements `speculating.StateReader`; `capture.heads` makes the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fusionai.execution.host import ComputeThread
from fusionai.ir.serving import HIDDEN, LOGITS, STATES
from fusionai.primitives.errors import FusionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.serving.drafting import ComputedProposer, FollowedTexts, LoadedDraft, token_ids, without_penalties
from fusionai.serving.images import is_image
from fusionai.serving.interface import Sampling
from fusionai.serving.sampling import TokenHistory, choose
from fusionai.wire.messages import Segment

Rows = NDArray[np.float32]


class HeadProposer(ComputedProposer):
    """Implements `StateReader`. `compute`: the thread where `head` was loaded; only that thread uses the head."""

    def __init__(self, head: LoadedDraft, compute: ComputeThread) -> None:
        texts = _HeadTexts(head)
        super().__init__(texts, compute)
        self._read = texts.read

    def read(self, session: int, start: int, states: Rows) -> None:
        """See `StateReader`. States of the prompt are read at once, while the pool reads on."""
        self._later(lambda: self._read(session, start, states))


@dataclass(slots=True)
class _HeadText:
    """`tokens`: prompt and answer. `base`: position where the head's cache begins; None: not known yet. `computed`:
    positions from there on that are in the cache. `waiting`: states of the positions behind those."""

    tokens: list[int]
    prompt_tokens: int
    sampling: Sampling
    first: int
    """First position that the head can read: the tokens after it are no images."""
    base: int | None = None
    computed: int = 0
    waiting: list[Rows] = field(default_factory=list[Rows])

    @property
    def arrived(self) -> int:
        """Positions from `base` on whose states have arrived."""
        return self.computed + sum(map(len, self.waiting))

    def begin_at(self, base: int | None) -> None:
        self.base, self.computed, self.waiting = base, 0, []

    def take(self, count: int) -> Rows:
        """Remove and return the states of the next positions."""
        states = np.concatenate(self.waiting)
        self.waiting = [states[count:]] if len(states) > count else []
        return states[:count]


class _HeadTexts(FollowedTexts[_HeadText]):
    def begin(self, session: int, prompt: Sequence[int], sampling: Sampling) -> None:
        plain = without_penalties(sampling)
        first = max((place for place, token in enumerate(prompt) if is_image(token)), default=0)
        self._texts[session] = _HeadText(list(prompt), len(prompt), plain, first)

    def read(self, session: int, start: int, states: Rows) -> None:
        text = self._texts.get(session)
        if text is None:
            return
        if start < text.first:
            start, states = text.first, states[text.first - start :]
        if not len(states):
            return
        if text.base is None or start > text.base + text.arrived:
            text.begin_at(start)
        assert text.base is not None
        known = text.base + text.arrived - start
        if known < len(states):
            with suppress(FusionError):  # without these states nothing is guessed until later ones arrive
                text.waiting.append(self._projected(states[known:]))
        # The last state of the prompt is read together with those of the answer, since its logits are needed.
        ready = min(text.arrived, text.prompt_tokens - 1 - text.base) - text.computed
        if ready > 0:
            with suppress(FusionError):  # the next request for guesses reports it
                self._read_prompt(session, text, ready)

    def extend(self, session: int, tokens: Sequence[int]) -> None:
        text = self._texts.get(session)
        if text is not None:
            text.tokens += tokens

    def guesses(self, wanted: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        left = {session: count for session, count in wanted.items() if self._is_ready(session, count)}
        made: dict[int, list[int]] = {session: [] for session in left}
        results = self._read_answers(list(left))
        while results:
            feeding: list[int] = []
            states: list[Rows] = []
            for session, (logits, state) in results.items():
                text, guessed = self._texts[session], made[session]
                position = len(text.tokens) - text.prompt_tokens + len(guessed)
                guessed.append(choose(logits, text.sampling, TokenHistory(), position))
                if len(guessed) < left[session]:
                    feeding.append(session)
                    states.append(state)
            tokens = [made[session][-1] for session in feeding]
            segments = [
                self._pages.segment(session, self._texts[session].computed + len(made[session]) - 1, 1)
                for session in feeding
            ]
            results = self._run(segments, tokens, states, range(len(tokens))) if feeding else {}
        return {session: tuple(guessed) for session, guessed in made.items()}

    def _projected(self, states: Rows) -> Rows:
        """Return what the head reads of the model's states."""
        program, most = self._draft.projection, self._draft.options.pass_tokens
        if program is None:
            return states
        made: list[Rows] = []
        for first in range(0, len(states), most):
            part = np.ascontiguousarray(states[first : first + most])
            given = host_tensor("float32", (1, *part.shape), part.data)
            made.append(_array(program.run((), {STATES: given}, wanted=[HIDDEN])[HIDDEN]))
        return np.concatenate(made)

    def _is_ready(self, session: int, count: int) -> bool:
        """Return whether the states of all positions before the text's last token have arrived, some of them are not
        computed, and there is room for them and the guesses."""
        text = self._texts.get(session)
        if text is None or text.base is None or not text.waiting:
            return False
        if text.base + text.arrived != len(text.tokens) - 1:
            return False
        return self._has_room(session, text, text.arrived + count)

    def _has_room(self, session: int, text: _HeadText, positions: int) -> bool:
        """Reserve pages. A text without room is followed no more until later states arrive."""
        following = text.tokens[text.base + text.computed + 1 :] if text.base is not None else ()
        if any(token >= self._draft.vocabulary for token in following) or not self._pages.reserve(session, positions):
            text.begin_at(None)
            return False
        return True

    def _read_prompt(self, session: int, text: _HeadText, count: int) -> None:
        if self._has_room(session, text, text.computed + count):
            for length in _pieces(count, self._draft.options.pass_tokens):
                self._advance([(session, text, length)], [])

    def _read_answers(self, sessions: Sequence[int]) -> dict[int, tuple[Rows, Rows]]:
        """Compute the states that have arrived. Return logits and the head's state at the last position of each
        session."""
        found: dict[int, tuple[Rows, Rows]] = {}
        todo = [(session, self._texts[session]) for session in sessions]
        while todo:
            room, parts, ended = self._draft.options.pass_tokens, list[tuple[int, _HeadText, int]](), list[int]()
            for session, text in todo:
                length = min(room, text.arrived - text.computed)
                if length:
                    room -= length
                    if text.computed + length == text.arrived:
                        ended.append(session)
                    parts.append((session, text, length))
            found |= self._advance(parts, ended)
            todo = [(session, text) for session, text in todo if session not in found]
        return found

    def _advance(
        self, parts: Sequence[tuple[int, _HeadText, int]], ended: Sequence[int]
    ) -> dict[int, tuple[Rows, Rows]]:
        """Compute the next positions of texts, as (session, text, positions). Return the results at the last positions
        of the sessions `ended`."""
        segments: list[Segment] = []
        tokens: list[int] = []
        states: list[Rows] = []
        rows: list[int] = []
        for session, text, length in parts:
            assert text.base is not None
            first = text.base + text.computed + 1
            segments.append(self._pages.segment(session, text.computed, length))
            tokens += text.tokens[first : first + length]
            states.append(text.take(length))
            text.computed += length
            if session in ended:
                rows.append(len(tokens) - 1)
        made = self._run(segments, tokens, states, rows)
        return {session: made[session] for session in ended}

    def _run(
        self, segments: Sequence[Segment], tokens: Sequence[int], states: Sequence[Rows], rows: Sequence[int]
    ) -> dict[int, tuple[Rows, Rows]]:
        """Run one pass. Return logits and states at the packed positions `rows`, one of each session that has any, by
        session."""
        packed = np.ascontiguousarray(np.concatenate(states).reshape(1, len(tokens), -1))
        inputs = {"input_ids": token_ids(tokens), STATES: host_tensor("float32", packed.shape, packed.data)}
        made = self._draft.program.run(segments, inputs, wanted=[LOGITS, HIDDEN], rows=rows)
        logits, hidden = (_array(made[name]) for name in (LOGITS, HIDDEN))
        ends = np.cumsum([segment.length for segment in segments])
        sessions = [segments[int(np.searchsorted(ends, row, "right"))].session for row in rows]
        return {
            session: (self._scores(logits[place]), hidden[place : place + 1]) for place, session in enumerate(sessions)
        }

    def _scores(self, logits: Rows) -> Rows:
        """Return logits of all tokens that the served model knows."""
        tokens = self._draft.tokens
        if tokens is None:
            return logits[: self._draft.vocabulary]
        scores = np.full(self._draft.vocabulary, -np.inf, np.float32)
        scores[tokens] = logits
        return scores


def _array(tensor: HostTensor) -> Rows:
    return np.frombuffer(tensor.data, np.float32).reshape(tensor.shape[1:])


def _pieces(count: int, most: int) -> list[int]:
    """Divide a number into parts of at most `most`."""
    return [end - start for start, end in pairwise([*range(0, count, most), count])]
