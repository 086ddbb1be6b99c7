"""A killer of processes whose every choice comes from a printed seed: the same seed and victims, the same strikes.

Decides who is struck, how (SIGKILL, or SIGSTOP and SIGCONT later) and after which pause. It strikes only processes it
is told of, and wakes whatever it froze. Strike number n depends on the seed, n and who is there, not on earlier
strikes or process ids, so a single strike can be replayed.

    with Killer(seed, habits, log=directory / "strikes.jsonl") as killer:
        killer.run(census, over)  # in a thread; or killer.strike(census()) at moments of the test's own

Neighbours: `harness.fault_proxy` strikes what lies between processes; long chaos tests and the soak use both.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Final, Literal


class Role(Enum):
    STAGE = "stage"
    SPARE = "spare"
    BROKER = "broker"
    DRIVER = "driver"


@dataclass(frozen=True, slots=True)
class Target:
    """A process that may be struck. `number`: which stage, which spare."""

    role: Role
    pid: int
    number: int = 0

    @property
    def name(self) -> str:
        return f"{self.role.value} {self.number}" if self.role in (Role.STAGE, Role.SPARE) else self.role.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """`weights`: how often each role is chosen, relative to the others; a role that is not there is spared.

    `together`: part of the strikes that take two victims at once. `freezing`: part of the blows that freeze instead of
    killing, for a time within `freeze_s`.
    """

    weights: Mapping[Role, float] = field(default_factory=lambda: dict.fromkeys(Role, 1.0))
    pause_s: tuple[float, float] = (20.0, 40.0)
    together: float = 0.1
    freezing: float = 0.2
    freeze_s: tuple[float, float] = (5.0, 60.0)


@dataclass(frozen=True, slots=True)
class Blow:
    """One victim of one strike. `hit` False: it was gone already."""

    strike: int
    target: Target
    kind: Literal["kill", "freeze", "wake"]
    at_s: float
    """Since the killer began."""
    freeze_s: float = 0.0
    hit: bool = True

    def __str__(self) -> str:
        how = {"kill": "SIGKILL", "freeze": f"SIGSTOP for {self.freeze_s:.1f} s", "wake": "SIGCONT"}[self.kind]
        gone = "" if self.hit else ", which was gone already"
        return f"strike {self.strike} at {self.at_s:.3f} s: {how} {self.target.name} (pid {self.target.pid}){gone}"


Census = Callable[[], Sequence[Target]]


class Killer:
    """`blows` has everything that was done. `log`: a line of JSON for each blow, written at once."""

    def __init__(
        self,
        seed: int,
        habits: Habits | None = None,
        *,
        log: Path | None = None,
        say: Callable[[str], None] = print,
        send: Callable[[int, int], None] = os.kill,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seed = seed
        self.habits = habits or Habits()
        self.blows: list[Blow] = []
        self.strikes = 0
        self._log = log
        self._say = say
        self._send = send
        self._now_s = now_s
        self._began_s = now_s()
        self._frozen: dict[int, tuple[float, Blow]] = {}
        """pid -> (when to wake it, the blow that froze it)."""
        say(f"killer: seed {seed}")

    def __enter__(self) -> Killer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wake_all()

    def run(self, census: Census, over: threading.Event, strikes: int | None = None) -> None:
        """Strike after strike until `over` is set or so many are done; everything frozen is awake at the end."""
        try:
            while not over.is_set() and (strikes is None or self.strikes < strikes):
                self._pass_time(self.pause_s(), over)
                if not over.is_set():
                    self.strike(census())
        finally:
            self.wake_all()

    def strike(self, targets: Sequence[Target]) -> tuple[Blow, ...]:
        """Strike now. Nobody there: the strike is spent on nobody, so later ones stay the same."""
        number, self.strikes = self.strikes, self.strikes + 1
        there = [target for target in targets if target.pid not in self._frozen]
        planned = plan(self.seed, number, self.habits, there)
        return tuple(self._deal(number, target, freeze_s) for target, freeze_s in planned)

    def pause_s(self) -> float:
        """How long to wait before the next strike."""
        return _choices(self.seed, self.strikes, "pause").uniform(*self.habits.pause_s)

    def wake_due(self) -> float | None:
        """Wake whose time has come. Seconds until the next one; None when nobody is frozen."""
        now_s = self._now_s()
        for pid, (wake_at_s, _) in list(self._frozen.items()):
            if wake_at_s <= now_s:
                self._wake(pid)
        return min((wake_at_s - now_s for wake_at_s, _ in self._frozen.values()), default=None)

    def wake_all(self) -> None:
        for pid in list(self._frozen):
            self._wake(pid)

    def _pass_time(self, pause_s: float, over: threading.Event) -> None:
        until_s = self._now_s() + pause_s
        while not over.is_set() and (left_s := until_s - self._now_s()) > 0:
            wake_s = self.wake_due()
            over.wait(left_s if wake_s is None else min(left_s, wake_s))

    def _deal(self, strike: int, target: Target, freeze_s: float | None) -> Blow:
        if target.pid <= 1 or target.pid in (os.getpid(), os.getppid()):
            raise ValueError(f"pid {target.pid} of {target.name} is this test itself, its parent or the system")
        signal_number, kind = (signal.SIGKILL, "kill") if freeze_s is None else (signal.SIGSTOP, "freeze")
        hit = self._signal(target.pid, signal_number)
        blow = Blow(strike, target, kind, self._elapsed_s, freeze_s or 0.0, hit)
        if freeze_s is not None and hit:
            self._frozen[target.pid] = (self._now_s() + freeze_s, blow)
        return self._record(blow)

    def _wake(self, pid: int) -> None:
        _, frozen = self._frozen.pop(pid)
        hit = self._signal(pid, signal.SIGCONT)
        self._record(Blow(frozen.strike, frozen.target, "wake", self._elapsed_s, hit=hit))

    def _signal(self, pid: int, number: int) -> bool:
        try:
            self._send(pid, number)
        except ProcessLookupError:
            return False
        return True

    def _record(self, blow: Blow) -> Blow:
        self.blows.append(blow)
        self._say(str(blow))
        if self._log is not None:
            with self._log.open("a", encoding="utf-8") as log:
                log.write(json.dumps(as_json(self.seed, blow)) + "\n")
        return blow

    @property
    def _elapsed_s(self) -> float:
        return self._now_s() - self._began_s


def plan(seed: int, strike: int, habits: Habits, targets: Sequence[Target]) -> tuple[tuple[Target, float | None], ...]:
    """Who is struck by this strike, and for how long each is frozen (None: killed). Pure."""
    choose = _choices(seed, strike, "victims")
    count = 2 if choose.random() < habits.together else 1
    left = sorted(targets, key=lambda target: (target.role.value, target.number))
    struck: list[tuple[Target, float | None]] = []
    for _ in range(count):
        target = _victim(choose, habits, left)
        freezes, freeze_s = choose.random() < habits.freezing, choose.uniform(*habits.freeze_s)
        if target is not None:
            left.remove(target)
            struck.append((target, freeze_s if freezes else None))
    return tuple(struck)


def as_json(seed: int, blow: Blow) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "seed": seed,
        "strike": blow.strike,
        "kind": blow.kind,
        "role": blow.target.role.value,
        "number": blow.target.number,
        "pid": blow.target.pid,
        "at_s": round(blow.at_s, 6),
        "freeze_s": round(blow.freeze_s, 6),
        "hit": blow.hit,
    }


SCHEMA: Final = "fusionai.strikes/1"


def _victim(choose: random.Random, habits: Habits, targets: Sequence[Target]) -> Target | None:
    """A role first, by its weight, then one of it: four stages are not struck four times as often as one broker."""
    weights = {
        role: weight
        for role, weight in sorted(habits.weights.items(), key=lambda item: item[0].value)
        if weight > 0 and any(target.role is role for target in targets)
    }
    if not weights:
        return None
    (role,) = choose.choices(list(weights), list(weights.values()))
    return choose.choice([target for target in targets if target.role is role])


def _choices(seed: int, strike: int, purpose: str) -> random.Random:
    return random.Random(f"{seed} {strike} {purpose}")
