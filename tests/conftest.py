"""What holds for every folder of tests: what is not imported, what the collector passes over, how many examples."""

from __future__ import annotations

import gc
import re
from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import settings

QUICK: Final = "not slow and not long"
"""What `make quick` selects by."""
COLLECTED_EVERY: Final = (20_000, 5, 5)
"""Objects until the collector looks at the youngest, and so on. With Python's 700 a tenth of the tests' time is its."""
FEWER: Final = 5
"""Quick tests of properties try so many times fewer examples than the same tests among all."""
FEWEST: Final = 10
ALL_SLOW: Final = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.(slow|long)\b", re.MULTILINE)
"""A whole file's mark; first in its list if it has more than one."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Both processes of the quick tests import every file they are to choose from: clients, browsers, models."""
    if config.option.markexpr != QUICK or collection_path.suffix != ".py":
        return None
    return bool(ALL_SLOW.search(collection_path.read_text(encoding="utf-8"))) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.markexpr != QUICK:
        return
    seen: set[object] = set()
    for item in items:
        test = getattr(item, "function", None)
        usual: settings | None = getattr(test, "_hypothesis_internal_use_settings", None)
        if usual is None or test in seen:
            continue
        seen.add(test)
        few = max(min(FEWEST, usual.max_examples), usual.max_examples // FEWER)
        test._hypothesis_internal_use_settings = settings(usual, max_examples=few)  # pyright: ignore


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Of the million objects that importing leaves behind none goes before the end: no collection looks at them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*COLLECTED_EVERY)
        gc.enable()
