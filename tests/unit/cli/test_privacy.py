"""`fusion privacy`: every level and adversary, with measured figures and no framework."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fusionai.cli.main import main
from fusionai.cli.privacy import cell, level_rows
from fusionai.primitives.privacy import LEVELS
from fusionai.privacy.findings import ADVERSARIES
from harness.audited import boundary, findings

FOUND = findings(boundary(1, "clean", 1.0), boundary(1, "int8", 1.0), boundary(1, "int4", 0.5))


def test_cells_are_figures_where_it_is_a_question_of_measuring():
    rows = {row[0]: row[1:] for row in level_rows(FOUND)}
    assert tuple(rows) == LEVELS
    assert cell("split", "A1", FOUND) == "reconstructs 100% (clean), 100% (int8), 50% (int4)"
    assert cell("trusted", "A5", FOUND) == "holds"
    assert cell("encrypted", "A1", FOUND) == "reads 100%"
    assert set(rows["open"]) == {"promises nothing", "reads 100%"}


def test_it_prints_levels_and_the_shipped_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main(["privacy", "--table", "--json", str(tmp_path / "privacy.json")]) == 0
    said = capsys.readouterr().out
    for level in LEVELS:
        assert f"\n{level}" in f"\n{said}"
    assert "white-box" in said
    written = json.loads((tmp_path / "privacy.json").read_text())
    assert set(written["stands"]["split"]) == set(ADVERSARIES)
    assert written["measured"]["boundaries"]


@pytest.mark.slow
def test_it_loads_no_framework():
    code = "from fusionai.cli.main import main; main(['privacy']); import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
