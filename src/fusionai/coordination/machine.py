"""The transition-table formalism of every state machine here. Decides which event is allowed in which phase.

A machine is a frozen `State` and a table of `Transition`s keyed by (phase, event type). An act is a pure function
(state, event) -> (new state, commands); time reaches it inside the event. Whatever the table does not list is
forbidden and raises `ForbiddenTransition`, which carries the entity's *story*: its last transitions.

Never performs a command, never reads a clock. Neighbours: `membership`, `lease`, `job`, `plan_version`, `invitation`
(the broker's machines) and the machines within a job are tables of this kind; `diagrams` draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar

from fusionai.primitives.errors import FusionError

STORY_LENGTH: Final = 24
"""How many of its last transitions an entity remembers."""

START: Final = "(new)"
"""Source of a machine's initial phase in diagrams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Base of every machine's state. `entity` names it for people (`member qx3f`, `stage 2`); `Machine.advance`
    keeps the `story`."""

    entity: str
    phase: str
    story: tuple[str, ...] = ()


S = TypeVar("S", bound=State)
E = TypeVar("E")
C = TypeVar("C")


class ForbiddenTransition(FusionError):
    """An event its table does not allow in this phase. `story` holds the last transitions, oldest first."""

    def __init__(self, machine: str, state: State, event: str, allowed: Sequence[str]) -> None:
        listed = ", ".join(allowed) if allowed else "nothing (this phase is final)"
        story = "; ".join(state.story) if state.story else "nothing yet"
        super().__init__(
            f"{state.entity} is {state.phase}: expected {listed}, got {event}.",
            hint=f"What happened before: {story}.",
        )
        self.machine = machine
        self.phase = state.phase
        self.event = event
        self.story = state.story


@dataclass(frozen=True, slots=True)
class Transition(Generic[S, E, C]):
    """In one of `sources`, `event` leads to one of `targets` by `act`. `note` labels the arrow in the diagram."""

    sources: tuple[str, ...]
    event: type[E]
    targets: tuple[str, ...]
    act: Callable[[S, E], tuple[S, tuple[C, ...]]]
    note: str = ""


class Machine(Generic[S, C]):
    """A table with its name. Build it once at import time: a contradictory table fails there."""

    def __init__(
        self,
        name: str,
        transitions: Sequence[Transition[S, Any, C]],
        *,
        initial: tuple[str, ...],
        final: tuple[str, ...] = (),
    ) -> None:
        table: dict[tuple[str, type], Transition[S, Any, C]] = {}
        for transition in transitions:
            for source in transition.sources:
                key = (source, transition.event)
                if key in table:
                    raise ValueError(f"machine {name}: ({source}, {transition.event.__name__}) is listed twice")
                if source in final and any(target not in final for target in transition.targets):
                    raise ValueError(f"machine {name}: final phase {source} has a way out")
                table[key] = transition
        reached = {*initial, *(target for transition in transitions for target in transition.targets)}
        named = reached | {source for source, _ in table} | set(final)
        if named - reached:
            raise ValueError(f"machine {name}: nothing leads to {sorted(named - reached)}")
        self.name = name
        self.transitions = tuple(transitions)
        self.initial = initial
        self.final = final
        self.table: Mapping[tuple[str, type], Transition[S, Any, C]] = table

    def advance(self, state: S, event: object) -> tuple[S, tuple[C, ...]]:
        """The new state, its story one line longer, and the commands to perform.

        Raises `ForbiddenTransition`; `RuntimeError` when an act leads where its row does not say (a defect).
        """
        kind = type(event)
        transition = self.table.get((state.phase, kind))
        if transition is None:
            allowed = [event_type.__name__ for phase, event_type in self.table if phase == state.phase]
            raise ForbiddenTransition(self.name, state, kind.__name__, allowed)
        moved, commands = transition.act(state, event)
        if moved.phase not in transition.targets:
            raise RuntimeError(
                f"machine {self.name}: {kind.__name__} took {state.entity} from {state.phase} to {moved.phase}, "
                f"the table says {transition.targets}"
            )
        line = kind.__name__ if moved.phase == state.phase else f"{kind.__name__} -> {moved.phase}"
        return replace(moved, story=(*state.story, line)[-STORY_LENGTH:]), commands


def rows(machine: Machine[Any, Any]) -> tuple[tuple[str, str, str, str], ...]:
    """(source, event, target, note) of every arrow, initial arrows first: what a diagram or a document shows."""
    arrows = [(START, "", phase, "") for phase in machine.initial]
    for transition in machine.transitions:
        for source in transition.sources:
            for target in transition.targets:
                arrows.append((source, transition.event.__name__, target, transition.note))
    return tuple(arrows)
