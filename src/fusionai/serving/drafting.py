"""What models that guess tokens in the owner's process share: loading, their thread, the pages of their KV cache.

Decides which sessions have pages; what is computed is decided by `draft` and `heads`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fusionai.backends.interface import Backend
from fusionai.backends.serving.base import ServingProgram
from fusionai.coordination.serving.pages import Match, Pages
from fusionai.execution.host import ComputeThread, Timed
from fusionai.ir.schema import Graph
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.serving.interface import Sampling
from fusionai.serving.speculating import Guesses
from fusionai.wire.messages import Segment, ServeOptions

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


class FollowedTexts(Protocol):
    """The texts of all followed sessions, used on the compute thread only. Methods as those of `Proposer`."""

    def begin(self, session: int, prompt: Sequence[int], sampling: Sampling) -> None: ...

    def extend(self, session: int, tokens: Sequence[int]) -> None: ...

    def guesses(self, wanted: Mapping[int, int]) -> Guesses: ...

    def end(self, session: int) -> None: ...

    def close(self) -> None: ...


class ComputedProposer:
    """Implements `Proposer` with a model. `compute`: the thread where the model was loaded."""

    def __init__(self, texts: FollowedTexts, compute: ComputeThread) -> None:
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


def without_penalties(sampling: Sampling) -> Sampling:
    """Return how guesses are drawn. Penalties count tokens, and the counts would have to be undone for each wrong
    guess."""
    return replace(sampling, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)


def token_ids(tokens: Sequence[int]) -> HostTensor:
    """Return packed tokens as the input of a pass: int64 [1, tokens]."""
    return host_tensor("int64", (1, len(tokens)), np.array(tokens, np.int64).data)
