"""An adaptive failure detector: which peers have been silent for too long.

Time is counted while the watcher itself is awake. Normally its calls are at most a ping interval apart. A gap longer
than `stall_s` means that the watcher was suspended (a closed lid, a stopped process, a starved machine) and that
messages wait unread. Such a gap counts as half a stall: no peer is suspected because the watcher slept, and a watcher
that stalls all the time still finds dead peers, only later.

The deadline is learnt for each peer: a multiple of the longest recent gap between two of its signs of life, within
fixed bounds. So the silence of a regular peer is noticed soon, and an irregular peer is not suspected wrongly. This is
the idea of adaptive failure detectors: Chen, Toueg and Aguilera, "On the quality of service of failure detectors" (IEEE
Trans. Computers 51, 2002); Hayashibara et al., "The phi accrual failure detector" (SRDS 2004). They estimate a
distribution. Here the longest gap is enough, because signs of life come four times a second and a false alarm costs a
recovery.

The death of a process is noticed elsewhere: its machine closes its connections at once. Silence means that a machine or
a path is gone, or that a process is starved or frozen. In the last case the machine usually still acknowledges what is
sent to it. Such a peer has at least `deadline_s`, because moving its stages is expensive and would add load.

Neighbours: the owner of the connections calls `heard` for every frame and `tick` in time; the job's driver decides what
follows from a suspicion. The broker's leases are slower and survive its restart by one lease of grace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

PING_S: Final = 0.25
"""Interval at which a quiet connection is pinged."""
DEADLINE_S: Final = 4.0
"""Deadline for a peer that is not known yet, and shortest deadline for a peer whose machine acknowledges data."""
LONGEST_S: Final = 16.0
"""Longest deadline, for a peer with long gaps: a machine under load starves its processes for several seconds."""
SHORTEST_S: Final = 1.0
"""Shortest deadline, for a peer whose machine acknowledges nothing. A packet lost twice in a row is sent again after
0.2 and 0.4 s. A third loss would exceed the deadline; that is rare, and a takeover takes less than a second. A link on
which it happens often shows gaps, and its deadline doubles."""
STALL_S: Final = 0.5
"""Gap between two calls above which the watcher itself was late, because its machine is busy."""
FACTOR: Final = 2.0
"""Deadline divided by the longest recent gap."""
MEMORY_S: Final = 60.0
"""How long a gap is remembered; long enough to include rare stalls, such as a checkpoint or a restore."""
LEARNING_S: Final = 5.0
"""Time for which a peer must be watched before its own gaps determine its deadline."""


@dataclass(slots=True)
class _Rhythm:
    """Signs of life of one peer. Times are the watcher's waking time."""

    since_s: float
    heard_s: float
    deadline_s: float
    """Changes only at a sign of life, so that one silence is measured against one deadline."""
    gaps: deque[tuple[float, float]] = field(default_factory=deque[tuple[float, float]])
    """(end, length) of gaps, each longer than all later ones. The first is the longest."""

    def heard(self, awake_s: float) -> float | None:
        """Record a sign of life. Return the longest recent gap; None while the peer is not known well enough."""
        gap_s = awake_s - self.heard_s
        self.heard_s = awake_s
        while self.gaps and self.gaps[-1][1] <= gap_s:
            self.gaps.pop()
        self.gaps.append((awake_s, gap_s))
        while self.gaps[0][0] < awake_s - MEMORY_S:
            self.gaps.popleft()
        return self.gaps[0][1] if awake_s - self.since_s >= LEARNING_S else None


class Silence:
    """Watches a changing set of peers on the watcher's monotonic clock. Times that run backwards are ignored."""

    def __init__(
        self,
        *,
        ping_s: float = PING_S,
        shortest_s: float = SHORTEST_S,
        deadline_s: float = DEADLINE_S,
        longest_s: float = LONGEST_S,
        stall_s: float = STALL_S,
    ) -> None:
        """Raises `ValueError` unless 0 < ping <= stall and ping < shortest <= deadline <= longest: else a healthy peer
        would be suspected."""
        if not 0 < ping_s <= stall_s or not ping_s < shortest_s <= deadline_s <= longest_s:
            raise ValueError(
                "expected 0 < ping <= stall and ping < shortest <= deadline <= longest, "
                f"got {ping_s}, {stall_s}, {shortest_s}, {deadline_s}, {longest_s} s"
            )
        self.ping_s = ping_s
        self.shortest_s = shortest_s
        self.deadline_s = deadline_s
        self.longest_s = longest_s
        self.stall_s = stall_s
        self._acknowledging: frozenset[str] = frozenset()
        """Peers whose machines acknowledged data at the last tick."""
        self._now_s: float | None = None
        self._awake_s = 0.0
        """Time spent awake, up to `_now_s`."""
        self._rhythms: dict[str, _Rhythm] = {}

    @property
    def watched(self) -> frozenset[str]:
        return frozenset(self._rhythms)

    def watch(self, who: str, now_s: float) -> None:
        """Watch `who` from now on. What was known of it from an earlier connection is dropped."""
        self._advance(now_s)
        self._rhythms[who] = _Rhythm(self._awake_s, self._awake_s, self.deadline_s)

    def forget(self, who: str) -> None:
        """Stop watching `who`."""
        self._rhythms.pop(who, None)

    def heard(self, who: str, now_s: float) -> None:
        """Record a sign of life, which is any frame. Ignored for a peer that is not watched any more."""
        self._advance(now_s)
        rhythm = self._rhythms.get(who)
        if rhythm is None:
            return
        longest_s = rhythm.heard(self._awake_s)
        if longest_s is not None:
            rhythm.deadline_s = min(self.longest_s, max(self.shortest_s, FACTOR * longest_s))

    def tick(self, now_s: float, acknowledging: Collection[str] = ()) -> dict[str, float]:
        """Return the peers that have been silent for their deadline or longer, in alphabetical order, with the deadline
        in seconds. Each is returned once and then forgotten. `acknowledging`: peers whose machines acknowledge data, or
        whose connections can't tell."""
        self._advance(now_s)
        self._acknowledging = frozenset(acknowledging)
        silent = {who: self._deadline_s(who) for who in sorted(self._rhythms) if self._left_s(who) <= 0}
        for who in silent:
            del self._rhythms[who]
        return silent

    def silent_s(self, who: str) -> float:
        """Return how long `who` had been silent at the last call. Raises `KeyError` if it is not watched."""
        return self._awake_s - self._rhythms[who].heard_s

    def _left_s(self, who: str) -> float:
        return self._deadline_s(who) - (self._awake_s - self._rhythms[who].heard_s)

    def _deadline_s(self, who: str) -> float:
        least_s = self.deadline_s if who in self._acknowledging else self.shortest_s
        return max(least_s, self._rhythms[who].deadline_s)

    def _advance(self, now_s: float) -> None:
        if self._now_s is None:
            self._now_s = now_s
        passed_s = now_s - self._now_s
        if passed_s <= 0:
            return
        self._now_s = now_s
        self._awake_s += passed_s if passed_s <= self.stall_s else self.stall_s / 2
