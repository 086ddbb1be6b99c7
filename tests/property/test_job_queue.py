"""The queue under random owners, needs, machines and losses, and over a day of simulated work.

A turn has all the machines that a job needs, or none; a machine is in one turn at most; no quota is passed; every job
is reached in the end; owners with work left hold equal shares; jobs that give way do so for more urgent ones alone,
which then get their machines, and go on later."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusionai.coordination.broker import requests
from fusionai.coordination.broker.decisions import handle
from fusionai.coordination.broker.events import MemberPlacement
from fusionai.coordination.broker.job_queue import QueuePolicy, Quota
from fusionai.coordination.broker.pool import Pool
from fusionai.coordination.broker.requests import Answer, IssueTickets, Notify
from fusionai.coordination.broker.state import BrokerRules, BrokerState, recovered
from fusionai.primitives.ids import JobId, PeerId
from fusionai.wire.messages import QueuePlace, Refused, StopNotice
from harness.examples import examples

pytestmark = pytest.mark.slow

BROKER = PeerId("y" * 52)
GB = 10**9
WALL_S = 1_000_000.0
DAY_S = 86_400.0


@dataclass(frozen=True)
class Work:
    """A job to be done: what it needs, and how long it runs once it has machines."""

    owner: PeerId
    machines: int
    memory_gb: int = 0
    runs_s: float = 600.0
    priority: str = ""
    excluded: tuple[PeerId, ...] = ()


@dataclass
class Simulated:
    """A pool with a virtual clock: owners ask, take their turns at once, and their jobs end when they are done."""

    sizes_gb: Mapping[PeerId, int]
    owners: tuple[PeerId, ...]
    policy: QueuePolicy = field(default_factory=QueuePolicy)
    now_s: float = 0.0
    works: dict[JobId, Work] = field(default_factory=dict[JobId, Work])
    ends: dict[JobId, float] = field(default_factory=dict[JobId, float])
    began: dict[JobId, float] = field(default_factory=dict[JobId, float])
    held_gb_s: dict[PeerId, float] = field(default_factory=lambda: defaultdict(float))
    gave_way: list[tuple[JobId, JobId]] = field(default_factory=list[tuple[JobId, JobId]])

    def __post_init__(self) -> None:
        rules = BrokerRules(pool="home", broker=BROKER, queue=self.policy, lease_s=1e9, unattended_s=1e9)
        self.desk: BrokerState = recovered(rules, Pool(), 0.0)
        for peer in (*self.owners, *self.sizes_gb):
            self.ask(requests.Invite(BROKER, peer, 1, 60.0))
            self.ask(requests.Enrol(peer, peer, "provider"))
        for number, (peer, size_gb) in enumerate(self.sizes_gb.items()):
            self.ask(requests.RegisterMember(peer, number, 1, b"", (), size_gb * GB, size_gb * 1e9))

    def ask(self, request: requests.Request) -> list[Any]:
        decision = handle(self.desk, request, now_s=self.now_s, wall_s=WALL_S + self.now_s)
        self.desk = decision.desk
        self.check()
        notices = [one.message for one in decision.commands if isinstance(one, Notify)]
        self.gave_way += [(JobId(one.job), JobId(one.gives_way_to)) for one in notices if isinstance(one, StopNotice)]
        return [one.message if isinstance(one, Answer) else one for one in decision.commands]

    def check(self) -> None:
        """What holds after every decision."""
        pool, taken = self.desk.pool, set[PeerId]()
        for name, turn in self.desk.turns.items():
            job = pool.jobs[name]
            assert job.queued
            assert not taken & turn.members
            taken |= turn.members
            assert all(pool.members[peer].phase == "idle" for peer in turn.members)
            assert all(self.desk.line.kept[peer] == name for peer in turn.members)
            assert not turn.members & set(job.need.excluded)
            assert len(turn.members) >= job.need.machines
            assert sum(pool.members[peer].memory_bytes for peer in turn.members) >= job.need.memory_bytes
        for owner in self.owners:
            held = [
                member
                for member in pool.members.values()
                if (member.job is not None and pool.jobs[member.job].owner == owner)
                or any(
                    member.peer in turn.members and pool.jobs[name].owner == owner
                    for name, turn in self.desk.turns.items()
                )
            ]
            quota = self.policy.quota_of(owner)
            assert quota.machines is None or len(held) <= quota.machines
            memory_bytes = sum(member.memory_bytes for member in held)
            assert quota.memory_bytes is None or memory_bytes <= quota.memory_bytes

    def place(self, name: JobId) -> QueuePlace | Refused:
        work = self.works[name]
        found, *_ = self.ask(
            requests.AskPlace(
                work.owner, 10_000, name, "t", 1, work.machines, work.memory_gb * GB, work.excluded, work.priority
            )
        )
        return found

    def submit(self, name: str, work: Work) -> None:
        self.works[JobId(name)] = work
        self.place(JobId(name))

    def take_turns(self) -> None:
        """Every job whose turn it is starts on all the machines of its turn."""
        while self.desk.turns:
            for name, turn in self.desk.turns.items():
                placed = tuple(MemberPlacement(peer, (stage,)) for stage, peer in enumerate(sorted(turn.members)))
                work = self.works[name]
                request = requests.RequestJob(work.owner, 10_000, name, "t", 1, b"plan", 0, placed)
                (*_, granted) = self.ask(request)
                assert isinstance(granted, IssueTickets), granted
                self.began[name], self.ends[name] = self.now_s, self.now_s + work.runs_s
        self.give_way()

    def give_way(self) -> None:
        """Every job that was asked to gives way at once, asks for a place again, and has the rest left to do."""
        while self.gave_way:
            asked, self.gave_way = self.gave_way, []
            waiting = {name for _, name in asked}
            assert len(waiting) == 1
            (urgent,) = waiting
            policy, work = self.policy, self.works
            for name, _ in asked:
                assert policy.gives_way(work[name].priority)
                assert policy.rank(work[name].priority) > policy.rank(work[urgent].priority)
                left_s = self.ends.pop(name) - self.now_s
                work[name] = replace(work[name], runs_s=left_s)
                self.ask(requests.ReportJob(work[name].owner, 10_000, name, "done", 1, ""))
            assert urgent in self.desk.turns, "its machines came free"
            for name, _ in asked:
                self.place(name)
            self.take_turns()

    def advance(self) -> None:
        """To the next end of a job."""
        name = min(self.ends, key=lambda name: (self.ends[name], name))
        end_s, pool = self.ends.pop(name), self.desk.pool
        for member in pool.members.values():
            if member.job is not None:
                owner = pool.jobs[member.job].owner
                self.held_gb_s[owner] += (end_s - self.now_s) * member.memory_bytes / GB
        self.now_s = end_s
        self.ask(requests.ReportJob(self.works[name].owner, 10_000, name, "done", 1, ""))


OWNERS = tuple(PeerId(letter * 52) for letter in "mno")
MACHINES = tuple(PeerId(letter * 52) for letter in "abcdef")

works = st.builds(
    Work,
    owner=st.sampled_from(OWNERS),
    machines=st.integers(1, 6),
    memory_gb=st.integers(0, 24),
    runs_s=st.sampled_from([10.0, 60.0, 600.0]),
    priority=st.sampled_from(["", "", "low", "idle"]),
    excluded=st.lists(st.sampled_from(MACHINES), max_size=2, unique=True).map(tuple),
)
sizes = st.lists(st.integers(1, 8), min_size=6, max_size=6).map(lambda found: dict(zip(MACHINES, found, strict=True)))
quotas = st.one_of(
    st.just(Quota()),
    st.builds(
        Quota, machines=st.integers(1, 6), memory_bytes=st.one_of(st.none(), st.integers(4, 30).map(lambda gb: gb * GB))
    ),
)
SETTINGS = settings(
    max_examples=examples(60), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


@SETTINGS
@given(sizes, st.lists(works, min_size=1, max_size=14), quotas)
def test_every_job_that_the_pool_suffices_for_gets_all_its_machines_in_the_end(
    sizes_gb: dict[PeerId, int], found: list[Work], quota: Quota
):
    pool = Simulated(sizes_gb, OWNERS, QueuePolicy(quota=quota))
    waiting = set[JobId]()
    for number, work in enumerate(found):
        name = f"job-{number}"
        pool.submit(name, work)
        pool.take_turns()
        if JobId(name) in pool.desk.pool.jobs and _can_run(pool, work, quota):
            waiting.add(JobId(name))
    while pool.ends:
        pool.advance()
        pool.take_turns()
    assert waiting <= set(pool.began)
    queued = {job.job for job in pool.desk.pool.queued_jobs()}
    assert not queued & waiting


def _can_run(pool: Simulated, work: Work, quota: Quota) -> bool:
    """Whether an otherwise idle pool has machines for it. With a quota on memory only where the smallest ones fit:
    which machines fit into a quota best is not searched for."""
    usable = sorted(size for peer, size in pool.sizes_gb.items() if peer not in work.excluded)
    if quota.memory_bytes is not None:
        least = usable[: max(work.machines, 0)]
        return (
            len(least) == work.machines
            and sum(least) >= work.memory_gb
            and sum(least) * GB <= quota.memory_bytes
            and (quota.machines is None or work.machines <= quota.machines)
        )
    most = usable[::-1][: quota.machines]
    return len(most) >= work.machines and sum(most) >= work.memory_gb


@settings(SETTINGS, max_examples=examples(3))
@given(st.integers(0, 2**32), st.integers(2, 3), st.booleans())
def test_owners_with_work_left_have_equal_shares_over_a_day(seed: int, owners: int, unequal: bool):
    """Each owner has more work than fits into the day; jobs differ in length and, between owners, in size."""
    names = OWNERS[:owners]
    pool = Simulated({PeerId(f"{number:02}" * 26): 4 for number in range(24)}, names)
    numbers = dict.fromkeys(names, 0)

    def more(owner: PeerId) -> None:
        numbers[owner] += 1
        of = names.index(owner)
        length_s = 1800.0 + (seed // (of + 1) + 1977 * numbers[owner]) % 5400
        pool.submit(f"job-{of}-{numbers[owner]}", Work(owner, 1 + (of if unequal else 0), runs_s=length_s))

    for _ in range(24):
        for owner in names:
            more(owner)
    pool.take_turns()
    while pool.now_s < DAY_S:
        before = set(pool.began)
        pool.advance()
        pool.take_turns()
        for name in set(pool.began) - before:
            more(pool.works[name].owner)
    total = sum(pool.held_gb_s.values())
    for owner in names:
        assert abs(pool.held_gb_s[owner] / total - 1 / owners) < 0.05


def test_a_flood_of_jobs_does_not_hold_up_another_owner():
    pool = Simulated(dict.fromkeys(MACHINES, 4), OWNERS)
    for number in range(100):
        pool.submit(f"flood-{number}", Work(OWNERS[0], 6, runs_s=3600.0))
    pool.take_turns()
    for _ in range(40):
        pool.advance()
        pool.take_turns()
    pool.submit("late", Work(OWNERS[1], 6))
    pool.advance()
    pool.take_turns()
    assert JobId("late") in pool.began


def test_a_low_class_is_reached_although_a_higher_one_never_ends():
    pool = Simulated(dict.fromkeys(MACHINES, 4), OWNERS, replace(QueuePolicy(), age_s=3600.0))
    pool.submit("first", Work(OWNERS[0], 6, runs_s=600.0))
    pool.take_turns()
    pool.submit("low", Work(OWNERS[1], 6, priority="low"))
    for number in range(30):
        pool.submit(f"job-{number}", Work(OWNERS[number % 2 * 2], 6, runs_s=600.0))
        pool.advance()
        pool.take_turns()
    assert JobId("low") in pool.began
