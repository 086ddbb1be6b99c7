"""When a provider lends its machine: windows of the week, by the machine's own clock. Pure: the local time comes in.

Decides whether the machine is lent now and when that changes. A window belongs to the day on which it begins, so
`fri 22:00-07:00` ends on Saturday. Neighbours: `peer.lending` follows it, `cli.join` reads the flag.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from fusionai.primitives.errors import UsageError

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
        """When the machine is lent no more, or lent again; None: never."""
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
