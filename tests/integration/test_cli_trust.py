"""A job for trusted peers as people run it: real processes, two friends' machines and a stranger's in one pool."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusionai.transport.security.identity import load_identity
from harness.live_pool import LivePool, Process, fusion, write_recipe, write_text
from harness.saved_model import asked, saved_model

pytestmark = pytest.mark.slow


class Friends:
    """Ada's machine is endorsed in the owner's own file, Bob's carries its endorsement, Eve's has none."""

    def __init__(self, pool: LivePool) -> None:
        self.pool = pool
        self.peers = {name: load_identity(pool.directory / name).peer for name in ("ada", "bob", "eve")}
        signer = pool.directory / "signer"
        self.said("trust", "sign", self.peers["ada"], "--name", "ada", "--home", pool.owner)
        written = pool.directory / "signed.json"
        self.said("trust", "sign", self.peers["bob"], "--home", signer, "--json", written)
        signed = json.loads(written.read_text())
        self.said("trust", "add", signed["signing_key"], "--name", "bob's owner", "--home", pool.owner)
        self.said("trust", "carry", signed["endorsement"], "--home", pool.directory / "bob")
        for name in self.peers:
            pool.start(name, pool.invite())
        for name in self.peers:
            pool.members[name].wait_for("In pool")

    @staticmethod
    def said(*arguments: object) -> str:
        done = fusion(*arguments)
        assert done.code == 0, done.err + done.out
        return done.out

    def seen(self, directory: Path) -> dict[str, dict[str, Any]]:
        """The pool's members by name."""
        self.said("pool", "--home", self.pool.owner, "--json", directory / "pool.json")
        return {one["name"]: one for one in json.loads((directory / "pool.json").read_text())["members"]}


@pytest.fixture(scope="module")
def friends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Friends]:
    with LivePool(tmp_path_factory.mktemp("pool")) as pool:
        yield Friends(pool)


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))


def recipe_in(directory: Path, steps: int) -> Path:
    write_text(directory / "text.txt")
    return write_recipe(
        directory / "r.toml",
        job__steps=steps,
        placement={"stages": 2},
        privacy={"level": "trusted", "confidential": True},
    )


def command(friends: Friends, recipe: Path) -> tuple[object, ...]:
    return ("train", recipe, "--home", friends.pool.owner, "--threads", 1, "--json", recipe.with_name("out.json"))


def test_a_confidential_job_runs_on_endorsed_machines_and_says_so(friends: Friends, tmp_path: Path):
    assert {name: one["trusted"] for name, one in friends.seen(tmp_path).items()} == {
        "ada": True,
        "bob": True,
        "eve": False,
    }
    done = fusion(*command(friends, recipe_in(tmp_path, 3)))
    assert done.code == 0, done.err
    assert "trusted peers: 2 of 2; 1 in the pool excluded" in done.out + done.err
    plan = json.loads((tmp_path / "out.json").read_text())["plan"]
    trusted = {friends.peers["ada"], friends.peers["bob"], plan["feed"]}
    assert {stage["peer"] for stage in plan["stages"]} == trusted
    (excluded,) = plan["excluded"]
    assert excluded["peer"] == friends.peers["eve"]
    assert "no key that this machine trusts has endorsed it" in excluded["reason"]
    refused = fusion(*command(friends, tmp_path / "r.toml"), "--privacy", "encrypted")
    assert refused.code == 2
    assert "runs on trusted peers alone" in refused.err


@pytest.mark.long
def test_who_is_revoked_while_the_job_runs_is_shut_out_and_no_stranger_stands_in(friends: Friends, tmp_path: Path):
    job = Process(*command(friends, recipe_in(tmp_path, 400)))
    job.wait_for("step 4/")
    friends.said("trust", "revoke", friends.peers["bob"], "--home", friends.pool.owner)
    try:
        job.wait_for("the job waits")
        assert re.search(r"is not trusted \(any more\).*revoked", job.text), job.text
        seen = friends.seen(tmp_path)
        assert (seen["eve"]["job"], seen["bob"]["trusted"]) == (None, False)
        lately = len(job.lines)
    finally:
        friends.said("trust", "revoke", "--undo", friends.peers["bob"], "--home", friends.pool.owner)
    job.wait_until(lambda: next((line for line in job.lines[lately:] if "takes over" in line), None))
    job.interrupt()
    assert job.ended() == 130, job.text
    assert friends.seen(tmp_path)["eve"]["job"] is None


@pytest.mark.long
def test_a_lost_peer_of_a_confidential_server_is_not_replaced_by_a_stranger(friends: Friends, tmp_path: Path):
    model = saved_model(tmp_path / "tiny")
    written = tmp_path / "serve.json"
    server = Process(
        *("serve", model, "--privacy", "trusted", "--confidential", "--stages", 2, "--port", 0, "--threads", 1),
        *("--home", friends.pool.owner, "--json", written),
    )
    assert server.wait_until(lambda: written.is_file() or None), server.text
    assert "trusted peers: 2 of 2; 1 in the pool excluded" in server.text
    friends.pool.kill("bob")
    server.wait_for("waiting for")
    assert friends.seen(tmp_path)["eve"]["job"] is None
    friends.pool.start("bob").wait_for("In pool")
    url = json.loads(written.read_text())["url"]
    assert asked(url, "a pool of")["choices"][0]["text"]
    assert friends.seen(tmp_path)["eve"]["job"] is None
    server.interrupt()
    assert server.ended() == 0, server.text


@pytest.mark.long
def test_a_broker_for_trusted_machines_tells_others_what_to_do_and_takes_them_once_it_is_done(tmp_path: Path):
    signer, signed = tmp_path / "signer", tmp_path / "signed.json"
    peer = load_identity(tmp_path / "pool" / "ada").peer
    Friends.said("trust", "sign", peer, "--home", signer, "--json", signed)
    word = json.loads(signed.read_text())
    with LivePool(tmp_path / "pool", broker_options=("--trusted-only", word["signing_key"])) as pool:
        assert "Only machines whose keys are endorsed" in pool.broker.text
        refused = pool.start("ada", pool.invite())
        assert refused.ended() == 1, refused.text
        assert "fusion trust sign" in refused.text
        assert peer in refused.text
        Friends.said("trust", "carry", word["endorsement"], "--home", pool.directory / "ada")
        pool.start("ada").wait_for("In pool")
    unknown = fusion("broker", "--trusted-only", peer, "--home", tmp_path / "other")
    assert unknown.code == 2
    assert "expected a signing key" in unknown.err
