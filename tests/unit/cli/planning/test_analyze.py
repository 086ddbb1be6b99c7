"""`fusion analyze`: three files that say the same, wrong use, and a catalogue of one's own."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from fusionai.cli.main import main
from fusionai.cli.planning.analyze import csv_of, figures_of, shipped_comparisons
from fusionai.dashboard.analysis_page import document, overall
from fusionai.dashboard.analysis_tables import answer, assumptions, at_home, findings, grids, measured, sources
from fusionai.scheduling.analysis.cases import Comparison
from fusionai.scheduling.analysis.fleets import Assumptions


@pytest.fixture(scope="module")
def comparisons() -> list[Comparison]:
    return shipped_comparisons()


@pytest.mark.slow
def test_every_cell_states_whether_the_claim_holds(comparisons: list[Comparison]):
    lines = list(csv.DictReader(csv_of(comparisons).splitlines()))
    assert len(lines) == sum(len(one.cells) for one in comparisons)
    assert {line["verdict"] for line in lines} == {"holds", "within 2x", "fails", "does not fit"}
    for line in lines:
        assert (line["ratio"] == "") == (line["verdict"] == "does not fit")
        if line["verdict"] == "does not fit":
            assert float(line["missing_bytes"] or 1) > 0
        else:
            assert float(line["ratio"]) == pytest.approx(
                float(line["tokens_per_s"]) / float(line["reference_tokens_per_s"])
            )


@pytest.mark.slow
def test_every_cell_of_the_tables_states_it(comparisons: list[Comparison]):
    tables = grids(comparisons[0])
    assert len(tables) == 5 + 5 + 3 + 3 + 4
    for table in tables:
        for row in table.rows:
            assert all(re.search(r"holds|within 2x|fails|does not fit", entry.text) for entry in row[1:])
            assert all(entry.mark for entry in row[1:]), "and its colour says the same"


@pytest.mark.slow
def test_every_assumption_and_every_source_is_said(comparisons: list[Comparison]):
    said = assumptions(Assumptions())
    assert len(said.rows) == len(Assumptions.__dataclass_fields__)
    assert [row[1].text for row in said.rows][:2] == ["0.4", "0.45"]
    text = " ".join(said.notes)
    for word in ("Precision", "8-bit", "jitter", "recomputed", "convergence"):
        assert word in text
    devices = {row[0].text for row in sources(comparisons[0], comparisons[1].reference).rows}
    assert devices == {"RTX 3080", "H100 SXM", "H100 PCIe"}


@pytest.mark.slow
def test_projections_are_not_passed_off_as_measurements(comparisons: list[Comparison]):
    assert figures_of(comparisons)["projected"] is True
    assert measured(comparisons[0])[0].startswith("Nothing.")
    page = document(comparisons)
    assert "### Measurements\n\nNothing." in page


@pytest.mark.slow
def test_the_summary_counts_its_own_rows(comparisons: list[Comparison]):
    first = comparisons[0]
    assert "50 x RTX 3080 have 0.75 of the dense fp16 peak of 4 x H100 SXM" in " ".join(findings(first))
    rows = {row[0].text: (row[1].text, row[2].text) for row in at_home(first).rows}
    assert rows["Training: Llama-3-8B"] == ("0.049* fails", "0.41* fails")
    assert rows["Decoding: Llama-3-8B"] == ("0.12 fails", "1.56 holds")
    best = [shown for _, shown in rows.values()]
    said = f"in {sum('holds' in one for one in best)} of {len(best)} cases (decoding of GPT-3 type, 24 layers, "
    assert said in answer(first)
    assert f"in {sum('within 2x' in one for one in best)} more they are within 2x." in answer(first)
    assert overall(first).startswith("Training: the claim holds in no cell of 1120")


@pytest.mark.slow
def test_the_terms_of_a_cell_lead_to_its_speed(comparisons: list[Comparison]):
    written = json.loads(json.dumps(figures_of(comparisons)))
    shown = 0
    for cell in written["comparisons"][0]["cells"]:
        terms = cell["terms"]
        if terms is None or cell["task"] != "train":
            continue
        shown += 1
        compute = terms["forward_s"] + terms["backward_s"]
        transfer = terms["activation_s"] + terms["gradient_s"]
        hop = compute + transfer + 2 * terms["latency_s"]
        microbatches, hops = terms["microbatches"], terms["stages"] - 1
        if terms["overlapped"]:
            larger = max(terms["activation_s"], terms["gradient_s"])
            resources = [microbatches * compute + hops * hop, (microbatches - 1) * larger + hops * hop + compute]
            if hops > 1:  # an inner uplink
                nearer = (hops - 1) * hop + terms["forward_s"] - terms["gradient_s"]
                resources.append(microbatches * transfer + nearer)
            step = max(*resources, terms["sync_s"])
        else:
            step = microbatches * (compute + transfer) + hops * hop + terms["sync_s"]
        assert terms["step_s"] == pytest.approx(step)
    assert shown > 500


@pytest.mark.slow
def test_the_three_files_and_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out, figures = tmp_path / "out", tmp_path / "figures.json"
    assert main(["analyze", "--out", str(out), "--json", str(figures)]) == 0
    written = json.loads(figures.read_text())
    assert written["schema"] == "fusionai.analyze/1"
    assert written == json.loads((out / "analysis.json").read_text())
    assert [one["reference"] for one in written["comparisons"]] == ["4 x H100 SXM", "4 x H100 PCIe"]
    assert (out / "analysis.csv").read_text().startswith("reference,task,model,levers,")
    page = (out / "analysis.html").read_text()
    assert page.count("<svg") == 4
    assert "{{" not in page
    assert not re.search(r'(?:src|href)="http', page)
    for word in ("Are 50 x RTX 3080 comparable to 4 x H100 SXM?", "Assumptions and sources", "Measurements"):
        assert word in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    shown = capsys.readouterr().out
    assert shown.startswith("Over home links, 50 x RTX 3080 at their best are as fast as 4 x H100 SXM in ")
    assert "dense fp16, TFLOP/s" in shown
    assert "All of these are projections" in shown
    assert "Decoding, all sessions together: Llama-3-8B" not in shown
    assert main(["analyze", "--out", str(out), "--details"]) == 0
    assert "Decoding, all sessions together: Llama-3-8B" in capsys.readouterr().out


@pytest.mark.slow
def test_other_fleets_and_an_own_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    mine = tmp_path / "mine.toml"
    mine.write_text(
        """
[[devices]]
name = "Grove"
memory_bytes = { value = 24e9, source = "me", kind = "measured" }
memory_bandwidth_bytes_per_s = { value = 900e9, source = "me", kind = "measured" }
power_w = { value = 200, source = "me", kind = "measured" }
[[devices.speeds]]
dtype = "fp16"
accumulator = "fp32"
sparse = false
flops_per_s = 100e12
source = "me"
kind = "measured"
"""
    )
    out = str(tmp_path / "out")
    flags = ["--fleet", "12 x grove", "--against", "1 x H200", "--catalogue", str(mine), "--out", out]
    assert main(["analyze", *flags]) == 0
    page = (tmp_path / "out" / "analysis.html").read_text()
    assert "Are 12 x Grove comparable to 1 x H200?" in page
    assert "Grove: fp16 with fp32 accumulation, dense, 1e+14 (me)" in page


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--fleet", "fifty 3080"], "expected a count of up to 10000 and a GPU, such as '50 x RTX 3080'"),
        (["--fleet", "0 x RTX 3080"], "expected a count"),
        (["--against", "4 x H1000"], "The nearest: H100"),
        (["--catalogue", "none.toml"], "no catalogue file at none.toml"),
    ],
)
def test_wrong_use(flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["analyze", "--out", str(tmp_path / "out"), *flags]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
