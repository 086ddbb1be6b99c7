"""A broker that takes endorsed machines alone: the others are told what to do, whatever they were before."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fusionai.broker.admission import LenderAdmission
from fusionai.broker.journal import Journal
from fusionai.broker.options import BrokerOptions
from fusionai.broker.service import BrokerService
from fusionai.coordination.broker import requests
from fusionai.coordination.broker.state import BrokerRules
from fusionai.primitives.errors import TrustError, UsageError
from fusionai.primitives.ids import PeerId
from fusionai.scheduling.problem.types import Certificate, PeerProfile, Plan, StagePlacement
from fusionai.transport.interface import Remote
from fusionai.transport.security.certificates import load_authority
from fusionai.transport.security.identity import peer_of, public_bytes
from fusionai.transport.security.trust import Revoked, Signer, TrustList, endorse, key_text, save_trust_list
from fusionai.wire.messages import Done, Heartbeat, JobRequest, Message, Refused, Register, Registered
from harness.virtual_clock import VirtualClock


def peer_from(seed: bytes) -> PeerId:
    return peer_of(public_bytes(Ed25519PrivateKey.from_private_bytes(seed * 32).public_key()))


KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
PUBLIC = public_bytes(KEY.public_key())
BROKER, OWNER, ADA, EVE = (peer_from(seed) for seed in (b"b", b"o", b"a", b"e"))


class Bench:
    def __init__(self, directory: Path, *, trusted: bool = True, trust_file: Path | None = None) -> None:
        self.clock = VirtualClock()
        self.options = BrokerOptions(
            home=directory,
            trusted_keys=frozenset({PUBLIC}) if trusted and trust_file is None else frozenset(),
            trust_file=trust_file,
        )
        self.journal = Journal.open(directory / "journal.sqlite", "home")
        self.service = BrokerService(
            rules=BrokerRules(pool="home", broker=BROKER),
            journal=self.journal,
            authority=load_authority(directory, "home", now_wall_s=self.clock.wall_s()),
            clock=self.clock,
            admission=LenderAdmission.by(self.options, self.clock),
        )

    def enrol(self, *peers: PeerId) -> None:
        for peer in peers:
            self.service._decide(requests.Invite(BROKER, peer, 1, 60.0))
            self.service._decide(requests.Enrol(peer, peer, "provider"))

    def says(self, peer: PeerId, message: Message) -> Message | None:
        return self.service.receive(Remote(peer, "member"), 1 if peer == ADA else 2, message).answer

    def endorsement(self, peer: PeerId, lifetime_s: int = 3600) -> bytes:
        return endorse(KEY, peer, name="", now_wall_s=self.clock.wall_s(), lifetime_s=lifetime_s, serial=bytes(16))


def registration(peer: PeerId, *endorsements: bytes) -> Register:
    profile = PeerProfile(peer=peer, flops_per_s=1e9, memory_bytes=10**9, endorsements=endorsements)
    return Register(boot=1, profile=msgspec.Raw(msgspec.msgpack.encode(profile)), addresses=("tcp://10.0.0.2:1",))


def untrusted(answer: Message | None) -> str:
    assert isinstance(answer, Refused), answer
    assert answer.code == "untrusted"
    return answer.reason


def test_endorsed_machines_are_taken_in_and_others_told_what_to_do(tmp_path: Path):
    bench = Bench(tmp_path)
    bench.enrol(ADA, EVE)
    assert isinstance(bench.says(ADA, registration(ADA, bench.endorsement(ADA))), Registered)
    for shown in ((), (bench.endorsement(ADA),), (b"x" * 100,)):
        reason = untrusted(bench.says(EVE, registration(EVE, *shown)))
        assert "fusion trust sign" in reason
        assert EVE in reason
    assert bench.service.state.pool.members[EVE].phase == "joining"
    bench.journal.close()


def test_who_was_there_before_and_whose_endorsement_expires_loses_its_lease(tmp_path: Path):
    before = Bench(tmp_path, trusted=False)
    before.enrol(ADA, EVE, OWNER)
    assert isinstance(before.says(EVE, registration(EVE)), Registered)
    assert isinstance(before.says(ADA, registration(ADA, before.endorsement(ADA, 100))), Registered)
    before.journal.close()
    bench = Bench(tmp_path)
    untrusted(bench.says(EVE, Heartbeat(boot=1)))
    bench.says(ADA, Heartbeat(boot=1))
    assert not isinstance(bench.says(ADA, Heartbeat(boot=1)), Refused)
    untrusted(bench.says(OWNER, JobRequest(job="job-1", title="", plan=plan_with(EVE))))
    bench.clock.advance(101.0)
    assert "expired" in untrusted(bench.says(ADA, Heartbeat(boot=1)))
    bench.journal.close()


def plan_with(peer: PeerId) -> msgspec.Raw:
    plan = Plan(
        graph_hash="g",
        stages=(StagePlacement(stage=0, peer=peer, blocks=(0, 1)),),
        feed=OWNER,
        microbatches=1,
        step_time_s=1.0,
        tokens_per_s=1.0,
        certificate=Certificate(method="test", exact=True, bound_tokens_per_s=1.0, optimality_gap=0.0),
    )
    return msgspec.Raw(msgspec.msgpack.encode(plan))


def test_a_trust_file_counts_with_its_revocations(tmp_path: Path):
    path = tmp_path / "trust.json"
    save_trust_list(path, TrustList(signers=(Signer(key_text(PUBLIC)),)))
    bench = Bench(tmp_path, trust_file=path)
    bench.enrol(ADA)
    assert isinstance(bench.says(ADA, registration(ADA, bench.endorsement(ADA))), Registered)
    save_trust_list(path, TrustList(signers=(Signer(key_text(PUBLIC)),), revoked=(Revoked(ADA, 0),)))
    assert "revoked" in untrusted(bench.says(ADA, Heartbeat(boot=1)))
    path.unlink()
    untrusted(bench.says(ADA, Heartbeat(boot=1)))
    bench.journal.close()


def test_what_is_wrong_with_the_trust_file_is_told_before_the_door_opens(tmp_path: Path):
    with pytest.raises(TrustError, match="there is no"):
        LenderAdmission.by(BrokerOptions(home=tmp_path, trust_file=tmp_path / "none"), VirtualClock())
    with pytest.raises(UsageError, match="got both"):
        LenderAdmission.by(
            BrokerOptions(home=tmp_path, trust_file=tmp_path / "none", trusted_keys=frozenset({PUBLIC})),
            VirtualClock(),
        )


def test_without_a_word_about_trust_every_member_may_lend(tmp_path: Path):
    bench = Bench(tmp_path, trusted=False)
    bench.enrol(EVE)
    assert isinstance(bench.says(EVE, registration(EVE)), Registered)
    assert not isinstance(bench.says(EVE, Heartbeat(boot=1)), Done)
    bench.journal.close()
