"""The live pool as the planner gets it: who is there, and who is a member but can't be planned with."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fusionai.cli.pool import session
from fusionai.client.pool.session import PoolMember
from fusionai.primitives.errors import TransportError, UsageError
from fusionai.primitives.ids import PeerId
from fusionai.scheduling.problem.types import PeerProfile
from fusionai.transport.security.identity import peer_of, public_bytes
from fusionai.transport.security.trust import Signer, TrustList, endorse, key_text, save_trust_list
from fusionai.wire.messages import MemberView


def member(name: str, state: str) -> PoolMember:
    profile = PeerProfile(peer=name[0] * 52, name=name, flops_per_s=1e9, memory_bytes=2**30)
    raw = msgspec.Raw(msgspec.msgpack.encode(profile))
    return PoolMember(MemberView(peer=profile.peer, state=state, boot=1, addresses=(), profile=raw), profile)


OWNER = PeerProfile(peer="o" * 52, name="this machine", flops_per_s=1e9, memory_bytes=2**30, roles=("owner",))


def pool_of(monkeypatch: pytest.MonkeyPatch, *members: PoolMember) -> None:
    monkeypatch.setattr(session, "in_pool", lambda home, ask: members)
    key = Ed25519PrivateKey.from_private_bytes(b"o" * 32)
    known = SimpleNamespace(peer=OWNER.peer, credentials=SimpleNamespace(identity=SimpleNamespace(key=key)))
    monkeypatch.setattr(session, "any_membership", lambda home: known)
    monkeypatch.setattr(session, "this_machine", lambda peer: msgspec.structs.replace(OWNER, peer=peer))


def test_who_is_there_is_planned_with_and_the_others_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pool_of(
        monkeypatch,
        member("attic", "idle"),
        member("barn", "active"),
        member("cellar", "lost"),
        member("den", "silent"),
        member("eaves", "draining"),
        member("flat", "resting"),
    )
    found = session.pool_profiles(tmp_path)
    assert [peer.name for peer in found.peers] == ["attic", "barn"]
    assert found.owner == OWNER
    assert {entry.peer: entry.reason for entry in found.absent} == {
        "cellar": "it is not connected.",
        "den": "its heartbeats have stopped.",
        "eaves": "it is leaving.",
        "flat": "it was lost often lately and gets no work for now.",
    }


def test_a_pool_of_absent_machines_is_wrong_use_and_says_who(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pool_of(monkeypatch, member("cellar", "lost"))
    with pytest.raises(UsageError, match=r"no peer in the pool can be planned with \(cellar: it is not conn"):
        session.pool_profiles(tmp_path)


def test_an_empty_pool_is_wrong_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pool_of(monkeypatch)
    with pytest.raises(UsageError, match=r"no peer in the pool can be planned with\."):
        session.pool_profiles(tmp_path)


def test_for_trusted_peers_the_others_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    signer = Ed25519PrivateKey.from_private_bytes(b"s" * 32)
    peer = peer_of(public_bytes(Ed25519PrivateKey.from_private_bytes(b"a" * 32).public_key()))
    known = member("attic", "idle")
    profile = msgspec.structs.replace(known.profile, peer=peer)
    attic = PoolMember(msgspec.structs.replace(known.view, peer=peer), profile)
    word = endorse(signer, PeerId(peer), name="", now_wall_s=time.time(), lifetime_s=60, serial=bytes(16))
    trust_list = TrustList(signers=(Signer(key_text(public_bytes(signer.public_key()))),), endorsements=(word,))
    save_trust_list(tmp_path / "trust.json", trust_list)
    pool_of(monkeypatch, attic, member("barn", "idle"))
    found = session.pool_profiles(tmp_path, trusted=True)
    assert [one.name for one in found.peers] == ["attic"]
    assert [(one.peer, "no key that this machine trusts" in one.reason) for one in found.absent] == [("barn", True)]
    (tmp_path / "trust.json").unlink()
    with pytest.raises(UsageError, match="attic: not trusted"):
        session.pool_profiles(tmp_path, trusted=True)


def test_a_broker_that_does_not_answer_is_named_with_its_pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    @asynccontextmanager
    async def opened(membership: object, *, trust: object) -> AsyncIterator[object]:
        yield None

    async def ask(_: object) -> None:
        raise TransportError("nobody answered at tcp://10.0.0.9:4711 (Connection refused).")

    monkeypatch.setattr(session, "PoolSession", opened)
    monkeypatch.setattr(session, "any_membership", lambda home: SimpleNamespace(pool="attic"))
    with pytest.raises(TransportError, match=r"the broker of pool 'attic' can't be reached: nobody answered") as raised:
        session.in_pool(tmp_path, ask)
    assert "`fusion broker` runs on its machine" in (raised.value.hint or "")
