"""Every module, definition and message field serves a command: read from the syntax of the source (`source_graph`)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import pytest

from harness.source_graph import modules, reached_modules, unreached

UNREACHED_MODULES: dict[str, str] = {}
"""Module -> why no command reaches it and it stays."""
UNREACHED: dict[str, str] = {
    "fusionai.cli.analyze.shipped_comparisons": "docs/generate.py writes docs/analysis.md from it",
    "fusionai.dashboard.analysis_document.document": "docs/generate.py writes docs/analysis.md with it",
    "fusionai.dashboard.analysis_document._markdown": "part of `document`",
    "fusionai.coordination.machine.START": "part of `rows`",
    "fusionai.coordination.machine.rows": "docs/generate.py draws docs/machines.md from it",
    "fusionai.serving.inspection.Measured": "result of `measured`",
    "fusionai.serving.inspection.measured": "benchmarks/verification_serving.py measures limits with it",
    "fusionai.wire.messages.HANDED_ON": "names that other modules take from there",
}
"""Definition -> who uses it instead of a command."""
MOST_EXCEPTIONS = 20


def test_every_module_serves_a_command():
    idle = sorted(set(modules()) - reached_modules() - set(UNREACHED_MODULES))
    assert not idle, f"no command reaches {idle}: delete them, or say in UNREACHED_MODULES why they stay"


def test_every_definition_serves_a_command():
    idle = sorted(f"{unit.module}.{unit.name}" for unit in unreached())
    new = [name for name in idle if name not in UNREACHED]
    assert not new, f"no command reaches {new}: delete them with their tests, or say in UNREACHED who uses them"


def test_exceptions_are_few_and_still_needed():
    idle = {f"{unit.module}.{unit.name}" for unit in unreached()}
    assert not set(UNREACHED) - idle, "reached again"
    assert not set(UNREACHED_MODULES) & reached_modules(), "reached again"
    assert len(UNREACHED) + len(UNREACHED_MODULES) <= MOST_EXCEPTIONS
