"""One machine's part in one serving job: its stages, its links, its weights, its connection to the driver.

Decides nothing of the job. Checks every message's fence, loads what it is told to run after validating it, and brings
passes to the right stage. Outlives its driver's connection. Used by the peer's daemon and, for the job owner's own
stages, by the engine's process.

Neighbours: `execution.serving_stage` runs each stage, `execution.serving_weights` brings weights, `execution.links`
moves tensors. `execution.member` is the same for training.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from fusionai.coordination.silence import PING_S
from fusionai.execution.allocator import return_code_pages, return_freed_memory
from fusionai.execution.driven_part import DrivenPart, LinkLostSink
from fusionai.execution.host import Host
from fusionai.execution.links import Links, dials
from fusionai.execution.outbox import Outbox
from fusionai.execution.serving_loading import identity_of, prepare_stage
from fusionai.execution.serving_referee import TextReferee
from fusionai.execution.serving_stage import ServingStage
from fusionai.execution.serving_weights import StageWeights
from fusionai.execution.state import headers
from fusionai.primitives.errors import (
    ExecutionError,
    FusionError,
    GraphError,
    TransportError,
)
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor
from fusionai.storage.weight_pieces import spec_bytes
from fusionai.transport.interface import Channel, Envelope
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence

log = logging.getLogger(__name__)

ResultSink = Callable[[wire.PassResult, Mapping[str, HostTensor]], None]
Testimony = wire.ToldMarks | wire.ShownRows | wire.ReadText
TestimonySink = Callable[[PeerId, Testimony, Mapping[str, HostTensor]], None]

LOADING_S: Final = 0.5
"""Between two words of how far the weights are."""
WORKING_BEATS: Final = 4
"""So many pings' intervals lie between two words of what stages compute."""


class ServingMember(DrivenPart):
    """`owner` is the driver's peer id, `opened` the fence it opened the job with. `on_result`, `on_testimony` and
    `on_link_lost` only where the driver lives: results of passes, what checks need and news of lost links end there,
    others send theirs on the network."""

    def __init__(
        self,
        host: Host,
        job: str,
        owner: PeerId,
        opened: Fence,
        weights: StageWeights,
        *,
        on_result: ResultSink | None = None,
        on_testimony: TestimonySink | None = None,
        on_link_lost: LinkLostSink | None = None,
    ) -> None:
        super().__init__("serve", host, job, owner, opened, on_link_lost)
        self.snapshots: tuple[wire.SnapshotAt, ...] = ()
        """Of a kind that only training keeps."""
        self._weights = weights
        self._on_result = on_result
        self._on_testimony = on_testimony
        self._stages: dict[int, ServingStage] = {}
        self._referees: dict[int, TextReferee] = {}
        """By the number of the check."""
        self._loading = asyncio.Lock()
        self._loads: dict[int, wire.Loading] = {}
        """Of stages that are being loaded, how far they are: told again while that takes."""
        self._visitors: set[PeerId] = set()
        """Linked without a stage: guards."""
        self._guests: dict[Channel, PeerId] = {}
        """Members that ask for weights."""
        self._links = Links(host.transport, on_message=self._from_link, on_lost=self._link_lost, now_s=host.clock.now_s)

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(sorted(self._stages))

    @property
    def present(self) -> Fence:
        """Of the round that was begun last."""
        return self._placement.fence

    # ------------------------------------------------------------------------------------------ reading channels

    def _obey(self, envelope: Envelope, driver: Outbox) -> None:
        """One message of the driver's. Takes no time: what does goes on beside the connection."""
        match envelope.message:
            case wire.Ping(sequence=sequence, sent_at_s=sent_at_s):
                driver.post(wire.Pong(sequence=sequence, sent_at_s=sent_at_s))
            case wire.Enlist() as enlist:
                self.to_driver(self.enlist(enlist))
            case wire.Load() as load:
                self._start(self._load(load, envelope.tensors))
            case wire.Rebuild() as order:
                self._deliver(order, {})
            case wire.TellMarks() | wire.ShowRows() | wire.ReadAgain() as order:
                self._testify(order)
            case other:
                raise ExecutionError(f"the driver sent a {type(other).__name__} on its control connection.")

    async def serve_state(self, channel: Channel) -> None:
        """The driver gives weights on this connection when asked."""
        with self._served():
            await self._weights.from_owner(channel)

    async def serve_snapshots(self, peer: PeerId, channel: Channel) -> None:
        """Another member asks for weights."""
        self._guests[channel] = peer
        try:
            with self._served():
                await self._weights.to_other(peer, channel)
        finally:
            del self._guests[channel]

    async def serve_link(self, peer: PeerId, channel: Channel) -> None:
        """A neighbour dialled this machine, or whoever will be one when it takes a stage over."""
        if peer not in self._placement.peers:
            self._visitors.add(peer)
        with self._served():
            await self._links.serve(peer, channel)

    def _see_off(self) -> None:
        """Whom the placement of the round names no more; the driver's machine has asked its visitors in itself."""
        if self.owner != self._host.peer:
            self._visitors = {peer for peer in self._visitors if self._roster.may_stay(peer)}
        for channel in [channel for channel, peer in self._guests.items() if not self._roster.may_stay(peer)]:
            channel.abort()

    async def _from_link(self, peer: PeerId, envelope: Envelope) -> None:
        message = envelope.message
        match message:
            case (
                wire.Pass(producer=sender)
                | wire.PassResult(stage=sender)
                | wire.ToldMarks(stage=sender)
                | wire.ShownRows(stage=sender)
            ):
                pass
            case wire.ReadText():
                sender = None  # of whoever stands by: the driver knows who was asked
            case _:
                raise ExecutionError(f"peer {short(peer)} sent a {type(message).__name__}; only the driver may.")
        if message.fence != self._placement.fence:
            self.stale_dropped += 1  # of another placement, so who may send what is another question
            return
        if sender is not None and self._placement.peer_of(sender) != peer:
            raise ExecutionError(f"peer {short(peer)} sent a {type(message).__name__} as stage {sender}, not its own.")
        match message:
            case wire.Pass():
                self._deliver(message, envelope.tensors)
            case wire.ShownRows():
                self._read_on(peer, message, envelope.tensors)
            case wire.PassResult():
                if self._on_result is None:
                    raise ExecutionError(f"a result of {self.job} arrived where no driver is.")
                self._on_result(message, envelope.tensors)
            case wire.ToldMarks() | wire.ReadText():
                if self._on_testimony is None:
                    raise ExecutionError(f"a word for a check of {self.job} arrived where no driver is.")
                self._on_testimony(peer, message, envelope.tensors)

    def _deliver(self, message: wire.Pass | wire.Rebuild, tensors: Mapping[str, HostTensor]) -> None:
        """To the stage it is for, if the fence is exactly that of the round."""
        number = message.consumer if isinstance(message, wire.Pass) else message.stage
        stage = self._stages.get(number)
        here = self._placement.places.get(number) == self._host.peer
        if stage is None or not here or message.fence != self._placement.fence:
            self.stale_dropped += 1
            return
        try:
            if isinstance(message, wire.Rebuild):
                stage.rebuild(message)
            elif message.producer != number - 1:
                raise ExecutionError(f"stage {message.producer} sent a pass to stage {number}, not to the next.")
            else:
                stage.take(message, tensors)
        except FusionError as error:
            self.failed(number, message.fence, "bad_message", str(error))
        except Exception as error:
            log.exception("stage %d of %s could not take a %s", number, self.job, type(message).__name__)
            self.failed(number, message.fence, "bad_message", f"{type(error).__name__}: {error}")

    # --------------------------------------------------------------------------------------- enlisting and loading

    def enlist(self, enlist: wire.Enlist) -> wire.Enlisted | wire.Refused:
        """A round begins: adopt its fence and places; stages that are neither run nor guarded here are forgotten."""
        if (refused := self._adopt(enlist)) is not None:
            return refused
        for referee in self._referees.values():
            self._start(referee.end())
        self._referees.clear()
        if not self._enlisted:
            self._enlisted = True
            self._start(self._beat())
        self._keep_only(self._own | self._placement.guards)
        self._see_off()
        # Others drop their ends too, and that is no loss to tell of.
        linked = self._placement.peers if self._exchanges else {PeerId(one.peer) for one in self._linked()}
        self._links.begin_round({*linked, self.owner} | self._visitors)
        for neighbour in self._linked():
            self._dial(neighbour)
        return wire.Enlisted(fence=enlist.fence, fingerprint=self._host.fingerprint)

    @property
    def _exchanges(self) -> bool:
        """Whether this machine has a part in passes; a guard has none."""
        return bool(self._own) or self.owner == self._host.peer

    def _linked(self) -> list[wire.Neighbour]:
        """Whom this machine exchanges tensors with: the stages before and after its own; the driver's with all. A
        guard that runs nothing has these links before it takes over."""
        neighbours = self._placement.neighbours
        if self.owner == self._host.peer:
            return list(neighbours.values())
        near = {stage + step for stage in self._own or self._placement.guards for step in (-1, 1)}
        return [neighbours[stage] for stage in sorted(near & neighbours.keys())]

    def _dial(self, neighbour: wire.Neighbour) -> None:
        """Open the link to a neighbour if it is this side's turn to, and it is not there. That of a guard always is: to
        the others it has no stage. Only the driver's machine, which may listen to nobody, dials guards itself."""
        other = PeerId(neighbour.peer)
        turn = dials(self._host.peer, other, self.owner) if self._exchanges else other != self.owner
        if other != self._host.peer and turn:
            self._links.dial(other, neighbour.addresses, self._placement.opening)

    def dial_guard(self, peer: PeerId, addresses: Sequence[str], fence: Fence, ticket: bytes) -> None:
        """The driver's: it will exchange tensors with this guard once that takes over."""
        self._visitors.add(peer)
        self._links.dial(peer, addresses, wire.OpenJob(job=self.job, fence=fence, ticket=ticket, task=self.task))

    async def _load(self, load: wire.Load, tensors: Mapping[str, HostTensor]) -> None:
        """Later rounds may come meanwhile: what was fetched and converted stays of use to them."""
        try:
            if self._is_present(load):
                stage, fetched_bytes = self._at_hand(load), {}
                if stage is None:
                    async with self._loading:
                        if load.standby and not self._is_present(load):
                            return  # a stage that streams wait for may be next; this one is asked for again
                        try:
                            stage, fetched_bytes = await self._made(load, tensors)
                        finally:
                            self._loads.pop(load.stage, None)
                    if load.stage not in self._own | self._placement.guards:
                        self._keep_only(self._own | self._placement.guards)
                if self._is_present(load):
                    await self._answer(load, stage, fetched_bytes)
        except GraphError as error:
            self.failed(load.stage, load.fence, "bad_graph", str(error))
        except FusionError as error:
            self.failed(load.stage, load.fence, "failed", str(error))
        except MemoryError as error:
            self.failed(load.stage, load.fence, "out_of_memory", str(error))
        except Exception as error:  # whatever was received, the driver must not wait for this stage
            log.exception("stage %d of %s could not be loaded", load.stage, self.job)
            self.failed(load.stage, load.fence, "failed", f"{type(error).__name__}: {error}")

    def _at_hand(self, load: wire.Load) -> ServingStage | None:
        stage = self._stages.get(load.stage)
        return stage if stage is not None and stage.identity == identity_of(load) else None

    @property
    def _own(self) -> frozenset[int]:
        """Stages that the round places here."""
        return frozenset(stage for stage, peer in self._placement.places.items() if peer == self._host.peer)

    def _is_present(self, load: wire.Load) -> bool:
        """Whether this load belongs to the round that was begun last; refuses it otherwise."""
        placement = self._placement
        if load.job != self.job:
            raise ExecutionError(f"this connection is for job {self.job}, the load is for {load.job}.")
        if load.fence < self.fence:
            self.stale_dropped += 1
            self.failed(load.stage, load.fence, "stale_fence", f"{self.job} is at {self.fence}")
            return False
        if not self._enlisted or load.fence != placement.fence:
            self.failed(load.stage, load.fence, "bad_message", f"this member was not enlisted under {load.fence}")
            return False
        here = load.stage in placement.guards if load.standby else placement.places.get(load.stage) == placement.me
        if not here:
            raise ExecutionError(f"the round does not place stage {load.stage} on this peer.")
        return True

    async def _made(
        self, load: wire.Load, tensors: Mapping[str, HostTensor]
    ) -> tuple[ServingStage, Mapping[PeerId, int]]:
        """The stage at hand if this load describes the same, otherwise another in its place, with its weights."""
        if (present := self._at_hand(load)) is not None:
            return present, {}
        if self._stages.pop(load.stage, None) is not None:
            return_freed_memory()
        total_bytes = sum(spec_bytes(spec) for spec in load.weights)
        self._loads[load.stage] = wire.Loading(
            fence=load.fence, stage=load.stage, done_bytes=0, total_bytes=total_bytes
        )
        stage, program = await prepare_stage(
            self._host, load, tensors, postman=self, memory_limit_bytes=self._unused_bytes()
        )
        # Whatever compiled is done, and nothing large is here yet.
        return_freed_memory()
        return_code_pages()
        told_s = float("-inf")

        def progress(done_bytes: int, total_bytes: int) -> None:
            nonlocal told_s
            now_s = self._host.clock.now_s()
            far = wire.Loading(fence=load.fence, stage=load.stage, done_bytes=done_bytes, total_bytes=total_bytes)
            self._loads[load.stage] = far
            if now_s - told_s >= LOADING_S or done_bytes == total_bytes:
                told_s = now_s
                self.to_driver(far)

        def refused(source: PeerId, key: str) -> None:
            self.to_driver(wire.WeightRefused(fence=load.fence, stage=load.stage, source=source, key=key))

        fetched_bytes = await self._weights.fetch(load, self._placement.opening, progress, refused)
        with self._weights.holding(load.weights):
            for spec in load.weights:
                # One after the other, so that passes of other stages get their turns in between.
                await self._host.compute.run(
                    lambda spec=spec: program.import_weights([(spec.key, self._weights.read(spec))])
                )
        if missing := program.missing:
            raise ExecutionError(f"stage {load.stage} lacks {len(missing)} weights, first {missing[0]}.")
        self._stages[load.stage] = stage
        return_freed_memory()
        return stage, fetched_bytes

    async def _answer(self, load: wire.Load, stage: ServingStage, fetched_bytes: Mapping[PeerId, int]) -> None:
        cached: tuple[tuple[int, int], ...] = ()
        if not load.standby:
            stage.mark(load.marks, gives=self.owner != self._host.peer)
            cached, linked = await asyncio.gather(stage.begin(fresh=load.fresh), self._are_linked(load.fence))
            if not linked:
                return
        self.to_driver(
            wire.Loaded(
                fence=load.fence,
                stage=load.stage,
                standby=load.standby,
                fingerprint=self._host.fingerprint,
                resident_bytes=stage.resident_bytes,
                fetched_bytes=tuple(sorted(fetched_bytes.items())),
                cached=cached,
            )
        )

    async def _are_linked(self, fence: Fence) -> bool:
        """Whether all that this machine exchanges tensors with can be reached; if not, the driver has been told."""
        peers = {PeerId(neighbour.peer) for neighbour in self._linked()} | {self.owner}
        return all(await asyncio.gather(*(self._is_linked(peer, fence) for peer in peers - {self._host.peer})))

    async def _is_linked(self, peer: PeerId, fence: Fence) -> bool:
        try:
            await self._links.up(peer)
        except TransportError as error:
            if fence == self._placement.fence:
                self._link_lost(peer, str(error))
            return False
        return True

    async def _detach(self) -> None:
        self._keep_only(frozenset())

    def _keep_only(self, stages: frozenset[int]) -> None:
        gone = [stage for stage in self._stages if stage not in stages]
        for stage in gone:
            del self._stages[stage]
        if gone:
            return_freed_memory()

    def _unused_bytes(self) -> int | None:
        if self._host.memory_limit_bytes is None:
            return None
        return self._host.memory_limit_bytes - sum(stage.reserved_bytes for stage in self._stages.values())

    async def _beat(self) -> None:
        for beat in itertools.count():
            await asyncio.sleep(PING_S)
            self._links.beat()
            if beat % WORKING_BEATS == 0:
                self._tell_work()

    def _tell_work(self) -> None:
        """A stage that works or loads long is told from one that is stuck by what it says."""
        for far in self._loads.values():
            self.to_driver(far)
        now_s = time.monotonic()
        for number, stage in self._stages.items():
            if number in self._own and (told := stage.working(now_s)) is not None:
                self.to_driver(wire.Working(fence=self._placement.fence, stage=number, number=told[0], busy_s=told[1]))

    # ------------------------------------------------------------------------------------------------- spot checks

    def _testify(self, order: wire.TellMarks | wire.ShowRows | wire.ReadAgain) -> None:
        """What can't be told fails the check, nothing else."""
        try:
            stage = self._stages.get(order.stage)
            if stage is None or order.fence != self._placement.fence:
                raise ExecutionError(f"stage {order.stage} is not here in this round.")
            match order:
                case wire.TellMarks(fence=fence, number=number):
                    told = stage.told(order)
                    answer = wire.ToldMarks(fence=fence, stage=order.stage, number=number, tensors=headers(told))
                    self.testimony(self.owner, answer, told)
                case wire.ShowRows(reply=reply, number=number):
                    for start, rows in stage.shown(order):
                        shown = wire.ShownRows(
                            fence=reply, stage=order.stage, number=number, start=start, tensors=headers(rows)
                        )
                        self.testimony(PeerId(order.peer), shown, rows)
                case wire.ReadAgain(fence=fence, number=number):
                    self._referees[number] = stage.referee(order)
                    self.to_driver(wire.Reading(fence=fence, stage=order.stage, number=number))
        except TransportError as error:
            # No word is no refusal: the driver hears of the link, and of this after a while.
            log.info("what a check of stage %d of %s needs can't be sent: %s", order.stage, self.job, error)
        except FusionError as error:
            self._not_checked(order, str(error))

    def testimony(self, peer: PeerId, message: Testimony, tensors: Mapping[str, HostTensor]) -> None:
        """To the driver, or to a referee. Raises `TransportError`."""
        if peer != self._host.peer:
            self._links.post(peer, message, tuple(tensors.values()))
        elif self._on_testimony is not None:
            asyncio.get_running_loop().call_soon(self._on_testimony, peer, message, tensors)

    def _read_on(self, peer: PeerId, rows: wire.ShownRows, tensors: Mapping[str, HostTensor]) -> None:
        """Rows of a text that is read again: here, or by the driver's own machine."""
        if self._on_testimony is not None:
            self._on_testimony(peer, rows, tensors)
        elif (referee := self._referees.get(rows.number)) is not None:
            self._start(self._compute_again(referee, rows, tensors))
        else:
            self.stale_dropped += 1

    async def _compute_again(
        self, referee: TextReferee, rows: wire.ShownRows, tensors: Mapping[str, HostTensor]
    ) -> None:
        order = referee.order
        try:
            told = await referee.compute(rows, tensors)
            if told is not None:
                self._referees.pop(order.number, None)
                answer = wire.ReadText(
                    fence=order.reply,
                    stage=order.stage,
                    number=order.number,
                    moved=told.moved,
                    tensors=headers(told.marks),
                )
                self.testimony(self.owner, answer, told.marks)
        except Exception as error:  # whatever was received: the check has no outcome, all else goes on
            if not isinstance(error, FusionError):
                log.exception("a text of %s could not be read again", self.job)
            self._referees.pop(order.number, None)
            await referee.end()
            self._not_checked(order, str(error) or type(error).__name__)

    def _not_checked(self, order: wire.TellMarks | wire.ShowRows | wire.ReadAgain, reason: str) -> None:
        self.to_driver(
            wire.CheckFailed(fence=order.fence, stage=order.stage, number=order.number, reason=reason[:4000])
        )

    # -------------------------------------------------------------------------------------------- what stages send

    def to_stage(self, stage: int, message: wire.Message, tensors: Sequence[HostTensor] = ()) -> None:
        peer = self._placement.peer_of(stage)
        if peer != self._host.peer:
            self._post(peer, message, tensors)
        elif isinstance(message, wire.Pass):
            named = {header.name: tensor for header, tensor in zip(message.tensors, tensors, strict=True)}
            asyncio.get_running_loop().call_soon(self._deliver, message, named)

    def result(self, message: wire.PassResult, tensors: Sequence[HostTensor]) -> None:
        if self._on_result is None:
            self._post(self.owner, message, tensors)
        else:
            named = {header.name: tensor for header, tensor in zip(message.tensors, tensors, strict=True)}
            self._on_result(message, named)

    def _post(self, peer: PeerId, message: wire.Message, tensors: Sequence[HostTensor]) -> None:
        """A link that is not there is news for the driver, not the sender's failure."""
        try:
            self._links.post(peer, message, tensors)
        except TransportError as error:
            self._link_lost(peer, str(error))

    def _report(self, error: FusionError) -> None:
        """A message for no stage in particular fails all that are here."""
        for stage in self.stages:
            self.failed(stage, self._placement.fence, "bad_message", str(error))

    # -------------------------------------------------------------------------------------------------- the ends

    def _link_lost(self, peer: PeerId, reason: str) -> None:
        """That of a guard, which has no part in passes, is nobody's loss."""
        self._visitors.discard(peer)
        if self._exchanges:
            super()._link_lost(peer, reason)

    async def close(self) -> None:
        """End everything that works for this member. Harmless when done before."""
        self._closed = True
        await self._links.close()
        await self._end_tasks()
        self._weights.close()
        self._keep_only(frozenset())
