"""One step of the pipeline as a Gantt chart. Neighbours: `svg`, `report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fusionai.dashboard.svg import APPLY, BACKWARD, FORWARD, GRID, ON_BAR, SEND, WEIGHTS, chart_style, inline_svg, quiet
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


def gantt_chart(spans: Mapping[int, Sequence[Span]], labels: Mapping[int, str]) -> str | None:
    """Return an SVG with a row per stage and time in milliseconds from the first span; None if nothing was timed.

    Compute bars fill the row; sending is a thin bar below, because the two overlap. Waiting is blank.
    """
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
                sending = span.kind == "send"
                axes.broken_barh(
                    [(start_ms, width_ms)],
                    (row + 0.3, _SEND_HEIGHT) if sending else (row - _BAR_HEIGHT / 2, _BAR_HEIGHT),
                    facecolors=_COLOURS[span.kind],
                    edgecolors="none",
                )
                if span.kind in ("forward", "backward") and width_ms >= _LEAST_LABELLED_PART * length_ms:
                    axes.text(
                        start_ms + width_ms / 2,
                        row,
                        str(span.microbatch),
                        ha="center",
                        va="center",
                        color=ON_BAR,
                        fontsize=8.5,
                    )
        axes.set_yticks(range(len(shown)), [labels.get(stage, f"stage {stage}") for stage in shown])
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xlim(0, length_ms)
        axes.set_xlabel("milliseconds")
        kinds = [kind for kind in _COLOURS if any(span.kind == kind for span in flat)]
        patches = [Patch(facecolor=_COLOURS[kind], label=_LABELS[kind]) for kind in kinds]
        axes.legend(handles=patches, ncols=len(kinds), frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0))
        return inline_svg(figure, "gantt")
