"""Decides which reports of work the ledger counts, and up to how much.

A report counts only if it comes from the job's owner and names members that the job has had. No member gets more than
its measured speed can have done in the time for which the job had it: of a report above that, the part up to it counts.
`ledger` keeps the sums."""

from __future__ import annotations

from math import isfinite
from typing import Final

from fusionai.coordination.broker import events, requests
from fusionai.coordination.broker.ledger import JobPart
from fusionai.coordination.broker.requests import Answer, Refusal
from fusionai.coordination.broker.transaction import Transaction
from fusionai.primitives.ids import PeerId, short
from fusionai.wire.messages import Done, WorkShare

FASTER: Final = 2.0
"""Factor by which a machine may exceed its measured speed before its work is capped: measurements vary with what else
the machine does (chosen)."""


def report_work(turn: Transaction, request: requests.ReportWork) -> None:
    job = turn.pool.jobs.get(request.job)
    work = turn.pool.ledger.jobs.get(request.job)
    if job is None or work is None:
        raise Refusal("unknown_job", f"No job with machines is called {request.job} here.")
    if request.sender != job.owner:
        raise Refusal("not_authorised", f"{job.entity} belongs to {short(job.owner)}.")
    # Else it is an earlier report that comes late, or again.
    if request.run != work.run or request.sequence > work.sequence:
        _check(request)
        counted, capped = list[WorkShare](), list[PeerId]()
        for share in request.shares:
            peer = PeerId(share.peer)
            if (part := work.parts.get(peer)) is None:
                raise Refusal(
                    "bad_message", f"{job.entity} has never had {short(peer)}, so it can't have worked for it."
                )
            counted.append(_possible(turn, part if request.run == work.run else part.in_new_run(), share))
            if counted[-1] != share:
                capped.append(peer)
        turn.record(
            events.WorkCounted(
                at_s=turn.wall_s,
                job=job.job,
                run=request.run,
                sequence=request.sequence,
                steps=request.steps,
                tokens=request.tokens,
                shares=tuple(counted),
                capped=tuple(capped),
            )
        )
        for peer in (peer for peer in capped if not (job.ended or work.parts[peer].capped)):
            text = f"more work of {short(peer)} was reported than its measured speed allows: the rest does not count"
            turn.record(events.JobNoted(at_s=turn.wall_s, job=job.job, text=text))
    turn.commands.append(Answer(Done()))


def note_relayed(turn: Transaction, request: requests.NoteRelayed) -> None:
    turn.record(events.BytesRelayed(at_s=turn.wall_s, peer=turn.rules.broker, relayed_bytes=request.relayed_bytes))


def _check(request: requests.ReportWork) -> None:
    """Raise `Refusal` for a report that contradicts itself."""
    if len({share.peer for share in request.shares}) != len(request.shares):
        raise Refusal("bad_message", "A report of work names a machine twice.")
    for share in request.shares:
        if share.steps > request.steps or share.tokens > request.tokens or not isfinite(share.flops):
            raise Refusal(
                "bad_message",
                f"Expected at most the job's {request.steps} steps and {request.tokens} tokens for "
                f"{short(PeerId(share.peer))}, got {share.steps} and {share.tokens}, {share.flops:g} operations.",
            )


def _possible(turn: Transaction, part: JobPart, share: WorkShare) -> WorkShare:
    """Return the part of the share that the machine can have done at its measured speed."""
    member = turn.pool.members.get(PeerId(share.peer))
    speed = 0.0 if member is None else member.fastest_flops_per_s
    # What counted before was possible.
    limit = max(FASTER * speed * part.had_s(turn.wall_s) - part.earlier_flops, part.flops)
    if share.flops <= limit:
        return share
    fraction = limit / share.flops
    return WorkShare(share.peer, int(share.steps * fraction), int(share.tokens * fraction), limit)
