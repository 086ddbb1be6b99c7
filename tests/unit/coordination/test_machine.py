"""The table formalism: what is not listed is forbidden, with the entity's story; contradictory tables fail at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from fusionai.coordination.machine import (
    START,
    STORY_LENGTH,
    FollowUp,
    ForbiddenTransition,
    Machine,
    State,
    StatefulMachine,
    Table,
    Transition,
    rows,
)


@dataclass(frozen=True)
class Push: ...


@dataclass(frozen=True)
class Coin:
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turnstile(State):
    coins: int = 0


def _unlock(state: Turnstile, event: Coin) -> Turnstile:
    return replace(state, phase="open", coins=state.coins + event.value)


def _lock(state: Turnstile, event: Push) -> Turnstile:
    return replace(state, phase="locked")


TABLE = (
    Transition(("locked", "open"), Coin, ("open",), _unlock, "paid"),
    Transition(("open",), Push, ("locked",), _lock),
)
MACHINE = Machine("turnstile", TABLE, initial=("locked",))
NEW = Turnstile(entity="turnstile 1", phase="locked")


def test_a_listed_event_moves_the_state():
    moved = MACHINE.advance(NEW, Coin(2))
    assert (moved.phase, moved.coins) == ("open", 2)
    assert NEW.phase == "locked"


def test_a_forbidden_event_names_entity_phase_allowed_events_and_the_story():
    state = MACHINE.advance(MACHINE.advance(NEW, Coin(1)), Push())
    with pytest.raises(ForbiddenTransition) as caught:
        MACHINE.advance(state, Push())
    assert caught.value.story == ("Coin -> open", "Push -> locked")
    text = str(caught.value)
    for part in ("turnstile 1", "locked", "expected Coin", "got Push", "Coin -> open; Push -> locked"):
        assert part in text


def test_the_story_keeps_the_last_transitions_only():
    state = NEW
    for value in range(STORY_LENGTH * 2):
        state = MACHINE.advance(state, Coin(value))
    assert len(state.story) == STORY_LENGTH
    assert state.story[-1] == "Coin"


def test_an_act_that_leads_elsewhere_is_a_defect():
    wrong = Machine("wrong", (Transition(("locked",), Coin, ("locked",), _unlock),), initial=("locked",))
    with pytest.raises(RuntimeError, match="took turnstile 1 from locked to open"):
        wrong.advance(NEW, Coin(1))


def test_an_event_listed_twice_is_found_at_once():
    with pytest.raises(ValueError, match=r"\(open, Push\) is listed twice"):
        Machine("twice", (*TABLE, TABLE[1]), initial=("locked",))


def test_a_way_out_of_a_final_phase_is_found_at_once():
    with pytest.raises(ValueError, match="final phase open has a way out"):
        Machine("final", TABLE, initial=("locked",), final=("open",))


def test_a_phase_that_nothing_leads_to_is_found_at_once():
    with pytest.raises(ValueError, match=r"nothing leads to \['ajar'\]"):
        Machine("ajar", (*TABLE, Transition(("ajar",), Push, ("locked",), _lock)), initial=("locked",))


def test_a_row_that_allows_more_than_half_of_the_phases_is_found_at_once():
    vague = Transition(("locked",), Push, ("locked", "open"), _lock)
    with pytest.raises(ValueError, match=r"\(locked, Push\) allows 2 of 2 phases"):
        Machine("vague", (TABLE[0], vague), initial=("locked",))
    ending = Transition(("locked",), Push, ("locked", "broken"), _lock)
    Machine("ending", (TABLE[0], ending), initial=("locked",), final=("broken",))


def test_rows_are_every_arrow_of_the_table():
    assert rows(MACHINE) == (
        (START, "", "locked", ""),
        ("locked", "Coin", "open", "paid"),
        ("open", "Coin", "open", "paid"),
        ("open", "Push", "locked", ""),
    )


# ------------------------------------------------------------------------------------------ machines changed in place


class Full(FollowUp, frozen=True): ...


@dataclass(slots=True, kw_only=True)
class Jar(StatefulMachine[str, str]):
    phase: str = "open"
    coins: int = 0

    def on_coin(self, event: Coin) -> list[str]:
        self.coins += event.value
        if self.coins > 2:
            self.follow_ups.append(Full())
        return ["clink"]

    def on_full(self, _: Full) -> list[str]:
        self.phase = "closed"
        return ["close"]


JAR = Table[Jar, list[str]](
    "jar",
    (
        Transition(("open",), Coin, ("open",), Jar.on_coin),
        Transition(("open",), Full, ("closed",), Jar.on_full),
    ),
    initial=("open",),
    final=("closed",),
)


def test_what_follows_from_an_event_is_done_before_the_next_one():
    jar = Jar()
    assert jar.react(JAR, Coin(2)) == ["clink"]
    assert jar.react(JAR, Coin(1)) == ["clink", "close"]
    assert (jar.phase, jar.story) == ("closed", ["open: Coin(value=2)", "open: Coin(value=1)", "open: Full()"])


def test_an_event_without_a_row_changes_nothing_but_the_story():
    jar = Jar(phase="closed")
    assert jar.react(JAR, Coin(1)) is None
    assert (jar.phase, jar.coins, jar.story) == ("closed", 0, ["closed: Coin(value=1)"])


def test_an_action_that_leads_elsewhere_is_a_defect():
    table = Table[Jar, list[str]]("jar", (Transition(("open",), Full, ("open",), Jar.on_full),), initial=("open",))
    with pytest.raises(RuntimeError, match="Full led to closed"):
        Jar().react(table, Full())


def test_a_follow_up_without_a_row_is_a_defect():
    table = Table[Jar, list[str]]("jar", (Transition(("open",), Coin, ("open",), Jar.on_coin),), initial=("open",))
    with pytest.raises(RuntimeError, match="Full was raised in open"):
        Jar().react(table, Coin(3))
