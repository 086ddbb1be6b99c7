"""A simulated scenario: what happens to the pool, and how long parts of a recovery take. Names, units and defaults.

`fates` draws the events of each machine in advance, `course` decides what follows from them;
`cli.planning.scenario_file` reads a scenario from a file.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from math import inf
from typing import Literal

import msgspec

from fusionai.coordination.round.liveness import SHORTEST_S
from fusionai.scheduling.standby.continuation import GRACE_S, Takeover
from fusionai.simulator.network import CALM, Weather


class Churn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How providers come and go. All times are means of exponential distributions, drawn separately per machine."""

    stay_s: float = inf
    away_s: float = 1800.0
    """Time until a machine that left returns, without its earlier state; also until a late one first comes."""
    crashes: float = 0.5
    """Fraction of departures that are crashes; the others drain and leave in order."""
    silent: float = 0.25
    """Fraction of crashes in which no connection is closed: power or network failure."""
    freeze_every_s: float = inf
    freeze_s: float = 10.0
    """Duration of a freeze: the machine sends and computes nothing, and keeps its state."""
    late: float = 0.0
    """Fraction of machines that are absent at the start."""


class Timings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Assumed durations of a recovery's parts, besides links and compute, which the problem describes."""

    notice_s: float = 0.05
    """From a closed connection until the driver knows."""
    silence_s: float = SHORTEST_S
    """Time after which a silent peer counts as lost."""
    plan_s: float = 0.2
    """Time to make another plan, get its tickets and save it on the driver's disk."""
    journal_s: float = 0.005
    """Time to write a commit to the driver's disk."""
    grace_s: float = GRACE_S
    """How long to wait for a machine with the same numerics before another solution is accepted."""
    patience_s: float = 600.0
    """How long a machine that leaves in order waits for another to take over."""


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A run of one training job."""

    hours: float = 1.0
    seed: int = 1
    checkpoint_every: int = 100
    """In steps; 0 means that the job can only go back to its beginning."""
    takeover: Takeover = "any"
    """Which machines may take over for a lost one."""
    churn: Churn = Churn()
    timings: Timings = Timings()
    weather: Weather = CALM


Turn = Literal["come", "leave", "crash", "fall silent", "freeze", "wake"]


@dataclass(frozen=True, slots=True, order=True)
class Event:
    """What happens to one machine at one time."""

    at_s: float
    peer: str
    turn: Turn


def fates(churn: Churn, peers: tuple[str, ...], seed: int, until_s: float) -> tuple[Event, ...]:
    """Return the events of all machines before `until_s`, in order. Machines present from the start come at 0. A
    machine's events depend only on the seed and its name, so adding a machine changes no other's events."""
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
