"""Opens the pipelines of a served model, one after the other, and dissolves those that can't go on.

Each pipeline is a job of its own in the pool, with an engine in this process. All share the captured model, the hashed
weights and this machine's backend. The first one makes the model ready. Then `Pipelines` looks every `LOOK_S` for
machines that are free, and opens another pipeline on them if it pays. What is left for it depends on the goal:

    throughput   no machine stands by, each one is part of a pipeline
    balanced     first each stage gets a warm standby; the machines beyond are for further pipelines
    latency      one pipeline; machines beyond its standbys stay free

A pipeline is dissolved while another one computes if it has waited for a machine for `DISSOLVE_S`, or if one of its
machines wants to leave and has found no successor for as long. Its texts go on in others, and its machines are free.

`serving.pipelines` moves texts, `scheduling.serving.parallel` says whether a pipeline pays, `client.serving.watch`
watches the pool for each pipeline, `client.serving.serve` opens the first one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from fusionai.client.pool.job_process import Noted, OwnerProcess, OwnMachine, beside
from fusionai.client.pool.replanning import MachineHistory
from fusionai.client.pool.reporting import ServedNote, report_state, report_tokens
from fusionai.client.pool.session import PoolMember, near_links, one_part_each
from fusionai.client.pool.watch import watch_trust
from fusionai.client.pool.work import TokenWork, WorkReports
from fusionai.client.serving.guessing import Guesser, HeadModel, load_guesser
from fusionai.client.serving.job import ServeRequest, serving_job
from fusionai.client.serving.model import ServedModel, job_name
from fusionai.client.serving.planning import checking_sentence
from fusionai.client.serving.watch import Priced, ServingReplanner, ServingWatch
from fusionai.coordination.serving.routing import Pace
from fusionai.execution.connections import Deployment
from fusionai.ir.serving_cost import balance_tokens
from fusionai.primitives.errors import ExecutionError, FusionError
from fusionai.primitives.ids import JobId
from fusionai.primitives.process import in_background
from fusionai.scheduling.problem.types import Plan, Problem
from fusionai.scheduling.serving.parallel import further_pipeline, owner_busy, pace_figures
from fusionai.serving import job as progress
from fusionai.serving.engine import ServingEngine
from fusionai.serving.job import ServingJob
from fusionai.serving.pipelines import PipelinedEngine
from fusionai.storage.weight_manifest import ModelWeights

log = logging.getLogger(__name__)

LOOK_S: Final = 2.0
FREE_S: Final = 10.0
"""Time for which a machine must have been free before a further pipeline takes it, in seconds (chosen). The pipelines
that run take it as a standby before that, if they need one."""
DISSOLVE_S: Final = 20.0
"""Time for which a pipeline may wait for a machine, or for a successor of a leaving machine, in seconds (chosen): twice
the grace period before a new cut over the remaining machines."""
RETRY_S: Final = 60.0
"""Pause after a further pipeline could not be opened, in seconds (chosen)."""
TRY_OUT_S: Final = 600.0
"""Time after which a pipeline that is idle while others have texts is measured again, in seconds (chosen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What this machine contributes: the model with its weights, and the backend."""

    model: ServedModel
    weights: ModelWeights
    machine: OwnMachine
    guesser: Guesser | None
    """What guesses tokens; None: repetitions in the text, or nothing does."""


@dataclass(frozen=True, slots=True)
class PipelineNews:
    """An event of a pipeline other than the first."""

    pipeline: int
    event: Noted | progress.Progress


@dataclass(frozen=True, slots=True)
class PipelineOpened:
    """A pipeline other than the first is ready. `plan`: what it began with."""

    pipeline: int
    plan: Plan
    names: dict[str, str]


PipelineEvent = Noted | PipelineNews | PipelineOpened | progress.Progress


@dataclass(kw_only=True)
class OpenPipeline:
    """One pipeline. `stack` ends all that belongs to it."""

    number: int
    replanner: ServingReplanner
    engine: ServingEngine
    job: ServingJob
    running: asyncio.Future[None]
    stack: AsyncExitStack
    version: int = 0
    """Version of the plan for which it is priced."""
    try_at_s: float = 0.0
    """Time from which its speed should be measured when it is idle."""
    trouble_since_s: float | None = None
    """Time since which it waits for a machine, or one of its machines wants to leave."""


@dataclass(kw_only=True)
class Pipelines:
    """The pipelines of one served model. `stack` ends all of them. `priced`: profiles as plans should see them."""

    request: ServeRequest
    process: OwnerProcess
    loaded: LoadedModel
    home: Path
    priced: Priced
    on_event: Callable[[PipelineEvent], None]
    stack: AsyncExitStack
    engine: PipelinedEngine = field(init=False)
    _open: dict[int, OpenPipeline] = field(default_factory=dict[int, OpenPipeline])
    _last_number: int = 0
    _free_since_s: dict[str, float] = field(default_factory=dict[str, float])
    _tried: object = None
    """Machines for which no further pipeline was found that pays."""
    _pause_until_s: float = 0.0
    _dissolving: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])

    # ----------------------------------------------------------------------------------------------------- opening

    def announce(self, job: JobId, stack: AsyncExitStack) -> None:
        """Note on disk that this process serves `job`, until `stack` ends."""
        stack.push_async_callback(_ended, self.process, job, ServedNote(self.home, job))

    async def open_first(
        self, replanner: ServingReplanner, deployment: Deployment, stack: AsyncExitStack
    ) -> OpenPipeline:
        """Load and probe the first pipeline, which ends with `stack`, and look for further ones until `self.stack`
        ends. Raises the errors of `ServingEngine.run`."""
        first = await self._opened(replanner, deployment, stack)
        self.stack.push_async_callback(self._fail_with_the_last)
        self.stack.push_async_callback(self._close_all)
        if self.request.goal != "latency":  # else there is one pipeline, which watches the pool itself
            self.stack.push_async_callback(_cancelled, asyncio.create_task(self._run()))
        return first

    async def _opened(
        self,
        replanner: ServingReplanner,
        deployment: Deployment,
        stack: AsyncExitStack,
    ) -> OpenPipeline:
        process, number = self.process, self._last_number + 1
        self._last_number = number
        on_event = self._news_of(number)
        seen: list[Callable[[object], None]] = []

        def watched(event: Noted | progress.Progress) -> None:
            for see in seen:
                see(event)
            on_event(event)

        engine, job = await self._engine(number, replanner, deployment, watched, stack)
        work = TokenWork(engine, process.peer, replanner.problem.blocks, replanner.faulty_peers)
        seen.append(work.see)
        lent = WorkReports(process.pool, replanner.job, "", 1, work.work, process.note)
        stack.push_async_callback(lent.close)
        if (checked := checking_sentence(deployment.plan, engine.checkable, spot=self.request.checks)) is not None:
            on_event(Noted(checked))
        await report_state(process.pool, replanner.job, "running", "loading")
        running = asyncio.ensure_future(engine.run())
        stack.push_async_callback(_end, engine, running)
        await _ready_or_failed(engine, running, None if number == 1 else DISSOLVE_S)
        watch = ServingWatch(
            *(replanner, engine, process.peer, process.clock),
            priced=self.priced,
            stands_by=self.request.goal != "throughput",
        )
        reports = report_tokens(process.pool, job.job, work.state)
        stack.enter_context(beside(watch.run(), watch_trust(process.trust, engine), reports, lent.run()))
        plan = engine.deployment.plan
        opened = OpenPipeline(
            number=number,
            replanner=replanner,
            engine=engine,
            job=job,
            running=running,
            stack=stack,
            version=plan.version,
        )
        priced = _pace(plan, self._problem(replanner))
        if number == 1:
            self.engine = PipelinedEngine(engine, priced, process.clock)
        else:
            self.engine.add(number, engine, priced)
        self._open[number] = opened
        running.add_done_callback(lambda _: self._over(opened))
        return opened

    async def _engine(
        self,
        number: int,
        replanner: ServingReplanner,
        deployment: Deployment,
        on_event: Callable[[Noted | progress.Progress], None],
        stack: AsyncExitStack,
    ) -> tuple[ServingEngine, ServingJob]:
        loaded, process = self.loaded, self.process
        model, profiles = loaded.model, process.known.profiles.values()
        # Other backends compute all rows of a piece in one product, whose bits depend on the number of rows.
        tiled = not (model.whole or model.at_once) and all(profile.backend == "torch" for profile in profiles)
        # A head or draft model is in memory once, so further pipelines guess from repetitions in the text.
        guesser = loaded.guesser if number == 1 else None
        states = (guesser.head.reads, guesser.state_size) if isinstance(guesser, HeadModel) else ("hidden", 0)
        job = serving_job(
            *(model, replanner.job, process.peer, deployment.plan, loaded.weights, self.request),
            tiled=tiled,
            balanced_at=balance_tokens(model.graph),
            states=states,
        )
        proposer = None
        if guesser is not None:
            proposer = await load_guesser(guesser, loaded.machine.backend, job.options, job.vocabulary, stack)
        engine = ServingEngine(
            *(job, process.host(loaded.machine), deployment),
            replanner=replanner,
            names=process.known.names,
            incarnation=1,
            on_progress=on_event,
            proposer=proposer,
        )
        return engine, job

    def _news_of(self, number: int) -> Callable[[Noted | progress.Progress], None]:
        return self.on_event if number == 1 else lambda event: self.on_event(PipelineNews(number, event))

    def _problem(self, replanner: ServingReplanner) -> Problem:
        """The pipeline's planning problem with all peers that have been in the pool so far."""
        peers = self.priced(tuple(self.process.known.profiles.values()))
        return msgspec.structs.replace(replanner.problem, peers=peers)

    # --------------------------------------------------------------------------------------------- more, and fewer

    async def _run(self) -> None:
        """Open and dissolve pipelines until cancelled."""
        self._free_since_s = dict.fromkeys(self.process.known.profiles, self.process.clock.now_s() - FREE_S)
        opening: asyncio.Task[None] | None = None
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                try:
                    members = await self.process.pool.pool()
                except FusionError as error:
                    log.info("can't list the pool: %s", error)
                    continue
                await self._look_after(members)
                await self._try_out()
                if opening is None or opening.done():
                    if opening is not None:
                        opening.result()
                    opening = asyncio.create_task(self._open_another(members))
        finally:
            if opening is not None:
                opening.cancel()
                await asyncio.wait({opening})

    async def _look_after(self, members: tuple[PoolMember, ...]) -> None:
        """Price pipelines with a new plan, and dissolve those that can't go on while another one computes."""
        leaving = {member.view.peer: member.named for member in members if member.view.state == "draining"}
        for pipeline in tuple(self._open.values()):
            plan = pipeline.engine.deployment.plan
            if plan.version != pipeline.version:
                pipeline.version = plan.version
                pipeline.try_at_s = 0.0
                self.engine.routing.open(pipeline.number, _pace(plan, self._problem(pipeline.replanner)))
            gone = sorted(leaving[stage.peer] for stage in plan.stages if stage.peer in leaving)
            why = ""
            if pipeline.engine.status.state == "waiting":
                why = "it waits for a machine"
            elif gone:
                why = f"{', '.join(gone)} leaves"
            if self._lasts(pipeline, why) and self.engine.ready - {pipeline.number}:
                await self._dissolve(pipeline, f"{why}, and its texts go on in other pipelines")

    async def _try_out(self) -> None:
        """Measure one of the pipelines whose speed is unknown or was measured long ago, if there is a choice at all."""
        now_s, texts = self.process.clock.now_s(), self.engine.routing.texts
        for pipeline in tuple(self._open.values()) if len(self._open) > 1 else ():
            is_due = now_s >= pipeline.try_at_s and (not pipeline.try_at_s or any(texts.values()))
            if is_due and not texts[pipeline.number]:
                measured = await self.engine.try_out(pipeline.number)
                pipeline.try_at_s = now_s + (TRY_OUT_S if measured else RETRY_S)
                return

    def _lasts(self, pipeline: OpenPipeline, why: str) -> bool:
        """Return whether a pipeline's trouble has lasted for `DISSOLVE_S`."""
        now_s = self.process.clock.now_s()
        if not why:
            pipeline.trouble_since_s = None
        elif pipeline.trouble_since_s is None:
            pipeline.trouble_since_s = now_s
        return pipeline.trouble_since_s is not None and now_s - pipeline.trouble_since_s >= DISSOLVE_S

    async def _open_another(self, members: tuple[PoolMember, ...]) -> None:
        """Open a further pipeline if there are free machines for one that pays."""
        try:
            if self.process.clock.now_s() < self._pause_until_s:
                return
            found = await self._further(members)
            if found is None:
                return
            replanner, plan = found
            async with self.engine.changing, AsyncExitStack() as stack:
                self.announce(replanner.job, stack)
                deployment = await replanner.make_real(plan)
                opened = await self._opened(replanner, deployment, stack)
                opened.stack = stack.pop_all()
            self.on_event(PipelineOpened(opened.number, deployment.plan, dict(self.process.known.names)))
        except FusionError as error:
            self._pause_until_s = self.process.clock.now_s() + RETRY_S
            why = error.message.rstrip(".")
            self.on_event(Noted(f"no further pipeline: {why}; machines are looked for again in {RETRY_S:.0f} s"))

    async def _further(self, members: tuple[PoolMember, ...]) -> tuple[ServingReplanner, Plan] | None:
        """Return the plan of a further pipeline on the machines that are free, with what gets it."""
        oldest = next(iter(self._open.values()), None)
        if oldest is None:
            return None
        model = self.loaded.model.files.name
        replanner = ServingReplanner(
            pool=self.process.pool,
            job=JobId(f"{job_name(model)}-{secrets.token_hex(4)}"),
            title=f"serve {model}, pipeline {self._last_number + 1}",
            steps=0,
            problem=oldest.replanner.problem,
            policy=oldest.replanner.policy,
            grace_s=oldest.replanner.grace_s,
            excluded=oldest.replanner.excluded,
            barred=oldest.replanner.barred,
            machines=MachineHistory(self.process.clock, self.process.note),
            faulty_peers=oldest.replanner.faulty_peers,
        )
        free = self._free(replanner, members)
        busy = sum(owner_busy(one.engine.plan.stages, self._problem(one.replanner)) for one in self._open.values())
        problem = self._problem_of(replanner.problem, free)
        seen = (problem.peers, problem.owner, busy)
        if not free or seen == self._tried:
            return None
        fastest = self.request.goal != "throughput"
        plan = await in_background(partial(further_pipeline, problem, oldest.engine.plan, busy, fastest=fastest))
        if plan is None:
            self._tried = seen
            return None
        replanner.problem = problem
        if self.request.goal == "throughput":
            plan = without_standbys(plan)
        return replanner, plan

    def _free(self, replanner: ServingReplanner, members: tuple[PoolMember, ...]) -> tuple[PoolMember, ...]:
        """Machines that have been free for `FREE_S`, without further parts of devices that serve this model already."""
        now_s, jobs = self.process.clock.now_s(), {one.replanner.job for one in self._open.values()}
        working = [member for member in members if member.view.job in jobs]
        free = {member.view.peer: member for member in one_part_each(replanner.spare(members), working)}
        self._free_since_s = {peer: self._free_since_s.get(peer, now_s) for peer in free}
        return tuple(member for peer, member in free.items() if now_s - self._free_since_s[peer] >= FREE_S)

    def _problem_of(self, problem: Problem, free: tuple[PoolMember, ...]) -> Problem:
        """The planning problem of a further pipeline: the free machines, and what the others leave of this one."""
        owner = problem.owner
        if owner is not None:
            mine = sum(
                stage.memory_bytes
                for one in self._open.values()
                for stage in one.engine.plan.stages
                if stage.peer == owner.peer
            )
            owner = msgspec.structs.replace(owner, memory_bytes=max(0, owner.memory_bytes - mine))
        chosen = {member.view.peer: member.profile for member in free}
        priced = self.priced(tuple({**self.process.known.profiles, **chosen}.values())) if free else ()
        return msgspec.structs.replace(
            problem,
            peers=tuple(profile for profile in priced if profile.peer in chosen),
            links=near_links(free) if self.request.local is None else {},
            owner=owner,
        )

    async def _dissolve(self, pipeline: OpenPipeline, why: str) -> None:
        """Close a pipeline. Its texts go on in others, and its machines are free."""
        if self._open.pop(pipeline.number, None) is None:
            return
        self.on_event(Noted(f"pipeline {pipeline.number} is dissolved: {why}"))
        error = pipeline.running.exception() if pipeline.running.done() and not pipeline.running.cancelled() else None
        self.engine.remove(pipeline.number, error)
        await pipeline.stack.aclose()

    def _over(self, pipeline: OpenPipeline) -> None:
        """Handle the end of an engine that was not asked to end."""
        if pipeline.number not in self._open:
            return
        error = None if pipeline.running.cancelled() else pipeline.running.exception()
        if len(self._open) == 1:
            del self._open[pipeline.number]
            self.engine.remove(pipeline.number, error)
            return
        why = error.message if isinstance(error, FusionError) else str(error or "its engine has ended")
        self._dissolving.append(asyncio.ensure_future(self._dissolve(pipeline, why.rstrip("."))))

    # ------------------------------------------------------------------------------------------------------ ending

    async def _close_all(self) -> None:
        """End all pipelines. No text moves any more."""
        self.engine.close()
        pipelines = tuple(self._open.values())
        self._open.clear()
        await asyncio.gather(*self._dissolving, *(pipeline.stack.aclose() for pipeline in pipelines))

    async def _fail_with_the_last(self) -> None:
        """Raise the error with which the last pipeline has ended."""
        if self.engine.ended.done() and (error := self.engine.ended.exception()) is not None:
            raise error


def _pace(plan: Plan, problem: Problem) -> Pace:
    token_s, prompt_token_s = pace_figures(plan, problem)
    return Pace(token_s=token_s, prompt_token_s=prompt_token_s, sessions=len(token_s))


def without_standbys(plan: Plan) -> Plan:
    """Return the plan without warm standbys; their machines are free."""
    return msgspec.structs.replace(plan, standbys=(), snapshot_every=0)


async def _ready_or_failed(engine: ServingEngine, running: asyncio.Future[None], patience_s: float | None) -> None:
    """Wait until the engine is ready. Raises its error if it ends before, and `ExecutionError` if it waits for a
    machine for `patience_s`."""
    waiting = asyncio.ensure_future(engine.ready())
    stuck = asyncio.ensure_future(_stuck(engine, patience_s))
    try:
        await asyncio.wait({waiting, running, stuck}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        if stuck.done():
            stuck.result()
        await waiting
    finally:
        waiting.cancel()
        stuck.cancel()
        await asyncio.wait({waiting, stuck})


async def _stuck(engine: ServingEngine, patience_s: float | None) -> None:
    """Raise `ExecutionError` when the engine has waited for a machine for `patience_s`; None: for ever."""
    waited_s = 0.0
    while patience_s is None or waited_s < patience_s:
        await asyncio.sleep(LOOK_S)
        waited_s = waited_s + LOOK_S if engine.is_waiting else 0.0
    raise ExecutionError("a machine was lost before the pipeline was ready.")


async def _end(engine: ServingEngine, running: asyncio.Future[None]) -> None:
    engine.stop("the server is stopping")
    await asyncio.wait({running})
    await engine.close("done")


async def _ended(process: OwnerProcess, job: JobId, note: ServedNote) -> None:
    note.close(reported=await report_state(process.pool, job, "done", "the server has ended"))


async def _cancelled(task: asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
