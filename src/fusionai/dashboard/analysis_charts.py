"""Charts of the comparison of two fleets. Neighbours: `svg`, `analysis_page`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from fusionai.dashboard.svg import (
    APPLY,
    BACKWARD,
    FAULT,
    FORWARD,
    MUTED,
    SEND,
    WEIGHTS,
    chart_style,
    inline_svg,
    quiet,
)
from fusionai.scheduling.analysis.cases import (
    BANDWIDTHS_MBIT,
    BEST,
    DECODED,
    DECODING_OPTIMISATIONS,
    FORWARD_OPTIMISATIONS,
    FORWARDED,
    HALF,
    HOLDS,
    INT4,
    INT4_INT8,
    LATENCIES_MS,
    TEXTBOOK,
    TRAINED,
    WITHIN,
    Comparison,
    Task,
)

_WIDTH_IN: Final = 9.2
_LINES: Final = (
    (FORWARD, "-", "o"),
    (BACKWARD, "--", "s"),
    (WEIGHTS, "-.", "^"),
    (APPLY, "-", "D"),
    (SEND, ":", "v"),
)
TRAINING_SHOWN: Final = (TEXTBOOK, "overlap", "overlap, 8-bit", "overlap, 8-bit, local updates", BEST)


def training_chart(comparison: Comparison, latency_ms: int = 50) -> str:
    """Ratio over bandwidth, with a panel per model that fits and a line per set of optimisations."""
    models = [s.name for s in TRAINED if comparison.cell("train", s.name, TEXTBOOK, 100, latency_ms).ratio is not None]
    return _over_bandwidth(comparison, "train", models, TRAINING_SHOWN, latency_ms, "training")


def forward_chart(comparison: Comparison, latency_ms: int = 50) -> str:
    """Like `training_chart`, for forward passes over whole sequences."""
    models = [shape.name for shape in FORWARDED]
    return _over_bandwidth(comparison, "forward", models, tuple(FORWARD_OPTIMISATIONS), latency_ms, "forward")


def decoding_chart(comparison: Comparison) -> str:
    """Ratio over latency at 100 Mbit/s, with a panel per model and a line per set of optimisations."""
    with chart_style():
        figure, panels = _panels([shape.name for shape in DECODED], columns=len(DECODED))
        for name, axes in panels.items():
            for optimisations, (colour, dash, marker) in zip(DECODING_OPTIMISATIONS, _LINES, strict=False):
                ratios = [
                    comparison.cell("decode", name, optimisations, 100, ms).ratio or float("nan") for ms in LATENCIES_MS
                ]
                axes.plot(
                    LATENCIES_MS, ratios, color=colour, linestyle=dash, marker=marker, markersize=4, label=optimisations
                )
            axes.set_xscale("log")
            axes.set_xticks(LATENCIES_MS, [str(ms) for ms in LATENCIES_MS])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xlabel("latency one way, ms")
        _finish(figure, panels, len(DECODING_OPTIMISATIONS))
        return inline_svg(figure, "decoding")


def lever_chart(comparison: Comparison) -> str:
    """Bars at 100 Mbit/s and 50 ms: what each optimisation adds in training, and what 4-bit weights add in decoding."""
    shown: list[tuple[str, Task, tuple[str, ...], tuple[str, ...]]] = [
        ("training", "train", tuple(s.name for s in TRAINED), TRAINING_SHOWN),
        ("decoding", "decode", tuple(s.name for s in DECODED), (HALF, INT4, INT4_INT8)),
    ]
    with chart_style():
        figure = Figure(figsize=(_WIDTH_IN, 6.4), layout="constrained")
        panels = figure.subplots(2, 1, height_ratios=(3, 2))
        for axes, (title, task, models, optimisations) in zip(panels, shown, strict=True):
            quiet(axes)
            axes.grid(False, axis="x")
            fitting = [m for m in models if comparison.cell(task, m, optimisations[0], 100, 50).ratio is not None]
            width = 0.8 / len(optimisations)
            for place, name in enumerate(optimisations):
                ratios = [comparison.cell(task, model, name, 100, 50).ratio or 0.0 for model in fitting]
                at = [index + (place - (len(optimisations) - 1) / 2) * width for index in range(len(fitting))]
                axes.bar(at, ratios, width=0.92 * width, color=_LINES[place][0], label=name)
                for x, ratio in zip(at, ratios, strict=True):
                    text = f"{ratio:.2g}" if ratio >= 0.1 else f"{ratio:.1g}"
                    axes.text(x, ratio, text, ha="center", va="bottom", fontsize=8, color=MUTED)
            axes.set_xticks(range(len(fitting)), fitting)
            axes.set_ylabel("ratio to the box")
            axes.set_title(title, loc="left", fontsize=11)
            _thresholds(axes)
            axes.legend(frameon=False, fontsize=9, loc="upper left", ncols=2)
            # Leaves room for the legend above the highest bar and the upper threshold.
            axes.set_ylim(0, 1.4 * max(axes.get_ylim()[1] / 1.05, 0.95))
        return inline_svg(figure, "optimisations")


def _over_bandwidth(
    comparison: Comparison, task: Task, models: list[str], optimisations: tuple[str, ...], latency_ms: int, name: str
) -> str:
    with chart_style():
        figure, panels = _panels(models, columns=2)
        for model, axes in panels.items():
            for one, (colour, dash, marker) in zip(optimisations, _LINES, strict=False):
                cells = [comparison.cell(task, model, one, mbit, latency_ms) for mbit in BANDWIDTHS_MBIT]
                ratios = [cell.ratio or float("nan") for cell in cells]
                axes.plot(BANDWIDTHS_MBIT, ratios, color=colour, linestyle=dash, marker=marker, markersize=4, label=one)
            axes.set_xscale("log")
            axes.set_xticks((10, 100, 1_000, 10_000), ("10 M", "100 M", "1 G", "10 G"))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xlabel("uplink, bit/s")
        _finish(figure, panels, len(optimisations))
        return inline_svg(figure, name)


def _panels(names: list[str], columns: int) -> tuple[Figure, dict[str, Axes]]:
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(_WIDTH_IN, 0.9 + 2.8 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    flat = [axes for row in grid for axes in row]
    for axes in flat[len(names) :]:
        axes.remove()
    return figure, dict(zip(names, flat, strict=False))


def _finish(figure: Figure, panels: Mapping[str, Axes], count: int) -> None:
    for name, axes in panels.items():
        quiet(axes)
        axes.set_title(name, loc="left", fontsize=11)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        _thresholds(axes)
    first = next(iter(panels.values()))
    for axes in panels.values():
        if axes.get_subplotspec() is not None and axes.get_subplotspec().is_first_col():  # pyright: ignore[reportOptionalMemberAccess]
            axes.set_ylabel("ratio to the box")
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=min(count, 3), frameon=False, fontsize=9)


def _thresholds(axes: Axes) -> None:
    axes.axhline(HOLDS, color=APPLY, linewidth=1.0, linestyle=(0, (2, 2)), zorder=1)
    axes.axhline(WITHIN, color=FAULT, linewidth=1.0, linestyle=(0, (2, 2)), zorder=1)
