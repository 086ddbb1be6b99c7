"""Simulates transfers between peers: shared access links, latency, jitter, packet loss.

Every peer has one uplink and one downlink, as in `scheduling.problem.types.hop`. A transfer goes through the sender's
uplink and the receiver's downlink, each at its own speed. The second begins with the first byte, not the last, so an
undisturbed transfer takes size / slower link + latency. Transfers of one connection follow each other; connections
share a link evenly, as with TCP. An exceptional link serves only its pair in its direction and uses no access link.
Packet loss only reduces speed, by the formula of Mathis et al. 1997 (rate <= 1.22 * segment / (round trip *
sqrt(loss))); jitter adds time.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf, sqrt
from typing import Final

from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.simulator.agenda import Agenda

SEGMENT_BYTES: Final = 1448
"""TCP payload of a packet on Ethernet, with timestamps."""
MATHIS: Final = 1.22
"""Constant of the formula of Mathis et al., sqrt(3/2)."""
ROUNDING_S: Final = 1e-9
"""Transfers whose remaining time differs by less than this end together."""

Connection = tuple[str, str]
"""(sender, receiver)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """Disturbances of links. `jitter_s`: mean of an exponential delay added to each transfer's latency. `loss`:
    fraction of packets lost, in [0, 1)."""

    jitter_s: float = 0.0
    loss: float = 0.0


CALM: Final = Weather()
"""No jitter and no packet loss."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer, from its first byte sent to its last byte received."""

    sender: str
    receiver: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class _Transfer:
    """A transfer on one line."""

    left_s: float
    """Remaining seconds if the link served only this transfer."""
    begun: Callable[[], None]
    done: Callable[[], None]


@dataclass(slots=True)
class LinkDirection:
    """One direction of a link. Connections share it evenly; each has one transfer at a time on it."""

    agenda: Agenda
    busy_s: float = 0.0
    """Total seconds in which the link was in use."""
    _queues: dict[Connection, deque[_Transfer]] = field(default_factory=dict[Connection, deque[_Transfer]])
    _since_s: float = 0.0
    """Time up to which progress has been counted."""
    _round: int = 0
    """Incremented to cancel scheduled events from before the last change."""

    def carry(
        self, connection: Connection, seconds: float, begun: Callable[[], None], done: Callable[[], None]
    ) -> None:
        """Add a transfer that takes `seconds` on an undivided link. `begun` is called when its first byte is sent,
        `done` when its last byte has been sent."""
        transfer = _Transfer(seconds, begun, done)
        queue = self._queues.get(connection)
        if queue is not None:
            queue.append(transfer)
            return
        self._count()
        self._queues[connection] = deque((transfer,))
        self._foresee()
        begun()

    def _count(self) -> None:
        """Count the progress of all transfers since the last call."""
        elapsed_s = self.agenda.now_s - self._since_s
        self._since_s = self.agenda.now_s
        if self._queues:
            self.busy_s += elapsed_s
            for queue in self._queues.values():
                queue[0].left_s -= elapsed_s / len(self._queues)

    def _foresee(self) -> None:
        self._round += 1
        if self._queues:
            least_s = min(queue[0].left_s for queue in self._queues.values())
            self.agenda.after(max(0.0, least_s) * len(self._queues), partial(self._served, self._round))

    def _served(self, at_round: int) -> None:
        if at_round != self._round:
            return
        self._count()
        least_s = min(queue[0].left_s for queue in self._queues.values())
        # Transfers that end at the same time end together, despite rounding errors.
        through = [c for c, queue in self._queues.items() if queue[0].left_s <= least_s + ROUNDING_S]
        over = [self._queues[connection].popleft() for connection in through]
        begun: list[_Transfer] = []
        for connection in through:
            if self._queues[connection]:
                begun.append(self._queues[connection][0])
            else:
                del self._queues[connection]
        self._foresee()
        for transfer in over:
            transfer.done()
        for transfer in begun:
            transfer.begun()


class SimulatedNetwork:
    """The links between a problem's peers. The same seed gives the same jitter."""

    def __init__(
        self, agenda: Agenda, costs: StageCosts, weather: Weather = CALM, seed: int = 0, *, recording: bool = True
    ) -> None:
        self.sent_bytes: defaultdict[str, float] = defaultdict(float)
        """Bytes by sender, over its uplink or an exceptional link."""
        self.transfers: list[Transfer] = []
        """All transfers with a size, in the order of completion; none unless `recording`."""
        self._recording = recording
        self._agenda = agenda
        self._costs = costs
        self._weather = weather
        self._draw = random.Random(seed)
        self._lines: defaultdict[tuple[str, str], LinkDirection] = defaultdict(lambda: LinkDirection(agenda))
        """Keys: ("up", peer), ("down", peer), or an exceptional link's (sender, receiver)."""
        self._arrived_s: defaultdict[Connection, float] = defaultdict(float)

    def send(self, sender: str, receiver: str, size_bytes: float, deliver: Callable[[], None]) -> None:
        """Call `deliver` when all has arrived. Without a profile, bandwidth is unlimited and latency 0."""
        if sender == receiver:
            self._agenda.after(0.0, deliver)
            return
        connection = (sender, receiver)
        hop = self._costs.hop(sender, receiver)
        if size_bytes <= 0:
            self._arrive(connection, hop.latency_s, deliver)
            return
        self.sent_bytes[sender] += size_bytes
        bandwidth_bytes_per_s = self._capped(sender, receiver, hop.bandwidth_bytes_per_s)
        own_s = size_bytes / bandwidth_bytes_per_s
        began = [self._agenda.now_s]

        def there() -> None:
            if self._recording:
                self.transfers.append(Transfer(sender, receiver, began[0], self._agenda.now_s))
            deliver()

        if not hop.shared:
            arrive = partial(self._arrive, connection, hop.latency_s, there)
            self._lines[connection].carry(connection, own_s, _nothing, arrive)
            return
        profiles = self._costs.profiles
        up_s = size_bytes / profiles[sender].uplink.bandwidth_bytes_per_s
        down_s = size_bytes / profiles[receiver].downlink.bandwidth_bytes_per_s
        held_up = bandwidth_bytes_per_s < hop.bandwidth_bytes_per_s
        # Wait for all parts: uplink with latency, downlink, and the limit that packet loss sets, if any.
        parts = [3 if held_up else 2]

        def through() -> None:
            parts[0] -= 1
            if parts[0] == 0:
                self._arrive(connection, 0.0, there)

        def begun() -> None:
            began[0] = self._agenda.now_s
            down = self._lines["down", receiver]
            self._agenda.after(hop.latency_s, partial(down.carry, connection, down_s, _nothing, through))
            if held_up:
                later = partial(self._agenda.after, hop.latency_s, through)
                self._lines[connection].carry(connection, own_s, _nothing, later)

        later = partial(self._agenda.after, hop.latency_s, through)
        self._lines["up", sender].carry(connection, up_s, begun, later)

    def _arrive(self, connection: Connection, delay_s: float, deliver: Callable[[], None]) -> None:
        """Deliver in the order of sending."""
        if self._weather.jitter_s > 0:
            delay_s += self._draw.expovariate(1 / self._weather.jitter_s)
        in_order_s = max(self._agenda.now_s + delay_s, self._arrived_s[connection])
        self._arrived_s[connection] = in_order_s
        self._agenda.at(in_order_s, deliver)

    def _capped(self, sender: str, receiver: str, bandwidth_bytes_per_s: float) -> float:
        """Return the bandwidth of one connection, limited by packet loss."""
        if self._weather.loss <= 0:
            return bandwidth_bytes_per_s
        there, back = self._costs.hop(sender, receiver), self._costs.hop(receiver, sender)
        round_trip_s = there.latency_s + back.latency_s + 2 * self._weather.jitter_s
        most = MATHIS * SEGMENT_BYTES / (round_trip_s * sqrt(self._weather.loss)) if round_trip_s > 0 else inf
        return min(bandwidth_bytes_per_s, most)


def _nothing() -> None:
    pass
