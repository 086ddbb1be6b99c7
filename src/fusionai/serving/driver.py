"""The driver of a serving job: performs the commands of `coordination.serving.driver`, feeds it events, sends passes.

Each event is handled in one turn of the event loop, without awaiting. The state machine makes the decisions.

Neighbours: `execution.links.connections` reaches the members, `serving.inbox` turns messages into events,
`serving.checking` has texts recomputed, `serving.engine` owns the generations and samples, `execution` runs the stages,
those of the job owner in this process included."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import numpy as np

from fusionai.coordination.serving import commands, events
from fusionai.coordination.serving.commands import EndJob, ServingCommand
from fusionai.coordination.serving.driver import ServingMachine
from fusionai.coordination.serving.events import ServingEvent
from fusionai.coordination.serving.roles import ServingRoles
from fusionai.coordination.serving.sessions import PassPlan
from fusionai.execution.deployment import Deployment, PlanSource
from fusionai.execution.host import Host
from fusionai.execution.links.connections import Connections
from fusionai.execution.serving.loading import OwnWeights
from fusionai.execution.serving.member import ServingMember, Testimony
from fusionai.execution.serving.retained import packed
from fusionai.execution.state import headers
from fusionai.execution.weights.server import WeightServer
from fusionai.ir.serving import LOGITS
from fusionai.primitives.errors import FusionError, PlanError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import FLOAT_DTYPES, HostTensor, host_tensor
from fusionai.scheduling.problem.types import Plan, Standby
from fusionai.serving import inbox, progress
from fusionai.serving.checking import Checking
from fusionai.serving.deployment import ServedCut, cut, ranges_of
from fusionai.serving.faults import ServingFaultLog
from fusionai.serving.job import ServingJob
from fusionai.transport.interface import Channel
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence, Segment, StageDelay

log = logging.getLogger(__name__)

TICK_S: Final = 0.25
"""Period of the state machine's timer, in seconds (chosen)."""
LATE_S: Final = 1.0
"""If a tick comes this many seconds late, the driver's own process was stalled, and no member is called late at that
tick."""
LINK_GRACE_S: Final = 0.2
"""Seconds to wait before a lost link is reported. A lost link is often the first sign of a lost peer, whose own
connection fails a moment later."""
FEED: Final = -1
"""Stage number of the token feed, which is the owner's process."""
TOLERANCE: Final[Mapping[str, float]] = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 2e-2, "int8": 5e-2, "int4": 5e-2}
"""Largest allowed difference between a probe's logits and the first probe's, relative to the first probe's largest
logit, by the format of weights."""


@dataclass(frozen=True, slots=True)
class Returned:
    """A finished pass. `rows`: [wanted rows, vocabulary or hidden size], None if no rows were wanted."""

    fence: Fence
    plan: PassPlan
    rows: np.ndarray | None
    hops: tuple[StageDelay, ...]
    elapsed_s: float


class PassSink(Protocol):
    """Receives results of passes and state changes of the job; implemented by the engine."""

    def returned(self, result: Returned) -> None: ...

    def failed(self, sessions: Sequence[int], reason: str) -> None:
        """End these generations, because they can't continue."""
        ...

    def stands(self, state: commands.ServingState, detail: str) -> None: ...

    def passes(self, now_s: float) -> None:
        """Called at each tick with the monotonic time."""
        ...


class ServingDriver:
    """Use as: `await driver.run()`, then `await driver.close()`. `machine_of` makes the state machine for the given
    roles."""

    def __init__(
        self,
        job: ServingJob,
        host: Host,
        deployment: Deployment,
        machine_of: Callable[[ServingRoles], ServingMachine],
        *,
        replanner: PlanSource,
        faults: ServingFaultLog,
        sink: PassSink,
        on_progress: Callable[[progress.Progress], None],
    ) -> None:
        if host.seal is None:
            raise PlanError(f"{job.job} needs its owner's key to sign placements with; this machine has none.")
        self._job = job
        self._host = host
        self._seal = host.seal
        self._replanner = replanner
        self._faults = faults
        self._sink = sink
        self._on_progress = on_progress
        self._deployments = {deployment.plan.version: deployment}
        self._cut = cut(job, deployment.plan)
        roles = self._cut.roles(deployment.plan, job.owner)
        self.machine = machine_of(roles)
        self.fence = Fence(roles.version, self.machine.incarnation, 0)
        self._highest = self.fence
        """The highest fence sent to any member."""
        self._placement: tuple[Fence, ServingRoles, bytes] | None = None
        """The last signed placement, with the fence and roles that it is for."""
        self._asked: set[tuple[Fence, int, str]] = set()
        """Load requests sent in this round or beside it, as (fence, stage, peer)."""
        self.resident_bytes: dict[tuple[int, str], int] = {}
        """Bytes of weights in memory, by (stage, peer)."""
        self.loading: dict[int, tuple[int, int]] = {}
        """Stage -> bytes of its weights that are loaded, and bytes in total."""
        self.compute_s: dict[int, float] = {}
        """Moving mean of a stage's compute time per pass, by stage."""
        self._passes: dict[int, tuple[PassPlan, float]] = {}
        """Passes in flight with the time they were sent, by number."""
        self._probes: dict[int, float] = {}
        self._first_probe: np.ndarray | None = None
        self._events: deque[ServingEvent] = deque()
        self._handling = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening: dict[PeerId, asyncio.Task[None]] = {}
        """The newest connection attempt for each peer."""
        self._asking: asyncio.Task[None] | None = None
        self._ended: asyncio.Future[EndJob] = asyncio.get_running_loop().create_future()
        self._desk = WeightServer(job.weights, (spec.digest for spec in job.weights.specs))
        self._member = ServingMember(
            host,
            job.job,
            job.owner,
            self.fence,
            OwnWeights(job.weights),
            on_result=self._on_result,
            on_testimony=self._on_testimony,
            on_link_lost=self._on_link_lost,
        )
        self._connections = Connections(
            job.job,
            host,
            self._member,
            on_message=self._on_message,
            serve_state=self._serve_weights,
            on_lost=self._on_lost,
        )
        self._checking = Checking(
            job,
            host,
            self._member,
            tell=self._connections.tell,
            on_opinion=lambda fence, check, found: self.tell(events.TextChecked(fence, check, found)),
            start=self._start,
        )

    # ------------------------------------------------------------------------------------------------- the loop

    async def run(self) -> EndJob:
        """Load, probe, serve until stopped. Failures of members end up in the result; they raise nothing."""
        ticking = asyncio.create_task(self._tick())
        try:
            self._perform_all(self.machine.start())
            self.tell(None)
            return await asyncio.shield(self._ended)
        finally:
            ticking.cancel()

    async def _tick(self) -> None:
        expected_s = self._host.clock.now_s()
        while True:
            now_s = self._host.clock.now_s()
            self._sink.passes(now_s)
            self._checking.passes(now_s)
            if now_s - expected_s < LATE_S:  # else messages that arrived during the stall are read first
                self.tell(events.Tick(now_s))
            expected_s = now_s + TICK_S
            await asyncio.sleep(TICK_S)

    def tell(self, event: ServingEvent | None) -> None:
        """Handle an event, or with None only send passes that are due. Events added meanwhile are handled in order."""
        if event is not None:
            self._events.append(event)
        if self._handling or self._ended.done():
            return
        self._handling = True
        try:
            while self._events:
                self._perform_all(self.machine.handle(self._events.popleft()))
            self._send_passes()
            for command in self.machine.next_checks():
                self._perform(command)
        finally:
            self._handling = False

    def _perform_all(self, todo: Sequence[ServingCommand]) -> None:
        for command in todo:
            try:
                self._perform(command)
            except FusionError as error:
                self._events.append(events.CommandFailed(str(error)))

    def _perform(self, command: ServingCommand) -> None:
        match command:
            case commands.BeginRound(fence, roles):
                self._begin_round(fence, roles)
            case commands.EnlistStandby(fence, peer, roles):
                self._enlist(PeerId(peer), fence, roles)
            case commands.SendLoad():
                self._load(command)
            case commands.SendRebuild():
                self._rebuild(command)
            case commands.SendProbe(number, segments, tokens, forget):
                self._probes[number] = self._host.clock.now_s()
                self._send(number, segments, tokens, (len(tokens) - 1,), forget=forget)
            case commands.ResumePasses():
                pass  # passes are sent after every event anyway
            case commands.BeginCheck():
                number = self.machine.batcher.take_number()
                places = self.machine.roles.places
                self._checking.begin(command, number, self.fence, places, self._cut, self._load_for_check)
            case commands.ReportCheck():
                self._tell_check(command)
            case commands.Distrust(peer, reason):
                self._first_probe = None
                self._replanner.distrust(peer, reason)
            case commands.AskPlan():
                self._ask_plan(command)
            case commands.Dismiss(peer, reason):
                self._connections.part_with(PeerId(peer), self._highest, reason)
            case commands.FailSessions(sessions, reason):
                self._sink.failed(sessions, self._faults.named(reason))
            case commands.ReportFault():
                self._faults.seen(command)
            case commands.ReportRebuilding():
                self._faults.rebuilding(command)
            case commands.ReportState(state, detail):
                self._sink.stands(state, self._faults.named(detail))
                if state == "ready":
                    self._on_progress(progress.EngineReady())
            case commands.EndJob():
                if not self._ended.done():
                    self._ended.set_result(command)

    # ---------------------------------------------------------------------------------------------------- rounds

    @property
    def deployment(self) -> Deployment:
        """The newest deployment, with its plan updated: guards that took over are in their new places."""
        newest = self._deployments[max(self._deployments)]
        return _with_plan(newest, _plan_as(newest.plan, self.machine.roles))

    def _begin_round(self, fence: Fence, roles: ServingRoles) -> None:
        """Void everything in flight, then announce the round to all its members."""
        self.fence = fence
        self._asked = {one for one in self._asked if one[0] >= fence}
        self._passes.clear()
        self._probes.clear()
        self._checking.drop()
        if roles.partition != self._cut.name:
            self._cut = cut(self._job, self._deployments[roles.version].plan)
        for peer in sorted({*roles.members, self._job.owner}):
            self._enlist(PeerId(peer), fence, roles)

    def _enlist(self, peer: PeerId, fence: Fence, roles: ServingRoles) -> None:
        self._highest = max(self._highest, fence)
        deployment = self._deployments[fence.plan_version]
        addresses = {**self._newest_deployment.members, **deployment.members}
        enlist = wire.Enlist(
            fence=fence,
            job=self._job.job,
            neighbours=tuple(
                wire.Neighbour(stage=stage, peer=place, addresses=tuple(addresses.get(place, ())))
                for stage, place in sorted(roles.places.items())
            ),
            guards=roles.guarded_by(peer),
            partition=roles.partition,
            ticket=deployment.tickets.get(peer, b""),
            placement=self._signed(fence, roles),
        )
        if self._connections.is_open(peer):
            self._connections.tell(peer, enlist)
            return

        async def open_first() -> None:
            if await self._connections.open(peer, deployment, fence):
                self._connections.tell(peer, enlist)

        former = self._opening.get(peer)
        if former is not None:
            former.cancel()
        self._opening[peer] = self._start(open_first())

    def _signed(self, fence: Fence, roles: ServingRoles) -> bytes:
        """The signed placement, the same bytes for all members of a round."""
        if self._placement is None or self._placement[:2] != (fence, roles):
            signed = self._seal.placement(
                self._job.job, fence, stages=roles.places.items(), guards=roles.guards.items()
            )
            self._placement = (fence, roles, signed)
        return self._placement[2]

    @property
    def _newest_deployment(self) -> Deployment:
        return self._deployments[max(self._deployments)]

    def _load(self, command: commands.SendLoad) -> None:
        stage, roles = command.stage, command.roles
        self._asked.add((command.fence, stage, command.peer))
        whole = self._cut if roles.partition == self._cut.name else self._cut_of(roles)
        marked = not command.standby and any(
            roles.places[one] != self._job.owner for one in (stage, stage - 1) if one in roles.places
        )
        load = msgspec.structs.replace(
            self._load_of(whole, stage, command.fence, self._job.options),
            standby=command.standby,
            fresh=command.fresh,
            marks=self._checking.secret_of(stage, command.peer) if marked else b"",
            sources=self._sources(command, whole),
        )
        self._connections.tell(PeerId(command.peer), load, (whole.stages[stage].encoded,))

    def _load_of(self, whole: ServedCut, stage: int, fence: Fence, options: wire.ServeOptions) -> wire.Load:
        part = whole.stages[stage]
        return wire.Load(
            fence=fence,
            job=self._job.job,
            stage=stage,
            stages=len(whole.stages),
            graph_hash=part.graph_hash,
            boundary=msgspec.Raw(msgspec.msgpack.encode(part.boundary)),
            options=options,
            select=part.select,
            weights=part.weights,
            tensors=headers({"graph": part.encoded}),
        )

    def _load_for_check(self, stage: int, options: wire.ServeOptions) -> tuple[wire.Load, HostTensor]:
        return self._load_of(self._cut, stage, self.fence, options), self._cut.stages[stage].encoded

    def _sources(self, command: commands.SendLoad, whole: ServedCut) -> tuple[wire.WeightSource, ...]:
        """Peers that run or guard a stage which shares tensors with this one, then the owner."""
        wanted = {spec.digest for spec in whole.stages[command.stage].weights}
        having: dict[str, set[bytes]] = {}
        roles, addresses = command.roles, self._newest_deployment.members
        for stage, peer in (*roles.places.items(), *roles.guards.items()):
            if peer not in (command.peer, self._job.owner):
                shared = wanted & {spec.digest for spec in whole.stages[stage].weights}
                having.setdefault(peer, set()).update(shared)
        others = [
            wire.WeightSource(peer=peer, addresses=tuple(addresses[peer]), digests=tuple(sorted(digests)))
            for peer, digests in sorted(having.items())
            if digests and addresses.get(peer)
        ]
        return (*others, wire.WeightSource(peer=self._job.owner, addresses=()))

    def _cut_of(self, roles: ServingRoles) -> ServedCut:
        return cut(self._job, self._deployments[roles.version].plan)

    async def _serve_weights(self, peer: PeerId, channel: Channel) -> None:
        """Answer a member's requests for weights on the state connection that this machine opened to it."""
        if peer != self._host.peer:
            await self._desk.answer(peer, channel)
        else:
            await channel.receive()

    def _ask_plan(self, command: commands.AskPlan) -> None:
        if self._asking is not None:
            self._asking.cancel()
        knows = self.machine.lost

        async def ask() -> None:
            waiting = lambda told: self._on_progress(progress.ServingPaused(told))  # noqa: E731
            newest = self._newest_deployment
            present = _with_plan(newest, _plan_as(newest.plan, command.roles))
            try:
                granted = await self._replanner.replacement(present, command.without, waiting)
            except FusionError as error:
                if command.urgent:
                    raise
                log.info("no other plan for %s: %s", self._job.job, error)
            else:
                self.offer(granted, command.reason, knows=knows)

        self._asking = self._start(ask())

    def shut_out(self, peer: PeerId, reason: str) -> None:
        """Treat a peer as lost. Does nothing if the peer has no connection."""
        self._connections.drop(peer, reason)

    def offer(self, deployment: Deployment, reason: str, *, knows: frozenset[str] | None = None) -> None:
        """Switch to a newer plan. Its guards load beside the passes; stages that move take a new round."""
        version = deployment.plan.version
        if version <= max(self._deployments):
            return
        self._deployments[version] = deployment
        same = ranges_of(deployment.plan) == self._cut.ranges
        whole = self._cut if same else cut(self._job, deployment.plan)
        roles = whole.roles(deployment.plan, self._job.owner)
        self._on_progress(progress.ServingPlanChanged(deployment.plan, self._faults.named(reason)))
        self.tell(events.PlanGiven(roles, self.machine.lost if knows is None else knows))

    def renew(self, deployment: Deployment) -> None:
        """Take new tickets or addresses for a known plan."""
        if deployment.plan.version in self._deployments:
            self._deployments[deployment.plan.version] = deployment

    # ---------------------------------------------------------------------------------------------------- passes

    def _send_passes(self) -> None:
        now_s = self._host.clock.now_s()
        while not self._ended.done() and (plan := self.machine.next_pass(now_s)) is not None:
            self._passes[plan.number] = (plan, now_s)
            self._send(
                plan.number, plan.segments, plan.tokens, plan.wanted, forget=plan.forget, hidden=plan.output == "hidden"
            )

    def _send(
        self,
        number: int,
        segments: tuple[Segment, ...],
        tokens: Sequence[int],
        wanted: tuple[int, ...] = (),
        *,
        forget: tuple[int, ...] = (),
        hidden: bool = False,
        rebuild: int = -1,
    ) -> None:
        tensors = {"input_ids": host_tensor("int64", (1, len(tokens)), np.array(tokens, np.int64).data)}
        message = wire.Pass(
            fence=self.fence,
            number=number,
            producer=FEED,
            consumer=0,
            segments=segments,
            wanted=wanted,
            output="hidden" if hidden else "logits",
            forget=forget,
            rebuild=rebuild,
            tensors=headers(tensors),
        )
        self._member.to_stage(0, message, tuple(tensors.values()))

    def _rebuild(self, command: commands.SendRebuild) -> None:
        number, segments = command.number, command.segments
        if command.source != FEED:
            order = wire.Rebuild(
                fence=self.fence, stage=command.source, through=command.through, number=number, segments=segments
            )
            self._connections.tell(PeerId(self.machine.roles.places[command.source]), order)
            return
        taken = 0
        for parts in packed(segments, self._job.options.pass_tokens):
            length = sum(part.length for part in parts)
            self._send(number, parts, command.tokens[taken : taken + length], rebuild=command.through)
            taken += length

    def _on_result(self, message: wire.PassResult, tensors: Mapping[str, HostTensor]) -> None:
        """Never raises: a member that sends an invalid result counts as lost."""
        if message.fence != self.fence:
            return
        now_s = self._host.clock.now_s()
        for hop in message.hops:
            mean_s = self.compute_s.get(hop.stage, hop.compute_s)
            self.compute_s[hop.stage] = mean_s + 0.05 * (hop.compute_s - mean_s)
            self.machine.measured(message.fence, message.number, hop.stage, hop.compute_s)
        if message.number in self._probes:
            del self._probes[message.number]
            rows = self._rows(message, tensors, 1, LOGITS)
            if rows is not None:
                self._probed(message.number, rows)
            return
        if (sent := self._passes.pop(message.number, None)) is None:
            return
        plan, sent_s = sent
        rows = None
        if plan.wanted:
            rows = self._rows(message, tensors, len(plan.wanted), plan.output)
            if rows is None:
                return
        self._sink.returned(Returned(message.fence, plan, rows, message.hops, now_s - sent_s))

    def _rows(
        self, message: wire.PassResult, tensors: Mapping[str, HostTensor], count: int, output: str
    ) -> np.ndarray | None:
        """The output as [count, width], or None if it is not what was expected; its sender then counts as lost."""
        tensor = tensors.get(output) if message.stage == len(self._cut.stages) - 1 else None
        if tensor is not None and len(tensor.shape) == 3 and tensor.shape[:2] == (1, count):
            logits = output != LOGITS or (tensor.dtype == "float32" and tensor.shape[2] >= self._job.vocabulary)
            if logits and tensor.dtype in FLOAT_DTYPES:
                return as_float32(tensor).reshape(count, -1)
        got = "nothing" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"
        peer = PeerId(self.machine.roles.places.get(message.stage, self._job.owner))
        self._connections.drop(peer, f"expected {count} rows of {output}, got {got}")
        return None

    def _probed(self, number: int, rows: np.ndarray) -> None:
        digest = hashlib.sha256(rows.tobytes()).hexdigest()
        distance = 0.0
        if self._first_probe is None:
            self._first_probe = rows.copy()
        else:
            scale = float(np.abs(self._first_probe).max()) or 1.0
            distance = float(np.abs(rows - self._first_probe).max()) / scale
        if not np.isfinite(rows).all():
            distance = float("inf")
        tolerance = TOLERANCE[self._job.options.weights]
        self.tell(events.ProbeReturned(self.fence, number, digest, distance, tolerance))

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
                self._start(self._suspect_link(peer, PeerId(message.peer), message.reason))
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
            event = inbox.event_of(message, peer, self.machine.roles, self._asked)
        except FusionError as error:
            if getattr(message, "fence", None) == self.fence:
                self._connections.drop(peer, error.message)
            return
        match message:
            case wire.Loading(stage=stage, done_bytes=done_bytes, total_bytes=total_bytes):
                self.loading[stage] = (done_bytes, total_bytes)
                self._on_progress(progress.StageLoading(stage, peer, done_bytes, total_bytes))
            case wire.Loaded():
                self._note_loaded(peer, message)
            case _:
                pass
        if event is not None:
            self.tell(event)

    def _on_testimony(self, peer: PeerId, message: Testimony, tensors: Mapping[str, HostTensor]) -> None:
        self._checking.heard(peer, message, tensors)

    def _tell_check(self, command: commands.ReportCheck) -> None:
        checks = self.machine.checks
        assert checks is not None
        self._on_progress(
            progress.TextRechecked(
                stage=command.check.stage,
                peer=command.check.peer,
                referee=command.check.referee,
                outcome=command.outcome,
                reason=self._faults.named(command.reason),
                tasks=checks.inspector.tasks,
                checked_tasks=checks.inspector.checked_tasks,
            )
        )

    def _note_loaded(self, peer: PeerId, message: wire.Loaded) -> None:
        known = self.resident_bytes.get((message.stage, peer))
        self.resident_bytes[message.stage, peer] = message.resident_bytes
        self.loading.pop(message.stage, None)
        if message.standby:
            self._dial_guard(peer, message.fence)
        if known is None or message.fetched_bytes:
            self._on_progress(
                progress.StageLoaded(
                    message.stage, peer, message.standby, message.resident_bytes, message.fetched_bytes
                )
            )

    def _dial_guard(self, peer: PeerId, fence: Fence) -> None:
        """Connect to the guard now, so that no stream has to wait for it at a takeover."""
        deployment = self._deployments[fence.plan_version]
        addresses = self._newest_deployment.members.get(peer, ())
        self._member.dial_guard(peer, addresses, fence, deployment.tickets.get(self._host.peer, b""))

    def _on_link_lost(self, peer: PeerId, reason: str) -> None:
        self._start(self._suspect_link(self._host.peer, peer, reason))

    async def _suspect_link(self, reporter: PeerId, other: PeerId, reason: str) -> None:
        """Report a broken link to the machine, unless one of the two peers turns out to be lost."""
        fence = self.fence
        while True:
            await asyncio.sleep(LINK_GRACE_S)
            if not (self._connections.is_doubtful(reporter) or self._connections.is_doubtful(other)):
                break
        if self._connections.is_open(reporter) and self._connections.is_open(other):
            self.tell(events.LinkBroken(fence, reporter, other, reason))

    def _on_lost(self, peer: PeerId, reason: str) -> None:
        for key in [key for key in self.resident_bytes if key[1] == peer]:
            del self.resident_bytes[key]
        self.tell(events.PeerLost(peer, reason))

    # ---------------------------------------------------------------------------------------------------- the end

    def _start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await work
            except FusionError as error:
                self.tell(events.CommandFailed(str(error)))
            except Exception as error:  # the job must end with a reason, not wait for a task that failed
                log.exception("a command of %s failed", self._job.job)
                self.tell(events.CommandFailed(f"{type(error).__name__}: {error}"))

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # if it was cancelled before it began
        return task

    async def close(self, reason: str) -> None:
        """Tell all members that the job is over, and close the connections."""
        if not self._ended.done():
            self._ended.set_result(EndJob(stopped=reason))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._connections.close(self._highest, reason)
        self._desk.close()


def as_float32(tensor: HostTensor) -> np.ndarray:
    """Return a float32 array; float32 input shares memory, other dtypes are copied."""
    if tensor.dtype == "bfloat16":
        bits = np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(tensor.shape)
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape).astype(np.float32, copy=False)


def _with_plan(deployment: Deployment, plan: Plan) -> Deployment:
    return Deployment(plan=plan, members=deployment.members, tickets=deployment.tickets)


def _plan_as(plan: Plan, roles: ServingRoles) -> Plan:
    """Return the plan with the places that machines have now."""
    stages = tuple(
        msgspec.structs.replace(stage, peer=roles.places.get(stage.stage, stage.peer)) for stage in plan.stages
    )
    exact = {(guard.stage, guard.peer): guard.exact for guard in plan.guards}
    guards = tuple(
        Standby(stage=stage, peer=peer, exact=exact.get((stage, peer), True))
        for stage, peer in sorted(roles.guards.items())
    )
    return msgspec.structs.replace(plan, stages=stages, guards=guards)
