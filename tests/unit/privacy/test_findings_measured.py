"""Which figure tells a level, and that the shipped ones are whole."""

from __future__ import annotations

import json

import msgspec
import pytest

from fusionai.primitives.privacy import LEVELS
from fusionai.privacy.findings import (
    ADVERSARIES,
    CONTROL,
    SENT,
    STANDS,
    Findings,
    measured_leakage,
    read,
    sentence,
    shipped,
)
from harness.audited import boundary, findings

FOUND = findings(
    boundary(0, "clean", 1.0),
    boundary(1, "clean", 0.9, template=0.95),
    boundary(2, "clean", 0.8),
    boundary(0, "int4", 0.7),
)


def test_a_level_is_told_by_the_strongest_attack_over_its_depths():
    split = measured_leakage("split", FOUND)
    assert (split.most.depth, split.least.depth, split.spelled) == (0, 2, "80% to 100%")
    within = measured_leakage("split-k", FOUND)
    assert (within.most.depth, within.least.depth, within.spelled) == (1, 2, "80% to 95%")
    assert measured_leakage("split", FOUND, "int4").spelled == "70%"


def test_every_level_says_what_it_does_about_everybody():
    assert set(STANDS) == set(LEVELS)
    assert all(set(stands) == set(ADVERSARIES) for stands in STANDS.values())


def test_findings_come_back_from_their_file():
    written = {"schema": "fusionai.audit/1", **msgspec.to_builtins(FOUND)}
    assert read(json.dumps(written).encode()) == FOUND


def test_what_ships_counts():
    """All attacks and defences at all depths, with controls that succeeded."""
    found = shipped()
    assert not found.void
    assert found.depths == tuple(range(found.subject.layers + 1))
    assert {"clean", "bf16", "int8", "int4"} < set(found.defences)
    assert any(name.startswith("noise") for name in found.defences)
    assert any(name.startswith("secret prefix") for name in found.defences)
    assert all(one.white_box.top1 >= CONTROL for one in found.boundaries if one.defence == "clean")
    assert 0 < found.trial.chance < 0.2
    assert found.updates
    assert isinstance(found, Findings)


@pytest.mark.parametrize("level", LEVELS)
def test_a_sentence_for_each_level(level):
    said = sentence(level)
    assert "your text" in said
    assert ("measured" in said) == (level not in ("open", "encrypted"))
    if "measured" in said:
        assert measured_leakage(level, shipped(), SENT[0]).spelled in said
