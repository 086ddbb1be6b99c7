"""Leases: for how long a silent member or unattended job still counts as present, and when silence becomes loss.

Leases live in memory only. After a restart of the broker each member gets one whole lease of grace (`granted`).
Durations and the time are arguments. `broker.state` keeps a lease for each member and each unattended job.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from fusionai.coordination.machine import Machine, State, Transition


@dataclass(frozen=True, slots=True)
class Heard:
    """A sign of life at `now_s` (monotonic)."""

    now_s: float


@dataclass(frozen=True, slots=True)
class Elapsed:
    """The time is now `now_s`."""

    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease(State):
    duration_s: float
    heard_s: float
    """When it was granted or last renewed; on the broker's monotonic clock."""

    @property
    def expires_at_s(self) -> float:
        return self.heard_s + self.duration_s


def grant(entity: str, now_s: float, duration_s: float) -> Lease:
    return Lease(entity=entity, phase="granted", duration_s=duration_s, heard_s=now_s)


def _renew(lease: Lease, event: Heard) -> tuple[Lease, tuple[Any, ...]]:
    """Renew the lease. A delayed sign of life never shortens it."""
    return replace(lease, phase="renewed", heard_s=max(lease.heard_s, event.now_s)), ()


def _elapse(lease: Lease, event: Elapsed) -> tuple[Lease, tuple[Any, ...]]:
    return (replace(lease, phase="expired") if event.now_s >= lease.expires_at_s else lease), ()


LEASE: Final[Machine[Lease, Any]] = Machine(
    "lease",
    (
        Transition(("granted", "renewed"), Heard, ("renewed",), _renew),
        Transition(("granted",), Elapsed, ("granted", "expired"), _elapse),
        Transition(("renewed",), Elapsed, ("renewed", "expired"), _elapse),
    ),
    initial=("granted",),
    final=("expired",),
)
