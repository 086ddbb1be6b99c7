"""The loss curve, with a reference run's and their difference. Neighbours: `svg`, `report`."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fusionai.dashboard.svg import APPLY, BACKWARD, FORWARD, MUTED, badges, chart_style, inline_svg, quiet


def loss_chart(
    losses: Sequence[float],
    reference: Sequence[float] | None,
    evaluations: Sequence[tuple[int, float]],
    faults: Sequence[int] = (),
) -> str:
    """Return an SVG. With a reference it has two panels: both curves, and pool minus reference on its own scale.
    `faults`: the step of each fault, marked with its number."""
    with chart_style():
        figure = Figure(figsize=(9.2, 4.6 if reference is not None else 3.4), layout="constrained")
        if reference is None:
            top, bottom = figure.subplots(), None
        else:
            top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        steps = range(1, len(losses) + 1)
        quiet(top)
        # A short run needs dots, because the thin line alone would be hard to see.
        dots = "o" if len(losses) <= 60 else None
        top.plot(steps, losses, color=FORWARD, linewidth=3.2, alpha=0.55, label="pool")
        if reference is not None:
            reference_steps = range(1, len(reference) + 1)
            top.plot(
                reference_steps,
                reference,
                color=BACKWARD,
                linewidth=1.3,
                linestyle=(0, (4, 2)),
                marker=dots,
                markersize=2.6,
                label="one process",
            )
        if evaluations:
            eval_steps, eval_losses = zip(*evaluations, strict=True)
            top.plot(
                eval_steps, eval_losses, color=APPLY, marker="D", linewidth=1, markersize=5, label="evaluation split"
            )
        badges(top, faults, 0.02 * len(losses))
        top.set_ylabel("loss")
        top.legend(frameon=False, loc="upper right")
        lowest = bottom or top
        if reference is not None and bottom is not None:
            difference = [a - b for a, b in zip(losses, reference, strict=False)]
            quiet(bottom)
            bottom.plot(
                range(1, len(difference) + 1), difference, color=FORWARD, linewidth=1.6, marker=dots, markersize=2.6
            )
            if not any(difference):
                bottom.set_ylim(-1, 1)
                bottom.set_yticks([0.0], ["0.0"])
                bottom.text(
                    0.99,
                    0.88,
                    "exactly 0.0 at every step",
                    transform=bottom.transAxes,
                    ha="right",
                    va="top",
                    color=MUTED,
                )
            bottom.set_ylabel("difference")
        lowest.set_xlabel("step")
        lowest.xaxis.set_major_locator(MaxNLocator(integer=True))
        return inline_svg(figure, "loss")
