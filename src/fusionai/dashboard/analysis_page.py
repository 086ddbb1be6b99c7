"""The comparison of two fleets as one self-contained HTML page with charts, and as Markdown.

`analysis_tables` has the tables and sentences, `svg` the style of charts; `cli.planning.analyze` calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from fusionai.dashboard import analysis_tables as tables
from fusionai.dashboard import svg
from fusionai.scheduling.analysis import cases
from fusionai.scheduling.analysis.cases import Cell, Comparison, Task, verdict


def title(comparison: Comparison) -> str:
    return f"Are {comparison.fleet.name} comparable to {comparison.reference.name}?"


def overall(comparison: Comparison) -> str:
    """A sentence per kind of work: in how many of its cells the claim holds."""
    parts: list[str] = []
    for task in tables.TASKS:
        cells = [cell for cell in comparison.cells if cell.task == task]
        holds = sum(cell.verdict == "holds" for cell in cells)
        near = sum(cell.verdict == "within 2x" for cell in cells)
        nowhere = "in no cell" if holds == 0 else f"in {holds}"
        parts.append(f"{tables.work(task)}: the claim holds {nowhere} of {len(cells)}, {near} more are within 2x.")
    return " ".join(parts)


def document(comparisons: Sequence[Comparison]) -> str:
    """Findings, tables and assumptions as Markdown."""
    first = comparisons[0]
    lines = [f"## {title(first)}", "", tables.answer(first), ""]
    lines += [f"- {sentence}" for sentence in (*tables.findings(first), overall(first))]
    lines += ["", *_markdown(tables.at_home(first))]
    shared = _tables(comparisons)
    by_task = (table for task in tables.TASKS for table in tables.optimisations(first, task, layouts=False))
    for table in (*shared[:3], *by_task, *shared[3:]):
        lines += _markdown(table)
    lines += ["### Measurements", "", *tables.measured(first)]
    return "\n".join(lines) + "\n"


def _tables(comparisons: Sequence[Comparison]) -> tuple[tables.AnalysisTable, ...]:
    """Return the tables that document and page share, in the document's order."""
    first, *others = comparisons
    return (
        tables.peaks(first),
        tables.against(comparisons),
        tables.counts(first),
        tables.effects(),
        tables.costs(first),
        tables.sensitivity(first),
        tables.assumptions(first.assumptions),
        tables.shapes(),
        tables.sources(first, *(one.reference for one in others)),
    )


def _markdown(table: tables.AnalysisTable) -> Iterator[str]:
    yield f"### {table.title}"
    yield ""
    yield f"| {' | '.join(table.headers)} |"
    yield f"| {' | '.join('---:' if place in table.right else '---' for place in range(len(table.headers)))} |"
    for row in tables.lines(table):
        yield f"| {' | '.join(row)} |"
    yield ""
    for note in table.notes:
        yield note
        yield ""


def render_analysis(comparisons: Sequence[Comparison]) -> str:
    """The page for the first comparison; the others (same fleet, other references) appear beside it in one table."""
    first = comparisons[0]
    environment = Environment(
        loader=PackageLoader("fusionai.dashboard", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    names = ("peaks", "against", "counts", "effects", "costs", "sensitivity", "assumptions", "shapes", "sources")
    return environment.get_template("analysis.html.jinja").render(
        title=title(first),
        comparison=first,
        verdict=tables.answer(first),
        mark=tables.MARKS[verdict(first.peaks[0].ratio)],
        findings=(*tables.findings(first), overall(first)),
        at_home=tables.at_home(first),
        **dict(zip(names, _tables(comparisons), strict=True)),
        training=tables.optimisations(first, "train"),
        decoding=tables.optimisations(first, "decode"),
        forward=tables.optimisations(first, "forward"),
        grids=tables.grids(first),
        measured=tables.measured(first),
        optimisation_svg=Markup(lever_chart(first)),
        training_svg=Markup(training_chart(first)),
        decoding_svg=Markup(decoding_chart(first)),
        forward_svg=Markup(forward_chart(first)),
    )


_WIDTH_IN: Final = 9.2
_LINES: Final = (
    (svg.FORWARD, "-", "o"),
    (svg.BACKWARD, "--", "s"),
    (svg.WEIGHTS, "-.", "^"),
    (svg.APPLY, "-", "D"),
    (svg.SEND, ":", "v"),
)
TRAINING_SHOWN: Final = (cases.TEXTBOOK, "overlap", "overlap, 8-bit", "overlap, 8-bit, local updates", cases.BEST)


def training_chart(comparison: Comparison) -> str:
    """Ratio over bandwidth at 50 ms, with a panel per model that fits and a line per set of optimisations."""
    trained = (shape.name for shape in cases.TRAINED)
    models = [name for name in trained if comparison.cell("train", name, cases.TEXTBOOK, 100, 50).ratio is not None]
    return _over_bandwidth(comparison, "train", models, TRAINING_SHOWN, "training")


def forward_chart(comparison: Comparison) -> str:
    """Like `training_chart`, for forward passes over whole sequences."""
    models = [shape.name for shape in cases.FORWARDED]
    return _over_bandwidth(comparison, "forward", models, tuple(cases.FORWARD_OPTIMISATIONS), "forward")


def decoding_chart(comparison: Comparison) -> str:
    """Ratio over latency at 100 Mbit/s, with a panel per model and a line per set of optimisations."""
    with svg.chart_style():
        figure, panels = _panels([shape.name for shape in cases.DECODED], columns=len(cases.DECODED))
        for name, axes in panels.items():
            for line, optimisations in enumerate(cases.DECODING_OPTIMISATIONS):
                cells = [comparison.cell("decode", name, optimisations, 100, ms) for ms in cases.LATENCIES_MS]
                _line(axes, line, cases.LATENCIES_MS, cells, optimisations)
            axes.set_xticks(cases.LATENCIES_MS, [str(ms) for ms in cases.LATENCIES_MS])
            axes.set_xlabel("latency one way, ms")
        _finish(figure, panels, len(cases.DECODING_OPTIMISATIONS))
        return svg.inline_svg(figure, "decoding")


def _line(axes: Axes, number: int, xs: Sequence[int], cells: Sequence[Cell], label: str) -> None:
    colour, dash, marker = _LINES[number]
    ratios = [cell.ratio or float("nan") for cell in cells]
    axes.plot(xs, ratios, color=colour, linestyle=dash, marker=marker, markersize=4, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())


def lever_chart(comparison: Comparison) -> str:
    """Bars at 100 Mbit/s and 50 ms: what each optimisation adds in training, and what 4-bit weights add in decoding."""
    shown: list[tuple[str, Task, tuple[str, ...], tuple[str, ...]]] = [
        ("training", "train", tuple(s.name for s in cases.TRAINED), TRAINING_SHOWN),
        ("decoding", "decode", tuple(s.name for s in cases.DECODED), (cases.HALF, cases.INT4, cases.INT4_INT8)),
    ]
    with svg.chart_style():
        figure = Figure(figsize=(_WIDTH_IN, 6.4), layout="constrained")
        panels = figure.subplots(2, 1, height_ratios=(3, 2))
        for axes, (title, task, models, optimisations) in zip(panels, shown, strict=True):
            svg.quiet(axes)
            axes.grid(False, axis="x")
            fitting = [m for m in models if comparison.cell(task, m, optimisations[0], 100, 50).ratio is not None]
            width = 0.8 / len(optimisations)
            for place, name in enumerate(optimisations):
                ratios = [comparison.cell(task, model, name, 100, 50).ratio or 0.0 for model in fitting]
                at = [index + (place - (len(optimisations) - 1) / 2) * width for index in range(len(fitting))]
                axes.bar(at, ratios, width=0.92 * width, color=_LINES[place][0], label=name)
                for x, ratio in zip(at, ratios, strict=True):
                    text = f"{ratio:.2g}" if ratio >= 0.1 else f"{ratio:.1g}"
                    axes.text(x, ratio, text, ha="center", va="bottom", fontsize=8, color=svg.MUTED)
            axes.set_xticks(range(len(fitting)), fitting)
            axes.set_ylabel("ratio to the box")
            axes.set_title(title, loc="left", fontsize=11)
            _thresholds(axes)
            axes.legend(frameon=False, fontsize=9, loc="upper left", ncols=2)
            # Leaves room for the legend above the highest bar and the upper threshold.
            axes.set_ylim(0, 1.4 * max(axes.get_ylim()[1] / 1.05, 0.95))
        return svg.inline_svg(figure, "optimisations")


def _over_bandwidth(
    comparison: Comparison, task: Task, models: list[str], optimisations: tuple[str, ...], name: str
) -> str:
    with svg.chart_style():
        figure, panels = _panels(models, columns=2)
        for model, axes in panels.items():
            for line, one in enumerate(optimisations):
                cells = [comparison.cell(task, model, one, mbit, 50) for mbit in cases.BANDWIDTHS_MBIT]
                _line(axes, line, cases.BANDWIDTHS_MBIT, cells, one)
            axes.set_xticks((10, 100, 1_000, 10_000), ("10 M", "100 M", "1 G", "10 G"))
            axes.set_xlabel("uplink, bit/s")
        _finish(figure, panels, len(optimisations))
        return svg.inline_svg(figure, name)


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
        svg.quiet(axes)
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
    axes.axhline(cases.HOLDS, color=svg.APPLY, linewidth=1.0, linestyle=(0, (2, 2)), zorder=1)
    axes.axhline(cases.WITHIN, color=svg.FAULT, linewidth=1.0, linestyle=(0, (2, 2)), zorder=1)
