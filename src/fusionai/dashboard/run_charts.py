"""Charts of the report of a run: loss curve, time line of a step, time line of faults.

`dashboard.report` places them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fusionai.dashboard.report_data import ReportedFault, Tenure
from fusionai.dashboard.svg import (
    APPLY,
    BACKWARD,
    FAULT,
    FORWARD,
    GRID,
    MUTED,
    ON_BAR,
    SEND,
    WEIGHTS,
    badges,
    chart_style,
    inline_svg,
    quiet,
)
from fusionai.wire.messages import Span

_COLOURS: Final = {"forward": FORWARD, "backward": BACKWARD, "weights": WEIGHTS, "apply": APPLY, "send": SEND}
_LABELS: Final = {
    "forward": "forward",
    "backward": "backward",
    "weights": "deferred weight gradients",
    "apply": "optimizer",
    "send": "sending",
}
_BAR_HEIGHT: Final = 0.56
_SEND_HEIGHT: Final = 0.13
_CHART_WIDTH_IN: Final = 9.2
_LEAST_PART: Final = 0.002
"""Least width of a bar as a fraction of the time axis, so that short work stays visible."""
_LEAST_LABELLED_PART: Final = 0.011
"""Fraction of the time axis that a bar must span to show its microbatch's number."""


def gantt_chart(spans: Mapping[int, Sequence[Span]], labels: Mapping[int, str], title: str = "") -> str | None:
    """Return an SVG with a row per stage and time in milliseconds from the first span; None if nothing was timed.
    Compute bars fill the row; sending is a thin bar below, because the two overlap. Waiting is blank."""
    shown = {stage: [span for span in row if span.kind in _COLOURS] for stage, row in sorted(spans.items())}
    flat = [span for row in shown.values() for span in row]
    if not flat:
        return None
    origin_s = min(span.start_s for span in flat)
    length_ms = max(max(span.end_s for span in flat) - origin_s, 1e-9) * 1e3
    with chart_style():
        figure = Figure(figsize=(_CHART_WIDTH_IN, 1.3 + 0.52 * len(shown)), layout="constrained")
        axes = figure.subplots()
        quiet(axes)
        axes.grid(False, axis="y")
        for row, stage in enumerate(shown):
            axes.axhline(row, color=GRID, linewidth=0.6, zorder=0)
            for span in shown[stage]:
                start_ms = (span.start_s - origin_s) * 1e3
                width_ms = max((span.end_s - span.start_s) * 1e3, _LEAST_PART * length_ms)
                middle, height = (row + 0.365, _SEND_HEIGHT) if span.kind == "send" else (row, _BAR_HEIGHT)
                is_labelled = span.kind in ("forward", "backward") and width_ms >= _LEAST_LABELLED_PART * length_ms
                label = str(span.microbatch) if is_labelled else ""
                _bar(axes, middle, start_ms, width_ms, _COLOURS[span.kind], height, label)
        axes.set_yticks(range(len(shown)), [labels.get(stage, f"stage {stage}") for stage in shown])
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xlim(0, length_ms)
        axes.set_xlabel("milliseconds")
        kinds = [kind for kind in _COLOURS if any(span.kind == kind for span in flat)]
        patches = [Patch(facecolor=_COLOURS[kind], label=_LABELS[kind]) for kind in kinds]
        axes.legend(handles=patches, ncols=len(kinds), frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0))
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        return inline_svg(figure, "gantt")


def _bar(axes: Axes, row: float, start: float, width: float, colour: str, height: float, label: str = "") -> None:
    """Draw a bar around `row`, with its label in the middle."""
    axes.broken_barh([(start, width)], (row - height / 2, height), facecolors=colour, edgecolors="none", zorder=2)
    if label:
        middle = start + width / 2
        axes.text(middle, row, label, ha="center", va="center", color=ON_BAR, fontsize=8.5, zorder=4)


def loss_chart(
    losses: Sequence[float],
    reference: Sequence[float] | None,
    evaluations: Sequence[tuple[int, float]],
    faults: Sequence[int] = (),
) -> str:
    """Return an SVG. With a reference it has two panels: both curves, and pool minus reference on its own scale.
    `faults`: the step of each fault, marked with its number."""
    with chart_style():
        figure = Figure(figsize=(9.2, 4.6 if reference is not None else 3.4), layout="constrained")
        if reference is None:
            top, bottom = figure.subplots(), None
        else:
            top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        steps = range(1, len(losses) + 1)
        quiet(top)
        # A short run needs dots, because the thin line alone would be hard to see.
        dots = "o" if len(losses) <= 60 else None
        top.plot(steps, losses, color=FORWARD, linewidth=3.2, alpha=0.55, label="pool")
        if reference is not None:
            style = {"linestyle": (0, (4, 2)), "marker": dots, "markersize": 2.6}
            known = range(1, len(reference) + 1)
            top.plot(known, reference, color=BACKWARD, linewidth=1.3, label="one process", **style)
        if evaluations:
            eval_steps, eval_losses = zip(*evaluations, strict=True)
            diamonds = {"marker": "D", "linewidth": 1, "markersize": 5}
            top.plot(eval_steps, eval_losses, color=APPLY, label="evaluation split", **diamonds)
        badges(top, faults, 0.02 * len(losses))
        top.set_ylabel("loss")
        top.legend(frameon=False, loc="upper right")
        lowest = bottom or top
        if reference is not None and bottom is not None:
            difference = [a - b for a, b in zip(losses, reference, strict=False)]
            quiet(bottom)
            steps = range(1, len(difference) + 1)
            bottom.plot(steps, difference, color=FORWARD, linewidth=1.6, marker=dots, markersize=2.6)
            if not any(difference):
                bottom.set_ylim(-1, 1)
                bottom.set_yticks([0.0], ["0.0"])
                equal, corner = "exactly 0.0 at every step", bottom.transAxes
                bottom.text(0.99, 0.88, equal, transform=corner, ha="right", va="top", color=MUTED)
            bottom.set_ylabel("difference")
        lowest.set_xlabel("step")
        lowest.xaxis.set_major_locator(MaxNLocator(integer=True))
        return inline_svg(figure, "loss")


_WIDTH_IN: Final = 9.2
_LOSS_IN: Final = 2.0
_ROW_IN: Final = 0.36
_BAR: Final = 0.58
_GUARD: Final = 0.14
_LEAST_LABELLED_TENURE: Final = 0.03
"""Fraction of the time axis that a bar must span to show its stage's number."""
BROKER: Final = ""


def fault_chart(
    losses: Sequence[float],
    commits: Sequence[tuple[float, int]],
    faults: Sequence[ReportedFault],
    tenures: Sequence[Tenure],
    name: Callable[[str], str],
) -> str | None:
    """Return an SVG; `commits` are (seconds, step from 1), `losses` by step. None if there is nothing to draw. Red
    bands last from a fault's first sign to the next commit; a cross marks where a peer was lost."""
    if not commits or not faults:
        return None
    rows = _rows(tenures, faults)
    end_s = max([commits[-1][0], *(tenure.to_s for tenure in tenures), *(fault.at_s for fault in faults)])
    with chart_style():
        figure = Figure(figsize=(_WIDTH_IN, _LOSS_IN + 0.9 + _ROW_IN * len(rows)), layout="constrained")
        heights = (_LOSS_IN, max(_ROW_IN * len(rows), 0.1))
        top, lanes = figure.subplots(2, 1, sharex=True, height_ratios=heights)
        quiet(top)
        known = [(at_s, losses[step - 1]) for at_s, step in commits if step <= len(losses)]
        top.plot([at_s for at_s, _ in known], [loss for _, loss in known], color=FORWARD, linewidth=1.6, zorder=3)
        if len(known) <= 120:
            top.plot([at_s for at_s, _ in known], [loss for _, loss in known], "o", color=FORWARD, markersize=2.8)
        top.set_ylabel("loss")
        for fault in faults:
            for axes in (top, lanes):
                if fault.over_s is not None:
                    axes.axvspan(fault.at_s, fault.over_s, facecolor=FAULT, alpha=0.14, edgecolor="none", zorder=0)
        badges(top, [fault.at_s for fault in faults], 0.015 * end_s)
        _draw_lanes(lanes, rows, tenures, faults, name, end_s)
        lanes.set_xlim(min(0.0, commits[0][0]), end_s * 1.01)
        lanes.set_xlabel("seconds")
        figure.legend(handles=_legend(tenures), ncols=4, frameon=False, loc="outside upper left")
        return inline_svg(figure, "faults")


def _rows(tenures: Sequence[Tenure], faults: Sequence[ReportedFault]) -> list[str]:
    """The broker first, then peers by the first stage they held, then peers that were only standbys."""
    first: dict[str, tuple[int, float]] = {}
    for tenure in tenures:
        stage = tenure.stage if tenure.part == "stage" and tenure.stage is not None else 1 << 20
        order = (stage, tenure.from_s) if tenure.from_s <= 0.0 else (1 << 20, tenure.from_s)
        first[tenure.peer] = min(first.get(tenure.peer, order), order)
    for fault in faults:
        first.setdefault(fault.peer, (1 << 20, fault.at_s))
    return sorted(first, key=lambda peer: (peer != BROKER, first[peer], peer))


def _draw_lanes(
    axes: Axes,
    rows: Sequence[str],
    tenures: Sequence[Tenure],
    faults: Sequence[ReportedFault],
    name: Callable[[str], str],
    end_s: float,
) -> None:
    quiet(axes)
    axes.grid(False, axis="y")
    lane = {peer: row for row, peer in enumerate(rows)}
    for row in range(len(rows)):
        axes.axhline(row, color=GRID, linewidth=0.6, zorder=0)
    for tenure in tenures:
        row, start_s, length_s = lane[tenure.peer], tenure.from_s, tenure.to_s - tenure.from_s
        match tenure.part:
            case "stage" if tenure.peer == BROKER:
                _bar(axes, row, start_s, length_s, MUTED, _GUARD)
            case "stage":
                label = f"{tenure.stage}" if length_s < 0.1 * end_s else f"stage {tenure.stage}"
                is_labelled = length_s >= _LEAST_LABELLED_TENURE * end_s
                _bar(axes, row, start_s, length_s, FORWARD, _BAR, label if is_labelled else "")
            case "standby":
                _bar(axes, row, start_s, length_s, APPLY, _GUARD)
            case "away":
                line = (0, (1, 2))
                axes.plot([start_s, tenure.to_s], [row, row], color=FAULT, linewidth=1.4, linestyle=line, zorder=2)
    for fault in faults:
        axes.plot([fault.at_s], [lane[fault.peer]], "X", color=FAULT, markersize=8, markeredgecolor=ON_BAR, zorder=5)
    axes.set_yticks(range(len(rows)), ["broker" if peer == BROKER else name(peer) for peer in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)


def _legend(tenures: Sequence[Tenure]) -> list[Patch | Line2D]:
    parts = {tenure.part for tenure in tenures}
    shown: list[Patch | Line2D] = []
    if "stage" in parts:
        shown.append(Patch(facecolor=FORWARD, label="runs a stage"))
    if "standby" in parts:
        shown.append(Patch(facecolor=APPLY, label="standby of a stage"))
    shown.append(Line2D([], [], color=FAULT, marker="X", linestyle="none", markersize=7, label="lost"))
    if "away" in parts:
        shown.append(Line2D([], [], color=FAULT, linestyle=(0, (1, 2)), label="away"))
    return shown
