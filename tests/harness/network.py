"""Virtual time and a network in it: channels keep their order, nothing else does. One seed, one course of events.

Processes die, freeze and start anew; links between two processes break, or stop one direction for a while. What was
under way on a broken link is lost, and each end notices in its own time. Neighbour: `harness.world` puts a job into it.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Stream = Literal["control", "tensors", "state", "feed", "snapshots"]
"""The first and the third are between a driver and a member (or the broker), the others between members; `feed` is to
or from the owner's process."""
WORK_S = 0.02
"""Mean of a piece of work. Timers (pings, deadlines, leases) are those of the product, in seconds."""
SLOW = 50


@dataclass(slots=True, eq=False)
class Process:
    """One start of a program on a machine."""

    name: str
    number: int
    lost_link: Callable[[Process, Stream], None] = lambda process, stream: None
    """Told when a connection with another process breaks: by which stream."""
    alive: bool = True
    frozen: bool = False
    backlog: deque[Callable[[], None]] = field(default_factory=deque[Callable[[], None]])
    """What happened to it while it was frozen."""

    def __repr__(self) -> str:
        return f"{self.name}#{self.number}"


Link = tuple[Process, Process, bool]
"""(sender, receiver, whether it is a connection of members)."""


class Network:
    """`after` runs something later, `send` brings a message over a channel. Time stands still while an event runs.

    `any_order`: time means nothing for messages and work; whatever could happen next happens at random.
    """

    def __init__(self, choose: random.Random, *, any_order: bool = False) -> None:
        self.now_s = 0.0
        self.events = 0
        self.lost = 0
        """Messages that went down with their link or their receiver."""
        self.in_transit: defaultdict[tuple[Process, Process, Stream], int] = defaultdict(int)
        self.ever_in_transit = 0
        self._choose = choose
        self._any_order = any_order
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._latency_s: dict[tuple[Process, Process, Stream], float] = {}
        self._last_arrival_s: dict[tuple[Process, Process, Stream], float] = {}
        self._queues: dict[object, deque[Callable[[], None]]] = {}
        self._generation: defaultdict[Link, int] = defaultdict(int)
        self._broken: set[Link] = set()
        self._used: dict[Process, dict[Link, None]] = {}
        self._blocked: set[tuple[str, str]] = set()
        self._stalled: list[tuple[Process, Process, Callable[[], None]]] = []

    # ------------------------------------------------------------------------------------------------------- time

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), action))

    def work(self, process: Process, action: Callable[[], None]) -> None:
        """A piece of work of this process: mostly alike, sometimes ten times as long. Dead processes finish nothing."""
        if self._any_order:
            self._queues.setdefault(object(), deque()).append(lambda: self.run_in(process, action))
            return
        work_s = WORK_S * self._choose.expovariate(1.0) * (10.0 if self._choose.random() < 0.1 else 1.0)
        self.after(work_s, lambda: self.run_in(process, action))

    def timer(self, process: Process, delay_s: float, action: Callable[[], None]) -> None:
        self.after(delay_s, lambda: self.run_in(process, action))

    def run_in(self, process: Process, action: Callable[[], None]) -> None:
        if process.frozen:
            process.backlog.append(action)
        elif process.alive:
            action()

    def advance(self) -> bool:
        """Run the next event; False when nothing will ever happen again."""
        self.events += 1
        if self._queues:
            key = self._choose.choice(list(self._queues))
            queue = self._queues[key]
            action = queue.popleft()
            if not queue:
                del self._queues[key]
            action()
            return True
        if not self._events:
            return False
        at_s, _, action = heapq.heappop(self._events)
        self.now_s = max(self.now_s, at_s)
        action()
        return True

    # --------------------------------------------------------------------------------------------------- messages

    def send(self, sender: Process, receiver: Process, stream: Stream, deliver: Callable[[], None]) -> None:
        """Deliver after the channel's own latency and a jitter, never before what went over this channel earlier."""
        link = _link(sender, receiver, stream)
        self._used.setdefault(sender, {})[link] = None
        self._used.setdefault(receiver, {})[link] = None
        if link in self._broken or not receiver.alive:
            self.lost += 1
            return
        channel = (sender, receiver, stream)
        generation = self._generation[link]
        self.in_transit[channel] += 1
        self.ever_in_transit = max(self.ever_in_transit, self.in_transit[channel])

        def take() -> None:
            if self._generation[link] == generation:
                self.run_in(receiver, deliver)

        def arrive() -> None:
            self.in_transit[channel] -= 1
            if self._generation[link] != generation or not receiver.alive:
                self.lost += 1
            elif (sender.name, receiver.name) in self._blocked:
                self._stalled.append((sender, receiver, take))
            else:
                take()

        if self._any_order:
            self._queues.setdefault(channel, deque()).append(arrive)
            return
        if channel not in self._latency_s:
            slowest = SLOW if stream in ("state", "snapshots") else 8
            self._latency_s[channel] = WORK_S * self._choose.choice((0.0, 0.3, 1.0, slowest))
        arrival_s = self.now_s + self._latency_s[channel] + WORK_S * self._choose.expovariate(2.0)
        arrival_s = max(arrival_s, self._last_arrival_s.get(channel, 0.0))
        self._last_arrival_s[channel] = arrival_s
        heapq.heappush(self._events, (arrival_s, next(self._numbers), arrive))

    def reaches(self, sender: Process, receiver: Process) -> bool:
        """Whether a ping would come through and be answered."""
        ways = {(sender.name, receiver.name), (receiver.name, sender.name)}
        return receiver.alive and not receiver.frozen and not ways & self._blocked

    # ------------------------------------------------------------------------------------------------------ faults

    def cut(self, one: Process, other: Process, *, members: bool) -> None:
        """The connections between the two break, both ways; each end notices after a while, until then it speaks into
        the void. `members`: those between members of a job; otherwise those with a driver or the broker."""
        for link in ((one, other, members), (other, one, members)):
            self._generation[link] += 1
            self._broken.add(link)
        stream: Stream = "tensors" if members else "control"
        for process, far in ((one, other), (other, one)):
            self._notice(process, far, stream)

    def connect(self, one: Process, other: Process) -> None:
        """A new control connection: both ends speak on it at once, whether or not they have missed the old one."""
        self._broken -= {(one, other, False), (other, one, False)}

    def _notice(self, process: Process, far: Process, stream: Stream) -> None:
        def noticed() -> None:
            self._broken.discard(_link(process, far, stream))
            process.lost_link(far, stream)

        self.work(process, noticed)

    def kill(self, process: Process, *, silently: bool) -> None:
        """With everything it held. `silently`: the machine lost its power and no connection is closed."""
        if not process.alive:
            return
        process.alive = False
        process.backlog.clear()
        if silently:
            return
        ends = {(s if r is process else r, members): None for s, r, members in self._used.get(process, {})}
        for far, members in ends:
            self._notice(far, process, "tensors" if members else "control")

    def wake(self, process: Process) -> None:
        """What piled up happens now, in its order."""
        process.frozen = False
        while process.backlog and process.alive and not process.frozen:
            process.backlog.popleft()()

    def block(self, sender: str, receiver: str) -> None:
        """Nothing gets from one machine to the other; the other way is open."""
        self._blocked.add((sender, receiver))

    def heal(self, sender: str, receiver: str) -> None:
        self._blocked.discard((sender, receiver))
        freed = [entry for entry in self._stalled if (entry[0].name, entry[1].name) == (sender, receiver)]
        self._stalled = [entry for entry in self._stalled if (entry[0].name, entry[1].name) != (sender, receiver)]
        for _, _, take in freed:
            take()


def _link(sender: Process, receiver: Process, stream: Stream) -> Link:
    return (sender, receiver, stream not in ("control", "state"))
