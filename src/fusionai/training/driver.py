"""The driver of a training job: performs the commands of `coordination.training.driver` and reports events to it.

`run` takes an event, lets the machine decide, and performs its commands. The driver itself decides only which messages
belong to the present round; all others are dropped before they become events (recovery rule 1).

`training.rounds` holds the present round, its members and what they report, `training.feed` moves microbatches,
`training.checkpoints` collects state, `storage.commits` is the journal. `execution` runs the stages, including the job
owner's own in this process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from fusionai.coordination.round.interface import (
    AskPlan,
    CommandFailed,
    Distrust,
    DriverEvent,
    EndJob,
    LinkBroken,
    PeerLost,
    ReportCheck,
    ReportFault,
    StopAsked,
)
from fusionai.coordination.round.verification import Check, Inspector, Opinion
from fusionai.coordination.training import interface
from fusionai.coordination.training.driver import DriverMachine
from fusionai.coordination.training.evaluations import Evaluation, standing
from fusionai.coordination.training.interface import DriverCommand
from fusionai.coordination.training.state import DriverPhase
from fusionai.execution.connections import Connections, Deployment, PlanSource
from fusionai.execution.host import Host
from fusionai.execution.training.boundary import Sent, ends
from fusionai.execution.training.member import JobMember
from fusionai.primitives.errors import FusionError, PlanError, TransportError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor
from fusionai.scheduling.problem.types import Plan
from fusionai.scheduling.standby.assignment import without_standbys
from fusionai.storage.commits import CommitJournal, StagePlace
from fusionai.storage.reader import complete_checkpoints, step_of
from fusionai.training import progress
from fusionai.training.checkpoints import Checkpoints, Saving
from fusionai.training.deployment import Batch, Cut, TrainingJob, cut
from fusionai.training.feed import Traffic
from fusionai.training.inspection import Inspection
from fusionai.training.joint_exchange import JointSeat
from fusionai.training.progress import FaultLog, Timeline
from fusionai.training.rounds import JobRound
from fusionai.training.stage_exchange import StageExchange
from fusionai.transport.interface import Channel
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence

log = logging.getLogger(__name__)

Listener = Callable[[progress.Progress], None]

CHECK_S = 120.0
"""Timeout for a verifier's answer, in seconds (chosen)."""


class Driver:
    """Drives one job. Call `await driver.run()`, then optionally `await driver.infer(...)`, then `await
    driver.close()`. `deployment`: the plan to begin with, journalled as the one in force. `saved`: step of the newest
    complete checkpoint, -1 if there is none."""

    def __init__(
        self,
        job: TrainingJob,
        host: Host,
        deployment: Deployment,
        *,
        journal: CommitJournal,
        checkpoints: Checkpoints,
        saved: int,
        replanner: PlanSource,
        on_progress: Listener,
        exchange: JointSeat | None = None,
    ) -> None:
        if (exchange is None) != ((every := job.options.sync_every) == 0):
            raise PlanError(
                f"{job.job} exchanges every {every} steps, but has {'no exchange' if every else 'an exchange'}."
            )
        if host.seal is None:
            raise PlanError(f"{job.job} needs its owner's key to sign placements with; this machine has none.")
        self._job = job
        self._journal = journal
        self._replanner = replanner
        self._on_progress = on_progress
        self._events: asyncio.Queue[DriverEvent] = asyncio.Queue()
        self._asking: asyncio.Task[None] | None = None
        self._rewinding: asyncio.Task[None] | None = None
        self._timeline = Timeline()
        self._faults = FaultLog(on_progress, host.clock.now_s)
        self._ended: EndJob | None = None
        # Newer plan version -> (deployment, reason), until the machine adopts it.
        self._granted: dict[int, tuple[Deployment, str]] = {}
        self._inspection = Inspection(job.secret, job.owner) if job.secret else None
        model = cut(job, deployment.plan)
        self._machine = _machine(job, deployment.plan, model, journal, checkpoints, saved)
        fence = Fence(deployment.plan.version, journal.incarnation, 0)
        self._member = JobMember(host, job.job, job.owner, fence, on_output=self._on_output)
        self._connections = Connections(
            job.job,
            host,
            self._member,
            on_message=self._on_message,
            serve_state=self._serve_state,
            on_lost=self._on_lost,
        )
        self._round = JobRound(
            job,
            host,
            host.seal,
            deployment,
            model,
            fence=fence,
            machine=self._machine,
            connections=self._connections,
            inspection=self._inspection,
            post=self._post,
        )
        self._traffic = Traffic(self._round, self._member)
        self._saving = Saving(self._round, checkpoints, on_progress)
        self._exchange = None if exchange is None else StageExchange(self._round, exchange)

    def _on_output(self, message: wire.Output, tensors: dict[str, HostTensor]) -> None:
        self._traffic.on_output(message, tensors)

    @property
    def fence(self) -> Fence:
        """Fence of the present round."""
        return self._round.fence

    @property
    def deployment(self) -> Deployment:
        """The deployment in force."""
        return self._round.deployment

    # ------------------------------------------------------------------------------------------------- the loop

    async def run(self) -> EndJob:
        """Attach, restore, train, save. Failures caused by members are not raised; they are in the result."""
        self._perform_all(self._machine.start())
        while self._ended is None:
            event = await self._events.get()
            self._perform_all(self._machine.handle(event))
            self._after(event)
        if self._ended.failed is not None:
            self._traffic.fail(self._ended.failed)
        return self._ended

    def _after(self, event: DriverEvent) -> None:
        calm = self._machine.phase in (DriverPhase.RUNNING, DriverPhase.SAVING, DriverPhase.ENDED)
        if isinstance(event, interface.CheckpointWritten) and event.step > 0 and calm:
            best = self._machine.standing.best if self._job.keep_best else None
            since = None if self._exchange is None else self._exchange.saved(event.step)
            self._saving.prune(best, since)

    def stop(self, reason: str) -> None:
        """Finish the current step, save, end."""
        self._post(StopAsked(reason))

    @property
    def is_waiting(self) -> bool:
        """Whether a stage has no peer to run it."""
        return self._machine.phase is DriverPhase.WAITING

    @property
    def plan(self) -> Plan:
        """The plan in force, without standbys that are lost."""
        living = self._machine.standbys
        return without_standbys(
            self.deployment.plan,
            (standby.peer for standby in self.deployment.plan.standbys if living.get(standby.stage) != standby.peer),
        )

    @property
    def warm_stages(self) -> frozenset[int]:
        """Stages whose standby could take over now."""
        return self._machine.warm_stages

    def shut_out(self, peer: PeerId, reason: str) -> None:
        """Count a peer as lost. Does nothing if it is not connected."""
        self._connections.drop(peer, reason)

    def offer(self, deployment: Deployment, reason: str) -> None:
        """Offer a newer, journalled plan. It is adopted when no step is in progress."""
        version = deployment.plan.version
        if version > self.deployment.plan.version:
            self._granted[version] = (deployment, reason)
            roles = self._round.cut_of(deployment.plan).roles(deployment.plan, self._job.owner)
            self._post(interface.PlanGranted(roles))

    def renew(self, deployment: Deployment) -> None:
        """Use new tickets or addresses for the plan in force."""
        if deployment.plan.version == self.deployment.plan.version:
            self._round.deployment = deployment

    async def close(self, reason: str = "done") -> None:
        """End all tasks. Pending inferences fail with `reason`."""
        if self._asking is not None:
            self._asking.cancel()
        self._saving.cancel()
        if self._exchange is not None:
            self._exchange.close()
        await self._round.close()
        self._traffic.fail(reason)
        await self._connections.close(self.fence, reason)

    def _post(self, event: DriverEvent) -> None:
        self._events.put_nowait(event)

    def _perform_all(self, todo: Sequence[DriverCommand]) -> None:
        for command in todo:
            try:
                self._perform(command)
            except TransportError as error:  # the connection's owner reports the loss as an event
                log.info("%s: %s", type(command).__name__, error)
            except FusionError as error:  # e.g. data that can't be read
                self._post(CommandFailed(str(error)))

    def _perform(self, command: DriverCommand) -> None:
        match command:
            case interface.SendAttach():
                self._begin_round(command)
            case interface.SendSnapshot(stage, step, holder, peer):
                self._round.pass_snapshot(holder, stage, step, peer)
            case interface.SendResume():
                self._resume(command)
            case interface.SendProbe(step):
                self._round.start(self._probe(step))
            case interface.AnnounceReady(base):
                self._on_progress(progress.JobReady(base))
            case interface.FeedMicrobatch(step, microbatch, only):
                self._traffic.feed("train", step, microbatch, self._job.data.microbatch(step, microbatch), only)
            case interface.DecideScale(step, norms):
                self._round.start(self._round.decide_scale(step, norms))
            case interface.JournalCommit(record):
                self._round.start_lasting(self._journal_commit(record, self._places()))
            case interface.SendCommit(record, watermark, save):
                for stage in self._machine.roles.stages:
                    saves = save and self._round.cut.saves(stage)
                    self._round.to(
                        stage,
                        wire.Commit(fence=self.fence, stage=stage, record=record, watermark=watermark, save=saves),
                    )
                if self._exchange is not None:
                    self._exchange.forget(min(watermark, max(0, self._machine.saved)) - 1)
            case interface.StepCommitted(record, losses, replayed):
                self._on_progress(self._timeline.step_done(record, losses, replayed, self._job.tokens_per_step))
                if not replayed and self._machine.phase in (DriverPhase.RUNNING, DriverPhase.SAVING):
                    self._faults.committed(record.step)
                    self._round.prepare_standbys()
            case interface.WriteCheckpoint(step, ask):
                self._saving.write(step, ask=ask)
            case interface.Evaluate(step):
                self._round.start(self._evaluate(step))
            case interface.NameBest(best):
                self._round.start_lasting(self._saving.name_best(best))
            case AskPlan(without, reason, _):
                self._ask_plan(without, reason)
            case interface.StartCheck(check):
                self._start_check(check)
            case interface.GatherEvidence(check):
                self._round.start(self._traffic.bring(check))
            case ReportCheck():
                self._report_check(command)
            case Distrust(peer, reason):
                self._replanner.distrust(peer, reason)
            case interface.Rewind(step):
                self._rewinding = self._round.start_lasting(self._saving.rewind(step, self._journal))
            case ReportFault():
                self._faults.seen(command)
            case interface.ReportRestored():
                self._faults.restored(command)
            case interface.WarnTolerant(_, detail):
                self._on_progress(progress.Warned(f"not bit-exact, which the recipe allows: {detail}"))
            case EndJob():
                self._ended = command
                if command.failed is None:
                    self._faults.committed(command.steps - 1)

    # ---------------------------------------------------------------------------------------------------- rounds

    def _begin_round(self, command: interface.SendAttach) -> None:
        """Cancel what the old round started, then send the new round to all members of the plan."""
        self._round.end(command.fence)
        self._saving.cancel()
        if command.roles.version != self.deployment.plan.version:
            if self._asking is not None:
                self._asking.cancel()
            deployment, reason = self._granted[command.roles.version]
            self._granted = {version: one for version, one in self._granted.items() if version > command.roles.version}
            self._round.adopt(deployment)
            self._faults.adopted(deployment.plan, reason)
        if self._exchange is not None:
            self._exchange.begin_round()
        self._traffic.begin_round()
        self._round.begin(command)

    def _resume(self, command: interface.SendResume) -> None:
        self._round.resume(command)
        self._round.start(self._saving.push_state(command))

    async def _journal_commit(self, record: wire.CommitRecord, places: tuple[StagePlace, ...]) -> None:
        await asyncio.to_thread(self._journal.append, record, places)
        self._post(interface.CommitJournalled(record))

    def _report_check(self, command: ReportCheck) -> None:
        check, outcome = command.check, command.outcome
        if outcome == "disputed":
            self._round.start_lasting(self._journal_dispute(check, (check.peer, *command.partners)))
        self._on_progress(progress.checked(check, outcome, command.reason, self._machine.inspector))

    async def _journal_dispute(self, check: Check, peers: tuple[str, ...]) -> None:
        await asyncio.to_thread(self._journal.dispute, check.first, check.below, peers)

    def _places(self) -> tuple[StagePlace, ...]:
        return tuple(StagePlace(one.peer, *one.blocks, one.replica) for one in self.deployment.plan.stages)

    async def _evaluate(self, step: int) -> None:
        fence = self.fence
        found = Evaluation(step, await self._traffic.evaluate(step))
        kept = await asyncio.to_thread(self._journal.append_evaluation, found)
        known = standing(self._journal.evaluations, self._job.minimum_improvement)
        best = None if known.best is None else known.best.step
        self._on_progress(progress.Evaluated(step, kept.loss, best, known.since))
        self._post(interface.EvaluationDone(step, kept.loss, fence=fence))

    async def _probe(self, step: int) -> None:
        """Invariant 7: a job is ready only after a probe has come back right."""
        fence = self.fence
        self._post(interface.ProbeAnswered(await self._traffic.probe(step), fence=fence))

    async def infer(self, batch: Batch) -> dict[str, HostTensor]:
        """Return job outputs other than the loss (`logits`) for one batch, computed by the pool's stages with the state
        of the last committed step. Raises `ExecutionError` if a stage is lost meanwhile: after the job's end lost
        stages are not restored."""
        return await self._traffic.infer(self._machine.step, batch)

    def _ask_plan(self, without: frozenset[str], reason: str) -> None:
        self._faults.asked(reason)
        if self._asking is not None:
            self._asking.cancel()

        async def ask() -> None:
            waiting = lambda reason: self._on_progress(progress.JobWaiting(reason))  # noqa: E731
            try:
                deployment = await self._replanner.replacement(self.deployment, without, waiting)
                if self._rewinding is not None:
                    await asyncio.wait({self._rewinding})
            except FusionError as error:
                self._post(CommandFailed(f"{reason.rstrip('.')}; {error}"))
            else:
                self.offer(deployment, reason)

        self._asking = self._round.start_lasting(ask())

    # --------------------------------------------------------------------------------------------------- spot checks

    def _start_check(self, check: Check) -> None:
        """Ask a verifier for a recheck; its inputs follow when it is ready. Earlier steps are never checked again."""
        assert self._inspection is not None
        self._inspection.forget(check.first)
        keys = self._inspection.keys(check, sorted(self._round.cut.stages[check.stage].boundary.others))
        if not keys or self._job.options.sync_every:
            void = Opinion(void="some inputs or keys that the recheck needs were not kept")
            self._post(interface.StageChecked(check, void, fence=self.fence))
            return
        self._round.recheck(check, keys)
        self._round.start(self._give_up(check))

    async def _give_up(self, check: Check) -> None:
        """End a check without an opinion after `CHECK_S`, because it holds up the retention watermark."""
        fence = self.fence
        await asyncio.sleep(CHECK_S)
        self._post(
            interface.StageChecked(
                check, Opinion(void=f"the verifier did not answer within {CHECK_S:g} s"), fence=fence
            )
        )

    def _hear_verifier(self, peer: PeerId, message: wire.Rechecked) -> None:
        """Form an opinion from a verifier's results."""
        check = self._machine.spot_checks.check_of(peer, message.stage, message.first, message.below)
        if self._inspection is None or check is None:
            return
        opinion = self._inspection.opinion(check, message, self._inspection.limits(self._job.options, check))
        self._post(interface.StageChecked(check, opinion, fence=self.fence))

    async def _pass_evidence(self, peer: PeerId, message: Sent, tensors: dict[str, HostTensor]) -> None:
        """Pass on a stage's sent tensors to a verifier, if the verifier or the stage is in this process. Raises
        `ExecutionError` if the peer does not run the stage it claims as the sender."""
        _, stage = ends(message)
        check = None if stage is None else self._machine.spot_checks.open_check(stage)
        if check is None or message.fence != self.fence:
            return
        if check.verifier == self._job.owner:
            self._member.send_evidence(peer, message, tensors)
        elif peer == self._job.owner:
            await self._connections.send_state(PeerId(check.verifier), message, tuple(tensors.values()))

    # ---------------------------------------------------------------------------------------------- what arrives

    def _on_message(self, peer: PeerId, message: wire.Message) -> None:
        match message:
            case wire.Pong():
                return
            case wire.Refused(code=code, reason=reason):
                self._connections.drop(peer, f"{wire.REFUSAL_SENTENCES[code]} {reason}".strip())
                return
            case wire.LinkLost(fence=self.fence):
                self._round.start(self._suspect_link(peer, message))
                return
            case _:
                pass
        if getattr(message, "fence", None) != self.fence:
            return
        if isinstance(message, wire.Rechecked):
            self._hear_verifier(peer, message)
            return
        try:
            event = self._round.event_of(message, peer)
        except FusionError as error:
            self._connections.drop(peer, error.message)
            return
        match message:
            case wire.Status():
                self._timeline.clock(message.stage, message.clock_s)
                if self._inspection is not None:
                    self._inspection.attached(peer, message.fingerprint)
            case wire.Enlisted() if self._inspection is not None:
                self._inspection.enlisted(peer, message.fingerprint)
            case wire.Prepared():
                self._timeline.spans(message.stage, message.spans)
                if self._inspection is not None:
                    self._inspection.hear(peer, message)
            case _:
                pass
        if self._exchange is not None:
            self._exchange.heard(message)
        if event is not None:
            self._post(event)

    async def _serve_state(self, peer: PeerId, channel: Channel) -> None:
        while True:
            envelope = await channel.receive()
            match envelope.message:
                case wire.Pong():
                    pass
                case wire.ExchangePart() as message if self._exchange is not None:
                    await self._exchange.pass_on(peer, message, envelope.tensors)
                case wire.Snapshot() as message:
                    self._member.take_snapshot(peer, message, envelope.tensors)
                case wire.Forward() | wire.Backward() | wire.SharedGradient() as message:
                    await self._pass_evidence(peer, message, envelope.tensors)
                case _:
                    await self._saving.take(peer, envelope)

    async def _suspect_link(self, reporter: PeerId, message: wire.LinkLost) -> None:
        """Report a broken link to the machine, unless one of the two peers turns out to be lost."""
        other, fence = PeerId(message.peer), self.fence
        both_remain = await self._connections.both_remain(reporter, other)
        if both_remain and self._machine.needs_links(reporter):
            self._post(LinkBroken(reporter, other, message.reason, fence=fence))

    def _on_lost(self, peer: PeerId, reason: str) -> None:
        text = f"peer {short(peer)} was lost: {reason}"
        if self._ended is not None:
            self._traffic.fail(text)
        self._post(PeerLost(peer, text))


def _machine(
    job: TrainingJob, plan: Plan, model: Cut, journal: CommitJournal, checkpoints: Checkpoints, saved: int
) -> DriverMachine:
    microbatches = max(1, job.options.microbatches // model.replicas)
    return DriverMachine(
        shape=job.shape(),
        roles=model.roles(plan, job.owner),
        incarnation=journal.incarnation,
        learning_rate=job.learning_rate,
        official=journal.committed,
        records={record.step: record for record in journal.records(max(0, saved - 1))},
        saved=saved,
        older=[step for path in complete_checkpoints(checkpoints.root) if (step := step_of(path)) is not None],
        inspector=Inspector(job.secret, job.owner, microbatches) if job.secret else None,
        evaluations=journal.evaluations,
    )
