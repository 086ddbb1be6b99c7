"""Runs a training job from its recipe and resumes it where it stopped: the job owner's side of `fusion train`.

`train` prepares, plans, has the broker adopt the plan, drives the job and reports. If it is stopped before the job has
started, everything is cancelled; afterwards, the step is finished and a checkpoint is written.

`client.training.job_directory` checks whether a directory may be continued, `client.training.preparation` reads data
and model, `training.driver` drives the job; `cli.train` prints the events."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fusionai.backends.interface import DeviceReport
from fusionai.backends.registry import open_backend
from fusionai.backends.tolerance import TOLERANCES
from fusionai.client.pool.background import in_background
from fusionai.client.pool.beginning import begin, nobody
from fusionai.client.pool.distrusted import distrusted
from fusionai.client.pool.fault_records import FaultRecord, FaultRecords
from fusionai.client.pool.fault_report import stages_in_words
from fusionai.client.pool.job_trust import JobTrust, job_trust
from fusionai.client.pool.owner import known_owner, owner_membership
from fusionai.client.pool.replanning import Replanner, adopted_plan, is_present
from fusionai.client.pool.session import Member, PoolSession
from fusionai.client.pool.trust_watch import watch_circle
from fusionai.client.pool.watch import PoolWatch
from fusionai.client.training.checkpoint_header import checkpoint_header
from fusionai.client.training.job_directory import (
    check_checkpoint,
    check_recipe,
    has_directory,
    job_id,
    keep_recipe,
    open_directory,
)
from fusionai.client.training.preparation import Prepared, excluded_peers, prepare, standing_problem
from fusionai.client.training.records import JobRecords
from fusionai.client.training.replica import ReplicaPart
from fusionai.client.training.reporting import Reporting
from fusionai.coordination.training.evaluations import Evaluation, standing
from fusionai.corpus.early_rounds import early_rounds
from fusionai.corpus.recipe import Recipe
from fusionai.corpus.schedule import learning_rate
from fusionai.execution.compute import ComputeThread
from fusionai.execution.host import Host
from fusionai.primitives.clock import SystemClock
from fusionai.primitives.errors import ExecutionError, FusionError, TransportError
from fusionai.primitives.ids import JobId, PeerId, short
from fusionai.primitives.privacy import keeps_ends
from fusionai.primitives.process import set_aside_what_stays
from fusionai.scheduling.problem.types import PeerProfile, Plan, TolerantTakeover
from fusionai.scheduling.training.replicated import with_replicas
from fusionai.storage.commits import CommitJournal
from fusionai.storage.manifest import best_checkpoint, step_of
from fusionai.storage.reader import forget_after, latest, open_latest, sweep
from fusionai.storage.rundir import RunDirectory
from fusionai.training import progress
from fusionai.training.checkpoints import Checkpoints
from fusionai.training.deployment import TrainingJob
from fusionai.training.driver import Driver
from fusionai.transport.enrolment import Membership
from fusionai.wire.messages import StageOptions

UNSAVED_ENDS: Final = (
    "warning: this process runs stages, which have no standby: if it dies, the job restarts from its newest "
    "checkpoint, and with [job] checkpoint_every = 0 there is none before the end"
)


@dataclass(frozen=True, slots=True)
class Noted:
    """A line for the user about the progress."""

    text: str


@dataclass(frozen=True, slots=True)
class Planned:
    """The first plan. `members`: profiles of the members of the pool and of the owner. `first_step`: steps of the job
    that were over when this replica started."""

    job: JobId
    plan: Plan
    members: tuple[PeerProfile, ...]
    prepared: Prepared
    first_step: int = 0


@dataclass(frozen=True, slots=True)
class Met:
    """Names and addresses of machines that were not known before, by peer id."""

    names: dict[str, str]
    addresses: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])


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
    epilogue: Callable[[Driver, Prepared], Awaitable[None]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    job: JobId
    steps: int
    stopped: str | None
    checkpoint: Path | None
    directory: Path
    losses: tuple[float, ...] = field(default=())
    """Mean loss per committed step, from step 0, as in the journal."""
    faults: tuple[FaultRecord, ...] = ()
    """Faults of this start of the driver, oldest first."""
    tolerant_takeovers: tuple[TolerantTakeover, ...] = ()
    """Takeovers by machines with other numerics, of all starts of the job."""
    best: Evaluation | None = None
    best_checkpoint: Path | None = None
    """Checkpoint with the lowest evaluation loss."""
    early: str | None = None
    """Why the job ended before its last step, None if it did not."""


async def train(
    recipe: Recipe,
    options: TrainOptions,
    *,
    on_event: Callable[[RunEvent], None],
    stop: asyncio.Event,
    part: ReplicaPart | None = None,
) -> TrainingResult:
    """Run or resume the job. `part`: set if this is one of several replicas. Raises `RecipeError`, `ModelError`,
    `DataError`, `PlanError`, `TransportError`, `RefusedError`, `StorageError`, `ExecutionError` (a stage failed;
    running the recipe again resumes)."""
    # A machine in no pool must not create the job's directory; a job that is done needs no pool.
    membership = None if has_directory(recipe) else await owner_membership(options.home, options.invitation)
    directory = open_directory(recipe)
    with CommitJournal(directory.journal) as journal:
        check_recipe(recipe, directory, journal)
        sweep(directory.checkpoints)
        forget_after(directory.checkpoints, journal.committed)  # checkpoints of steps that were rolled back
        if (over := _over(recipe, directory, journal)) is not None:
            on_event(Noted(over))
            owner = known_owner(options.home)
            name = JobId(recipe.job.name) if owner is None else job_id(recipe, owner.peer, directory)
            return _result(recipe, directory, journal, name, None)
        on_event(Noted("connecting to the pool"))
        membership = membership or await owner_membership(options.home, options.invitation)
        driving = asyncio.Event()
        working = asyncio.create_task(
            _run(recipe, options, directory, journal, membership, on_event, stop, driving, part)
        )
        asked_early = asyncio.create_task(_cancel_unless(driving, stop, working))
        try:
            return await working
        except asyncio.CancelledError:
            dropped = None if part is None else part.dropped
            if dropped is None and (driving.is_set() or not stop.is_set()):
                raise
            return _result(recipe, directory, journal, job_id(recipe, membership.peer, directory), dropped or "Ctrl-C")
        finally:
            asked_early.cancel()
            working.cancel()
            await asyncio.wait({working})


async def _run(
    recipe: Recipe,
    options: TrainOptions,
    directory: RunDirectory,
    journal: CommitJournal,
    membership: Membership,
    on_event: Callable[[RunEvent], None],
    stop: asyncio.Event,
    driving: asyncio.Event,
    part: ReplicaPart | None,
) -> TrainingResult:
    """Run the job. `driving` is set before the broker starts the job; from then on a stop ends it cleanly instead of
    cancelling it."""
    asked = asyncio.Event()
    clock = SystemClock()
    names: dict[str, str] = {}
    trust = job_trust(options.home, membership, recipe.privacy.level, confidential=recipe.privacy.confidential)

    def met(members: tuple[Member, ...]) -> None:
        new = {one.view.peer: one.profile.name for one in members if one.profile.name != names.get(one.view.peer, "")}
        if new:
            names.update(new)
            on_event(Met(new, {one.view.peer: one.view.addresses for one in members if one.view.peer in new}))

    async with (
        _compute_thread() as compute,
        PoolSession(membership, trust=trust, on_stop=lambda _job: asked.set(), on_members=met) as pool,
    ):
        # Quick checks come before long work: first the broker and the device, then data and model.
        members = await _look(pool, journal, trust)
        backend, _ = await compute.run(lambda: open_backend("torch", device=options.device, threads=options.threads))
        report, _ = await compute.run(backend.probe)
        note = lambda text: on_event(Noted(text))  # noqa: E731
        prepared = part.prepared if part else await in_background(lambda: prepare(recipe, directory, note))
        host = Host(
            peer=membership.peer,
            backend=backend,
            compute=compute,
            transport=pool.transport,
            fingerprint=report.fingerprint,
            clock=clock,
            seal=trust.seal,
        )
        await in_background(set_aside_what_stays)  # capturing allocates many objects that stay
        job = job_id(recipe, membership.peer, directory)
        reader = await in_background(lambda: open_latest(directory.checkpoints))
        if reader is not None:
            check_checkpoint(prepared, reader)
        owner = owner_profile(membership.peer, report)
        known_liars = await in_background(lambda: distrusted(directory))
        replanner = Replanner(
            pool=pool,
            job=job,
            title=recipe.job.name if part is None else f"{recipe.job.name}, replica {part.number}",
            steps=recipe.job.steps,
            problem=await in_background(lambda: standing_problem(prepared, members or (), owner)),
            policy=recipe.faults.takeover,
            grace_s=recipe.faults.grace_s,
            tolerance=TOLERANCES["float32" if recipe.train.precision == "fp32" else "bfloat16"].loss,
            excluded=lambda members: excluded_peers(recipe, members) | (part.excluded(members) if part else set()),
            barred=lambda: trust.barred,
            journal=journal,
            directory=directory,
            clock=clock,
            say=note,
            liars={one.peer for one in known_liars},
        )
        deployment = await begin(
            replanner,
            prepared,
            owner,
            members,
            pool_name=membership.pool,
            driving=driving,
            note=note,
        )
        if (sentence := trust.sentence(deployment.plan)) is not None:
            note(sentence)
        # The number of replicas is fixed for all later plans, because the order of sums depends on it.
        replanner.problem = with_replicas(replanner.problem, deployment.plan.replicas)
        keep_recipe(recipe, directory)
        journal.start_incarnation()
        present = (*(member.profile for member in members or () if is_present(member)), owner)
        on_event(Planned(job, deployment.plan, present, prepared, part.first_step if part else 0))
        if keeps_ends(recipe.privacy.level) and not recipe.job.checkpoint_every:
            on_event(Noted(UNSAVED_ENDS))
        on_event(Noted(checking(recipe, deployment.plan)))
        if reader is not None or journal.committed:
            base = 0 if reader is None else reader.step
            on_event(Noted(f"resuming from the checkpoint of step {base}; {journal.committed} steps are committed"))
        reporting = Reporting(pool, job, lambda event: watched(event))
        warn = lambda text: on_event(Noted(f"warning: {text}"))  # noqa: E731
        records = JobRecords(
            directory,
            job,
            membership.peer,
            deployment.plan.version,
            tensorboard=recipe.output.tensorboard,
            warn=warn,
        )
        faults = FaultRecords(directory, deployment.plan, names, clock, say=reporting.note, warn=warn)

        def watched(event: progress.Progress) -> None:
            reporting.see(event)
            records.see(event)
            faults.see(event)
            watch.see(event)
            on_event(event)

        driver = Driver(
            _training_job(recipe, prepared, job, membership.peer, options, part),
            host,
            deployment,
            journal=journal,
            checkpoints=_checkpoints(recipe, prepared, directory),
            saved=-1 if reader is None else reader.step,
            replanner=replanner,
            on_progress=watched,
            exchange=None if part is None else part.exchange,
        )
        for one in known_liars:
            on_event(
                Noted(f"{names.get(one.peer) or short(PeerId(one.peer))} gets no work from this job: {one.reason}")
            )
        if part is not None:
            part.driver = driver
        watch = PoolWatch(replanner, driver, membership.peer, clock)
        watchers = [
            asyncio.create_task(_stop_when(stop, driver, "Ctrl-C")),
            asyncio.create_task(_stop_when(asked, driver, "fusion stop")),
            asyncio.create_task(reporting.run()),
            asyncio.create_task(watch.run()),
            asyncio.create_task(watch_circle(trust, driver)),
        ]
        reason, noticed = "interrupted", ()
        try:
            ended = await driver.run()
            if ended.failed is not None:
                reason = _named(ended.failed.rstrip("."), names)
                raise ExecutionError(
                    f"the job failed at step {ended.steps}: {reason}.",
                    hint=f"Run the command again to resume: {journal.committed} steps are committed and not lost.",
                )
            if options.epilogue is not None and ended.stopped is None:
                await options.epilogue(driver, prepared)
            reason = "done" if ended.stopped is None else f"stopped: {ended.stopped}"
            if ended.early is not None:
                reason = f"done early: {ended.early}"
                on_event(Noted(f"ending early after {ended.steps} steps: {ended.early}"))
        except FusionError as error:
            reason = error.message
            raise
        finally:
            for watcher in watchers:
                watcher.cancel()
            await driver.close(reason)
            records.close()
            noticed = faults.close()
            if reason != "interrupted":  # after an interruption the broker's answer is not waited for
                await reporting.close("done" if reason.startswith(("done", "stopped")) else "failed", reason)
        return _result(recipe, directory, journal, job, ended.stopped, noticed)


async def _look(pool: PoolSession, journal: CommitJournal, trust: JobTrust) -> tuple[Member, ...] | None:
    """Return the pool's members; None while its broker is away, if the job already has a plan. Raises `TransportError`
    otherwise, `PlanError` if the pool has no usable member."""
    try:
        members = await pool.pool()
    except TransportError:
        if journal.plan is None:
            raise
        return None
    if not members:
        raise nobody(pool.membership.pool, (), trust.barred)
    return members


@asynccontextmanager
async def _compute_thread() -> AsyncIterator[ComputeThread]:
    compute = ComputeThread()
    try:
        yield compute
    finally:
        compute.close()


def _named(reason: str, names: Mapping[str, str]) -> str:
    """Return `reason` with the names of peers added to their ids."""
    for peer, name in names.items():
        reason = reason.replace(f"peer {short(PeerId(peer))}", f"{name} ({short(PeerId(peer))})")
    return reason


def owner_profile(peer: PeerId, report: DeviceReport) -> PeerProfile:
    return PeerProfile(
        peer=peer,
        name="job owner",
        backend=report.backend,
        device=report.device,
        device_name=report.device_name,
        flops_per_s=report.flops_per_s,
        pace=report.pace,
        memory_bandwidth_bytes_per_s=report.memory_bandwidth_bytes_per_s,
        memory_bytes=report.memory_bytes,
        threads=report.threads,
        fingerprint=report.fingerprint,
        roles=("owner",),
    )


def checking(recipe: Recipe, plan: Plan) -> str:
    """Return a sentence about which stages are spot-checked."""
    if not recipe.checks:
        return "the peers' results are not checked"
    guarded = {guard.stage for guard in plan.guards}
    working = [stage.stage for stage in plan.stages if stage.peer != plan.feed]
    bare = [stage for stage in working if stage not in guarded]
    if not guarded:
        return "the peers' results are not checked: there is no warm standby to recompute them"
    text = f"spot checks: warm standbys recompute part of the work of {stages_in_words(sorted(guarded))}"
    return text if not bare else f"{text}; not checked: {stages_in_words(bare)}"


def _training_job(
    recipe: Recipe,
    prepared: Prepared,
    job: JobId,
    owner: PeerId,
    options: TrainOptions,
    part: ReplicaPart | None,
) -> TrainingJob:
    evaluation, replicas = recipe.evaluation, recipe.replicas
    first_step, total_steps = (0, recipe.job.steps) if part is None else (part.first_step, part.total_steps)
    every = 0 if evaluation is None else (evaluation.every or recipe.job.steps)
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
            sync_every=0 if replicas is None else replicas.every,
            sync_codec="none" if replicas is None else replicas.codec,
            sync_lag=0 if replicas is None else replicas.overlap,
            sync_rate=1.0 if replicas is None else replicas.learning_rate,
            sync_momentum=0.0 if replicas is None else replicas.momentum,
            sync_steps=0 if replicas is None else recipe.job.steps,
            sync_begun=0 if replicas is None else first_step,
            sync_early=(0, 0, 0) if replicas is None else early_rounds(replicas, recipe.train, total_steps),
            base_stays=recipe.adapter is not None,
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


def _checkpoints(recipe: Recipe, prepared: Prepared, directory: RunDirectory) -> Checkpoints:
    header = checkpoint_header(recipe, prepared)
    return Checkpoints(directory.checkpoints, header, files=prepared.files, keep=recipe.job.keep_checkpoints)


def _over(recipe: Recipe, directory: RunDirectory, journal: CommitJournal) -> str | None:
    """Return why there is nothing left to do, None if the job is not done."""
    newest = latest(directory.checkpoints)
    if newest is None:
        return None
    evaluation, steps = recipe.evaluation, journal.committed
    if steps < recipe.job.steps:
        early = _early(recipe, journal)
        ended = early is not None and step_of(newest) == steps
        return f"the job has already ended early, after {steps} steps: {early}" if ended else None
    if evaluation is not None and evaluation.keeps_best and evaluation.every and steps % evaluation.every == 0:
        evaluated = journal.evaluations[-1].step if journal.evaluations else 0
        if evaluated < steps:
            return None
    return f"all {recipe.job.steps} steps are already done"


def _early(recipe: Recipe, journal: CommitJournal) -> str | None:
    """Return why the journalled evaluations end the job before its last step, None if they don't."""
    evaluation, found = recipe.evaluation, journal.evaluations
    if evaluation is None or not found or found[-1].step < journal.committed or journal.committed >= recipe.job.steps:
        return None
    return standing(found, evaluation.minimum_improvement).enough(evaluation.patience)


def _result(
    recipe: Recipe,
    directory: RunDirectory,
    journal: CommitJournal,
    job: JobId,
    stopped: str | None,
    faults: tuple[FaultRecord, ...] = (),
) -> TrainingResult:
    best, adopted = None, adopted_plan(journal)
    if recipe.evaluation is not None and recipe.evaluation.keeps_best:
        best = standing(journal.evaluations).best
    return TrainingResult(
        tolerant_takeovers=() if adopted is None else adopted.tolerant_takeovers,
        best=best,
        best_checkpoint=best_checkpoint(directory.checkpoints, best),
        early=_early(recipe, journal) if stopped is None else None,
        job=job,
        steps=journal.committed,
        stopped=stopped,
        checkpoint=latest(directory.checkpoints),
        directory=directory.root,
        losses=tuple(record.loss for record in journal.records()),
        faults=faults,
    )


async def _stop_when(event: asyncio.Event, driver: Driver, reason: str) -> None:
    await event.wait()
    driver.stop(reason)


async def _cancel_unless(driving: asyncio.Event, stop: asyncio.Event, working: asyncio.Task[TrainingResult]) -> None:
    """Cancel `working` on a stop, if the job has not started yet."""
    await stop.wait()
    if not driving.is_set():
        working.cancel()
