"""Picture of a layout with many holders per block: each peer's interval of blocks, and the throughput at each block.

Neighbours: `plan_chart` draws the plan of one chain and defines the colours; `cli.plan` writes the file.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from fusionai.dashboard.plan_chart import standing_alone
from fusionai.dashboard.svg import APPLY, FAULT, FORWARD, MUTED, chart_style, inline_svg, quiet
from fusionai.primitives.units import format_speed
from fusionai.scheduling.many_holders import ManyHolders

_MOST_LINES: Final = 1500
"""Upper limit of drawn peers; if there are more, only every second, third... one is drawn."""


def holders_picture(found: ManyHolders) -> str:
    """Return an SVG file: peers by first block, one line each; below, the microbatches per second at each block."""
    holdings = found.layout.holdings
    each = -(-len(holdings) // _MOST_LINES)
    drawn = holdings[::each]
    first, length = found.first_block, len(found.holders)
    cover = np.zeros(length)
    for held in holdings:
        cover[held.blocks[0] - first : held.blocks[1] - first] += held.rate_per_s
    with chart_style():
        figure = Figure(figsize=(9.2, 6.4), layout="constrained")
        who, passing = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        quiet(who)
        rows = [[(held.blocks[0], row), (held.blocks[1], row)] for row, held in enumerate(drawn)]
        who.add_collection(LineCollection(rows, colors=FORWARD, linewidths=max(0.3, min(6.0, 240 / len(drawn)))))
        who.set_ylim(len(drawn), -1)
        who.set_xlim(first, first + length)
        who.set_ylabel("machines" if each == 1 else f"machines, one in {each}")
        quiet(passing)
        passing.stairs(cover, np.arange(first, first + length + 1), fill=True, color=APPLY)
        passing.axhline(found.layout.microbatches_per_s, color=FAULT, linewidth=1)
        passing.set_ylim(0, float(cover.max()) * 1.15)
        passing.set_ylabel("microbatches/s")
        passing.set_xlabel("blocks of the model")
        figure.suptitle(
            f"{format_speed(found.layout.tokens_per_s)} tokens/s with several holders per block, "
            f"{found.over_one_chain:.3g} x one chain",
            x=0.01,
            ha="left",
            fontsize=12,
        )
        figure.supxlabel(
            "A projection: jobs run one chain today. Without the time to exchange gradients.",
            x=0.01,
            ha="left",
            fontsize=9.5,
            color=MUTED,
        )
        return standing_alone(inline_svg(figure, "holders"))
