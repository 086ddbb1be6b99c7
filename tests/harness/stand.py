"""One shipped peer under test, and a test that plays everybody else: driver, neighbour, stranger.

The job has three stages: 0 at the peer under test, 1 at a neighbour that the test plays, 2 (the loss) at the owner,
played too. Values are those of the null backend. Neighbour: `harness.pool` has whole jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from fusionai.backends.interface import Backend
from fusionai.execution.training.boundary import boundaries
from fusionai.execution.training.member import JobMember
from fusionai.ir import schema
from fusionai.ir.partition import cut_blocks
from fusionai.ir.schema import Graph, InitOp, Node, ParamSpec, Ref, ValueSpec
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.transport.interface import Channel, Envelope
from fusionai.wire import messages as wire
from fusionai.wire.frame import headers
from fusionai.wire.messages import CommitRecord, Fence, OptimizerSpec, StageOptions
from harness.null_backend import NullBackend
from harness.patience import CEILING_S
from harness.pool import JOB, OWNER, SEAL, MemoryPool, peer_id, tensor

NEIGHBOUR = peer_id(4)
FENCE = Fence(1, 1, 0)
MICROBATCHES = 2
PATIENCE_S = CEILING_S
"""Nothing here takes this long; whoever waits so long waits for ever."""


def layers(width: int = 4, *, largest_batch: int = 8) -> Graph:
    """Two linear layers and a squared error, in blocks 1, 2 and 3."""
    matrix, rows = ValueSpec((width, width), "float32"), ValueSpec(("b", width), "float32")
    params = {
        f"w{layer}": ParamSpec(
            key=f"layer{layer}.weight",
            kind="parameter",
            shape=(width, width),
            dtype="float32",
            trainable=True,
            order=layer,
            init=(InitOp("normal", (0.0, 0.5)),),
        )
        for layer in (0, 1)
    }
    return Graph(
        name="layers",
        symbols={"b": (1, largest_batch)},
        inputs=("x", "labels"),
        outputs={"output": "y1", "loss": "error"},
        values={
            "x": rows,
            "labels": rows,
            "w0": matrix,
            "w1": matrix,
            "y0": rows,
            "y1": rows,
            "error": ValueSpec((), "float32"),
        },
        params=params,
        nodes=(
            Node(id=0, op="aten.linear.default", args=(Ref("x"), Ref("w0")), outputs=("y0",), block=1),
            Node(id=1, op="aten.linear.default", args=(Ref("y0"), Ref("w1")), outputs=("y1",), block=2),
            Node(id=2, op="aten.mse_loss.default", args=(Ref("y1"), Ref("labels")), outputs=("error",), block=3),
        ),
    )


RANGES = ((0, 2), (2, 3), (3, 4))


def rows(value: float = 0.0, *, batch: int = 2, width: int = 4, dtype: str = "float32") -> HostTensor:
    return tensor(np.full((batch, width), value, dtype))


class Stand:
    """Use as an async context. `memory_limit_bytes` is what the peer under test lends. `standbys`: shipped peers beside
    it, numbered from 1."""

    def __init__(
        self,
        *,
        memory_limit_bytes: int | None = None,
        graph: Graph | None = None,
        backend: Callable[[], Backend] = NullBackend,
        standbys: int = 0,
    ) -> None:
        self.pool = MemoryPool(1 + standbys, backend)
        self.memory_limit_bytes = memory_limit_bytes
        self.partition = cut_blocks(graph or layers(), RANGES)
        self.boundaries = boundaries(self.partition)
        self.from_peer: asyncio.Queue[Channel] = asyncio.Queue()
        """Connections that the peer under test dialled to its neighbour."""
        self.over = asyncio.Event()

    async def __aenter__(self) -> Stand:
        if self.memory_limit_bytes is not None:
            host = self.pool.hosts[0]
            self.pool.hosts[0] = replace(host, memory_limit_bytes=self.memory_limit_bytes)
        await self.pool.__aenter__()
        transport = self.pool.network.transport(NEIGHBOUR)
        self.listener = await transport.listen(self._accept, host="neighbour", port=0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.over.set()
        await self.listener.close()
        await self.pool.__aexit__(*exc)

    async def _accept(self, channel: Channel) -> None:
        await channel.receive()
        await channel.send(wire.Done())
        self.from_peer.put_nowait(channel)
        await self.over.wait()

    @property
    def peer(self) -> PeerId:
        return self.pool.hosts[0].peer

    @property
    def member(self) -> JobMember:
        """The peer's part in the job."""
        return self.member_of(0)

    def member_of(self, number: int) -> JobMember:
        return self.pool.doors[number]._members[JOB]

    async def dial(self, stream: wire.Stream, *, as_peer: PeerId | None = OWNER, to: int = 0) -> Channel:
        role = "member" if as_peer is not None else "stranger"
        transport = self.pool.network.transport(as_peer, role)
        peer = self.pool.hosts[to].peer
        return await transport.dial(self.pool.addresses[peer], expect=peer, stream=stream)

    async def open(
        self,
        stream: wire.Stream = "control",
        *,
        as_peer: PeerId = OWNER,
        job: str = JOB,
        fence: Fence = FENCE,
        ticket: bytes | None = None,
        placement: bytes | None = None,
        to: int = 0,
    ) -> tuple[Channel, wire.Message]:
        """Dial, show a ticket and a signed placement (by default good ones), wait for the answer."""
        if ticket is None:
            ticket = self.pool.ticket(as_peer, driver=as_peer == OWNER, version=fence.plan_version)
        channel = await self.dial(stream, as_peer=as_peer, to=to)
        if placement is None:
            placement = signed(self.neighbours(), fence, job=job)
        await channel.send(wire.OpenJob(job=job, fence=fence, ticket=ticket, placement=placement))
        return channel, (await receive(channel)).message

    def neighbours(self, at: int = 0) -> tuple[wire.Neighbour, ...]:
        """The plan: stage 0 at a shipped peer, by default the one under test."""
        places = ((0, self.pool.hosts[at].peer), (1, NEIGHBOUR), (2, OWNER))
        self.pool.elsewhere[NEIGHBOUR] = self.listener.addresses
        return tuple(wire.Neighbour(stage=stage, peer=peer, ticket=self.pool.contact(peer)) for stage, peer in places)

    def enlist(self, to: PeerId | None = None, **changes: Any) -> wire.Enlist:
        """A good one but for `changes`; `to` standbys what they say, by default the peer under test."""
        fence: Fence = changes.get("fence", FENCE)
        fields: dict[str, Any] = {
            "fence": fence,
            "job": JOB,
            "neighbours": self.neighbours(),
            "partition": "a cut",
            "ticket": self.pool.ticket(self.peer, version=fence.plan_version),
        }
        told = {**fields, **changes}
        standbys = [(stage, to or self.peer) for stage in told.get("standbys", ())]
        placement = signed(told["neighbours"], fence, job=told["job"], standbys=standbys)
        return wire.Enlist(**{"placement": placement, **told})

    def attach(
        self, *, tensors: dict[str, HostTensor] | None = None, **changes: Any
    ) -> tuple[wire.Attach, dict[str, HostTensor]]:
        """A good attach of stage 0 but for `changes`."""
        encoded = schema.encode(self.partition.stages[0].graph)
        carried = {"graph": host_tensor("uint8", (len(encoded),), encoded)} if tensors is None else tensors
        fields: dict[str, Any] = {
            "fence": FENCE,
            "job": JOB,
            "stage": 0,
            "graph_hash": schema.content_hash(self.partition.stages[0].graph),
            "boundary": msgspec.Raw(msgspec.msgpack.encode(self.boundaries[0])),
            "options": StageOptions(microbatches=MICROBATCHES, in_flight=2, optimizer=OptimizerSpec()),
            "tensors": headers(carried),
        }
        return wire.Attach(**{**fields, **changes}), carried

    def prepare(self, **changes: Any) -> tuple[wire.Prepare, dict[str, HostTensor]]:
        """A good one of stage 0 but for `changes`."""
        attach, carried = self.attach()
        fields: dict[str, Any] = {
            "fence": FENCE,
            "stage": 0,
            "graph_hash": attach.graph_hash,
            "boundary": attach.boundary,
            "options": attach.options,
            "tensors": attach.tensors,
        }
        return wire.Prepare(**{**fields, **changes}), carried

    async def attached(self, **changes: Any) -> tuple[Channel, wire.Message]:
        """A control connection on which the peer was enlisted and stage 0 attached, and the answer to the latter."""
        control, answer = await self.open()
        assert isinstance(answer, wire.Done)
        await self.enlisted(control)
        return control, await self.attach_on(control, **changes)

    async def enlisted(self, control: Channel, **changes: Any) -> wire.Enlisted:
        """Begin a round."""
        await control.send(self.enlist(control.remote.peer, **changes))
        answer = (await receive(control)).message
        assert isinstance(answer, wire.Enlisted), answer
        return answer

    async def attach_on(self, control: Channel, **changes: Any) -> wire.Message:
        """The answer to an attach of stage 0."""
        message, carried = self.attach(**changes)
        await control.send(message, tuple(carried.values()))
        return (await receive(control)).message

    async def round(self, control: Channel, fence: Fence, **changes: Any) -> wire.Status:
        """Enlist and attach under a later fence."""
        await self.enlisted(control, fence=fence)
        status = await self.attach_on(control, fence=fence, **changes)
        assert isinstance(status, wire.Status), status
        return status

    async def running(self, **changes: Any) -> Running:
        """Stage 0 initialised, linked and ready for step 0; `changes` of the attach."""
        control, status = await self.attached(**changes)
        assert isinstance(status, wire.Status), status
        feed, answer = await self.open("tensors")
        assert isinstance(answer, wire.Done)
        state, answer = await self.open("state")
        assert isinstance(answer, wire.Done)
        await control.send(wire.Resume(fence=FENCE, stage=0, committed=0, source="initialise"))
        ready = (await receive(control)).message
        assert isinstance(ready, wire.Ready), ready
        neighbour = await asyncio.wait_for(self.from_peer.get(), PATIENCE_S)
        return Running(self, control, feed, state, neighbour)


def signed(
    neighbours: Iterable[wire.Neighbour], fence: Fence, *, job: str = JOB, standbys: Iterable[tuple[int, str]] = ()
) -> bytes:
    """Their placement, signed by the owner."""
    return SEAL.placement(job, fence, stages=((one.stage, one.peer) for one in neighbours), standbys=standbys)


class Running:
    """The test's ends of the running stage's connections."""

    def __init__(self, stand: Stand, control: Channel, feed: Channel, state: Channel, neighbour: Channel) -> None:
        self.stand = stand
        self.control = control
        self.feed = feed
        self.state = state
        self.neighbour = neighbour

    async def feed_microbatch(self, microbatch: int, step: int = 0) -> Envelope:
        """Give a microbatch to the stage; what it sends on."""
        message, carried = forward(microbatch=microbatch, step=step)
        await self.feed.send(message, tuple(carried.values()))
        return await receive(self.neighbour)

    async def return_gradient(self, microbatch: int, step: int = 0) -> None:
        message, carried = backward(microbatch=microbatch, step=step)
        await self.neighbour.send(message, tuple(carried.values()))

    async def prepared(self, step: int = 0) -> wire.Prepared:
        for microbatch in range(MICROBATCHES):
            await self.feed_microbatch(microbatch, step)
            await self.return_gradient(microbatch, step)
        message = (await receive(self.control)).message
        assert isinstance(message, wire.Prepared), message
        return message

    async def commit(self, step: int = 0, **changes: Any) -> None:
        await self.control.send(commit(step, **changes))

    async def link_lost(self) -> wire.LinkLost:
        """What the driver is told next must be that a link was lost."""
        message = (await receive(self.control)).message
        assert isinstance(message, wire.LinkLost), message
        return message

    async def failure(self) -> wire.StageFailed:
        """What the driver is told next must be that the stage failed."""
        message = (await receive(self.control)).message
        assert isinstance(message, wire.StageFailed), message
        return message

    async def alive(self) -> bool:
        """Nothing else was told to the driver, and it is still listened to."""
        await self.control.send(wire.Ping(sequence=5, sent_at_s=0.0))
        return (await receive(self.control)).message == wire.Pong(sequence=5, sent_at_s=0.0)


async def receive(channel: Channel) -> Envelope:
    """The next message but signs of life."""
    async with asyncio.timeout(PATIENCE_S):
        while isinstance((envelope := await channel.receive()).message, wire.Ping):
            pass
    return envelope


async def until(happened: Callable[[], bool]) -> None:
    """Let everybody else work until it has."""
    async with asyncio.timeout(PATIENCE_S):
        while not happened():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)


def forward(**changes: Any) -> tuple[wire.Forward, dict[str, HostTensor]]:
    """A good one from the feed to stage 0, but for `changes`; `values` are its tensors."""
    carried = changes.pop("values", {"x": rows()})
    fields: dict[str, Any] = {
        "fence": FENCE,
        "mode": "train",
        "step": 0,
        "replica": 0,
        "microbatch": 0,
        "producer": -1,
        "consumer": 0,
        "tensors": headers(carried),
    }
    return wire.Forward(**{**fields, **changes}), carried


def backward(**changes: Any) -> tuple[wire.Backward, dict[str, HostTensor]]:
    """A good one from stage 1 to stage 0, but for `changes`."""
    carried = changes.pop("values", {"y0": rows()})
    fields: dict[str, Any] = {
        "fence": FENCE,
        "step": 0,
        "replica": 0,
        "microbatch": 0,
        "consumer": 1,
        "producer": 0,
        "tensors": headers(carried),
    }
    return wire.Backward(**{**fields, **changes}), carried


def commit(step: int = 0, **changes: Any) -> wire.Commit:
    record = CommitRecord(
        step=step,
        scale=1.0,
        learning_rate=0.1,
        total_norm=1.0,
        norms_hash="",
        fence=FENCE,
        loss=1.0,
    )
    fields: dict[str, Any] = {"fence": FENCE, "stage": 0, "record": record, "watermark": step + 1}
    return wire.Commit(**{**fields, **changes})
