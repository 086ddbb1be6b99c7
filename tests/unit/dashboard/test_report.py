from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from fusionai.dashboard.report import max_abs_difference, render_report, write_report
from fusionai.dashboard.report_data import PlanObservation, ReportData, ReportedFault, StageObservation, Tenure
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


@pytest.fixture
def words_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes nearly all the time of a page."""
    for chart in ("loss_chart", "gantt_chart", "fault_chart"):
        monkeypatch.setattr(f"fusionai.dashboard.report.{chart}", lambda *drawn: "")


def with_faults(data: ReportData) -> ReportData:
    """One machine killed and taken over, a spare lost for good, and the broker away."""
    a, b, c = ("a" * 52, "b" * 52, "c" * 52)
    return msgspec.structs.replace(
        data,
        faults=(
            ReportedFault(
                step=2,
                at_s=1.5,
                who="machine a, stage 0",
                peer=a,
                what="killed",
                outcome="machine c takes over from its snapshot of step 1",
                over_s=3.0,
                recovery_s=1.5,
            ),
            ReportedFault(
                step=2, at_s=1.51, who="machine b, a spare", peer=b, what="connection closed", outcome="x", over_s=1.51
            ),
            ReportedFault(step=3, at_s=3.5, who="the broker", what="no answer", outcome="the job went on"),
        ),
        commits=((1.0, 1), (3.0, 2), (4.0, 3)),
        tenures=(
            Tenure(peer="", part="stage", from_s=0.0, to_s=3.5),
            Tenure(peer="", part="away", from_s=3.5, to_s=4.5),
            Tenure(peer=a, part="stage", stage=0, from_s=0.0, to_s=1.5),
            Tenure(peer=a, part="away", from_s=1.5, to_s=2.5),
            Tenure(peer=c, part="standby", stage=0, from_s=0.0, to_s=1.6),
            Tenure(peer=c, part="stage", stage=0, from_s=1.6, to_s=4.5),
        ),
        lost_steps=0,
    )


def variants(data: ReportData) -> dict[str, ReportData]:
    change = msgspec.structs.replace
    return {
        "full": data,
        "no reference": change(data, losses_reference=None, tokens_per_s_reference=None),
        "no timed step": change(data, timed_step=None),
        "no step": change(data, losses=(), losses_reference=None),
        "diverged": change(data, losses=(3.0, float("nan"), float("inf"))),
        "shorter reference": change(data, losses_reference=(3.0,)),
        "faults": with_faults(data),
        "faults and no step": change(with_faults(data), losses=(), losses_reference=None, commits=()),
        "faults and no time line": change(with_faults(data), commits=(), tenures=()),
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_faults_are_told_and_drawn(report_data: ReportData) -> None:
    text = render_report(with_faults(report_data))
    assert "3 steps: the pool&#39;s loss equals one process bit for bit, through 3 faults." in text
    assert "3; training paused for 1.5 s in total" in text
    assert "machine c takes over from its snapshot of step 1" in text
    assert "committed steps lost" in text
    row = text[text.index("the broker</th>") :]
    assert "to the end" in row[: row.index("</tr>")]
    drawn = text[text.index('aria-labelledby="faults"') :]
    drawn = drawn[: drawn.index("</svg>")]
    # Two faults at nearly the same time share a badge.
    for shown in (">1,2<", ">3<", ">broker<", ">machine a<", ">stage 0<", "var(--red)", ">standby of a stage<"):
        assert shown in drawn, shown
    assert 'aria-labelledby="faults"' not in render_report(report_data)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"losses": (3.0, 2.5, 2.5)}, "differs from one process by up to 0.25 within 3 steps"),
        ({"losses": (3.0, 2.5, float("nan"))}, "differs from one process by up to inf"),
        ({"losses_reference": None}, "no reference run to compare with"),
        ({"generation_equal": False}, "the exported model gives different results"),
        ({"checkpoint_loss_diff": 1e-9}, "the exported model gives different results"),
        ({"lost_steps": 1}, "1 committed steps were lost"),
    ],
)
@pytest.mark.usefixtures("words_only")
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


@pytest.mark.slow
def test_page_is_the_same_for_the_same_run(report_data: ReportData) -> None:
    assert render_report(report_data) == render_report(report_data)


@pytest.mark.usefixtures("words_only")
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


@pytest.mark.usefixtures("words_only")
def test_predictions_stand_beside_observations(report_data: ReportData) -> None:
    assert "Predicted and measured" not in render_report(report_data)
    stage = report_data.plan.stages[0]
    row = PlanObservation(
        version=7,
        steps=1,
        predicted_step_s=1.5,
        measured_step_s=2.25,
        predicted_tokens_per_s=0.5,
        measured_tokens_per_s=1234.0,
        bottleneck="compute on <b>",
        busiest=stage.peer,
        busy=0.625,
        stages=(
            StageObservation(stage=0, peer=stage.peer, predicted_compute_s=0.0125, measured_compute_s=0.0375),
            StageObservation(stage=1, peer="z" * 52, predicted_compute_s=0.0625, measured_compute_s=None),
        ),
    )
    silent = msgspec.structs.replace(row, version=8, steps=3, busiest="", bottleneck="")
    page = render_report(
        msgspec.structs.replace(report_data, observed=(silent, row), shared_cores="a and b share <one> core.")
    )
    Outline(page)
    for words in (
        "2.25 s",
        "1,234",
        "compute on &lt;b&gt;",
        "62 % of a step",
        "12.5 ms",
        "37.5 ms",
        "&lt;one&gt; core.",
    ):
        assert words in page, words
    assert "Stages: plan 8, which had most steps" in page
    assert page.count("not known") >= 2
