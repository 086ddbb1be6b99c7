"""Decides who may connect to this peer and for what, by certificate and ticket, offline.

Every connection between members of a job starts with `OpenJob`: a ticket signed by the pool's authority that names the
sender's key, the job and the plan version. A control connection needs the driver's ticket. The driver's state
connection carries states or weights; state connections of other members bring snapshots or ask for weights. Because the
broker alone issues tickets, a member other than the driver is accepted only if the placement signed by the job's owner
names it. A machine of another replica of the model shows the ticket of its own job, and is accepted if this job's
driver named it.

If a driver's connection ends, its job is kept for `ORPHANED_S`, or until the driver of another job comes with a valid
ticket, which means that the broker has given this machine away. A neighbour that learns of a round earlier than this
machine waits `EARLY_S` for the driver. `execution.training.member` and `execution.serving.member` serve the accepted
connections; `transport.security.signed` verifies signatures.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Final

from fusionai.coordination.broker.requests import Refusal
from fusionai.execution.host import Host
from fusionai.execution.member import RoundMember
from fusionai.execution.serving.loading import FetchedWeights
from fusionai.execution.serving.member import ServingMember
from fusionai.execution.training.member import JobMember
from fusionai.primitives.errors import ChannelClosed, FusionError, TrustError
from fusionai.primitives.ids import JobId, PeerId, short
from fusionai.transport.channels.link import answer_probe
from fusionai.transport.interface import Channel
from fusionai.transport.security.signed import ExpiredTicket, Ticket, verify_ticket
from fusionai.wire import messages as wire

log = logging.getLogger(__name__)

OPENING_TIMEOUT_S: Final = 10.0
ORPHANED_S: Final = 75.0
"""How long stages and snapshots wait for their driver, in seconds: enough for a driver process to restart and capture
its model. A driver that returns later resumes from its newest checkpoint. The broker gives the machine to others once
its heartbeats have listed no job for half a minute."""
EARLY_S: Final = 2.0
"""How long a neighbour's connection waits for the driver, in seconds. The driver enlists all members at the same time,
so messages differ only by their latency."""


class JobAcceptor:
    """Accepts connections of jobs. `accept` serves one connection from its first message to its end."""

    def __init__(self, host: Host, authority_key: bytes) -> None:
        self._host = host
        self._authority_key = authority_key
        self._members: dict[JobId, RoundMember] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._patience: dict[JobId, asyncio.Task[None]] = {}
        """Timeout of each job whose driver's connection ended."""
        self._placed = ("", 0)
        """The job that this machine was given to last, and the newest plan version of the pool at that time. One
        counter serves all jobs, so tickets of other jobs up to that version are those of jobs that are over here."""
        self.closing = False
        self._changed = asyncio.Event()
        """Set and cleared when a job is opened."""
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def jobs(self) -> tuple[str, ...]:
        return tuple(sorted(self._members))

    def placed(self, job: str, newest_version: int) -> None:
        """Note that the broker has given this machine to `job` ("" for none), when `newest_version` was the newest plan
        version of the pool. Tickets end with their job: those of other jobs up to that version open no door. A lower
        version than before counts too, since a broker may be set back to an earlier state."""
        self._placed = (job, newest_version)

    async def accept(self, channel: Channel) -> None:
        try:
            try:
                await self._serve(channel)
            except Refusal as refusal:
                log.info("refused a connection: %s %s", refusal.message.code, refusal)
                await channel.send(refusal.message)
        except TimeoutError:
            log.info("a connection said nothing for %.0f s", OPENING_TIMEOUT_S)
        except ChannelClosed:
            return
        except FusionError as error:
            log.warning("a connection ended: %s", error)

    async def _serve(self, channel: Channel) -> None:
        async with asyncio.timeout(OPENING_TIMEOUT_S):
            envelope = await channel.receive()
        match envelope.message:
            case wire.OpenJob() as opening:
                await self._open(channel, opening)
            case wire.Ping() | wire.Probe():
                while await answer_probe(channel, envelope):
                    envelope = await channel.receive()
            case other:
                raise Refusal("bad_message", f"expected OpenJob, got {type(other).__name__}.")

    async def _open(self, channel: Channel, opening: wire.OpenJob) -> None:
        ticket = self._check(channel, opening)
        channel.admit()
        job, peer = JobId(opening.job), PeerId(ticket.peer)
        if channel.stream == "control":
            await self._serve_driver(channel, job, self._admit_driver(ticket, job, peer, opening), opening.fence)
            return
        member = await self._member_of(job)
        if opening.task != member.task:
            raise Refusal("bad_message", f"here this job is to {member.task}.")
        if ticket.role == "driver" and peer != member.owner:
            raise Refusal("not_authorised", "this is another owner's job.")
        if opening.fence.plan_version < member.fence.plan_version:
            raise Refusal("stale_fence", f"the plan's version is {member.fence.plan_version}.")
        if ticket.role != "driver":
            try:
                member.check(peer, opening)
            except TrustError as error:
                raise Refusal("bad_placement", str(error)) from error
        await channel.send(wire.Done())
        if channel.stream == "tensors":
            await member.serve_link(peer, channel)
        elif ticket.role == "driver":
            await member.serve_state(channel)
        else:
            await member.serve_snapshots(peer, channel)

    async def _member_of(self, job: JobId) -> RoundMember:
        """Return the member of `job`, waiting up to `EARLY_S` for its driver."""
        with suppress(TimeoutError):
            async with asyncio.timeout(EARLY_S):
                while job not in self._members and not self.closing:
                    await self._changed.wait()
        if job not in self._members:
            raise Refusal("unknown_job", "")
        return self._members[job]

    def _admit_driver(self, ticket: Ticket, job: JobId, owner: PeerId, opening: wire.OpenJob) -> RoundMember:
        """Return the job's member for a driver that may have it; a new one ends the jobs of other drivers."""
        if ticket.role != "driver":
            raise Refusal("not_authorised", "only a driver opens a control connection.")
        if busy := [other for other, present in self._members.items() if other != job and present.driven]:
            raise Refusal("busy", f"it runs {', '.join(busy)}.")
        member = self._members.get(job)
        if self.closing and member is None:
            raise Refusal("leaving", "")
        if member is not None and owner != member.owner:
            raise Refusal("not_authorised", "this is another owner's job.")
        if member is not None and opening.task != member.task:
            raise Refusal("bad_message", f"here this job is to {member.task}.")
        if opening.task == "serve" and self._host.weights is None:
            raise Refusal("not_authorised", "this machine keeps no weights for others.")
        if member is not None and not member.admit(opening.fence):
            raise Refusal("stale_fence", "a later start of this job's driver is here.")
        for other in [other for other in self._members if other != job]:
            self._end(other, "the pool has given this machine to another job")
        if member is None:
            member = self._members[job] = self._opened(opening, owner)
            if ticket.plan_version > self._placed[1]:
                self._placed = (job, ticket.plan_version)
            self.idle.clear()
            self._changed.set()
            self._changed.clear()
        log.info("job %s of %s opened", job, short(owner))
        return member

    def _opened(self, opening: wire.OpenJob, owner: PeerId) -> RoundMember:
        if opening.task == "serve" and self._host.weights is not None:
            weights = FetchedWeights(self._host, owner, self._host.weights)
            return ServingMember(self._host, opening.job, owner, opening.fence, weights)
        return JobMember(self._host, opening.job, owner, opening.fence)

    async def _serve_driver(self, channel: Channel, job: JobId, member: RoundMember, opened: wire.Fence) -> None:
        over = False
        try:
            await channel.send(wire.Done())
            # Otherwise another connection has replaced this one.
            if self._members.get(job) is member and opened == member.fence:
                self._end_patience(job)
                over = await member.serve_control(channel)
        finally:
            if self._members.get(job) is member and not member.driven:
                if over or not (member.stages or member.snapshots):
                    self._end(job, "its driver has no more work here")
                else:
                    log.info("job %s waits for its driver", job)
                    self._end_patience(job)
                    self._patience[job] = asyncio.create_task(self._wait_for_driver(job))

    async def _wait_for_driver(self, job: JobId) -> None:
        await asyncio.sleep(ORPHANED_S)
        del self._patience[job]
        self._end(job, f"its driver has not come back for {ORPHANED_S:g} s")

    def _end_patience(self, job: JobId) -> None:
        if (waiting := self._patience.pop(job, None)) is not None:
            waiting.cancel()

    def clear(self) -> None:
        """Drop every job at once, because the pool went on without this peer."""
        for job in list(self._members):
            self._end(job, "the pool went on without this peer")

    def _end(self, job: JobId, reason: str) -> None:
        log.info("job %s is over here: %s", job, reason)
        self._end_patience(job)
        ending = asyncio.create_task(self._members.pop(job).close())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        if not self._members:
            self.idle.set()

    def _check(self, channel: Channel, opening: wire.OpenJob) -> Ticket:
        try:
            if channel.remote.peer is None:
                raise TrustError("expected a member of the pool, got a stranger.")
            now_wall_s, job = self._host.clock.wall_s(), JobId(opening.twin_of or opening.job)
            peer, key = channel.remote.peer, self._authority_key
            ticket = verify_ticket(opening.ticket, key, now_wall_s=now_wall_s, job=job, peer=peer)
            if opening.twin_of:
                if ticket.role == "driver" or channel.stream != "state":
                    raise TrustError("expected a stage of another replica on a state connection.")
                return ticket  # the member knows whether its driver named this peer
            if (asked := opening.fence.plan_version) != ticket.plan_version:
                raise TrustError(f"expected a ticket for plan version {asked}, got one for {ticket.plan_version}.")
            given, newest = self._placed
            if ticket.job != given and ticket.plan_version <= newest:
                raise ExpiredTicket(
                    f"expected a ticket of plan version {newest + 1} or later, got one of {ticket.plan_version}: "
                    f"job {ticket.job} is over on this machine."
                )
        except TrustError as error:
            code = "expired_ticket" if isinstance(error, ExpiredTicket) else "bad_ticket"
            raise Refusal(code, str(error)) from error
        return ticket

    async def close(self) -> None:
        self.closing = True
        self._changed.set()
        for job in list(self._members):
            self._end(job, "this peer leaves")
        await asyncio.gather(*self._ending)
