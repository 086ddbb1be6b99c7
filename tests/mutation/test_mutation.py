"""Nine of ten broken guards of the machines are noticed by their own tests (see `guards`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mutation.guards import ACCEPTED, SUBJECTS, Subject
from mutation.mutants import mutants

GUARDS = Path(__file__).with_name("guards.py")
SHORT = {"membership", "machine", "serving.sessions"}
"""Modules whose mutants are run by hand only."""


@pytest.mark.slow
def test_what_is_accepted_still_exists():
    """The reason belongs to a guard; with another guard it must be thought through again."""
    for module, name in ACCEPTED:
        source = SUBJECTS[module].path.read_text(encoding="utf-8")
        assert name in {mutant.name for mutant in mutants(source)}, f"{module} has no guard any more: {name}"


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_every_module_has_guards_and_tests(subject: Subject):
    assert mutants(subject.path.read_text(encoding="utf-8"))
    assert subject.test_files


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("module", [name for name in SUBJECTS if name not in SHORT])
def test_broken_guards_are_noticed(module: str, tmp_path: Path):
    figures = tmp_path / "mutation.json"
    command = [sys.executable, str(GUARDS), "--module", module, "--quiet", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (measured,) = json.loads(figures.read_text(encoding="utf-8"))["modules"]
    assert measured["mutants"] > 0
    assert measured["share"] >= 0.9
