"""Every causal family of the installed transformers has a row in docs/families.json, with a reason where it needs one.

A new version of transformers shows here what is new: `python benchmarks/families.py` tries it.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from harness.families import EXCEPTIONS, family_names

FILE = Path(__file__).parents[3] / "docs" / "families.json"
REFUSED = 23
"""Families that are refused today. Lower it when one is served; the aim is at most a twentieth of all."""
UNREADY = {"inkling_text"}
"""Families that are not ready in time today."""
READY_S = 60.0
"""Longest processor time until a family is ready."""
SLOW = {"hrm_text"}
"""Families that take longer today: this one runs its layers in nested loops, and all of them are traced."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    document = json.loads(FILE.read_text(encoding="utf-8"))
    assert document["transformers"] == version("transformers"), "run benchmarks/families.py"
    return document


@pytest.fixture(scope="module")
def rows(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in found["rows"]}


def test_every_family_has_a_row_or_is_named_as_untried(found: dict[str, Any], rows: dict[str, dict[str, Any]]) -> None:
    assert sorted([*rows, *found["untried"]]) == sorted(family_names()), "run benchmarks/families.py"


def test_no_family_is_served_wrongly(rows: dict[str, dict[str, Any]]) -> None:
    assert [name for name, row in rows.items() if row["how"] == "missed"] == []


def test_few_families_are_refused_and_each_has_a_reason(rows: dict[str, dict[str, Any]]) -> None:
    assert all(row["reason"] for row in rows.values() if row["how"] in ("refused", "broken"))
    refused = sum(row["how"] == "refused" for row in rows.values())
    assert refused <= REFUSED


def test_every_family_is_ready_within_a_minute(rows: dict[str, dict[str, Any]]) -> None:
    assert {name for name, row in rows.items() if row["ready_s"] > READY_S} == SLOW
    assert {name for name, row in rows.items() if row["how"] == "unready"} <= UNREADY


def test_exceptions_are_of_known_configurations() -> None:
    from transformers import CONFIG_MAPPING

    assert set(EXCEPTIONS) <= set(CONFIG_MAPPING)
