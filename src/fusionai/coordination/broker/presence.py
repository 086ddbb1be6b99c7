"""Decides which members are present: registering, heartbeats, leaving, and what silence leads to.

A broken connection alone never makes a member lost; only an expired lease or a new process in its place does. A lost
member whose place was kept goes on with the state it has. A member whose job went on without it is refused with
`stale_fence` and clears its state, and so is one that still holds state of a job long after its part in it ended.
`membership` is the table, `assignment` gives members work.
"""

from __future__ import annotations

from dataclasses import replace

from fusionai.coordination.broker import events, requests
from fusionai.coordination.broker.membership import Member
from fusionai.coordination.broker.requests import Answer, Notify, Refusal
from fusionai.coordination.broker.state import (
    PRESENT,
    Lease,
    Leftover,
    recovered,
    wait_for_driver,
)
from fusionai.coordination.broker.transaction import Transaction
from fusionai.coordination.broker.turns import miss_turns
from fusionai.primitives.ids import JobId
from fusionai.wire.messages import (
    Done,
    HeartbeatAck,
    LeaveNotice,
    Registered,
)


def register(turn: Transaction, request: requests.RegisterMember) -> None:
    member = turn.member(request.peer)
    if request.boot in member.earlier_boots:
        raise Refusal("not_authorised", f"A later process of {member.entity} has registered (boot {member.boot}).")
    if member.phase in PRESENT and member.boot != request.boot:
        _lose(turn, member, "a new process of its machine registered")
    same = (
        member.phase in PRESENT
        and member.boot == request.boot
        and member.profile == request.profile
        and member.addresses == request.addresses
        and (member.memory_bytes, member.flops_per_s) == (request.memory_bytes, request.flops_per_s)
        and member.fastest_flops_per_s == request.fastest_flops_per_s
    )
    if not same:
        turn.record(
            events.MemberRegistered(
                at_s=turn.wall_s,
                peer=request.peer,
                boot=request.boot,
                profile=request.profile,
                addresses=request.addresses,
                memory_bytes=request.memory_bytes,
                flops_per_s=request.flops_per_s,
                fastest_flops_per_s=request.fastest_flops_per_s,
            )
        )
    _grant_lease(turn, member)
    turn.put("links", request.peer, request.connection)
    rules = turn.rules
    turn.commands.append(Answer(Registered(heartbeat_s=rules.heartbeat_s, pool=rules.pool, wall_s=turn.wall_s)))


def beat(turn: Transaction, request: requests.Beat) -> None:
    member = turn.member(request.peer)
    if request.boot != member.boot:
        raise Refusal("not_authorised", f"{member.entity} is now its process with boot {member.boot}.")
    if member.phase in ("joining", "left"):
        raise Refusal("unknown_peer", f"{member.entity} is {member.phase}, not in the pool.")
    lease = turn.desk.leases.get(request.peer)
    if member.phase == "lost" and member.job is not None:
        _return_to_place(turn, member)
    elif lease is None:
        raise Refusal("stale_fence", f"{member.entity} is {member.phase}; clear your stages and register again.")
    else:
        turn.put("leases", request.peer, lease.renewed(turn.now_s))
    # Before the checks: one of them may end the job, and a member that drains leaves the pool with it.
    turn.put("links", request.peer, request.connection)
    _check_leftovers(turn, member, request.jobs)
    _check_dismissed(turn, turn.member(request.peer), request.jobs)
    job = turn.member(request.peer).job or ""
    pool = turn.pool
    turn.commands.append(
        Answer(
            HeartbeatAck(wall_s=turn.wall_s, job=job, plan_version=pool.newest_version, revocations=pool.revocations)
        )
    )


def send_away(turn: Transaction, member: Member) -> None:
    """Remove an evicted member. A job that has it goes on as after any loss."""
    match member.phase:
        case "active" | "draining":
            _lose(turn, member, "it was evicted")
        case "idle" | "joining":
            turn.record(events.MemberLeft(at_s=turn.wall_s, peer=member.peer))
            turn.forget(member.peer)
        case _:
            pass


def _return_to_place(turn: Transaction, member: Member) -> None:
    """Take back a member that was silent for longer than its lease while its job waited: its state is still wanted, so
    it must not clear it."""
    turn.record(
        events.MemberRegistered(
            at_s=turn.wall_s,
            peer=member.peer,
            boot=member.boot,
            profile=member.profile,
            addresses=member.addresses,
            memory_bytes=member.memory_bytes,
            flops_per_s=member.flops_per_s,
            fastest_flops_per_s=member.fastest_flops_per_s,
        )
    )
    turn.note_job(member, f"{member.entity} is back")
    _grant_lease(turn, member)


def _check_leftovers(turn: Transaction, member: Member, jobs: tuple[str, ...]) -> None:
    """Refuse a member that has held state of another job for too long. It was dropped while the driver could not reach
    it, and gets no other work until it has cleared that state."""
    foreign = next((JobId(job) for job in jobs if job != member.job), None)
    known = turn.desk.leftovers.get(member.peer)
    if foreign is None and known is None:
        return
    if foreign is None:
        turn.drop(member.peer, "leftovers")
    else:
        if known is None or known.job != foreign:
            known = Leftover(foreign, turn.now_s)
        elif turn.now_s - known.since_s >= _clear_s(turn, foreign):
            raise Refusal(
                "stale_fence",
                f"{member.entity} holds stages of job {foreign}, which goes on without it or has ended; clear them "
                "and register again.",
            )
        turn.put("leftovers", member.peer, known)


def _check_dismissed(turn: Transaction, member: Member, jobs: tuple[str, ...]) -> None:
    """End a job whose driver ended it while this broker was away, so that no report of its end comes. The job is over
    once its driver is out of touch and no member present has held anything of it for `clear_s`. Members of a driver
    that crashed keep their stages for its return."""
    if member.job is None or member.job in jobs:
        turn.drop(member.peer, "dismissed")
        return
    since_s = turn.desk.dismissed.get(member.peer, turn.now_s)
    turn.put("dismissed", member.peer, since_s)
    job = turn.pool.jobs[member.job]
    if job.job not in turn.desk.waits or turn.now_s - since_s < turn.rules.clear_s:
        return
    there = [one.peer for one in turn.pool.members_of(job.job) if one.phase in PRESENT]
    if all(turn.now_s - turn.desk.dismissed.get(peer, turn.now_s) >= turn.rules.clear_s for peer in there):
        turn.fail(job, "its driver let its members go and has not been heard since")


def _clear_s(turn: Transaction, job: JobId) -> float:
    known = turn.pool.jobs.get(job)
    return turn.rules.clear_s if known is not None and known.live else turn.rules.clear_ended_s


def leave(turn: Transaction, request: requests.AskLeave) -> None:
    """Drain or remove a member. If another program of the machine's owner asks, the peer's process gets a notice."""
    member = turn.member(request.peer)
    link = turn.desk.links.get(request.peer)
    match member.phase:
        case "left":
            pass
        case "draining" if request.drain:
            pass
        case "active" if request.drain:
            turn.record(events.MemberDraining(at_s=turn.wall_s, peer=request.peer))
            turn.note_job(member, f"{member.entity} drains")
        case _:
            turn.record(events.MemberLeft(at_s=turn.wall_s, peer=request.peer))
            turn.note_job(member, f"{member.entity} left at once")
            turn.forget(request.peer)
    if link is not None and link != request.connection:
        turn.commands.append(Notify(link, LeaveNotice(drain=request.drain)))
    turn.commands.append(Answer(Done()))


def disconnect(turn: Transaction, request: requests.Disconnected) -> None:
    """Forget a broken connection. Leases run on, and a job waits for its driver."""
    for peer in [peer for peer, link in turn.desk.links.items() if link == request.connection]:
        turn.drop(peer, "links")
    for name, connection in turn.desk.drivers.items():
        if connection == request.connection:
            wait = wait_for_driver(turn.pool.jobs[name], turn.now_s, turn.rules)
            turn.drop(name, "drivers")
            turn.put("waits", name, wait)


def tick(turn: Transaction, _request: requests.DeadlinePassed) -> None:
    for peer, lease in turn.desk.leases.items():
        if turn.now_s >= lease.expires_at_s:
            _lose(turn, turn.pool.members[peer], f"not heard for {lease.duration_s:g} s")
    miss_turns(turn)
    for name, grace in turn.desk.stops.items():
        if turn.now_s >= grace.expires_at_s:
            turn.fail(turn.pool.jobs[name], f"its driver did not end it within {grace.duration_s:g} s of the stop")
    for name, wait in turn.desk.waits.items():
        if turn.now_s < wait.expires_at_s:
            continue
        job = turn.pool.jobs[name]
        if job.phase == "stopping":
            # No driver is there to end it in order; waiting on would keep its members from all other work.
            turn.fail(job, "stopped while nobody attended to it")
        elif job.attended:
            turn.record(events.JobUnattended(at_s=turn.wall_s, job=name, reason="its driver is out of touch"))
            turn.put("waits", name, wait_for_driver(turn.pool.jobs[name], turn.now_s, turn.rules))
        elif _is_driven(turn, name):
            turn.put("waits", name, wait_for_driver(job, turn.now_s, turn.rules))
        else:
            turn.fail(job, f"given up after {wait.duration_s:g} s without its driver")


def _is_driven(turn: Transaction, name: JobId) -> bool:
    """Return whether a member holds state of the job. Members drop it soon after their driver's connection has ended,
    so the driver is present and only its connection to this broker is not."""
    there = (one.peer for one in turn.pool.members_of(name) if one.phase in PRESENT)
    return any(peer not in turn.desk.dismissed for peer in there)


def restart_leases(turn: Transaction, _request: requests.Stalled) -> None:
    fresh = recovered(turn.rules, turn.pool, turn.now_s)
    waits = {name: wait for name, wait in fresh.waits.items() if name in turn.desk.waits}
    turns = {name: replace(one, lease=one.lease.renewed(turn.now_s)) for name, one in turn.desk.turns.items()}
    turn.desk = replace(turn.desk, leases=fresh.leases, waits=waits, stops=fresh.stops, turns=turns)


def _lose(turn: Transaction, member: Member, reason: str) -> None:
    turn.record(events.MemberLost(at_s=turn.wall_s, peer=member.peer, boot=member.boot, reason=reason))
    turn.note_job(member, f"{member.entity} lost: {reason}")
    turn.forget(member.peer)


def _grant_lease(turn: Transaction, member: Member) -> None:
    turn.put("leases", member.peer, Lease(turn.rules.lease_s, turn.now_s))
