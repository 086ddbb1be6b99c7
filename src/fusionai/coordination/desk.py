"""The broker's decisions: what each request does to the pool, who may ask it, and what is answered.

`handle(desk, request, now_s, wall_s)` is pure. It gives facts and commands: the shell journals the facts first and only
then adopts the new desk and performs the commands; if the journal refuses, nothing has happened. Besides the journalled
`Pool` the desk holds what a restart may forget: leases, connections, progress. After a restart everybody present has
one lease of grace (`recovered`).

Never sees a tensor, a socket or a clock. Neighbours: `requests` has the vocabulary, `views` the answers
to questions, `pool` the fold, `broker.service` the shell.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from fusionai.coordination import events
from fusionai.coordination.events import Fact, Placement
from fusionai.coordination.invitation import Invitation
from fusionai.coordination.job import Job
from fusionai.coordination.lease import LEASE, Elapsed, Heard, Lease, grant
from fusionai.coordination.machine import ForbiddenTransition
from fusionai.coordination.membership import Member
from fusionai.coordination.pool import Pool, advance
from fusionai.coordination.requests import (
    REASON_LENGTH,
    Answer,
    AskLeave,
    Beat,
    Certify,
    Command,
    Disconnected,
    Enrol,
    HandOut,
    Invite,
    IssueTickets,
    Notify,
    Refusal,
    Register,
    ReportJob,
    Request,
    RequestJob,
    Stalled,
    StopJob,
    Tick,
)
from fusionai.primitives.ids import JobId, PeerId, short
from fusionai.wire.messages import (
    Done,
    HeartbeatAck,
    LeaveNotice,
    Refused,
    Registered,
    StopNotice,
)

PRESENT: Final = ("idle", "active", "draining")

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskRules:
    """Durations and caps. Defaults are the measured ones of the timers: a lease of four heartbeats."""

    pool: str
    broker: PeerId
    """The identity of the broker's owner: may stop any job and invite."""
    inviters: frozenset[PeerId] = frozenset()
    """Members that may invite besides."""
    lease_s: float = 12.0
    heartbeat_s: float = 3.0
    unattended_s: float = 900.0
    """How long a job may stay without its driver before it is given up."""
    max_members: int = 10_000
    max_live_jobs: int = 1_000
    max_invitations: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    rules: DeskRules
    pool: Pool
    leases: Mapping[PeerId, Lease] = field(default_factory=dict[PeerId, Lease])
    """Of every member that is present."""
    waits: Mapping[JobId, Lease] = field(default_factory=dict[JobId, Lease])
    """Of every live job without a driver's connection: first `lease_s` of grace, then `unattended_s`."""
    links: Mapping[PeerId, int] = field(default_factory=dict[PeerId, int])
    drivers: Mapping[JobId, int] = field(default_factory=dict[JobId, int])
    progress: Mapping[JobId, int] = field(default_factory=dict[JobId, int])

    @property
    def next_deadline_s(self) -> float | None:
        """When `Tick` has something to do, on the monotonic clock; None while nothing is waited for."""
        deadlines = [lease.expires_at_s for lease in (*self.leases.values(), *self.waits.values())]
        return min(deadlines, default=None)

    def knows(self, peer: PeerId) -> bool:
        return peer in self.pool.members or peer == self.rules.broker

    def reachable(self, member: Member) -> bool:
        return member.phase in PRESENT and member.peer in self.links


@dataclass(frozen=True, slots=True)
class Decision:
    desk: Desk
    facts: tuple[Fact, ...]
    """To be journalled, all or none, before anything else."""
    commands: tuple[Command, ...]


def recovered(rules: DeskRules, pool: Pool, now_s: float) -> Desk:
    """The desk after a start: one lease of grace for every member present, and for every job to be heard of again."""
    return Desk(
        rules=rules,
        pool=pool,
        leases={
            peer: grant(f"lease of {member.entity}", now_s, rules.lease_s)
            for peer, member in pool.members.items()
            if member.phase in PRESENT
        },
        waits={job.job: _wait(job, now_s, rules) for job in pool.live_jobs()},
    )


def handle(desk: Desk, request: Request, *, now_s: float, wall_s: float) -> Decision:
    """One decision. `now_s` is monotonic, `wall_s` since 1970. Whatever does not fit is answered by `Refused`."""
    turn = _Turn(desk, now_s, wall_s)
    try:
        match request:
            case Enrol():
                turn.enrol(request)
            case Register():
                turn.register(request)
            case Beat():
                turn.beat(request)
            case AskLeave():
                turn.leave(request)
            case RequestJob():
                turn.request_job(request)
            case ReportJob():
                turn.report_job(request)
            case StopJob():
                turn.stop_job(request)
            case Invite():
                turn.invite(request)
            case Disconnected():
                turn.disconnect(request)
            case Tick():
                turn.tick()
            case Stalled():
                turn.restart_leases()
    except Refusal as refusal:
        return Decision(desk, (), (Answer(refusal.message),))
    except ForbiddenTransition as forbidden:
        return Decision(desk, (), (Answer(Refused(code="bad_message", reason=str(forbidden)[:REASON_LENGTH])),))
    return Decision(turn.desk, tuple(turn.facts), tuple(turn.commands))


class _Turn:
    """One decision under way; thrown away when it refuses."""

    def __init__(self, desk: Desk, now_s: float, wall_s: float) -> None:
        self.desk = desk
        self.now_s = now_s
        self.wall_s = wall_s
        self.facts: list[Fact] = []
        self.commands: list[Command] = []

    @property
    def pool(self) -> Pool:
        return self.desk.pool

    @property
    def rules(self) -> DeskRules:
        return self.desk.rules

    def record(self, fact: Fact) -> None:
        self.desk = replace(self.desk, pool=advance(self.pool, fact))
        self.facts.append(fact)

    # ------------------------------------------------------------------------------------------------ coming in

    def enrol(self, request: Enrol) -> None:
        invitation = self._invitation(request.digest)
        if invitation is None or invitation.expires_at_s <= self.wall_s:
            raise Refusal("bad_invitation", "This invitation is unknown or expired.")
        if request.peer not in invitation.peers:
            if invitation.phase != "open":
                raise Refusal("bad_invitation", "This invitation is used up.")
            if len(self.pool.members) >= self.rules.max_members:
                raise Refusal("busy", f"The pool is full ({self.rules.max_members} members).")
            self.record(
                events.PeerEnrolled(
                    at_s=self.wall_s, peer=request.peer, purpose=request.purpose, invitation=invitation.digest
                )
            )
        self.commands.append(Certify(request.peer))

    def _invitation(self, digest: str) -> Invitation | None:
        """Compares with every invitation in constant time, so that an answer's delay tells nothing."""
        found = None
        for known, invitation in self.pool.invitations.items():
            if hmac.compare_digest(known.encode(), digest.encode()):
                found = invitation
        return found

    def invite(self, request: Invite) -> None:
        if request.sender != self.rules.broker and request.sender not in self.rules.inviters:
            raise Refusal("not_authorised", "Only the broker's owner and members it named may invite.")
        in_date = sum(one.expires_at_s > self.wall_s for one in self.pool.invitations.values())
        if in_date >= self.rules.max_invitations:
            raise Refusal("busy", f"{in_date} invitations are out already; wait until some expire.")
        self.record(
            events.InvitationIssued(
                at_s=self.wall_s,
                invitation=request.digest,
                uses=request.uses,
                expires_at_s=self.wall_s + request.lifetime_s,
            )
        )
        self.commands.append(HandOut())

    # -------------------------------------------------------------------------------------------------- members

    def register(self, request: Register) -> None:
        member = self._member(request.peer)
        if request.boot in member.earlier_boots:
            raise Refusal("not_authorised", f"A later process of {member.entity} has registered (boot {member.boot}).")
        if member.phase in PRESENT and member.boot != request.boot:
            self._lose(member, "a new process of its machine registered")
        same = (
            member.phase in PRESENT
            and member.boot == request.boot
            and member.profile == request.profile
            and member.addresses == request.addresses
        )
        if not same:
            self.record(
                events.MemberRegistered(
                    at_s=self.wall_s,
                    peer=request.peer,
                    boot=request.boot,
                    profile=request.profile,
                    addresses=request.addresses,
                )
            )
        self._grant_lease(member)
        self.desk = replace(self.desk, links=_with(self.desk.links, request.peer, request.connection))
        self.commands.append(
            Answer(Registered(lease_s=self.rules.lease_s, heartbeat_s=self.rules.heartbeat_s, pool=self.rules.pool))
        )

    def beat(self, request: Beat) -> None:
        member = self._member(request.peer)
        if request.boot != member.boot:
            raise Refusal("not_authorised", f"{member.entity} is now its process with boot {member.boot}.")
        if member.phase in ("joining", "left"):
            raise Refusal("unknown_peer", f"{member.entity} is {member.phase}, not in the pool.")
        lease = self.desk.leases.get(request.peer)
        if member.phase not in PRESENT or lease is None:
            raise Refusal("stale_fence", f"{member.entity} is {member.phase}; clear your stages and register again.")
        renewed, _ = LEASE.advance(lease, Heard(self.now_s))
        self.desk = replace(
            self.desk,
            leases=_with(self.desk.leases, request.peer, renewed),
            links=_with(self.desk.links, request.peer, request.connection),
        )
        self.commands.append(Answer(HeartbeatAck(lease_s=self.rules.lease_s)))

    def leave(self, request: AskLeave) -> None:
        """From the peer's process itself, or from another program of its machine's owner; then the process is told."""
        member = self._member(request.peer)
        link = self.desk.links.get(request.peer)
        match member.phase:
            case "left" | "evicted":
                pass
            case "draining" if request.drain:
                pass
            case "active" if request.drain:
                self.record(events.MemberDraining(at_s=self.wall_s, peer=request.peer))
                self._note_job(member, f"{member.entity} drains")
            case _:
                self.record(events.MemberLeft(at_s=self.wall_s, peer=request.peer))
                self._note_job(member, f"{member.entity} left at once")
                self._forget(request.peer)
        if link is not None and link != request.connection:
            self.commands.append(Notify(link, LeaveNotice(drain=request.drain)))
        self.commands.append(Answer(Done()))

    def _lose(self, member: Member, reason: str) -> None:
        self.record(events.MemberLost(at_s=self.wall_s, peer=member.peer, boot=member.boot, reason=reason))
        self._note_job(member, f"{member.entity} lost: {reason}")
        self._forget(member.peer)

    def _forget(self, peer: PeerId) -> None:
        self.desk = replace(self.desk, leases=_without(self.desk.leases, peer), links=_without(self.desk.links, peer))

    def _grant_lease(self, member: Member) -> None:
        lease = grant(f"lease of {member.entity}", self.now_s, self.rules.lease_s)
        self.desk = replace(self.desk, leases=_with(self.desk.leases, member.peer, lease))

    def _member(self, peer: PeerId) -> Member:
        member = self.pool.members.get(peer)
        if member is None:
            raise Refusal("unknown_peer", f"{short(peer)} has not joined this pool; join with an invitation first.")
        return member

    # ----------------------------------------------------------------------------------------------------- jobs

    def request_job(self, request: RequestJob) -> None:
        if not self.desk.knows(request.owner):
            raise Refusal("unknown_peer", f"{short(request.owner)} has not joined this pool.")
        job = self.pool.jobs.get(request.job)
        if job is not None and job.owner != request.owner:
            raise Refusal("not_authorised", f"{job.entity} belongs to {short(job.owner)}; choose another name.")
        version = self._same_plan(request, job) if request.plan_version else self._mint(request, job)
        self._attend(request.job, request.connection)
        self.commands.append(IssueTickets(request.job, version))

    def _same_plan(self, request: RequestJob, job: Job | None) -> int:
        """The owner has this very plan already and wants fresh tickets."""
        if job is None or not job.live:
            raise Refusal("unknown_job", f"job {request.job} is not running; ask for it with a plan of version 0.")
        current = self.pool.plans[job.plan_version]
        if request.plan_version != current.version or request.plan != current.plan:
            raise Refusal(
                "stale_fence",
                f"{job.entity}: expected plan version {current.version} unchanged, got version {request.plan_version}.",
            )
        return current.version

    def _mint(self, request: RequestJob, job: Job | None) -> int:
        if job is not None and job.phase == "stopping":
            raise Refusal("bad_message", f"{job.entity} is stopping; ask again when it has ended.")
        if job is None or not job.live:
            if len(self.pool.live_jobs()) >= self.rules.max_live_jobs:
                raise Refusal("busy", f"The pool runs {self.rules.max_live_jobs} jobs already.")
            self.record(
                events.JobRequested(
                    at_s=self.wall_s,
                    job=request.job,
                    title=request.title,
                    owner=request.owner,
                    steps=request.steps,
                )
            )
        for placement in request.members:
            self._check_free(placement, request.job)
        version = self.pool.newest_version + 1
        self.record(
            events.PlanMinted(
                at_s=self.wall_s, job=request.job, version=version, plan=request.plan, members=request.members
            )
        )
        self._see_off()
        return version

    def _check_free(self, placement: Placement, job: JobId) -> None:
        peer = PeerId(placement.peer)
        member = self.pool.members.get(peer)
        if member is None or member.phase in ("joining", "left", "evicted", "lost"):
            raise Refusal("unknown_peer", f"{short(peer)} is not in the pool now; plan again.")
        if member.phase == "draining":
            raise Refusal("leaving", f"{member.entity} is leaving the pool; plan again without it.")
        if member.job not in (None, job):
            raise Refusal("busy", f"{member.entity} holds stages of another job; plan again without it.")
        if not self.desk.reachable(member):
            raise Refusal("unknown_peer", f"{member.entity} is out of touch; plan again without it.")

    def report_job(self, request: ReportJob) -> None:
        job = self._job(request.job)
        if request.sender != job.owner:
            raise Refusal("not_authorised", f"{job.entity} belongs to {short(job.owner)}.")
        if not job.live:
            if request.state != job.phase:
                raise Refusal("bad_message", f"{job.entity} is {job.phase} ({job.told[-1].text}); ask for it again.")
            self.commands.append(Answer(Done()))
            return
        at_s, step, detail = self.wall_s, request.step, request.detail[:REASON_LENGTH]
        match request.state:
            case "done":
                self.record(events.JobDone(at_s=at_s, job=job.job, step=step, detail=detail))
            case "failed":
                self.record(events.JobFailed(at_s=at_s, job=job.job, step=step, detail=detail))
            case "stopping" if job.phase != "stopping":
                self.record(events.JobStopAsked(at_s=at_s, job=job.job, by=request.sender))
            case "running" if job.phase == "requested":
                self.record(events.JobStarted(at_s=at_s, job=job.job))
            case _:
                pass
        if request.state in ("done", "failed"):
            self._dismiss(job.job)
        else:
            self._attend(job.job, request.connection)
            if detail and detail != self.pool.jobs[job.job].told[-1].text:
                self.record(events.JobNoted(at_s=at_s, job=job.job, text=detail))
            if job.phase == "stopping" and request.state != "stopping":
                self.commands.append(Notify(request.connection, StopNotice(job=job.job)))
            self.desk = replace(self.desk, progress=_with(self.desk.progress, job.job, step))
        self.commands.insert(0, Answer(Done()))

    def stop_job(self, request: StopJob) -> None:
        job = self._job(request.job)
        if request.sender not in (job.owner, self.rules.broker):
            raise Refusal("not_authorised", f"Only {job.entity}'s owner and the broker's owner may stop it.")
        if job.live:
            self.record(events.JobStopAsked(at_s=self.wall_s, job=job.job, by=request.sender))
            driver = self.desk.drivers.get(job.job)
            if driver is not None:
                self.commands.append(Notify(driver, StopNotice(job=job.job)))
            elif not job.attended:
                self._fail(job, "stopped while nobody attended to it")
        self.commands.append(Answer(Done()))

    def _job(self, name: JobId) -> Job:
        job = self.pool.jobs.get(name)
        if job is None:
            raise Refusal("unknown_job", f"No job is called {name} here.")
        return job

    def _attend(self, name: JobId, connection: int) -> None:
        """The job's driver speaks on this connection; a StopNotice will go there."""
        if not self.pool.jobs[name].attended:
            self.record(events.JobAttended(at_s=self.wall_s, job=name))
        self.desk = replace(
            self.desk,
            drivers=_with(self.desk.drivers, name, connection),
            waits=_without(self.desk.waits, name),
        )

    def _dismiss(self, name: JobId) -> None:
        """Nothing is kept in memory about a job that has ended."""
        self.desk = replace(
            self.desk,
            drivers=_without(self.desk.drivers, name),
            waits=_without(self.desk.waits, name),
            progress=_without(self.desk.progress, name),
        )
        self._see_off()

    def _see_off(self) -> None:
        """Members that drained and were released have left now: their processes may end."""
        for peer in [peer for peer in self.desk.leases if self.pool.members[peer].phase not in PRESENT]:
            link = self.desk.links.get(peer)
            if link is not None:
                self.commands.append(Notify(link, LeaveNotice(drain=False)))
            self._forget(peer)

    def _fail(self, job: Job, why: str) -> None:
        step = self.desk.progress.get(job.job, job.step)
        self.record(events.JobFailed(at_s=self.wall_s, job=job.job, step=step, detail=why))
        self._dismiss(job.job)

    def _note_job(self, member: Member, text: str) -> None:
        if member.job is not None:
            self.record(events.JobNoted(at_s=self.wall_s, job=member.job, text=text))

    # ------------------------------------------------------------------------------------------ silence and loss

    def disconnect(self, request: Disconnected) -> None:
        """Nobody is lost by a broken connection: the lease runs on, and the job waits for its driver."""
        self.desk = replace(
            self.desk,
            links={peer: link for peer, link in self.desk.links.items() if link != request.connection},
        )
        for name, connection in self.desk.drivers.items():
            if connection == request.connection:
                wait = _wait(self.pool.jobs[name], self.now_s, self.rules)
                self.desk = replace(
                    self.desk,
                    drivers=_without(self.desk.drivers, name),
                    waits=_with(self.desk.waits, name, wait),
                )

    def tick(self) -> None:
        for peer, lease in self.desk.leases.items():
            aged, _ = LEASE.advance(lease, Elapsed(self.now_s))
            if aged.phase == "expired":
                self._lose(self.pool.members[peer], f"not heard for {lease.duration_s:g} s")
        for name, wait in self.desk.waits.items():
            aged, _ = LEASE.advance(wait, Elapsed(self.now_s))
            if aged.phase != "expired":
                continue
            job = self.pool.jobs[name]
            if job.attended:
                self.record(events.JobUnattended(at_s=self.wall_s, job=name, reason="its driver is out of touch"))
                again = _wait(self.pool.jobs[name], self.now_s, self.rules)
                self.desk = replace(self.desk, waits=_with(self.desk.waits, name, again))
            else:
                self._fail(job, f"given up after {self.rules.unattended_s:g} s without its driver")

    def restart_leases(self) -> None:
        fresh = recovered(self.rules, self.pool, self.now_s)
        waits = {name: wait for name, wait in fresh.waits.items() if name in self.desk.waits}
        self.desk = replace(self.desk, leases=fresh.leases, waits=waits)


def _wait(job: Job, now_s: float, rules: DeskRules) -> Lease:
    return grant(f"wait for the driver of {job.entity}", now_s, rules.lease_s if job.attended else rules.unattended_s)


def _with(mapping: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    return {**mapping, key: value}


def _without(mapping: Mapping[K, V], key: K) -> Mapping[K, V]:
    return {other: value for other, value in mapping.items() if other != key}
