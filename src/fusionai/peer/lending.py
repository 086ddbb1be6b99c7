"""Whether this machine is lent at the moment: the provider's schedule, and whether anybody works at it.

Looks at clock and processor every `LOOK_EVERY_S` and tells who waits. Decides when what other programs compute pauses
lending and when lending goes on, with patience both ways: a game that starts is noticed within seconds, a machine
between two compilations is not lent for a moment. Neighbours: `peer.schedule` has the provider's hours; `peer.daemon`
hands its work over when lending pauses and enters the pool again when it goes on.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

import psutil

from fusionai.peer.schedule import Schedule
from fusionai.primitives.clock import Clock

LOOK_EVERY_S: Final = 2.0
BUSY_SHARE: Final = 0.25
"""Of the processor (all cores), or of the accelerator, used by other programs: the owner is at work."""
QUIET_SHARE: Final = 0.10
BUSY_AFTER_S: Final = 8.0
QUIET_AFTER_S: Final = 120.0


@dataclass(slots=True)
class BusyWatch:
    """`busy`: whether lending pauses."""

    busy: bool = False
    _since_s: float | None = None
    """Since when what is measured speaks for a change without a break."""

    def measured(self, others_share: float, now_s: float) -> bool:
        """`others_share`: what other programs used since the last call, in [0, 1]. Gives `busy`."""
        for_change = others_share < QUIET_SHARE if self.busy else others_share > BUSY_SHARE
        if not for_change:
            self._since_s = None
            return self.busy
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s >= (QUIET_AFTER_S if self.busy else BUSY_AFTER_S):
            self.busy, self._since_s = not self.busy, None
        return self.busy


@dataclass(slots=True)
class OthersLoad:
    """What other programs than this one used of the processor since the last call, in [0, 1]."""

    _process: psutil.Process = field(default_factory=psutil.Process)
    _before: tuple[float, float, float] | None = None

    def measured(self, now_s: float) -> float:
        times = psutil.cpu_times()
        # Guests' time is in the user's already; what a host takes away is nobody's here.
        not_busy = ("idle", "iowait", "steal", "guest", "guest_nice")
        busy_s = sum(times) - sum(getattr(times, name, 0.0) for name in not_busy)
        own = self._process.cpu_times()
        now = (now_s, busy_s, own.user + own.system)
        before, self._before = self._before, now
        if before is None or now[0] <= before[0]:
            return 0.0
        others_s = (now[1] - before[1]) - (now[2] - before[2])
        return min(1.0, max(0.0, others_s / ((now[0] - before[0]) * (os.cpu_count() or 1))))


class Lending:
    """`local`: the machine's own time of day. `schedule` None: always; `pause_when_busy`: not while others compute."""

    def __init__(
        self,
        schedule: Schedule | None,
        *,
        pause_when_busy: bool,
        clock: Clock,
        local: Callable[[], datetime] = datetime.now,
        load: Callable[[float], float] | None = None,
    ) -> None:
        self._schedule = schedule
        self._watch = BusyWatch() if pause_when_busy else None
        self._clock = clock
        self._local = local
        self._load = load or OthersLoad().measured

    @property
    def always(self) -> bool:
        """Whether there is nothing to watch."""
        return self._schedule is None and self._watch is None

    def why_not(self) -> str | None:
        """Look. Why the machine is not lent now, None if it is."""
        now_s = self._clock.now_s()
        # Measured in any case: what one look finds is about the time since the one before.
        busy = self._watch is not None and self._watch.measured(self._load(now_s), now_s)
        local = self._local()
        if self._schedule is not None and not self._schedule.lent(local):
            opens = self._schedule.next_change(local)
            return "its schedule keeps it" + ("" if opens is None else f" until {opens:%a %H:%M}")
        return "other programs use it" if busy else None

    async def until(self, *, lent: bool) -> str | None:
        """Until the machine is lent, or (`lent` False) kept: then why."""
        while True:
            why = self.why_not()
            if (why is None) == lent:
                return why
            await asyncio.sleep(LOOK_EVERY_S)
