"""The broker's state: the journalled pool, and beside it what a restart may forget; and the views that members get of
it.

Leases, connections and progress within a phase are forgotten by a restart. After it, each member that was present and
each live job gets one lease of grace (`recovered`). `decisions` changes the state, `pool` is the journalled part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final

import msgspec

from fusionai.coordination.broker.events import Fact
from fusionai.coordination.broker.job import Job, JobNote
from fusionai.coordination.broker.job_queue import Arrangement, Line, QueuePolicy
from fusionai.coordination.broker.membership import Member, rests_until_s
from fusionai.coordination.broker.pool import Pool
from fusionai.coordination.broker.requests import Command
from fusionai.primitives.ids import JobId, PeerId
from fusionai.wire.messages import (
    InvitationList,
    InvitationView,
    JobList,
    JobView,
    MemberView,
    PoolView,
    Refused,
)


@dataclass(frozen=True, slots=True)
class Lease:
    """How long a silent member, or a job without its driver, still counts as present. Kept in memory only: after a
    restart of the broker each gets one whole lease of grace."""

    duration_s: float
    heard_s: float
    """When it was granted or last renewed, on the broker's monotonic clock. Later than now while the members of a large
    pool come back to a broker that has just started."""

    @property
    def expires_at_s(self) -> float:
        return self.heard_s + self.duration_s

    def renewed(self, now_s: float) -> Lease:
        """Return the lease after a sign of life. A delayed one never shortens it."""
        return replace(self, heard_s=max(self.heard_s, now_s))


PRESENT: Final = ("idle", "active", "draining")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerRules:
    """Durations and limits. By default a lease lasts four heartbeats."""

    pool: str
    broker: PeerId
    """Identity of the broker's owner, which may stop any job and invite."""
    inviters: frozenset[PeerId] = frozenset()
    """Other members that may invite."""
    lease_s: float = 12.0
    heartbeat_s: float = 3.0
    unattended_s: float = 120.0
    """Seconds without its driver after which a job is given up."""
    stop_grace_s: float = 600.0
    """Seconds after `fusion stop` within which a job's driver must end it; then the broker ends it. Chosen, so that a
    last checkpoint can cross a slow uplink."""
    losses_before_rest: int = 5
    """Losses within `loss_window_s` after which a machine gets no new work for `rest_s`; 0: no limit."""
    loss_window_s: float = 600.0
    rest_s: float = 300.0
    clear_s: float = 30.0
    """Seconds for which a member may hold state of a job that went on without it. Then it must clear that state."""
    clear_ended_s: float = 2.0
    """The same for a job that has ended, whose state no driver will need again."""
    max_members: int = 2_000
    """Limit on members that are present or expected to come; departed ones do not count. At this number heartbeats take
    about a tenth of a core of the broker (`benchmarks/heartbeats.py`)."""
    max_live_jobs: int = 1_000
    max_invitations: int = 10_000
    queue: QueuePolicy = field(default_factory=QueuePolicy)


@dataclass(frozen=True, slots=True)
class Leftover:
    """A member still holds state of `job`, in which it has no part any more. First reported at `since_s`."""

    job: JobId
    since_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """A job's turn: free machines that are kept for it alone. Kept in memory only: after a restart of the broker the
    turn comes again."""

    lease: Lease
    members: frozenset[PeerId]


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerState:
    rules: BrokerRules
    pool: Pool
    leases: Mapping[PeerId, Lease] = field(default_factory=dict[PeerId, Lease])
    """Lease of each member that is present."""
    waits: Mapping[JobId, Lease] = field(default_factory=dict[JobId, Lease])
    """For each live job without a driver's connection: first `lease_s` of grace, then `unattended_s`."""
    stops: Mapping[JobId, Lease] = field(default_factory=dict[JobId, Lease])
    """For each job that was asked to stop: the `stop_grace_s` which its driver has to end it."""
    links: Mapping[PeerId, int] = field(default_factory=dict[PeerId, int])
    drivers: Mapping[JobId, int] = field(default_factory=dict[JobId, int])
    progress: Mapping[JobId, int] = field(default_factory=dict[JobId, int])
    leftovers: Mapping[PeerId, Leftover] = field(default_factory=dict[PeerId, Leftover])
    """Leftover state of members, by their last heartbeats."""
    dismissed: Mapping[PeerId, float] = field(default_factory=dict[PeerId, float])
    """Members with a part in a job that, by their heartbeats, hold no state of it -> since when (monotonic)."""
    turns: Mapping[JobId, Turn] = field(default_factory=dict[JobId, Turn])
    line: Line = field(default_factory=Line)
    """The queue as last arranged, from `arranged_of` at `arranged_s` (monotonic)."""
    arranged_of: tuple[object, ...] = field(default=(), compare=False, repr=False)
    arranged_s: float = 0.0
    next_deadline_s: float | None = None
    """Time of the next `DeadlinePassed`, on the monotonic clock; None if no lease runs. No lease ends sooner.
    Heartbeats leave it unchanged although they renew a lease: searching 1,000 leases at each would take 0.8 ms."""

    def with_deadline(self) -> BrokerState:
        """Return this state with `next_deadline_s` computed from all leases."""
        ends_s = [lease.expires_at_s for leases in (self.leases, self.waits, self.stops) for lease in leases.values()]
        ends_s += [turn.lease.expires_at_s for turn in self.turns.values()]
        return replace(self, next_deadline_s=min(ends_s, default=None))

    def knows(self, peer: PeerId) -> bool:
        """Return whether the peer belongs to the pool."""
        return (peer in self.pool.members or peer == self.rules.broker) and peer not in self.pool.evicted

    def reachable(self, member: Member) -> bool:
        return member.phase in PRESENT and member.peer in self.links

    def is_free(self, member: Member, wall_s: float) -> bool:
        """Return whether the member may get work of any job."""
        return (
            member.phase == "idle"
            and member.peer in self.links
            and member.peer not in self.leftovers
            and not self.rest_left_s(member, wall_s)
        )

    def arrangement(self, wall_s: float) -> Arrangement:
        """Return what the queue is arranged by now."""
        free = {peer: member for peer, member in self.pool.members.items() if self.is_free(member, wall_s)}
        turns = {name: turn.members for name, turn in self.turns.items()}
        return Arrangement(self.pool, self.rules.queue, free, turns, wall_s)

    def rest_left_s(self, member: Member, wall_s: float) -> float:
        """Return the seconds for which this machine still rests after too many losses. A wall clock set back prolongs
        no rest."""
        rules = self.rules
        until_s = rests_until_s(
            member, losses=rules.losses_before_rest, window_s=rules.loss_window_s, rest_s=rules.rest_s
        )
        left_s = until_s - wall_s
        return left_s if 0.0 < left_s <= rules.rest_s else 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    desk: BrokerState
    facts: tuple[Fact, ...]
    """Facts to journal, all or none, before anything else is done."""
    commands: tuple[Command, ...]


RETURNS_PER_S: Final = 50
"""Members that can come back to a broker per second (chosen). Benchmark `heartbeats`: 160 on half of a machine with two
cores, each with a TLS handshake."""


def recovered(rules: BrokerRules, pool: Pool, now_s: float) -> BrokerState:
    """Return the state after a start, with one lease of grace for each member present and for each live job, and
    with a new `stop_grace_s` for each job that is stopping. In a pool of many members the grace is as long as the
    broker needs to receive them all again: none is lost because it had to wait for others."""
    present = [peer for peer, member in pool.members.items() if member.phase in PRESENT]
    lease = Lease(rules.lease_s, now_s + max(0.0, len(present) / RETURNS_PER_S - rules.lease_s))
    return BrokerState(
        rules=rules,
        pool=pool,
        leases=dict.fromkeys(present, lease),
        waits={job.job: wait_for_driver(job, now_s, rules) for job in (*pool.live_jobs(), *pool.queued_jobs())},
        stops={job.job: Lease(rules.stop_grace_s, now_s) for job in pool.live_jobs() if job.phase == "stopping"},
    ).with_deadline()


def wait_for_driver(job: Job, now_s: float, rules: BrokerRules) -> Lease:
    """Return the wait for a job's driver: short at first, long once the job counts as unattended."""
    absent_s = rules.queue.kept_s if job.queued else rules.unattended_s
    return Lease(rules.lease_s if job.attended else absent_s, now_s)


SHOWN: Final = (*PRESENT, "lost")
SILENT: Final = "silent"
"""Shown for an idle member without a connection: its lease still runs, but it can get no work now."""
RESTING: Final = "resting"
"""Shown for an idle member that was lost too often lately: it gets no work until its rest is over."""


def pool_view(desk: BrokerState, now_s: float, wall_s: float) -> PoolView:
    """Return all members whose process is present or was lost, in order of arrival."""
    members = [member for member in desk.pool.members.values() if member.phase in SHOWN]
    return PoolView(members=tuple(member_view(desk, member, now_s, wall_s) for member in members))


def members_view(desk: BrokerState, peers: tuple[PeerId, ...], now_s: float, wall_s: float) -> tuple[MemberView, ...]:
    return tuple(member_view(desk, desk.pool.members[peer], now_s, wall_s) for peer in peers)


def member_view(desk: BrokerState, member: Member, now_s: float, wall_s: float) -> MemberView:
    """Return the view of a member. `last_heard_s` is the age of its last sign of life; 0.0 without a lease."""
    lease, leftover = desk.leases.get(member.peer), desk.leftovers.get(member.peer)
    state, rests_s = member.phase, 0.0
    if member.phase == "idle" and not desk.reachable(member):
        state = SILENT
    elif member.phase == "idle" and (rests_s := desk.rest_left_s(member, wall_s)):
        state = RESTING
    return MemberView(
        peer=member.peer,
        state=state,
        boot=member.boot,
        addresses=member.addresses,
        profile=msgspec.Raw(member.profile),
        machine=member.sponsor or "",
        job=member.job or "",
        stages=member.stages,
        standbys=member.standbys,
        rests_s=rests_s,
        kept_for=desk.line.kept.get(member.peer, "") if member.phase == "idle" else "",
        clears="" if leftover is None else leftover.job,
        last_heard_s=max(0.0, now_s - lease.heard_s) if lease is not None else 0.0,
    )


def invitation_list(desk: BrokerState, asker: PeerId, wall_s: float) -> InvitationList | Refused:
    """Return the invitations that are valid, for the broker's owner only."""
    if asker != desk.rules.broker:
        return Refused(code="not_authorised", reason="Only the broker's owner may see the invitations.")
    valid = [one for one in desk.pool.invitations.values() if one.expires_at_s > wall_s]
    return InvitationList(
        invitations=tuple(InvitationView(one.digest, one.uses_left, one.expires_at_s, one.peers) for one in valid)
    )


def job_list(desk: BrokerState, name: JobId | None = None) -> JobList:
    """Return all jobs without their histories, or the one called `name` with it (empty if there is none)."""
    if name is not None:
        job = desk.pool.jobs.get(name)
        place = desk.line.jobs.index(name) + 1 if name in desk.line.jobs else 0
        return JobList(jobs=() if job is None else (_job_view(desk, job, with_notes=True, place=place),))
    places = {queued: number for number, queued in enumerate(desk.line.jobs, start=1)}
    views = (_job_view(desk, job, with_notes=False, place=places.get(job.job, 0)) for job in desk.pool.jobs.values())
    return JobList(jobs=tuple(views))


def _job_view(desk: BrokerState, job: Job, *, with_notes: bool, place: int) -> JobView:
    return JobView(
        job=job.job,
        title=job.title,
        owner=job.owner,
        state=job.phase,
        step=desk.progress.get(job.job, job.step),
        steps=job.steps,
        plan_version=job.plan_version,
        started_at_s=job.requested_at_s,
        place=place,
        story=tuple(_line(line) for line in job.notes) if with_notes else (),
    )


def _line(line: JobNote) -> str:
    return f"{datetime.fromtimestamp(line.at_s, UTC).strftime('%Y-%m-%d %H:%M:%SZ')} {line.text}"
