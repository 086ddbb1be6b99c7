"""Models that guess tokens in the owner's process: what all of them share, and the small draft model (speculative
decoding).

Shared are loading, their thread, the texts that they follow, and the pages of their KV cache.

A draft model is served like any model, but as a whole, in this process, with its own paged KV cache. It draws each
token with the same random number as the generation does at that position, so that two models with the same
probabilities choose the same token. After each pass only guesses that turned out wrong are recomputed. Decides which
generations it follows, and which tokens it guesses.

Neighbours: `heads` guesses from the served model's states, `speculating` asks for guesses, `backends.interface`
computes."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from fusionai.backends.interface import Backend
from fusionai.backends.serving.base import ServingProgram
from fusionai.coordination.serving.pages import Match, Pages
from fusionai.execution.host import ComputeThread, Timed
from fusionai.ir.schema import Graph
from fusionai.ir.serving import LOGITS
from fusionai.primitives.errors import FusionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.serving.interface import Sampling
from fusionai.serving.sampling import TokenHistory, choose
from fusionai.serving.speculating import Guesses
from fusionai.wire.messages import Segment, ServeOptions

Text = TypeVar("Text")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDraft:
    """A loaded model that guesses; its graph is whole and without loss. `vocabulary`: tokens that both it and the
    served model know; `context_tokens`: its longest text. `projection`, `tokens`: see `capture.heads.CapturedHead`."""

    program: ServingProgram
    options: ServeOptions
    vocabulary: int
    context_tokens: int
    projection: ServingProgram | None = None
    tokens: NDArray[np.int64] | None = None


def load_program(
    backend: Backend, graph: Graph, weights: Iterable[tuple[str, HostTensor]], options: ServeOptions
) -> ServingProgram:
    """Load a model that guesses, or a part of one. Blocks; call it on the thread where it will run. Raises
    `ExecutionError`, and the errors of `weights`."""
    program = backend.serve(graph, options=options)
    program.import_weights(weights)
    program.allocate()
    return program


class ComputedProposer:
    """Implements `Proposer` with a model. `compute`: the thread where the model was loaded."""

    def __init__(self, texts: FollowedTexts[Any], compute: ComputeThread) -> None:
        self._texts = texts
        self._compute = compute

    def begin(self, session: int, prompt: Sequence[int], sampling: Sampling) -> None:
        self._later(lambda: self._texts.begin(session, prompt, sampling))

    def extend(self, session: int, tokens: Sequence[int]) -> None:
        self._later(lambda: self._texts.extend(session, tokens))

    def propose(self, wanted: Mapping[int, int]) -> asyncio.Future[Guesses]:
        """See `Proposer`. The future fails if the model can't be computed."""
        making = self._compute.run(lambda: self._texts.guesses(wanted))

        async def made() -> Guesses:
            guesses, _ = await making
            return guesses

        return asyncio.ensure_future(made())

    def end(self, session: int) -> None:
        self._later(lambda: self._texts.end(session))

    def close(self) -> None:
        """See `Proposer`. The compute thread stays open; its owner closes it."""
        self._later(self._texts.close)

    def _later(self, work: Callable[[], None]) -> None:
        self._compute.run(work).add_done_callback(_log_failure)


def _log_failure(done: asyncio.Future[tuple[None, Timed]]) -> None:
    if not done.cancelled() and (problem := done.exception()) is not None:
        log.error("guessing failed", exc_info=problem)


class DraftPages:
    """Pages of one loaded model. Runs on its compute thread."""

    def __init__(self, draft: LoadedDraft) -> None:
        self._draft = draft
        self._pages = Pages(draft.options.pages, draft.options.page_tokens, prefix=False)
        self._known: dict[int, int] = {}
        """Session with pages -> how many of them the program knows of."""

    def reserve(self, session: int, positions: int) -> bool:
        """Give the session pages for this many positions; return whether that was possible."""
        if positions > self._draft.context_tokens:
            return False
        if session not in self._known:
            nothing = Match((), 0)
            most = min(self._draft.options.sessions, self._draft.options.pass_tokens)
            if len(self._known) >= most or self._pages.lacks(nothing, positions):
                return False
            self._pages.admit(session, "", nothing)
            self._known[session] = 0
        return self._pages.extend(session, positions)

    def segment(self, session: int, start: int, length: int) -> Segment:
        """Return the segment of a pass with these positions, which have pages."""
        table, first = self._pages.table(session), self._known[session]
        self._known[session] = len(table)
        return Segment(session, start, length, first, table[first:])

    def release(self, session: int) -> None:
        """Free the session's pages, if it has any."""
        if self._known.pop(session, None) is not None:
            self._pages.release(session)
            self._draft.program.forget([session])


class FollowedTexts(ABC, Generic[Text]):
    """The texts of all followed sessions, used on the compute thread only. Methods as those of `Proposer`."""

    def __init__(self, draft: LoadedDraft) -> None:
        self._draft = draft
        self._pages = DraftPages(draft)
        self._texts: dict[int, Text] = {}

    @abstractmethod
    def begin(self, session: int, prompt: Sequence[int], sampling: Sampling) -> None: ...

    @abstractmethod
    def extend(self, session: int, tokens: Sequence[int]) -> None: ...

    @abstractmethod
    def guesses(self, wanted: Mapping[int, int]) -> Guesses: ...

    def end(self, session: int) -> None:
        self._texts.pop(session, None)
        self._pages.release(session)

    def close(self) -> None:
        for session in list(self._texts):
            self.end(session)


def without_penalties(sampling: Sampling) -> Sampling:
    """Return how guesses are drawn. Penalties count tokens, and the counts would have to be undone for each wrong
    guess."""
    return replace(sampling, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)


def token_ids(tokens: Sequence[int]) -> HostTensor:
    """Return packed tokens as the input of a pass: int64 [1, tokens]."""
    return host_tensor("int64", (1, len(tokens)), np.array(tokens, np.int64).data)


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


class _Texts(FollowedTexts[_Text]):
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
