from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from fusionai.dashboard.report import max_abs_difference, render_report, write_report
from fusionai.dashboard.report_data import Fault, ReportData
from fusionai.primitives.errors import StorageError

VOID = {"meta", "br", "path", "use", "image", "stop", "rect", "circle", "line", "ellipse", "polygon", "polyline"}


class Outline(HTMLParser):
    """Checks that tags match and collects ids, tags and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        values = dict(attrs)
        if values.get("id"):
            self.ids.append(str(values["id"]))
        for name in ("src", "href", "xlink:href", "action"):
            if values.get(name):
                self.addresses.append(str(values[name]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def variants(data: ReportData) -> dict[str, ReportData]:
    change = msgspec.structs.replace
    return {
        "full": data,
        "no reference": change(data, losses_reference=None, tokens_per_s_reference=None),
        "no timed step": change(data, timed_step=None),
        "no step": change(data, losses=(), losses_reference=None),
        "diverged": change(data, losses=(3.0, float("nan"), float("inf"))),
        "shorter reference": change(data, losses_reference=(3.0,)),
        "faults": change(
            data,
            faults=(Fault(step=2, at_s=3.5, peer="a" * 52, stage=0, what="killed", outcome="spare took over"),),
        ),
    }


@pytest.mark.slow
def test_page_stands_alone_in_every_variant(report_data: ReportData) -> None:
    for name, data in variants(report_data).items():
        text = render_report(data)
        outline = Outline(text)
        assert len(outline.ids) == len(set(outline.ids)), name
        # Only references within the page: nothing is loaded, nothing is linked.
        assert all(address.startswith("#") for address in outline.addresses), name
        assert not re.search(r"url\((?!#)|@import", text), name
        assert "script" not in outline.tags
        assert "{{" not in text


def test_page_says_what_was_found(report_data: ReportData) -> None:
    text = render_report(report_data)
    assert "3 steps: the pool&#39;s loss equals one process bit for bit." in text
    assert "1.23M (1,234,567)" in text
    assert "1,000" in text
    assert "pool reaches 0.50 of it" in text
    assert "machine a" in text
    assert "excluded by the job owner" in text
    assert "exactly 0.0 at every step" in text
    assert "proven optimal" in text


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"losses": (3.0, 2.5, 2.5)}, "differs from one process by up to 0.25 within 3 steps"),
        ({"losses": (3.0, 2.5, float("nan"))}, "differs from one process by up to inf"),
        ({"losses_reference": None}, "no reference run to compare with"),
        ({"generation_equal": False}, "the exported model behaves differently"),
        ({"checkpoint_loss_diff": 1e-9}, "the exported model behaves differently"),
        ({"status": "failed"}, "The job failed after 3 steps."),
    ],
)
def test_verdict_is_never_better_than_the_run(
    report_data: ReportData, change: dict[str, object], sentence: str
) -> None:
    text = render_report(msgspec.structs.replace(report_data, **change))
    assert sentence in text
    assert "verdict good" not in text


def test_difference_counts_missing_steps_and_nan_as_infinite(report_data: ReportData) -> None:
    change = msgspec.structs.replace
    assert max_abs_difference(report_data) == 0.0
    assert max_abs_difference(change(report_data, losses_reference=None)) is None
    assert max_abs_difference(change(report_data, losses_reference=(3.0, 2.5))) == float("inf")
    assert max_abs_difference(change(report_data, losses=(3.0, float("nan"), 2.25))) == float("inf")


def test_text_of_the_run_is_escaped(report_data: ReportData) -> None:
    hostile = "<script>alert(1)</script>"
    data = msgspec.structs.replace(
        report_data,
        title=hostile,
        generation_text=hostile,
        configuration={hostile: hostile},
        pool=tuple(msgspec.structs.replace(p, name=hostile + p.peer[0], device_name=hostile) for p in report_data.pool),
    )
    text = render_report(data)
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def test_page_is_the_same_for_the_same_run(report_data: ReportData) -> None:
    assert render_report(report_data) == render_report(report_data)


def test_page_is_written_whole_or_not_at_all(report_data: ReportData, tmp_path: Path) -> None:
    write_report(report_data, tmp_path / "deep" / "report.html")
    assert (tmp_path / "deep" / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["report.html"]
    with pytest.raises(StorageError, match="could not be written"):
        write_report(report_data, tmp_path / "deep" / "report.html" / "below.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match="could not be written"):
        write_report(report_data, tmp_path / "folder")
    assert not list(tmp_path.glob("*.partial"))
