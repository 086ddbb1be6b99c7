"""The killer strikes what it is given, as its seed says, and wakes what it froze."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.killer import Blow, Habits, Killer, Role, Target, plan

CAST = (
    *(Target(Role.STAGE, 100 + number, number) for number in range(4)),
    *(Target(Role.SPARE, 200 + number, number) for number in range(2)),
    Target(Role.BROKER, 300),
    Target(Role.DRIVER, 400),
)
KILLING = Habits(together=0.0, freezing=0.0)
FREEZING = Habits(together=0.0, freezing=1.0, freeze_s=(5.0, 5.0))


@dataclass
class Scene:
    """Signals and lines go into lists; time stands still unless told."""

    now_s: float = 0.0
    gone: set[int] = field(default_factory=set)
    sent: list[tuple[int, int]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def killer(self, seed: int = 1, habits: Habits = KILLING, log: Path | None = None) -> Killer:
        return Killer(seed, habits, log=log, say=self.lines.append, send=self.send, now_s=lambda: self.now_s)

    def send(self, pid: int, number: int) -> None:
        if pid in self.gone:
            raise ProcessLookupError
        self.sent.append((pid, number))


def test_the_same_seed_strikes_the_same():
    first, second, third = Scene(), Scene(), Scene()
    for scene, seed in ((first, 7), (second, 7), (third, 8)):
        killer = scene.killer(seed, Habits())
        for _ in range(30):
            killer.strike(CAST)
    assert first.sent == second.sent
    assert first.lines == second.lines
    assert first.sent != third.sent


def test_a_strike_does_not_depend_on_those_before_nor_on_order_and_process_ids():
    moved = [Target(target.role, target.pid + 5000, target.number) for target in reversed(CAST)]
    for strike in range(50):
        here, there = plan(3, strike, Habits(), CAST), plan(3, strike, Habits(), moved)
        assert [(target.name, freeze_s) for target, freeze_s in here] == [(t.name, freeze_s) for t, freeze_s in there]


def test_everybody_gets_a_turn_and_roles_by_their_weights():
    weights = {Role.STAGE: 3.0, Role.SPARE: 1.0, Role.BROKER: 1.0, Role.DRIVER: 0.0}
    habits = Habits(weights=weights, together=0.0)
    struck = Counter(plan(1, strike, habits, CAST)[0][0].name for strike in range(1000))
    assert set(struck) == {"stage 0", "stage 1", "stage 2", "stage 3", "spare 0", "spare 1", "broker"}
    assert 500 < sum(struck[f"stage {number}"] for number in range(4)) < 700


def test_two_at_once_are_two():
    habits = Habits(together=1.0)
    for strike in range(100):
        (first, _), (second, _) = plan(1, strike, habits, CAST)
        assert first != second
    assert len(plan(1, 0, habits, CAST[:1])) == 1


def test_kills_and_freezes_in_their_parts():
    habits = Habits(together=0.0, freezing=0.3, freeze_s=(2.0, 4.0))
    times = [plan(1, strike, habits, CAST)[0][1] for strike in range(1000)]
    frozen = [time_s for time_s in times if time_s is not None]
    assert 230 < len(frozen) < 370
    assert all(2.0 <= time_s <= 4.0 for time_s in frozen)


def test_a_kill_is_one_signal_one_line_and_one_record(tmp_path: Path):
    scene = Scene()
    killer = scene.killer(5, log=tmp_path / "strikes.jsonl")
    scene.now_s = 12.5
    (blow,) = killer.strike([CAST[2]])
    assert scene.sent == [(102, signal.SIGKILL)]
    assert blow == Blow(0, CAST[2], "kill", 12.5)
    assert scene.lines == ["killer: seed 5", "strike 0 at 12.500 s: SIGKILL stage 2 (pid 102)"]
    (line,) = (tmp_path / "strikes.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "schema": "fusionai.strikes/1",
        "seed": 5,
        "strike": 0,
        "kind": "kill",
        "role": "stage",
        "number": 2,
        "pid": 102,
        "at_s": 12.5,
        "freeze_s": 0.0,
        "hit": True,
    }


def test_who_is_gone_already_is_said_to_be():
    scene = Scene(gone={300})
    killer = scene.killer()
    (blow,) = killer.strike([CAST[6]])
    assert not blow.hit
    assert scene.lines[-1] == "strike 0 at 0.000 s: SIGKILL broker (pid 300), which was gone already"


def test_what_is_frozen_is_woken_in_time_and_left_alone_meanwhile():
    scene = Scene()
    killer = scene.killer(1, FREEZING)
    killer.strike([CAST[0]])
    assert killer.strike([CAST[0]]) == ()
    scene.now_s = 4.0
    assert killer.wake_due() == 1.0
    assert scene.sent == [(100, signal.SIGSTOP)]
    scene.now_s = 5.0
    assert killer.wake_due() is None
    assert scene.sent == [(100, signal.SIGSTOP), (100, signal.SIGCONT)]
    assert scene.lines[-1] == "strike 0 at 5.000 s: SIGCONT stage 0 (pid 100)"
    assert killer.strikes == 2


def test_nobody_stays_frozen():
    def fail_amid() -> None:
        with scene.killer(1, FREEZING) as killer:
            killer.strike([CAST[0]])
            killer.strike([CAST[1]])
            raise KeyError

    scene = Scene()
    with pytest.raises(KeyError):
        fail_amid()
    assert scene.sent[2:] == [(100, signal.SIGCONT), (101, signal.SIGCONT)]


def test_who_was_killed_otherwise_while_frozen_is_not_missed():
    scene = Scene()
    with scene.killer(1, FREEZING) as killer:
        killer.strike([CAST[0]])
        scene.gone.add(100)
    assert killer.blows[-1] == Blow(0, CAST[0], "wake", 0.0, hit=False)


@pytest.mark.parametrize(
    "pid",
    [0, 1, -1, -5, os.getpid(), os.getppid()],
    ids=["own group", "init", "everybody", "a group", "this process", "its parent"],
)
def test_the_test_itself_and_groups_are_out_of_bounds(pid: int):
    scene = Scene()
    with pytest.raises(ValueError, match="this test itself"):
        scene.killer().strike([Target(Role.STAGE, pid)])
    assert scene.sent == []


def test_a_run_pauses_before_each_strike_and_wakes_on_the_way():
    """The event's waits move the clock: nobody sleeps."""

    class Waits(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            scene.now_s += timeout
            return self.is_set()

    scene = Scene()
    habits = Habits(together=0.0, freezing=1.0, freeze_s=(1.0, 1.0), pause_s=(10.0, 20.0))
    with scene.killer(4, habits) as killer:
        killer.run(lambda: CAST, Waits(), strikes=3)
    struck = [blow.at_s for blow in killer.blows if blow.kind == "freeze"]
    assert all(10.0 <= later - earlier <= 20.0 for earlier, later in zip([0.0, *struck], struck, strict=False))
    assert [blow.kind for blow in killer.blows] == ["freeze", "wake"] * 3
    woken = [blow.at_s for blow in killer.blows if blow.kind == "wake"]
    assert woken[:2] == [struck[0] + 1.0, struck[1] + 1.0]


def test_a_run_that_is_over_strikes_no_more():
    scene = Scene()
    over = threading.Event()

    def census() -> tuple[Target, ...]:
        over.set()
        return CAST

    habits = Habits(together=0.0, freezing=0.0, pause_s=(0.0, 0.0))
    scene.killer(4, habits).run(census, over)
    assert len(scene.sent) == 1


def test_a_real_process_is_frozen_woken_and_killed():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        target = Target(Role.SPARE, process.pid)
        with Killer(1, FREEZING, say=lambda _: None) as killer:
            killer.strike([target])
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
        _, status = os.waitpid(process.pid, os.WCONTINUED)
        assert os.WIFCONTINUED(status)
        Killer(1, KILLING, say=lambda _: None).strike([target])
        assert process.wait() == -signal.SIGKILL
    finally:
        process.kill()
        process.communicate()
