"""Nine of ten broken guards of the machines are noticed by their own tests (see `guards`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

GUARDS = Path(__file__).with_name("guards.py")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("module", ["stage", "driver", "restoring", "roles", "silence"])
def test_broken_guards_are_noticed(module: str, tmp_path: Path):
    figures = tmp_path / "mutation.json"
    command = [sys.executable, str(GUARDS), "--module", module, "--quiet", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (measured,) = json.loads(figures.read_text(encoding="utf-8"))["modules"]
    assert measured["mutants"] > 0
    assert measured["share"] >= 0.9
