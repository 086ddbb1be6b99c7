"""Timeline of a run with faults: the loss over time, and below it which peer held which stage when, or was away.

Neighbours: `svg`, `report`; the numbers are those in the report's table of faults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from fusionai.dashboard.report_data import Fault, Tenure
from fusionai.dashboard.svg import APPLY, FAULT, FORWARD, GRID, MUTED, ON_BAR, badges, chart_style, inline_svg, quiet

_WIDTH_IN: Final = 9.2
_LOSS_IN: Final = 2.0
_ROW_IN: Final = 0.36
_BAR: Final = 0.58
_GUARD: Final = 0.14
_LEAST_LABELLED_PART: Final = 0.03
"""Fraction of the time axis that a bar must span to show its stage's number."""
BROKER: Final = ""


def fault_chart(
    losses: Sequence[float],
    commits: Sequence[tuple[float, int]],
    faults: Sequence[Fault],
    tenures: Sequence[Tenure],
    name: Callable[[str], str],
) -> str | None:
    """Return an SVG; `commits` are (seconds, step from 1), `losses` by step. None if there is nothing to draw.

    Red bands last from a fault's first sign to the next commit; a cross marks where a peer was lost.
    """
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


def _rows(tenures: Sequence[Tenure], faults: Sequence[Fault]) -> list[str]:
    """The broker first, then peers by the first stage they held, then peers that only guarded."""
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
    faults: Sequence[Fault],
    name: Callable[[str], str],
    end_s: float,
) -> None:
    quiet(axes)
    axes.grid(False, axis="y")
    lane = {peer: row for row, peer in enumerate(rows)}
    for row in range(len(rows)):
        axes.axhline(row, color=GRID, linewidth=0.6, zorder=0)
    for tenure in tenures:
        row, length_s = lane[tenure.peer], tenure.to_s - tenure.from_s
        match tenure.part:
            case "stage":
                if tenure.peer == BROKER:
                    axes.broken_barh([(tenure.from_s, length_s)], (row - _GUARD / 2, _GUARD), facecolors=MUTED)
                    continue
                axes.broken_barh(
                    [(tenure.from_s, length_s)], (row - _BAR / 2, _BAR), facecolors=FORWARD, edgecolors="none", zorder=2
                )
                if length_s >= _LEAST_LABELLED_PART * end_s:
                    axes.text(
                        tenure.from_s + length_s / 2,
                        row,
                        f"{tenure.stage}" if length_s < 0.1 * end_s else f"stage {tenure.stage}",
                        ha="center",
                        va="center",
                        color=ON_BAR,
                        fontsize=8.5,
                        zorder=4,
                    )
            case "guard":
                axes.broken_barh(
                    [(tenure.from_s, length_s)], (row - _GUARD / 2, _GUARD), facecolors=APPLY, edgecolors="none"
                )
            case "away":
                axes.plot(
                    [tenure.from_s, tenure.to_s],
                    [row, row],
                    color=FAULT,
                    linewidth=1.4,
                    linestyle=(0, (1, 2)),
                    zorder=2,
                )
    for fault in faults:
        axes.plot([fault.at_s], [lane[fault.peer]], "X", color=FAULT, markersize=8, markeredgecolor=ON_BAR, zorder=5)
    axes.set_yticks(range(len(rows)), ["broker" if peer == BROKER else name(peer) for peer in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)


def _legend(tenures: Sequence[Tenure]) -> list[Patch | Line2D]:
    parts = {tenure.part for tenure in tenures}
    shown: list[Patch | Line2D] = []
    if "stage" in parts:
        shown.append(Patch(facecolor=FORWARD, label="runs a stage"))
    if "guard" in parts:
        shown.append(Patch(facecolor=APPLY, label="guards a stage"))
    shown.append(Line2D([], [], color=FAULT, marker="X", linestyle="none", markersize=7, label="lost"))
    if "away" in parts:
        shown.append(Line2D([], [], color=FAULT, linestyle=(0, (1, 2)), label="away"))
    return shown
