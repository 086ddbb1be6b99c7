"""The pool: members, jobs, plans and invitations, as the journalled facts made them.

`advance(pool, fact)` is a pure fold, used in live operation and to restart from the journal. A fact that no machine
allows raises `ForbiddenTransition` and changes nothing. `decisions` decides which facts may happen.

What has ended is forgotten within bounds (superseded plans at once, ended jobs after a while), so that the pool's size
follows from what is going on. `freeze` encodes all of it, so that a restart need not begin with the first fact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import msgspec

from fusionai.coordination.broker import events, job, ledger, membership
from fusionai.coordination.broker.events import Fact
from fusionai.coordination.broker.job import FIRST_VERSION, JOB, Job, PlanVersion
from fusionai.coordination.broker.ledger import Ledger
from fusionai.coordination.broker.membership import (
    MEMBERSHIP,
    Invitation,
    Member,
    Released,
    Reserved,
)
from fusionai.primitives.errors import FusionError
from fusionai.primitives.ids import JobId, PeerId

ENDED_JOBS_KEPT: Final = 500
DEPARTED_KEPT: Final = 1_000
"""Limit on departed members that are remembered and may come back as they were; an older one needs a new invitation.
Bounds the pool, because a machine that is installed anew is a new member."""
EVICTED_KEPT_S: Final = 3 * 365 * 86_400.0
"""How long an evicted key is remembered: longer than any certificate that this program has issued is valid."""
_FORMER_NAMES: Final = (("members", "guards", "standbys"), ("jobs", "told", "notes"))
"""Fields of stored pools that have another name now: table, former name, name."""

K = TypeVar("K")
V = TypeVar("V")


class UnknownEntity(FusionError):
    """A fact names an entity that is unknown in this pool: the journal belongs to another pool, or there is a
    defect."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A snapshot. The mappings are never changed in place."""

    members: Mapping[PeerId, Member] = field(default_factory=dict[PeerId, Member])
    jobs: Mapping[JobId, Job] = field(default_factory=dict[JobId, Job])
    plans: Mapping[int, PlanVersion] = field(default_factory=dict[int, PlanVersion])
    """The current plan of each live job, by version. Versions of forgotten plans are not used again."""
    invitations: Mapping[str, Invitation] = field(default_factory=dict[str, Invitation])
    newest_version: int = FIRST_VERSION - 1
    evicted: Mapping[PeerId, float] = field(default_factory=dict[PeerId, float])
    """Evicted key -> when it was evicted, in seconds since 1970. Kept until its certificate has certainly expired."""
    revocations: int = 0
    """Version of the list of evicted members. It begins with the time, so that it grows even if the broker was set back
    to an earlier state."""
    ledger: Ledger = field(default_factory=Ledger)
    """What the members have lent to whose jobs."""

    def machine_of(self, peer: PeerId) -> PeerId:
        """Return the key of the machine that a key belongs to: shares, quotas and what was lent are those of
        machines."""
        member = self.members.get(peer)
        return peer if member is None else member.sponsor or peer

    def expected(self) -> int:
        """Return the number of members that are present or expected to come, which the limit on members applies to."""
        return sum(not is_departed(member) for member in self.members.values())

    def members_of(self, name: JobId) -> tuple[Member, ...]:
        return tuple(member for member in self.members.values() if member.job == name)

    def live_jobs(self) -> tuple[Job, ...]:
        return tuple(one for one in self.jobs.values() if one.live)

    def queued_jobs(self) -> tuple[Job, ...]:
        return tuple(one for one in self.jobs.values() if one.queued)


DEPARTED: Final = ("left", "lost")
"""Phases of a member that is gone, unless a job waits for it."""
_OF_ONE_MEMBER: Final = (events.MemberRegistered, events.MemberDraining, events.MemberLeft, events.MemberLost)
"""Facts that move no other member than the one they name."""


def is_departed(member: Member) -> bool:
    """Return whether the member left or was lost and no job waits for it."""
    return member.job is None and member.phase in DEPARTED


def replay(facts: Iterable[Fact], pool: Pool | None = None) -> Pool:
    """Return `pool` (by default an empty one) after these facts."""
    made = Pool() if pool is None else pool
    for fact in facts:
        made = advance(made, fact)
    return made


def freeze(pool: Pool) -> bytes:
    """Encode the pool as msgpack: `thaw(freeze(pool)) == pool`."""
    return msgspec.msgpack.encode(pool)


def thaw(data: bytes) -> Pool:
    """Decode a frozen pool, also one written under the names in `_FORMER_NAMES`. Raises `msgspec.ValidationError` or
    `msgspec.DecodeError`; `broker.service` turns them into `StorageError`."""
    pool = msgspec.msgpack.decode(data, type=dict[str, Any])
    for table, former, name in _FORMER_NAMES:
        pool[table] = msgspec.convert(pool.get(table, {}), dict[str, dict[str, Any]])
        for entry in pool[table].values():
            if former in entry:
                entry[name] = entry.pop(former)
    return msgspec.convert(pool, Pool)


def advance(pool: Pool, fact: Fact) -> Pool:
    """Return the pool after a fact. Raises `ForbiddenTransition` or `UnknownEntity`."""
    after = _advance(pool, fact)
    if after.members is pool.members:
        return after
    alone = isinstance(fact, _OF_ONE_MEMBER)  # else thousands of members would be compared for each that is lost
    changed = {PeerId(fact.peer): after.members[PeerId(fact.peer)]} if alone else after.members
    lent = ledger.moved(
        after.ledger, pool.members, changed, fact.at_s, lambda name: after.machine_of(after.jobs[name].owner)
    )
    return after if lent is after.ledger else replace(after, ledger=lent)


def _advance(pool: Pool, fact: Fact) -> Pool:
    match fact:
        case events.InvitationIssued():
            if fact.invitation in pool.invitations:
                raise UnknownEntity(f"expected a new invitation, got {fact.invitation[:8]} a second time.")
            kept = {digest: one for digest, one in pool.invitations.items() if one.expires_at_s > fact.at_s}
            issued = Invitation(digest=fact.invitation, uses_left=fact.uses, expires_at_s=fact.expires_at_s)
            return replace(pool, invitations=_with(kept, fact.invitation, issued))
        case events.InvitationRevoked():
            if fact.invitation not in pool.invitations:
                raise UnknownEntity(f"invitation {fact.invitation[:8]} is unknown in this pool.")
            others = {digest: one for digest, one in pool.invitations.items() if digest != fact.invitation}
            return replace(pool, invitations=others)
        case events.MemberEvicted():
            since = fact.at_s - EVICTED_KEPT_S
            evicted = {peer: at_s for peer, at_s in pool.evicted.items() if at_s > since}
            version = max(pool.revocations + 1, int(fact.at_s))
            return replace(pool, evicted=_with(evicted, PeerId(fact.peer), fact.at_s), revocations=version)
        case events.PeerEnrolled():
            return _enrol(pool, fact)
        case events.KeyVouched():
            known = PeerId(fact.peer) in pool.members
            return (
                pool
                if known
                else replace(pool, members=_with(pool.members, PeerId(fact.peer), membership.vouched(fact)))
            )
        case events.MemberRegistered():
            return _register(pool, fact)
        case events.MemberLost():
            member = _member(pool, fact.peer)
            if member.boot != fact.boot:
                raise UnknownEntity(f"{member.entity}: expected boot {member.boot}, got {fact.boot}.")
            return _move_member(pool, member, fact)
        case events.MemberDraining() | events.MemberLeft():
            return _move_member(pool, _member(pool, fact.peer), fact)
        case events.JobRequested() | events.JobQueued():
            return _request(pool, fact)
        case events.PlanMinted():
            return _mint(pool, fact)
        case events.WorkCounted():
            return replace(pool, ledger=ledger.counted(pool.ledger, fact))
        case events.BytesRelayed():
            before = pool.ledger.relayed_bytes
            relayed = _with(before, PeerId(fact.peer), before.get(PeerId(fact.peer), 0) + fact.relayed_bytes)
            return replace(pool, ledger=replace(pool.ledger, relayed_bytes=relayed))
        case events.JobDone() | events.JobFailed():
            return _end(pool, fact)
        case (
            events.JobStarted()
            | events.JobStopAsked()
            | events.JobUnattended()
            | events.JobAttended()
            | events.JobNoted()
            | events.TurnMissed()
        ):
            moved = JOB.advance(_job(pool, fact.job), fact)
            return replace(pool, jobs=_with(pool.jobs, moved.job, moved))


def _enrol(pool: Pool, fact: events.PeerEnrolled) -> Pool:
    """Add the member for a certified key. A key certified again by another invitation keeps its member."""
    invitation = pool.invitations.get(fact.invitation)
    if invitation is None:
        raise UnknownEntity(f"invitation {fact.invitation[:8]} is unknown in this pool.")
    if invitation.uses_left < 1:
        raise UnknownEntity(f"invitation {fact.invitation[:8]} is used up.")
    peers = (*invitation.peers, fact.peer)
    used = replace(invitation, uses_left=invitation.uses_left - 1, peers=peers)
    peer = PeerId(fact.peer)
    members = pool.members if peer in pool.members else _with(pool.members, peer, membership.enrolled(fact))
    return replace(
        pool, invitations=_with(pool.invitations, fact.invitation, used), members=_without_old_departed(members)
    )


def _register(pool: Pool, fact: events.MemberRegistered) -> Pool:
    member = _member(pool, fact.peer)
    if member.phase == "joining" or member.boot == fact.boot:
        return _move_member(pool, member, fact)
    if member.phase in ("idle", "active", "draining"):
        raise UnknownEntity(f"{member.entity}: boot {member.boot} must be lost before boot {fact.boot} can register.")
    return replace(pool, members=_with(pool.members, member.peer, membership.successor(member, fact)))


def _request(pool: Pool, fact: events.JobRequested | events.JobQueued) -> Pool:
    known = pool.jobs.get(JobId(fact.job))
    if known is not None:
        moved = JOB.advance(known, fact)
    else:
        moved = job.queued(fact) if isinstance(fact, events.JobQueued) else job.requested(fact)
    jobs = _with({name: one for name, one in pool.jobs.items() if name != moved.job}, moved.job, moved)
    ended = [one for one in jobs.values() if one.ended]
    dropped = {one.job for one in ended[: max(0, len(ended) - ENDED_JOBS_KEPT)]}
    return replace(
        pool,
        jobs={name: one for name, one in jobs.items() if name not in dropped},
    )


def _mint(pool: Pool, fact: events.PlanMinted) -> Pool:
    """Put a plan into force. Members of the earlier plan that the new one leaves out are released."""
    minted = job.mint(fact, pool.newest_version)
    planned = JOB.advance(_job(pool, fact.job), fact)
    members = dict(pool.members)
    named = {PeerId(placement.peer) for placement in fact.members}
    for member in pool.members_of(planned.job):
        if member.peer not in named:
            members[member.peer] = MEMBERSHIP.advance(member, Released())
    for placement in fact.members:
        member = _member(pool, placement.peer)
        if member.job not in (None, planned.job):
            raise UnknownEntity(f"{member.entity}: already holds stages of {member.job}, not free for {planned.job}.")
        members[member.peer] = MEMBERSHIP.advance(member, Reserved(planned.job, placement.stages, placement.standbys))
    plans = {version: plan for version, plan in pool.plans.items() if plan.job != planned.job}
    return replace(
        pool,
        members=members,
        jobs=_with(pool.jobs, planned.job, planned),
        plans={**plans, minted.version: minted},
        newest_version=minted.version,
    )


def _end(pool: Pool, fact: events.JobDone | events.JobFailed) -> Pool:
    ended, had = JOB.advance(_job(pool, fact.job), fact), pool.members_of(JobId(fact.job))
    held_bytes, held_flops_per_s = sum(one.memory_bytes for one in had), sum(one.flops_per_s for one in had)
    ended = replace(ended, ended_at_s=fact.at_s, held_bytes=held_bytes, held_flops_per_s=held_flops_per_s)
    members = dict(pool.members)
    for member in had:
        members[member.peer] = MEMBERSHIP.advance(member, Released())
    plans = {version: plan for version, plan in pool.plans.items() if version != ended.plan_version}
    return replace(pool, members=members, jobs=_with(pool.jobs, ended.job, ended), plans=plans)


def _move_member(pool: Pool, member: Member, fact: Fact) -> Pool:
    """Move a member. One that departs is put last, so that departed members are in the order of departure."""
    moved = MEMBERSHIP.advance(member, fact)
    if not is_departed(moved):
        return replace(pool, members=_with(pool.members, moved.peer, moved))
    members = dict(pool.members)
    del members[moved.peer]
    members[moved.peer] = moved
    return replace(pool, members=_without_old_departed(members))


def _without_old_departed(members: Mapping[PeerId, Member]) -> Mapping[PeerId, Member]:
    if len(members) <= DEPARTED_KEPT:
        return members
    departed = [peer for peer, one in members.items() if one.job is None and one.phase in DEPARTED]
    dropped = set(departed[: max(0, len(departed) - DEPARTED_KEPT)])
    return {peer: member for peer, member in members.items() if peer not in dropped} if dropped else members


def _member(pool: Pool, peer: str) -> Member:
    member = pool.members.get(PeerId(peer))
    if member is None:
        raise UnknownEntity(f"member {peer[:8]} is unknown in this pool.")
    return member


def _job(pool: Pool, name: str) -> Job:
    found = pool.jobs.get(JobId(name))
    if found is None:
        raise UnknownEntity(f"job {name} is unknown in this pool.")
    return found


def _with(mapping: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    return {**mapping, key: value}
