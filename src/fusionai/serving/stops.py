"""Finds stop strings in text that comes in pieces. Decides where the text ends and how much of it is held back.

Text that was passed on is never part of a stop string; text that is held back still may be. Neighbours: `decoding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scanned:
    """Text that may be passed on, and the stop string that follows it, if one was found."""

    text: str
    stop: str | None = None


class StopScanner:
    """The stop string that is completed first ends the text; of two that end at the same place, the longer one. How the
    text is cut into pieces makes no difference."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._waiting = ""

    def feed(self, fresh: str) -> Scanned:
        """Scan more text."""
        text = self._waiting + fresh
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, stop = min(found)
            self._waiting = ""
            return Scanned(text[:at], stop)
        held = max((overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - held
        self._waiting = text[cut:]
        return Scanned(text[:cut])

    def rest(self) -> str:
        """End the text; returns what was held back."""
        text, self._waiting = self._waiting, ""
        return text


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
