"""The machines of a simulated pool, each present, frozen or away, and the effect of a scenario's events on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from fusionai.simulator.agenda import Agenda
from fusionai.simulator.broker import Process, SimulatedBroker
from fusionai.simulator.scenario import Event, Scenario

if TYPE_CHECKING:
    from fusionai.simulator.driver import SimulatedDriver

AGAIN_S: Final = 60.0
"""Seconds after which a machine whose return is due before it has left tries again (chosen)."""

RELEASED_S: Final = 0.5
"""Seconds after which a machine that may go, but still has a part in a job, looks again (chosen)."""

Cause = Literal["crashed", "fell silent", "froze", "left"]


@dataclass(slots=True)
class _Machine:
    """State of one machine."""

    phase: Literal["away", "there", "frozen"] = "away"
    process: Process | None = None
    """The peer process; None while away."""
    leaving: bool = False
    came_s: float = 0.0
    present_s: float = 0.0
    """Seconds of earlier stays."""


class Machines:
    """All machines except the job owner's. `watcher`, the job's driver, must be set before the first event."""

    watcher: SimulatedDriver

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
                pass  # it left early, because another machine took over
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
        """Return whether the machine responds. The job owner's machine always does."""
        return peer not in self._machines or self._machines[peer].phase == "there"

    def there(self) -> frozenset[str]:
        return frozenset(name for name, machine in self._machines.items() if machine.phase == "there")

    def present_s(self, peer: str) -> float:
        """Return how long the machine has been present up to now, frozen or not, in seconds."""
        machine = self._machines[peer]
        stay_s = 0.0 if machine.phase == "away" else self._agenda.now_s - machine.came_s
        return machine.present_s + stay_s

    def _come(self, peer: str, machine: _Machine) -> None:
        machine.phase, machine.came_s, machine.leaving = "there", self._agenda.now_s, False
        machine.process = self._broker.come(peer)
        self.watcher.came(peer)

    def _leave(self, peer: str, machine: _Machine) -> None:
        """Begin an orderly departure: work on until another machine takes over, or for at most `patience_s`."""
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
        """Let a machine go that the pool does not need any more, once the job has adopted a plan without it."""
        self._go_if_unused(peer, self._machines[peer].came_s)

    def _go_if_unused(self, peer: str, came_s: float) -> None:
        machine = self._machines[peer]
        if machine.phase == "away" or machine.came_s != came_s:
            return
        if self.watcher.uses(peer):
            self._agenda.after(RELEASED_S, partial(self._go_if_unused, peer, came_s))
        else:
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
