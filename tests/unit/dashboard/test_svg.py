"""Reports, plans and plots have the colours of the pages that are served."""

from __future__ import annotations

import re
from importlib import resources

OWN = {"--page", "--card", "--amber"}
"""Reports are printed on white, and their charts fill areas with amber, which pages use for text."""


def colours(text: str) -> list[dict[str, str]]:
    """Variables of the light and of the dark theme."""
    return [dict(re.findall(r"(--[\w-]+):\s*(#\w+)", block)) for block in re.findall(r":root \{([^}]*)\}", text)]


def test_a_colour_has_one_value_in_reports_and_pages():
    palette = resources.files("fusionai.dashboard").joinpath("palette.css.jinja").read_text(encoding="utf-8")
    style = resources.files("fusionai.gateway").joinpath("page", "style.css").read_text(encoding="utf-8")
    for ours, theirs in zip(colours(palette), colours(style), strict=True):
        shared = (ours.keys() & theirs.keys()) - OWN
        assert {"--ink", "--blue", "--red"} <= shared
        assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
