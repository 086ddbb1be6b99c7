"""Views of the broker's state: the members of the pool and its jobs, as members see them.

`state` holds what is shown, `wire.messages` defines the messages.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

import msgspec

from fusionai.coordination.broker.job import Job, JobNote
from fusionai.coordination.broker.membership import Member
from fusionai.coordination.broker.state import BrokerState
from fusionai.primitives.ids import JobId, PeerId
from fusionai.wire.messages import JobList, JobView, MemberView, PoolView

THERE: Final = ("idle", "active", "draining")
SHOWN: Final = (*THERE, "lost")
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
        job=member.job or "",
        stages=member.stages,
        standbys=member.standbys,
        rests_s=rests_s,
        clears="" if leftover is None else leftover.job,
        last_heard_s=max(0.0, now_s - lease.heard_s) if lease is not None else 0.0,
    )


def job_list(desk: BrokerState, name: JobId | None = None) -> JobList:
    """Return all jobs without their histories, or the one called `name` with it (empty if there is none)."""
    if name is not None:
        job = desk.pool.jobs.get(name)
        return JobList(jobs=() if job is None else (_job_view(desk, job, with_notes=True),))
    return JobList(jobs=tuple(_job_view(desk, job, with_notes=False) for job in desk.pool.jobs.values()))


def _job_view(desk: BrokerState, job: Job, *, with_notes: bool) -> JobView:
    return JobView(
        job=job.job,
        title=job.title,
        owner=job.owner,
        state=job.phase,
        step=desk.progress.get(job.job, job.step),
        steps=job.steps,
        plan_version=job.plan_version,
        started_at_s=job.requested_at_s,
        story=tuple(_line(line) for line in job.notes) if with_notes else (),
    )


def _line(line: JobNote) -> str:
    return f"{datetime.fromtimestamp(line.at_s, UTC).strftime('%Y-%m-%d %H:%M:%SZ')} {line.text}"
