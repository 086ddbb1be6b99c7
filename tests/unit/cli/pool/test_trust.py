"""`fusion trust`: the trust list as people keep it, by full keys, in files of their own."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from fusionai.transport.security.identity import load_identity
from fusionai.transport.security.trust import carried_endorsements, load_trust_list, parse_endorsement
from harness.live_pool import Done, fusion


def done(*arguments: object) -> str:
    said = fusion("trust", *arguments)
    assert said.code == 0, said
    return said.out


def refused(*arguments: object) -> Done:
    said = fusion("trust", *arguments)
    assert said.code == 2, said
    return said


def test_a_circle_from_its_first_key_to_a_revocation(tmp_path: Path):
    home, member = tmp_path / "owner", tmp_path / "member"
    peer = load_identity(member).peer
    written = tmp_path / "key.json"
    done("key", "--home", home, "--json", written)
    key = json.loads(written.read_text())["signing_key"]
    assert done("key", "--home", home).count(key) == 1, "the same one again"
    assert peer in done("key", "--home", member)
    written = tmp_path / "signed.json"
    assert "fusion trust carry" in done("sign", peer, "--name", "bob", "--home", home, "--json", written)
    line = json.loads(written.read_text())["endorsement"]
    assert load_trust_list(home / "trust.json").endorsements == (parse_endorsement(line),)
    assert "Carried until" in done("carry", line, "--home", member)
    assert carried_endorsements(member) == (parse_endorsement(line),)
    # Another owner trusts the same signing key.
    other = tmp_path / "other"
    done("add", key, "--name", "alice", "--home", other)
    load_trust_list(other / "trust.json").endorsement_of(peer, carried_endorsements(member), time.time())
    assert "valid until" in done("list", "--home", home)
    done("revoke", peer, "--home", home)
    assert "revoked" in done("list", "--home", home)
    assert "revoke --undo" in refused("sign", peer, "--home", home).err
    done("revoke", peer, "--undo", "--home", home)
    assert "valid until" in done("list", "--home", home)
    done("remove", key, "--home", other)
    assert "is not trusted here" in refused("remove", key, "--home", other).err


@pytest.mark.parametrize("wrong", ["bob", "a" * 51, "signing-" + "a" * 52, "b" * 52])
def test_machines_are_named_by_their_full_keys_alone(tmp_path: Path, wrong: str):
    assert "a machine's full key" in refused("sign", wrong, "--home", tmp_path).err
    assert "a machine's full key" in refused("revoke", wrong, "--home", tmp_path).err
    assert not (tmp_path / "trust.json").exists()


def test_a_machine_carries_its_own_endorsements_alone(tmp_path: Path):
    home = tmp_path / "owner"
    member, other = load_identity(tmp_path / "member").peer, load_identity(tmp_path / "other").peer
    written = tmp_path / "signed.json"
    done("sign", member, "--home", home, "--json", written)
    line = json.loads(written.read_text())["endorsement"]
    said = fusion("trust", "carry", line, "--home", tmp_path / "other")
    assert said.code == 1
    assert other[:8] in said.err
    assert "has no key yet" in refused("carry", line, "--home", tmp_path / "nobody").err
    assert "begins with endorsement-1:" in refused("carry", "nonsense", "--home", tmp_path / "member").err


def test_a_file_that_can_not_be_read_is_not_overwritten(tmp_path: Path):
    done("key", "--home", tmp_path)
    path = tmp_path / "trust.json"
    path.write_text("torn")
    peer = load_identity(tmp_path / "member").peer
    for command in (("sign", peer), ("revoke", peer), ("list",)):
        said = fusion("trust", *command, "--home", tmp_path)
        assert said.code == 1
        assert "expected a trust file" in said.err
    assert path.read_text() == "torn"


def test_the_list_is_written_as_json(tmp_path: Path):
    written = tmp_path / "list.json"
    assert "No signing key is trusted here" in done("list", "--home", tmp_path, "--json", written)
    listed = json.loads(written.read_text())
    assert listed["schema"] == "fusionai.trust/1"
    assert (listed["signing_keys"], listed["endorsements"], listed["revoked"]) == ([], [], [])


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_confidential_asks_for_trusted_peers(tmp_path: Path, command: str):
    for level in ([], ["--privacy", "split"], ["--privacy", "open"]):
        said = fusion(command, tmp_path, "--confidential", *level, "--home", tmp_path)
        assert said.code == 2
        assert "needs --privacy trusted" in said.err
