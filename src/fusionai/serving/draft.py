"""A small draft model, run by the owner, that guesses how generations continue (speculative decoding).

It is served like any model, but as a whole, in this process, with its own paged KV cache. It draws each token with the
same random number as the generation does at that position, so that two models with the same probabilities choose the
same token. After each pass only guesses that turned out wrong are recomputed. Decides which generations it follows, and
which tokens it guesses.

Neighbours: it implements `speculating.Proposer`, whose module asks for guesses, `backends.interface` computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from fusionai.execution.host import ComputeThread
from fusionai.ir.serving import LOGITS
from fusionai.primitives.errors import FusionError
from fusionai.serving.drafting import ComputedProposer, DraftPages, LoadedDraft, token_ids, without_penalties
from fusionai.serving.interface import Sampling
from fusionai.serving.sampling import TokenHistory, choose
from fusionai.wire.messages import Segment


class DraftProposer(ComputedProposer):
    """Implements `Proposer`. `compute`: the thread where `draft` was loaded; only that thread uses the draft. The draft
    reads a prompt while the pool reads it."""

    def __init__(self, draft: LoadedDraft, compute: ComputeThread) -> None:
        super().__init__(_Texts(draft), compute)


@dataclass(slots=True)
class _Text:
    """`tokens`: prompt and answer. `ahead`: guesses that are in the KV cache after them."""

    tokens: list[int]
    prompt_tokens: int
    sampling: Sampling
    computed: int = 0
    ahead: tuple[int, ...] = ()


class _Texts:
    """The texts of all followed sessions. Runs on the compute thread."""

    def __init__(self, draft: LoadedDraft) -> None:
        self._draft = draft
        self._pages = DraftPages(draft)
        self._texts: dict[int, _Text] = {}

    def begin(self, session: int, prompt: Sequence[int], sampling: Sampling) -> None:
        plain = without_penalties(sampling)
        self._texts[session] = _Text(list(prompt), len(prompt), plain)
        with suppress(FusionError):  # the next request for guesses reports it
            self._read([session] if self._find_room(session, 0) else [])

    def extend(self, session: int, tokens: Sequence[int]) -> None:
        text = self._texts.get(session)
        if text is None:
            return
        if text.computed == len(text.tokens):
            for guess, token in zip(text.ahead, tokens, strict=False):
                if guess != token:
                    break
                text.computed += 1
        text.ahead = ()
        text.tokens += tokens

    def guesses(self, wanted: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        left = {session: count for session, count in wanted.items() if self._find_room(session, count)}
        made: dict[int, list[int]] = {session: [] for session in left}
        for session in left:
            text = self._texts[session]
            # The last token is computed again, because its logits are needed.
            text.computed = min(text.computed, len(text.tokens) - 1)
            text.ahead = ()
        rows = self._read(list(left))
        while rows:
            feeding: dict[int, int] = {}
            for session, row in rows.items():
                text, guessed = self._texts[session], made[session]
                position = len(text.tokens) - text.prompt_tokens + len(guessed)
                guessed.append(choose(row, text.sampling, TokenHistory(), position))
                if len(guessed) < left[session]:
                    feeding[session] = guessed[-1]
            segments = [
                self._pages.segment(session, len(self._texts[session].tokens) + len(made[session]) - 1, 1)
                for session in feeding
            ]
            tokens, sessions = list(feeding.values()), list(feeding)
            rows = self._run(segments, tokens, range(len(tokens)), sessions) if feeding else {}
            for session in feeding:
                self._texts[session].ahead = tuple(made[session])
        return {session: tuple(guessed) for session, guessed in made.items()}

    def end(self, session: int) -> None:
        self._texts.pop(session, None)
        self._pages.release(session)

    def close(self) -> None:
        for session in list(self._texts):
            self.end(session)

    def _find_room(self, session: int, count: int) -> bool:
        """Reserve pages for a text and `count` guesses; return whether that was possible."""
        text, draft = self._texts.get(session), self._draft
        if text is None:
            return False
        if any(token >= draft.vocabulary for token in text.tokens[text.computed :]):
            return False
        return self._pages.reserve(session, len(text.tokens) + count)

    def _read(self, sessions: Sequence[int]) -> dict[int, np.ndarray]:
        """Compute the positions of these texts that are not computed. Return the logits after each text's last
        token."""
        rows: dict[int, np.ndarray] = {}
        waiting = [session for session in sessions if self._texts[session].computed < len(self._texts[session].tokens)]
        while waiting:
            room = self._draft.options.pass_tokens
            segments: list[Segment] = []
            tokens: list[int] = []
            wanted: list[int] = []
            for session in waiting:
                text = self._texts[session]
                length = min(room, len(text.tokens) - text.computed)
                if length == 0:
                    break
                room -= length
                segments.append(self._pages.segment(session, text.computed, length))
                tokens += text.tokens[text.computed : text.computed + length]
                if text.computed + length == len(text.tokens):
                    wanted.append(len(tokens) - 1)
            ended = [one for one in segments if one.start + one.length == len(self._texts[one.session].tokens)]
            rows |= self._run(segments, tokens, wanted, [one.session for one in ended])
            for segment in segments:
                self._texts[segment.session].computed = segment.start + segment.length
            waiting = [session for session in waiting if session not in rows]
        return rows

    def _run(
        self, segments: Sequence[Segment], tokens: Sequence[int], wanted: Sequence[int], sessions: Sequence[int]
    ) -> dict[int, np.ndarray]:
        """Run one pass. Return the logits after the packed positions `wanted`, which belong to `sessions` in this
        order."""
        inputs = {"input_ids": token_ids(tokens)}
        made = self._draft.program.run(segments, inputs, wanted=[LOGITS], rows=wanted)[LOGITS]
        rows = np.frombuffer(made.data, np.float32).reshape(made.shape[1:])[:, : self._draft.vocabulary]
        return dict(zip(sessions, rows, strict=True))
