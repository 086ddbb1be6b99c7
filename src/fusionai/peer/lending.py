"""What a provider lends and when: options, weekly schedule, and pauses while other programs use the machine.

The schedule goes by the machine's own clock. A window belongs to the day on which it begins, so `fri 22:00-07:00` ends
on Saturday. Lending pauses within seconds when other programs compute, and resumes only after a longer quiet time.
`peer.daemon` hands its work over when lending pauses and registers again when it resumes.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

import psutil

from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import UsageError
from fusionai.primitives.ids import PeerId
from fusionai.scheduling.problem.types import PeerProfile
from fusionai.transport.enrolment import MEMBERSHIP_FILE
from fusionai.transport.routes.addresses import format_address, parse_address

DEVICES_DIRECTORY: Final = "devices"
"""Below a home: the homes of further devices."""
DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY_MINUTES: Final = 24 * 60
_WEEK: Final = timedelta(days=7)
_EXPECTED: Final = "a time such as 22:00-07:00, mon-fri 18:00-23:30 or sat,sun"
_ENTRY: Final = re.compile(r"^\s*(?P<days>[a-z][a-z,\s-]*)?(?P<times>\d{1,2}:\d{2}\s*-\s*\d{1,2}:\d{2})?\s*$")
_TIME: Final = re.compile(r"^(\d{1,2}):(\d{2})$")


@dataclass(frozen=True, slots=True)
class Window:
    """Minutes of the week, from Monday's midnight. `length` of a whole week is always."""

    begin: int
    length: int

    def holds(self, moment: timedelta) -> bool:
        """`moment`: since Monday's midnight."""
        return (moment - timedelta(minutes=self.begin)) % _WEEK < timedelta(minutes=self.length)


@dataclass(frozen=True, slots=True)
class Schedule:
    """At least one window."""

    windows: tuple[Window, ...]

    def lent(self, local: datetime) -> bool:
        moment = _moment_of_week(local)
        return any(window.holds(moment) for window in self.windows)

    def next_change(self, local: datetime) -> datetime | None:
        """Return when lending ends or begins next; None: never."""
        now, moment = self.lent(local), _moment_of_week(local)
        edges = {edge for window in self.windows for edge in (window.begin, window.begin + window.length)}
        ahead = ((timedelta(minutes=edge) - moment) % _WEEK for edge in edges)
        changes = (local + wait for wait in sorted(ahead) if wait and self.lent(local + wait) != now)
        return next(changes, None)


def parse_schedule(entries: Sequence[str]) -> Schedule:
    """`22:00-07:00` every day; `mon-fri 18:00-23:30`; `sat,sun` whole days. Together they are all times that one of
    them names. Raises `UsageError`."""
    return Schedule(tuple(window for entry in entries for window in _windows(entry)))


def _windows(entry: str) -> list[Window]:
    found = _ENTRY.match(entry.lower())
    if found is None or not (found["days"] or found["times"]):
        raise UsageError(f"expected {_EXPECTED}, got {entry!r}.")
    begin, end = 0, _DAY_MINUTES
    if found["times"]:
        begin, end = (_minutes(part.strip(), entry) for part in found["times"].split("-"))
        if begin == end:
            raise UsageError(f"expected {_EXPECTED}, got {entry!r}, which ends when it begins.")
    length = (end - begin) % _DAY_MINUTES or _DAY_MINUTES
    days = _days(found["days"], entry) if found["days"] else range(7)
    return [Window(day * _DAY_MINUTES + begin, length) for day in days]


def _days(text: str, entry: str) -> list[int]:
    days: list[int] = []
    for part in text.replace(" ", "").strip(",").split(","):
        first, _, last = part.partition("-")
        for name in (first, last or first):
            if name not in DAYS:
                raise UsageError(f"expected days such as mon, fri or mon-fri, got {name!r} in {entry!r}.")
        begin = DAYS.index(first)
        count = (DAYS.index(last or first) - begin) % 7 + 1
        days += [(begin + step) % 7 for step in range(count)]
    return days


def _minutes(text: str, entry: str) -> int:
    found = _TIME.match(text)
    minutes = int(found[1]) * 60 + int(found[2]) if found is not None else -1
    if found is None or int(found[2]) > 59 or not 0 <= minutes <= _DAY_MINUTES:
        raise UsageError(f"expected a time from 00:00 to 24:00, got {text!r} in {entry!r}.")
    return minutes


def _moment_of_week(local: datetime) -> timedelta:
    midnight = local.replace(hour=0, minute=0, second=0, microsecond=0)
    return timedelta(days=local.weekday()) + (local - midnight)


LOOK_EVERY_S: Final = 2.0
BUSY_SHARE: Final = 0.25
"""Share of the processor (all cores) used by other programs above which the machine counts as busy."""
QUIET_SHARE: Final = 0.10
BUSY_AFTER_S: Final = 8.0
QUIET_AFTER_S: Final = 120.0
LOOK_AT_CARDS_EVERY_S: Final = 0.5
CARD_BUSY_SHARE: Final = 0.30
"""Share of a graphics card's time above which it counts as busy: more than a desktop with a video takes (chosen)."""
CARD_BUSY_AFTER_S: Final = 1.0
"""A game stutters from its first picture on, so that the lending pauses within two seconds."""


@dataclass(slots=True)
class BusyWatch:
    """Hysteresis of pauses. `busy`: lending pauses. It does if more than `busy_share` is used for `after_s`."""

    busy: bool = False
    busy_share: float = BUSY_SHARE
    after_s: float = BUSY_AFTER_S
    _since_s: float | None = None
    """When the measured share first called for a change, without a break since."""

    def measured(self, others_share: float, now_s: float) -> bool:
        """Return `busy`. `others_share`: load by other programs since the last call, in [0, 1]."""
        for_change = others_share < QUIET_SHARE if self.busy else others_share > self.busy_share
        if not for_change:
            self._since_s = None
            return self.busy
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s >= (QUIET_AFTER_S if self.busy else self.after_s):
            self.busy, self._since_s = not self.busy, None
        return self.busy


@dataclass(slots=True)
class OthersLoad:
    """Share of the processor that other programs used since the last call, in [0, 1]."""

    _process: psutil.Process = field(default_factory=psutil.Process)
    _before: tuple[float, float, float] | None = None

    def measured(self, now_s: float) -> float:
        times = psutil.cpu_times()
        # Guest time is part of user time. Stolen time belongs to other virtual machines.
        not_busy = ("idle", "iowait", "steal", "guest", "guest_nice")
        busy_s = sum(times) - sum(getattr(times, name, 0.0) for name in not_busy)
        now = (now_s, busy_s, sum(self._own_s()))
        before, self._before = self._before, now
        if before is None or now[0] <= before[0]:
            return 0.0
        # A worker that has ended takes its seconds with it, so that this may seem to go backwards.
        others_s = (now[1] - before[1]) - (now[2] - before[2])
        return min(1.0, max(0.0, others_s / ((now[0] - before[0]) * (os.cpu_count() or 1))))

    def _own_s(self) -> Iterator[float]:
        """Yield the processor time of this process and of its workers, in seconds."""
        for process in (self._process, *self._process.children()):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                yield times.user + times.system


class Lending:
    """Says when this machine is lent. `local`: its own time of day. `schedule` None: at all times. `pause_when_busy`:
    not while other programs compute. `card_load`: use of the lent cards by other programs; None: there are none."""

    def __init__(
        self,
        schedule: Schedule | None,
        *,
        pause_when_busy: bool,
        clock: Clock,
        local: Callable[[], datetime] = datetime.now,
        load: Callable[[float], float] | None = None,
        card_load: Callable[[float], float] | None = None,
    ) -> None:
        self._schedule = schedule
        self._watch = BusyWatch() if pause_when_busy else None
        self._card_watch = BusyWatch(busy_share=CARD_BUSY_SHARE, after_s=CARD_BUSY_AFTER_S)
        self._card_load = card_load if pause_when_busy else None
        self._clock = clock
        self._local = local
        self._load = load or OthersLoad().measured

    @property
    def always(self) -> bool:
        """Whether there is nothing to watch."""
        return self._schedule is None and self._watch is None

    def why_not(self) -> str | None:
        """Sample the load and return why the machine is not lent now; None if it is."""
        now_s = self._clock.now_s()
        # Sampled in any case, because a sample covers the time since the previous one.
        busy = self._watch is not None and self._watch.measured(self._load(now_s), now_s)
        on_cards = self._card_load is not None and self._card_watch.measured(self._card_load(now_s), now_s)
        local = self._local()
        if self._schedule is not None and not self._schedule.lent(local):
            opens = self._schedule.next_change(local)
            return "its schedule keeps it" + ("" if opens is None else f" until {opens:%a %H:%M}")
        if on_cards:
            return "another program uses the graphics card"
        return "other programs use it" if busy else None

    async def until(self, *, lent: bool) -> str | None:
        """Wait until the machine is lent or, with `lent` False, is not lent. Return the reason in that case."""
        while True:
            why = self.why_not()
            if (why is None) == lent:
                return why
            await asyncio.sleep(LOOK_EVERY_S if self._card_load is None else LOOK_AT_CARDS_EVERY_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """`invitation` is needed the first time only. `memory_limit_bytes` None lends what the device has, less a reserve.
    `share` in (0, 1] is the part of the time lent. The upload and download limits hold for all connections together.
    `device`: as `parse_devices` takes it. `jobs`: number of jobs that each device works for at a time. `schedule` None:
    at all times; `pause_when_busy`: not while other programs use the machine. `advertise`: addresses to announce
    instead of this machine's own (a forwarded port, a name). `relay`: other machines may connect over the broker's
    relay; None: unless `advertise` is given. `measure`: measure even if a recent measurement exists."""

    home: Path
    invitation: str | None = None
    backend: str = "auto"
    device: str = "auto"
    jobs: int = 1
    threads: int | None = None
    memory_limit_bytes: int | None = None
    share: float = 1.0
    upload_limit_bytes_per_s: float | None = None
    download_limit_bytes_per_s: float | None = None
    schedule: Schedule | None = None
    pause_when_busy: bool = False
    name: str = ""
    host: str = "0.0.0.0"
    port: int = 0
    advertise: tuple[str, ...] = ()
    relay: bool | None = None
    measure: bool = False
    parts: int = 1
    """Number of members that lend this device together: each lends an equal part of its memory."""
    weights_cache_bytes: int | None = None
    """Most bytes of fetched weights on the disk; None: half of what is free for them at the start."""
    weights_beside: Path | None = None
    """Remembered hashes of files on this machine whose tensors are read in place (`storage.weight_manifest`)."""
    measured_beside: Path | None = None
    """Directory of peers on this machine that share one measurement."""


@dataclass(frozen=True, slots=True)
class PeerReady:
    """The peer is registered, and the pool may place work on it."""

    peer: PeerId
    pool: str
    addresses: tuple[str, ...]
    profile: PeerProfile
    measured_at_s: float | None = None
    """When the speeds were measured, in seconds since 1970; None: at this start."""


def parse_devices(text: str) -> tuple[str, ...]:
    """Return the devices that a text such as `cuda:0,cuda:1` names. `auto` and `all` stand alone; only `cpu` may be
    named several times, for as many members that divide its threads and memory. Raises `UsageError`."""
    names = tuple(name.strip() for name in text.lower().split(","))
    expected = "expected auto, all, or devices such as cuda:0,cuda:1 or cuda,cpu"
    if not all(names):
        raise UsageError(f"{expected}, got {text!r}.")
    if len(names) > 1 and (alone := {"auto", "all"} & set(names)):
        raise UsageError(f"{expected}; {sorted(alone)[0]} stands alone, got {text!r}.")
    if twice := sorted({name for name in names if name != "cpu" and names.count(name) > 1}):
        raise UsageError(f"{expected}, each card once, got {twice[0]} twice in {text!r}.")
    return names


def options_of_devices(options: PeerOptions, found: Sequence[str] = ()) -> list[PeerOptions]:
    """Return the options of each member that lends a device or a part of one. `found`: the devices that `all` stands
    for; until they are known, it stands for the first. The first member keeps the machine's home, port and name;
    further ones have homes of their own, the next ports, and say in their names what they lend."""
    asked = parse_devices(options.device)
    devices = tuple(found) or (("auto",) if asked == ("all",) else asked)
    names = tuple(name for name in devices for _ in range(options.jobs))
    if len(names) == 1:
        return [replace(options, device=names[0])]
    parts = Counter(names)
    counted, each = Counter[str](), list[PeerOptions]()
    for place, name in enumerate(names):
        counted[name] += 1
        label = name if parts[name] == 1 else f"{name} {counted[name]}".removeprefix("auto ")
        cores = psutil.cpu_count(logical=False) or 1
        own = options.home / DEVICES_DIRECTORY / label.replace(":", "-").replace(" ", "-")
        one = replace(
            options,
            device=name,
            home=options.home if place == 0 else own,
            name=f"{options.name or socket.gethostname()} {label}",
            port=options.port and options.port + place,
            advertise=tuple(_next_port(address, place) for address in options.advertise),
            parts=parts[name],
            threads=options.threads or (max(1, cores // parts[name]) if parts[name] > 1 else None),
        )
        each.append(one)
    return each


def device_homes(home: Path) -> tuple[Path, ...]:
    """Return the homes of further devices that this machine has lent."""
    return tuple(sorted(path.parent for path in (home / DEVICES_DIRECTORY).glob(f"*/{MEMBERSHIP_FILE}")))


def _next_port(address: str, further: int) -> str:
    target = parse_address(address)
    return address if target is None else format_address(target[0], target[1] + further)
