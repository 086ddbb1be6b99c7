"""What holds for every folder of tests: what is not imported, how much is tried, what the collector passes over."""

from __future__ import annotations

import gc
import re
from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest

from harness.examples import set_examples

QUICK: Final = "not slow and not long"
"""What `make quick` selects by."""
COLLECTED_EVERY: Final = (20_000, 5, 5)
"""Objects until the collector looks at the youngest, and so on. With Python's 700 a tenth of the tests' time is its."""
ALL_SLOW: Final = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.(slow|long)\b", re.MULTILINE)
"""A whole file's mark; first in its list if it has more than one."""


def pytest_configure(config: pytest.Config) -> None:
    set_examples(quick=config.option.markexpr == QUICK)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Both processes of the quick tests import every file they are to choose from: clients, browsers, models."""
    if config.option.markexpr != QUICK or collection_path.suffix != ".py":
        return None
    return bool(ALL_SLOW.search(collection_path.read_text(encoding="utf-8"))) or None


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
