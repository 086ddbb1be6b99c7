"""The pool's ledger under random histories of a job: steps, takeovers, steps taken back, disputes, faulty peers,
reports that get lost or come twice, owners that start anew, brokers that take over.

After every report that arrives, the ledger has exactly what the journal's committed steps say, by a count of its own.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from fusionai.broker.reading import work_report
from fusionai.client.pool.session import PoolSession
from fusionai.client.pool.work import StepWork, WorkReports, committed_work
from fusionai.coordination.broker import events, requests
from fusionai.coordination.broker.decisions import handle
from fusionai.coordination.broker.events import MemberPlacement
from fusionai.coordination.broker.ledger import LentWork
from fusionai.coordination.broker.pool import Pool, freeze, replay, thaw
from fusionai.coordination.broker.requests import Answer
from fusionai.coordination.broker.state import BrokerRules, recovered
from fusionai.ir.cost import BlockCost
from fusionai.primitives.errors import TransportError
from fusionai.primitives.ids import JobId, PeerId
from fusionai.storage.commits import CommitJournal, StagePlace
from fusionai.wire.messages import CommitRecord, Fence, Refused, WorkReport, WorkShare
from harness.examples import examples

pytestmark = pytest.mark.slow

BROKER, OWNER = PeerId("y" * 52), PeerId("o" * 52)
PEERS = [PeerId(letter * 52) for letter in "abcd"]
JOB = JobId("job-1")
RULES = BrokerRules(pool="home", broker=BROKER, lease_s=1e9, heartbeat_s=1e8, unattended_s=1e9)
STAGES = 2
TOKENS, MICROBATCHES = 8, 2
STEP_FLOPS = (6, 60)
"""Operations of one step in each stage: forward and backward of both microbatches."""
BLOCKS = tuple(
    BlockCost(
        block=number,
        forward_flops=flops / 6,
        backward_flops=flops / 3,
        parameter_bytes=0,
        trainable_bytes=0,
        activation_bytes=0,
        output_bytes=0,
        gradient_bytes=0,
    )
    for number, flops in enumerate(STEP_FLOPS)
)
Fate = Literal["arrives", "is lost", "is answered in vain"]


class LedgerHistory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self.desk = recovered(RULES, Pool(), 0.0)
        self.facts: list[events.Fact] = []
        self.now_s = 0.0
        self.earlier: dict[PeerId, tuple[int, int, float]] = {}
        """What counted of earlier runs of the job."""
        self.faulty: set[str] = set()
        self.ran: list[tuple[PeerId, ...]] = []
        """By committed step: the peer of each stage."""
        self.disputes: list[tuple[range, tuple[PeerId, ...]]] = []
        self.sent: list[WorkReport] = []
        self.fate: Fate = "arrives"
        self.refused: list[str] = []
        self.start()

    def teardown(self) -> None:
        self.journal.close()
        self.directory.cleanup()

    def start(self) -> None:
        """Start the owner's process."""
        self.journal = CommitJournal(Path(self.directory.name) / "journal.sqlite")
        incarnation = self.journal.start_incarnation()
        step = StepWork(OWNER, BLOCKS, MICROBATCHES, TOKENS)
        self.reports = WorkReports(
            cast("PoolSession", self),
            JOB,
            self.journal.run,
            incarnation,
            lambda: committed_work(step, self.journal.committed, self.journal.work, self.faulty),
            self.refused.append,
        )

    async def report_work(self, report: WorkReport) -> None:
        """The network between owner and broker."""
        self.sent.append(report)
        if self.fate != "is lost":
            self.deliver(report)
            assert self.sums() == self.expected()
        if self.fate != "arrives":
            raise TransportError("no answer")

    def deliver(self, report: WorkReport, sender: PeerId = OWNER) -> object:
        return self.ask(work_report(sender, report))

    def ask(self, request: requests.Request) -> object:
        decision = handle(self.desk, request, now_s=self.now_s, wall_s=self.now_s)
        self.desk = decision.desk
        self.facts += decision.facts
        return next((one.message for one in decision.commands if isinstance(one, Answer)), None)

    def sums(self) -> dict[PeerId, tuple[int, int, float]]:
        accounts = self.desk.pool.ledger.accounts
        found = {peer: accounts[peer].get(OWNER, LentWork()) for peer in accounts}
        return {peer: (lent.steps, lent.tokens, lent.flops) for peer, lent in found.items() if lent.steps or lent.flops}

    def expected(self) -> dict[PeerId, tuple[int, int, float]]:
        found = dict(self.earlier)
        for step, places in enumerate(self.ran):
            for peer in set(places) - self.faulty:
                if any(step in steps and peer in peers for steps, peers in self.disputes):
                    continue
                flops = sum(STEP_FLOPS[stage] for stage, runs in enumerate(places) if runs == peer)
                before = found.get(peer, (0, 0, 0.0))
                found[peer] = (before[0] + 1, before[1] + TOKENS * MICROBATCHES, before[2] + flops)
        return found

    @initialize()
    def begin(self) -> None:
        for connection, peer in enumerate((OWNER, *PEERS), start=1):
            self.ask(requests.Invite(BROKER, peer, 1, 60.0))
            self.ask(requests.Enrol(peer, peer, "provider"))
            if peer != OWNER:
                self.ask(requests.RegisterMember(peer, connection, 1, b"", (), 1, 1e9, 1e9))
        self.places: tuple[PeerId, ...] = ()
        self.plan(PEERS[:STAGES])

    def plan(self, peers: Sequence[PeerId]) -> None:
        stages = {peer: tuple(stage for stage in range(STAGES) if peers[stage] == peer) for peer in peers}
        members = tuple(MemberPlacement(peer, runs) for peer, runs in stages.items())
        self.ask(requests.RequestJob(OWNER, 1, JOB, "t", 5, repr(members).encode(), 0, members))
        self.places = tuple(peers)

    @rule(peers=st.lists(st.sampled_from(PEERS), min_size=STAGES, max_size=STAGES))
    def take_over(self, peers: list[PeerId]) -> None:
        if not self.faulty & set(peers):
            self.plan(peers)

    @rule(count=st.integers(1, 4))
    def commit(self, count: int) -> None:
        places = tuple(StagePlace(peer, stage, stage + 1) for stage, peer in enumerate(self.places))
        for _ in range(count if not self.faulty & set(self.places) else 0):
            self.now_s += 1.0
            record = CommitRecord(
                step=len(self.ran),
                scale=1.0,
                learning_rate=0.1,
                total_norm=1.0,
                norms_hash="",
                fence=Fence(1, 1, 0),
                loss=2.0,
            )
            self.journal.append(record, places)
            self.ran.append(self.places)

    @rule(back=st.integers(0, 5))
    def take_back(self, back: int) -> None:
        step = max(0, len(self.ran) - back)
        self.journal.take_back(step)
        del self.ran[step:]
        self.disputes = [one for one in self.disputes if one[0].stop <= step]

    @rule(length=st.integers(1, 4), peers=st.lists(st.sampled_from(PEERS), min_size=2, max_size=2, unique=True))
    def dispute(self, length: int, peers: list[PeerId]) -> None:
        below = len(self.ran)
        if length <= below:
            self.journal.dispute(below - length, below, tuple(peers))
            self.disputes.append((range(below - length, below), tuple(peers)))

    @rule(peer=st.sampled_from(PEERS), back=st.integers(0, 5))
    def find_faulty(self, peer: PeerId, back: int) -> None:
        honest = [one for one in PEERS if one not in self.faulty | {peer}]
        if honest:
            self.faulty.add(peer)
            self.take_back(back)
            self.plan([honest[0]] * STAGES)

    @rule(fate=st.sampled_from(["arrives", "arrives", "is lost", "is answered in vain"]))
    def report(self, fate: Fate) -> None:
        self.fate = fate
        asyncio.run(self.reports.close())
        assert not self.refused

    @rule(number=st.integers(0, 20))
    def an_earlier_report_comes_again(self, number: int) -> None:
        known = self.desk.pool.ledger.jobs[JOB]
        sent = [one for one in self.sent if one.run == known.run and one.sequence <= known.sequence]
        if sent:
            before = self.desk.pool
            self.deliver(sent[number % len(sent)])
            assert self.desk.pool == before

    @rule(sender=st.sampled_from([*PEERS, BROKER]), peer=st.sampled_from(PEERS))
    def a_member_claims_work(self, sender: PeerId, peer: PeerId) -> None:
        claim = WorkReport(
            job=JOB, run="mine", sequence=2**60, steps=100, tokens=1000, shares=(WorkShare(peer, 100, 1000, 1e6),)
        )
        before = self.desk.pool
        assert isinstance(self.deliver(claim, sender), Refused)
        assert self.desk.pool == before

    @rule(compacted=st.booleans())
    def another_broker_takes_over(self, compacted: bool) -> None:
        before = self.desk.pool
        pool = thaw(freeze(before)) if compacted else replay(self.facts)
        assert pool == before
        self.desk = recovered(RULES, pool, self.now_s)
        for connection, peer in enumerate(PEERS, start=2):
            self.ask(requests.RegisterMember(peer, connection, 1, b"", (), 1, 1e9, 1e9))

    @rule()
    def the_owner_starts_anew(self) -> None:
        self.journal.close()
        self.start()

    @rule()
    def the_directory_is_deleted(self) -> None:
        """And the same job begins again in it."""
        self.journal.close()
        for file in Path(self.directory.name).iterdir():
            file.unlink()
        self.earlier, self.ran, self.disputes = self.sums(), [], []
        self.faulty.clear()
        self.start()

    @rule()
    def everything_arrives(self) -> None:
        self.report("arrives")
        assert self.sums() == self.expected()
        for peer in map(PeerId, self.faulty):
            assert self.sums().get(peer) == self.earlier.get(peer), "a lie earns nothing"
        work = self.desk.pool.ledger.jobs[JOB]
        if work.sequence:
            assert (work.steps, work.tokens) == (len(self.ran), len(self.ran) * TOKENS * MICROBATCHES)


LedgerHistory.TestCase.settings = settings(
    max_examples=examples(150),
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLedgerHistory = LedgerHistory.TestCase
