"""Questions and requests of this machine's owner to the pool it is in. Decides nothing; runs no job.

Neighbours: `broker` answers, `transport.enrolment` says who we are, `cli` shows what comes back.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from fusionai.primitives.errors import UsageError, WireError
from fusionai.primitives.ids import JobId, PeerId
from fusionai.transport.conversation import Conversation
from fusionai.transport.enrolment import Membership, load_membership
from fusionai.transport.tcp import TcpTransport
from fusionai.wire.messages import (
    Done,
    Invited,
    InviteRequest,
    JobList,
    JobQuery,
    JobStop,
    JobView,
    Leave,
    Message,
    PoolQuery,
    PoolView,
)

_Answer = TypeVar("_Answer", bound=Message)


class PoolSession:
    """A conversation with the broker; use as `async with PoolSession.at(home) as session`.

    Everything raises `TransportError` (no broker answers), `RefusedError` (it says no), `TrustError`."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self._conversation: Conversation | None = None

    @classmethod
    def at(cls, home: Path) -> PoolSession:
        """With the membership kept in `home`. Raises `UsageError` where this machine has joined no pool."""
        return cls(load_membership(home))

    @property
    def peer(self) -> PeerId:
        """This machine."""
        return self.membership.peer

    async def __aenter__(self) -> Self:
        transport = TcpTransport(self.membership.credentials)
        channel = await transport.dial(self.membership.broker_addresses, expect=None, stream="control")
        self._conversation = Conversation(channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._conversation is not None:
            await self._conversation.close()

    async def pool(self) -> PoolView:
        """Who is in the pool."""
        return await self._ask(PoolQuery(), PoolView)

    async def jobs(self) -> tuple[JobView, ...]:
        """All jobs, without their stories."""
        return (await self._ask(JobQuery(), JobList)).jobs

    async def job(self, job: JobId) -> JobView:
        """One job with its story. Raises `UsageError` when there is none of that name."""
        found = (await self._ask(JobQuery(job=job), JobList)).jobs
        if not found:
            raise UsageError(f"there is no job {job!r} in this pool.", hint="`fusion jobs` lists them.")
        return found[0]

    async def stop(self, job: JobId) -> None:
        """Ask for a job's clean end; its driver writes a last checkpoint. For its owner and the broker's owner."""
        await self._ask(JobStop(job=job), Done)

    async def leave(self, *, drain: bool) -> None:
        """Take this machine's peer out of the pool: after the work at hand (`drain`), or at once."""
        await self._ask(Leave(drain=drain), Done)

    async def invite(self, *, uses: int, lifetime_s: float) -> str:
        """A new invitation. For the broker's owner and whom that one named."""
        return (await self._ask(InviteRequest(uses=uses, lifetime_s=lifetime_s), Invited)).invitation

    async def _ask(self, question: Message, kind: type[_Answer]) -> _Answer:
        if self._conversation is None:
            raise RuntimeError("a pool session is used inside `async with`")
        answer = await self._conversation.ask(question)
        if not isinstance(answer, kind):
            raise WireError(f"expected {kind.__name__} from the broker, got {type(answer).__name__}.")
        return answer
