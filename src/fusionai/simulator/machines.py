"""The machines of a simulated pool: who is there, frozen or away. Decides what an event does to a machine itself.

Neighbours: `fates` says what happens when; `broker` hears of it as a broker would, `job` as a driver would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, Protocol

from fusionai.simulator.agenda import Agenda
from fusionai.simulator.broker import Process, SimulatedBroker
from fusionai.simulator.fates import Event
from fusionai.simulator.scenario import Scenario

AGAIN_S: Final = 60.0
"""A machine that should come back before it has gone looks again after so long."""

Cause = Literal["crashed", "fell silent", "froze", "left"]


class Watcher(Protocol):
    """The job's driver."""

    def came(self, peer: str) -> None: ...

    def stopped(self, peer: str, cause: Cause, noticed_after_s: float) -> None:
        """It does nothing any more; that is noticed after so long. What it held is gone unless it froze."""

    def woke(self, peer: str) -> None: ...


@dataclass(slots=True)
class _Machine:
    phase: Literal["away", "there", "frozen"] = "away"
    process: Process | None = None
    """While it is not away."""
    leaving: bool = False
    came_s: float = 0.0
    present_s: float = 0.0
    """Of earlier stays."""


class Machines:
    """`watcher` is set before anything happens."""

    watcher: Watcher

    def __init__(self, agenda: Agenda, broker: SimulatedBroker, names: Sequence[str], scenario: Scenario) -> None:
        self.names = tuple(sorted(names))
        self._agenda = agenda
        self._broker = broker
        self._timings = scenario.timings
        self._machines = {name: _Machine() for name in self.names}
        broker.released = self._released

    def happen(self, event: Event) -> None:
        machine = self._machines[event.peer]
        match event.turn:
            case "come" if machine.phase != "away":
                self._agenda.after(AGAIN_S, partial(self.happen, event))
            case "come":
                self._come(event.peer, machine)
            case _ if machine.phase == "away":
                pass  # it went before its time, because somebody took over early
            case "leave" if machine.phase == "there":
                self._leave(event.peer, machine)
            case "leave" | "crash":
                self._stop(event.peer, machine, "crashed", closed=True)
            case "fall silent":
                self._stop(event.peer, machine, "fell silent", closed=False)
            case "freeze":
                machine.phase = "frozen"
                self._broker.unheard(event.peer, closed=False)
                self.watcher.stopped(event.peer, "froze", self._timings.silence_s)
            case "wake":
                self._wake(event.peer, machine)

    def is_there(self, peer: str) -> bool:
        """Whether it answers. The job owner's own machine always does."""
        return peer not in self._machines or self._machines[peer].phase == "there"

    def there(self) -> frozenset[str]:
        return frozenset(name for name, machine in self._machines.items() if machine.phase == "there")

    def present_s(self, peer: str) -> float:
        """Up to now, frozen or not."""
        machine = self._machines[peer]
        stay_s = 0.0 if machine.phase == "away" else self._agenda.now_s - machine.came_s
        return machine.present_s + stay_s

    def _come(self, peer: str, machine: _Machine) -> None:
        machine.phase, machine.came_s, machine.leaving = "there", self._agenda.now_s, False
        machine.process = self._broker.come(peer)
        self.watcher.came(peer)

    def _leave(self, peer: str, machine: _Machine) -> None:
        """In order: it works on until the job has somebody else, if its owner's patience lasts."""
        if machine.leaving:
            return
        machine.leaving = True
        self._broker.leave(peer, drain=True)
        if self._broker.phase(peer) == "left":
            self._go(peer, machine)
        else:
            self._agenda.after(self._timings.patience_s, partial(self._lose_patience, peer, machine.came_s))

    def _lose_patience(self, peer: str, came_s: float) -> None:
        machine = self._machines[peer]
        if machine.leaving and machine.came_s == came_s and machine.phase == "there":
            self._broker.leave(peer, drain=False)
            self._stop(peer, machine, "left", closed=True)

    def _released(self, peer: str) -> None:
        """Nobody needs it any more."""
        machine = self._machines[peer]
        if machine.phase != "away":
            self._go(peer, machine)

    def _stop(self, peer: str, machine: _Machine, cause: Cause, *, closed: bool) -> None:
        frozen = machine.phase == "frozen"
        self._go(peer, machine, heard=not frozen, closed=closed)
        after_s = self._timings.notice_s if closed else self._timings.silence_s
        self.watcher.stopped(peer, cause, after_s)

    def _go(self, peer: str, machine: _Machine, *, heard: bool = True, closed: bool = True) -> None:
        machine.present_s = self.present_s(peer)
        machine.phase, machine.process, machine.leaving = "away", None, False
        if heard:
            self._broker.unheard(peer, closed=closed)

    def _wake(self, peer: str, machine: _Machine) -> None:
        assert machine.process is not None, "a frozen machine's process is still there"
        machine.phase = "there"
        machine.process = self._broker.heard_again(peer, machine.process)
        self.watcher.woke(peer)
        if machine.leaving:
            machine.leaving = False
            self._leave(peer, machine)
