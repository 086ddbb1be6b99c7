"""The comparison of two fleets as Markdown: findings, tables and assumptions, without pictures.

Has what a reader needs to judge the claim; the HTML page and the CSV file have every cell with its stages.

Neighbours: `analysis_tables` has the texts; the generated document and `analysis_page` use the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fusionai.dashboard import analysis_tables as tables
from fusionai.dashboard.analysis_tables import Table
from fusionai.scheduling.analysis.cases import Comparison


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
        *(table for task in tables.TASKS for table in tables.levers(first, task, layouts=False)),
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
