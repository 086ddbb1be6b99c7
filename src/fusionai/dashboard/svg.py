"""Figures as inline SVG that follows the page's light or dark theme. Decides which role has which colour.

Charts are drawn in placeholder colours, which are replaced by CSS variables, so that one SVG suits both themes. Text
stays text. Neighbours: the chart modules draw, `report` and `analysis_page` place the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from io import StringIO
from typing import Final

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK: Final = "#010101"
MUTED: Final = "#020202"
GRID: Final = "#030303"
FORWARD: Final = "#040404"
BACKWARD: Final = "#050505"
APPLY: Final = "#060606"
SEND: Final = "#070707"
ON_BAR: Final = "#080808"
WEIGHTS: Final = "#090909"
FAULT: Final = "#0a0a0a"
_VARIABLES: Final = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--line",
    FORWARD: "--blue",
    BACKWARD: "--orange",
    APPLY: "--green",
    SEND: "--grey",
    ON_BAR: "--on-bar",
    WEIGHTS: "--amber",
    FAULT: "--red",
}


@contextmanager
def chart_style() -> Iterator[None]:
    """matplotlib's settings for drawing and writing figures."""
    with rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "fusionai",
            "font.family": "sans-serif",
            "font.size": 11.0,
            "text.color": INK,
            "axes.labelcolor": INK,
            "xtick.color": MUTED,
            "ytick.color": MUTED,
        }
    ):
        yield


def quiet(axes: Axes) -> None:
    """Reduce the axes to a light grid without a box."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)
    axes.tick_params(length=0)
    axes.grid(True, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def badges(axes: Axes, places: Sequence[float], nearest: float) -> None:
    """Number the faults at these places from 1, at the upper edge, each with a line down through the axes. Faults
    closer together than `nearest` share a badge."""
    groups: list[tuple[float, list[int]]] = []
    for number, x in sorted(enumerate(places, start=1), key=lambda one: one[1]):
        if groups and x - groups[-1][0] <= nearest:
            groups[-1][1].append(number)
        else:
            groups.append((x, [number]))
    for x, numbers in groups:
        axes.axvline(x, color=FAULT, linewidth=1.0, linestyle=(0, (2, 2)), alpha=0.8, zorder=1)
        axes.text(
            x,
            1.0,
            ",".join(str(number) for number in numbers),
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="center",
            color=ON_BAR,
            fontsize=8.5,
            fontweight="bold",
            zorder=6,
            bbox={"boxstyle": "round,pad=0.25,rounding_size=0.7", "facecolor": FAULT, "edgecolor": "none"},
        )


def inline_svg(figure: Figure, name: str) -> str:
    """The figure as an `<svg>` element that scales with the page; ids are prefixed with `name`."""
    buffer = StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Remove the element's own size in points, which would override the page's.
    opening, rest = text.split(">", 1)
    opening = re.sub(r'\s(?:width|height)="[^"]*"', "", opening)
    # Hidden from screen readers, which would read it digit by digit; the page's caption describes the figure.
    text = f'{opening} aria-hidden="true">{rest}'
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text


def standing_alone(inline: str) -> str:
    """Turn an inline figure into a separate SVG file that includes its colours."""
    colours = resources.files("fusionai.dashboard").joinpath("palette.css.jinja").read_text(encoding="utf-8")
    opening, rest = inline.replace(' aria-hidden="true"', ' role="img"', 1).split(">", 1)
    style = f"<style>{colours}:root {{ background: var(--page); }}</style>"
    return f'<?xml version="1.0" encoding="utf-8"?>\n{opening}>{style}{rest}\n'
