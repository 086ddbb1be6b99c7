"""The broker's answer to a question for the ledger: what it says, with which names, signed by the pool's authority."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fusionai.broker import lent
from fusionai.broker.engines.interface import JournalInDoubt
from fusionai.broker.journal import Journal
from fusionai.broker.reading import fastest_flops_per_s
from fusionai.broker.server import BrokerServer
from fusionai.broker.service import BrokerService
from fusionai.coordination.broker.events import Fact
from fusionai.coordination.broker.job_queue import QueuePolicy
from fusionai.coordination.broker.state import BrokerRules
from fusionai.primitives.errors import StorageError, TrustError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.pace import ServingSpeed, TrainingSpeed
from fusionai.scheduling.problem.types import Certificate, PeerProfile, Plan, StagePlacement
from fusionai.transport.enrolment import parse_invitation
from fusionai.transport.interface import Remote
from fusionai.transport.security.certificates import load_authority
from fusionai.transport.security.identity import peer_of, public_bytes
from fusionai.transport.security.ledger import LedgerContent, LedgerEntry, LedgerMachine, verify_ledger
from fusionai.wire import messages as wire
from harness.virtual_clock import VirtualClock

KEYS = [public_bytes(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32).public_key()) for number in range(3)]
BROKER, OWNER, A = map(peer_of, KEYS)
POLICY = QueuePolicy(people={A: "ada"})


class UnsureJournal(Journal):
    """Writes, and says that it does not know whether it has."""

    is_unsure = False

    def append(self, expected_sequence: int, facts: Sequence[Fact]) -> int:
        sequence = super().append(expected_sequence, facts)
        if self.is_unsure:
            raise JournalInDoubt("no answer")
        return sequence


class Broker:
    """A broker in which the owner's job has machine A, and knows it by the name `attic`."""

    def __init__(self, directory: Path) -> None:
        self.clock = VirtualClock()
        self.copied_bytes = 0
        self.authority = load_authority(directory, "home", now_wall_s=self.clock.wall_s())
        self.journal = UnsureJournal.open(directory / "journal.sqlite", "home")
        self.service = BrokerService(
            rules=BrokerRules(pool="home", broker=BROKER, queue=POLICY),
            journal=self.journal,
            authority=self.authority,
            clock=self.clock,
        )
        self.service.addresses = ("memory://broker:1",)
        self.service.relayed.copied_bytes = lambda: self.copied_bytes
        for peer, key in ((OWNER, KEYS[1]), (A, KEYS[2])):
            token = parse_invitation(self.service.invite(uses=1, lifetime_s=60.0)).token
            self.ask(None, wire.JoinRequest(token=token, public_key=key, purpose="provider"))
            assert self.service.state.knows(peer)
        profile = PeerProfile(peer=A, name="attic", flops_per_s=100.0, memory_bytes=10**9)
        self.ask(A, wire.Register(boot=1, profile=msgspec.Raw(msgspec.msgpack.encode(profile)), addresses=()))
        plan = Plan(
            graph_hash="g",
            stages=(StagePlacement(stage=0, peer=A, blocks=(0, 1)),),
            feed=OWNER,
            microbatches=1,
            step_time_s=1.0,
            tokens_per_s=1.0,
            certificate=Certificate(method="test", exact=True, bound_tokens_per_s=1.0, optimality_gap=0.0),
        )
        raw = msgspec.Raw(msgspec.msgpack.encode(plan))
        assert isinstance(self.ask(OWNER, wire.JobRequest(job="job-1", title="t", plan=raw)), wire.JobGranted)

    def ask(self, peer: PeerId | None, message: wire.Message) -> wire.Message | None:
        remote = Remote(peer, "stranger" if peer is None else "member")
        return self.service.receive(remote, [None, OWNER, A].index(peer) + 1, message).answer

    def ledger(self) -> LedgerContent:
        answer = self.ask(A, wire.LedgerQuery())
        assert isinstance(answer, wire.LedgerView)
        return verify_ledger(answer.signed, self.authority.public_key)


@pytest.fixture
def broker(tmp_path: Path):
    opened = Broker(tmp_path)
    yield opened
    opened.journal.close()


def test_any_member_gets_sums_with_names_and_persons(broker: Broker):
    broker.clock.advance(10.0)
    report = wire.WorkReport(job="job-1", sequence=1, steps=3, tokens=30, shares=(wire.WorkShare(A, 3, 30, 300.0),))
    assert broker.ask(OWNER, report) == wire.Done()
    assert broker.ledger() == LedgerContent(
        1,
        "home",
        broker.clock.wall_s(),
        (LedgerMachine(A, "attic", "ada"), LedgerMachine(OWNER)),
        (LedgerEntry(A, OWNER, 10.0, 3, 30, 300.0, 0, 0, 0.0),),
    )
    assert isinstance(broker.ask(None, wire.LedgerQuery()), wire.Refused), "strangers get nothing"


def test_a_changed_ledger_is_refused(broker: Broker):
    answer = broker.ask(A, wire.LedgerQuery())
    assert isinstance(answer, wire.LedgerView)
    changed = bytes([*answer.signed[:-1], answer.signed[-1] ^ 1])
    with pytest.raises(TrustError, match="expected a ledger signed by this pool's authority"):
        verify_ledger(changed, broker.authority.public_key)


def test_a_ledger_that_does_not_fit_is_refused_with_its_size(broker: Broker, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lent.wire, "MAX_LEDGER_BYTES", 10)
    answer = broker.ask(A, wire.LedgerQuery())
    assert isinstance(answer, wire.Refused)
    assert "do not fit into one answer" in answer.reason


def test_what_the_relay_copied_counts_once_also_if_the_journal_is_unsure(broker: Broker):
    server = BrokerServer.__new__(BrokerServer)  # its connections need an event loop, and there are none
    server.service = broker.service
    server._dispatch = lambda outcome: None  # pyright: ignore[reportAttributeAccessIssue]
    broker.copied_bytes = 7
    assert LedgerMachine(BROKER, "", "", 7) in broker.ledger().machines
    server.note_relayed_now()
    assert broker.service.state.pool.ledger.relayed_bytes == {BROKER: 7}
    broker.copied_bytes = 12
    broker.journal.is_unsure = True
    server.note_relayed_now()
    broker.journal.is_unsure = False
    with pytest.raises(StorageError):
        broker.service.note_relayed()
    broker.service.settle(written=True)
    server.note_relayed_now()
    assert LedgerMachine(BROKER, "", "", 12) in broker.ledger().machines
    assert broker.service.state.pool.ledger.relayed_bytes == {BROKER: 12}


def test_the_fastest_speed_is_the_highest_that_was_measured():
    profile = PeerProfile(peer=A, flops_per_s=10.0, memory_bytes=1, share=0.5)
    assert fastest_flops_per_s(profile) == 5.0
    paced = msgspec.structs.replace(profile, pace=TrainingSpeed(flops_per_s=20.0, half_flops_per_s=80.0))
    assert fastest_flops_per_s(paced) == 40.0
    serving = (ServingSpeed(form="int8", flops_per_s=100.0, bytes_per_s=1.0),)
    assert fastest_flops_per_s(msgspec.structs.replace(paced, serving=serving)) == 50.0


def test_the_relay_is_noted_at_intervals(broker: Broker, monkeypatch: pytest.MonkeyPatch):
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) > 1:
            raise asyncio.CancelledError

    async def noted() -> None:
        await BrokerServer(broker.service, broker.clock).note_relayed()

    broker.copied_bytes = 5
    monkeypatch.setattr("fusionai.broker.server.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(noted())
    assert pauses == [600.0, 600.0]
    assert broker.service.state.pool.ledger.relayed_bytes == {BROKER: 5}


@pytest.mark.parametrize("speed", [math.nan, math.inf, -1.0])
def test_a_speed_that_is_no_number_counts_as_none(speed: float):
    profile = PeerProfile(peer=A, flops_per_s=speed, memory_bytes=1)
    assert fastest_flops_per_s(profile) == 0.0
    assert fastest_flops_per_s(msgspec.structs.replace(profile, flops_per_s=1.0, share=speed)) == 0.0
    paced = msgspec.structs.replace(profile, pace=TrainingSpeed(flops_per_s=20.0))
    assert fastest_flops_per_s(paced) == 20.0
