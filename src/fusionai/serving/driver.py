"""The driver of a serving job: performs the commands of `coordination.serving.driver` and feeds it events.

Each event is handled in one turn of the event loop, without awaiting. The state machine makes the decisions.

A member may only report on stages that it runs, standbys or was asked to load (`event_of`).

Neighbours: `serving.rounds` enlists and loads members, `serving.passes` sends passes, `serving.answers` samples their
results, `serving.checking` has texts recomputed, `execution.connections` reaches the members, `execution` runs
the stages, those of the job owner in this process included."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from fusionai.coordination.round.interface import (
    AskPlan,
    CommandFailed,
    Distrust,
    DriverEvent,
    EndJob,
    LinkBroken,
    MemberEnlisted,
    PeerLost,
    ReportCheck,
    ReportFault,
    StageFailure,
)
from fusionai.coordination.serving import interface
from fusionai.coordination.serving.driver import ServingMachine
from fusionai.coordination.serving.interface import ServingCommand, ServingRoles
from fusionai.execution.connections import Connections, Deployment, JobTasks, PlanSource
from fusionai.execution.host import Host
from fusionai.execution.serving.loading import OwnWeights
from fusionai.execution.serving.member import ServingMember
from fusionai.execution.weights.server import WeightServer
from fusionai.ir.partition import FEED
from fusionai.primitives.errors import ExecutionError, FusionError, PlanError
from fusionai.primitives.ids import PeerId, short
from fusionai.serving import job as progress
from fusionai.serving.answers import Answers
from fusionai.serving.checking import Checking
from fusionai.serving.faults import ServingFaultLog
from fusionai.serving.job import ServedCut, ServingJob
from fusionai.serving.passes import Passes
from fusionai.serving.rounds import ServingRound
from fusionai.transport.interface import Channel
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence

log = logging.getLogger(__name__)

TICK_S: Final = 0.25
"""Period of the state machine's timer, in seconds (chosen)."""
LATE_S: Final = 1.0
"""If a tick comes this many seconds late, the driver's own process was stalled, and no member is called late at that
tick."""


class ServingDriver:
    """Use as: `await driver.run()`, then `await driver.close()`. `whole` is the cut of the deployment's plan, `machine`
    the state machine with the plan's roles."""

    def __init__(
        self,
        job: ServingJob,
        host: Host,
        deployment: Deployment,
        whole: ServedCut,
        machine: ServingMachine,
        *,
        replanner: PlanSource,
        faults: ServingFaultLog,
        answers: Answers,
        on_progress: Callable[[progress.Progress], None],
    ) -> None:
        if host.seal is None:
            raise PlanError(f"{job.job} needs its owner's key to sign placements with; this machine has none.")
        self._job = job
        self._host = host
        self._machine = machine
        self._replanner = replanner
        self._faults = faults
        self._answers = answers
        self._on_progress = on_progress
        self.resident_bytes: dict[tuple[int, str], int] = {}
        """Bytes of weights in memory, by (stage, peer)."""
        self._text_tokens = 0  # computed positions of the text that is read again
        self._events: deque[DriverEvent] = deque()
        self._handling = False
        self._asking: asyncio.Task[None] | None = None
        self._ended: asyncio.Future[EndJob] = asyncio.get_running_loop().create_future()
        self._tasks = JobTasks(job.job, lambda reason: self.post(CommandFailed(reason)))
        self._desk = WeightServer(job.weights, (spec.digest for spec in job.weights.specs))
        fence = Fence(machine.roles.version, machine.incarnation, 0)
        self._passes = Passes(
            job,
            machine,
            to_stage=lambda stage, message, tensors: self._member.to_stage(stage, message, tensors),
            returned=answers.returned,
            post=self.post,
            now_s=host.clock.now_s,
            drop=lambda peer, reason: self._connections.drop(peer, reason),
            feed=answers.feed,
        )
        self._member = self._own_member(fence)
        self._connections = Connections(
            job.job, host, self._member, on_message=self._on_message, serve_state=self._serve, on_lost=self._lost
        )
        self._checking = Checking(
            job,
            host,
            self._member,
            send=self._connections.send_to,
            on_opinion=lambda fence, check, found: self.post(interface.TextChecked(check, found, fence=fence)),
            start=self._tasks.start,
            feed=answers.feed,
        )
        self._round = ServingRound(
            job, host.seal, deployment, whole, fence, self._connections, self._tasks, secret_of=self._checking.secret_of
        )

    def _own_member(self, fence: Fence) -> ServingMember:
        """Return the member for the stages that stay with the owner."""
        return ServingMember(
            self._host,
            self._job.job,
            self._job.owner,
            fence,
            OwnWeights(self._job.weights),
            on_result=self._passes.arrived,
            on_evidence=lambda peer, message, tensors: self._checking.heard(peer, message, tensors),
        )

    @property
    def fence(self) -> Fence:
        """Fence of the present round."""
        return self._round.fence

    @property
    def deployment(self) -> Deployment:
        """The newest deployment, with its plan updated: standbys that took over are in their new places."""
        return self._round.deployment_of(self._machine.roles)

    @property
    def compute_s(self) -> Mapping[int, float]:
        """Moving mean of a stage's compute time per pass, by stage."""
        return self._passes.compute_s

    # ------------------------------------------------------------------------------------------------- the loop

    async def run(self) -> EndJob:
        """Load, probe, serve until stopped. Failures of members end up in the result; they raise nothing."""
        ticking = asyncio.create_task(self._tick())
        try:
            self._perform_all(self._machine.start())
            self.post(None)
            return await asyncio.shield(self._ended)
        finally:
            ticking.cancel()

    async def _tick(self) -> None:
        expected_s = self._host.clock.now_s()
        while True:
            now_s = self._host.clock.now_s()
            self._answers.expire(now_s)
            self._checking.tick(now_s)
            if now_s - expected_s < LATE_S:  # else messages that arrived during the stall are read first
                self.post(interface.Tick(now_s))
            expected_s = now_s + TICK_S
            await asyncio.sleep(TICK_S)

    def post(self, event: DriverEvent | None) -> None:
        """Handle an event, or with None only send passes that are due. Events added meanwhile are handled in order."""
        if event is not None:
            self._events.append(event)
        if self._handling or self._ended.done():
            return
        self._handling = True
        try:
            while self._events:
                self._perform_all(self._machine.handle(self._events.popleft()))
            self._passes.send_due()
            for command in self._machine.next_checks():
                self._perform(command)
        finally:
            self._handling = False

    def _perform_all(self, todo: Sequence[ServingCommand]) -> None:
        for command in todo:
            try:
                self._perform(command)
            except FusionError as error:
                self._events.append(CommandFailed(str(error)))

    def _perform(self, command: ServingCommand) -> None:
        match command:
            case interface.BeginRound(fence, roles):
                self._begin_round(fence, roles)
            case interface.EnlistStandby(fence, peer, roles):
                self._round.enlist(PeerId(peer), fence, roles)
            case interface.SendLoad():
                self._round.load(command)
            case interface.SendRebuild():
                self._rebuild(command)
            case interface.SendProbePass():
                self._passes.probe(command)
            case interface.ResumePasses():
                pass  # passes are sent after every event anyway
            case interface.BeginCheck():
                self._text_tokens = len(command.text.tokens) - command.text.origin
                number = self._machine.batcher.take_number()
                places = self._machine.roles.places
                self._checking.begin(command, number, self.fence, places, self._round.cut, self._round.load_for_check)
            case ReportCheck():
                self._tell_check(command)
            case Distrust(peer, reason):
                self._passes.distrust_probes()
                self._replanner.distrust(peer, reason)
            case AskPlan():
                self._ask_plan(command)
            case interface.Dismiss(peer, reason):
                self._connections.part_with(PeerId(peer), self._round.highest, reason)
            case interface.FailSessions(sessions, reason):
                self._answers.failed(sessions, self._faults.named(reason))
            case ReportFault():
                self._faults.seen(command)
            case interface.ReportRebuilding():
                self._faults.rebuilding(command)
            case interface.ReportState(state, detail):
                self._answers.stands(state, self._faults.named(detail))
                if state == "ready":
                    self._on_progress(progress.EngineReady())
            case EndJob():
                if not self._ended.done():
                    self._ended.set_result(command)

    # ---------------------------------------------------------------------------------------------------- rounds

    def _begin_round(self, fence: Fence, roles: ServingRoles) -> None:
        """Void everything in flight, then announce the round to all its members."""
        self._passes.begin_round()
        self._checking.drop()
        self._round.begin(fence, roles)

    def _rebuild(self, command: interface.SendRebuild) -> None:
        if command.source == FEED:
            self._passes.rebuild_from_tokens(command)
            return
        order = wire.Rebuild(
            fence=self.fence,
            stage=command.source,
            through=command.through,
            number=command.number,
            segments=command.segments,
        )
        self._connections.send_to(PeerId(self._machine.roles.places[command.source]), order)

    def _ask_plan(self, command: AskPlan) -> None:
        if self._asking is not None:
            self._asking.cancel()
        knows, present = frozenset(self._machine.lost), self._round.deployment_of(self._machine.roles)

        async def ask() -> None:
            waiting = lambda text: self._on_progress(progress.ServingPaused(text))  # noqa: E731
            try:
                granted = await self._replanner.replacement(present, command.without, waiting)
            except FusionError as error:
                if command.urgent:
                    self.post(CommandFailed(str(error)))
                else:
                    log.info("no other plan for %s: %s", self._job.job, error)
            else:
                self.offer(granted, command.reason, knows=knows)

        self._asking = self._tasks.start(ask())

    def offer(self, deployment: Deployment, reason: str, *, knows: frozenset[str] | None = None) -> None:
        """Offer a newer plan. Its standbys load beside the passes; stages that move take a new round."""
        roles = self._round.add(deployment)
        if roles is not None:
            self._on_progress(progress.ServingPlanChanged(deployment.plan, self._faults.named(reason)))
            self.post(interface.PlanGiven(roles, frozenset(self._machine.lost) if knows is None else knows))

    def renew(self, deployment: Deployment) -> None:
        """Take new tickets or addresses for a known plan."""
        self._round.renew(deployment)

    def replace_weights(self, reason: str) -> None:
        """Have all stages load the weights that the job's manifest has now (`ModelWeights.replace`)."""
        self._desk.allow(spec.digest for spec in self._job.weights.specs)
        self._round.renew_weights()
        self.post(interface.WeightsReplaced(reason))

    def shut_out(self, peer: PeerId, reason: str) -> None:
        """Treat a peer as lost. Does nothing if the peer has no connection."""
        self._connections.drop(peer, reason)

    def _tell_check(self, command: ReportCheck) -> None:
        checks = self._machine.checks
        assert checks is not None
        self._on_progress(
            progress.TextRechecked(
                stage=command.check.stage,
                peer=command.check.peer,
                verifier=command.check.verifier,
                outcome=command.outcome,
                reason=self._faults.named(command.reason),
                tasks=checks.inspector.tasks,
                checked_tasks=checks.inspector.checked_tasks,
                partners=command.partners,
                text_tokens=self._text_tokens,
            )
        )

    # -------------------------------------------------------------------------------------------------- messages

    def _on_message(self, peer: PeerId, message: wire.Message) -> None:
        match message:
            case wire.Pong():
                return
            case wire.Refused(code=code, reason=reason):
                if code != "stale_fence":  # else a newer round is on its way to the peer
                    self._connections.drop(peer, f"{wire.REFUSAL_SENTENCES[code]} {reason}".strip())
                return
            case wire.LinkLost(fence=self.fence):
                self._tasks.start(self._suspect_link(peer, message))
                return
            case wire.Reading():
                self._checking.ready(peer, message)
                return
            case wire.CheckFailed():
                self._checking.failed(peer, message)
                return
            case wire.WeightRefused(source=source, key=key):
                self._on_progress(progress.SourceRefused(source, peer, key))
                return
            case _:
                pass
        try:
            event = event_of(message, peer, self._machine.roles, self._round.requested)
        except FusionError as error:
            if getattr(message, "fence", None) == self.fence:
                self._connections.drop(peer, error.message)
            return
        match message:
            case wire.Loading(stage=stage, done_bytes=done_bytes, total_bytes=total_bytes):
                self._on_progress(progress.StageLoading(stage, peer, done_bytes, total_bytes))
            case wire.Loaded():
                self._note_loaded(peer, message)
            case _:
                pass
        if event is not None:
            self.post(event)

    def _note_loaded(self, peer: PeerId, message: wire.Loaded) -> None:
        known = self.resident_bytes.get((message.stage, peer))
        self.resident_bytes[message.stage, peer] = message.resident_bytes
        if message.standby:
            # Connect to the standby now, so that no stream has to wait for it at a takeover.
            ticket = self._round.ticket(message.fence.plan_version, self._host.peer)
            self._member.dial_standby(peer, self._round.newest.members.get(peer, ()), message.fence, ticket)
        if known is None or message.fetched_bytes:
            self._on_progress(
                progress.WeightsLoaded(
                    message.stage, peer, message.standby, message.resident_bytes, message.fetched_bytes
                )
            )

    async def _serve(self, peer: PeerId, channel: Channel) -> None:
        """Answer a member's requests for weights on the state connection that this machine opened to it."""
        if peer != self._host.peer:
            await self._desk.answer(peer, channel)
        else:
            await channel.receive()

    async def _suspect_link(self, reporter: PeerId, message: wire.LinkLost) -> None:
        """Report a broken link to the machine, unless one of the two peers turns out to be lost."""
        other = PeerId(message.peer)
        if await self._connections.both_remain(reporter, other):
            self.post(LinkBroken(reporter, other, message.reason, fence=message.fence))

    def _lost(self, peer: PeerId, reason: str) -> None:
        for key in [key for key in self.resident_bytes if key[1] == peer]:
            del self.resident_bytes[key]
        self.post(PeerLost(peer, reason))

    async def close(self, reason: str) -> None:
        """Tell all members that the job is over, and close the connections."""
        if not self._ended.done():
            self._ended.set_result(EndJob(stopped=reason))
        self._tasks.cancel()
        await self._tasks.wait()
        await self._connections.close(self._round.highest, reason)
        self._desk.close()


def event_of(
    message: wire.Message, peer: PeerId, roles: ServingRoles, asked: Collection[tuple[Fence, int, str]]
) -> DriverEvent | None:
    """Return the event for a message, None if the state machine needs none. `asked`: (fence, stage, peer) of load
    requests; a peer that was asked may answer, even if a later plan without a new round gave the stage to another.
    Raises `ExecutionError` if the message is about another peer's stage."""
    stage = getattr(message, "stage", None)
    known = () if stage is None else (roles.places.get(stage), roles.standbys.get(stage))
    if stage is not None and peer not in known and (getattr(message, "fence", None), stage, peer) not in asked:
        raise ExecutionError(f"it sent a {type(message).__name__} of stage {stage}, which is not its own.")
    match message:
        case wire.Enlisted(fence=fence):
            return MemberEnlisted(peer, fence=fence)
        case wire.Loading(fence=fence):
            return interface.LoadProgressed(peer, message.stage, message.done_bytes, fence=fence)
        case wire.Loaded(fence=fence, standby=True):
            return interface.StandbyLoaded(peer, message.stage, fence=fence)
        case wire.Loaded(fence=fence):
            return interface.StageLoaded(peer, message.stage, message.cached, fence=fence)
        case wire.StageFailed(fence=fence, code="stale_fence"):
            return None  # the peer is in a later round already
        case wire.StageFailed(fence=fence):
            reason = f"peer {short(peer)}: {message.reason}"
            return StageFailure(message.stage, reason, peer=peer, fatal=message.code == "bad_graph", fence=fence)
        case wire.Working(fence=fence):
            return interface.StageWorking(peer, message.stage, message.number, message.busy_s, fence=fence)
        case wire.Rebuilt(fence=fence, stage=at) if roles.places.get(at) == peer:
            return interface.CacheRebuilt(message.number, message.session, message.length, fence=fence)
        case wire.PassFailed(fence=fence):
            return interface.PassFailure(message.number, message.stage, message.reason, fence=fence)
        case _:
            return None
