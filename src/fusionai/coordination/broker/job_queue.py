"""The queue of jobs that wait for machines: its order, what each owner's jobs hold, and which machines are kept for
which job.

The order: first the priority class, then how small the share of the pool is that the owner's jobs hold or would hold
with those ahead (dominant resource fairness over memory and speed, Ghodsi et al. 2011), then how small its share was
over the last day, then the time of asking. A policy may put before the share what the machines of the owner have done
for others (`ledger`). A job gets its *turn* only when machines that fit its need are free, all at once; for a while
they are kept for it alone. Running jobs of a class that gives way are stopped for more urgent ones.

How long a job runs is not known. So nothing that a job ahead could use is given to a later one: if the free machines
don't suffice for a job, they are all kept for it until enough have come free, unless not even all machines of the pool
would suffice. Later jobs get what the jobs ahead can't use or leave over.

`turns` decides when the queue is arranged anew and what its jobs are answered; `job` is the table."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from fusionai.coordination.broker.job import Job, Need
from fusionai.coordination.broker.ledger import lent_to_others
from fusionai.coordination.broker.membership import Member
from fusionai.coordination.broker.pool import Pool
from fusionai.primitives.ids import JobId, PeerId

LENT: Final = ("idle", "active")
"""Phases of members that a job may get, now or later."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Most that the jobs of one owner may hold at a time. None: no limit."""

    machines: int | None = None
    memory_bytes: int | None = None

    def allows(self, held: LentAmount) -> bool:
        by_machines = self.machines is None or held.machines <= self.machines
        return by_machines and (self.memory_bytes is None or held.memory_bytes <= self.memory_bytes)


@dataclass(frozen=True, slots=True)
class PriorityClass:
    """Jobs of one urgency. `owners`: the machines whose jobs may be of this class; None: all, and the broker's own
    machine always may. `gives_way`: running jobs of this class are stopped for a more urgent one that waits."""

    name: str
    owners: frozenset[PeerId] | None = None
    gives_way: bool = False


HIGH: Final = PriorityClass("high", frozenset())
NORMAL: Final = PriorityClass("normal")
LOW: Final = PriorityClass("low")
IDLE: Final = PriorityClass("idle", gives_way=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicy:
    """What the broker's owner decides about the queue. `classes`: most urgent first."""

    classes: tuple[PriorityClass, ...] = (HIGH, NORMAL, LOW, IDLE)
    usual: str = NORMAL.name
    """Class of jobs that name none."""
    turn_s: float = 60.0
    """For how long machines are kept for a job whose turn it is."""
    age_s: float = 86_400.0
    """After waiting this long without machines, an owner's jobs count as one class more urgent, and so on."""
    kept_s: float = 3600.0
    """For how long the place of a job is kept whose owner is out of touch."""
    most_jobs: int = 2_000
    """Limit on jobs in the queue."""
    quota: Quota = Quota()
    """Quota of owners without one of their own."""
    quotas: Mapping[PeerId, Quota] = field(default_factory=dict[PeerId, Quota])

    lenders_first: bool = False
    """Whether owners of one class come in the order of what their machines have done for others."""
    people: Mapping[PeerId, str] = field(default_factory=dict[PeerId, str])
    """Machine -> the person that it belongs to; one that is not named is a person of its own."""

    def person_of(self, machine: PeerId) -> str:
        return self.people.get(machine, machine)

    def quota_of(self, machine: PeerId) -> Quota:
        return self.quotas.get(machine, self.quota)

    def rank(self, name: str) -> int:
        """Return the number of the class, 0 for the most urgent. A class that the policy has no longer counts as the
        usual one."""
        names = [one.name for one in self.classes]
        return names.index(name if name in names else self.usual)

    def gives_way(self, name: str) -> bool:
        return self.classes[self.rank(name)].gives_way


@dataclass(frozen=True, slots=True)
class LentAmount:
    """Machines with what they lend together."""

    machines: int = 0
    memory_bytes: int = 0
    flops_per_s: float = 0.0

    def __add__(self, other: LentAmount) -> LentAmount:
        return LentAmount(
            self.machines + other.machines,
            self.memory_bytes + other.memory_bytes,
            self.flops_per_s + other.flops_per_s,
        )

    def meets(self, need: Need) -> bool:
        return self.machines >= need.machines and self.memory_bytes >= need.memory_bytes

    def share_of(self, whole: LentAmount) -> float:
        """Return the dominant share: the larger of those of memory and of speed. Where machines have not said what
        they lend, their number counts."""
        parts = (
            (self.machines, whole.machines if not whole.memory_bytes else 0),
            (self.memory_bytes, whole.memory_bytes),
            (self.flops_per_s, whole.flops_per_s),
        )
        return max((part / all_of for part, all_of in parts if all_of), default=0.0)


NOTHING: Final = LentAmount()
MOST_MISSED: Final = 3
"""Turns that a job may let pass; then it loses its place (chosen). As many by all jobs of an owner within `LATE_S` make
them count as one class less urgent: otherwise an owner that asks and never starts would hold up the others for ever."""
LATE_S: Final = 3600.0
USED_S: Final = 86_400.0
"""For how long the machines that an owner's jobs had count when owners hold the same now."""


def holding(members: Iterable[Member]) -> LentAmount:
    found = tuple(members)
    return LentAmount(len(found), sum(one.memory_bytes for one in found), sum(one.flops_per_s for one in found))


@dataclass(frozen=True, slots=True)
class Line:
    """The queue as last arranged. `kept`: each free machine that is kept for a job, in its turn or until enough are
    free. `granted`: machines of the jobs whose turn has come."""

    jobs: tuple[JobId, ...] = ()
    kept: Mapping[PeerId, JobId] = field(default_factory=dict[PeerId, JobId])
    granted: Mapping[JobId, frozenset[PeerId]] = field(default_factory=dict[JobId, frozenset[PeerId]])


def held_by_owners(pool: Pool, turns: Mapping[JobId, Collection[PeerId]]) -> dict[PeerId, LentAmount]:
    """Return what the jobs of each owner's machine hold, with the machines of their turns."""
    held: dict[PeerId, list[Member]] = defaultdict(list)
    for member in pool.members.values():
        if member.job is not None:
            held[pool.machine_of(pool.jobs[member.job].owner)].append(member)
    for name, peers in turns.items():
        held[pool.machine_of(pool.jobs[name].owner)] += [pool.members[peer] for peer in peers]
    return {machine: holding(members) for machine, members in held.items()}


def whole_of(pool: Pool) -> LentAmount:
    return holding(one for one in pool.members.values() if one.phase in LENT)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What the queue is arranged by. `free`: members that may get work now. `turns`: machines kept for jobs whose turn
    has come before. `wall_s` is in seconds since 1970."""

    pool: Pool
    policy: QueuePolicy
    free: Mapping[PeerId, Member]
    turns: Mapping[JobId, frozenset[PeerId]]
    wall_s: float

    def order(self) -> tuple[JobId, ...]:
        """Return the queued jobs in the order in which they would get machines if these came free one after the
        other."""
        pool, whole, held = self.pool, whole_of(self.pool), held_by_owners(self.pool, self.turns)
        shares = {machine: share.share_of(whole) for machine, share in held.items()}
        owners: dict[PeerId, list[Job]] = defaultdict(list)
        for job in pool.queued_jobs():
            owners[pool.machine_of(job.owner)].append(job)
        heads: list[tuple[int, float, float, float, float, JobId, PeerId]] = []
        policy = self.policy
        lent = lent_to_others(pool.ledger, policy.person_of) if policy.lenders_first else dict[str, float]()
        served_s, used_s = self._past(whole)
        late = self._late()

        def push(machine: PeerId) -> None:
            if owners[machine]:
                job = owners[machine][-1]
                rank = self._rank(job, max(job.queued_at_s, served_s.get(machine, 0.0))) + late[machine] // MOST_MISSED
                used = used_s.get(machine, 0.0)
                lent_flops = lent.get(policy.person_of(machine), 0.0)
                share = shares.get(machine, 0.0)
                key = (rank, -lent_flops, share, used, job.queued_at_s, job.job, machine)
                heapq.heappush(heads, key)

        for machine, jobs in owners.items():
            jobs.sort(key=lambda job: (self.policy.rank(job.need.priority), job.queued_at_s, job.job), reverse=True)
            push(machine)
        found: list[JobId] = []
        while heads:
            *_, machine = heapq.heappop(heads)
            job = owners[machine].pop()
            found.append(job.job)
            if job.job not in self.turns:
                shares[machine] = shares.get(machine, 0.0) + self._share(job.need, whole)
            push(machine)
        return tuple(found)

    def arranged(self) -> Line:
        """Return the queue in order, with the machines kept for its jobs, and the turns that have come."""
        pool, order = self.pool, self.order()
        kept = {peer: name for name, peers in self.turns.items() for peer in peers}
        left = {peer: member for peer, member in self.free.items() if peer not in kept}
        held = held_by_owners(pool, self.turns)
        present = [one for one in pool.members.values() if one.phase in LENT]
        whole = holding(present)
        waiting = [pool.jobs[name] for name in order if name not in self.turns and pool.jobs[name].attended]
        granted: dict[JobId, frozenset[PeerId]] = {}
        for job in waiting:
            if not left:
                break
            need, machine = job.need, pool.machine_of(job.owner)
            quota, had = self.policy.quota_of(machine), held.get(machine, NOTHING)
            if not quota.allows(had + LentAmount(need.machines, need.memory_bytes)):
                continue
            usable = [one for one in left.values() if one.peer not in need.excluded]
            chosen = _chosen(usable, need, quota, had, all_of_them=len(waiting) == 1)
            if chosen:
                granted[job.job] = frozenset(one.peer for one in chosen)
                held[machine] = had + holding(chosen)
            elif not self._ever(need, present, whole):
                continue
            kept.update((one.peer, job.job) for one in chosen or usable)
            for one in chosen or usable:
                del left[one.peer]
        return Line(order, kept, granted)

    def in_the_way(self, line: Line) -> tuple[JobId, tuple[JobId, ...]] | None:
        """Return the first job of the arranged `line` that waits and need not, and the running jobs that must give way
        to it: of classes that do, and less urgent. As few as possible stop, the least urgent and then the youngest
        first; none if their machines would not suffice. Machines of jobs that are stopping already count as free."""
        pool, policy = self.pool, self.policy
        held = held_by_owners(pool, self.turns)
        present = [one for one in pool.members.values() if one.phase in LENT]
        whole = holding(present)
        for name in line.jobs:
            job = pool.jobs[name]
            need, machine = job.need, pool.machine_of(job.owner)
            if name in self.turns or name in line.granted or not job.attended or not self._ever(need, present, whole):
                continue
            asked = LentAmount(need.machines, need.memory_bytes)
            if not policy.quota_of(machine).allows(held.get(machine, NOTHING) + asked):
                continue
            if policy.gives_way(need.priority):
                continue
            free = holding(member for peer, member in self.free.items() if line.kept.get(peer) == name)
            stopping, running = self._coming_free(job)
            found = _fewest(need, free + sum(stopping, NOTHING), running)
            return (name, found) if found else None
        return None

    def _coming_free(self, waiting: Job) -> tuple[list[LentAmount], list[tuple[JobId, LentAmount]]]:
        """Return the machines that `waiting` could use of each job that stops, and of each that would have to give way
        to it, in the order in which they are asked."""
        policy, rank = self.policy, self.policy.rank
        held: dict[JobId, list[Member]] = defaultdict(list)
        for member in self.pool.members.values():
            if member.job is not None and member.phase == "active" and member.peer not in waiting.need.excluded:
                held[member.job].append(member)
        stopping: list[LentAmount] = []
        running: list[Job] = []
        for name, members in held.items():
            job = self.pool.jobs[name]
            if job.phase == "stopping":
                stopping.append(holding(members))
            elif policy.gives_way(job.need.priority) and rank(job.need.priority) > rank(waiting.need.priority):
                running.append(job)
        running.sort(key=lambda job: (-rank(job.need.priority), -job.requested_at_s, job.job))
        return stopping, [(job.job, holding(held[job.job])) for job in running]

    def _rank(self, job: Job, since_s: float) -> int:
        """Return the rank of an owner's first job: its class, and one less for each `age_s` that passed since."""
        waited_s = max(0.0, self.wall_s - since_s)
        return self.policy.rank(job.need.priority) - int(waited_s // self.policy.age_s)

    def _past(self, whole: LentAmount) -> tuple[dict[PeerId, float], dict[PeerId, float]]:
        """Return, by the owner's machine, when a job got machines last, and the dominant share that jobs held over the
        last day, times the seconds, those that run included. Jobs that the pool has forgotten don't count."""
        served_s: dict[PeerId, float] = defaultdict(float)
        memory_s: dict[PeerId, float] = defaultdict(float)
        speed_s: dict[PeerId, float] = defaultdict(float)
        running: dict[JobId, list[Member]] = defaultdict(list)
        for member in self.pool.members.values():
            if member.job is not None:
                running[member.job].append(member)
        day_ago_s = self.wall_s - USED_S
        for job in self.pool.jobs.values():
            if job.queued:
                continue
            machine = self.pool.machine_of(job.owner)
            served_s[machine] = max(served_s[machine], job.requested_at_s)
            end_s, held_bytes, held_flops_per_s = job.ended_at_s, job.held_bytes, job.held_flops_per_s
            if job.live:
                end_s = self.wall_s
                held_bytes = sum(one.memory_bytes for one in running[job.job])
                held_flops_per_s = sum(one.flops_per_s for one in running[job.job])
            lasted_s = max(0.0, end_s - max(job.requested_at_s, day_ago_s))
            memory_s[machine] += lasted_s * held_bytes
            speed_s[machine] += lasted_s * held_flops_per_s
        used_s = {
            machine: max(
                memory_s[machine] / whole.memory_bytes if whole.memory_bytes else 0.0,
                speed_s[machine] / whole.flops_per_s if whole.flops_per_s else 0.0,
            )
            for machine in memory_s
        }
        return served_s, used_s

    def _late(self) -> dict[PeerId, int]:
        """Return the number of turns that the jobs of each owner's machine have let pass lately."""
        late: dict[PeerId, int] = defaultdict(int)
        for job in self.pool.jobs.values():
            if job.missed and max(job.queued_at_s, job.ended_at_s) > self.wall_s - LATE_S:
                late[self.pool.machine_of(job.owner)] += job.missed
        return late

    @staticmethod
    def _share(need: Need, whole: LentAmount) -> float:
        """Return the share of the pool that a job would hold at least."""
        by_machines = need.machines / whole.machines if whole.machines else 0.0
        by_memory = need.memory_bytes / whole.memory_bytes if whole.memory_bytes else 0.0
        return max(by_machines, by_memory)

    @staticmethod
    def _ever(need: Need, present: list[Member], whole: LentAmount) -> bool:
        """Return whether all machines that are present would suffice."""
        if not need.excluded:
            return whole.meets(need)
        return holding(one for one in present if one.peer not in need.excluded).meets(need)


def _fewest(need: Need, free: LentAmount, running: list[tuple[JobId, LentAmount]]) -> tuple[JobId, ...]:
    """Return the first of `running` whose machines, with those that are `free`, meet the need, without those that are
    not needed; none if `free` is enough, or all are not."""
    taken: list[tuple[JobId, LentAmount]] = []
    for one in running:
        if sum((amount for _, amount in taken), free).meets(need):
            break
        taken.append(one)
    if not sum((amount for _, amount in taken), free).meets(need):
        return ()
    for one in tuple(taken):
        if sum((amount for other, amount in taken if other != one[0]), free).meets(need):
            taken.remove(one)
    return tuple(name for name, _ in taken)


def _chosen(
    usable: list[Member], need: Need, quota: Quota, held: LentAmount, *, all_of_them: bool
) -> tuple[Member, ...]:
    """Return the machines for a turn: the largest ones, as few as the need allows, or as many as the quota allows if
    no other job waits; none if they don't suffice."""
    if not holding(usable).meets(need):
        return ()
    by_size = sorted(usable, key=lambda one: (-one.memory_bytes, -one.flops_per_s, one.peer))
    for members in (by_size, by_size[::-1]):  # a quota may leave room for several small ones only
        chosen: list[Member] = []
        sum_of = NOTHING
        for member in members:
            more = sum_of + holding((member,))
            if not quota.allows(held + more):
                continue
            chosen.append(member)
            sum_of = more
            if more.meets(need) and not all_of_them:
                break
        if sum_of.meets(need):
            return tuple(chosen)
    return ()
