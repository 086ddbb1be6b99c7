"""A machine's fate depends on the seed and its name; what is left out does not happen; phases follow each other."""

from __future__ import annotations

from statistics import fmean

import pytest

from fusionai.simulator.scenario import Churn, Event, fates

DAY_S = 86_400.0
STORMY = Churn(stay_s=3600, away_s=600, crashes=0.5, silent=0.5, freeze_every_s=1800, freeze_s=20, late=0.3)


def test_without_churn_everybody_comes_and_stays() -> None:
    assert fates(Churn(), ("b", "a"), 1, DAY_S) == (Event(0.0, "a", "come"), Event(0.0, "b", "come"))


def test_another_machine_changes_nobody_elses_fate() -> None:
    few = fates(STORMY, ("a", "b"), 5, DAY_S)
    many = fates(STORMY, ("a", "b", "c"), 5, DAY_S)
    assert few == tuple(event for event in many if event.peer != "c")
    assert few != fates(STORMY, ("a", "b"), 6, DAY_S)
    assert list(many) == sorted(many, key=lambda event: event.at_s)


def test_one_setting_does_not_shift_what_another_draws() -> None:
    calm = fates(Churn(stay_s=3600, away_s=600), ("a",), 5, DAY_S)
    freezing = fates(Churn(stay_s=3600, away_s=600, freeze_every_s=DAY_S * 100), ("a",), 5, DAY_S)
    assert calm == freezing


@pytest.mark.parametrize("peer", ["a", "b", "c"])
def test_phases_follow_each_other(peer: str) -> None:
    phase = "away"
    for event in fates(STORMY, (peer,), 3, 10 * DAY_S):
        match event.turn:
            case "come":
                assert phase == "away"
                phase = "there"
            case "freeze":
                assert phase == "there"
                phase = "frozen"
            case "wake":
                assert phase == "frozen"
                phase = "there"
            case _:
                assert phase in ("there", "frozen")
                phase = "away"


def test_means_and_parts_are_those_asked_for() -> None:
    names = tuple(f"p{n}" for n in range(40))
    events = fates(Churn(stay_s=3600, away_s=1200, crashes=0.6, silent=0.5), names, 2, 3 * DAY_S)
    turns = [event.turn for event in events if event.turn != "come"]
    assert len(turns) > 1500
    assert turns.count("leave") / len(turns) == pytest.approx(0.4, abs=0.05)
    assert turns.count("fall silent") / len(turns) == pytest.approx(0.3, abs=0.05)
    stays = []
    for name in names:
        times = [event.at_s for event in events if event.peer == name]
        stays += [gone - came for came, gone in zip(times[::2], times[1::2], strict=False)]
    assert fmean(stays) == pytest.approx(3600, rel=0.1)
