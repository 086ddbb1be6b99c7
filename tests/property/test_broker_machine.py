"""The desk and its journal under random histories: joins, leaves, losses, jobs, lies, restarts, a failing disk.

After every step the journal replayed equals the live pool, nobody is reserved twice, plan versions only grow, and
leases belong to exactly those who are present.
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
from fusionai.coordination import requests
from fusionai.coordination.decisions import handle
from fusionai.coordination.desk import PRESENT, Decision, DeskRules, recovered
from fusionai.coordination.events import Placement
from fusionai.coordination.pool import replay
from fusionai.coordination.requests import Answer, IssueTickets, Request
from fusionai.primitives.ids import JobId, PeerId
from fusionai.wire.messages import Refused

pytestmark = pytest.mark.slow

BROKER = PeerId("y" * 52)
PEERS = [PeerId(letter * 52) for letter in "abcd"]
JOBS = [JobId("job-1"), JobId("job-2")]
RULES = DeskRules(pool="home", broker=BROKER, unattended_s=30.0, max_members=4)
WALL_S = 1_000_000.0

peers = st.sampled_from(PEERS)
jobs = st.sampled_from(JOBS)
boots = st.integers(1, 3)
connections = st.integers(1, 8)


class BrokerHistory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.now_s = 0.0
        self.wall_s = WALL_S
        self.versions: list[int] = []
        self.granted: dict[int, tuple[Placement, ...]] = {}
        self.open()

    def open(self) -> None:
        self.journal = Journal.open(Path(self.directory.name) / "journal.sqlite", "home")
        # What is tested is order and content, not the disk: this makes thousands of steps affordable.
        self.journal._connection.execute("PRAGMA synchronous=OFF")
        self.sequence, facts = self.journal.load()
        self.desk = recovered(RULES, replay(facts), self.now_s)

    def teardown(self) -> None:
        self.journal.close()
        self.directory.cleanup()

    def ask(self, request: Request) -> Decision:
        """As the broker's shell does it."""
        decision = handle(self.desk, request, now_s=self.now_s, wall_s=self.wall_s)
        if decision.facts:
            self.sequence = self.journal.append(self.sequence, decision.facts)
        self.desk = decision.desk
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
        self.ask(requests.Register(peer, connection, boot, b"profile", ()))

    @rule(peer=peers, boot=boots, connection=connections)
    def beat(self, peer: PeerId, boot: int, connection: int) -> None:
        assert not self.ask(requests.Beat(peer, connection, boot)).facts

    @rule()
    def everybody_beats(self) -> None:
        for peer, member in self.desk.pool.members.items():
            if member.phase in PRESENT:
                self.ask(requests.Beat(peer, PEERS.index(peer) + 1, member.boot))

    @rule(peer=peers, connection=connections, drain=st.booleans())
    def leave(self, peer: PeerId, connection: int, drain: bool) -> None:
        self.ask(requests.AskLeave(peer, connection, drain))

    @rule(
        owner=peers,
        connection=connections,
        job=jobs,
        chosen=st.lists(peers, min_size=1, max_size=3, unique=True),
        version=st.sampled_from([0, 0, 0, 1, 2]),
    )
    def request_job(self, owner: PeerId, connection: int, job: JobId, chosen: list[PeerId], version: int) -> None:
        members = tuple(Placement(peer, (stage,)) for stage, peer in enumerate(chosen))
        plan = repr(chosen).encode()
        decision = self.ask(requests.RequestJob(owner, connection, job, "t", 5, plan, version, members))
        for command in decision.commands:
            if isinstance(command, IssueTickets):
                minted = self.desk.pool.plans[command.version]
                assert minted.phase == "current"
                # A version that was given out once always means the same plan.
                assert self.granted.setdefault(command.version, minted.members) == members

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

    @rule(seconds=st.sampled_from([1.0, 4.0, 12.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.wall_s += seconds
        self.ask(requests.Tick())
        assert all(lease.expires_at_s > self.now_s for lease in self.desk.leases.values())
        assert all(wait.expires_at_s > self.now_s for wait in self.desk.waits.values())

    @rule()
    def stand_still(self) -> None:
        self.now_s += 100.0
        before = self.desk.pool
        self.ask(requests.Stalled())
        self.ask(requests.Tick())
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
        self.ask(requests.Tick())
        assert self.desk.pool == before, "a restart grants everybody a lease of grace"

    @invariant()
    def the_journal_replayed_is_the_live_pool(self) -> None:
        sequence, facts = self.journal.load()
        assert sequence == self.sequence == len(facts)
        assert replay(facts) == self.desk.pool

    @invariant()
    def nobody_is_reserved_twice_and_only_for_a_live_job(self) -> None:
        pool = self.desk.pool
        for job in pool.jobs.values():
            named = {PeerId(p.peer) for p in pool.plans[job.plan_version].members} if job.plan_version else set()
            held = {member.peer for member in pool.members_of(job.job)}
            assert held <= named if job.live else not held
        for member in pool.members.values():
            assert (member.job is not None) == (member.stages != ())
            if member.phase in ("active", "draining"):
                assert member.job is not None
            elif member.phase != "lost":
                assert member.job is None

    @invariant()
    def versions_only_grow(self) -> None:
        pool = self.desk.pool
        assert sorted(pool.plans) == list(range(1, pool.newest_version + 1))
        assert not self.versions or pool.newest_version >= self.versions[-1]
        self.versions.append(pool.newest_version)
        current = [plan.job for plan in pool.plans.values() if plan.phase == "current"]
        assert sorted(current) == sorted(job.job for job in pool.jobs.values() if job.live)

    @invariant()
    def leases_belong_to_those_present(self) -> None:
        present = {peer for peer, member in self.desk.pool.members.items() if member.phase in PRESENT}
        assert set(self.desk.leases) == present
        assert set(self.desk.links) <= present

    @invariant()
    def every_live_job_has_a_driver_or_a_deadline(self) -> None:
        live = {job.job for job in self.desk.pool.jobs.values() if job.live}
        assert set(self.desk.drivers) | set(self.desk.waits) == live
        assert not set(self.desk.drivers) & set(self.desk.waits)


BrokerHistory.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestBrokerHistory = BrokerHistory.TestCase
