"""Decides about jobs: reserving members, minting plan versions, reports of drivers, stops.

Checks which sender may request, report and stop a job, and which members a plan may use. `job` is the table; `turns`
decides whether a job must wait in the queue, `presence` when members and drivers are lost.
"""

from __future__ import annotations

from fusionai.coordination.broker import events, requests
from fusionai.coordination.broker.events import MemberPlacement
from fusionai.coordination.broker.job import Job
from fusionai.coordination.broker.requests import REASON_LENGTH, Answer, Notify, Refusal
from fusionai.coordination.broker.transaction import Transaction
from fusionai.coordination.broker.turns import check_entry, leave_queue
from fusionai.primitives.ids import JobId, PeerId, short
from fusionai.wire.messages import (
    Done,
    StopNotice,
)


def request_job(turn: Transaction, request: requests.RequestJob) -> None:
    if not turn.desk.knows(request.owner):
        raise Refusal("unknown_peer", f"{short(request.owner)} has not joined this pool.")
    job = turn.pool.jobs.get(request.job)
    if job is not None and job.owner != request.owner:
        raise Refusal("not_authorised", f"{job.entity} belongs to {short(job.owner)}; choose another name.")
    version = _same_plan(turn, request, job) if request.plan_version else _mint(turn, request, job)
    turn.attend(request.job, request.connection)
    turn.commands.append(requests.IssueTickets(request.job, version))
    if turn.pool.jobs[request.job].phase == "stopping":
        turn.ask_driver_to_stop(request.job, request.connection)


def report_job(turn: Transaction, request: requests.ReportJob) -> None:
    job = _job(turn, request.job)
    if request.sender != job.owner:
        raise Refusal("not_authorised", f"{job.entity} belongs to {short(job.owner)}.")
    if job.queued and request.state in ("done", "failed"):
        leave_queue(turn, job, request.detail[:REASON_LENGTH] or "its owner has taken it out of the queue")
        turn.commands.append(Answer(Done()))
        return
    if not job.live:
        if request.state != job.phase:
            raise Refusal("bad_message", f"{job.entity} is {job.phase} ({job.notes[-1].text}); ask for it again.")
        turn.commands.append(Answer(Done()))
        return
    at_s, step, detail = turn.wall_s, request.step, request.detail[:REASON_LENGTH]
    match request.state:
        case "done":
            turn.record(events.JobDone(at_s=at_s, job=job.job, step=step, detail=detail))
        case "failed":
            turn.record(events.JobFailed(at_s=at_s, job=job.job, step=step, detail=detail))
        case "stopping" if job.phase != "stopping":
            turn.stop(job, request.sender, notify=False)
        case "running" if job.phase == "requested":
            turn.record(events.JobStarted(at_s=at_s, job=job.job))
        case _:
            pass
    if request.state in ("done", "failed"):
        turn.dismiss(job.job)
    else:
        turn.attend(job.job, request.connection)
        if detail and detail != turn.pool.jobs[job.job].notes[-1].text:
            turn.record(events.JobNoted(at_s=at_s, job=job.job, text=detail))
        if job.phase == "stopping" and request.state != "stopping":
            turn.ask_driver_to_stop(job.job, request.connection)
        turn.put("progress", job.job, step)
    turn.commands.insert(0, Answer(Done()))


def stop_job(turn: Transaction, request: requests.StopJob) -> None:
    job = _job(turn, request.job)
    owner = turn.pool.members.get(job.owner)
    # The owner's key may be a further key of its machine: that machine's own programs may stop the job too.
    sponsor = None if owner is None else owner.sponsor
    if request.sender not in (job.owner, sponsor, turn.rules.broker):
        raise Refusal("not_authorised", f"Only {job.entity}'s owner and the broker's owner may stop it.")
    driver = turn.desk.drivers.get(job.job)
    if job.queued:
        leave_queue(turn, job, f"{short(request.sender)} has taken it out of the queue")
        if driver is not None and driver != request.connection:
            turn.commands.append(Notify(driver, StopNotice(job=job.job)))
    elif job.live:
        turn.stop(job, request.sender)
    turn.commands.append(Answer(Done()))


def _same_plan(turn: Transaction, request: requests.RequestJob, job: Job | None) -> int:
    """Return the version of the current plan, for an owner that has this plan already and needs new tickets."""
    if job is None or not job.live:
        raise Refusal("unknown_job", f"job {request.job} is not running; ask for it with a plan of version 0.")
    current = turn.pool.plans[job.plan_version]
    if request.plan_version != current.version or request.plan != current.plan:
        raise Refusal(
            "stale_fence",
            f"{job.entity}: expected plan version {current.version} unchanged, got version {request.plan_version}.",
        )
    return current.version


def _mint(turn: Transaction, request: requests.RequestJob, job: Job | None) -> int:
    if job is not None and job.phase == "stopping":
        raise Refusal("bad_message", f"{job.entity} is stopping; ask again when it has ended.")
    check_entry(turn, request, job)
    if job is None or not job.live:
        if len(turn.pool.live_jobs()) >= turn.rules.max_live_jobs:
            raise Refusal("busy", f"The pool runs {turn.rules.max_live_jobs} jobs already.")
        turn.record(
            events.JobRequested(
                at_s=turn.wall_s,
                job=request.job,
                title=request.title,
                owner=request.owner,
                steps=request.steps,
            )
        )
    for placement in request.members:
        _check_free(turn, placement, request.job)
    version = turn.pool.newest_version + 1
    turn.record(
        events.PlanMinted(
            at_s=turn.wall_s, job=request.job, version=version, plan=request.plan, members=request.members
        )
    )
    turn.drop(request.job, "turns")
    turn.see_off()
    return version


def _check_free(turn: Transaction, placement: MemberPlacement, job: JobId) -> None:
    """Raise `Refusal` unless the member may be reserved. A member of the same job may stay although it drains or
    rests."""
    peer = PeerId(placement.peer)
    member = turn.pool.members.get(peer)
    if member is None or member.phase in ("joining", "left", "lost"):
        raise Refusal("unknown_peer", f"{short(peer)} is not in the pool now; plan again.")
    incumbent = member.job == job
    if member.phase == "draining" and not incumbent:
        raise Refusal("leaving", f"{member.entity} is leaving the pool; plan again without it.")
    if member.job is not None and not incumbent:
        raise Refusal("busy", f"{member.entity} works for another job; plan again without it.")
    leftover = turn.desk.leftovers.get(peer)
    if leftover is not None and leftover.job != job:
        raise Refusal("busy", f"{member.entity} still clears what it had of another job; plan again without it.")
    rest_s = 0.0 if incumbent else turn.desk.rest_left_s(member, turn.wall_s)
    if rest_s:
        raise Refusal(
            "busy",
            f"{member.entity} was lost {len(member.losses)} times lately and rests for another {rest_s:.0f} s; "
            "plan again without it.",
        )
    if not turn.desk.reachable(member):
        raise Refusal("unknown_peer", f"{member.entity} is out of touch; plan again without it.")


def _job(turn: Transaction, name: JobId) -> Job:
    job = turn.pool.jobs.get(name)
    if job is None:
        raise Refusal("unknown_job", f"No job is called {name} here.")
    return job
