"""The desk and its journal under random histories: joins, leaves, losses, jobs with standbys, lies, restarts,
compaction.

After every step the journal gives the live pool, nobody is reserved twice, plan versions only grow, leases belong to
exactly those who are present, who drains gets nothing new, and who flaps rests as long as an independent count says.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fusionai.broker.journal import Journal
from fusionai.broker.service import remembered
from fusionai.coordination.broker import events, requests
from fusionai.coordination.broker.decisions import handle
from fusionai.coordination.broker.events import MemberPlacement
from fusionai.coordination.broker.pool import freeze
from fusionai.coordination.broker.requests import Answer, IssueTickets, Request
from fusionai.coordination.broker.state import PRESENT, BrokerRules, Decision, pool_view, recovered
from fusionai.primitives.ids import JobId, PeerId
from fusionai.wire.messages import Refused
from harness.examples import examples

pytestmark = pytest.mark.slow

BROKER = PeerId("y" * 52)
PEERS = [PeerId(letter * 52) for letter in "abcd"]
JOBS = [JobId("job-1"), JobId("job-2")]
RULES = BrokerRules(
    pool="home",
    broker=BROKER,
    unattended_s=30.0,
    max_members=4,
    losses_before_rest=2,
    loss_window_s=200.0,
    rest_s=100.0,
    clear_s=10.0,
)
WALL_S = 1_000_000.0

peers = st.sampled_from(PEERS)
jobs = st.sampled_from(JOBS)
boots = st.integers(1, 3)
connections = st.integers(1, 8)


def _refused(decision: Decision) -> bool:
    return any(isinstance(one, Answer) and isinstance(one.message, Refused) for one in decision.commands)


class BrokerHistory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        # In memory where there is a place for that: what is tested is order and content, not the disk.
        self.directory = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self.now_s = 0.0
        self.wall_s = WALL_S
        self.newest_version = 0
        self.losses: dict[str, list[float]] = {}
        self.draining: dict[PeerId, JobId | None] = {}
        self.granted: dict[int, tuple[MemberPlacement, ...]] = {}
        self.open()

    def open(self) -> None:
        self.journal = Journal.open(Path(self.directory.name) / "journal.sqlite", "home")
        assert self.journal.healed == ()
        self.sequence, pool = remembered(self.journal)
        self.desk = recovered(RULES, pool, self.now_s)

    def teardown(self) -> None:
        self.journal.close()
        self.directory.cleanup()

    def ask(self, request: Request) -> Decision:
        """As the broker's shell does it."""
        decision = handle(self.desk, request, now_s=self.now_s, wall_s=self.wall_s)
        if decision.facts:
            self.sequence = self.journal.append(self.sequence, decision.facts)
        self.desk = decision.desk
        for fact in decision.facts:
            if isinstance(fact, events.MemberLost):
                self.losses.setdefault(fact.peer, []).append(fact.at_s)
        for command in decision.commands:
            if isinstance(command, Answer) and isinstance(command.message, Refused):
                assert not decision.facts
        return decision

    @initialize()
    def somebody_is_there(self) -> None:
        for peer in PEERS[:3]:
            self.invite_and_join(peer)
            self.register(peer, 1, PEERS.index(peer) + 1)

    @rule(peer=peers)
    def invite_and_join(self, peer: PeerId) -> None:
        digest = f"token {self.sequence}"
        self.ask(requests.Invite(BROKER, digest, 1, 60.0))
        self.ask(requests.Enrol(digest, peer, "provider"))

    @rule(peer=peers, digest=st.sampled_from(["token 0", "guess"]))
    def join_with_whatever(self, peer: PeerId, digest: str) -> None:
        self.ask(requests.Enrol(digest, peer, "owner"))

    @rule(sender=peers, peer=peers)
    def vouch(self, sender: PeerId, peer: PeerId) -> None:
        self.ask(requests.Vouch(sender, peer, "owner"))

    @rule(peer=peers, boot=boots, connection=connections)
    def register(self, peer: PeerId, boot: int, connection: int) -> None:
        self.ask(requests.RegisterMember(peer, connection, boot, b"profile", ()))

    @rule(peer=peers, boot=boots, connection=connections, held=st.lists(jobs, max_size=2, unique=True))
    def beat(self, peer: PeerId, boot: int, connection: int, held: list[JobId]) -> None:
        member = self.desk.pool.members.get(peer)
        decision = self.ask(requests.Beat(peer, connection, boot, tuple(held)))
        if decision.facts:
            # Only a member whose job waited for it comes back by a mere sign of life, and into the same place.
            assert member is not None
            assert (member.phase, member.boot) == ("lost", boot)
            assert member.job is not None
            back = self.desk.pool.members[peer]
            assert (back.job, back.stages, back.standbys) == (member.job, member.stages, member.standbys)
        if peer in self.desk.leftovers and not _refused(decision):
            assert self.desk.leftovers[peer].job in held

    @rule()
    def the_lost_wake_up(self) -> None:
        for peer, member in self.desk.pool.members.items():
            if member.phase == "lost":
                self.beat(peer, member.boot, PEERS.index(peer) + 1, [])
                back = self.desk.pool.members[peer].phase
                assert back == ("lost" if member.job is None else "draining" if member.leaving else "active")

    @rule()
    def everybody_is_back(self) -> None:
        for peer, member in self.desk.pool.members.items():
            boot = member.boot if member.phase in PRESENT or member.phase == "lost" else member.boot + 1
            self.register(peer, boot, PEERS.index(peer) + 1)

    @rule(peer=peers, connection=connections, drain=st.booleans())
    def leave(self, peer: PeerId, connection: int, drain: bool) -> None:
        self.ask(requests.AskLeave(peer, connection, drain))

    @rule(
        owner=peers,
        connection=connections,
        job=jobs,
        chosen=st.lists(peers, min_size=1, max_size=4, unique=True),
        spares=st.integers(0, 2),
        version=st.sampled_from([0, 0, 0, 1, 2]),
    )
    def request_job(
        self, owner: PeerId, connection: int, job: JobId, chosen: list[PeerId], spares: int, version: int
    ) -> None:
        working = max(1, len(chosen) - spares)
        members = tuple(
            MemberPlacement(peer, (number,)) if number < working else MemberPlacement(peer, (), (number - working,))
            for number, peer in enumerate(chosen)
        )
        self.request(owner, connection, job, members, version)

    @rule(
        owner=peers,
        connection=connections,
        job=jobs,
        machines=st.integers(1, 4),
        excluded=st.lists(peers, max_size=2, unique=True),
        again=st.booleans(),
    )
    def wait_in_the_queue(
        self, owner: PeerId, connection: int, job: JobId, machines: int, excluded: list[PeerId], again: bool
    ) -> None:
        known = self.desk.pool.jobs.get(job)
        asker = owner if known is None or again else known.owner
        self.ask(requests.AskPlace(asker, connection, job, "t", 5, machines, 0, tuple(excluded), "", again))

    @rule()
    def take_a_turn(self) -> None:
        for job, turn in self.desk.turns.items():
            owner = self.desk.pool.jobs[job].owner
            self.request_job(owner, 9, job, sorted(turn.members), 0, 0)
            assert self.desk.pool.jobs[job].phase == "requested"
            break

    @rule(job=jobs, first=st.integers(0, 3), count=st.integers(1, 4), spares=st.integers(0, 2))
    def plan_with_those_who_are_there(self, job: JobId, first: int, count: int, spares: int) -> None:
        """Also with those who drain or rest: they are what the desk has to leave out."""
        pool = self.desk.pool
        there = [
            peer for peer, member in pool.members.items() if self.desk.reachable(member) and member.job in (None, job)
        ]
        chosen = (there[first:] + there[:first])[:count]
        if chosen:
            owner = pool.jobs[job].owner if job in pool.jobs else PEERS[0]
            self.request_job(owner, 9, job, chosen, spares, 0)

    @rule(job=jobs, first=st.integers(0, 3), count=st.integers(1, 3))
    def plan_after_everybody_is_back(self, job: JobId, first: int, count: int) -> None:
        self.everybody_is_back()
        self.plan_with_those_who_are_there(job, first, count, 1)

    @rule(job=jobs, state=st.sampled_from(["running", "running", "done"]))
    def its_owner_reports(self, job: JobId, state: Literal["running", "done"]) -> None:
        known = self.desk.pool.jobs.get(job)
        if known is not None:
            self.report(known.owner, 9, job, state, 1)

    @rule(peer=peers)
    def restart_process(self, peer: PeerId) -> None:
        member = self.desk.pool.members.get(peer)
        if member is not None:
            self.register(peer, member.boot + 1, PEERS.index(peer) + 1)

    def request(
        self, owner: PeerId, connection: int, job: JobId, members: tuple[MemberPlacement, ...], version: int
    ) -> None:
        plan = repr(members).encode()
        newest = self.desk.pool.newest_version
        before = self.desk.pool.members
        self.desk_before = self.desk
        decision = self.ask(requests.RequestJob(owner, connection, job, "t", 5, plan, version, members))
        for command in decision.commands:
            if isinstance(command, IssueTickets):
                minted = self.desk.pool.plans[command.version]
                assert minted.version == command.version
                # A version that was given out once always means the same plan.
                assert self.granted.setdefault(command.version, minted.members) == members
                if command.version > newest:
                    kept = self.desk_before.line.kept
                    growing = len(members) > sum(member.job == job for member in before.values())
                    for peer in (PeerId(member.peer) for member in members):
                        keeper = kept.get(peer, job)
                        in_turn = any(peer in turn.members for turn in self.desk_before.turns.values())
                        assert keeper == job or not (growing or in_turn)
                    for peer in (PeerId(member.peer) for member in members):
                        incumbent = before[peer].job == job
                        assert incumbent or (before[peer].phase == "idle" and not self.rests(peer))

    @rule(
        sender=peers,
        connection=connections,
        job=jobs,
        state=st.sampled_from(["starting", "running", "running", "stopping", "done", "failed"]),
        step=st.integers(-1, 5),
    )
    def report(
        self,
        sender: PeerId,
        connection: int,
        job: JobId,
        state: Literal["starting", "running", "stopping", "done", "failed"],
        step: int,
    ) -> None:
        self.ask(requests.ReportJob(sender, connection, job, state, step, ""))

    @rule(sender=st.sampled_from([BROKER, *PEERS]), job=jobs)
    def stop(self, sender: PeerId, job: JobId) -> None:
        self.ask(requests.StopJob(sender, job))

    @rule(connection=connections)
    def disconnect(self, connection: int) -> None:
        self.ask(requests.Disconnected(connection))
        assert connection not in self.desk.links.values()
        assert connection not in self.desk.drivers.values()

    @rule(seconds=st.sampled_from([3.0, 12.0, 30.0, 60.0]), silent=st.sets(peers, max_size=2))
    def wait(self, seconds: float, silent: set[PeerId]) -> None:
        """All but the silent ones go on with their heartbeats; drivers stay away or where they are."""
        for _ in range(int(seconds / RULES.heartbeat_s)):
            self.now_s += RULES.heartbeat_s
            self.wall_s += RULES.heartbeat_s
            for peer, member in self.desk.pool.members.items():
                if member.phase in PRESENT and peer not in silent:
                    self.ask(requests.Beat(peer, PEERS.index(peer) + 1, member.boot))
            self.ask(requests.DeadlinePassed())
        assert all(lease.expires_at_s > self.now_s for lease in self.desk.leases.values())
        assert all(wait.expires_at_s > self.now_s for wait in self.desk.waits.values())

    @rule()
    def stand_still(self) -> None:
        self.now_s += 100.0
        before = self.desk.pool
        self.ask(requests.Stalled())
        self.ask(requests.DeadlinePassed())
        assert self.desk.pool == before

    @rule(back_s=st.floats(0.0, 1000.0))
    def set_the_wall_clock_back(self, back_s: float) -> None:
        self.wall_s = max(WALL_S / 2, self.wall_s - back_s)

    @rule()
    def restart(self) -> None:
        before = self.desk.pool
        self.journal.close()
        self.now_s += 500.0
        self.open()
        assert self.desk.pool == before
        self.ask(requests.DeadlinePassed())
        assert self.desk.pool == before, "a restart grants everybody a lease of grace"

    @rule()
    def compact(self) -> None:
        self.journal.compact(freeze(self.desk.pool))
        assert not self.journal.load().facts

    def rests(self, peer: PeerId) -> bool:
        """Counted here from all losses ever, independently of what members remember."""
        losses = sorted(self.losses.get(peer, [])[-16:])
        recent = [lost_s for lost_s in losses if losses[-1] - lost_s <= RULES.loss_window_s]
        left_s = losses[-1] + RULES.rest_s - self.wall_s if losses else 0.0
        return len(recent) >= RULES.losses_before_rest and 0 < left_s <= RULES.rest_s

    @invariant()
    def the_journal_gives_the_live_pool(self) -> None:
        assert remembered(self.journal) == (self.sequence, self.desk.pool)

    @invariant()
    def who_flaps_rests_for_a_while(self) -> None:
        for peer, member in self.desk.pool.members.items():
            assert bool(self.desk.rest_left_s(member, self.wall_s)) == self.rests(peer)
        for view in pool_view(self.desk, self.now_s, self.wall_s).members:
            assert (view.state == "resting") == (view.rests_s > 0)
            assert view.state != "idle" or not self.rests(PeerId(view.peer))

    @invariant()
    def who_drains_gets_nothing_new(self) -> None:
        draining = {peer: member.job for peer, member in self.desk.pool.members.items() if member.phase == "draining"}
        for peer, job in draining.items():
            assert self.draining.get(peer, job) == job
        self.draining = draining

    @invariant()
    def nobody_is_reserved_twice_and_only_for_a_live_job(self) -> None:
        pool = self.desk.pool
        for job in pool.jobs.values():
            named = {PeerId(p.peer) for p in pool.plans[job.plan_version].members} if job.live else set()
            held = {member.peer for member in pool.members_of(job.job)}
            assert held <= named if job.live else not held
        for member in pool.members.values():
            assert (member.job is not None) == (member.stages != () or member.standbys != ())
            if member.phase in ("active", "draining"):
                assert member.job is not None
            elif member.phase != "lost":
                assert member.job is None

    @invariant()
    def versions_only_grow(self) -> None:
        pool = self.desk.pool
        assert pool.newest_version >= self.newest_version
        self.newest_version = pool.newest_version
        assert all(version <= pool.newest_version and plan.version == version for version, plan in pool.plans.items())
        current = [plan.job for plan in pool.plans.values()]
        assert sorted(current) == sorted(job.job for job in pool.jobs.values() if job.live)

    @invariant()
    def turns_are_of_queued_jobs_and_have_all_their_machines(self) -> None:
        pool, turns = self.desk.pool, self.desk.turns
        assert sum(len(turn.members) for turn in turns.values()) == len(
            {peer for turn in turns.values() for peer in turn.members}
        )
        for name, turn in turns.items():
            job = pool.jobs[name]
            assert job.queued
            assert job.attended
            assert len(turn.members) >= job.need.machines
            assert not turn.members & set(job.need.excluded)
            for peer in turn.members:
                assert self.desk.is_free(pool.members[peer], self.wall_s)
        if self.desk.arranged_of:  # not since a restart
            assert set(self.desk.line.jobs) == {job.job for job in pool.queued_jobs()}
        assert set(self.desk.line.kept.values()) <= {job.job for job in pool.queued_jobs()}

    @invariant()
    def leases_belong_to_those_present(self) -> None:
        present = {peer for peer, member in self.desk.pool.members.items() if member.phase in PRESENT}
        assert set(self.desk.leases) == present
        assert set(self.desk.links) <= present
        assert set(self.desk.leftovers) <= present

    @invariant()
    def every_live_job_has_a_driver_or_a_deadline(self) -> None:
        live = {job.job for job in self.desk.pool.jobs.values() if job.live or job.queued}
        assert set(self.desk.drivers) | set(self.desk.waits) == live
        assert not set(self.desk.drivers) & set(self.desk.waits)


BrokerHistory.TestCase.settings = settings(
    max_examples=examples(80),
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestBrokerHistory = BrokerHistory.TestCase
