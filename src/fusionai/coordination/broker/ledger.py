"""The ledger: what each machine lent to the jobs of which owner, as the journalled facts made it.

A job's owner reports the work that its job has committed, as sums since the run began; a newer report replaces the
older one, so that a report repeated after a lost answer counts once. A sum that shrinks strikes work that had counted:
steps that were taken back, and everything of a machine whose results were wrong. Hours follow from the facts that
reserve and release members. A machine reports nothing itself.

`accounting` decides which reports count, `pool` folds the facts, `job_queue` may let lenders go first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from fusionai.coordination.broker.events import WorkCounted
from fusionai.coordination.broker.membership import Member
from fusionai.primitives.ids import JobId, PeerId

JOBS_KEPT: Final = 2_000
"""Limit on jobs whose reports are remembered. If a job is resumed after that, its work counts once more, up to what its
machines can do in the time for which it holds them again (chosen)."""
MOST_COUNTED: Final = 2**60
"""Largest sum of steps or tokens, below what a message can carry."""
HOLDS: Final = ("active", "draining")
"""Phases in which a member with a job works for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LentWork:
    """Sums of what one machine lent to the jobs of one owner's machine. `flops`: operations of the model, as the
    planner counts them. The struck ones had counted before."""

    lent_s: float = 0.0
    steps: int = 0
    tokens: int = 0
    flops: float = 0.0
    struck_steps: int = 0
    struck_tokens: int = 0
    struck_flops: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPart:
    """What one member has done for one job, by the newest report. `machine`: the machine that the member belongs to.
    `held_s`: for how long the job had it, without the time since `since_s`, in seconds since 1970 (None: it has it no
    more). `earlier_flops`: what it did in earlier runs of the job. `capped`: whether more was reported than it can have
    done."""

    machine: PeerId
    held_s: float = 0.0
    since_s: float | None = None
    steps: int = 0
    tokens: int = 0
    flops: float = 0.0
    earlier_flops: float = 0.0
    capped: bool = False

    def in_new_run(self) -> JobPart:
        """Return the part at the beginning of another run. What counted before stays counted."""
        return replace(self, steps=0, tokens=0, flops=0.0, earlier_flops=self.earlier_flops + self.flops)

    def had_s(self, at_s: float) -> float:
        return self.held_s + (0.0 if self.since_s is None else max(0.0, at_s - self.since_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWork:
    """One job: the machine of its owner, the newest report's run and number with its sums, and the part of each
    member."""

    owner: PeerId
    run: str = ""
    sequence: int = 0
    steps: int = 0
    tokens: int = 0
    parts: Mapping[PeerId, JobPart] = field(default_factory=dict[PeerId, JobPart])


@dataclass(frozen=True, slots=True)
class Ledger:
    """`accounts`: the machine that lent -> the machine whose owner's jobs it lent to -> sums. `relayed_bytes`: what
    each broker's relay has copied."""

    accounts: Mapping[PeerId, Mapping[PeerId, LentWork]] = field(
        default_factory=dict[PeerId, Mapping[PeerId, LentWork]]
    )
    jobs: Mapping[JobId, JobWork] = field(default_factory=dict[JobId, JobWork])
    relayed_bytes: Mapping[PeerId, int] = field(default_factory=dict[PeerId, int])

    def entries(self, at_s: float) -> Iterator[tuple[PeerId, PeerId, LentWork]]:
        """Yield (machine, owner's machine, sums), with the time of members that a job has at `at_s`."""
        open_s: dict[tuple[PeerId, PeerId], float] = defaultdict(float)
        for work in self.jobs.values():
            for part in work.parts.values():
                open_s[part.machine, work.owner] += part.had_s(at_s) - part.held_s
        for machine, by_owner in self.accounts.items():
            for owner, lent in by_owner.items():
                yield machine, owner, replace(lent, lent_s=lent.lent_s + open_s[machine, owner])


def lent_to_others(ledger: Ledger, person_of: Callable[[PeerId], str]) -> Mapping[str, float]:
    """Return the operations that the machines of each person have done for jobs of others."""
    found: dict[str, float] = defaultdict(float)
    for machine, by_owner in ledger.accounts.items():
        for owner, lent in by_owner.items():
            if person_of(machine) != person_of(owner):
                found[person_of(machine)] += lent.flops
    return found


def counted(ledger: Ledger, fact: WorkCounted) -> Ledger:
    """Put the sums of a report in the place of the job's earlier ones. A member that the report leaves out has done
    nothing that counts."""
    job = JobId(fact.job)
    work, shares = ledger.jobs[job], {PeerId(one.peer): one for one in fact.shares}
    accounts, parts = dict(ledger.accounts), dict(work.parts)
    for peer, known in work.parts.items():
        share, part = shares.get(peer), known if fact.run == work.run else known.in_new_run()
        now = replace(part, steps=0, tokens=0, flops=0.0, capped=part.capped or peer in fact.capped)
        if share is not None:
            now = replace(now, steps=share.steps, tokens=share.tokens, flops=share.flops)
        parts[peer] = now
        accounts[part.machine] = _with_difference(accounts.get(part.machine, {}), work.owner, part, now)
    newest = replace(work, run=fact.run, sequence=fact.sequence, steps=fact.steps, tokens=fact.tokens, parts=parts)
    return replace(ledger, accounts=accounts, jobs={**ledger.jobs, job: newest})


def _with_difference(
    by_owner: Mapping[PeerId, LentWork], owner: PeerId, before: JobPart, now: JobPart
) -> Mapping[PeerId, LentWork]:
    lent = by_owner.get(owner, LentWork())
    changed = replace(
        lent,
        steps=_bounded(lent.steps + now.steps - before.steps),
        tokens=_bounded(lent.tokens + now.tokens - before.tokens),
        flops=max(0.0, lent.flops + now.flops - before.flops),  # a difference of rounded sums may fall below 0
        struck_steps=_bounded(lent.struck_steps + before.steps - now.steps, lent.struck_steps),
        struck_tokens=_bounded(lent.struck_tokens + before.tokens - now.tokens, lent.struck_tokens),
        struck_flops=lent.struck_flops + max(0.0, before.flops - now.flops),
    )
    return {**by_owner, owner: changed}


def _bounded(count: int, least: int = 0) -> int:
    """Return the count within bounds: an owner that reports absurd numbers must not make sums that can't be encoded."""
    return min(max(least, count), MOST_COUNTED)


def moved(
    ledger: Ledger,
    before: Mapping[PeerId, Member],
    after: Mapping[PeerId, Member],
    at_s: float,
    owner_of: Callable[[JobId], PeerId],
) -> Ledger:
    """Begin and end the time of members that a fact has given to a job or taken from one. `owner_of` returns the
    machine of a job's owner."""
    for peer, member in after.items():
        known = before.get(peer)
        if known is member:
            continue
        had, has = (None if known is None else _job_of(known)), _job_of(member)
        if had != has:
            ledger = ledger if had is None else _released(ledger, had, peer, at_s)
            ledger = ledger if has is None else _reserved(ledger, has, member, at_s, owner_of)
    return ledger


def _job_of(member: Member) -> JobId | None:
    return member.job if member.phase in HOLDS else None


def _reserved(ledger: Ledger, job: JobId, member: Member, at_s: float, owner_of: Callable[[JobId], PeerId]) -> Ledger:
    work = ledger.jobs.get(job) or JobWork(owner=owner_of(job))
    part = work.parts.get(member.peer) or JobPart(machine=member.sponsor or member.peer)
    jobs = {**ledger.jobs, job: replace(work, parts={**work.parts, member.peer: replace(part, since_s=at_s)})}
    if len(jobs) <= JOBS_KEPT:
        return replace(ledger, jobs=jobs)
    idle = [name for name, one in jobs.items() if all(part.since_s is None for part in one.parts.values())]
    dropped = set(idle[: len(jobs) - JOBS_KEPT])
    return replace(ledger, jobs={name: one for name, one in jobs.items() if name not in dropped})


def _released(ledger: Ledger, job: JobId, peer: PeerId, at_s: float) -> Ledger:
    work = ledger.jobs.get(job)
    part = None if work is None else work.parts.get(peer)
    if work is None or part is None:  # reserved before the pool kept a ledger
        return ledger
    held_s = part.had_s(at_s)
    by_owner = ledger.accounts.get(part.machine, {})
    lent = by_owner.get(work.owner, LentWork())
    lent = replace(lent, lent_s=lent.lent_s + held_s - part.held_s)
    parts = {**work.parts, peer: replace(part, held_s=held_s, since_s=None)}
    return replace(
        ledger,
        accounts={**ledger.accounts, part.machine: {**by_owner, work.owner: lent}},
        jobs={**ledger.jobs, job: replace(work, parts=parts)},
    )
