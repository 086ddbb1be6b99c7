"""One machine's part in one serving job: its stages, its links, its weights, its connection to the driver.

The member checks every message's fence, validates what it is asked to run before loading it, and routes passes to
stages. It outlives its driver's connection. All decisions about the job are the driver's. The peer's daemon uses it,
and the engine's process uses it for the job owner's own stages.

`execution.serving.stage` runs each stage, `execution.serving.loading` fetches weights, `execution.links`
moves tensors. `execution.training.member` is the counterpart for training."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from fusionai.backends.memory import return_code_pages, return_freed_memory
from fusionai.backends.serving.base import ServingProgram
from fusionai.execution.host import Host
from fusionai.execution.member import RoundMember, refusal_of
from fusionai.execution.serving.loading import StageWeights, identity_of, prepare_stage
from fusionai.execution.serving.stage import ServingStage
from fusionai.execution.serving.verifier import TextVerifier
from fusionai.primitives.errors import ExecutionError, FusionError, TransportError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor
from fusionai.storage.weight_part import spec_bytes
from fusionai.transport.interface import Channel, Envelope
from fusionai.wire import messages as wire
from fusionai.wire.frame import by_name, headers
from fusionai.wire.messages import Fence

log = logging.getLogger(__name__)

ResultSink = Callable[[wire.PassResult, Mapping[str, HostTensor]], None]
Evidence = wire.TextSketches | wire.ShownRows | wire.ReadText
EvidenceSink = Callable[[PeerId, Evidence, Mapping[str, HostTensor]], None]

LOADING_S: Final = 0.5
"""Seconds between two progress reports while weights load (chosen)."""
MOST_CHECKS: Final = 64
"""Texts that one member rechecks at a time (chosen)."""
WORKING_BEATS: Final = 4
"""Number of ping intervals between two reports of what the stages compute (chosen)."""


class ServingMember(RoundMember):
    """Takes part in one serving job. `owner` is the driver's peer id, `opened` the fence with which it opened the job.
    `on_result` and `on_evidence` are set only in the driver's process, where results of passes and data for checks end;
    other members send theirs over the network."""

    def __init__(
        self,
        host: Host,
        job: str,
        owner: PeerId,
        opened: Fence,
        weights: StageWeights,
        *,
        on_result: ResultSink | None = None,
        on_evidence: EvidenceSink | None = None,
    ) -> None:
        super().__init__("serve", host, job, owner, opened)
        self._weights = weights
        self._on_result = on_result
        self._on_evidence = on_evidence
        self._stages: dict[int, ServingStage] = {}
        self._verifiers: dict[int, TextVerifier] = {}
        """Number of the check -> its verifier."""
        self._loading = asyncio.Lock()
        self._loads: dict[int, wire.Loading] = {}
        """Progress of the stages that are being loaded, reported repeatedly while that takes."""
        self._visitors: set[PeerId] = set()
        """Linked peers without a stage, which are standbys."""
        self._guests: dict[Channel, PeerId] = {}
        """Members that fetch weights here, by connection."""

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(sorted(self._stages))

    @property
    def present(self) -> Fence:
        """Fence of the present round."""
        return self._placement.fence

    # ------------------------------------------------------------------------------------------ reading channels

    def _order(self, envelope: Envelope) -> bool:
        match envelope.message:
            case wire.Load() as load:
                self._start(self._load(load, envelope.tensors), envelope)
            case wire.Rebuild() as order:
                self._deliver(order.stage, order, {})
            case wire.RequestSketches() | wire.ShowRows() | wire.ReadAgain() as order:
                self._answer_evidence(order)
            case _:
                return False
        return True

    async def serve_state(self, channel: Channel) -> None:
        """Fetch weights over the driver's state connection when needed."""
        with self._served():
            await self._weights.from_owner(channel)

    async def serve_snapshots(self, peer: PeerId, channel: Channel) -> None:
        """Serve a state connection on which another member fetches weights."""
        self._guests[channel] = peer
        try:
            with self._served():
                await self._weights.to_other(peer, channel)
        finally:
            del self._guests[channel]

    async def serve_link(self, peer: PeerId, channel: Channel) -> None:
        """Serve a tensor connection dialled by a neighbour, or by a standby that may become one."""
        if peer not in self._placement.peers:
            self._visitors.add(peer)
        await super().serve_link(peer, channel)

    def _see_off(self) -> None:
        """Part with peers that the round's placement no longer names. The driver's machine chose its visitors
        itself."""
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
                | wire.TextSketches(stage=sender)
                | wire.ShownRows(stage=sender)
            ):
                pass
            case wire.ReadText():
                sender = None  # from a standby; the driver knows which one it asked
            case _:
                raise self._only_the_driver(peer, message)
        if not self._is_of_round(peer, message, sender):
            return
        match message:
            case wire.Pass():
                self._deliver(message.consumer, message, envelope.tensors)
            case wire.ShownRows():
                self._read_on(peer, message, envelope.tensors)
            case wire.PassResult():
                if self._on_result is None:
                    raise ExecutionError(f"a result of {self.job} arrived at a member without a driver.")
                self._on_result(message, envelope.tensors)
            case wire.TextSketches() | wire.ReadText():
                if self._on_evidence is None:
                    raise ExecutionError(f"data for a check of {self.job} arrived at a member without a driver.")
                self._on_evidence(peer, message, envelope.tensors)

    def _deliver(self, number: int, message: wire.Message, tensors: Mapping[str, HostTensor]) -> None:
        assert isinstance(message, wire.Pass | wire.Rebuild)
        stage = self._stages.get(number)
        here = self._placement.places.get(number) == self._host.peer
        if stage is None or not here or message.fence != self._placement.fence:
            self.stale_dropped += 1
            return
        try:
            if isinstance(message, wire.Rebuild):
                stage.rebuild(message)
            elif message.producer != number - 1:
                raise ExecutionError(
                    f"stage {message.producer} sent a pass to stage {number}, expected the next stage."
                )
            else:
                stage.take(message, tensors)
        except FusionError as error:
            self.failed(number, message.fence, "bad_message", str(error))
        except Exception as error:
            log.exception("stage %d of %s could not take a %s", number, self.job, type(message).__name__)
            self.failed(number, message.fence, "bad_message", f"{type(error).__name__}: {error}")

    # --------------------------------------------------------------------------------------- enlisting and loading

    def enlist(self, enlist: wire.Enlist) -> wire.Enlisted | wire.Refused:
        """A round begins: adopt its fence and places; stages that are neither run nor stood by for here are
        forgotten."""
        if (refused := self._adopt(enlist)) is not None:
            return refused
        for verifier in self._verifiers.values():
            self._start(verifier.end())
        self._verifiers.clear()
        self._keep_only(self._own | self._placement.standbys)
        self._see_off()
        # The others drop their ends too, which is not a loss to report.
        linked = self._placement.peers if self._exchanges else {PeerId(one.peer) for one in self._linked()}
        self._links.begin_round({*linked, self.owner} | self._visitors)
        for neighbour in self._linked():
            self._dial(neighbour)
        return wire.Enlisted(fence=enlist.fence, fingerprint=self._host.fingerprint)

    @property
    def _exchanges(self) -> bool:
        """Whether this machine takes part in passes; a standby does not."""
        return bool(self._own) or self.owner == self._host.peer

    def _linked(self) -> list[wire.Neighbour]:
        """Return the peers this machine exchanges tensors with: those of the stages before and after its own, for the
        driver all. A standby that runs nothing opens these links before it takes over."""
        neighbours = self._placement.neighbours
        if self.owner == self._host.peer:
            return list(neighbours.values())
        near = {stage + step for stage in self._own or self._placement.standbys for step in (-1, 1)}
        return [neighbours[stage] for stage in sorted(near & neighbours.keys())]

    def _dials(self, other: PeerId) -> bool:
        """A standby always dials, because the others know no stage of it. The owner's machine, which may be
        unreachable, is the exception: it dials the standbys."""
        return super()._dials(other) if self._exchanges else other != self.owner

    def dial_standby(self, peer: PeerId, addresses: Sequence[str], fence: Fence, ticket: bytes) -> None:
        """Open the link to a standby from the driver's machine, for the tensors they exchange once the standby takes
        over."""
        self._visitors.add(peer)
        self._links.dial(peer, addresses, wire.OpenJob(job=self.job, fence=fence, ticket=ticket, task=self.task))

    async def _load(self, load: wire.Load, tensors: Mapping[str, HostTensor]) -> None:
        """Load a stage and answer the driver. Later rounds may begin meanwhile; fetched weights stay useful for
        them."""
        try:
            if self._is_of_here(load):
                stage, fetched_bytes = self._at_hand(load), {}
                if stage is None:
                    async with self._loading:
                        if load.standby and not self._is_of_here(load):
                            return  # streams may wait for another stage to load; the driver asks for this one again
                        try:
                            stage, fetched_bytes = await self._made(load, tensors)
                        finally:
                            self._loads.pop(load.stage, None)
                    if load.stage not in self._own | self._placement.standbys:
                        self._keep_only(self._own | self._placement.standbys)
                if self._is_of_here(load):
                    await self._answer(load, stage, fetched_bytes)
        except Exception as error:  # whatever was received, the driver must not wait for this stage
            if not isinstance(error, FusionError):
                log.exception("stage %d of %s could not be loaded", load.stage, self.job)
            self.failed(load.stage, load.fence, *refusal_of(error))

    def _at_hand(self, load: wire.Load) -> ServingStage | None:
        stage = self._stages.get(load.stage)
        return stage if stage is not None and _may_stay(stage, load) and stage.identity == identity_of(load) else None

    def _is_of_here(self, load: wire.Load) -> bool:
        """Return whether this load belongs to the present round; refuse it otherwise. Raises `ExecutionError` for a
        stage that the round does not place on this peer."""
        placement = self._placement
        if not self._is_present(load, partial(self.failed, load.stage, load.fence)):
            return False
        here = load.stage in placement.standbys if load.standby else placement.places.get(load.stage) == placement.me
        if not here:
            raise ExecutionError(f"the round does not place stage {load.stage} on this peer.")
        return True

    async def _made(
        self, load: wire.Load, tensors: Mapping[str, HostTensor]
    ) -> tuple[ServingStage, Mapping[PeerId, int]]:
        """Return the loaded stage if this load describes the same one. If only weights differ, replace those in it, so
        that its caches stay; otherwise load the stage in its place."""
        if (present := self._at_hand(load)) is not None:
            return present, {}
        identity = identity_of(load)
        stage = self._stages.pop(load.stage, None)
        changed = None if stage is None or not _may_stay(stage, load) else stage.changed_weights(identity, load.weights)
        if stage is None or changed is None:
            stage = None
            return_freed_memory()
            total_bytes = sum(spec_bytes(spec) for spec in load.weights)
            self._loads[load.stage] = wire.Loading(
                fence=load.fence, stage=load.stage, done_bytes=0, total_bytes=total_bytes
            )
            stage, program = await prepare_stage(self._host, load, tensors, member=self)
            # Compilation is done and no large tensor is allocated yet.
            return_freed_memory()
            return_code_pages()
        else:
            program = stage.program
            keys, _ = await self._host.compute.run(lambda: program.joined(changed))
            load = msgspec.structs.replace(load, weights=tuple(spec for spec in load.weights if spec.key in keys))
        fetched_bytes = await self._import(load, program)
        missing, _ = await self._host.compute.run(lambda: program.missing)
        if missing:
            raise ExecutionError(f"stage {load.stage} lacks {len(missing)} weights, first {missing[0]}.")
        stage.identity = identity
        self._stages[load.stage] = stage
        return_freed_memory()
        return stage, fetched_bytes

    async def _import(self, load: wire.Load, program: ServingProgram) -> Mapping[PeerId, int]:
        """Fetch the weights of `load`, import them, and return the bytes fetched, by source."""
        reported_s = float("-inf")

        def progress(done_bytes: int, total_bytes: int) -> None:
            nonlocal reported_s
            now_s = self._host.clock.now_s()
            far = wire.Loading(fence=load.fence, stage=load.stage, done_bytes=done_bytes, total_bytes=total_bytes)
            self._loads[load.stage] = far
            if now_s - reported_s >= LOADING_S or done_bytes == total_bytes:
                reported_s = now_s
                self.to_driver(far)

        def refused(source: PeerId, key: str) -> None:
            self.to_driver(wire.WeightRefused(fence=load.fence, stage=load.stage, source=source, key=key))

        fetched_bytes = await self._weights.fetch(load, self._placement.opening, progress, refused)
        with self._weights.holding(load.weights):
            for spec in load.weights:
                # One weight at a time, so that passes of other stages get their turns in between.
                await self._host.compute.run(
                    lambda spec=spec: program.import_weights([(spec.key, self._weights.read(spec))]), rests=False
                )
        return fetched_bytes

    async def _answer(self, load: wire.Load, stage: ServingStage, fetched_bytes: Mapping[PeerId, int]) -> None:
        cached: tuple[tuple[int, int], ...] = ()
        if not load.standby:
            stage.mark(load.sketches, gives=self.owner != self._host.peer)
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
        """Return whether all peers that this machine exchanges tensors with are linked. Reports lost links itself."""
        peers = {PeerId(neighbour.peer) for neighbour in self._linked()} | {self.owner}
        return all(await asyncio.gather(*(self._is_linked(peer, fence) for peer in peers - {self._host.peer})))

    async def _detach(self) -> None:
        self._keep_only(frozenset())

    def _keep_only(self, stages: frozenset[int]) -> None:
        gone = [stage for stage in self._stages if stage not in stages]
        for stage in gone:
            del self._stages[stage]
        if gone:
            return_freed_memory()

    def _on_beat(self, beat: int) -> None:
        if beat % WORKING_BEATS == 0:
            self._tell_work()

    def _tell_work(self) -> None:
        """Report progress, so that the driver can tell a stage that works or loads for long from one that is stuck."""
        for far in self._loads.values():
            self.to_driver(far)
        now_s = time.monotonic()
        for number, stage in self._stages.items():
            if number in self._own and (found := stage.working(now_s)) is not None:
                self.to_driver(
                    wire.Working(fence=self._placement.fence, stage=number, number=found[0], busy_s=found[1])
                )

    # ------------------------------------------------------------------------------------------------- spot checks

    def _answer_evidence(self, order: wire.RequestSketches | wire.ShowRows | wire.ReadAgain) -> None:
        """Send what a check asks for. A failure here fails only the check."""
        try:
            stage = self._stages.get(order.stage)
            if stage is None or order.fence != self._placement.fence:
                raise ExecutionError(f"stage {order.stage} does not run here in this round.")
            match order:
                case wire.RequestSketches(fence=fence, number=number):
                    found = stage.sketches_of(order)
                    answer = wire.TextSketches(fence=fence, stage=order.stage, number=number, tensors=headers(found))
                    self.send_evidence(self.owner, answer, found)
                case wire.ShowRows(reply=reply, number=number):
                    for start, rows in stage.shown(order):
                        shown = wire.ShownRows(
                            fence=reply, stage=order.stage, number=number, start=start, tensors=headers(rows)
                        )
                        self.send_evidence(PeerId(order.peer), shown, rows)
                case wire.ReadAgain(fence=fence, number=number):
                    self._verifiers[number] = stage.verifier(order)
                    if len(self._verifiers) > MOST_CHECKS:  # the driver has given the oldest one up
                        self._start(self._verifiers.pop(next(iter(self._verifiers))).end())
                    self.to_driver(wire.Reading(fence=fence, stage=order.stage, number=number))
        except TransportError as error:
            # No refusal is sent: the driver learns of the lost link, and its check times out.
            log.info("the data that a check of stage %d of %s needs can't be sent: %s", order.stage, self.job, error)
        except FusionError as error:
            self._not_checked(order, str(error))

    def send_evidence(self, peer: PeerId, message: Evidence, tensors: Mapping[str, HostTensor]) -> None:
        """Send to the driver, or to a verifier. Raises `TransportError`."""
        if peer != self._host.peer:
            self._links.post(peer, message, tuple(tensors.values()))
        elif self._on_evidence is not None:
            asyncio.get_running_loop().call_soon(self._on_evidence, peer, message, tensors)

    def _read_on(self, peer: PeerId, rows: wire.ShownRows, tensors: Mapping[str, HostTensor]) -> None:
        """Take rows of a text that is being rechecked, here or by the driver's own machine."""
        if self._on_evidence is not None:
            self._on_evidence(peer, rows, tensors)
        elif (verifier := self._verifiers.get(rows.number)) is not None:
            self._start(self._compute_again(verifier, rows, tensors))
        else:
            self.stale_dropped += 1

    async def _compute_again(
        self, verifier: TextVerifier, rows: wire.ShownRows, tensors: Mapping[str, HostTensor]
    ) -> None:
        order = verifier.order
        try:
            found = await verifier.compute(rows, tensors)
            if found is not None:
                self._verifiers.pop(order.number, None)
                answer = wire.ReadText(
                    fence=order.reply,
                    stage=order.stage,
                    number=order.number,
                    moved=found.moved,
                    tensors=headers(found.sketches),
                )
                self.send_evidence(self.owner, answer, found.sketches)
        except Exception as error:  # whatever arrived: the check ends without a result, everything else goes on
            if not isinstance(error, FusionError):
                log.exception("a text of %s could not be rechecked", self.job)
            self._verifiers.pop(order.number, None)
            await verifier.end()
            self._not_checked(order, str(error) or type(error).__name__)

    def _not_checked(self, order: wire.RequestSketches | wire.ShowRows | wire.ReadAgain, reason: str) -> None:
        self.to_driver(
            wire.CheckFailed(fence=order.fence, stage=order.stage, number=order.number, reason=reason[:4000])
        )

    # -------------------------------------------------------------------------------------------- what stages send

    def result(self, message: wire.PassResult, tensors: Sequence[HostTensor]) -> None:
        """Send to the driver, on the tensor link."""
        if self._on_result is None:
            self._post(self.owner, message, tensors)
        else:
            self._on_result(message, by_name(message, tensors))

    def _report(self, error: FusionError) -> None:
        """Fail all stages here, because a bad message addressed none in particular."""
        for stage in self.stages:
            self.failed(stage, self._placement.fence, "bad_message", str(error))

    # -------------------------------------------------------------------------------------------------- the ends

    def _link_lost(self, peer: PeerId, reason: str) -> None:
        """A standby has no part in passes, so its lost links are not reported."""
        self._visitors.discard(peer)
        if self._exchanges:
            super()._link_lost(peer, reason)

    async def close(self) -> None:
        """End all work of this member. Does nothing if it is closed already."""
        self._closed = True
        await self._links.close()
        await self._end_tasks()
        self._weights.close()
        self._keep_only(frozenset())


def _may_stay(stage: ServingStage, load: wire.Load) -> bool:
    """Return whether a loaded stage can serve a load. A standby has no caches, because checks recompute texts in them.
    A stage that has run here has some, so it is loaded anew where it stands by."""
    return not (load.standby and stage.allocated)
