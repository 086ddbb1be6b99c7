"""The comparison of two fleets as one self-contained HTML page.

`analysis_tables` has the texts, `analysis_charts` the pictures; `cli.planning.analyze` calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fusionai.dashboard import analysis_charts as charts
from fusionai.dashboard import analysis_tables as tables
from fusionai.dashboard.analysis_tables import AnalysisTable
from fusionai.scheduling.analysis.cases import Comparison, verdict


def title(comparison: Comparison) -> str:
    return f"Are {comparison.fleet.name} comparable to {comparison.reference.name}?"


def overall(comparison: Comparison) -> str:
    """A sentence per kind of work: in how many of its cells the claim holds."""
    parts: list[str] = []
    for task, label in tables.TASKS.items():
        cells = [cell for cell in comparison.cells if cell.task == task]
        holds = sum(cell.verdict == "holds" for cell in cells)
        near = sum(cell.verdict == "within 2x" for cell in cells)
        nowhere = "in no cell" if holds == 0 else f"in {holds}"
        parts.append(f"{label.split(',')[0]}: the claim holds {nowhere} of {len(cells)}, {near} more are within 2x.")
    return " ".join(parts)


def document(comparisons: Sequence[Comparison]) -> str:
    """Findings, tables and assumptions as Markdown."""
    first = comparisons[0]
    lines = [f"## {title(first)}", "", overall(first), ""]
    lines += [f"- {sentence}" for sentence in tables.findings(first)]
    lines.append("")
    shown = [
        tables.peaks(first),
        tables.against(comparisons),
        tables.counts(first),
        *(table for task in tables.TASKS for table in tables.optimisations(first, task, layouts=False)),
        tables.effects(),
        tables.costs(first),
        tables.sensitivity(first),
        tables.assumptions(first.assumptions),
        tables.shapes(),
        tables.sources(first, *(one.reference for one in comparisons[1:])),
    ]
    for table in shown:
        lines += _markdown(table)
    lines += ["### Measurements", "", *tables.measured(first)]
    return "\n".join(lines) + "\n"


def _markdown(table: AnalysisTable) -> Iterator[str]:
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
    return environment.get_template("analysis.html.jinja").render(
        title=title(first),
        comparison=first,
        verdict=overall(first),
        mark=tables.MARKS[verdict(first.peaks[0].ratio)],
        findings=tables.findings(first),
        peaks=tables.peaks(first),
        against=tables.against(comparisons),
        counts=tables.counts(first),
        training=tables.optimisations(first, "train"),
        decoding=tables.optimisations(first, "decode"),
        forward=tables.optimisations(first, "forward"),
        effects=tables.effects(),
        costs=tables.costs(first),
        grids=tables.grids(first),
        sensitivity=tables.sensitivity(first),
        assumptions=tables.assumptions(first.assumptions),
        shapes=tables.shapes(),
        sources=tables.sources(first, *(one.reference for one in comparisons[1:])),
        measured=tables.measured(first),
        optimisation_svg=Markup(charts.lever_chart(first)),
        training_svg=Markup(charts.training_chart(first)),
        decoding_svg=Markup(charts.decoding_chart(first)),
        forward_svg=Markup(charts.forward_chart(first)),
    )
