"""The driver of a training job: performs the commands of `coordination.training.driver` and reports events to it.

`run` takes an event, lets the machine decide, and performs its commands. The driver itself decides only which messages
belong to the present round; all others are dropped before they become events (recovery rule 1).

`execution.links.connections` reaches the members, `training.inbox` turns messages into events, `training.checkpoints`
collects state, `storage.commits` is the journal. `execution` runs the stages, including the job owner's own in this
process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence

import msgspec
import numpy as np

from fusionai.coordination.round.verification import Check, Inspector, Opinion, Outcome
from fusionai.coordination.training import commands, events
from fusionai.coordination.training.commands import DriverCommand, EndJob
from fusionai.coordination.training.driver import DriverMachine, DriverPhase
from fusionai.coordination.training.evaluations import Evaluation, standing
from fusionai.coordination.training.events import DriverEvent
from fusionai.execution.deployment import Deployment, Replanner
from fusionai.execution.host import Host
from fusionai.execution.links.connections import Connections
from fusionai.execution.links.envelopes import receiver
from fusionai.execution.retained import Sent
from fusionai.execution.state import chunks, headers
from fusionai.execution.training.boundary import LOSS
from fusionai.execution.training.codecs import Carried, split
from fusionai.execution.training.exchange import carried_shapes
from fusionai.execution.training.member import JobMember
from fusionai.primitives.errors import ExecutionError, FusionError, PlanError, TransportError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor
from fusionai.scheduling.problem.types import Plan
from fusionai.scheduling.standby.assignment import without_guards
from fusionai.storage.commits import CommitJournal
from fusionai.training import inbox, progress
from fusionai.training.checkpoints import Checkpoints, Collection
from fusionai.training.deployment import Cut, cut, stage_options
from fusionai.training.faults import FaultLog
from fusionai.training.feed import Feed, forwards
from fusionai.training.inspection import Inspection, limits
from fusionai.training.job import Batch, TrainingJob
from fusionai.training.local_updates import Agreement, Differences, Exchange
from fusionai.training.outputs import Outputs
from fusionai.training.timeline import Timeline
from fusionai.transport.interface import Channel
from fusionai.wire import messages as wire
from fusionai.wire.codecs import Exchanged
from fusionai.wire.messages import Fence, Mode

log = logging.getLogger(__name__)

Listener = Callable[[progress.Progress], None]

CHECK_S = 120.0
"""Timeout for a referee's answer, in seconds (chosen)."""
LINK_GRACE_S = 0.2
"""Seconds to wait after a lost link: it is often the first sign of a lost peer, which is reported a moment later."""


class Driver:
    """Drives one job. Call `await driver.run()`, then optionally `await driver.infer(...)`, then `await
    driver.close()`.

    `deployment`: the plan to begin with, journalled as the one in force. `saved`: step of the newest complete
    checkpoint, -1 if there is none.
    """

    def __init__(
        self,
        job: TrainingJob,
        host: Host,
        deployment: Deployment,
        *,
        journal: CommitJournal,
        checkpoints: Checkpoints,
        saved: int,
        replanner: Replanner,
        on_progress: Listener,
        exchange: Exchange | None = None,
    ) -> None:
        if (exchange is None) != ((every := job.options.sync_every) == 0):
            raise PlanError(
                f"{job.job} exchanges every {every} steps, but has {'no exchange' if every else 'an exchange'}."
            )
        if host.seal is None:
            raise PlanError(f"{job.job} needs its owner's key to sign placements with; this machine has none.")
        self._job = job
        self._host = host
        self._seal = host.seal
        self._placement = b""
        """Signed placement of the present round."""
        self._journal = journal
        self._checkpoints = checkpoints
        self._replanner = replanner
        self._on_progress = on_progress
        self._exchange = exchange
        self._events: asyncio.Queue[tuple[Fence | None, DriverEvent]] = asyncio.Queue()
        """(fence of the event's round, event); the fence is None for events that outlast rounds."""
        self._round: set[asyncio.Task[None]] = set()
        """Tasks of the present round."""
        self._lasting: set[asyncio.Task[None]] = set()
        self._asking: asyncio.Task[None] | None = None
        self._collection: Collection | None = None
        self._collected: asyncio.Task[None] | None = None
        self._outputs = Outputs()
        self._timeline = Timeline()
        self._faults = FaultLog(on_progress, host.clock.now_s)
        self._ended: EndJob | None = None
        self.deployment = deployment
        """The deployment in force."""
        self._granted: dict[int, tuple[Deployment, str]] = {}
        """Newer plan version -> (deployment, reason), until the machine adopts it."""
        self._cut = cut(job, deployment.plan)
        self._differences = self._new_differences()
        self._agreed_from = 0
        """Agreements of earlier steps were forgotten."""
        self._inspection = Inspection(job.secret, job.owner) if job.secret else None
        self._rewinding: asyncio.Task[None] | None = None
        saved_from = max(0, saved - 1)
        self._machine = DriverMachine(
            shape=job.shape(),
            roles=self._cut.roles(deployment.plan, job.owner),
            incarnation=journal.incarnation,
            learning_rate=job.learning_rate,
            official=journal.committed,
            records={record.step: record for record in journal.records(saved_from)},
            saved=saved,
            older=list(checkpoints.steps),
            inspector=self._inspector(),
            evaluations=journal.evaluations,
        )
        self.fence = Fence(deployment.plan.version, journal.incarnation, 0)
        self._prints: dict[str, str] = {}
        """Peer -> the fingerprint it reported."""
        self._prepared: Fence | None = None
        """The round whose guards were asked to prepare their stages."""
        self._member = JobMember(host, job.job, job.owner, self.fence, on_output=self._on_output)
        self._fed = Feed(self._member)
        self._connections = Connections(
            job.job,
            host,
            self._member,
            on_message=self._on_message,
            serve_state=self._serve_state,
            on_lost=self._on_lost,
        )

    # ------------------------------------------------------------------------------------------------- the loop

    async def run(self) -> EndJob:
        """Attach, restore, train, save. Failures caused by members are not raised; they are in the result."""
        self._perform_all(self._machine.start())
        while self._ended is None:
            fence, event = await self._events.get()
            if fence is None or fence == self.fence:
                self._perform_all(self._machine.handle(event))
                self._after(event)
        if self._ended.failed is not None:
            self._outputs.fail(self._ended.failed)
        return self._ended

    def _after(self, event: DriverEvent) -> None:
        calm = self._machine.phase in (DriverPhase.RUNNING, DriverPhase.SAVING, DriverPhase.ENDED)
        if isinstance(event, events.CheckpointWritten) and event.step > 0 and calm:
            best = self._machine.standing.best if self._job.keep_best else None
            self._last(asyncio.to_thread(self._checkpoints.prune, None if best is None else best.step))

    def stop(self, reason: str) -> None:
        """Finish the current step, save, end."""
        self._tell(events.StopAsked(reason), None)

    @property
    def is_waiting(self) -> bool:
        """Whether a stage has no peer to run it."""
        return self._machine.phase is DriverPhase.WAITING

    @property
    def plan(self) -> Plan:
        """The plan in force, without guards that are lost."""
        living = self._machine.guards
        return without_guards(
            self.deployment.plan,
            (guard.peer for guard in self.deployment.plan.guards if living.get(guard.stage) != guard.peer),
        )

    @property
    def sheltered(self) -> frozenset[int]:
        """Stages whose guard could take over now."""
        return self._machine.sheltered

    def shut_out(self, peer: PeerId, reason: str) -> None:
        """Count a peer as lost. Does nothing if it is not connected."""
        self._connections.drop(peer, reason)

    def offer(self, deployment: Deployment, reason: str) -> None:
        """Offer a newer, journalled plan. It is adopted when no step is in progress."""
        version = deployment.plan.version
        if version > self.deployment.plan.version:
            self._granted[version] = (deployment, reason)
            self._tell(events.PlanGranted(self._cut_of(deployment.plan).roles(deployment.plan, self._job.owner)), None)

    def renew(self, deployment: Deployment) -> None:
        """Use new tickets or addresses for the plan in force."""
        if deployment.plan.version == self.deployment.plan.version:
            self.deployment = deployment

    async def close(self, reason: str = "done") -> None:
        """End all tasks. Pending inferences fail with `reason`."""
        for task in (*self._round, *([] if self._asking is None else [self._asking])):
            task.cancel()
        if self._collection is not None:
            self._collection.cancel()
        await asyncio.gather(*self._round, *self._lasting, return_exceptions=True)
        self._outputs.fail(reason)
        await self._connections.close(self.fence, reason)

    def _tell(self, event: DriverEvent, fence: Fence | None) -> None:
        self._events.put_nowait((fence, event))

    def _perform_all(self, todo: Sequence[DriverCommand]) -> None:
        for command in todo:
            try:
                self._perform(command)
            except TransportError as error:  # the connection's owner reports the loss as an event
                log.info("%s: %s", type(command).__name__, error)
            except FusionError as error:  # e.g. data that can't be read
                self._tell(events.CommandFailed(str(error)), None)

    def _perform(self, command: DriverCommand) -> None:
        match command:
            case commands.SendAttach():
                self._begin_round(command)
            case commands.PassSnapshot(stage, step, holder, peer):
                addresses = tuple(self.deployment.members.get(peer, ()))
                message = wire.PassSnapshot(fence=self.fence, stage=stage, step=step, peer=peer, addresses=addresses)
                self._connections.tell(PeerId(holder), message)
            case commands.SendResume():
                self._resume(command)
            case commands.SendProbe(step):
                self._start(self._probe(step))
            case commands.AnnounceReady(base):
                self._on_progress(progress.JobReady(base))
            case commands.Feed(step, microbatch, only):
                self._feed("train", step, microbatch, self._job.data.microbatch(step, microbatch), only)
            case commands.DecideScale(step, norms):
                self._start(self._decide_scale(step, norms))
            case commands.JournalCommit(record):
                self._last(self._journal_commit(record))
            case commands.SendCommit(record, line, save):
                for stage in self._machine.roles.stages:
                    saves = save and self._cut.saves(stage)
                    self._to(stage, wire.Commit(fence=self.fence, stage=stage, record=record, line=line, save=saves))
                self._forget_agreements(min(line, max(0, self._machine.saved)) - 1 - self._job.options.sync_lag)
            case commands.StepCommitted(record, losses, replayed):
                self._on_progress(self._timeline.step_done(record, losses, replayed, self._job.tokens_per_step))
                if not replayed and self._machine.phase in (DriverPhase.RUNNING, DriverPhase.SAVING):
                    self._faults.committed(record.step)
                    self._prepare_guards()
            case commands.WriteCheckpoint(step, ask):
                self._write_checkpoint(step, ask=ask)
            case commands.Evaluate(step):
                self._start(self._evaluate(step))
            case commands.NameBest(best):
                self._last(self._name_best(best))
            case commands.AskPlan(without, reason):
                self._ask_plan(without, reason)
            case commands.StartCheck(check):
                self._start_check(check)
            case commands.TellCheck(check, outcome, reason):
                self._tell_check(check, outcome, reason)
            case commands.Distrust(peer, reason):
                self._replanner.distrust(peer, reason)
            case commands.Rewind(step):
                self._rewinding = self._last(self._rewind(step))
            case commands.TellFault():
                self._faults.seen(command)
            case commands.TellRestored():
                self._faults.restored(command)
            case commands.WarnTolerant(_, detail):
                self._on_progress(progress.Warned(f"not bit-exact, which the recipe allows: {detail}"))
            case commands.EndJob():
                self._ended = command
                if command.failed is None:
                    self._faults.committed(command.steps - 1)

    # ---------------------------------------------------------------------------------------------------- rounds

    def _begin_round(self, command: commands.SendAttach) -> None:
        """Cancel what the old round started, then send the new round to all members of the plan."""
        self.fence = command.fence
        for task in self._round:
            task.cancel()
        if self._collection is not None:
            self._collection.cancel()
        self._outputs.drop()
        if command.roles.version != self.deployment.plan.version:
            if self._asking is not None:
                self._asking.cancel()
            self.deployment, reason = self._granted[command.roles.version]
            self._granted = {version: one for version, one in self._granted.items() if version > command.roles.version}
            self._cut = self._cut_of(self.deployment.plan)
            self._faults.adopted(self.deployment.plan, reason)
        self._differences = self._new_differences()
        self._fed = Feed(self._member)
        self._start(self._fed.run())
        members = {*command.roles.places.values(), *command.guards.values(), self._job.owner}
        self._connections.dismiss(members, self.fence)
        self._placement = self._seal.placement(
            self._job.job,
            self.fence,
            stages=((one.stage, one.peer) for one in self.deployment.neighbours()),
            guards=command.guards.items(),
        )
        for member in sorted(members):
            self._start(self._enlist(PeerId(member), command))

    async def _enlist(self, peer: PeerId, command: commands.SendAttach) -> None:
        """Connect to a member and send it its whole part in the round."""
        if not await self._connections.open(peer, self.deployment, self.fence):
            return
        deployment, guards = self.deployment, command.guards
        self._connections.tell(
            peer,
            wire.Enlist(
                fence=self.fence,
                job=self._job.job,
                neighbours=deployment.neighbours(),
                guards=tuple(stage for stage, guard in sorted(guards.items()) if guard == peer),
                partition=self._cut.name,
                ticket=deployment.tickets.get(peer, b""),
                placement=self._placement,
            ),
        )
        for stage in command.roles.stages_of(peer):
            guard, part = guards.get(stage, ""), self._cut.stages[stage]
            self._connections.tell(
                peer,
                wire.Attach(
                    fence=self.fence,
                    job=self._job.job,
                    stage=stage,
                    graph_hash=part.graph_hash,
                    boundary=msgspec.Raw(msgspec.msgpack.encode(part.boundary)),
                    options=stage_options(self._job.options, deployment.plan, stage),
                    retain=bool(guards),
                    guard=guard,
                    guard_addresses=tuple(deployment.members.get(guard, ())),
                    snapshot_every=command.roles.snapshot_every if guard else 0,
                    secret=self._inspection.secret_of(stage, peer) if self._inspection and guards else b"",
                    tensors=headers({"graph": part.encoded}),
                ),
                (part.encoded,),
            )

    def _prepare_guards(self) -> None:
        """Once per round, when its first step is committed: ask guards to load their stages in advance."""
        if self._prepared == self.fence:
            return
        self._prepared = self.fence
        for stage, guard in sorted(self._machine.guards.items()):
            part = self._cut.stages[stage]
            self._connections.tell(
                PeerId(guard),
                wire.Prepare(
                    fence=self.fence,
                    stage=stage,
                    graph_hash=part.graph_hash,
                    boundary=msgspec.Raw(msgspec.msgpack.encode(part.boundary)),
                    options=stage_options(self._job.options, self.deployment.plan, stage),
                    tensors=headers({"graph": part.encoded}),
                ),
                (part.encoded,),
            )

    def _cut_of(self, plan: Plan) -> Cut:
        return self._cut if self._cut.holds(plan) else cut(self._job, plan)

    def _resume(self, command: commands.SendResume) -> None:
        self._to(
            command.stage,
            wire.Resume(
                fence=self.fence,
                stage=command.stage,
                committed=command.committed,
                source=command.source,
                base=command.base,
                records=command.records,
                replaying=tuple(sorted(command.replaying)),
                snapshot=command.snapshot,
                line=command.line,
            ),
        )
        self._start(self._push_state(command))
        if self._exchange is not None and self._cut.stages[command.stage].trainable:
            self._start(self._push_agreements(command.stage, command.base - 1 - self._job.options.sync_lag))

    async def _push_state(self, command: commands.SendResume) -> None:
        """Send the stage the state it can't make itself, if any."""
        graph = self._cut.stages[command.stage].graph
        pending = self._checkpoints.state_for(self._job, graph, base=command.base, source=command.source)
        while (item := await asyncio.to_thread(next, pending, None)) is not None:
            chunk, last = item
            message = wire.StateChunk(
                fence=self.fence, stage=command.stage, step=command.base, last=last, tensors=headers(chunk)
            )
            await self._connections.send_state(self._peer_of(command.stage), message, tuple(chunk.values()))

    # ---------------------------------------------------------------------------------------------- local updates

    def _new_differences(self) -> Differences:
        """Return a collector for differences of the stages with trainable parameters; others take no part in
        exchanges."""
        shapes = {stage: self._cut.stages[stage].trainable for stage in range(len(self._cut.stages))}
        return Differences({stage: known for stage, known in shapes.items() if known}, self._codec)

    @property
    def _codec(self) -> Exchanged:
        return self._job.options.sync_codec

    async def _agree(self, exchange: Exchange, step: int, differences: dict[str, Carried]) -> None:
        agreement = await exchange.agree(step, differences)
        for stage in self._machine.roles.stages:
            if self._cut.stages[stage].trainable:
                await self._send_agreement(stage, agreement)

    def _forget_agreements(self, below: int) -> None:
        """Forget agreements that no stage will need again."""
        if self._exchange is not None and below > self._agreed_from:
            self._agreed_from = below
            self._last(asyncio.to_thread(self._exchange.forget, below))

    async def _push_agreements(self, stage: int, since: int) -> None:
        """Send a stage the agreements it needs because it runs steps again or was waiting for one."""
        assert self._exchange is not None
        for agreement in await asyncio.to_thread(self._exchange.known, since):
            await self._send_agreement(stage, agreement)

    async def _send_agreement(self, stage: int, agreement: Agreement) -> None:
        names = carried_shapes(self._cut.stages[stage].trainable, agreement.told)
        pending = chunks((name, agreement.values[name]) for name in sorted(names))
        while True:
            chunk = next(pending, None)
            body, packed = split(dict(chunk or ()))
            message = wire.Agreement(
                fence=self.fence,
                stage=stage,
                step=agreement.step,
                last=chunk is None,
                told=agreement.told,
                packed=packed,
                tensors=headers(body),
            )
            await self._connections.send_state(self._peer_of(stage), message, tuple(body.values()))
            if chunk is None:
                return

    def _take_difference(self, peer: PeerId, message: wire.Difference, tensors: dict[str, HostTensor]) -> None:
        """Raise `ExecutionError` for a difference that is not expected from this peer."""
        exchange = self._exchange
        if exchange is None or message.stage not in self._machine.roles.stages_of(peer):
            raise ExecutionError(
                f"got a difference of stage {message.stage} from peer {short(peer)}, which does not send any."
            )
        if message.fence == self.fence and (whole := self._differences.take(message, tensors)) is not None:
            self._start(self._agree(exchange, message.step, whole))

    # ------------------------------------------------------------------------------------------------ performing

    def _feed(self, mode: Mode, step: int, microbatch: int, batch: Batch, only: frozenset[int] | None = None) -> None:
        for message, tensors in forwards(self._cut, self.fence, mode, step, microbatch, batch, only=only):
            self._fed.put(message, tensors)

    async def _decide_scale(self, step: int, norms: tuple[float, ...]) -> None:
        fence, limit = self.fence, float("inf") if self._job.clip_norm is None else self._job.clip_norm
        (total_norm, scale), _ = await self._host.compute.run(lambda: self._host.backend.clip_scale(norms, limit))
        self._tell(events.ScaleDecided(step, total_norm, scale), fence)

    async def _journal_commit(self, record: wire.CommitRecord) -> None:
        await asyncio.to_thread(self._journal.append, record)
        self._tell(events.CommitJournalled(record), None)

    def _rounds_differently(self) -> bool:
        """Return whether machines with different numerics have, or may have had, a part in this job."""
        prints = {stage.fingerprint for stage in self.plan.stages if self._cut.saves(stage.stage)}
        return self._job.options.takeover != "exact" or len(prints) > 1

    def _write_checkpoint(self, step: int, *, ask: bool) -> None:
        places = self._machine.roles.places
        stages = {stage: PeerId(peer) for stage, peer in places.items() if self._cut.saves(stage)}
        entries = {stage: self._cut.stages[stage].saved for stage in stages}
        collection = self._collection = self._checkpoints.collection(
            step,
            self.fence,
            stages,
            entries,
            tolerant=self._rounds_differently(),
            takeovers=self.deployment.plan.tolerant_takeovers,
        )
        former, started_s = self._collected, time.monotonic()

        async def collect() -> None:
            if former is not None:
                await asyncio.wait({former})  # two collections must not write to the same directory
            path = await collection.run()
            if path is not None:
                self._on_progress(progress.CheckpointSaved(step, str(path), time.monotonic() - started_s))
                self._tell(events.CheckpointWritten(step), None)

        self._collected = self._last(collect())
        if ask:
            for stage in stages:
                self._to(stage, wire.Export(fence=self.fence, stage=stage, step=step))

    async def _evaluate(self, step: int) -> None:
        """Mean loss over the evaluation set, with at most twice as many microbatches in flight as there are stages."""
        fence, window = self.fence, asyncio.Semaphore(2 * len(self._cut.stages))

        async def one(index: int) -> float:
            async with window:
                waiting = self._outputs.expect("eval", step, index)
                self._feed("eval", step, index, self._job.data.evaluation(index))
                return _scalar((await waiting)[LOSS])

        losses = await asyncio.gather(*(one(index) for index in range(self._job.evaluation_batches)))
        found = Evaluation(step, sum(losses) / len(losses))
        kept = await asyncio.to_thread(self._journal.append_evaluation, found)
        told = standing(self._journal.evaluations, self._job.minimum_improvement)
        best = None if told.best is None else told.best.step
        self._on_progress(progress.Evaluated(step, kept.loss, best, told.since))
        self._tell(events.EvaluationDone(step, kept.loss), fence)

    async def _name_best(self, best: Evaluation) -> None:
        path = await asyncio.to_thread(self._checkpoints.name_best, best)
        self._on_progress(progress.BestKept(best.step, best.loss, str(path)))

    async def _probe(self, step: int) -> None:
        """Send a microbatch through every stage of every replica, twice, and compare the losses (invariant 7: a job is
        ready only after a probe has come back right)."""
        fence, batch = self.fence, self._job.data.microbatch(min(step, self._job.steps - 1), 0)
        losses: list[float] = []
        for index in range(2 * self._cut.replicas):
            waiting = self._outputs.expect("eval", step, index)
            self._feed("eval", step, index, batch)
            losses.append(_scalar((await waiting)[LOSS]))
        count = self._cut.replicas
        # Each replica is compared only with itself if takeover is "any": replicas may then be different machines.
        first = count if self._job.options.takeover == "any" else 1
        pairs = list(zip(losses[:count] if first == count else [losses[0]] * len(losses), losses[first:], strict=False))
        apart = next((pair for pair in pairs if pair[0].hex() != pair[1].hex()), pairs[0])
        self._tell(events.ProbeAnswered(apart), fence)

    async def infer(self, batch: Batch) -> dict[str, HostTensor]:
        """Return job outputs other than the loss (`logits`) for one batch, computed by the pool's stages with the state
        of the last committed step. Raises `ExecutionError` if a stage is lost meanwhile: after the job's end lost
        stages are not restored."""
        step, index = self._machine.step, self._outputs.next_inference()
        waiting = self._outputs.expect("infer", step, index)
        self._feed("infer", step, index, batch)
        return await waiting

    def _ask_plan(self, without: frozenset[str], reason: str) -> None:
        self._faults.asked(reason)
        if self._asking is not None:
            self._asking.cancel()

        async def ask() -> None:
            waiting = lambda reason: self._on_progress(progress.Waiting(reason))  # noqa: E731
            try:
                deployment = await self._replanner.replacement(self.deployment, without, waiting)
                if self._rewinding is not None:
                    await asyncio.wait({self._rewinding})
            except FusionError as error:
                self._tell(events.CommandFailed(f"{reason.rstrip('.')}; {error}"), None)
            else:
                self.offer(deployment, reason)

        self._asking = self._last(ask())

    # --------------------------------------------------------------------------------------------------- spot checks

    def _inspector(self) -> Inspector | None:
        job = self._job
        if not job.secret:
            return None
        return Inspector(job.secret, job.owner, max(1, job.options.microbatches // self._cut.replicas))

    def _start_check(self, check: Check) -> None:
        """Ask a referee for a recheck; its inputs follow when it is ready. Earlier steps are never checked again."""
        assert self._inspection is not None
        self._inspection.forget(check.first)
        part = self._cut.stages[check.stage]
        keys = self._inspection.keys(check, sorted(part.boundary.others))
        if not keys or self._job.options.sync_every:
            self._tell(
                events.StageChecked(check, Opinion(void="some inputs or keys that the recheck needs were not kept")),
                self.fence,
            )
            return
        message = wire.Recheck(
            fence=self.fence,
            stage=check.stage,
            first=check.first,
            below=check.below,
            graph_hash=part.graph_hash,
            boundary=msgspec.Raw(msgspec.msgpack.encode(part.boundary)),
            options=stage_options(self._job.options, self.deployment.plan, check.stage),
            records=tuple(self._machine.records[step] for step in range(check.first, check.below)),
            keys=keys,
            tensors=headers({"graph": part.encoded}),
        )
        self._connections.tell(PeerId(check.referee), message, (part.encoded,))
        self._start(self._give_up(check))

    async def _give_up(self, check: Check) -> None:
        """End a check without an opinion after `CHECK_S`, because it holds up the retention line."""
        fence = self.fence
        await asyncio.sleep(CHECK_S)
        self._tell(events.StageChecked(check, Opinion(void=f"the referee did not answer within {CHECK_S:g} s")), fence)

    def _hear_referee(self, peer: PeerId, message: wire.Rechecking | wire.Rechecked) -> None:
        inspector, inspection = self._machine.inspector, self._inspection
        check = None if inspector is None else inspector.open.get(message.stage)
        if inspection is None or check is None:
            return
        if (check.referee, check.first, check.below) != (peer, message.first, message.below):
            return
        if isinstance(message, wire.Rechecking):
            self._start(self._bring(check))
            return
        options, prints = self._job.options, self._prints
        apart = limits(options, prints.get(check.peer, ""), prints.get(check.referee, ""))
        self._tell(events.StageChecked(check, inspection.opinion(check, message, apart)), self.fence)

    def _miss_word(self, peer: PeerId, message: wire.Untold) -> None:
        """End a check without an opinion, because a neighbour no longer has what it sent to the checked stage."""
        inspector = self._machine.inspector
        check = None if inspector is None else inspector.open.get(message.about)
        if check is not None and self._machine.roles.places.get(message.stage) == peer:
            void = Opinion(void=f"stage {message.stage} no longer has everything that it sent")
            self._tell(events.StageChecked(check, void), self.fence)

    async def _bring(self, check: Check) -> None:
        """Have all inputs of the checked stage sent to the referee. The owner's machine also needs its snapshots."""
        boundary, places = self._cut.stages[check.stage].boundary, self._machine.roles.places
        addresses = tuple(self.deployment.members.get(check.referee, ()))
        if check.referee == self._job.owner and (guard := self._machine.guards.get(check.stage)) is not None:
            for step in (check.first, check.below):
                order = wire.PassSnapshot(
                    fence=self.fence, stage=check.stage, step=step, peer=check.referee, addresses=()
                )
                self._connections.tell(PeerId(guard), order)
        for stage in sorted(boundary.others):
            order = wire.Testify(
                fence=self.fence,
                stage=stage,
                about=check.stage,
                first=check.first,
                below=check.below,
                peer=check.referee,
                addresses=addresses,
            )
            self._connections.tell(PeerId(places[stage]), order)
        if check.stage not in self._machine.roles.fed:
            return
        for step in range(check.first, check.below):
            for microbatch in filter(boundary.crosses, range(self._job.options.microbatches)):
                batch = self._job.data.microbatch(step, microbatch)
                fed = forwards(self._cut, self.fence, "train", step, microbatch, batch, only={check.stage})
                for message, tensors in fed:
                    await self._connections.send_state(PeerId(check.referee), message, tensors)

    async def _take_testimony(self, peer: PeerId, message: Sent, tensors: dict[str, HostTensor]) -> None:
        """Pass on a stage's sent tensors to a referee, if the referee or the stage is in this process. Raises
        `ExecutionError` if the peer does not run the stage it claims as the sender."""
        inspector, (stage, fence) = self._machine.inspector, receiver(message)
        check = None if inspector is None else inspector.open.get(stage)
        if check is None or fence != self.fence:
            return
        if check.referee == self._job.owner:
            self._member.testimony(peer, message, tensors)
        elif peer == self._job.owner:
            await self._connections.send_state(PeerId(check.referee), message, tuple(tensors.values()))

    def _tell_check(self, check: Check, outcome: Outcome, reason: str) -> None:
        inspector = self._machine.inspector
        assert inspector is not None
        self._on_progress(
            progress.Checked(
                stage=check.stage,
                peer=check.peer,
                referee=check.referee,
                first=check.first,
                below=check.below,
                outcome=outcome,
                reason=reason,
                tasks=inspector.tasks,
                checked_tasks=inspector.checked_tasks,
            )
        )

    async def _rewind(self, step: int) -> None:
        """Cut back the journal first, then checkpoints: at a start, checkpoints later than the journal are dropped."""
        if self._collection is not None:
            self._collection.cancel()
        if self._collected is not None:
            await asyncio.wait({self._collected})
        await asyncio.to_thread(self._journal.take_back, step)
        await asyncio.to_thread(self._checkpoints.forget_after, step, self._machine.standing.best)

    # ---------------------------------------------------------------------------------------------- what arrives

    def _on_output(self, message: wire.Output, tensors: dict[str, HostTensor]) -> None:
        """Handle an output. Never raises: a member that sends an invalid one counts as lost."""
        if message.fence != self.fence:
            return
        if (wrong := self._take_output(message, tensors)) is not None:
            self._connections.drop(self._peer_of(message.stage), wrong)

    def _take_output(self, message: wire.Output, tensors: dict[str, HostTensor]) -> str | None:
        """Return what is wrong with the output, None if nothing is."""
        boundary = self._cut.stages[message.stage].boundary
        if not boundary.crosses(message.microbatch):
            return f"it sent an output of microbatch {message.microbatch}, which does not cross stage {message.stage}"
        expected = boundary.job_outputs(message.mode)
        if set(tensors) != set(expected) or not expected:
            return f"expected outputs {list(expected)} of stage {message.stage}, got {list(tensors)}"
        loss = tensors.get(LOSS)
        if loss is not None and (loss.dtype, loss.shape) != ("float32", ()):
            return f"expected a loss as a float32 scalar, got {loss.dtype}{list(loss.shape)}"
        if message.mode != "train":
            if not self._outputs.arrived(message.mode, message.step, message.microbatch, tensors):
                return (
                    f"it sent an output of {message.mode} microbatch {message.microbatch} of step {message.step}, "
                    "which was not fed"
                )
        elif loss is not None:
            self._tell(events.LossArrived(message.step, message.microbatch, _scalar(loss)), self.fence)
        return None

    def _on_message(self, peer: PeerId, message: wire.Message) -> None:
        match message:
            case wire.Pong():
                return
            case wire.Refused(code=code, reason=reason):
                self._connections.drop(peer, f"{wire.REFUSAL_SENTENCES[code]} {reason}".strip())
                return
            case wire.LinkLost(fence=self.fence):
                self._start(self._suspect_link(peer, message))
                return
            case _:
                pass
        if getattr(message, "fence", None) != self.fence:
            return
        if isinstance(message, wire.Untold):
            self._miss_word(peer, message)
            return
        if isinstance(message, wire.Rechecking | wire.Rechecked):
            self._hear_referee(peer, message)
            return
        try:
            event = inbox.event_of(message, peer, self._machine.roles)
            inbox.check_numerics(message, self.deployment.plan, self._job.options.takeover)
        except FusionError as error:
            self._connections.drop(peer, error.message)
            return
        match message:
            case wire.Status():
                self._timeline.clock(message.stage, message.clock_s)
                self._prints[peer] = message.fingerprint
            case wire.Enlisted():
                self._prints[peer] = message.fingerprint
            case wire.Prepared():
                self._timeline.spans(message.stage, message.spans)
                if self._inspection is not None:
                    self._inspection.hear(peer, message)
            case _:
                pass
        if event is not None:
            self._tell(event, self.fence)

    async def _serve_state(self, peer: PeerId, channel: Channel) -> None:
        while True:
            envelope = await channel.receive()
            match envelope.message:
                case wire.Pong():
                    pass
                case wire.Difference() as message:
                    self._take_difference(peer, message, envelope.tensors)
                case wire.Snapshot() as message:
                    self._member.take_snapshot(peer, message, envelope.tensors)
                case wire.Forward() | wire.Backward() | wire.SharedGradient() as message:
                    await self._take_testimony(peer, message, envelope.tensors)
                case _ if self._collection is not None:
                    await self._collection.take(peer, envelope)
                case _:
                    pass

    async def _suspect_link(self, reporter: PeerId, message: wire.LinkLost) -> None:
        """Report a broken link to the machine, unless one of the two peers turns out to be lost."""
        other, fence = PeerId(message.peer), self.fence
        while True:
            await asyncio.sleep(LINK_GRACE_S)
            if not (self._connections.is_doubtful(reporter) or self._connections.is_doubtful(other)):
                break
        # A guard exchanges no tensors; its link matters only for a snapshot that it was asked to pass on.
        idle = not self._machine.roles.stages_of(reporter) and reporter != self._job.owner
        missed = not idle or self._machine.phase is DriverPhase.LOADING
        if missed and self._connections.is_open(reporter) and self._connections.is_open(other):
            self._tell(events.LinkBroken(reporter, other, message.reason), fence)

    def _on_lost(self, peer: PeerId, reason: str) -> None:
        told = f"peer {short(peer)} was lost: {reason}"
        if self._ended is not None:
            self._outputs.fail(told)
        self._tell(events.PeerLost(peer, told), None)

    # ---------------------------------------------------------------------------------------------------- details

    def _start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Run `work` in a task that ends with the round."""
        return self._spawn(work, self._round)

    def _last(self, work: Coroutine[object, object, object]) -> asyncio.Task[None]:
        """Run `work` in a task that outlasts the round."""
        return self._spawn(work, self._lasting)

    def _spawn(self, work: Coroutine[object, object, object], tasks: set[asyncio.Task[None]]) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await work
            except TransportError as error:  # the connection's owner reports the loss as an event
                log.info("a connection of %s: %s", self._job.job, error)
            except FusionError as error:
                self._tell(events.CommandFailed(str(error)), None)
            except Exception as error:  # the job must end with a reason instead of waiting for a failed task
                log.exception("a command of %s failed", self._job.job)
                self._tell(events.CommandFailed(f"{type(error).__name__}: {error}"), None)

        task = asyncio.create_task(guarded())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda _: work.close())  # for a task that was cancelled before it began
        return task

    def _to(self, stage: int, message: wire.Message) -> None:
        self._connections.tell(self._peer_of(stage), message)

    def _peer_of(self, stage: int) -> PeerId:
        return PeerId(self._machine.roles.places[stage])


def _scalar(tensor: HostTensor) -> float:
    """Return a float32 scalar as an exact Python float."""
    return float(np.frombuffer(tensor.data, np.float32)[0])
