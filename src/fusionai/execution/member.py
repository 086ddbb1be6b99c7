"""One machine's part in one job: its stages, its links, its connection to the driver.

Decides nothing of the job. Checks every message's fence, loads what it is told to run after validating it, and brings
messages to the right stage. Used by the peer's daemon and, for the job owner's own stages, by the driver's process.

Neighbours: `execution.runtime` runs each stage, `execution.links` moves tensors, `ir.validate` guards the door.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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


class JobMember:
    """`owner` is the driver's peer id. `on_output` only where the driver lives: job outputs end there."""

    def __init__(self, host: Host, job: str, owner: PeerId, *, on_output: OutputSink | None = None) -> None:
        self.job = job
        self.owner = owner
        self.stale_dropped = 0
        """Messages dropped because their fence was not the stage's own (normal after a change of plan)."""
        self._host = host
        self._on_output = on_output
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
        """Obey the driver until it detaches or the connection ends."""
        self._driver = Outbox(channel, lambda reason: log.info("driver of %s lost: %s", self.job, reason))
        try:
            while True:
                envelope = await channel.receive()
                match envelope.message:
                    case wire.Attach() as attach:
                        await self._attach(attach, envelope.tensors)
                    case wire.Detach() as detach:
                        self._detach(detach.reason)
                        return
                    case wire.Ping(sequence=sequence, sent_at_s=sent_at_s):
                        self.to_driver(wire.Pong(sequence=sequence, sent_at_s=sent_at_s))
                    case _ as message:
                        self._deliver(message, envelope.tensors)
        except ChannelClosed:
            log.info("the driver of %s closed its connection", self.job)
        finally:
            await self._driver.close()

    async def serve_state(self, channel: Channel) -> None:
        """Take state chunks from the driver; what `state` sends leaves on the same connection."""
        if self._state_channel.done():
            self._state_channel = asyncio.get_running_loop().create_future()
        self._state_channel.set_result(channel)
        try:
            while True:
                envelope = await channel.receive()
                message = envelope.message
                if not isinstance(message, wire.StateChunk):
                    raise ExecutionError(f"expected a StateChunk on a state connection, got {type(message).__name__}.")
                runtime = self._runtime(message.stage, message.fence)
                if runtime is not None:
                    await runtime.receive_state(message, envelope.tensors)
        except ChannelClosed:
            return
        except FusionError as error:
            self._report(error)

    async def serve_link(self, peer: PeerId, channel: Channel) -> None:
        """A neighbour dialled this machine."""
        await self._links.serve(peer, channel)

    async def _from_link(self, peer: PeerId, envelope: Envelope) -> None:
        message = envelope.message
        if isinstance(message, wire.Output):
            self._take_output(message, envelope.tensors)
            return
        sender = _sender(message)
        if sender is None:
            raise ExecutionError(f"peer {short(peer)} sent a {type(message).__name__}; only the driver may.")
        if self._peer_of(sender) != peer:
            raise ExecutionError(f"peer {short(peer)} sent a {type(message).__name__} as stage {sender}, not its own.")
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

    def _runtime(self, stage: int, fence: Fence) -> StageRuntime | None:
        runtime = self._runtimes.get(stage)
        if runtime is None or not runtime.accepts(fence):
            self.stale_dropped += 1
            return None
        return runtime

    # -------------------------------------------------------------------------------------------------- attaching

    async def _attach(self, attach: wire.Attach, tensors: dict[str, HostTensor]) -> None:
        try:
            runtime = self._runtimes.get(attach.stage)
            if runtime is None:
                runtime = await self._load(attach, tensors)
                self._runtimes[attach.stage] = runtime
        except GraphError as error:
            self._refuse(attach, "bad_graph", error)
        except FusionError as error:
            self._refuse(attach, "failed", error)
        else:
            self._neighbours = {neighbour.stage: neighbour for neighbour in attach.neighbours}
            runtime.attach(attach.fence)
            self._dial_neighbours(runtime, attach)

    async def _load(self, attach: wire.Attach, tensors: dict[str, HostTensor]) -> StageRuntime:
        """Validate, then load: nothing received is run before both."""
        graph_bytes = tensors.get("graph")
        if graph_bytes is None:
            raise GraphError(f"the attach of stage {attach.stage} carries no graph.")
        try:
            boundary = msgspec.msgpack.decode(attach.boundary, type=Boundary)
        except msgspec.MsgspecError as error:
            raise GraphError(f"the boundary of stage {attach.stage} does not fit its schema: {error}.") from None

        def load() -> StageRuntime:
            graph: Graph = parse(graph_bytes.data, self._host.graph_limits)
            if content_hash(graph) != attach.graph_hash:
                raise GraphError(f"stage {attach.stage}'s graph has another hash than announced.")
            unsupported = self._host.backend.unsupported(node.op for node in graph.nodes)
            if unsupported:
                raise ExecutionError(
                    f"backend {self._host.backend.name} can't run {', '.join(unsupported)} of stage {attach.stage}."
                )
            program = self._host.backend.load(
                graph,
                grad_inputs=boundary.grad_inputs,
                options=attach.options,
                memory_limit_bytes=self._host.memory_limit_bytes,
            )
            return StageRuntime(
                job=self.job,
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
            log.warning("an output of %s arrived where no driver is; dropped", self.job)
            return
        self._on_output(message, tensors)

    # -------------------------------------------------------------------------------------------------- the ends

    def _link_lost(self, peer: PeerId, reason: str) -> None:
        for runtime in self._runtimes.values():
            self.to_driver(
                wire.StageFailed(
                    fence=runtime.fence,
                    stage=runtime.stage,
                    code="failed",
                    reason=f"link to peer {short(peer)} lost: {reason}"[:4000],
                )
            )

    def _refuse(self, attach: wire.Attach, code: wire.RefusalCode, error: FusionError) -> None:
        self.to_driver(wire.StageFailed(fence=attach.fence, stage=attach.stage, code=code, reason=str(error)[:4000]))

    def _report(self, error: FusionError, runtime: StageRuntime | None = None) -> None:
        """A message that a stage can't obey fails that stage (or, unaddressed, all stages here)."""
        for failed in [runtime] if runtime is not None else list(self._runtimes.values()):
            self.to_driver(
                wire.StageFailed(fence=failed.fence, stage=failed.stage, code="bad_message", reason=str(error)[:4000])
            )

    def _detach(self, reason: str) -> None:
        for runtime in self._runtimes.values():
            runtime.detach(reason)
        self._runtimes.clear()

    async def close(self) -> None:
        self._detach("closed")
        await self._links.close()

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
        case _:
            return None
