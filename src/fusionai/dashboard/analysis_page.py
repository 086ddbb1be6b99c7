"""The comparison of two fleets as one self-contained HTML page.

Neighbours: `analysis_tables` has the texts, `analysis_charts` the pictures, `analysis_document` the same in Markdown;
`cli.analyze` calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fusionai.dashboard import analysis_charts as charts
from fusionai.dashboard import analysis_tables as tables
from fusionai.dashboard.analysis_document import overall, title
from fusionai.scheduling.analysis.cases import Comparison, verdict


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
        training=tables.levers(first, "train"),
        decoding=tables.levers(first, "decode"),
        forward=tables.levers(first, "forward"),
        effects=tables.effects(),
        costs=tables.costs(first),
        grids=tables.grids(first),
        sensitivity=tables.sensitivity(first),
        assumptions=tables.assumptions(first.assumptions),
        shapes=tables.shapes(),
        sources=tables.sources(first, *(one.reference for one in comparisons[1:])),
        measured=tables.measured(first),
        lever_svg=Markup(charts.lever_chart(first)),
        training_svg=Markup(charts.training_chart(first)),
        decoding_svg=Markup(charts.decoding_chart(first)),
        forward_svg=Markup(charts.forward_chart(first)),
    )
