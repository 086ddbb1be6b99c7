"""The open requests of a serving engine: pass results in, tokens and states of the job out to their listeners.

`Answers` decides on which thread a pass's logits are sampled and when speculative tokens are requested. What a pass
counts for is decided by `coordination.serving.batching`.

Neighbours: `serving.driver` reports passes, failures and states; `serving.generating` keeps the state of one
generation; `serving.engine` submits requests.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from fusionai.coordination.round.interface import CommandFailed, DriverEvent
from fusionai.coordination.serving.driver import ServingMachine
from fusionai.coordination.serving.interface import ServingState
from fusionai.primitives.errors import ExecutionError
from fusionai.serving.faults import ServingFaultLog
from fusionai.serving.generating import Generating, RowReader, Rows, TextToRead, Verdict
from fusionai.serving.images import ImageFeed
from fusionai.serving.interface import Generation, GenerationPaused, HopTiming
from fusionai.serving.job import ServingJob
from fusionai.serving.passes import Returned
from fusionai.serving.speculating import Guesses, Speculation

log = logging.getLogger(__name__)

INLINE_PLAIN: Final = 2**19
"""Largest number of logits of greedy rows that are sampled on the event loop. Finding their maxima takes a tenth of a
millisecond, as long as a hand-over to a thread."""
INLINE: Final = 2**14
"""Largest number of logits that are sampled on the event loop with any other sampling (chosen)."""
SPEED_S: Final = 10.0
"""Window of `Answers.tokens_per_s`, in seconds."""


class Answers:
    """`post` hands an event to the driver, or None to have it send the passes that are due."""

    def __init__(
        self,
        job: ServingJob,
        machine: ServingMachine,
        faults: ServingFaultLog,
        speculation: Speculation | None,
        *,
        now_s: Callable[[], float],
        post: Callable[[DriverEvent | None], None],
    ) -> None:
        self.state: ServingState = "starting"
        self.detail = ""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ready.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.emitted_tokens = 0
        self._job = job
        self._machine = machine
        self._batcher = machine.batcher
        self._faults = faults
        self._speculation = speculation
        self._now_s = now_s
        self._post = post
        self.feed = ImageFeed(job.graph)
        self._generations: dict[int, Generating] = {}
        self._texts: dict[int, TextToRead] = {}
        self._sampled_now: Counter[int] = Counter()
        """Number of passes, per generation, whose rows are sampled in the thread or wait for it."""
        self._sampling = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sampling")
        self._recent: deque[tuple[float, int]] = deque()
        """(time, emitted tokens) of the last passes."""

    # -------------------------------------------------------------------------------------------------- requests

    def generate(self, number: int, generation: Generation) -> Generating:
        """Open a generation under the number of its session, which has been submitted."""
        if not self._generations:
            self._faults.asked()
        self.feed.begin(number, generation.prompt, generation.images)
        generating = self._generations[number] = Generating(number, generation, self._abandoned)
        if self.state in ("recovering", "waiting"):
            generating.held(GenerationPaused(self.state, self.detail))
        self._post(None)
        return generating

    def read(self, number: int, rows: int, made: RowReader) -> TextToRead:
        """Open a text, of which this number of rows is wanted, under the number of its session."""
        text = self._texts[number] = TextToRead(number, rows, made)
        return text

    def end_reading(self, number: int) -> None:
        if self._texts.pop(number, None) is not None:
            self._batcher.cancel(number)

    def _abandoned(self, number: int) -> None:
        """Drop a generation that nothing listens to any more; its KV cache pages are free at once."""
        self._forget(number)
        self._batcher.cancel(number)
        self._post(None)

    def _forget(self, number: int) -> None:
        self._generations.pop(number, None)
        self.feed.end(number)
        if self._speculation is not None:
            self._speculation.end(number)

    def end_all(self, reason: str) -> None:
        for generating in list(self._generations.values()):
            generating.finish("failed", f"the engine stopped: {reason}")
        for text in list(self._texts.values()):
            text.fail(ExecutionError(f"the engine stopped: {reason}."))
        self._generations.clear()
        self._texts.clear()

    def close(self) -> None:
        self._sampling.shutdown(wait=True, cancel_futures=True)
        if self._speculation is not None:
            self._speculation.close()

    # --------------------------------------------------------------------------------------------------- results

    def returned(self, result: Returned) -> None:
        """Sample the rows of a finished pass, on the event loop or in a thread, then emit the tokens."""
        sessions, vocabulary = self._batcher.sessions_of(result.plan.number), self._job.vocabulary
        rows = {number: share for number, share in _shares(result).items() if number in sessions}
        todo = {number: self._generations[number] for number in rows if number in self._generations}

        def judge() -> dict[int, Verdict]:
            shares = {number: rows[number] for number in todo}
            return {n: todo[n].judge(share[:, :vocabulary], at, after) for n, (share, at, after) in shares.items()}

        size = sum(len(rows[number][0]) for number in todo) * vocabulary
        plain = all(generating.is_plain for generating in todo.values())
        # While the thread samples an earlier pass of a text, later ones go to the thread too, to keep the order.
        follows = any(number in self._sampled_now for number in todo)
        if size <= (INLINE_PLAIN if plain else INLINE) and not follows:
            self._give_out(result, rows, judge)
            return
        self._sampled_now.update(todo)

        def done(judged: asyncio.Future[dict[int, Verdict]]) -> None:
            self._sampled_now.subtract(todo)
            self._sampled_now += Counter()
            if not judged.cancelled():
                self._give_out(result, rows, judged.result)

        asyncio.get_running_loop().run_in_executor(self._sampling, judge).add_done_callback(done)

    def _give_out(
        self, result: Returned, rows: Mapping[int, Share], judged: Callable[[], Mapping[int, Verdict]]
    ) -> None:
        number, now_s = result.plan.number, self._now_s()
        try:
            verdicts = judged()
            cached = {one: self._batcher.matched(one) for one in verdicts}
            tokens = {one: tuple(verdict.tokens) for one, verdict in verdicts.items()}
            finished = {one for one, verdict in verdicts.items() if verdict.ended is not None}
            counted = self._machine.returned(result.fence, number, tokens, finished, now_s)
            hops = self._hops(result) if verdicts else ()
            emitted = 0
            self._watch(result, counted, verdicts)
            going_on: list[int] = []
            for session in counted:
                generating, verdict = self._generations.get(session), verdicts.get(session)
                if generating is not None and verdict is not None:
                    generating.adopt(verdict, hops, cached[session])
                    emitted += len(verdict.tokens)
                    if self._goes_on(generating, verdict) and verdict.tokens:
                        going_on.append(session)
                text = self._texts.get(session)
                if text is not None and session in rows:
                    text.adopt(rows[session][0])
                    if text.done.done():
                        del self._texts[session]
            if emitted:
                self.emitted_tokens += emitted
                self._recent.append((now_s, emitted))
                self._faults.flowed()
            # Deadlines are checked here too, because a whole answer may take less time than one tick.
            self.expire(now_s)
            self._guess([one for one in going_on if one in self._generations], len(result.plan.segments))
            self._post(None)
        except Exception as error:  # otherwise the error would be lost and the pass's generations would wait for ever
            log.exception("the result of pass %d of %s could not be processed", number, self._job.job)
            self._post(CommandFailed(f"{type(error).__name__}: {error}"))

    def _goes_on(self, generating: Generating, verdict: Verdict) -> bool:
        number = generating.number
        if self._speculation is not None:
            self._speculation.verified(verdict.proposed, verdict.accepted)
        if generating.finished:
            self._forget(number)
            self._batcher.cancel(number)  # the batcher does not know of the end if a constraint caused it
            return False
        if self._speculation is not None and may_be_guessed(generating.generation):
            self._speculation.emitted(number, verdict.tokens)
            return True
        return False

    # ------------------------------------------------------------------------------------------------- guesses

    def _watch(self, result: Returned, counted: Collection[int], verdicts: Mapping[int, Verdict]) -> None:
        """Record the pass's duration, begin to follow generations whose prompt is being read, and hand on the states of
        positions whose token is not a wrong guess. Runs before the pass's tokens are emitted."""
        if self._speculation is None:
            return
        generations = [one for number in counted if (one := self._generations.get(number)) is not None]
        if generations and all(one.prompt_read for one in generations):
            self._speculation.passed(len(result.plan.tokens), result.elapsed_s)
        for one in generations:
            if may_be_guessed(one.generation):
                self._speculation.begin(one.number, one.generation.text, one.generation.sampling)
                share = result.states_of(one.number)
                if share is not None:
                    start, rows = share
                    verdict = verdicts.get(one.number)
                    wrong = 0 if verdict is None else verdict.proposed - max(0, len(verdict.tokens) - 1)
                    self._speculation.read(one.number, start, rows[: len(rows) - wrong])

    def _guess(self, numbers: Sequence[int], rows: int) -> None:
        """Request guesses for these generations. Until the answer comes they are in no pass."""
        if self._speculation is None or not numbers:
            return
        for number in numbers:
            self._batcher.hold(number)
        asking = True

        def answer(guesses: Guesses) -> None:
            for number in numbers:
                self._batcher.propose(number, guesses[number])
            if not asking:
                self._post(None)

        self._speculation.ask(numbers, rows, answer)
        asking = False

    def _hops(self, result: Returned) -> tuple[HopTiming, ...]:
        """Timing of each hop. Time that no stage accounts for is transfer time, divided equally among the changes of
        machine."""
        known_s = sum(hop.queued_s + hop.compute_s for hop in result.hops)
        way_s = max(0.0, result.elapsed_s - known_s)
        places, owner = self._machine.roles.places, self._job.owner
        peers = [owner, *(places.get(hop.stage, owner) for hop in result.hops)]
        moves = [one != before for before, one in itertools.pairwise(peers)]
        moves[-1:] = [moves[-1] + (peers[-1] != owner)] if moves else []  # the last hop includes the way back
        share_s = way_s / sum(moves) if any(moves) else 0.0
        return tuple(
            HopTiming(hop.stage, self._faults.name(peer), hop.queued_s, hop.compute_s, share_s * count)
            for hop, peer, count in zip(result.hops, peers[1:], moves, strict=True)
        )

    # ------------------------------------------------------------------------------------------- news of the job

    def failed(self, sessions: Sequence[int], reason: str) -> None:
        """End these sessions, because they can't continue."""
        for number in sessions:
            generating, text = self._generations.get(number), self._texts.pop(number, None)
            if generating is not None:
                generating.finish("failed", reason)
                self._forget(number)
            if text is not None:
                text.fail(ExecutionError(f"{reason.rstrip('.')}."))

    def stands(self, state: ServingState, detail: str) -> None:
        """Adopt the state of the job, and tell listeners about pauses."""
        before, self.state, self.detail = self.state, state, detail
        if state == "ready" and not self.ready.done():
            self.ready.set_result(None)
        if state == before or "starting" in (state, before):
            return
        match state:
            case "ready":
                if not self._generations:
                    self._faults.recovered_unnoticed()
                held = GenerationPaused("running", detail)
            case "recovering" | "waiting":
                held = GenerationPaused(state, detail)
            case _:
                return
        for generating in self._generations.values():
            generating.held(held)

    def expire(self, now_s: float) -> None:
        """End the sessions whose deadline has passed."""
        for number in self._batcher.expire(now_s):
            generating = self._generations.get(number)
            if generating is not None:
                generating.finish("deadline", f"its deadline of {generating.generation.deadline_s:g} s has passed")
                self._forget(number)

    @property
    def tokens_per_s(self) -> float:
        """Mean over the last `SPEED_S` seconds."""
        since_s = self._now_s() - SPEED_S
        while self._recent and self._recent[0][0] < since_s:
            self._recent.popleft()
        return sum(count for _, count in self._recent) / SPEED_S


def may_be_guessed(generation: Generation) -> bool:
    """Return whether guesses are allowed for the generation. A constraint rules them out: which tokens it allows
    depends on all tokens before."""
    return generation.constraint is None and generation.max_tokens > 1


Share = tuple[Rows, int, tuple[int, ...]]
"""One session's part of a pass: its rows, the position of the first row, and the tokens computed after each row but the
last."""


def _shares(result: Returned) -> dict[int, Share]:
    plan, rows = result.plan, result.rows
    if rows is None:
        return {}
    shares: dict[int, Share] = {}
    first = end = 0
    for segment in plan.segments:  # a segment's wanted rows are its last ones
        count, end = plan.wanted_sessions.count(segment.session), end + segment.length
        if count:
            position = segment.start + segment.length - count
            shares[segment.session] = (rows[first : first + count], position, plan.tokens[end - count + 1 : end])
        first += count
    return shares
