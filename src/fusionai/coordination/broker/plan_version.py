"""Versions of plans, which only grow and never change once minted.

One counter serves the whole pool, so no two plans share a version, not even plans of two jobs. A version is minted by a
journalled `PlanMinted` and becomes known only when that row is on disk. `pool` keeps the versions; peers compare them
as the first part of a fence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from fusionai.coordination.broker.events import MemberPlacement, PlanMinted
from fusionai.coordination.machine import Machine, State, Transition
from fusionai.primitives.errors import FusionError
from fusionai.primitives.ids import JobId

FIRST_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Superseded:
    """The job has a newer plan. Follows from `PlanMinted`."""


@dataclass(frozen=True, slots=True)
class Retired:
    """The job has ended. Follows from `JobDone` or `JobFailed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanVersion(State):
    version: int
    job: JobId
    plan: bytes
    members: tuple[MemberPlacement, ...]


def mint(fact: PlanMinted, newest: int) -> PlanVersion:
    """Raises `FusionError` unless the fact's version is the one after the pool's `newest`."""
    if fact.version != newest + 1:
        raise FusionError(f"expected plan version {newest + 1} to be minted next, got {fact.version} for {fact.job}.")
    return PlanVersion(
        entity=f"plan version {fact.version}",
        phase="current",
        story=("PlanMinted -> current",),
        version=fact.version,
        job=JobId(fact.job),
        plan=fact.plan,
        members=fact.members,
    )


def _supersede(plan: PlanVersion, event: Superseded) -> tuple[PlanVersion, tuple[Any, ...]]:
    del event
    return replace(plan, phase="superseded"), ()


def _retire(plan: PlanVersion, event: Retired) -> tuple[PlanVersion, tuple[Any, ...]]:
    del event
    return replace(plan, phase="retired"), ()


PLAN_VERSION: Final[Machine[PlanVersion, Any]] = Machine(
    "plan version",
    (
        Transition(("current",), Superseded, ("superseded",), _supersede),
        Transition(("current",), Retired, ("retired",), _retire),
    ),
    initial=("current",),
    final=("superseded", "retired"),
)
