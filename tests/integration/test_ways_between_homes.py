"""Machines in homes behind routers reach each other the best way there is: namespaces, real keys, no framework."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fusionai.transport.routes import quic as quic_binding
from harness.homes import HERE, PUBLIC, Homes, why_not
from harness.patience import CEILING_S

WHY_NOT = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

PATIENCE_S = CEILING_S
BY_UDP = "quic" if quic_binding.available() else "relay"


class Town:
    """A broker in the public place, a peer in home a and one in home b, and whoever reaches for them."""

    def __init__(self, homes: Homes, directory: Path) -> None:
        self.homes = homes
        self._directory = directory
        self.broker = self._start("public", "broker", PUBLIC)
        self.invitation = heard(self.broker)["invitation"]
        self.peers: dict[str, dict[str, Any]] = {}

    def serve(self, machine: str) -> dict[str, Any]:
        process = self._start(machine, "serve", self.invitation)
        self.peers[machine] = heard(process)
        return self.peers[machine]

    def caller(self, machine: str, peer: str) -> Callable[[], dict[str, Any]]:
        """Each call is one connection from `machine`, in one process."""
        process = self._start(machine, "reach", self.invitation, self.peers[peer]["peer"], told=True)

        def reach() -> dict[str, Any]:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return heard(process)

        return reach

    def _start(self, machine: str, kind: str, *more: str, told: bool = False) -> subprocess.Popen[str]:
        home = self._directory / f"{machine}-{kind}"
        return self.homes.run(machine, sys.executable, HERE / "far_machine.py", kind, home, *more, told=told)


def heard(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line it says that is an answer."""
    assert process.stdout is not None
    said = ""
    while line := process.stdout.readline():
        if line.startswith("{"):
            return json.loads(line)
        said += line
    raise AssertionError(said)


@pytest.fixture
def town(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Town]:
    a, b = request.param
    with Homes({"a": a, "b": b}, {"a": 2, "b": 1}) as homes:
        town = Town(homes, tmp_path)
        for machine in ("a1", "b1"):
            town.serve(machine)
        yield town


def until(reach: Callable[[], dict[str, Any]], good: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Reach until it is as it should be; all answers."""
    answers: list[dict[str, Any]] = []
    deadline_s = time.monotonic() + PATIENCE_S
    while not answers or not good(answers[-1]):
        assert time.monotonic() < deadline_s, answers
        answers.append(reach())
    return answers


def between_two_homes(town: Town, route: str) -> Callable[[], dict[str, Any]]:
    reach = town.caller("a2", "b1")
    first, second = reach(), reach()
    assert [first["route"], second["route"]] == [route, route], (first, second)
    assert first["host"] == ("203.0.113.12" if route == "quic" else PUBLIC)
    # What worked is tried first the next time.
    assert second["took_s"] < 1.0
    return reach


@pytest.mark.parametrize("town", [("preserving", "preserving")], indirect=True)
def test_routers_that_keep_ports_let_both_through_also_after_one_got_another_address(town: Town):
    reach = between_two_homes(town, BY_UDP)
    # The caller's own address may be public: the peer's router lets in what the peer has sent to.
    assert town.caller("public", "b1")()["route"] == BY_UDP
    town.homes.rewire("b", "preserving", "203.0.113.77")
    answers = until(reach, lambda answer: answer.get("route") == BY_UDP)
    assert answers[-1]["host"] == ("203.0.113.77" if BY_UDP == "quic" else PUBLIC)


@pytest.mark.parametrize("town", [("symmetric", "symmetric")], indirect=True)
def test_between_routers_that_draw_ports_the_relay_stands_in_and_shorter_ways_are_found_where_there_are(town: Town):
    between_two_homes(town, "relay")
    near = town.caller("a2", "a1")()
    assert (near["route"], near["host"]) == ("lan", "192.168.1.2")
    peer = town.serve("public")
    assert f"tcp://{PUBLIC}:" in " ".join(peer["addresses"])
    straight = town.caller("a2", "public")()
    assert (straight["route"], straight["host"]) == ("direct", PUBLIC)


@pytest.mark.parametrize(
    "town",
    [("no-udp", "preserving"), pytest.param(("preserving", "no-udp"), marks=pytest.mark.long)],
    indirect=True,
)
@pytest.mark.long
def test_where_udp_is_blocked_the_relay_stands_in(town: Town):
    between_two_homes(town, "relay")


@pytest.mark.parametrize("town", [("preserving", "symmetric")], indirect=True)
@pytest.mark.long
def test_a_better_way_is_taken_when_one_appears(town: Town):
    reach = town.caller("a2", "b1")
    assert reach()["route"] == "relay"
    town.homes.rewire("b", "preserving", "203.0.113.77")
    until(reach, lambda answer: answer.get("route") == BY_UDP)


@pytest.mark.long
def test_machines_of_one_home_find_out_how_fast_their_network_is(tmp_path: Path):
    """Real `fusion join`s: two in home a, one in home b, lines of 20 Mbit/s; the broker stands in the public place."""
    with Homes({"a": "preserving", "b": "symmetric"}, {"a": 2, "b": 1}, line=(20e6, 0.01)) as homes:

        def fusion(machine: str, *arguments: object) -> subprocess.Popen[str]:
            return homes.run(machine, sys.executable, "-m", "fusionai", *arguments)

        def told(machine: str, *arguments: object) -> str:
            process = fusion(machine, *arguments)
            said, _ = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, said
            return said

        broker = fusion("public", "broker", "--home", tmp_path / "broker", "--host", PUBLIC)
        assert broker.stdout is not None
        words = (word for line in broker.stdout for word in line.split())
        invited = next(word for word in words if word.startswith("fusion1-"))
        figures = tmp_path / "pool.json"
        for machine in ("a1", "a2", "b1"):
            more = ("--name", machine, "--threads", 1, "--max-memory", "1GB")
            fusion(machine, "join", invited, "--home", tmp_path / machine, *more)
        told("public", "join", invited, "--owner", "--home", tmp_path / "owner")

        def probed() -> dict[str, Any]:
            told("public", "pool", "--home", tmp_path / "owner", "--json", figures)
            members = json.loads(figures.read_text())["members"]
            names = {one["peer"]: one["name"] for one in members}
            found = {
                (one["name"], names[link["peer"]]): link["probed_bytes_per_s"]
                for one in members
                for link in one["links"]
            }
            return {"found": found, "there": len(members)}

        answers = until(probed, lambda answer: bool(answer["found"]) and answer["there"] == 3)
        assert {frozenset(pair) for pair in answers[-1]["found"]} == {frozenset(("a1", "a2"))}
        assert all(speed > 10 * 20e6 / 8 for speed in answers[-1]["found"].values()), "not the line's 2.5 MB/s"
