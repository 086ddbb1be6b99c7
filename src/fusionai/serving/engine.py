"""The serving engine: generations in, tokens out, over the stages of a pool.

Decides on which thread a pass's logits are sampled, which events listeners get, and when a request is refused. The
state machine `coordination.serving.driver` schedules passes and reacts to faults.

Neighbours: `serving.driver` sends passes and collects results, `serving.generating` keeps the state of one generation;
`client.serving.serve` starts the engine, the gateway and the terminal chat submit generations.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Literal

import numpy as np

from fusionai.coordination.round.verification import Inspector
from fusionai.coordination.serving import events
from fusionai.coordination.serving.batching import Batcher
from fusionai.coordination.serving.checks import TextChecks
from fusionai.coordination.serving.commands import ServingState
from fusionai.coordination.serving.driver import ServingMachine
from fusionai.coordination.serving.limits import BatchLimits, QueueFull, TooLong
from fusionai.coordination.serving.roles import ServingRoles
from fusionai.coordination.serving.sessions import SessionSpec
from fusionai.coordination.serving.stage_times import StageTimes
from fusionai.coordination.serving.state import ServingPhase
from fusionai.execution.deployment import Deployment, PlanSource
from fusionai.execution.host import Host
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.ids import PeerId
from fusionai.scheduling.problem.types import Plan
from fusionai.serving import progress
from fusionai.serving.driver import Returned, ServingDriver
from fusionai.serving.faults import ServingFaultLog
from fusionai.serving.generating import Generating, Rows, TextToEmbed, Verdict
from fusionai.serving.interface import (
    EngineBusy,
    EngineStatus,
    Generation,
    GenerationPaused,
    HopTiming,
    PromptTooLong,
    StageStatus,
)
from fusionai.serving.job import ServingJob
from fusionai.serving.proposing import Guesses, NgramProposer, Proposer
from fusionai.serving.speculating import Speculation
from fusionai.serving.stations import stations

log = logging.getLogger(__name__)

PROBE_TOKENS: Final = 8
"""Length of the probe text that must cross all stages before the engine is ready (chosen)."""
INLINE_PLAIN: Final = 2**19
"""Largest number of logits of greedy rows that are sampled on the event loop. Finding their maxima takes a tenth of a
millisecond, as long as a hand-over to a thread."""
INLINE: Final = 2**14
"""Largest number of logits that are sampled on the event loop with any other sampling (chosen)."""
SPEED_S: Final = 10.0
"""Window of `EngineStatus.tokens_per_s`, in seconds."""


class ServingEngine:
    """Implements `serving.interface.Engine`. Use as: `running = create_task(engine.run())`, `await engine.ready()`,
    serve, `engine.stop(reason)`, `await running`, `await engine.close(reason)`.

    `deployment`: the initial plan, granted by the broker. `names`: machine names by peer id; may grow while the engine
    runs. `proposer`: makes guesses if the job wants speculation, by default from repetitions in the text; closed with
    the engine. Create the engine inside a running event loop.
    """

    def __init__(
        self,
        job: ServingJob,
        host: Host,
        deployment: Deployment,
        *,
        replanner: PlanSource,
        names: Mapping[str, str],
        incarnation: int,
        on_progress: Callable[[progress.Progress], None],
        proposer: Proposer | None = None,
    ) -> None:
        self.vocabulary = job.vocabulary
        self.context_tokens = job.context_tokens
        self.stop_tokens = job.stop_tokens
        self._job = job
        self._host = host
        self._names = names
        self._speculation: Speculation | None = None
        if job.speculate != "off":
            count = None if job.speculate == "auto" else job.speculate
            self._speculation = Speculation(proposer or NgramProposer(), count, host.clock.now_s)
        self._numbers = itertools.count(1)
        self._generations: dict[int, Generating] = {}
        self._embeddings: dict[int, TextToEmbed] = {}
        self._judged_now: Counter[int] = Counter()
        """Number of tasks, per generation, whose rows are sampled in the thread or wait for it."""
        self._judging = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sampling")
        self._state: ServingState = "starting"
        self._detail = ""
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._lately: deque[tuple[float, int]] = deque()
        self._emitted_tokens = 0
        self._proposed, self._accepted = 0, 0
        self._passes_by_guesses: Counter[int] = Counter()
        """Guesses sent for a generation in one pass -> number of such passes."""
        self._faults = ServingFaultLog(names, host.clock, lambda note: on_progress(progress.Fault(note)))
        options, peers = job.options, {PeerId(placement.peer) for placement in deployment.plan.stages}
        self._batcher = Batcher(
            BatchLimits(
                pages=options.pages,
                page_tokens=options.page_tokens,
                sessions=options.sessions - 1,
                pass_tokens=options.pass_tokens,
                in_flight=job.in_flight or len(peers),
                decoding_passes=stations(peers, job.owner, deployment.members, os.cpu_count() or 1),
                chunk_tokens=min(job.chunk_tokens, options.pass_tokens),
                tile_tokens=job.tile_tokens and min(job.tile_tokens, job.chunk_tokens, options.pass_tokens),
                # The ring buffer of a layer with a window has room for the window and one pass.
                ahead_tokens=None if job.prefix_cache else options.pass_tokens,
                queue=job.queue,
                prefix=job.prefix_cache,
                probe_tokens=PROBE_TOKENS,
            ),
            holds=bool(job.secret),
            times=StageTimes(job.balance_tokens),
        )

        def machine_of(roles: ServingRoles) -> ServingMachine:
            probe = tuple((17 * place + 3) % job.vocabulary for place in range(PROBE_TOKENS))
            # The inspector's unit of work is one pass of one text.
            checks = TextChecks(Inspector(job.secret, job.owner, 1)) if job.secret else None
            return ServingMachine(self._batcher, roles, incarnation, probe, retain=options.retain, checks=checks)

        self._driver = ServingDriver(
            job,
            host,
            deployment,
            machine_of,
            replanner=replanner,
            faults=self._faults,
            sink=self,
            on_progress=on_progress,
        )
        self._machine = self._driver.machine

    # ------------------------------------------------------------------------------------------------ lifecycle

    async def run(self) -> None:
        """Load, probe, serve until `stop`. Raises `ExecutionError` if the job can't continue."""
        ended = await self._driver.run()
        reason = self._faults.named(ended.failed or ended.stopped or "done")
        self._end_all(reason)
        if ended.failed is not None:
            error = ExecutionError(f"serving {self._job.model} failed: {reason.rstrip('.')}.")
            if not self._ready.done():
                self._ready.set_exception(error)
            raise error
        if not self._ready.done():
            self._ready.set_exception(ExecutionError(f"serving {self._job.model} was stopped: {reason}."))

    async def ready(self) -> None:
        """Wait until a probe has crossed all stages and its result matched. Raises the errors of `run`."""
        await asyncio.shield(self._ready)

    def stop(self, reason: str) -> None:
        """End every generation and make `run` return."""
        self._driver.tell(events.StopAsked(reason))

    async def close(self, reason: str = "done") -> None:
        self._state = "stopped"
        self._end_all(reason)
        await self._driver.close(reason)
        self._judging.shutdown(wait=True, cancel_futures=True)
        if self._speculation is not None:
            self._speculation.close()

    def _end_all(self, reason: str) -> None:
        for generating in list(self._generations.values()):
            generating.finish("failed", f"the engine stopped: {reason}")
        for embedding in list(self._embeddings.values()):
            embedding.fail(ExecutionError(f"the engine stopped: {reason}."))
        self._generations.clear()
        self._embeddings.clear()

    # -------------------------------------------------------------------------------------------------- requests

    def submit(self, generation: Generation) -> Generating:
        """Start a generation. Raises `EngineBusy`, `PromptTooLong`, `ExecutionError` (a token outside the vocabulary,
        an unknown adapter)."""
        number = next(self._numbers)
        deadline_s = generation.deadline_s
        spec = SessionSpec(
            number=number,
            scope=generation.scope,
            prompt=tuple(generation.prompt),
            max_tokens=generation.max_tokens,
            deadline_s=None if deadline_s is None else self._host.clock.now_s() + deadline_s,
            all_rows=generation.prompt_logprobs,
            adapter=self._adapter(generation.adapter),
        )
        self._admit(spec)
        if not self._generations:
            self._faults.asked()
        generating = self._generations[number] = Generating(number, generation, self._left)
        if self._state in ("recovering", "waiting"):
            generating.held(GenerationPaused(self._state, self._detail))
        self._driver.tell(None)
        return generating

    async def embed(
        self, prompts: Sequence[Sequence[int]], scope: str, adapter: str | None = None
    ) -> list[list[float]]:
        """Mean of the last hidden states over each prompt's positions, scaled to Euclidean length 1. Raises the errors
        of `submit`."""
        asked: list[TextToEmbed] = []
        try:
            for prompt in prompts:
                number = next(self._numbers)
                spec = SessionSpec(
                    number=number,
                    scope=scope,
                    prompt=tuple(prompt),
                    max_tokens=0,
                    all_rows=True,
                    output="hidden",
                    adapter=self._adapter(adapter),
                )
                self._admit(spec)
                embedding = self._embeddings[number] = TextToEmbed(number, spec.prompt)
                asked.append(embedding)
            self._driver.tell(None)
            return [await embedding.done for embedding in asked]
        finally:
            for embedding in asked:
                if self._embeddings.pop(embedding.number, None) is not None:
                    self._batcher.cancel(embedding.number)
            self._driver.tell(None)

    def _adapter(self, name: str | None) -> int:
        """Return the number of the adapter `name`, 0 for None. Raises `ExecutionError` for an unknown adapter."""
        if name is None:
            return 0
        if name not in self._job.adapters:
            served = ", ".join(self._job.adapters) or "none"
            raise ExecutionError(f"there is no adapter {name!r} for {self._job.model}; its adapters: {served}.")
        return 1 + self._job.adapters.index(name)

    def _admit(self, spec: SessionSpec) -> None:
        if self._state == "stopped":
            raise ExecutionError(f"the engine that serves {self._job.model} has stopped.")
        if not spec.prompt or spec.max_tokens < 0:
            raise ExecutionError(f"expected a prompt of at least one token, got {len(spec.prompt)}.")
        wrong = next((token for token in spec.prompt if not 0 <= token < self.vocabulary), None)
        if wrong is not None:
            raise ExecutionError(f"expected tokens from 0 to {self.vocabulary - 1}, got {wrong}.")
        positions = len(spec.prompt) + spec.max_tokens
        if positions > self.context_tokens:
            raise PromptTooLong(
                f"the prompt has {len(spec.prompt)} tokens and the request asks for {spec.max_tokens} more; "
                f"prompt and answer may have at most {self.context_tokens} tokens together.",
                hint="Send a shorter prompt or ask for fewer tokens.",
            )
        try:
            self._batcher.submit(spec, self._host.clock.now_s())
        except QueueFull as error:
            raise EngineBusy(error.message, error.retry_after_s) from None
        except TooLong as error:
            raise PromptTooLong(error.message, hint=error.hint) from None

    def _left(self, number: int) -> None:
        """Drop a generation that nothing listens to any more; its KV cache pages are free at once."""
        self._forget(number)
        self._batcher.cancel(number)
        self._driver.tell(None)

    def _forget(self, number: int) -> None:
        self._generations.pop(number, None)
        if self._speculation is not None:
            self._speculation.end(number)

    # --------------------------------------------------------------------------------------------------- results

    def returned(self, result: Returned) -> None:
        """Sample the rows of a finished pass, on the event loop or in a thread, then emit the tokens."""
        sessions = self._machine.sessions_of(result.fence, result.plan.number)
        rows = {number: share for number, share in _shares(result).items() if number in sessions}
        todo = [(self._generations[number], *share) for number, share in rows.items() if number in self._generations]
        size = sum(len(share) for _, share, _, _ in todo) * self.vocabulary
        plain = all(generating.is_plain for generating, *_ in todo)
        # While the thread samples an earlier pass of a text, later ones go to the thread too, to keep the order.
        follows = any(generating.number in self._judged_now for generating, *_ in todo)
        if size <= (INLINE_PLAIN if plain else INLINE) and not follows:
            self._take(result, rows, lambda: _judged(todo, self.vocabulary))
            return
        self._judged_now.update(generating.number for generating, *_ in todo)

        def done(judged: asyncio.Future[dict[int, Verdict]]) -> None:
            self._judged_now.subtract(generating.number for generating, *_ in todo)
            self._judged_now += Counter()
            if not judged.cancelled():
                self._take(result, rows, judged.result)

        work = asyncio.get_running_loop().run_in_executor(self._judging, _judged, todo, self.vocabulary)
        work.add_done_callback(done)

    def _take(self, result: Returned, rows: Mapping[int, Share], judged: Callable[[], Mapping[int, Verdict]]) -> None:
        try:
            self._give_out(result, rows, judged())
        except Exception as error:  # otherwise the error would be lost and the pass's generations would wait for ever
            log.exception("the result of pass %d of %s could not be processed", result.plan.number, self._job.job)
            self._driver.tell(events.CommandFailed(f"{type(error).__name__}: {error}"))

    def _give_out(self, result: Returned, rows: Mapping[int, Share], verdicts: Mapping[int, Verdict]) -> None:
        number, now_s = result.plan.number, self._host.clock.now_s()
        cached = {one: self._batcher.matched(one) for one in verdicts}
        tokens = {one: tuple(verdict.tokens) for one, verdict in verdicts.items()}
        finished = {one for one, verdict in verdicts.items() if verdict.ended is not None}
        counted = self._machine.returned(result.fence, number, tokens, finished, now_s)
        hops = self._hops(result) if verdicts else ()
        emitted = 0
        self._watch(result, counted)
        going_on: list[int] = []
        for session in counted:
            generating, verdict = self._generations.get(session), verdicts.get(session)
            if generating is not None and verdict is not None:
                generating.adopt(verdict, hops, cached[session])
                emitted += len(verdict.tokens)
                if self._goes_on(generating, verdict) and verdict.tokens:
                    going_on.append(session)
            embedding = self._embeddings.get(session)
            if embedding is not None and session in rows:
                embedding.adopt(rows[session][0])
                if embedding.done.done():
                    del self._embeddings[session]
        if emitted:
            self._emitted_tokens += emitted
            self._lately.append((now_s, emitted))
            self._faults.flowed()
        # Deadlines are checked here too, because a whole answer may take less time than one tick.
        self.passes(now_s)
        self._guess([one for one in going_on if one in self._generations], len(result.plan.segments))
        self._driver.tell(None)

    def _goes_on(self, generating: Generating, verdict: Verdict) -> bool:
        number = generating.number
        self._proposed += verdict.proposed
        self._passes_by_guesses[verdict.proposed] += 1
        self._accepted += verdict.accepted
        if generating.finished:
            self._forget(number)
            self._batcher.cancel(number)  # the batcher does not know of the end if a constraint caused it
            return False
        if self._speculation is not None and _may_be_guessed(generating):
            self._speculation.emitted(number, verdict.tokens)
            return True
        return False

    # ------------------------------------------------------------------------------------------------- guesses

    def _watch(self, result: Returned, counted: Collection[int]) -> None:
        """Record the pass's duration, and begin to follow generations whose prompt is being read. Runs before the
        pass's tokens are emitted."""
        if self._speculation is None:
            return
        generations = [one for number in counted if (one := self._generations.get(number)) is not None]
        if generations and all(one.prompt_read for one in generations):
            self._speculation.passed(len(result.plan.tokens), result.elapsed_s)
        for one in generations:
            if _may_be_guessed(one):
                self._speculation.begin(one.number, one.generation.prompt, one.generation.sampling)

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
                self._driver.tell(None)

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
        for number in sessions:
            generating, embedding = self._generations.get(number), self._embeddings.pop(number, None)
            if generating is not None:
                generating.finish("failed", reason)
                self._forget(number)
            if embedding is not None:
                embedding.fail(ExecutionError(f"{reason.rstrip('.')}."))

    def stands(self, state: ServingState, detail: str) -> None:
        before, self._state, self._detail = self._state, state, detail
        if state == "ready" and not self._ready.done():
            self._ready.set_result(None)
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

    def passes(self, now_s: float) -> None:
        for number in self._batcher.expire(now_s):
            generating = self._generations.get(number)
            if generating is not None:
                generating.finish("deadline", f"its deadline of {generating.generation.deadline_s:g} s has passed")
                self._forget(number)

    # ---------------------------------------------------------------------------------------------------- status

    @property
    def deployment(self) -> Deployment:
        """The plan in force with tickets and addresses; guards that took over are in their new places."""
        return self._driver.deployment

    @property
    def plan(self) -> Plan:
        """The plan in force, without guards that are lost."""
        return self._driver.deployment.plan

    @property
    def is_waiting(self) -> bool:
        """True if a stage has no machine to run it."""
        return self._machine.phase is ServingPhase.WAITING

    @property
    def sheltered(self) -> frozenset[int]:
        """Stages whose spare could take over now."""
        return frozenset(guard.stage for guard in self.plan.guards if self.is_warm(guard.stage))

    @property
    def checkable(self) -> frozenset[int]:
        """Stages whose work a guard can recompute for a spot check, because other machines know the stage's inputs and
        outputs."""
        return self._machine.roles.checkable

    def is_warm(self, stage: int) -> bool:
        """Return whether the stage's spare could take over now."""
        return self._machine.is_warm(stage)

    def shut_out(self, peer: PeerId, reason: str) -> None:
        """Treat a peer as lost. Does nothing if the peer has no connection."""
        self._driver.shut_out(peer, reason)

    def offer(self, deployment: Deployment, reason: str) -> None:
        """Switch to a newer plan (another spare, a machine that leaves) between two passes."""
        self._driver.offer(deployment, reason)

    def renew(self, deployment: Deployment) -> None:
        """Take new tickets or addresses for the plan in force."""
        self._driver.renew(deployment)

    def leaving(self, peer: str) -> None:
        """A peer asked to leave: its stages move to their guards first."""
        self._driver.tell(events.MemberLeaving(peer))

    @property
    def status(self) -> EngineStatus:
        now_s, batcher = self._host.clock.now_s(), self._batcher
        while self._lately and self._lately[0][0] < now_s - SPEED_S:
            self._lately.popleft()
        return EngineStatus(
            state=self._state,
            detail=self._detail,
            model=self._job.model,
            stages=self._stages(),
            running=batcher.running,
            queued=batcher.queued,
            pages=batcher.pages.count,
            pages_free=batcher.pages.room,
            tokens_per_s=sum(count for _, count in self._lately) / SPEED_S,
            emitted_tokens=self._emitted_tokens,
            prompt_tokens=batcher.prompt_tokens,
            prefix_hit_tokens=batcher.prefix_tokens,
            faults=self._faults.notes,
            members=tuple(sorted(set(self._names.values()))),
            extra={
                "passes_under_way": float(batcher.under_way),
                "proposed_tokens": float(self._proposed),
                "accepted_tokens": float(self._accepted),
                **self._speculation_figures,
                **self._check_figures,
            },
        )

    @property
    def _check_figures(self) -> dict[str, float]:
        """Metrics of spot checks. A task is one pass of one text through a guarded stage."""
        checks = self._machine.checks
        if checks is None:
            return {}
        inspector = checks.inspector
        return {
            "checkable_tasks": float(inspector.tasks),
            "checked_tasks": float(inspector.checked_tasks),
            "peers_found_lying": float(len(inspector.liars)),
        }

    @property
    def _speculation_figures(self) -> dict[str, float]:
        """Metrics of speculation. `passes_with_N_guesses` counts a pass once for each of its generations."""
        if self._speculation is None:
            return {}
        sent = {
            f"passes_with_{count}_guesses": float(times) for count, times in self._passes_by_guesses.items() if count
        }
        return self._speculation.figures | dict(sorted(sent.items()))

    def _stages(self) -> tuple[StageStatus, ...]:
        roles, driver = self._machine.roles, self._driver
        blocks = {placement.stage: placement.blocks for placement in driver.deployment.plan.stages}
        return tuple(
            StageStatus(
                stage=stage,
                peer=peer,
                name=self._faults.name(peer),
                blocks=blocks.get(stage, (0, 0)),
                state=self._stage_state(stage, peer),
                spare=self._faults.name(roles.guards[stage]) if stage in roles.guards else "",
                resident_bytes=driver.resident_bytes.get((stage, peer), 0),
                mean_compute_s=driver.compute_s.get(stage, 0.0),
            )
            for stage, peer in sorted(roles.places.items())
        )

    def _stage_state(self, stage: int, peer: str) -> StageState:
        if peer in self._machine.lost:
            return "lost"
        match self._machine.phase:
            case ServingPhase.ENLISTING | ServingPhase.LOADING:
                return "loading" if (stage, peer) not in self._driver.resident_bytes else "running"
            case ServingPhase.REBUILDING:
                return "rebuilding"
            case _:
                return "running"


def _may_be_guessed(generating: Generating) -> bool:
    """Return whether guesses are allowed for the generation. A constraint rules them out: which tokens it allows
    depends on all tokens before."""
    return generating.generation.constraint is None and generating.generation.max_tokens > 1


StageState = Literal["running", "loading", "rebuilding", "lost"]
Share = tuple[Rows, int, tuple[int, ...]]
"""One session's part of a pass: its rows, the position of the first row, and the tokens computed after each row but the
last."""


def _shares(result: Returned) -> dict[int, Share]:
    plan, rows = result.plan, result.rows
    if rows is None:
        return {}
    owners = np.array(plan.wanted_sessions)
    shares: dict[int, Share] = {}
    begin = 0
    for segment in plan.segments:
        count = int(np.count_nonzero(owners == segment.session))
        end = begin + segment.length
        if count:
            first = int(np.flatnonzero(owners == segment.session)[0])
            packed = plan.tokens[begin:end]
            shares[segment.session] = (
                rows[first : first + count],
                segment.start + segment.length - count,
                packed[segment.length - count + 1 :],
            )
        begin = end
    return shares


def _judged(todo: Sequence[tuple[Generating, Rows, int, tuple[int, ...]]], vocabulary: int) -> dict[int, Verdict]:
    return {
        generating.number: generating.judge(rows[:, :vocabulary], first, proposals)
        for generating, rows, first, proposals in todo
    }
