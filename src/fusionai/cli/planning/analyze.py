"""`fusion analyze`: compares many small machines on home links with a few large ones in one box.

Prints tables and writes the HTML, CSV and JSON files. `scheduling.analysis.cases` computes the figures,
`dashboard.analysis_page` lays out the page, `cli.planning.pool_file` reads the devices.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from fusionai.cli import console
from fusionai.cli.options import attributes, json_option, path_option, write_json
from fusionai.cli.planning.pool_file import catalogue_option, read_catalogue, shipped_catalogue
from fusionai.primitives.errors import UsageError
from fusionai.scheduling.analysis.cases import Cell, Comparison, compare
from fusionai.scheduling.analysis.catalogue import Catalogue
from fusionai.scheduling.analysis.closed_form import PipelineTerms
from fusionai.scheduling.analysis.fleets import Assumptions, Fleet, Misfit, PredictedSpeed
from fusionai.storage.atomic import write_atomic

FLEET: Final = "50 x RTX 3080"
REFERENCES: Final = ("4 x H100 SXM", "4 x H100 PCIe")
MOST_MACHINES: Final = 10_000

_FLEET: Final = re.compile(r"^\s*(?P<count>\d{1,9})\s*x\s+(?P<device>\S.*?)\s*$", re.IGNORECASE)


@click.command()
@click.option(
    "--fleet",
    default=FLEET,
    show_default=True,
    metavar="'N x GPU'",
    help="Compare this fleet, each machine on its own link.",
)
@click.option(
    "--against",
    multiple=True,
    default=REFERENCES,
    show_default=True,
    metavar="'N x GPU'",
    help="Compare it with these machines in one box. May be repeated.",
)
@catalogue_option
@path_option(
    "--out",
    None,
    "Write analysis.html, analysis.csv and analysis.json here.",
    default=Path("fusion-analysis"),
    file_okay=False,
)
@click.option("--details", is_flag=True, help="Print the effect of each optimisation on a few networks, too.")
@json_option
def analyze(
    fleet: str,
    against: tuple[str, ...],
    catalogue_file: Path | None,
    out: Path,
    details: bool,
    json_file: Path | None,
) -> None:
    """Compare many machines on home links with a few machines in one box: by default 50 RTX 3080 with 4 H100.

    Covers training and serving of BERT-Large, a GPT-3 type of 24 layers, Llama-3-8B and 70B at 10 Mbit/s to 10 Gbit/s,
    in closed form: where the fleet is as fast, what each optimisation changes, and every assumption. All figures are
    projections; nothing is measured.
    """
    from fusionai.dashboard.analysis_page import render_analysis

    comparisons = _comparisons(read_catalogue(catalogue_file), fleet, against)
    _make(out)
    show(comparisons, details=details)
    figures = figures_of(comparisons)
    write_json(out / "analysis.json", "analyze", figures)
    write_atomic(out / "analysis.csv", csv_of(comparisons).encode())
    write_atomic(out / "analysis.html", render_analysis(comparisons).encode())
    write_json(json_file, "analyze", figures)
    console.line(f"Written: {out / 'analysis.html'}, analysis.csv and analysis.json beside it.")


def shipped_comparisons() -> list[Comparison]:
    """Return the comparisons of the command without flags; `docs/analysis.md` is generated from them."""
    return _comparisons(shipped_catalogue(), FLEET, REFERENCES)


def show(comparisons: list[Comparison], *, details: bool) -> None:
    """Print the answer over home links. `details`: also the effect of each optimisation on a few networks, and the
    ratios to the other references."""
    from fusionai.dashboard import analysis_tables as tables
    from fusionai.dashboard.analysis_page import overall

    first = comparisons[0]
    shown = [tables.at_home(first), tables.peaks(first)]
    if details:
        shown += tables.optimisations(first, "train", layouts=False)
        shown += tables.optimisations(first, "decode", layouts=False)
        shown.append(tables.against(comparisons))
    console.line(tables.answer(first))
    console.line()
    for table in shown:
        console.table(table.headers, list(tables.lines(table)), title=table.title, right=table.right)
        for note in table.notes:
            console.line(note)
        console.line()
    if details:
        console.line(overall(first))
    rest = "" if details else " --details prints what each optimisation changes."
    console.line(f"All of these are projections; analysis.html has every assumption.{rest}")


def figures_of(comparisons: list[Comparison]) -> dict[str, object]:
    """Return what `--json` writes: every cell with the terms it was computed from, so that others can check it."""
    known = comparisons[0].assumptions
    return {
        "fleet": comparisons[0].fleet.name,
        "assumptions": attributes(known, " ".join(Assumptions.__dataclass_fields__)),
        "projected": True,
        "comparisons": [
            {
                "reference": one.reference.name,
                "peaks": [
                    {"what": p.what, "unit": p.unit, "fleet": p.ours, "reference": p.theirs, "ratio": p.ratio}
                    for p in one.peaks
                ],
                "cells": [row(one, cell) | {"terms": _terms(cell)} for cell in one.cells],
            }
            for one in comparisons
        ],
    }


def csv_of(comparisons: list[Comparison]) -> str:
    """Return CSV text with one line per cell and reference."""
    lines = [{"reference": one.reference.name} | row(one, cell) for one in comparisons for cell in one.cells]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: "" if value is None else value for key, value in line.items()} for line in lines)
    return text.getvalue()


def row(comparison: Comparison, cell: Cell) -> dict[str, object]:
    """Return a cell as plain figures, None where the model does not fit."""
    ours = cell.ours if isinstance(cell.ours, PredictedSpeed) else None
    theirs = cell.theirs if isinstance(cell.theirs, PredictedSpeed) else None
    missing = cell.ours.missing_bytes if isinstance(cell.ours, Misfit) else None
    joules, usd = comparison.joules_per_million_tokens, comparison.usd_per_million_tokens
    return {
        **attributes(cell, "task model"),
        "levers": cell.optimisations,
        "bandwidth_bytes_per_s": cell.bandwidth_mbit * 125_000,
        "latency_s": cell.latency_ms / 1e3,
        **attributes(cell, "verdict ratio"),
        "tokens_per_s": ours and ours.tokens_per_s,
        "reference_tokens_per_s": theirs and theirs.tokens_per_s,
        **{name: ours and getattr(ours, name) for name in _OF_SPEED},
        "missing_bytes": missing,
        "joules_per_million_tokens": ours and joules("ours", ours),
        "reference_joules_per_million_tokens": theirs and joules("theirs", theirs),
        "usd_per_million_tokens": ours and usd("ours", ours),
        "reference_usd_per_million_tokens": theirs and usd("theirs", theirs),
    }


_OF_SPEED: Final = ("stages", "replicas", "limit", "in_flight_bytes", "crowded")


def _comparisons(catalogue: Catalogue, fleet: str, against: Sequence[str]) -> list[Comparison]:
    ours = _fleet(catalogue, fleet, "--fleet")
    return [compare(ours, _fleet(catalogue, text, "--against"), Assumptions()) for text in against]


def _terms(cell: Cell) -> dict[str, object] | None:
    terms = cell.ours.terms if isinstance(cell.ours, PredictedSpeed) else None
    if terms is None:
        return None
    derived = "step_s period_s in_flight" if isinstance(terms, PipelineTerms) else "round_s"
    return {**attributes(terms, " ".join(type(terms).__dataclass_fields__)), **attributes(terms, derived)}


def _fleet(catalogue: Catalogue, text: str, flag: str) -> Fleet:
    match = _FLEET.match(text)
    if match is None or not 1 <= int(match["count"]) <= MOST_MACHINES:
        raise UsageError(
            f"{flag}: expected a count of up to {MOST_MACHINES} and a GPU, such as '50 x RTX 3080'; got {text!r}."
        )
    return Fleet(device=catalogue.find(match["device"]), count=int(match["count"]))


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"can't write to {out}: {error.strerror}.", hint="Name another directory with --out."
        ) from error
