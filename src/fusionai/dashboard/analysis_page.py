"""The comparison of two fleets as one HTML page that needs nothing else, and as Markdown. Decides the order of things.

Neighbours: `analysis_tables` has the words, `analysis_charts` the pictures; `cli.analyze` and the generated document
call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fusionai.dashboard import analysis_charts as charts
from fusionai.dashboard import analysis_tables as tables
from fusionai.dashboard.analysis_tables import MARKS, Table
from fusionai.scheduling.analysis_cases import Comparison, verdict


def title(comparison: Comparison) -> str:
    return f"Are {comparison.fleet.name} comparable to {comparison.reference.name}?"


def render_analysis(comparisons: Sequence[Comparison]) -> str:
    """The page for the first of `comparisons`; the others (the same fleet, other references) are set beside it."""
    first = comparisons[0]
    environment = Environment(
        loader=PackageLoader("fusionai.dashboard", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("analysis.html.jinja").render(
        title=title(first),
        comparison=first,
        verdict=overall(first),
        mark={"good": "good", "fair": "", "bad": "bad", "": ""}[MARKS[verdict(first.peaks[0].ratio)]],
        findings=tables.findings(first),
        peaks=tables.peaks(first),
        against=tables.against(comparisons),
        counts=tables.counts(first),
        training=tables.levers(first, "train"),
        decoding=tables.levers(first, "decode"),
        forward=tables.levers(first, "forward"),
        costs=tables.costs(first),
        grids=tables.grids(first),
        assumptions=tables.assumptions(first.assumptions),
        shapes=tables.shapes(),
        sources=tables.sources(first, *(one.reference for one in comparisons[1:])),
        measured=tables.measured(first),
        lever_svg=Markup(charts.lever_chart(first)),
        training_svg=Markup(charts.training_chart(first)),
        decoding_svg=Markup(charts.decoding_chart(first)),
        forward_svg=Markup(charts.forward_chart(first)),
    )


def overall(comparison: Comparison) -> str:
    """One sentence over all cells: how often the claim holds in each kind of work."""
    parts: list[str] = []
    for task, label in tables.TASKS.items():
        cells = [cell for cell in comparison.cells if cell.task == task]
        holds = sum(cell.verdict == "holds" for cell in cells)
        near = sum(cell.verdict == "within 2x" for cell in cells)
        parts.append(f"{label.split(',')[0].lower()} {holds} of {len(cells)} cells ({near} more within 2x)")
    return f"The claim holds in {'; '.join(parts)}."


def document(comparisons: Sequence[Comparison]) -> str:
    """Markdown: findings, tables and assumptions; no pictures."""
    first = comparisons[0]
    lines = [f"## {title(first)}", "", overall(first), ""]
    lines += [f"- {sentence}" for sentence in tables.findings(first)]
    lines.append("")
    shown = [
        tables.peaks(first),
        tables.against(comparisons),
        tables.counts(first),
        *tables.levers(first, "train"),
        *tables.levers(first, "decode"),
        *tables.levers(first, "forward"),
        tables.costs(first),
        *tables.grids(first),
        tables.assumptions(first.assumptions),
        tables.shapes(),
        tables.sources(first, *(one.reference for one in comparisons[1:])),
    ]
    for table in shown:
        lines += _markdown(table)
    lines += ["### What was measured", "", *(f"{sentence}" for sentence in tables.measured(first))]
    return "\n".join(lines) + "\n"


def _markdown(table: Table) -> Iterator[str]:
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
