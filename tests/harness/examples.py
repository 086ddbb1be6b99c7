"""How many examples a property is tried with. Decides that the quick tests try a quarter of each, the suite half, and
that only a run of its own, part of the long ones, tries all.

Neighbours: `conftest` sets hypothesis' own number for a run, to which these are scaled.
"""

from __future__ import annotations

from typing import Final

from hypothesis import settings

WHOLE: Final = 100
"""Hypothesis' number where nobody sets another."""
SUITE: Final = 50
QUICK: Final = 25
FEWEST: Final = 8


def set_fewer(count: int) -> None:
    """Before tests are imported."""
    settings.register_profile("fewer", max_examples=count)
    settings.load_profile("fewer")


def examples(count: int) -> int:
    """For `settings(max_examples=...)`: `count` where all are tried."""
    return max(min(count, FEWEST), count * settings().max_examples // WHOLE)
