"""Who has been silent for too long. Decides when silence becomes suspicion; never sends, closes or replaces anything.

Time is counted while the watcher itself is awake. Calls are at most a ping's interval apart when all is well; a gap
longer than `stall_s` means that the watcher stood still (a closed lid, a stopped process, a starved machine), and what
others did meanwhile lies unread. Such a gap counts as half a stall: nobody is suspected for the watcher's own
sleep, and a watcher that stalls all the time still finds out who is dead, only later.

How long is too long is learnt from each peer: a multiple of the longest gap between two signs of life that it showed
lately, within fixed bounds, so that a prompt peer is missed soon and a jerky one is not blamed for being itself. That
is the idea of the adaptive failure detectors: Chen, Toueg and Aguilera, "On the quality of service of failure
detectors" (IEEE Trans. Computers 51, 2002); Hayashibara et al., "The phi accrual failure detector" (SRDS 2004). They
estimate a distribution; the longest gap is what is left of one when signs of life come four times a second and a false
alarm costs a recovery.

A process that died is not found here: its machine closes its connections at once. Silence means a machine or a path
that is gone, or a process that is starved or frozen. A connection can often tell which: a machine that is there goes on
acknowledging what is sent to it. Such a peer has at least `deadline_s`, because moving its stages is dear and would
make a busy machine busier.

Neighbours: whoever has the connections calls `heard` for every frame and `tick` in time; what follows from a suspicion
is decided by the job's driver. The broker's leases (`lease`) are slower and survive its restart by a grace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

PING_S: Final = 0.25
"""How often a quiet connection is asked for a sign of life."""
DEADLINE_S: Final = 4.0
"""For a peer of which nothing is known yet, and the least for one whose machine acknowledges what is sent to it."""
LONGEST_S: Final = 16.0
"""The most that a peer with long gaps is granted: a machine under load starves its processes for several seconds."""
SHORTEST_S: Final = 1.0
"""The least, for a peer whose machine acknowledges nothing. A packet lost twice in a row is sent again after 0.2 and
0.4 s; lost three times it comes too late, which is rarer than a takeover, which takes less than a second, is dear. A
link that does it often shows gaps, and gets twice as long."""
STALL_S: Final = 0.5
"""A gap between two calls that is longer than this is the watcher's own lateness: its machine is busy, too."""
FACTOR: Final = 2.0
"""The deadline in terms of the longest gap lately."""
MEMORY_S: Final = 60.0
"""How long a gap counts: rare work that makes a peer stall (a checkpoint, a restore) is to be among what is known."""
LEARNING_S: Final = 5.0
"""How long a peer must have been watched before it is known."""


@dataclass(slots=True)
class _Rhythm:
    """Of one peer, in the watcher's waking time."""

    since_s: float
    heard_s: float
    deadline_s: float
    """Changes only when the peer is heard, so that a silence once begun is judged by one deadline."""
    gaps: deque[tuple[float, float]] = field(default_factory=deque[tuple[float, float]])
    """(when it ended, how long it was), the long ones: after each only shorter ones. The first is the longest."""

    def heard(self, awake_s: float) -> float | None:
        """The longest gap lately; None while the peer is not known well enough."""
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
        """At the last tick."""
        self._now_s: float | None = None
        self._awake_s = 0.0
        """Time spent awake, up to `_now_s`."""
        self._rhythms: dict[str, _Rhythm] = {}
        """Of each peer watched."""

    @property
    def watched(self) -> frozenset[str]:
        return frozenset(self._rhythms)

    def watch(self, who: str, now_s: float) -> None:
        """From now on `who` is expected to be heard. Nothing is known of it, also if it was watched before: another
        connection may have another rhythm."""
        self._advance(now_s)
        self._rhythms[who] = _Rhythm(self._awake_s, self._awake_s, self.deadline_s)

    def forget(self, who: str) -> None:
        """Its silence means nothing any more."""
        self._rhythms.pop(who, None)

    def heard(self, who: str, now_s: float) -> None:
        """A sign of life, whatever it says. A late one of somebody no longer watched starts nothing."""
        self._advance(now_s)
        rhythm = self._rhythms.get(who)
        if rhythm is None:
            return
        longest_s = rhythm.heard(self._awake_s)
        if longest_s is not None:
            rhythm.deadline_s = min(self.longest_s, max(self.shortest_s, FACTOR * longest_s))

    def tick(self, now_s: float, acknowledging: Collection[str] = ()) -> dict[str, float]:
        """Who has been silent for its deadline or longer, in alphabetical order, with that deadline in seconds; each
        once, then it is forgotten. `acknowledging`: peers whose machines take what is sent to them, or of which the
        connection can't tell."""
        self._advance(now_s)
        self._acknowledging = frozenset(acknowledging)
        silent = {who: self._deadline_s(who) for who in sorted(self._rhythms) if self._left_s(who) <= 0}
        for who in silent:
            del self._rhythms[who]
        return silent

    def silent_s(self, who: str) -> float:
        """How long `who` had been silent at the last call. Raises `KeyError` for one that is not watched."""
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
