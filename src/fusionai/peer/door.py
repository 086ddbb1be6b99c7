"""Who may connect to this peer, and for what. Decides by certificate and ticket, offline; runs nothing itself.

Every connection between members of a job starts with `OpenJob`: a ticket signed by the pool's authority, naming the
sender's key, the job and the plan version. Control and state connections need the driver's ticket.

Neighbours: `execution.member` serves what is let in, `transport.tickets` checks signatures.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from fusionai.execution.member import Host, JobMember
from fusionai.primitives.errors import ChannelClosed, FusionError, TrustError
from fusionai.primitives.ids import JobId, PeerId, short
from fusionai.transport.interface import Channel
from fusionai.transport.links import answer_probe
from fusionai.transport.tickets import ExpiredTicket, Ticket, verify_ticket
from fusionai.wire import messages as wire

log = logging.getLogger(__name__)

OPENING_TIMEOUT_S: Final = 10.0


class Door:
    """`accept` serves one connection from its first message to its end."""

    def __init__(self, host: Host, authority_key: bytes) -> None:
        self._host = host
        self._authority_key = authority_key
        self._members: dict[JobId, JobMember] = {}
        self.closing = False
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def jobs(self) -> tuple[str, ...]:
        return tuple(sorted(self._members))

    async def accept(self, channel: Channel) -> None:
        try:
            async with asyncio.timeout(OPENING_TIMEOUT_S):
                first = await channel.receive()
            match first.message:
                case wire.OpenJob() as opening:
                    await self._open(channel, opening)
                case wire.Ping() | wire.Probe():
                    envelope = first
                    while await answer_probe(channel, envelope):
                        envelope = await channel.receive()
                case other:
                    await self._refuse(channel, "bad_message", f"expected OpenJob, got {type(other).__name__}.")
        except TimeoutError:
            log.info("a connection said nothing for %.0f s", OPENING_TIMEOUT_S)
        except ChannelClosed:
            return
        except FusionError as error:
            log.warning("a connection ended: %s", error)

    async def _open(self, channel: Channel, opening: wire.OpenJob) -> None:
        try:
            ticket = self._check(channel, opening)
        except ExpiredTicket as error:
            await self._refuse(channel, "expired_ticket", str(error))
            return
        except TrustError as error:
            await self._refuse(channel, "bad_ticket", str(error))
            return
        job, peer = JobId(ticket.job), PeerId(ticket.peer)
        match channel.stream:
            case "control":
                await self._serve_driver(channel, ticket, job, peer, opening.fence)
            case "state" | "tensors" as stream:
                member = self._members.get(job)
                if member is None:
                    await self._refuse(channel, "unknown_job", "")
                    return
                if stream == "state" and (ticket.role != "driver" or peer != member.owner):
                    await self._refuse(channel, "not_authorised", "only the job's driver opens a state connection.")
                    return
                if opening.fence.plan_version < member.fence.plan_version:
                    await self._refuse(channel, "stale_fence", f"the plan's version is {member.fence.plan_version}.")
                    return
                await channel.send(wire.Done())
                if stream == "state":
                    await member.serve_state(channel)
                else:
                    await member.serve_link(peer, channel)

    async def _serve_driver(
        self, channel: Channel, ticket: Ticket, job: JobId, owner: PeerId, opened: wire.Fence
    ) -> None:
        if ticket.role != "driver":
            await self._refuse(channel, "not_authorised", "only a driver opens a control connection.")
        elif self.closing:
            await self._refuse(channel, "leaving", "")
        elif self._members and job not in self._members:
            await self._refuse(channel, "busy", f"it runs {', '.join(self._members)}.")
        elif (present := self._members.get(job)) is not None and opened < present.fence:
            await self._refuse(channel, "stale_fence", "a later start of this job's driver is here.")
        else:
            while (previous := self._members.pop(job, None)) is not None:
                await previous.close()  # while one driver waits here, another may have come
            member = JobMember(self._host, job, owner, opened)
            self._members[job] = member
            self.idle.clear()
            log.info("job %s of %s opened", job, short(owner))
            try:
                await channel.send(wire.Done())
                await member.serve_control(channel)
            finally:
                await member.close()
                if self._members.get(job) is member:
                    del self._members[job]
                if not self._members:
                    self.idle.set()

    def _check(self, channel: Channel, opening: wire.OpenJob) -> Ticket:
        if channel.remote.peer is None:
            raise TrustError("expected a member of the pool, got a stranger.")
        ticket = verify_ticket(
            opening.ticket,
            self._authority_key,
            now_wall_s=self._host.clock.wall_s(),
            job=JobId(opening.job),
            peer=channel.remote.peer,
        )
        if ticket.plan_version != opening.fence.plan_version:
            raise TrustError(
                f"expected a ticket for plan version {opening.fence.plan_version}, got one for {ticket.plan_version}."
            )
        return ticket

    async def _refuse(self, channel: Channel, code: wire.RefusalCode, reason: str) -> None:
        log.info("refused a connection: %s %s", code, reason)
        await channel.send(wire.Refused(code=code, reason=reason))

    async def close(self) -> None:
        self.closing = True
        for member in list(self._members.values()):
            await member.close()
