"""One machine's part in one job: its stages, its links, its connection to the driver.

Decides nothing of the job. Checks every message's fence, loads what it is told to run after validating it, and brings
messages to the right stage. Used by the peer's daemon and, for the job owner's own stages, by the driver's process.

Neighbours: `execution.runtime` runs each stage, `execution.links` moves tensors, `ir.validate` guards the door.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import msgspec

from fusionai.backends.interface import Backend
from fusionai.execution.boundary import FEED, Boundary
from fusionai.execution.compute import ComputeThread
from fusionai.execution.links import Links, dials
from fusionai.execution.outbox import Outbox
from fusionai.execution.runtime import StageRuntime
from fusionai.ir.schema import Graph, content_hash
from fusionai.ir.validate import Limits, parse
from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import ChannelClosed, ExecutionError, FusionError, GraphError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor
from fusionai.transport.interface import Channel, Envelope, Transport
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What a machine brings to every job it takes part in."""

    peer: PeerId
    backend: Backend
    compute: ComputeThread
    transport: Transport
    fingerprint: str
    clock: Clock
    memory_limit_bytes: int | None = None
    graph_limits: Limits = field(default_factory=Limits)


OutputSink = Callable[[wire.Output, dict[str, HostTensor]], None]
LinkLostSink = Callable[[PeerId, str], None]

MAX_UNREAD: Final = 1024
"""Messages to a driver that does not read them."""
HELD_WITHOUT_LIMIT_BYTES: Final = 8 * 2**30
"""Tensors a stage may hold for work to come where the provider set no limit."""


class JobMember:
    """`owner` is the driver's peer id, `opened` the fence it opened the job with. `on_output` and `on_link_lost` only
    where the driver lives: job outputs end there."""

    def __init__(
        self,
        host: Host,
        job: str,
        owner: PeerId,
        opened: Fence,
        *,
        on_output: OutputSink | None = None,
        on_link_lost: LinkLostSink | None = None,
    ) -> None:
        self.job = job
        self.owner = owner
        self.fence = opened
        """The highest fence heard of from the driver; nothing below it is let in."""
        self.stale_dropped = 0
        """Messages dropped because their fence was not the stage's own (normal after a change of plan)."""
        self._host = host
        self._on_output = on_output
        self._on_link_lost = on_link_lost
        self._failed: dict[int, Fence] = {}
        self._serving: set[asyncio.Task[object]] = set()
        self._runtimes: dict[int, StageRuntime] = {}
        self._neighbours: dict[int, wire.Neighbour] = {}
        self._links = Links(host.transport, on_message=self._from_link, on_lost=self._link_lost)
        self._driver: Outbox | None = None
        self._state_channel: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(sorted(self._runtimes))

    # ------------------------------------------------------------------------------------------ reading channels

    async def serve_control(self, channel: Channel) -> None:
        """Obey the driver until it detaches, breaks the protocol or the connection ends."""
        self._driver = driver = Outbox(channel, lambda reason: log.info("driver of %s lost: %s", self.job, reason))
        with self._served():
            try:
                while True:
                    envelope = await channel.receive()
                    match envelope.message:
                        case wire.Attach() as attach:
                            await self._attach(attach, envelope.tensors)
                        case wire.Detach() as detach:
                            await self._detach(detach.reason)
                            return
                        case wire.Ping(sequence=sequence, sent_at_s=sent_at_s):
                            driver.post(wire.Pong(sequence=sequence, sent_at_s=sent_at_s))
                        case wire.Resume() | wire.Commit() | wire.Export() as message:
                            self._deliver(message, envelope.tensors)
                        case other:
                            raise ExecutionError(f"the driver sent a {type(other).__name__} on its control connection.")
                    if driver.waiting > MAX_UNREAD:
                        raise ExecutionError(f"the driver of {self.job} does not read its control connection.")
            except ChannelClosed:
                log.info("the driver of %s closed its connection", self.job)
            except FusionError as error:
                log.warning("the driver of %s broke the protocol: %s", self.job, error)
                self._report(error)
            finally:
                await driver.close()

    async def serve_state(self, channel: Channel) -> None:
        """Take state chunks from the driver; what `state` sends leaves on the same connection."""
        if self._state_channel.done():
            self._state_channel = asyncio.get_running_loop().create_future()
        self._state_channel.set_result(channel)
        with self._served():
            try:
                while True:
                    envelope = await channel.receive()
                    message = envelope.message
                    if not isinstance(message, wire.StateChunk):
                        raise ExecutionError(
                            f"expected a StateChunk on a state connection, got {type(message).__name__}."
                        )
                    runtime = self._runtime(message.stage, message.fence)
                    if runtime is not None:
                        await runtime.receive_state(message, envelope.tensors)
            except ChannelClosed:
                return
            except FusionError as error:
                self._report(error)

    async def serve_link(self, peer: PeerId, channel: Channel) -> None:
        """A neighbour dialled this machine."""
        with self._served():
            await self._links.serve(peer, channel)

    @contextmanager
    def _served(self) -> Iterator[None]:
        """The task at work in here ends with this member."""
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            yield
        finally:
            self._serving.discard(task)

    async def _from_link(self, peer: PeerId, envelope: Envelope) -> None:
        message = envelope.message
        sender = _sender(message)
        if sender is None:
            raise ExecutionError(f"peer {short(peer)} sent a {type(message).__name__}; only the driver may.")
        if self._peer_of(sender) != peer:
            raise ExecutionError(f"peer {short(peer)} sent a {type(message).__name__} as stage {sender}, not its own.")
        if isinstance(message, wire.Output):
            self._take_output(message, envelope.tensors)
        else:
            self._deliver(message, envelope.tensors)

    def _deliver(self, message: wire.Message, tensors: dict[str, HostTensor]) -> None:
        """To the stage it is for, if the fence is exactly that stage's."""
        stage, fence = _receiver(message)
        runtime = self._runtime(stage, fence)
        if runtime is None:
            return
        try:
            runtime.receive(message, tensors)
        except FusionError as error:
            self._report(error, runtime)
        except Exception as error:
            log.exception("stage %d of %s could not take a %s", stage, self.job, type(message).__name__)
            self._report(ExecutionError(f"{type(error).__name__}: {error}"), runtime)

    def _runtime(self, stage: int, fence: Fence) -> StageRuntime | None:
        runtime = self._runtimes.get(stage)
        if runtime is None or not runtime.accepts(fence):
            self.stale_dropped += 1
            return None
        return runtime

    # -------------------------------------------------------------------------------------------------- attaching

    async def _attach(self, attach: wire.Attach, tensors: dict[str, HostTensor]) -> None:
        if attach.fence < self.fence:
            self.stale_dropped += 1
            self._refuse(attach, "stale_fence", f"{self.job} is at {self.fence}")
            return
        try:
            runtime = await self._loaded(attach, tensors)
        except GraphError as error:
            self._refuse(attach, "bad_graph", str(error))
        except FusionError as error:
            self._refuse(attach, "failed", str(error))
        except Exception as error:  # whatever was received, the driver must not wait for this stage
            log.exception("stage %d of %s could not be loaded", attach.stage, self.job)
            self._refuse(attach, "failed", f"{type(error).__name__}: {error}")
        else:
            self.fence = attach.fence
            self._neighbours = {neighbour.stage: neighbour for neighbour in attach.neighbours}
            runtime.attach(attach.fence)
            self._dial_neighbours(runtime, attach)

    async def _loaded(self, attach: wire.Attach, tensors: dict[str, HostTensor]) -> StageRuntime:
        """The stage's runtime; the one at hand if this attach describes the same stage, otherwise another."""
        identity = (attach.graph_hash, bytes(attach.boundary), attach.options)
        present = self._runtimes.get(attach.stage)
        if present is not None and present.identity == identity:
            return present
        runtime = await self._load(attach, tensors)
        if present is not None:
            present.detach("another stage takes its place")
            await present.close()
        self._runtimes[attach.stage] = runtime
        return runtime

    async def _load(self, attach: wire.Attach, tensors: dict[str, HostTensor]) -> StageRuntime:
        """Validate, then load: nothing received is run before both."""
        if attach.job != self.job:
            raise ExecutionError(f"this connection is for job {self.job}, the attach is for {attach.job}.")
        graph_bytes = tensors.get("graph")
        if graph_bytes is None:
            raise GraphError(f"the attach of stage {attach.stage} carries no graph.")
        try:
            boundary = msgspec.msgpack.decode(attach.boundary, type=Boundary)
        except msgspec.MsgspecError as error:
            raise GraphError(f"the boundary of stage {attach.stage} does not fit its schema: {error}.") from None
        if boundary.stage != attach.stage:
            raise GraphError(f"the attach of stage {attach.stage} carries the boundary of stage {boundary.stage}.")
        places = {neighbour.stage: PeerId(neighbour.peer) for neighbour in attach.neighbours}
        if places.get(attach.stage) != self._host.peer:
            raise ExecutionError(f"the plan does not place stage {attach.stage} on this peer.")
        if unknown := boundary.others - places.keys():
            raise GraphError(f"stage {attach.stage} exchanges tensors with {sorted(unknown)}, not in its plan.")
        limit_bytes = self._host.memory_limit_bytes
        if limit_bytes is not None:
            limit_bytes -= sum(other.program.resident_bytes for other in self._runtimes.values())

        def load() -> StageRuntime:
            graph: Graph = parse(graph_bytes.data, self._host.graph_limits)
            if content_hash(graph) != attach.graph_hash:
                raise GraphError(f"stage {attach.stage}'s graph has another hash than announced.")
            boundary.check(graph)
            unsupported = self._host.backend.unsupported(node.op for node in graph.nodes)
            if unsupported:
                raise ExecutionError(
                    f"backend {self._host.backend.name} can't run {', '.join(unsupported)} of stage {attach.stage}."
                )
            program = self._host.backend.load(
                graph,
                grad_inputs=boundary.grad_inputs,
                options=attach.options,
                memory_limit_bytes=limit_bytes,
            )
            return StageRuntime(
                job=self.job,
                identity=(attach.graph_hash, bytes(attach.boundary), attach.options),
                graph=graph,
                held_limit_bytes=self._host.memory_limit_bytes or HELD_WITHOUT_LIMIT_BYTES,
                boundary=boundary,
                options=attach.options,
                program=program,
                compute=self._host.compute,
                postman=self,
                fingerprint=self._host.fingerprint,
                now_s=self._host.clock.now_s,
            )

        runtime, _ = await self._host.compute.run(load)
        return runtime

    def _dial_neighbours(self, runtime: StageRuntime, attach: wire.Attach) -> None:
        opening = wire.OpenJob(job=self.job, fence=attach.fence, ticket=attach.ticket)
        for stage in runtime.linked_stages:
            self.dial(self._neighbours[stage], opening)

    def dial(self, neighbour: wire.Neighbour, opening: wire.OpenJob) -> None:
        """Open the link to a neighbour if it is this side's turn to."""
        other = PeerId(neighbour.peer)
        if other != self._host.peer and dials(self._host.peer, other, self.owner):
            self._links.dial(other, neighbour.addresses, opening)

    def know(self, neighbours: Sequence[wire.Neighbour]) -> None:
        """Where the job's stages live (the driver tells its own member directly)."""
        self._neighbours = {neighbour.stage: neighbour for neighbour in neighbours}

    # ------------------------------------------------------------------------------- what runtimes and driver send

    def to_stage(self, stage: int, message: wire.Message, tensors: Sequence[HostTensor] = ()) -> None:
        peer = self._peer_of(stage)
        if peer == self._host.peer:
            headers = getattr(message, "tensors", ())
            named: dict[str, HostTensor] = {
                header.name: tensor for header, tensor in zip(headers, tensors, strict=True)
            }
            asyncio.get_running_loop().call_soon(self._deliver, message, named)
            return
        self._links.post(peer, message, tensors)

    def to_driver(self, message: wire.Message) -> None:
        if self._driver is not None:
            self._driver.post(message)

    def output(self, message: wire.Output, tensors: Sequence[HostTensor]) -> None:
        if self._on_output is not None:
            self._take_output(
                message, {header.name: tensor for header, tensor in zip(message.tensors, tensors, strict=True)}
            )
            return
        self._links.post(self.owner, message, tensors)

    async def state(self, message: wire.StateChunk, tensors: Sequence[HostTensor]) -> None:
        await (await self._state_channel).send(message, tensors)

    async def linked(self, stages: Sequence[int]) -> None:
        """Wait for the links to these stages and to the driver."""
        peers = {self._peer_of(stage) for stage in stages} | {self.owner}
        for peer in sorted(peers - {self._host.peer}):
            await self._links.up(peer)

    def _take_output(self, message: wire.Output, tensors: dict[str, HostTensor]) -> None:
        if self._on_output is None:
            raise ExecutionError(f"an output of {self.job} arrived where no driver is.")
        self._on_output(message, tensors)

    # -------------------------------------------------------------------------------------------------- the ends

    def _link_lost(self, peer: PeerId, reason: str) -> None:
        if self._on_link_lost is not None:
            self._on_link_lost(peer, reason)
        for runtime in self._runtimes.values():
            self.failed(runtime, "failed", f"link to peer {short(peer)} lost: {reason}")

    def _refuse(self, attach: wire.Attach, code: wire.RefusalCode, reason: str) -> None:
        self.to_driver(wire.StageFailed(fence=attach.fence, stage=attach.stage, code=code, reason=reason[:4000]))

    def _report(self, error: FusionError, runtime: StageRuntime | None = None) -> None:
        """A message that a stage can't obey fails that stage (or, unaddressed, all stages here)."""
        for failed in [runtime] if runtime is not None else list(self._runtimes.values()):
            self.failed(failed, "bad_message", str(error))

    def failed(self, runtime: StageRuntime, code: wire.RefusalCode, reason: str) -> None:
        """Tell the driver, once per stage and fence: the first failure ends the attempt."""
        fence, stage = runtime.fence, runtime.stage
        if self._failed.get(stage) != fence:
            self._failed[stage] = fence
            self.to_driver(wire.StageFailed(fence=fence, stage=stage, code=code, reason=reason[:4000]))

    async def _detach(self, reason: str) -> None:
        runtimes, self._runtimes = self._runtimes, {}
        for runtime in runtimes.values():
            runtime.detach(reason)
            await runtime.close()

    async def close(self) -> None:
        """End everything that works for this member. Harmless when done before."""
        await self._detach("closed")
        await self._links.close()
        serving = self._serving - {asyncio.current_task()}
        for task in serving:
            task.cancel()
        if serving:
            await asyncio.wait(serving)

    def _peer_of(self, stage: int) -> PeerId:
        if stage == FEED:
            return self.owner
        neighbour = self._neighbours.get(stage)
        if neighbour is None:
            raise ExecutionError(f"job {self.job} has no stage {stage} in its plan.")
        return PeerId(neighbour.peer)


def _receiver(message: wire.Message) -> tuple[int, Fence]:
    match message:
        case wire.Forward(consumer=stage, fence=fence) | wire.Backward(producer=stage, fence=fence):
            return stage, fence
        case wire.SharedGradient(receiver=stage, fence=fence):
            return stage, fence
        case wire.Commit(stage=stage, fence=fence) | wire.Resume(stage=stage, fence=fence):
            return stage, fence
        case wire.Export(stage=stage, fence=fence):
            return stage, fence
        case _:
            raise ExecutionError(f"a {type(message).__name__} has no place on a connection between members of a job.")


def _sender(message: wire.Message) -> int | None:
    """The stage a tensor message claims to come from."""
    match message:
        case wire.Forward(producer=stage) | wire.Backward(consumer=stage) | wire.SharedGradient(sender=stage):
            return stage
        case wire.Output(stage=stage):
            return stage
        case _:
            return None
