"""What became of blows against a job: when it was noticed, when the job was past it, and figures over many of them.

Neighbours: `harness.siege` judges them, chaos tests print the figures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.killer import Role


@dataclass(slots=True)
class Outcome:
    """What a blow led to. Seconds count from the blow; None: it never came to that."""

    what: str
    role: Role
    names: tuple[str, ...]
    """Of those one of whom the driver will name."""
    at_s: float
    """Seconds since 1970."""
    driver: int
    """Which start of the driver it met."""
    committed: int
    """Official steps then."""
    detected_s: float | None = None
    """Until the driver said so."""
    recovered_s: float | None = None
    """Until the next step was official."""
    waited: bool = False
    """For a machine that could stand in, or for the broker."""
    bereaved: bool = False
    """The driver was killed before the job was past it: its next start counts in."""
    until_s: float = math.inf
    """Seconds since 1970: what is said of the same names later is not about this."""


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Median and worst by role, seconds."""
    found: dict[str, Any] = {}
    for role in Role:
        of_role = [outcome for outcome in outcomes if outcome.role is role]
        if of_role:
            found[role.value] = {
                "blows": len(of_role),
                "waited": sum(outcome.waited for outcome in of_role),
                "bereaved": sum(outcome.bereaved for outcome in of_role),
                "detected_s": _spread(outcome.detected_s for outcome in of_role if not outcome.bereaved),
                "recovered_s": _spread(outcome.recovered_s for outcome in of_role if not outcome.bereaved),
                "recovered_without_waiting_s": _spread(
                    outcome.recovered_s for outcome in of_role if not (outcome.waited or outcome.bereaved)
                ),
            }
    return found


def as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "what": outcome.what,
        "names": outcome.names,
        "at_step": outcome.committed,
        "driver": outcome.driver,
        "detected_s": outcome.detected_s,
        "recovered_s": outcome.recovered_s,
        "waited": outcome.waited,
        "bereaved": outcome.bereaved,
    }


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"count": len(known), "median": round(statistics.median(known), 3), "worst": round(max(known), 3)}
