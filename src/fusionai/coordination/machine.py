"""The transition table that every state machine of a pool and of a job uses.

A `Transition` says which phases an event may lead to from which phases, and which action it takes. A `Table` holds a
machine's transitions by (phase, event type) and refuses a contradictory or vague list when it is built, at import time.
Phases are strings or members of a `StrEnum`. Actions are pure: time reaches them inside the event.

Two kinds of machine use tables. `Machine` moves a frozen `State` (the broker's members and jobs); an event without a
row raises `ForbiddenTransition`. `StatefulMachine` changes in place (drivers and stages of jobs); what an event without
a row means is up to the machine. Both keep a *story*, their last transitions, for error messages.

Neither kind performs commands or reads a clock; `broker`, `execution`, `training` and `serving` do. `docs/machines.md`
is drawn from these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, TypeVar

from msgspec import Struct

from fusionai.primitives.errors import FusionError

STORY_LENGTH: Final = 24
"""Number of last transitions that an entity remembers."""

START: Final = "(new)"
"""Source of a machine's initial phase in diagrams."""

M = TypeVar("M")
E = TypeVar("E")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Transition(Generic[M, E, R]):
    """In one of `sources`, `event` leads to one of `targets` by `act`, which takes the machine (or its state) and the
    event. `note` labels the arrow in the diagram."""

    sources: tuple[str, ...]
    event: type[E]
    targets: tuple[str, ...]
    act: Callable[[M, E], R]
    note: str = ""


class Table(dict[tuple[str, type], Transition[M, Any, R]], Generic[M, R]):
    """(phase, event type) -> transition. Raises `ValueError` for a pair that is listed twice, a phase that nothing
    leads to, a way out of a `final` phase, and a transition that allows more than half of the phases that are not
    final."""

    def __init__(
        self,
        name: str,
        transitions: Sequence[Transition[M, Any, R]],
        *,
        initial: tuple[str, ...],
        final: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.name = name
        self.transitions = tuple(transitions)
        self.initial = initial
        self.final = final
        reached = {*initial, *(target for transition in transitions for target in transition.targets)}
        lasting = reached - set(final)
        for transition in transitions:
            allowed = lasting & set(transition.targets)
            for source in transition.sources:
                key = (source, transition.event)
                if key in self:
                    raise ValueError(f"machine {name}: ({source}, {transition.event.__name__}) is listed twice")
                if source in final and any(target not in final for target in transition.targets):
                    raise ValueError(f"machine {name}: final phase {source} has a way out")
                if len(allowed) > max(1, len(lasting) // 2):
                    raise ValueError(
                        f"machine {name}: ({source}, {transition.event.__name__}) allows {len(allowed)} of "
                        f"{len(lasting)} phases; expected at most half"
                    )
                self[key] = transition
        named = reached | {source for source, _ in self} | set(final)
        if named - reached:
            raise ValueError(f"machine {name}: nothing leads to {sorted(named - reached)}")


def in_each(
    sources: Iterable[str], event: type, or_to: tuple[str, ...], act: Callable[[Any, Any], Any], note: str = ""
) -> Iterator[Transition[Any, Any, Any]]:
    """Yield a row for each source phase, in which the event leaves the machine or leads to one of `or_to`."""
    return (Transition((source,), event, (source, *or_to), act, note) for source in sources)


def rows(table: Table[Any, Any]) -> tuple[tuple[str, str, str, str], ...]:
    """(source, event, target, note) of every arrow, initial arrows first: what a diagram or a document shows."""
    arrows = [(START, "", str(phase), "") for phase in table.initial]
    for transition in table.transitions:
        for source in transition.sources:
            for target in transition.targets:
                arrows.append((str(source), transition.event.__name__, str(target), transition.note))
    return tuple(arrows)


# ------------------------------------------------------------------------------------------ machines of frozen states


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Base of the states that a `Machine` moves. `entity` names it for people (`member qx3f`); `Machine.advance` keeps
    the `story`."""

    entity: str
    phase: str
    story: tuple[str, ...] = ()


S = TypeVar("S", bound=State)
C = TypeVar("C")


class ForbiddenTransition(FusionError):
    """An event that the table does not allow in this phase. `story` holds the last transitions, oldest first."""

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


class Machine(Table[S, S]):
    """Moves frozen states by a table whose actions return the new state."""

    def advance(self, state: S, event: object) -> S:
        """Return the new state, its story one entry longer. Raises `ForbiddenTransition`; `RuntimeError` if an action
        leads where its transition does not say (a defect)."""
        kind = type(event)
        transition = self.get((state.phase, kind))
        if transition is None:
            allowed = [event_type.__name__ for phase, event_type in self if phase == state.phase]
            raise ForbiddenTransition(self.name, state, kind.__name__, allowed)
        moved = transition.act(state, event)
        if moved.phase not in transition.targets:
            raise RuntimeError(
                f"machine {self.name}: {kind.__name__} took {state.entity} from {state.phase} to {moved.phase}, "
                f"the table says {transition.targets}"
            )
        entry = kind.__name__ if moved.phase == state.phase else f"{kind.__name__} -> {moved.phase}"
        return replace(moved, story=(*state.story, entry)[-STORY_LENGTH:])


# ------------------------------------------------------------------------------------------ machines changed in place


P = TypeVar("P", bound=str)


class FollowUp(Struct, frozen=True):
    """Base of events that a `StatefulMachine` raises itself, because a transition made a condition true (a barrier is
    complete, a job is settled). They are handled before the next event from outside, so that each transition names one
    step and not everything that may follow from it."""


@dataclass(slots=True, kw_only=True)
class StatefulMachine(Generic[P, C]):
    """Base of machines that change in place. Actions set `phase` and return commands, in the order to be performed."""

    phase: P
    story: list[str] = field(default_factory=list[str])
    """Last events, each with the phase it found."""
    follow_ups: list[FollowUp] = field(default_factory=list[FollowUp])
    """Events raised by the transition under way, in order."""

    def react(self, table: Mapping[tuple[str, type], Transition[Any, Any, list[C]]], event: object) -> list[C] | None:
        """Apply an event and what follows from it. Returns the commands, or None if the table has no row for the
        event. Raises `RuntimeError` if an action leads where its transition does not say (a defect)."""
        commands = self._step(table, event)
        while self.follow_ups:
            following = self.follow_ups.pop(0)
            found = self._step(table, following)
            if found is None or commands is None:
                raise RuntimeError(f"{type(following).__name__} was raised in {self.phase}: {self.story}")
            commands += found
        return commands

    def brief(self, event: object) -> str:
        """Return the text of an event in the story; "" leaves the event out."""
        return repr(event)

    def _step(self, table: Mapping[tuple[str, type], Transition[Any, Any, list[C]]], event: object) -> list[C] | None:
        transition = table.get((self.phase, type(event)))
        if text := self.brief(event):
            self.story.append(f"{self.phase}: {text}")
        del self.story[:-STORY_LENGTH]
        if transition is None:
            return None
        commands = transition.act(self, event)
        if self.phase not in transition.targets:
            raise RuntimeError(f"{type(event).__name__} led to {self.phase}, not {transition.targets}: {self.story}")
        return commands
