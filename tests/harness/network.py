"""Virtual time and a network in it: channels keep their order, nothing else does. One seed, one course of events.

Neighbour: `harness.world` puts a job into it.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Hashable
from typing import Literal

Stream = Literal["control", "tensors", "state"]
Channel = tuple[Hashable, Hashable, Stream]
"""(sender, receiver, stream)."""


class Network:
    """`after` runs something later, `send` brings a message over a channel. Time stands still while an event runs."""

    def __init__(self, choose: random.Random) -> None:
        self.now_s = 0.0
        self.in_transit: dict[Channel, int] = {}
        self._choose = choose
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._latency_s: dict[Channel, float] = {}
        self._last_arrival_s: dict[Channel, float] = {}

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), action))

    def work_s(self) -> float:
        """How long a piece of work takes: mostly alike, sometimes ten times as long."""
        return self._choose.expovariate(1.0) * (10.0 if self._choose.random() < 0.1 else 1.0)

    def send(self, channel: Channel, deliver: Callable[[], None]) -> None:
        """Deliver after the channel's own latency and a jitter, never before what went over this channel earlier."""
        slowest_s = 50.0 if channel[2] == "state" else 8.0
        latency_s = self._latency_s.setdefault(channel, self._choose.choice((0.0, 0.3, 1.0, slowest_s)))
        arrival_s = self.now_s + latency_s + self._choose.expovariate(2.0)
        arrival_s = max(arrival_s, self._last_arrival_s.get(channel, 0.0))
        self._last_arrival_s[channel] = arrival_s
        self.in_transit[channel] = self.in_transit.get(channel, 0) + 1

        def arrive() -> None:
            self.in_transit[channel] -= 1
            deliver()

        heapq.heappush(self._events, (arrival_s, next(self._numbers), arrive))

    def advance(self) -> bool:
        """Run the next event; False when nothing will ever happen again."""
        if not self._events:
            return False
        self.now_s, _, action = heapq.heappop(self._events)
        action()
        return True
