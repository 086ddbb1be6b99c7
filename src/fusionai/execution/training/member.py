"""One machine's part in one job: its stages, its links, the snapshots it keeps, its connection to the driver.

The member checks every message's fence, validates what it is asked to run before loading it, and routes messages to
stages. It outlives a driver's connection: the driver's next connection takes it over. All decisions about the job are
the driver's. The peer's daemon uses it, and the driver's process uses it for the job owner's own stages.

`execution.training.runtime` runs each stage, `execution.links` moves tensors,
`execution.training.snapshots` handles snapshots."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from fusionai.execution.host import Host
from fusionai.execution.member import RoundMember, refusal_of
from fusionai.execution.training.boundary import Sent, ends
from fusionai.execution.training.runtime import StageRuntime
from fusionai.execution.training.snapshots import MemberSnapshots
from fusionai.execution.training.stages import Stages
from fusionai.execution.training.verifier import StepVerifier
from fusionai.primitives.errors import ChannelClosed, ExecutionError, FusionError, TransportError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor
from fusionai.transport.interface import Channel, Envelope
from fusionai.wire import messages as wire
from fusionai.wire.frame import by_name
from fusionai.wire.messages import Fence

log = logging.getLogger(__name__)

OutputSink = Callable[[wire.Output, dict[str, HostTensor]], None]


class JobMember(RoundMember):
    """Takes part in one job. `owner` is the driver's peer id, `opened` the fence with which it opened the job.
    `on_output` is set only in the driver's process, where job outputs end; other members send theirs over the
    network."""

    def __init__(
        self,
        host: Host,
        job: str,
        owner: PeerId,
        opened: Fence,
        *,
        on_output: OutputSink | None = None,
    ) -> None:
        super().__init__("train", host, job, owner, opened)
        self._on_output = on_output
        self._stages = Stages(host, job, self)
        self._attaching = asyncio.Lock()
        self.kept = MemberSnapshots(
            host.transport,
            self._placement,
            make_room=self._stages.make_room,
            now_s=host.clock.now_s,
            on_kept=self._snapshot_kept,
            on_refused=self._snapshot_refused,
            on_evidence=self.send_evidence,
            on_twin=self._hear_twin,
        )
        host.memory.join(self.kept.store)
        self._checks: set[asyncio.Task[None]] = set()
        """Rechecks of the present round, including finished ones."""
        self._verifiers: dict[int, StepVerifier] = {}
        """Stage that is rechecked here -> its verifier."""
        self._twins: dict[int, frozenset[PeerId]] = {}
        """Stage here -> peers of other replicas that its driver named in the last round and since."""
        self._state_channel: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()

    @property
    def stages(self) -> tuple[int, ...]:
        return self._stages.numbers

    @property
    def snapshots(self) -> tuple[wire.SnapshotAt, ...]:
        """Complete snapshots kept here."""
        return self.kept.store.held

    # ------------------------------------------------------------------------------------------ reading channels

    def _order(self, envelope: Envelope) -> bool:
        match envelope.message:
            case wire.Attach() as attach:
                self._start(self._attach(attach, envelope.tensors), envelope)
            case wire.Prepare() as request:
                self._start(self._prepare(request, envelope.tensors), envelope)
            case wire.PassSnapshot() as order:
                self._start(self._hand_on(order))
            case wire.Recheck() as asked:
                self._checks.add(self._start(self._recheck(asked, envelope.tensors), envelope))
            case wire.SendEvidence() as asked:
                self._start(self._answer_evidence(asked))
            case wire.ExchangeRound() as message:
                if message.fence == self._placement.fence:
                    former = self._twins.get(message.stage, frozenset[PeerId]()) if message.is_welcome else frozenset()
                    self._twins[message.stage] = former | {PeerId(twin.peer) for twin in message.twins}
                self._deliver(message.stage, message, envelope.tensors)
            case wire.Resume() | wire.Commit() | wire.Export() | wire.ExchangeAdopt() as message:
                if isinstance(message, wire.Commit) and message.fence == self._placement.fence:
                    self.kept.store.drop_below(message.watermark)
                self._deliver(message.stage, message, envelope.tensors)
            case _:
                return False
        return True

    async def serve_state(self, channel: Channel) -> None:
        """Take state chunks from the driver. What `state` sends leaves on the same connection."""
        if self._state_channel.done():
            self._state_channel = asyncio.get_running_loop().create_future()
        self._state_channel.set_result(channel)
        with self._served():
            try:
                while True:
                    envelope = await channel.receive()
                    match envelope.message:
                        case wire.StateChunk() as message:
                            await self._take_state(message, envelope.tensors)
                        case wire.ExchangePart() as message:
                            self._deliver(message.stage, message, envelope.tensors)
                        case wire.Forward() | wire.Backward() | wire.SharedGradient() as message:
                            self.send_evidence(self.owner, message, envelope.tensors)
                        case wire.Ping(sequence=sequence, sent_at_s=sent_at_s):
                            await channel.send(wire.Pong(sequence=sequence, sent_at_s=sent_at_s))
                        case other:
                            raise ExecutionError(
                                f"expected a StateChunk or an ExchangePart on a state connection, "
                                f"got {type(other).__name__}."
                            )
            except ChannelClosed:
                return
            except FusionError as error:
                self._report(error)

    async def _take_state(self, message: wire.StateChunk, tensors: dict[str, HostTensor]) -> None:
        runtime = self._runtime(message.stage, message.fence)
        if runtime is None:
            return
        try:
            await runtime.receive_state(message, tensors)
        except FusionError as error:
            self._report(error, runtime)

    async def serve_snapshots(self, peer: PeerId, channel: Channel) -> None:
        """Serve a state connection on which another member sends snapshots."""
        with self._served():
            await self.kept.serve(peer, channel)

    async def _from_link(self, peer: PeerId, envelope: Envelope) -> None:
        message = envelope.message
        sender, receiver = ends(message)
        if sender is None:
            raise self._only_the_driver(peer, message)
        if not self._is_of_round(peer, message, sender):
            return
        if isinstance(message, wire.Output):
            self._take_output(message, envelope.tensors)
        elif receiver is not None:
            self._deliver(receiver, message, envelope.tensors)

    def _deliver(self, number: int, message: wire.Message, tensors: Mapping[str, HostTensor]) -> None:
        runtime = self._runtime(number, getattr(message, "fence", None))
        if runtime is None:
            return
        try:
            runtime.receive(message, tensors)
        except FusionError as error:
            self._report(error, runtime)
        except Exception as error:
            log.exception("stage %d of %s could not take a %s", number, self.job, type(message).__name__)
            self._report(ExecutionError(f"{type(error).__name__}: {error}"), runtime)

    def _runtime(self, stage: int | None, fence: Fence | None) -> StageRuntime | None:
        """Return the stage if it is here and at exactly this fence."""
        runtime = None if stage is None else self._stages.runtimes.get(stage)
        if runtime is not None and fence is not None and runtime.accepts(fence):
            return runtime
        self.stale_dropped += 1
        return None

    # ------------------------------------------------------------------------------------- enlisting and attaching

    def enlist(self, enlist: wire.Enlist) -> wire.Enlisted | wire.Refused:
        """Begin a round: adopt its fence and placement. Stages that now run elsewhere are dropped unless they are
        with their standby here; snapshots stay."""
        if (refused := self._adopt(enlist)) is not None:
            return refused
        for check in self._checks:
            check.cancel()
        self._checks.clear()
        own = self._own
        # A stage that now runs elsewhere and has its standby here stays loaded until its snapshot is complete (recovery
        # rule 22).
        left = self._placement.standbys - own if enlist.partition == self.kept.store.partition else frozenset[int]()
        self._start(self._stages.keep_only(own, aside=left, standby_of=self._placement.standbys))
        # A member without stages exchanges no tensors. The others drop their ends too, which is not a loss to report.
        linked = bool(own) or self.owner == self._host.peer
        self._links.begin_round(self._placement.peers if linked else frozenset())
        self.kept.begin_round(self._placement, enlist.partition)
        if self.owner == self._host.peer:
            # The driver's machine feeds every member and hears from it, whatever stages it has itself.
            for neighbour in enlist.neighbours:
                self._dial(neighbour)
        return wire.Enlisted(fence=enlist.fence, fingerprint=self._host.fingerprint, snapshots=self.kept.store.held)

    async def _attach(self, attach: wire.Attach, tensors: Mapping[str, HostTensor]) -> None:
        """Load the stage if necessary, one stage at a time. Later rounds may begin meanwhile."""
        async with self._attaching:
            try:
                runtime = await self._made(attach, tensors)
            except Exception as error:  # whatever was received, the driver must not wait for this stage
                if not isinstance(error, FusionError):
                    log.exception("stage %d of %s could not be loaded", attach.stage, self.job)
                self._refuse(attach, *refusal_of(error))
            else:
                if runtime is not None:
                    runtime.attach(attach)
                    for stage in runtime.linked_stages:
                        self._dial(self._placement.neighbours[stage])

    async def _prepare(self, request: wire.Prepare, tensors: Mapping[str, HostTensor]) -> None:
        """Load a stage with a standby in advance. A failure is only logged: if the stage can't run here, the attach
        will report it."""
        async with self._attaching:
            if request.fence != self._placement.fence or request.stage not in self._placement.standbys:
                self.stale_dropped += 1
                return
            here_bytes = self.kept.store.nbytes_of(request.stage)
            try:
                await self._stages.prepare(request, tensors, self._placement.places, here_bytes)
            except FusionError as error:
                log.warning("stage %d of %s could not be prepared for a takeover: %s", request.stage, self.job, error)
            except Exception:  # whatever was received, this member continues
                log.exception("stage %d of %s could not be prepared for a takeover", request.stage, self.job)

    async def _made(self, attach: wire.Attach, tensors: Mapping[str, HostTensor]) -> StageRuntime | None:
        """Return the stage's runtime; None, after a refusal, if the attach is not (or no longer) of the present
        round."""
        refuse = partial(self._refuse, attach)
        if not self._is_present(attach, refuse):
            return None
        runtime = await self._stages.made(attach, tensors, self._placement.places)
        if not self._is_present(attach, refuse):
            return None
        await self._stages.adopt(runtime)
        return runtime

    def _on_beat(self, beat: int) -> None:  # noqa: ARG002
        self.kept.beat()

    # ------------------------------------------------------------------------------- what runtimes and driver send

    def output(self, message: wire.Output, tensors: Sequence[HostTensor]) -> None:
        if self._on_output is not None:
            self._take_output(message, by_name(message, tensors))
            return
        self._post(self.owner, message, tensors)

    async def state(
        self,
        message: wire.StateChunk | wire.Snapshot | wire.ExchangePart | Sent,
        tensors: Sequence[HostTensor],
    ) -> None:
        """Send on the driver's state connection. Raises `TransportError`."""
        await (await asyncio.shield(self._state_channel)).send(message, tensors)

    async def linked(self, stages: Sequence[int]) -> bool:
        """Wait for the links to these stages and the driver; return whether all are up. A missing one is reported."""
        peers = {self._placement.peer_of(stage) for stage in stages} | {self.owner}
        return all([await self._is_linked(peer, self._placement.fence) for peer in sorted(peers - {self._host.peer})])

    def without_standby(self, standby: PeerId, reason: str) -> None:
        """Report that consecutive snapshots did not reach the standby."""
        self.to_driver(wire.LinkLost(fence=self._placement.fence, peer=standby, reason=reason[:4000]))

    async def _hand_on(self, order: wire.PassSnapshot) -> None:
        if order.fence != self._placement.fence:
            self.stale_dropped += 1
            return
        to_owner = order.peer == self.owner  # the owner rechecks from there
        if to_owner and self.kept.store.whole(order.stage, order.step) is None:
            self.to_driver(wire.EvidenceMissing(fence=order.fence, stage=order.stage, about=order.stage))
            return

        async def send(message: wire.Snapshot, tensors: Sequence[HostTensor]) -> None:
            await self._give(PeerId(order.peer), order.ticket, message, tensors)

        try:
            await self.kept.hand_on(order, send)
        except FusionError as error:
            self._link_lost(PeerId(order.peer), f"the snapshot of stage {order.stage} could not be sent: {error}")

    # ------------------------------------------------------------------------------------ stages of other replicas

    def check(self, peer: PeerId, opening: wire.OpenJob) -> None:
        """Raise `TrustError` for a peer that neither the owner's signed placement names nor, as a machine of another
        replica, this stage's driver on its own connection."""
        if not opening.twin_of or peer not in frozenset[PeerId]().union(*self._twins.values()):
            super().check(peer, opening)

    async def to_twin(self, twin: wire.TwinStage, message: wire.ExchangePart, tensors: Sequence[HostTensor]) -> None:
        """Send to a stage of another replica; to and from the owner's machine on the driver's connection, because
        members do not dial it. Raises `TransportError`."""
        if self.owner in (twin.peer, self._host.peer):
            await self.state(message, tensors)
            return
        peer, placement = PeerId(twin.peer), self._placement
        opening = wire.OpenJob(job=twin.job, fence=twin.fence, ticket=placement.ticket, twin_of=self.job)
        try:
            addresses = self._host.addresses_of(peer, twin.job, twin.ticket)
            await self.kept.send(peer, addresses, message, tensors, opening)
        except TransportError:
            raise
        except FusionError as error:  # refused, because it has not heard of the round yet, or by an expired ticket
            raise TransportError(str(error)) from error

    def _hear_twin(self, peer: PeerId, message: wire.ExchangePart | None, tensors: Mapping[str, HostTensor]) -> None:
        """Take a part of an exchange; None: the connection ended, and perhaps something on its way was lost."""
        if message is None:
            for stage, peers in self._twins.items():
                if peer in peers and (runtime := self._runtime(stage, self._placement.fence)) is not None:
                    runtime.twins.ask_again()
            return
        if message.job != self.job or message.fence != self._placement.fence:
            self.stale_dropped += 1
            return
        if peer not in self._twins.get(message.stage, frozenset()):
            raise ExecutionError(f"peer {short(peer)} sent a part of an exchange; this stage's driver did not name it.")
        self._deliver(message.stage, message, tensors)

    # ---------------------------------------------------------------------------------------------------- spot checks

    async def _recheck(self, request: wire.Recheck, tensors: Mapping[str, HostTensor]) -> None:
        """Recheck another peer's steps and report the result. A problem with it never counts as a stage's failure."""
        stage, has_standby = request.stage, request.stage in self._placement.standbys
        if request.fence != self._placement.fence:
            self.stale_dropped += 1
            return
        if self._placement.peer_of(stage) == self._host.peer:
            raise ExecutionError(f"the driver asked this peer to recheck stage {stage}, which it runs itself.")
        try:
            async with self._attaching:
                loaded = await self._stages.lent(request, tensors, self._placement.places)
            verifier = StepVerifier(request, loaded, self._host.compute, self._host.memory)
            self._verifiers[stage] = verifier
            if not has_standby:
                self.kept.judged.add(stage)
            self.to_driver(wire.Rechecking(fence=request.fence, stage=stage, first=request.first, below=request.below))
            begin, end = [
                await self._snapshot_for_check(stage, step, has_standby) for step in (request.first, request.below)
            ]
            answer = await verifier.run(begin, end)
        except FusionError as error:
            answer = _no_opinion(request, str(error))
        except Exception as error:  # whatever was received, this member continues
            log.exception("stage %d of %s could not be rechecked", stage, self.job)
            answer = _no_opinion(request, f"{type(error).__name__}: {error}")
        finally:
            self._verifiers.pop(stage, None)
            if not has_standby:
                self.kept.judged.discard(stage)
                self.kept.store.drop(stage)
        self.to_driver(answer)

    async def _snapshot_for_check(self, stage: int, step: int, has_standby: bool) -> Mapping[str, HostTensor]:
        """Return a snapshot for a recheck. A standby must have it already; for other members it is sent."""
        if not has_standby:
            return await self.kept.whole(stage, step)
        entries = self.kept.store.keep_for_check(stage, step)
        if entries is None:
            raise ExecutionError(f"the snapshot of step {step} of stage {stage} is not kept here any more.")
        return entries

    def send_evidence(self, peer: PeerId, message: Sent, tensors: Mapping[str, HostTensor]) -> None:
        """Take tensors that a stage received from `peer`, for the verifier that reruns the stage. Raises
        `ExecutionError` if `peer` does not run the stage it claims as the sender."""
        sender, stage = ends(message)
        verifier = None if stage is None else self._verifiers.get(stage)
        if message.fence != self._placement.fence or verifier is None or sender is None:
            self.stale_dropped += 1
            return
        if self._placement.peer_of(sender) != peer:
            raise ExecutionError(f"peer {short(peer)} sent a {type(message).__name__} as stage {sender}, not its own.")
        try:
            verifier.take(message, tensors)
        except FusionError as error:
            verifier.fail(str(error))

    async def _answer_evidence(self, request: wire.SendEvidence) -> None:
        """Send a verifier what its stage received. If this fails, the verifier has no opinion; nothing else follows."""
        runtime = self._runtime(request.stage, request.fence)
        if runtime is None:
            return
        if PeerId(request.peer) not in self._placement.named | {self.owner, self._host.peer}:
            log.warning("the signed placement of %s does not name verifier %s", self.job, short(PeerId(request.peer)))
            return
        if not runtime.retains_whole(request.about, request.first, request.below):
            self.to_driver(wire.EvidenceMissing(fence=request.fence, stage=request.stage, about=request.about))
            return
        sent = list(runtime.retained.again(request.fence, {request.about}, request.first, request.below))
        try:
            for _, message, tensors in sent:
                if request.fence != self._placement.fence:
                    return
                await self._give(PeerId(request.peer), request.ticket, message, tensors)
        except FusionError as error:
            log.warning("the inputs of stage %d could not be sent to its verifier: %s", request.about, error)

    async def _give(
        self, peer: PeerId, ticket: bytes, message: wire.Snapshot | Sent, tensors: Sequence[HostTensor]
    ) -> None:
        """Send snapshots and retained tensors to another member. To and from the owner's machine they travel through
        the driver's connection, because members do not dial it. Raises `RefusedError`, `TransportError`,
        `TrustError`."""
        if self.owner in (peer, self._host.peer):
            await self.state(message, tensors)
        elif peer == self._host.peer:
            if not isinstance(message, wire.Snapshot):
                self.send_evidence(peer, message, by_name(message, tensors))
        else:
            await self.kept.send(peer, self._host.addresses_of(peer, self.job, ticket), message, tensors)

    def take_snapshot(self, peer: PeerId, message: wire.Snapshot, tensors: Mapping[str, HostTensor]) -> None:
        """Take a snapshot that the driver received, on the owner's machine. Raises `ExecutionError` if it is not
        needed."""
        self.kept.take(peer, message, tensors)

    def _take_output(self, message: wire.Output, tensors: dict[str, HostTensor]) -> None:
        if self._on_output is None:
            raise ExecutionError(f"an output of {self.job} arrived at a member without a driver.")
        self._on_output(message, tensors)

    # -------------------------------------------------------------------------------------------------- the ends

    def _refuse(self, attach: wire.Attach, code: wire.RefusalCode, reason: str) -> None:
        self.to_driver(wire.StageFailed(fence=attach.fence, stage=attach.stage, code=code, reason=reason[:4000]))

    def _snapshot_kept(self, stage: int, step: int) -> None:
        """Report a complete snapshot, and drop the stage that was kept loaded only until then."""
        self.to_driver(wire.SnapshotKept(fence=self._placement.fence, stage=stage, step=step))
        if self._placement.places.get(stage) != self._host.peer:
            kept = frozenset(self.stages) - {stage}
            self._start(self._stages.keep_only(kept, standby_of=self._placement.standbys))

    def _snapshot_refused(self, stage: int, code: wire.RefusalCode, reason: str) -> None:
        """Report a snapshot that failed. The driver takes a failure of a stage that runs elsewhere as one of its
        snapshots."""
        if (verifier := self._verifiers.get(stage)) is not None and stage in self.kept.judged:
            verifier.fail(reason)
            return
        fence = self._placement.fence
        self.to_driver(wire.StageFailed(fence=fence, stage=stage, code=code, reason=reason[:4000]))

    def _report(self, error: FusionError, runtime: StageRuntime | None = None) -> None:
        """Fail the stage that can't follow a message, or all stages here if the message addressed none."""
        for failed in [runtime] if runtime is not None else self._stages.all:
            self.failed(failed.stage, failed.fence, "bad_message", str(error))

    async def _detach(self) -> None:
        self.kept.store.clear()
        await self._stages.keep_only(frozenset())

    async def close(self) -> None:
        """End all work of this member. Does nothing if it is closed already."""
        self._closed = True
        await self._detach()
        await self._links.close()
        await self.kept.close()
        await self._end_tasks()
        await self._detach()  # what an attach under way had loaded meanwhile


def _no_opinion(request: wire.Recheck, reason: str) -> wire.Rechecked:
    return wire.Rechecked(
        fence=request.fence,
        stage=request.stage,
        first=request.first,
        below=request.below,
        reason=reason[:4000] or "it failed",
    )
