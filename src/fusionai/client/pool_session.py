"""A conversation with the pool's broker: who is there, which jobs run, make this plan real.

Decides nothing; every method is one question and its answer. Neighbours: `broker` answers, `cli` and `client.train`
ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, TypeVar

import msgspec

from fusionai.execution.deployment import Deployment
from fusionai.primitives.errors import TransportError, WireError
from fusionai.primitives.ids import JobId
from fusionai.scheduling.types import PeerProfile, Plan
from fusionai.transport.conversation import Conversation
from fusionai.transport.enrolment import Membership
from fusionai.transport.peer_transport import PeerTransport
from fusionai.wire import messages as wire

M = TypeVar("M", bound=wire.Message)

ANSWER_S: Final = 15.0
"""For an answer of the broker, a connection included."""


@dataclass(frozen=True, slots=True)
class Member:
    """A pool member with its profile decoded."""

    view: wire.MemberView
    profile: PeerProfile


class PoolSession:
    """`async with PoolSession(membership) as pool: ...`. `on_stop` is told the job somebody asked to stop, `on_members`
    whoever is in the pool, at each look at it.

    Connects when first asked something, and again after the broker was away. Every question raises `TransportError`
    when it is not answered within `ANSWER_S`."""

    def __init__(
        self,
        membership: Membership,
        *,
        on_stop: Callable[[JobId], None] | None = None,
        on_members: Callable[[tuple[Member, ...]], None] | None = None,
    ) -> None:
        self.membership = membership
        self.transport = PeerTransport(membership.credentials, membership.broker_addresses)
        self._on_stop = on_stop
        self._on_members = on_members
        self._conversation: Conversation | None = None
        self._connecting = asyncio.Lock()

    async def __aenter__(self) -> PoolSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._conversation is not None:
            await self._conversation.close()
        await self.transport.close()

    async def pool(self) -> tuple[Member, ...]:
        view = await self._ask(wire.PoolQuery(), wire.PoolView)
        members = tuple(
            Member(member, msgspec.msgpack.decode(member.profile, type=PeerProfile)) for member in view.members
        )
        if self._on_members is not None:
            self._on_members(members)
        return members

    async def jobs(self, job: str = "") -> tuple[wire.JobView, ...]:
        return (await self._ask(wire.JobQuery(job=job), wire.JobList)).jobs

    async def stop(self, job: str) -> None:
        await self._ask(wire.JobStop(job=job), wire.Done)

    async def leave(self, *, drain: bool) -> None:
        """Ask the broker to see this machine's peer off."""
        await self._ask(wire.Leave(drain=drain), wire.Done)

    async def invite(self, *, uses: int, lifetime_s: float) -> str:
        return (await self._ask(wire.InviteRequest(uses=uses, lifetime_s=lifetime_s), wire.Invited)).invitation

    async def request(self, job: JobId, title: str, plan: Plan, steps: int) -> Deployment:
        """Make a plan of version 0 real, or get new tickets for the plan in force. Raises `RefusedError` when a peer of
        it is taken or gone, or another plan is in force: plan again."""
        question = wire.JobRequest(job=job, title=title, plan=msgspec.Raw(msgspec.msgpack.encode(plan)), steps=steps)
        granted = await self._ask(question, wire.JobGranted)
        return Deployment(
            plan=msgspec.msgpack.decode(granted.plan, type=Plan),
            # A stage ticket or the driver's: the driver's comes last and is the one the owner dials with.
            tickets={one.peer: one.ticket for one in granted.tickets},
            members={member.peer: member.addresses for member in granted.members},
        )

    async def report(self, report: wire.JobReport) -> None:
        await self._ask(report, wire.Done)

    async def _ask(self, message: wire.Message, expected: type[M]) -> M:
        try:
            async with asyncio.timeout(ANSWER_S):
                conversation = await self._connected()
                answer = await conversation.ask(message)
        except TimeoutError:
            if self._conversation is not None:
                self._conversation.channel.abort()
            raise TransportError(f"the broker did not answer within {ANSWER_S:g} s.") from None
        if not isinstance(answer, expected):
            raise WireError(f"the broker answered {type(answer).__name__} to {type(message).__name__}.")
        return answer

    async def _connected(self) -> Conversation:
        """The open conversation, opened again if the broker was away."""
        async with self._connecting:
            if self._conversation is None or self._conversation.channel.closed:
                channel = await self.transport.dial(self.membership.broker_addresses, expect=None, stream="control")
                self._conversation = Conversation(channel, notices=(wire.StopNotice,), on_notice=self._notice)
            return self._conversation

    def _notice(self, message: wire.Message) -> None:
        if isinstance(message, wire.StopNotice) and self._on_stop is not None:
            self._on_stop(JobId(message.job))
