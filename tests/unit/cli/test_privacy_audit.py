"""`fusion audit`: what can be asked, the table, the void case's exit code. The attacks are tested with `privacy`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fusionai.cli.main import main
from fusionai.cli.privacy import boundary_headers, boundary_rows, share
from fusionai.client import audit as client_audit
from fusionai.client.audit import AuditOptions
from fusionai.privacy.findings import Control, Findings
from harness.audited import boundary, findings

FOUND = findings(boundary(0, "clean", 1.0, inverter=0.2), boundary(1, "clean", 1.0, inverter=0.1, template=1.0))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[AuditOptions]:
    """What the command hands on; the audit itself finds `FOUND`."""
    seen: list[AuditOptions] = []

    def audited(options: AuditOptions, _on_doing: Any) -> Findings:
        seen.append(options)
        return FOUND

    monkeypatch.setattr(client_audit, "audited", audited)
    return seen


def test_what_is_asked_reaches_the_audit(asked: list[AuditOptions], capsys: pytest.CaptureFixture[str]):
    command = ["audit", "--level", "split-k", "--depths", "2,1", "--attacks", "inverter, pooled", "--steps", "5"]
    assert main(command) == 0
    (options,) = asked
    assert (options.level, options.depths, options.attacks) == ("split-k", (2, 1), {"inverter", "pooled"})
    assert options.small.steps == 5
    assert options.command == "fusion audit --level split-k --steps 5 --depths 2,1 --attacks inverter,pooled"
    assert "All 1 positive controls succeeded." in capsys.readouterr().out


def test_no_row_shows_a_learned_figure_without_the_white_box_one():
    headers = boundary_headers(FOUND)
    assert headers.index("white-box") < headers.index("inverter")
    for row in boundary_rows(FOUND):
        assert len(row) == len(headers)
        assert row[headers.index("white-box")] == "100 %"
    assert [row[headers.index("template")] for row in boundary_rows(FOUND)] == ["-", "100 %"]


def test_a_failed_control_makes_the_audit_void(
    asked: list[AuditOptions], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    failed = findings(boundary(0, "clean", 0.5), controls=(Control(name="white-box, clean, depth 0", got=0.5),))
    monkeypatch.setattr(client_audit, "audited", lambda _options, _on_doing: failed)
    assert main(["audit"]) == 1
    said = capsys.readouterr().err
    assert "void" in said
    assert "white-box, clean, depth 0 recovered 50.0 %" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--attacks", "magic"], "expected some of nearest"),
        (["--depths", "1,x"], "expected whole numbers"),
        (["--depths", ","], "expected at least one"),
        (["--level", "none"], "is not one of"),
        (["--model", "/nowhere"], "not a model directory"),
    ],
)
def test_wrong_use_says_what_to_do(
    flags: list[str], said: str, asked: list[AuditOptions], capsys: pytest.CaptureFixture[str]
):
    assert main(["audit", *flags]) == 2
    assert said in capsys.readouterr().err
    assert not asked


def test_the_figures_go_to_a_file(asked: list[AuditOptions], tmp_path: Path):
    assert main(["audit", "--json", str(tmp_path / "audit.json")]) == 0
    written = json.loads((tmp_path / "audit.json").read_text())
    assert written["schema"] == "fusionai.audit/1"
    assert written["boundaries"][0]["white_box"]["top1"] == 1.0


def test_shares_are_never_rounded_to_all_or_nothing():
    assert [share(part) for part in (1.0, 0.9996, 0.5, 0.0004, 0.0)] == ["100 %", ">99.9 %", "50.0 %", "<0.1 %", "0 %"]
