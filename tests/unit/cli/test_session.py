"""The live pool as the planner gets it: who is there, and who is a member but can't be planned with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from fusionai.cli import session
from fusionai.client.pool_session import Member
from fusionai.primitives.errors import UsageError
from fusionai.scheduling.types import PeerProfile
from fusionai.wire.messages import MemberView


def member(name: str, state: str) -> Member:
    profile = PeerProfile(peer=name[0] * 52, name=name, flops_per_s=1e9, memory_bytes=2**30)
    raw = msgspec.Raw(msgspec.msgpack.encode(profile))
    return Member(MemberView(peer=profile.peer, state=state, boot=1, addresses=(), profile=raw), profile)


OWNER = PeerProfile(peer="o" * 52, name="this machine", flops_per_s=1e9, memory_bytes=2**30, roles=("owner",))


def pool_of(monkeypatch: pytest.MonkeyPatch, *members: Member) -> None:
    monkeypatch.setattr(session, "in_pool", lambda home, ask: members)
    monkeypatch.setattr(session, "any_membership", lambda home: SimpleNamespace(peer=OWNER.peer))
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
        "den": "nothing has been heard from it lately.",
        "eaves": "it is leaving.",
        "flat": "it rests, having been lost often lately.",
    }


def test_a_pool_of_absent_machines_is_wrong_use_and_says_who(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pool_of(monkeypatch, member("cellar", "lost"))
    with pytest.raises(UsageError, match=r"no peer in the pool that could be planned with \(cellar: it is not conn"):
        session.pool_profiles(tmp_path)


def test_an_empty_pool_is_wrong_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pool_of(monkeypatch)
    with pytest.raises(UsageError, match=r"no peer in the pool that could be planned with\."):
        session.pool_profiles(tmp_path)
