"""How many examples a property is tried with. Decides that the quick tests try fewer of each than the whole suite, and
that no property fails because the machine is slow.

Neighbours: `conftest` sets hypothesis' own number for a run, to which these are scaled.
"""

from __future__ import annotations

from typing import Final

from hypothesis import HealthCheck, settings

WHOLE: Final = 100
"""Hypothesis' number where nobody sets another."""
QUICK: Final = 25
FEWEST: Final = 8


def set_examples(*, quick: bool) -> None:
    """Before tests are imported."""
    found = QUICK if quick else WHOLE
    settings.register_profile("own", max_examples=found, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("own")


def examples(count: int) -> int:
    """For `settings(max_examples=...)`: `count` in the whole suite."""
    return max(min(count, FEWEST), count * settings().max_examples // WHOLE)
