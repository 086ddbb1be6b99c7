"""The broker's desk: the journalled pool and beside it what a restart may forget. Decides nothing by itself.

Forgotten by a restart: leases, connections, progress within a phase. After one, everybody present has one lease of
grace, and so has every job for its driver to be heard (`recovered`). Neighbours: `decisions` changes a desk, `views`
shows it, `pool` is the part that is journalled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from fusionai.coordination.broker.events import Fact
from fusionai.coordination.broker.job import Job
from fusionai.coordination.broker.lease import Lease, grant
from fusionai.coordination.broker.membership import Member, rests_until_s
from fusionai.coordination.broker.pool import Pool
from fusionai.coordination.broker.requests import Command
from fusionai.primitives.ids import JobId, PeerId

PRESENT: Final = ("idle", "active", "draining")


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
    unattended_s: float = 120.0
    """How long a job may stay without its driver before it is given up."""
    losses_before_rest: int = 5
    """A machine lost so often within `loss_window_s` is given no new work for `rest_s`; 0: it never rests."""
    loss_window_s: float = 600.0
    rest_s: float = 300.0
    clear_s: float = 30.0
    """How long a member may still hold what it had of a job that went on without it, before it is told to clear."""
    clear_ended_s: float = 2.0
    """The same for a job that has ended: its driver does not come back for anything."""
    max_members: int = 2_000
    """Limit on members that are present or expected to come; departed ones do not count. A heartbeat costs the broker
    some 0.3 ms of processor time, most of it in TLS and the event loop (`benchmarks/heartbeats.py`)."""
    max_live_jobs: int = 1_000
    max_invitations: int = 10_000


@dataclass(frozen=True, slots=True)
class Leftover:
    """A member still holds something of `job`, which has no part for it any more; first heard at `since_s`."""

    job: JobId
    since_s: float


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
    leftovers: Mapping[PeerId, Leftover] = field(default_factory=dict[PeerId, Leftover])
    """By what the last heartbeat said."""
    dismissed: Mapping[PeerId, float] = field(default_factory=dict[PeerId, float])
    """Members with a part in a job that, by their heartbeats, hold nothing of it; since when (`Tick`'s clock)."""
    next_deadline_s: float | None = None
    """When to call `Tick`, on the monotonic clock; None while nothing is waited for. No lease ends sooner. Heartbeats
    leave it as it is although they renew a lease: searching all leases at each would cost 0.8 ms with 1,000 members."""

    def with_deadline(self) -> Desk:
        """This desk with `next_deadline_s` as its leases have it now; looks at all of them."""
        ends_s = (lease.expires_at_s for leases in (self.leases, self.waits) for lease in leases.values())
        return replace(self, next_deadline_s=min(ends_s, default=None))

    def knows(self, peer: PeerId) -> bool:
        return peer in self.pool.members or peer == self.rules.broker

    def reachable(self, member: Member) -> bool:
        return member.phase in PRESENT and member.peer in self.links

    def rest_left_s(self, member: Member, wall_s: float) -> float:
        """How long this machine still rests after too many losses. A wall clock set back prolongs no rest."""
        rules = self.rules
        until_s = rests_until_s(
            member, losses=rules.losses_before_rest, window_s=rules.loss_window_s, rest_s=rules.rest_s
        )
        left_s = until_s - wall_s
        return left_s if 0.0 < left_s <= rules.rest_s else 0.0


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
        waits={job.job: wait_for_driver(job, now_s, rules) for job in pool.live_jobs()},
    ).with_deadline()


def wait_for_driver(job: Job, now_s: float, rules: DeskRules) -> Lease:
    """How long a job is waited for: a short grace first, a long time once it counts as unattended."""
    duration_s = rules.lease_s if job.attended else rules.unattended_s
    return grant(f"wait for the driver of {job.entity}", now_s, duration_s)
