"""Events that the drivers of training and serving jobs share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A member's process ended, was silent beyond the deadline, or can't be reached."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The job's owner, or its broker, ends the job."""

    reason: str


@dataclass(frozen=True, slots=True)
class CommandFailed:
    """The driver's own machine could not perform a command (disk full, data unreadable)."""

    reason: str
