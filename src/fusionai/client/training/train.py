"""Runs a training job from its recipe and resumes it where it stopped: the job owner's side of `fusion train`.

`train` prepares, plans, has the broker adopt the plan, drives the job and reports. If it is stopped before the job has
started, everything is cancelled; afterwards, the step is finished and a checkpoint is written.

`client.training.job_directory` checks whether a directory may be continued, `client.training.preparation` reads data
and model, `training.driver` drives the job; `cli.training.train` prints the events."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fusionai.backends.tolerance import TOLERANCES
from fusionai.client.pool.beginning import LeftQueue, Waiting, begin, nobody
from fusionai.client.pool.faults import FaultRecords
from fusionai.client.pool.job_process import (
    GAVE_WAY,
    STOPPED_BY_MEMBER,
    Met,
    Noted,
    OwnerProcess,
    OwnMachine,
    beside,
    own_machine,
    owner_profile,
)
from fusionai.client.pool.replanning import Distrusted, MachineHistory, TrainingReplanner, distrusted
from fusionai.client.pool.reporting import Reporting, report_state
from fusionai.client.pool.session import PoolMember, known_owner, owner_membership
from fusionai.client.pool.watch import PoolWatch, watch_trust
from fusionai.client.pool.work import work_reports
from fusionai.client.training.job_directory import (
    JobRecords,
    check_checkpoint,
    check_recipe,
    encode_recipe,
    has_directory,
    job_id,
    open_directory,
)
from fusionai.client.training.outcome import TrainingResult, already_over, result_of
from fusionai.client.training.preparation import (
    PreparedJob,
    checking,
    checkpoint_header,
    excluded_peers,
    prepare,
    standing_problem,
)
from fusionai.client.training.replica_crews import ReplicaPart
from fusionai.corpus.recipe import Recipe
from fusionai.corpus.schedule import early_rounds, learning_rate
from fusionai.execution.connections import Deployment
from fusionai.primitives.errors import ExecutionError, FusionError, RefusedError, TransportError
from fusionai.primitives.ids import JobId, PeerId, short
from fusionai.primitives.privacy import keeps_ends
from fusionai.primitives.process import in_background, set_aside_what_stays
from fusionai.scheduling.problem.types import PeerProfile, Plan
from fusionai.scheduling.training.replicated import with_replicas
from fusionai.storage.commits import CommitJournal
from fusionai.storage.reader import forget_after, open_latest, sweep
from fusionai.storage.rundir import RunDirectory
from fusionai.training import progress
from fusionai.training.checkpoints import Checkpoints
from fusionai.training.deployment import TrainingJob
from fusionai.training.driver import Driver
from fusionai.wire.messages import StageOptions

UNSAVED_ENDS: Final = (
    "warning: this process runs stages, which have no standby: if it dies, the job restarts from its newest "
    "checkpoint, and with [job] checkpoint_every = 0 there is none before the end"
)


@dataclass(frozen=True, slots=True)
class Planned:
    """The first plan. `members`: profiles of the members of the pool and of the owner. `first_step`: steps of the job
    that were over when this replica started."""

    job: JobId
    plan: Plan
    members: tuple[PeerProfile, ...]
    prepared: PreparedJob
    first_step: int = 0


RunEvent = Noted | Planned | Met | progress.Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of a run. `epilogue` runs with the finished driver before the stages are released (for the demo's
    completion)."""

    home: Path
    invitation: str | None = None
    device: str = "auto"
    threads: int | None = None
    save_base: bool = False
    wait: bool = False
    """Whether the job waits in the queue if it finds no machines, with this priority class (empty: the usual one)."""
    priority: str = ""
    epilogue: Callable[[Driver, PreparedJob], Awaitable[None]] | None = None


async def train(
    recipe: Recipe,
    options: TrainOptions,
    *,
    on_event: Callable[[RunEvent], None],
    stop: asyncio.Event,
    part: ReplicaPart | None = None,
) -> TrainingResult:
    """Run or resume the job. One that had to give way to a more urgent job goes on when it has machines again, if it
    may wait for them. `part`: set if this is one of several replicas. Raises `RecipeError`, `ModelError`,
    `DataError`, `PlanError`, `TransportError`, `RefusedError`, `StorageError`, `ExecutionError` (a stage failed;
    running the recipe again resumes)."""
    while True:
        result = await _started(recipe, options, on_event, stop, part)
        if result.stopped != GAVE_WAY or not options.wait or stop.is_set():
            return result
        on_event(
            Noted(f"stopped after {result.steps} steps: {GAVE_WAY}; it waits in the queue and goes on from there.")
        )


async def _started(
    recipe: Recipe,
    options: TrainOptions,
    on_event: Callable[[RunEvent], None],
    stop: asyncio.Event,
    part: ReplicaPart | None,
) -> TrainingResult:
    """Run the job until it is done or stopped. Raises as `train`."""
    # A machine in no pool must not create the job's directory; a job that is done needs no pool.
    membership = None if has_directory(recipe) else await owner_membership(options.home, options.invitation)
    directory = open_directory(recipe)
    with CommitJournal(directory.journal) as journal:
        check_recipe(recipe, directory, journal)
        sweep(directory.checkpoints)
        forget_after(directory.checkpoints, journal.committed)  # checkpoints of steps that were rolled back
        if (over := already_over(recipe, directory, journal)) is not None:
            on_event(Noted(over))
            owner = known_owner(options.home)
            name = JobId(recipe.job.name) if owner is None else job_id(recipe, owner.peer, directory)
            return result_of(recipe, directory, journal, name, None)
        on_event(Noted("connecting to the pool"))
        membership = membership or await owner_membership(options.home, options.invitation)
        privacy = recipe.privacy
        process = OwnerProcess(options.home, membership, privacy.level, on_event, confidential=privacy.confidential)
        run = _Run(recipe, options, directory, journal, process, on_event, stop, part)
        working = asyncio.create_task(run.run())
        asked_early = asyncio.create_task(_cancel_unless(run.driving, stop, working))
        try:
            return await working
        except LeftQueue as error:
            on_event(Noted(error.message))
            return result_of(recipe, directory, journal, job_id(recipe, membership.peer, directory), STOPPED_BY_MEMBER)
        except asyncio.CancelledError:
            dropped = None if part is None else part.dropped
            if dropped is None and (run.driving.is_set() or not stop.is_set()):
                raise
            return result_of(
                recipe, directory, journal, job_id(recipe, membership.peer, directory), dropped or "Ctrl-C"
            )
        finally:
            asked_early.cancel()
            working.cancel()
            await asyncio.wait({working})


@dataclass(frozen=True, slots=True)
class _Begun:
    """A job with its first plan. `saved`: step of the newest checkpoint, -1 without one."""

    prepared: PreparedJob
    replanner: TrainingReplanner
    deployment: Deployment
    faulty: tuple[Distrusted, ...]
    saved: int


@dataclass
class _Run:
    """One start of the job. `driving` is set before the broker starts the job; from then on a stop ends it cleanly
    instead of cancelling it."""

    recipe: Recipe
    options: TrainOptions
    directory: RunDirectory
    journal: CommitJournal
    process: OwnerProcess
    on_event: Callable[[RunEvent], None]
    stop: asyncio.Event
    part: ReplicaPart | None
    driving: asyncio.Event = field(default_factory=asyncio.Event)
    reports: bool = False
    """Whether the job's end is reported to the broker by what follows the driver. A job that fails before is reported
    here: otherwise its machines would wait for its owner."""

    def warn(self, text: str) -> None:
        self.process.note(f"warning: {text}")

    async def run(self) -> TrainingResult:
        async with self.process.pool:
            # Quick checks come before long work: first the broker and the device, then data and model.
            members = await self._look()
            async with own_machine(
                self.options.device, self.options.threads, self.options.home, self.process.note
            ) as machine:
                try:
                    return await self._drive(machine, await self._begin(machine, members))
                except (TransportError, RefusedError):
                    raise  # the broker is away or runs no such job
                except FusionError as error:
                    if self.driving.is_set() and not self.reports:
                        job = job_id(self.recipe, self.process.peer, self.directory)
                        await report_state(self.process.pool, job, "failed", error.message)
                    raise

    async def _look(self) -> tuple[PoolMember, ...] | None:
        """Return the pool's members; None while its broker is away, if the job already has a plan. Raises
        `TransportError` otherwise, `PlanError` if the pool has no usable member."""
        try:
            members = await self.process.pool.pool()
        except TransportError:
            if self.journal.plan is None:
                raise
            return None
        if not members and not self.options.wait:
            raise nobody(self.process.pool.membership.pool, (), self.process.trust.barred)
        return members

    async def _begin(self, machine: OwnMachine, members: tuple[PoolMember, ...] | None) -> _Begun:
        """Prepare data and model, plan, and have the plan adopted."""
        part, recipe, note = self.part, self.recipe, self.process.note
        prepared = part.prepared if part else await in_background(lambda: prepare(recipe, self.directory, note))
        await in_background(set_aside_what_stays)  # capturing allocates many objects that stay
        reader = await in_background(lambda: open_latest(self.directory.checkpoints))
        if reader is not None:
            check_checkpoint(prepared, reader)
        owner = owner_profile(self.process.peer, machine.report)
        faulty = await in_background(lambda: distrusted(self.directory))
        replanner = await self._replanner(prepared, members or (), owner, faulty)
        name = self.process.pool.membership.pool
        waiting = Waiting(self.options.priority, self.process.stopped, self.stop) if self.options.wait else None
        deployment = await begin(
            *(replanner, prepared, owner, members),
            pool_name=name,
            driving=self.driving,
            note=note,
            waiting=waiting,
        )
        plan = deployment.plan
        if part is not None and members:
            part.weigh(plan, members)
        self.process.note_trust(plan)
        # The number of replicas is fixed for all later plans, because the order of sums depends on it.
        replanner.problem = with_replicas(replanner.problem, plan.replicas)
        self.directory.keep_recipe(encode_recipe(recipe))
        self.journal.start_incarnation()
        present = (*(member.profile for member in members or () if member.is_present), owner)
        self.on_event(Planned(replanner.job, plan, present, prepared, part.first_step if part else 0))
        if keeps_ends(recipe.privacy.level) and not recipe.job.checkpoint_every:
            note(UNSAVED_ENDS)
        note(checking(recipe, plan))
        if reader is not None or self.journal.committed:
            base = 0 if reader is None else reader.step
            note(f"resuming from the checkpoint of step {base}; {self.journal.committed} steps are committed")
        return _Begun(prepared, replanner, deployment, faulty, -1 if reader is None else reader.step)

    async def _replanner(
        self,
        prepared: PreparedJob,
        members: tuple[PoolMember, ...],
        owner: PeerProfile,
        faulty: tuple[Distrusted, ...],
    ) -> TrainingReplanner:
        recipe, part = self.recipe, self.part
        return TrainingReplanner(
            pool=self.process.pool,
            job=job_id(recipe, self.process.peer, self.directory),
            title=recipe.job.name if part is None else f"{recipe.job.name}, replica {part.number}",
            steps=recipe.job.steps,
            problem=await in_background(lambda: standing_problem(prepared, members, owner)),
            policy=recipe.faults.takeover,
            grace_s=recipe.faults.grace_s,
            tolerance=TOLERANCES["float32" if recipe.train.precision == "fp32" else "bfloat16"].loss,
            excluded=lambda members: frozenset(
                (*excluded_peers(recipe, members), *(part.excluded(members) if part else ()))
            ),
            barred=lambda: self.process.trust.barred,
            journal=self.journal,
            directory=self.directory,
            machines=MachineHistory(self.process.clock, self.process.note),
            faulty_peers={one.peer for one in faulty},
        )

    async def _drive(self, machine: OwnMachine, begun: _Begun) -> TrainingResult:
        """Run the driver to the job's end, with everything that follows its progress."""
        process, job = self.process, begun.replanner.job
        receivers: list[Callable[[progress.Progress], None]] = []

        def watched(event: progress.Progress) -> None:
            for receive in receivers:
                receive(event)

        reporting = Reporting(process.pool, job, watched)
        plan, board = begun.deployment.plan, self.recipe.output.tensorboard
        records = JobRecords(self.directory, job, process.peer, plan.version, tensorboard=board, warn=self.warn)
        work = work_reports(begun.replanner, self.journal, begun.deployment.plan, process.peer, self.warn)
        faults = FaultRecords(
            self.directory, plan, process.known.names, process.clock, say=reporting.note, warn=self.warn
        )
        driver = self._driver(machine, begun, watched)
        for one in begun.faulty:
            name = process.known.names.get(one.peer) or short(PeerId(one.peer))
            process.note(f"{name} gets no work from this job: {one.reason}")
        watch = PoolWatch(begun.replanner, driver, process.peer, process.clock)
        receivers += [reporting.see, records.see, faults.see, watch.see, self.on_event]
        reason, noticed, self.reports = "interrupted", (), True
        try:
            with beside(
                _stop_when(self.stop, driver, lambda: "Ctrl-C"),
                _stop_when(process.stopped, driver, lambda: process.stop_reason),
                reporting.run(),
                work.run(),
                watch.run(),
                watch_trust(process.trust, driver),
            ):
                stopped, reason = await self._until_ended(driver, begun.prepared)
        except FusionError as error:
            reason = error.message
            raise
        finally:
            await driver.close(reason)
            records.close()
            noticed = faults.close()
            if reason != "interrupted":  # after an interruption the broker's answer is not waited for
                await work.close()
                await reporting.close("done" if reason.startswith(("done", "stopped")) else "failed", reason)
        return result_of(self.recipe, self.directory, self.journal, job, stopped, noticed)

    def _driver(self, machine: OwnMachine, begun: _Begun, on_progress: Callable[[progress.Progress], None]) -> Driver:
        prepared, part = begun.prepared, self.part
        captured = prepared.captured
        checkpoints = Checkpoints(
            self.directory.checkpoints,
            checkpoint_header(self.recipe, prepared),
            files=prepared.files,
            keep=self.recipe.job.keep_checkpoints,
            unread=lambda: captured.source.initial(captured.unread(), self.recipe.job.seed),
        )
        driver = Driver(
            _training_job(self.recipe, prepared, begun.replanner.job, self.process.peer, self.options, part),
            self.process.host(machine),
            begun.deployment,
            journal=self.journal,
            checkpoints=checkpoints,
            saved=begun.saved,
            replanner=begun.replanner,
            on_progress=on_progress,
            exchange=None if part is None else part.exchange,
        )
        if part is not None:
            part.driver = driver
        return driver

    async def _until_ended(self, driver: Driver, prepared: PreparedJob) -> tuple[str | None, str]:
        """Run the driver. Returns why the job was stopped, None if it is done, and a sentence about its end."""
        ended = await driver.run()
        if ended.failed is not None:
            reason = _named(ended.failed.rstrip("."), self.process.known.names)
            raise ExecutionError(
                f"the job failed at step {ended.steps}: {reason}.",
                hint=f"Run the command again to resume: {self.journal.committed} steps are committed and not lost.",
            )
        if self.part is not None:
            await self.part.exchange.settled()
        if self.options.epilogue is not None and ended.stopped is None:
            await self.options.epilogue(driver, prepared)
        if ended.early is not None:
            self.process.note(f"ending early after {ended.steps} steps: {ended.early}")
            return ended.stopped, f"done early: {ended.early}"
        return ended.stopped, "done" if ended.stopped is None else f"stopped: {ended.stopped}"


def _named(reason: str, names: Mapping[str, str]) -> str:
    """Return `reason` with the names of peers added to their ids."""
    for peer, name in names.items():
        reason = reason.replace(f"peer {short(PeerId(peer))}", f"{name} ({short(PeerId(peer))})")
    return reason


def _training_job(
    recipe: Recipe,
    prepared: PreparedJob,
    job: JobId,
    owner: PeerId,
    options: TrainOptions,
    part: ReplicaPart | None,
) -> TrainingJob:
    evaluation, replicas = recipe.evaluation, recipe.replicas
    first_step, total_steps = (0, recipe.job.steps) if part is None else (part.first_step, part.total_steps)
    every = 0 if evaluation is None else (evaluation.every or recipe.job.steps)
    rounds: dict[str, Any] = {}
    if replicas is not None:
        rounds = {
            "sync_every": replicas.every,
            "sync_codec": replicas.codec,
            "sync_lag": replicas.overlap,
            "sync_rate": replicas.learning_rate,
            "sync_momentum": replicas.momentum,
            "sync_steps": recipe.job.steps,
            "sync_begun": first_step,
            "sync_early": early_rounds(replicas, recipe.train, total_steps),
        }
    return TrainingJob(
        job=job,
        owner=owner,
        graph=prepared.captured.graph,
        options=StageOptions(
            seed=recipe.job.seed,
            precision=recipe.train.precision,
            optimizer=recipe.optimizer,
            microbatches=recipe.train.microbatches,
            takeover=recipe.faults.numerics,
            base_stays=recipe.adapter is not None,
            **rounds,
        ),
        steps=recipe.job.steps,
        learning_rate=lambda step: learning_rate(recipe.train, total_steps, first_step + step),
        clip_norm=recipe.train.clip_norm,
        data=prepared.source,
        state=prepared.captured.state,
        checkpoint_every=recipe.job.checkpoint_every,
        save_base=options.save_base,
        evaluate_every=every if prepared.source.evaluation_batches else 0,
        evaluation_batches=prepared.source.evaluation_batches,
        keep_best=evaluation is not None and evaluation.keeps_best,
        patience=None if evaluation is None else evaluation.patience,
        minimum_improvement=0.0 if evaluation is None else evaluation.minimum_improvement,
        tokens_per_microbatch=prepared.tokens_per_microbatch,
        secret=secrets.token_bytes(32) if recipe.checks else b"",
    )


async def _stop_when(event: asyncio.Event, driver: Driver, reason: Callable[[], str]) -> None:
    await event.wait()
    driver.stop(reason())


async def _cancel_unless(driving: asyncio.Event, stop: asyncio.Event, working: asyncio.Task[TrainingResult]) -> None:
    """Cancel `working` on a stop, if the job has not started yet."""
    await stop.wait()
    if not driving.is_set():
        working.cancel()
