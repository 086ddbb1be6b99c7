"""The page of promised bits names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def test_every_promise_has_a_test_that_exists():
    named = NAMED.findall((ROOT / "docs" / "bits.md").read_text(encoding="utf-8"))
    assert len(named) > 20
    for file, test in named:
        path = ROOT / file
        assert path.is_file(), file
        assert not test or f"def {test}(" in path.read_text(encoding="utf-8"), f"{file}::{test}"


def test_every_row_of_the_page_has_a_reason_and_a_test():
    for line in (ROOT / "docs" / "bits.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.startswith(("| promise", "| ---")):
            _, _, reason, test, _ = line.split("|")
            assert re.search(r"construction|probe|refusal|tried", reason), line
            assert NAMED.search(test), line
