"""How many examples a property is tried with. Decides that the quick tests try fewer of each than the whole suite.

Neighbours: `conftest` sets hypothesis' own number for a run, to which these are scaled.
"""

from __future__ import annotations

from typing import Final

from hypothesis import settings

WHOLE: Final = 100
"""Hypothesis' number where nobody sets another."""
QUICK: Final = 25
FEWEST: Final = 8


def set_quick() -> None:
    """Before tests are imported."""
    settings.register_profile("quick", max_examples=QUICK)
    settings.load_profile("quick")


def examples(count: int) -> int:
    """For `settings(max_examples=...)`: `count` in the whole suite."""
    return max(min(count, FEWEST), count * settings().max_examples // WHOLE)
