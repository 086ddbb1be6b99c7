"""A training job from its recipe to its end, resumed where it stopped: the owner's side of `fusion train`.

The loop is `train`: prepare, plan, ask the broker to make the plan real, drive, report. Decides what a job's identity
is (its directory and its owner), so that running the same recipe again goes on instead of starting anew.

Neighbours: `client.preparation`, `client.pool_session`, `training.driver`; `cli.train` shows what happens.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec

from fusionai.backends.interface import DeviceReport
from fusionai.backends.registry import open_backend
from fusionai.client.owner import owner_membership
from fusionai.client.pool_session import Grant, Member, PoolSession
from fusionai.client.preparation import Prepared, prepare, problem_for
from fusionai.client.records import JobRecords
from fusionai.corpus.recipe import Recipe
from fusionai.corpus.resume import check_resumable, encode_recipe
from fusionai.corpus.schedule import learning_rate
from fusionai.execution.compute import ComputeThread
from fusionai.execution.member import Host
from fusionai.primitives.clock import SystemClock
from fusionai.primitives.errors import ExecutionError, FusionError, RefusedError
from fusionai.primitives.ids import JobId, PeerId
from fusionai.scheduling.planner import plan
from fusionai.scheduling.types import PeerProfile, Plan
from fusionai.storage.checkpoint import CheckpointHeader
from fusionai.storage.commits import CommitJournal
from fusionai.storage.reader import latest, open_latest, sweep
from fusionai.storage.rundir import RunDirectory
from fusionai.training import progress
from fusionai.training.checkpoints import Checkpoints
from fusionai.training.driver import Driver
from fusionai.training.job import TrainingJob
from fusionai.transport.enrolment import Membership
from fusionai.wire import messages as wire
from fusionai.wire.messages import StageOptions

PLAN_ATTEMPTS: Final = 3
"""A peer may be taken or gone between looking at the pool and asking for it."""
REPORT_EVERY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Noted:
    """A line for people about what is going on."""

    text: str


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan in force; `members`: everybody in the pool when it was made."""

    job: JobId
    plan: Plan
    members: tuple[PeerProfile, ...]
    prepared: Prepared


RunEvent = Noted | Planned | progress.Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """`epilogue` runs with the finished driver before the stages are let go (the demo's completion)."""

    home: Path
    invitation: str | None = None
    device: str = "auto"
    threads: int | None = None
    save_base: bool = False
    epilogue: Callable[[Driver, Prepared], Awaitable[None]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    job: JobId
    steps: int
    stopped: str | None
    checkpoint: Path | None
    directory: Path
    losses: tuple[float, ...] = field(default=())
    """Mean loss per committed step, from step 0, the journal's words."""


async def train(
    recipe: Recipe, options: TrainOptions, *, on_event: Callable[[RunEvent], None], stop: asyncio.Event
) -> TrainingResult:
    """Raises `RecipeError`, `ModelError`, `DataError`, `PlanError`, `TransportError`, `RefusedError`, `StorageError`,
    `ExecutionError` (a stage failed; running the recipe again resumes)."""
    directory = _directory(recipe)
    with CommitJournal(directory.journal) as journal:
        sweep(directory.checkpoints)
        if journal.committed >= recipe.job.steps and latest(directory.checkpoints) is not None:
            on_event(Noted(f"all {recipe.job.steps} steps are done already"))
            return _result(directory, journal, JobId(recipe.job.name), None)
        on_event(Noted("looking for the pool"))
        membership = await owner_membership(options.home, options.invitation)
        prepared = await asyncio.to_thread(prepare, recipe, directory, lambda text: on_event(Noted(text)))
        compute = ComputeThread()
        try:
            return await _run(recipe, options, directory, journal, membership, prepared, compute, on_event, stop)
        finally:
            compute.close()


async def _run(
    recipe: Recipe,
    options: TrainOptions,
    directory: RunDirectory,
    journal: CommitJournal,
    membership: Membership,
    prepared: Prepared,
    compute: ComputeThread,
    on_event: Callable[[RunEvent], None],
    stop: asyncio.Event,
) -> TrainingResult:
    asked = asyncio.Event()
    async with PoolSession(membership, on_stop=lambda _job: asked.set()) as pool:
        backend, _ = await compute.run(lambda: open_backend("torch", device=options.device, threads=options.threads))
        report, _ = await compute.run(backend.probe)
        host = Host(
            peer=membership.peer,
            backend=backend,
            compute=compute,
            transport=pool.transport,
            fingerprint=report.fingerprint,
            clock=SystemClock(),
        )
        job_id = _job_id(recipe, membership.peer, directory)
        reader = await asyncio.to_thread(open_latest, directory.checkpoints)
        base = 0 if reader is None else reader.step
        grant, members = await _make_plan_real(pool, prepared, job_id, _owner_profile(membership.peer, report))
        journal.start_incarnation()
        journal.adopt_plan(grant.plan.version, msgspec.json.encode(grant.plan))
        on_event(Planned(job_id, grant.plan, members, prepared))
        if base or journal.committed:
            on_event(Noted(f"resuming: checkpoint of step {base}, {journal.committed} steps are official"))
        reporting = _Reporting(pool, job_id)
        records = JobRecords(
            directory,
            job_id,
            membership.peer,
            grant.plan.version,
            tensorboard=recipe.output.tensorboard,
            warn=lambda text: on_event(Noted(f"warning: {text}")),
        )

        def watched(event: progress.Progress) -> None:
            reporting.see(event)
            records.see(event)
            on_event(event)

        driver = Driver(
            _training_job(recipe, prepared, job_id, grant, membership.peer, options),
            host,
            journal=journal,
            checkpoints=_checkpoints(recipe, prepared, directory),
            base=base,
            on_progress=watched,
        )
        watchers = [
            asyncio.create_task(_stop_when(stop, driver, "Ctrl-C")),
            asyncio.create_task(_stop_when(asked, driver, "fusion stop")),
            asyncio.create_task(reporting.run()),
        ]
        reason = "interrupted"
        try:
            ended = await driver.run()
            if ended.failed is not None:
                reason = ended.failed
                raise ExecutionError(f"the job failed at step {ended.steps}: {reason}.", hint="Run it again to resume.")
            if options.epilogue is not None:
                await options.epilogue(driver, prepared)
            reason = "done" if ended.stopped is None else f"stopped: {ended.stopped}"
        finally:
            for watcher in watchers:
                watcher.cancel()
            await driver.close(reason)
            records.close()
            await reporting.close("done" if reason.startswith(("done", "stopped")) else "failed", reason)
        return _result(directory, journal, job_id, ended.stopped)


async def _make_plan_real(
    pool: PoolSession, prepared: Prepared, job: JobId, owner: PeerProfile
) -> tuple[Grant, tuple[PeerProfile, ...]]:
    """Look, plan, ask; look again when a peer was taken meanwhile."""
    for attempt in range(PLAN_ATTEMPTS):
        members = await pool.pool()
        usable = tuple(member for member in members if _usable(member, job))
        made = await asyncio.to_thread(plan, problem_for(prepared, usable, owner))
        try:
            grant = await pool.request(job, prepared.recipe.job.name, made, prepared.recipe.job.steps)
        except RefusedError as error:
            if error.code in ("busy", "unknown_peer", "leaving") and attempt + 1 < PLAN_ATTEMPTS:
                continue
            raise
        present = (member.profile for member in members if member.view.state in ("idle", "active"))
        return grant, (*present, owner)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _owner_profile(peer: PeerId, report: DeviceReport) -> PeerProfile:
    return PeerProfile(
        peer=peer,
        name="job owner",
        backend=report.backend,
        device=report.device,
        flops_per_s=report.flops_per_s,
        memory_bytes=report.memory_bytes,
        threads=report.threads,
        fingerprint=report.fingerprint,
        roles=("owner",),
    )


def _usable(member: Member, job: JobId) -> bool:
    return member.view.state == "idle" or (member.view.state == "active" and member.view.job == job)


def _training_job(
    recipe: Recipe, prepared: Prepared, job: JobId, grant: Grant, owner: PeerId, options: TrainOptions
) -> TrainingJob:
    evaluation = recipe.evaluation
    every = 0 if evaluation is None else (evaluation.every or recipe.job.steps)
    return TrainingJob(
        job=job,
        owner=owner,
        plan=grant.plan,
        graph=prepared.captured.graph,
        options=StageOptions(
            seed=recipe.job.seed,
            precision=recipe.train.precision,
            optimizer=recipe.train.optimizer,
            microbatches=recipe.train.microbatches,
            takeover=recipe.faults.takeover,
        ),
        steps=recipe.job.steps,
        learning_rate=lambda step: learning_rate(recipe.train, recipe.job.steps, step),
        clip_norm=recipe.train.clip_norm,
        data=prepared.source,
        state=prepared.captured.state,
        checkpoint_every=recipe.job.checkpoint_every,
        save_base=options.save_base,
        evaluate_every=every if prepared.source.evaluation_batches else 0,
        evaluation_batches=prepared.source.evaluation_batches,
        tokens_per_microbatch=prepared.tokens_per_microbatch,
        members=grant.addresses,
        tickets=grant.tickets,
    )


def _checkpoints(recipe: Recipe, prepared: Prepared, directory: RunDirectory) -> Checkpoints:
    params = prepared.captured.graph.params.values()
    header = CheckpointHeader(
        graph_hash=prepared.graph_hash,
        data_fingerprint=prepared.source.fingerprint,
        recipe=msgspec.to_builtins(recipe),
        aliases={alias: spec.key for spec in params for alias in spec.aliases},
        private_keys=prepared.captured.private_keys,
    )
    return Checkpoints(directory.checkpoints, header, files=prepared.files, keep=recipe.job.keep_checkpoints)


def _directory(recipe: Recipe) -> RunDirectory:
    """Open the job's directory. Raises `RecipeError` if a job of another recipe lives there."""
    directory = RunDirectory(Path(recipe.directory))
    kept = directory.kept_recipe()
    if kept is not None:
        check_resumable(kept, recipe)
    directory.keep_recipe(encode_recipe(recipe))
    return directory


def _job_id(recipe: Recipe, owner: PeerId, directory: RunDirectory) -> JobId:
    digest = hashlib.sha256(f"{owner}\n{directory.root.resolve()}".encode()).hexdigest()
    return JobId(f"{recipe.job.name}-{digest[:8]}")


def _result(directory: RunDirectory, journal: CommitJournal, job: JobId, stopped: str | None) -> TrainingResult:
    return TrainingResult(
        job=job,
        steps=journal.committed,
        stopped=stopped,
        checkpoint=latest(directory.checkpoints),
        directory=directory.root,
        losses=tuple(record.loss for record in journal.records()),
    )


async def _stop_when(event: asyncio.Event, driver: Driver, reason: str) -> None:
    await event.wait()
    driver.stop(reason)


class _Reporting:
    """Tells the broker how the job stands, at most once a second; a broker that is away does not disturb the job."""

    def __init__(self, pool: PoolSession, job: JobId) -> None:
        self._pool = pool
        self._job = job
        self._step = -1
        self._seen = asyncio.Event()

    def see(self, event: progress.Progress) -> None:
        match event:
            case progress.StepDone(record=record):
                self._step = record.step
            case progress.JobReady():
                pass
            case _:
                return
        self._seen.set()

    async def run(self) -> None:
        while True:
            await self._seen.wait()
            self._seen.clear()
            await self._tell("running", "")
            await asyncio.sleep(REPORT_EVERY_S)

    async def close(self, state: Literal["done", "failed"], detail: str) -> None:
        await self._tell(state, detail)

    async def _tell(self, state: Literal["running", "done", "failed"], detail: str) -> None:
        with suppress(FusionError):
            await self._pool.report(wire.JobReport(job=self._job, state=state, step=self._step, detail=detail[:4000]))
