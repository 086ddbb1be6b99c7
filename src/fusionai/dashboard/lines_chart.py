"""Picture of several serving pipelines: the throughput, sessions and machines of each.

Neighbours: `plan_chart` draws the plan of one pipeline and defines the colours; `cli.plan` writes the
file.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from fusionai.dashboard.plan_chart import standing_alone
from fusionai.dashboard.svg import APPLY, FAULT, FORWARD, MUTED, chart_style, inline_svg, quiet
from fusionai.primitives.units import format_speed
from fusionai.scheduling.serving.parallel import ManyLines

_MOST_LINES: Final = 400
"""Upper limit of drawn pipelines; if there are more, only every second, third... one is drawn."""
_GAP: Final = 0.12
"""Gap between two stages, in blocks."""


def lines_picture(found: ManyLines) -> str:
    """Return an SVG file: pipelines from top to bottom, their stages over the model's blocks, and their throughput."""
    each = -(-len(found.lines) // _MOST_LINES)
    drawn = found.lines[::each]
    first = min(line.stages[0].blocks[0] for line in drawn)
    last = max(line.stages[-1].blocks[1] for line in drawn)
    with chart_style():
        figure = Figure(figsize=(9.2, 6.4), layout="constrained")
        who, passing = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        quiet(who)
        rows = [
            [(stage.blocks[0] + _GAP, row), (stage.blocks[1] - _GAP, row)]
            for row, line in enumerate(drawn)
            for stage in line.stages
        ]
        width = max(0.5, min(8.0, 240 / len(drawn)))
        who.add_collection(LineCollection(rows, colors=FORWARD, linewidths=width, capstyle="butt"))
        who.set_ylim(len(drawn), -1)
        who.set_xlim(first, last)
        who.set_xlabel("blocks of the model, stage by stage")
        who.set_ylabel("lines" if each == 1 else f"lines, one in {each}")
        quiet(passing)
        speeds = np.array([line.tokens_per_s for line in drawn])
        passing.barh(np.arange(len(drawn)), speeds, color=APPLY, height=0.8)
        passing.axvline(found.chain_tokens_per_s, color=FAULT, linewidth=1)
        passing.set_xlabel("tokens/s at full load; red: the plan's line")
        figure.suptitle(
            f"{format_speed(found.tokens_per_s)} tokens/s for {found.sessions:,} sessions on "
            f"{len(found.lines):,} lines, {found.over_one_chain:.3g} x one line",
            x=0.01,
            ha="left",
            fontsize=12,
        )
        figure.supxlabel(
            "A projection: a serving job runs one line today.", x=0.01, ha="left", fontsize=9.5, color=MUTED
        )
        return standing_alone(inline_svg(figure, "lines"))
