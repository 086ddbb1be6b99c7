"""Draws in advance what happens to each machine of a scenario. `course` decides what follows from it.

A machine's events depend only on the seed and its name, so adding a machine changes no other's events. `scenario`
defines the distributions.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from math import inf
from typing import Literal

from fusionai.simulator.scenario import Churn

Turn = Literal["come", "leave", "crash", "fall silent", "freeze", "wake"]


@dataclass(frozen=True, slots=True, order=True)
class Event:
    """What happens to one machine at one time."""

    at_s: float
    peer: str
    turn: Turn


def fates(churn: Churn, peers: tuple[str, ...], seed: int, until_s: float) -> tuple[Event, ...]:
    """Return the events of all machines before `until_s`, in order. Machines present from the start come at 0."""
    return tuple(merge(*(_fate(churn, peer, random.Random(f"{seed} {peer}"), until_s) for peer in sorted(peers))))


def _fate(churn: Churn, peer: str, draw: random.Random, until_s: float) -> Iterator[Event]:
    now_s = _drawn_s(draw, churn.away_s) if draw.random() < churn.late else 0.0
    while now_s < until_s:
        yield Event(now_s, peer, "come")
        goes_s = now_s + _drawn_s(draw, churn.stay_s)
        frozen_s = now_s + _drawn_s(draw, churn.freeze_every_s)
        while frozen_s < min(goes_s, until_s):
            wakes_s = frozen_s + _drawn_s(draw, churn.freeze_s)
            yield Event(frozen_s, peer, "freeze")
            if wakes_s >= min(goes_s, until_s):
                break  # it leaves before it wakes
            yield Event(wakes_s, peer, "wake")
            frozen_s = wakes_s + _drawn_s(draw, churn.freeze_every_s)
        if goes_s >= until_s:
            return
        turn: Turn = "leave"
        if draw.random() < churn.crashes:
            turn = "fall silent" if draw.random() < churn.silent else "crash"
        yield Event(goes_s, peer, turn)
        now_s = goes_s + _drawn_s(draw, churn.away_s)


def _drawn_s(draw: random.Random, mean_s: float) -> float:
    """Draw a duration, even if the mean is infinite, so that one setting does not shift the draws of another."""
    drawn = draw.expovariate(1.0)
    return inf if mean_s == inf else drawn * mean_s
