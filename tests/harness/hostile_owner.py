"""A job owner that attacks the machine lent to its job: a genuine member with genuine tickets that sends what it likes.

It is granted a plan with one stage at the victim and the last one at its own machine, and speaks the protocol itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from fusionai.client.pool.job_trust import JobTrust, job_trust
from fusionai.client.pool.session import PoolSession
from fusionai.execution.serving.boundary import ServingBoundary
from fusionai.execution.training.boundary import FEED, Boundary, Port
from fusionai.ir import schema
from fusionai.ir.schema import Graph
from fusionai.primitives.ids import JobId, PeerId
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.scheduling.problem.types import Certificate, Plan, StagePlacement
from fusionai.transport.enrolment import Membership
from fusionai.transport.interface import Channel
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.wire import messages as wire
from fusionai.wire.frame import headers
from fusionai.wire.messages import Fence, StageOptions
from harness.patience import CEILING_S

JOB = JobId("attack")


@dataclass
class HostileOwner:
    """Use `opened`. `victim`: the peer under attack."""

    membership: Membership
    victim: PeerId
    addresses: tuple[str, ...]
    trust: JobTrust
    tickets: Mapping[str, bytes]
    stage_ticket: bytes
    """Its own one for the stage that the plan leaves at its machine."""
    version: int
    task: Literal["train", "serve"] = "train"
    control: Channel = field(init=False)
    placement: bytes = b""
    """The signed placement of the present round."""
    channels: list[Channel] = field(default_factory=list[Channel])
    attempt: int = 0

    @property
    def fence(self) -> Fence:
        return Fence(self.version, 1, self.attempt)

    @property
    def peer(self) -> PeerId:
        return self.membership.peer

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, home: Path, membership: Membership, task: Literal["train", "serve"] = "train"
    ) -> AsyncIterator[HostileOwner]:
        """Have the broker grant the job, and open the control connection."""
        trust = job_trust(home, membership, "encrypted", confidential=False)
        async with PoolSession(membership, trust=trust) as session:
            (member,) = await session.pool()
            victim = PeerId(member.view.peer)
            granted = await session.request(JOB, "an attack", _plan(victim, membership.peer), 1)
            plan = msgspec.Raw(msgspec.msgpack.encode(granted.plan))
            again = await session._ask(wire.JobRequest(job=JOB, title="an attack", plan=plan, steps=1), wire.JobGranted)
            stage_ticket = next(one.ticket for one in again.tickets if one.peer == membership.peer)
            places = tuple(one for one in member.view.addresses if one.startswith("tcp://"))
            owner = cls(membership, victim, places, trust, granted.tickets, stage_ticket, granted.plan.version, task)
            owner.control = await owner.dial("control")
            try:
                yield owner
            finally:
                for channel in owner.channels:
                    channel.abort()

    async def dial(self, stream: wire.Stream, *, as_stage: bool = False) -> Channel:
        """With its ticket as the driver, or as the stage at its machine."""
        channel = await TcpTransport(self.membership.credentials).dial(
            self.addresses, expect=self.victim, stream=stream
        )
        self.channels.append(channel)
        placement = self.placement if as_stage else self._placement(self.places())
        ticket = self.stage_ticket if as_stage else self.tickets[self.peer]
        await channel.send(wire.OpenJob(job=JOB, fence=self.fence, ticket=ticket, placement=placement, task=self.task))
        answer = await received(channel)
        assert isinstance(answer, wire.Done), answer
        return channel

    def places(self, stages: int = 1) -> tuple[wire.Neighbour, ...]:
        """All stages but the last at the victim."""
        here = (
            wire.Neighbour(stage=stage, peer=self.victim, ticket=self.tickets[self.victim]) for stage in range(stages)
        )
        return (*here, wire.Neighbour(stage=stages, peer=self.peer))

    def _placement(self, places: Sequence[wire.Neighbour], standbys: Sequence[int] = ()) -> bytes:
        return self.trust.seal.placement(
            JOB,
            self.fence,
            stages=((one.stage, one.peer) for one in places),
            standbys=((stage, self.victim) for stage in standbys),
        )

    async def enlist(self, places: Sequence[wire.Neighbour] | None = None, standbys: Sequence[int] = ()) -> None:
        """Begin another round. The victim stands by for the stages `standbys`."""
        self.attempt += 1
        places = self.places() if places is None else places
        self.placement = self._placement(places, standbys)
        await self.control.send(
            wire.Enlist(
                fence=self.fence,
                job=JOB,
                neighbours=tuple(places),
                standbys=tuple(standbys),
                partition=f"cut {self.attempt}",
                ticket=self.tickets[self.victim],
                placement=self.placement,
            )
        )
        answer = await self.answer()
        assert isinstance(answer, wire.Enlisted), answer

    async def answer(self) -> wire.Message:
        """The next message of this round."""
        while getattr(message := await received(self.control), "fence", self.fence) != self.fence:
            pass
        return message

    async def attach(
        self, graph: Graph, stage: int = 0, last: int = 1, *, later: tuple[str, ...] = (), **options: Any
    ) -> wire.Message:
        """Give the victim a stage that is fed all inputs but `later`, which come from the stage `last`, and sends all
        outputs there; its answer."""
        encoded = schema.encode(graph)
        carried = {"graph": host_tensor("uint8", (len(encoded),), encoded)}
        fed = tuple(name for name in graph.inputs if name not in later)
        boundary = Boundary(
            stage=stage,
            receives=(Port(FEED, fed), *((Port(last, later),) if later else ())),
            sends=(Port(last, tuple(graph.outputs)),),
        )
        message = wire.Attach(
            fence=self.fence,
            job=JOB,
            stage=stage,
            graph_hash=schema.content_hash(graph),
            boundary=msgspec.Raw(msgspec.msgpack.encode(boundary)),
            options=StageOptions(**{"microbatches": 1, "in_flight": 1, **options}),
            tensors=headers(carried),
        )
        await self.control.send(message, tuple(carried.values()))
        return await self.answer()

    async def load(
        self, graph: Graph, boundary: ServingBoundary, options: wire.ServeOptions, *, stages: int = 2, **changes: Any
    ) -> wire.Message:
        """Give the victim a stage of a serving job; its answer."""
        encoded = schema.encode(graph)
        carried = {"graph": host_tensor("uint8", (len(encoded),), encoded)}
        message = wire.Load(
            fence=self.fence,
            job=JOB,
            stage=boundary.stage,
            stages=stages,
            graph_hash=schema.content_hash(graph),
            boundary=msgspec.Raw(msgspec.msgpack.encode(boundary)),
            options=options,
            tensors=headers(carried),
            **changes,
        )
        await self.control.send(message, tuple(carried.values()))
        while isinstance(answer := await self.answer(), wire.Loading | wire.Working):
            pass
        return answer

    async def resume(self, stage: int = 0) -> wire.Message:
        await self.control.send(wire.Resume(fence=self.fence, stage=stage, committed=0, source="initialise"))
        return await self.answer()

    def forward(self, values: Mapping[str, HostTensor], *, stage: int = 0, microbatch: int = 0) -> wire.Forward:
        return wire.Forward(
            fence=self.fence,
            mode="eval",
            step=0,
            replica=0,
            microbatch=microbatch,
            producer=FEED,
            consumer=stage,
            tensors=headers(values),
        )


async def received(channel: Channel) -> wire.Message:
    """The next message but signs of life."""
    async with asyncio.timeout(CEILING_S):
        while isinstance((envelope := await channel.receive()).message, wire.Ping):
            pass
    return envelope.message


def _plan(victim: PeerId, owner: PeerId) -> Plan:
    return Plan(
        graph_hash="",
        stages=(
            StagePlacement(stage=0, peer=victim, blocks=(0, 1)),
            StagePlacement(stage=1, peer=owner, blocks=(1, 2), roles=("loss",)),
        ),
        feed=owner,
        microbatches=1,
        step_time_s=1.0,
        tokens_per_s=1.0,
        certificate=Certificate(method="none", exact=False, bound_tokens_per_s=1.0, optimality_gap=0.0),
    )
