"""Peers that stop without ending, and paths on which nothing arrives: noticed within seconds, taken over, results
unchanged; who comes back is fenced off and stands by.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from harness.besieged_job import besieged, check, peers, seed_of
from harness.killer import Habits, Killer, Role
from harness.live_pool import LivePool, fusion
from harness.outcomes import Outcome
from harness.siege import Siege
from harness.wires import Wires

pytestmark = pytest.mark.long

STAGES: Final = 2
DRIVER: Final = Role.DRIVER.value
PATHS: Final = {
    "driver and peer": ((DRIVER, "second"), ("second", DRIVER)),
    "driver to peer": ((DRIVER, "first"),),
    "peer to driver": (("second", DRIVER),),
    "peer and peer": (("first", "second"), ("second", "first")),
    "peer to next": (("first", "second"),),
    "peer to former": (("second", "first"),),
}
"""What is cut: (who speaks, to whom); `first` has stage 0, `second` stage 1."""
NOTICED_S: Final = 5.0
"""The promise."""
STARVED_S: Final = 10.0
"""What a machine that is busy with other tests may add: a watcher that does not run does not see."""


@pytest.fixture(autouse=True)
def _told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))
    monkeypatch.setenv("FUSION_LOG", "info")


def member(siege: Siege, name: str) -> dict[str, Any]:
    """What the pool says of it."""
    path = siege.pool.directory / "pool.json"
    said = fusion("pool", "--home", siege.pool.owner, "--json", path)
    assert said.code == 0, said.err
    return next(one for one in json.loads(path.read_text())["members"] if one["name"] == name)


def seen_peer(siege: Siege, name: str) -> str:
    return member(siege, name)["peer"]


def wait_until(siege: Siege, name: str, is_so: Callable[[dict[str, Any]], bool]) -> None:
    deadline_s = time.monotonic() + 30.0
    while not is_so(seen := member(siege, name)):
        assert time.monotonic() < deadline_s, f"the pool still says {seen}"
        siege.wait_for_steps(siege.steps_of_this_start() + 1)


@contextmanager
def wired(directory: Path) -> Iterator[tuple[Siege, Wires]]:
    """A job on peers that can only be reached through proxies."""
    with Wires() as wires, LivePool(directory) as pool:
        options = {name: wires.options(name) for name in peers(4)}
        for name in peers(4):
            pool.start(name, pool.invite(), *options[name])
        for name in peers(4):
            pool.members[name].wait_for("In pool")
        with besieged(pool, STAGES) as siege:
            siege.options |= options
            wires.watch(siege.pids)
            yield siege, wires


def frozen_for(siege: Siege, seed: int, freeze_s: float) -> Outcome:
    """Somebody who runs a stage stops, and goes on when another has taken its place."""
    habits = Habits(together=0.0, freezing=1.0, freeze_s=(freeze_s, freeze_s))
    with Killer(seed, habits) as killer:
        (outcome,) = siege.strike(killer, siege.census(Role.STAGE))
        (name,) = outcome.names
        siege.recover([outcome])
        taken_over = siege.plan()
        assert seen_peer(siege, name) not in {placement.peer for placement in taken_over.stages}, "its place is taken"
        process = siege.pool.members[name]
        said = len(process.lines)
        time.sleep(killer.wake_due() or 0.0)
        killer.wake_due()
        # Fenced, it forgets the job; or the job has enlisted it anew already, as a standby, under a later fence.
        words = ("is over here", " opened")
        heard = process.wait_until(
            lambda: next((line for line in process.lines[said:] if any(word in line for word in words)), None)
        )
        assert heard is not None, process.text
    # It stands by or standbys; only a later plan than the takeover's may give it a stage again (somebody else is slow).
    wait_until(
        siege,
        name,
        lambda seen: (
            seen["state"] in ("idle", "active") and (not seen["stages"] or siege.plan().version > taken_over.version)
        ),
    )
    return outcome


def cut(siege: Siege, wires: Wires, what: str) -> Outcome:
    """Nothing arrives on a path, for as long as it takes the job to get past that."""
    first, second = siege.holder(0), siege.holder(1)
    peer = {"first": first, "second": second, DRIVER: DRIVER}
    paths = [(peer[sender], peer[receiver]) for sender, receiver in PATHS[what]]
    names = {name for path in paths for name in path} - {DRIVER}
    if DRIVER in paths[0]:
        names.add("job owner")  # a peer that does not hear the driver says so, and the driver hears it
    outcome = siege.expect(what, Role.STAGE, *sorted(names))
    for sender, receiver in paths:
        wires.block(sender, receiver)
    siege.recover([outcome])
    wires.heal()
    for name in names & set(siege.pool.members):
        wait_until(siege, name, lambda seen: seen["state"] in ("idle", "active"))
    return outcome


@pytest.mark.parametrize(
    ("freeze_s", "paths"),
    [
        pytest.param(8.0, ("driver and peer", "peer to next"), marks=pytest.mark.slow),
        pytest.param(60.0, tuple(PATHS), marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(1200)
def test_the_silent_are_replaced_and_stand_by_when_they_are_heard_again(
    freeze_s: float, paths: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    seed = seed_of(1)
    with wired(tmp_path) as (siege, wires):
        siege.wait_for_steps(5)
        outcomes = [frozen_for(siege, seed, freeze_s), *(cut(siege, wires, what) for what in paths)]
        # All of them are whole enough to take over once more.
        with Killer(seed, Habits(together=0.0, freezing=0.0)) as killer:
            siege.recover(siege.strike(killer, siege.census(Role.STAGE)))
        siege.finish()
        check(siege)
    with capsys.disabled():
        for one in outcomes:
            print(f"\n{one.what}: noticed {one.detected_s:.2f} s, next step {one.recovered_s:.2f} s", end="")  # noqa: T201
    assert max(one.detected_s or 60.0 for one in outcomes) < NOTICED_S + STARVED_S
