"""Who has been silent for too long. Decides when silence becomes suspicion; never sends, closes or replaces anything.

Time is counted while the watcher itself is awake. Calls are at most a ping's interval apart when all is well; a gap
longer than `stall_s` means that the watcher stood still (a closed lid, a stopped process, a starved machine), and what
others did meanwhile lies unread. Such a gap counts as one ping's interval: nobody is suspected for the watcher's own
sleep, and a watcher that stalls all the time still finds out who is dead, only later.

Neighbours: whoever has the connections calls `heard` for every frame and `tick` in time; what follows from a suspicion
is decided by the job's driver. The broker's leases (`lease`) are slower and survive its restart by a grace.
"""

from __future__ import annotations

from typing import Final

PING_S: Final = 0.5
"""How often a quiet connection is asked for a sign of life."""
DEADLINE_S: Final = 4.0
STALL_S: Final = 1.0


class Silence:
    """Watches a changing set of peers on the watcher's monotonic clock. Times that run backwards are ignored."""

    def __init__(self, *, ping_s: float = PING_S, deadline_s: float = DEADLINE_S, stall_s: float = STALL_S) -> None:
        """Raises `ValueError` unless 0 < ping <= stall and ping < deadline: else a healthy peer would be suspected."""
        if not 0 < ping_s <= stall_s or not ping_s < deadline_s:
            raise ValueError(f"expected 0 < ping <= stall and ping < deadline, got {ping_s}, {stall_s}, {deadline_s} s")
        self.ping_s = ping_s
        self.deadline_s = deadline_s
        self.stall_s = stall_s
        self._now_s: float | None = None
        self._awake_s = 0.0
        """Time spent awake, up to `_now_s`."""
        self._heard_s: dict[str, float] = {}
        """For each peer watched, the waking time when it was last heard."""

    @property
    def watched(self) -> frozenset[str]:
        return frozenset(self._heard_s)

    def watch(self, who: str, now_s: float) -> None:
        """From now on `who` is expected to be heard; again for one watched already counts as hearing it."""
        self._advance(now_s)
        self._heard_s[who] = self._awake_s

    def forget(self, who: str) -> None:
        """Its silence means nothing any more."""
        self._heard_s.pop(who, None)

    def heard(self, who: str, now_s: float) -> None:
        """A sign of life, whatever it says. A late one of somebody no longer watched starts nothing."""
        self._advance(now_s)
        if who in self._heard_s:
            self._heard_s[who] = self._awake_s

    def tick(self, now_s: float) -> tuple[str, ...]:
        """Who has been silent for `deadline_s` or longer, in alphabetical order; each once, then it is forgotten."""
        self._advance(now_s)
        silent = tuple(sorted(who for who in self._heard_s if self.silent_s(who) >= self.deadline_s))
        for who in silent:
            del self._heard_s[who]
        return silent

    def silent_s(self, who: str) -> float:
        """How long `who` had been silent at the last call. Raises `KeyError` for one that is not watched."""
        return self._awake_s - self._heard_s[who]

    def next_tick_s(self) -> float | None:
        """When `tick` wants to be called next: after a ping's interval, or at the first deadline if that is sooner.
        None while nobody is watched."""
        if self._now_s is None or not self._heard_s:
            return None
        left_s = self.deadline_s - max(self.silent_s(who) for who in self._heard_s)
        return self._now_s + max(0.0, min(self.ping_s, left_s))

    def _advance(self, now_s: float) -> None:
        if self._now_s is None:
            self._now_s = now_s
        passed_s = now_s - self._now_s
        if passed_s <= 0:
            return
        self._now_s = now_s
        self._awake_s += passed_s if passed_s <= self.stall_s else self.ping_s
