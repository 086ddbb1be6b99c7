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
from harness.siege import Siege
from harness.wires import Wires

STAGES: Final = 2
NOTICED_S: Final = 5.0
"""The promise."""
STARVED_S: Final = 3.0
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


def wait_until_it_stands_by(siege: Siege, name: str) -> None:
    """It runs nothing any more, the pool has it, and it may be given work: as a guard, it has some already."""
    wait_until(siege, name, lambda seen: seen["state"] in ("idle", "active") and not seen["stages"])


def wait_until_it_is_there(siege: Siege, name: str) -> None:
    wait_until(siege, name, lambda seen: seen["state"] in ("idle", "active"))


def wait_until(siege: Siege, name: str, is_so: Callable[[dict[str, Any]], bool]) -> None:
    deadline_s = time.monotonic() + 30.0
    while not is_so(seen := member(siege, name)):
        assert time.monotonic() < deadline_s, f"the pool still says {seen}"
        siege.wait_for_steps(siege.steps_of_this_start() + 1)


@pytest.mark.parametrize(
    "freeze_s",
    [pytest.param(8.0, marks=pytest.mark.slow), pytest.param(60.0, marks=pytest.mark.long)],
)
@pytest.mark.timeout(300)
def test_a_frozen_peer_is_replaced_and_awake_again_it_stands_by(
    freeze_s: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    seed = seed_of(1)
    habits = Habits(together=0.0, freezing=1.0, freeze_s=(freeze_s, freeze_s))
    with (
        LivePool(tmp_path, peers(4)) as pool,
        besieged(pool, STAGES) as siege,
        Killer(seed, habits) as killer,
    ):
        siege.wait_for_steps(5)
        (frozen,) = siege.strike(killer, siege.census(Role.STAGE))
        siege.recover([frozen])
        assert frozen.detected_s is not None
        time.sleep(killer.wake_due() or 0.0)
        killer.wake_due()
        (name,) = frozen.names
        pool.members[name].wait_for("is over here")
        wait_until_it_stands_by(siege, name)
        # What it had is another's; it, too, is good enough to take over again.
        (killed,) = siege.strike(Killer(seed, Habits(together=0.0, freezing=0.0)), siege.census(Role.STAGE))
        siege.recover([killed])
        siege.finish()
        check(siege)
    with capsys.disabled():
        print(f"\nfrozen for {freeze_s:g} s: noticed {frozen.detected_s:.2f} s, official {frozen.recovered_s:.2f} s")  # noqa: T201
    assert frozen.detected_s < NOTICED_S + STARVED_S


@contextmanager
def wired(directory: Path) -> Iterator[tuple[Siege, Wires]]:
    """Peers that can only be reached through proxies."""
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


DRIVER: Final = Role.DRIVER.value


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_paths_on_which_nothing_arrives_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    told: list[str] = []
    with wired(tmp_path) as (siege, wires):
        siege.wait_for_steps(5)
        for what in ("driver and peer", "driver to peer", "peer to driver", "peer and peer", "peer to peer", "back"):
            first, second = siege.holder(0), siege.holder(1)
            paths = {
                "driver and peer": [(DRIVER, second), (second, DRIVER)],
                "driver to peer": [(DRIVER, first)],
                "peer to driver": [(second, DRIVER)],
                "peer and peer": [(first, second), (second, first)],
                "peer to peer": [(first, second)],
                "back": [(second, first)],
            }[what]
            names = {name for path in paths for name in path} - {DRIVER}
            outcome = siege.expect(what, Role.STAGE, *sorted(names))
            for sender, receiver in paths:
                wires.block(sender, receiver)
            siege.recover([outcome])
            wires.heal()
            assert outcome.detected_s is not None, what
            told.append(f"{what}: noticed {outcome.detected_s:.2f} s, official {outcome.recovered_s:.2f} s")
            for name in outcome.names:
                wait_until_it_is_there(siege, name)
            siege.wait_for_spares(1)
        siege.finish()
        check(siege)
    with capsys.disabled():
        print("\n" + "\n".join(told))  # noqa: T201
