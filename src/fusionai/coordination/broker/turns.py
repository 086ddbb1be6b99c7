"""Decides about the queue: which jobs get a place, when a job's turn comes and passes, what a plan may take meanwhile.

`job_queue` has the order and the fair shares, `assignment` mints plans, `presence` notices that an owner is out of
touch."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from fusionai.coordination.broker import events, requests
from fusionai.coordination.broker.job import Job, Need
from fusionai.coordination.broker.job_queue import (
    LENT,
    MOST_MISSED,
    NOTHING,
    LentAmount,
    Line,
    held_by_owners,
    holding,
)
from fusionai.coordination.broker.requests import Answer, Refusal
from fusionai.coordination.broker.state import Lease, Turn
from fusionai.coordination.broker.transaction import Transaction
from fusionai.primitives.ids import JobId, PeerId, short
from fusionai.primitives.units import format_bytes
from fusionai.wire.messages import QueuePlace

MOST_OF_OWNER: Final = 200
"""Most jobs of one owner in the queue (chosen)."""
REARRANGED_S: Final = 1.0
"""Least time between two arrangements of the same pool, in seconds (chosen): waiting alone changes little."""


def ask_place(turn: Transaction, request: requests.AskPlace) -> None:
    """Give the job a place, or change what it needs, and answer with the place; with the machines, in its turn."""
    if not turn.desk.knows(request.owner):
        raise Refusal("unknown_peer", f"{short(request.owner)} has not joined this pool.")
    job = turn.pool.jobs.get(request.job)
    if job is not None and job.owner != request.owner:
        raise Refusal("not_authorised", f"{job.entity} belongs to {short(job.owner)}; choose another name.")
    if job is not None and job.live:
        turn.commands.append(Answer(QueuePlace(place=0)))
        return
    queued = job if job is not None and job.queued else None
    if request.again and queued is None:
        raise Refusal("unknown_job", f"job {request.job} was taken out of the queue.")
    policy = turn.rules.queue
    need = Need(
        request.machines, request.memory_bytes, tuple(sorted(set(request.excluded))), request.priority or policy.usual
    )
    if queued is None or queued.need != need:
        _check_need(turn, request.owner, need)
        taken = len(turn.pool.queued_jobs())
        if queued is None and taken >= policy.most_jobs:
            raise Refusal("busy", f"The queue is full: {taken} of {policy.most_jobs} places are taken.")
        machine = turn.pool.machine_of(request.owner)
        own = sum(turn.pool.machine_of(one.owner) == machine for one in turn.pool.queued_jobs())
        if queued is None and own >= MOST_OF_OWNER:
            raise Refusal("busy", f"{own} jobs of this owner wait in the queue already, which is the limit.")
        turn.record(
            events.JobQueued(
                at_s=turn.wall_s,
                job=request.job,
                title=request.title,
                owner=request.owner,
                steps=request.steps,
                machines=need.machines,
                memory_bytes=need.memory_bytes,
                excluded=need.excluded,
                priority=need.priority,
            )
        )
    turn.attend(request.job, request.connection)
    rearrange(turn, timely=True)
    turn.commands.append(Answer(_place(turn, turn.pool.jobs[request.job])))


def rearrange(turn: Transaction, *, timely: bool) -> None:
    """Arrange the queue anew if the pool has changed since, or with `timely`, if some time has passed."""
    desk = turn.desk
    of = (desk.pool, desk.links, desk.leftovers)
    same = len(desk.arranged_of) == len(of) and all(a is b for a, b in zip(desk.arranged_of, of, strict=True))
    if same and not (timely and desk.line.jobs and turn.now_s - desk.arranged_s >= REARRANGED_S):
        return
    if turn.pool.queued_jobs():
        _drop_broken_turns(turn)
        line = turn.desk.arrangement(turn.wall_s).arranged()
        for name, members in line.granted.items():
            turn.put("turns", name, Turn(Lease(turn.rules.queue.turn_s, turn.now_s), members))
        _make_way(turn, line)
    else:
        line = Line()
    turn.desk = replace(turn.desk, line=line, arranged_of=of, arranged_s=turn.now_s)


def _make_way(turn: Transaction, line: Line) -> None:
    """Stop running jobs of a class that gives way, for the first more urgent job that waits."""
    policy = turn.rules.queue
    # Most pools have none at most times, and to look for machines takes as long as to arrange the queue.
    if not any(policy.gives_way(job.need.priority) for job in turn.pool.live_jobs()):
        return
    found = turn.desk.arrangement(turn.wall_s).in_the_way(line)
    if found is None:
        return
    waiting, stopping = found
    for name in stopping:
        turn.stop(turn.pool.jobs[name], turn.rules.broker, gives_way_to=waiting)


def _drop_broken_turns(turn: Transaction) -> None:
    """End turns whose machines suffice no longer: one was lost, or the job has found that it needs more."""
    for name, one in turn.desk.turns.items():
        job, known = turn.pool.jobs[name], turn.pool.members
        free = frozenset(peer for peer in one.members if turn.desk.is_free(known[peer], turn.wall_s))
        there = free - set(job.need.excluded)
        if not job.attended or not holding(known[peer] for peer in there).meets(job.need):
            turn.drop(name, "turns")
        elif there != one.members:
            turn.put("turns", name, replace(one, members=there))


def miss_turns(turn: Transaction) -> None:
    """End turns that are over. A job that has missed several loses its place: it would hold up the others for ever."""
    for name, one in turn.desk.turns.items():
        if turn.now_s < one.lease.expires_at_s:
            continue
        turn.drop(name, "turns")
        turn.record(events.TurnMissed(at_s=turn.wall_s, job=name))
        job = turn.pool.jobs[name]
        if job.missed >= MOST_MISSED:
            turn.fail(job, f"its turn came {job.missed} times and it did not take its machines")


def leave_queue(turn: Transaction, job: Job, why: str) -> None:
    turn.record(events.JobDone(at_s=turn.wall_s, job=job.job, step=job.step, detail=why))
    turn.dismiss(job.job)


def check_entry(turn: Transaction, request: requests.RequestJob, job: Job | None) -> None:
    """Raise `Refusal` if a plan takes machines that are kept for others, or more than the owner's quota. A running job
    may replace machines, but not grow at the expense of those that wait."""
    desk = turn.desk
    named = {PeerId(placement.peer) for placement in request.members}
    if job is not None and job.queued:
        own = desk.turns.get(job.job)
        if own is None:
            raise Refusal("queued", f"{job.entity} waits in the queue; it is not its turn.")
        if foreign := named - own.members:
            raise Refusal("busy", f"{short(min(foreign))} is not kept for {job.entity}; plan again without it.")
    elif job is None or not job.live:
        waiting = sum(one.attended for one in turn.pool.queued_jobs())
        if waiting:
            jobs = "1 job waits" if waiting == 1 else f"{waiting} jobs wait"
            raise Refusal("queued", f"{jobs} for machines in the queue of this pool.")
    else:
        held = {member.peer for member in turn.pool.members_of(job.job)}
        in_turns = {peer for one in desk.turns.values() for peer in one.members}
        for peer in sorted(named - held):
            keeper = desk.line.kept.get(peer)
            if keeper is not None and (peer in in_turns or len(named) > len(held)):
                raise Refusal("busy", f"{short(peer)} is kept for {keeper}, which waits in the queue.")
    _check_quota(turn, request.owner, request.job, named)


def _check_quota(turn: Transaction, owner: PeerId, name: JobId, named: set[PeerId]) -> None:
    pool, machine = turn.pool, turn.pool.machine_of(owner)
    quota = turn.rules.queue.quota_of(machine)
    others = [
        member
        for member in pool.members.values()
        if member.job not in (None, name) and pool.machine_of(pool.jobs[member.job].owner) == machine
    ]
    wanted = holding([*others, *(pool.members[peer] for peer in named if peer in pool.members)])
    if not quota.allows(wanted):
        raise Refusal(
            "quota", f"The owner's jobs would hold {_amount(wanted)}; {_limit(quota.machines, quota.memory_bytes)}."
        )


def _check_need(turn: Transaction, owner: PeerId, need: Need) -> None:
    """Raise `Refusal` for a priority class that does not exist or is not for this owner, and for a need that the
    owner's quota never allows."""
    policy, machine = turn.rules.queue, turn.pool.machine_of(owner)
    found = next((one for one in policy.classes if one.name == need.priority), None)
    if found is None:
        names = ", ".join(one.name for one in policy.classes)
        raise Refusal("bad_message", f"This pool has no priority class {need.priority!r}; it has {names}.")
    broker = turn.rules.broker
    if found.owners is not None and machine not in found.owners and machine != turn.pool.machine_of(broker):
        raise Refusal("not_authorised", f"The priority class {found.name} is not for jobs of {short(machine)}.")
    quota = policy.quota_of(machine)
    if not quota.allows(LentAmount(need.machines, need.memory_bytes)):
        raise Refusal("quota", f"The job needs {_needed(need)}; {_limit(quota.machines, quota.memory_bytes)}.")


def _place(turn: Transaction, job: Job) -> QueuePlace:
    """Return the answer to a job's owner."""
    desk = turn.desk
    order = desk.line.jobs
    place, waiting = order.index(job.job) + 1, len(order)
    own = desk.turns.get(job.job)
    if own is not None:
        left_s = max(0.0, own.lease.expires_at_s - turn.now_s)
        return QueuePlace(place=place, waiting=waiting, members=tuple(sorted(own.members)), turn_s=left_s)
    expected_s = _expected_s(turn, job) if place == 1 else 0.0
    return QueuePlace(place=place, waiting=waiting, why=_why(turn, job), expected_s=expected_s)


def _expected_s(turn: Transaction, job: Job) -> float:
    """Return in how many seconds machines for the first job in the queue will be free, if jobs that have a number of
    steps go on as fast as so far; 0: not known. Served jobs and jobs that have just begun have no known end."""
    pool, need = turn.pool, job.need
    usable = {one.peer: one for one in pool.members.values() if one.phase in LENT and one.peer not in need.excluded}
    free = [one for one in usable.values() if turn.desk.is_free(one, turn.wall_s)]
    ends: list[tuple[float, JobId]] = []
    for other in pool.live_jobs():
        done = turn.desk.progress.get(other.job, -1) + 1 - other.begun_at_step
        left = other.steps - turn.desk.progress.get(other.job, -1) - 1
        if other.steps and done > 0:
            ends.append(((turn.wall_s - other.requested_at_s) / done * left, other.job))
    for end_s, name in sorted(ends):
        free += [one for one in usable.values() if one.job == name]
        if holding(free).meets(need):
            return max(1.0, end_s)
    return 0.0


def _why(turn: Transaction, job: Job) -> str:
    """Return what a job waits for."""
    pool, need = turn.pool, job.need
    lent = holding(one for one in pool.members.values() if one.phase in LENT and one.peer not in need.excluded)
    if not lent.meets(need):
        there = f"the pool has {_amount(lent)}" if lent.machines else "the pool has none"
        return f"it needs at least {_needed(need)} and {there}: machines must join"
    machine = pool.machine_of(job.owner)
    turns = {name: one.members for name, one in turn.desk.turns.items()}
    had = held_by_owners(pool, turns).get(machine, NOTHING)
    quota = turn.rules.queue.quota_of(machine)
    if not quota.allows(had + LentAmount(need.machines, need.memory_bytes)):
        return f"its owner's jobs hold {_amount(had)}, and {_limit(quota.machines, quota.memory_bytes)}"
    kept = sum(name == job.job for name in turn.desk.line.kept.values())
    return f"it needs at least {_needed(need)}" + (f"; {_machines(kept)} kept for it" if kept else "")


def _machines(count: int) -> str:
    return "1 machine" if count == 1 else f"{count} machines"


def _needed(need: Need) -> str:
    return _machines(need.machines) + (f" with {format_bytes(need.memory_bytes)}" if need.memory_bytes else "")


def _amount(held: LentAmount) -> str:
    return _machines(held.machines) + (f" with {format_bytes(held.memory_bytes)}" if held.memory_bytes else "")


def _limit(machines: int | None, memory_bytes: int | None) -> str:
    limits = [
        *([] if machines is None else [_machines(machines)]),
        *([] if memory_bytes is None else [format_bytes(memory_bytes)]),
    ]
    return f"the pool's policy lets one owner hold {' and '.join(limits)} at most"
