"""`fusion privacy`: shows the privacy levels and what peers could reconstruct at each, as measured.

The figures are those shipped with the product; `fusion audit` measures others. `privacy.findings` has descriptions and
figures, `cli.audit` prints the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from fusionai.cli import console
from fusionai.cli.audit import facts, show_findings
from fusionai.cli.options import json_option, write_json
from fusionai.primitives.privacy import LEVELS, STAYS, PrivacyLevel
from fusionai.privacy.findings import ADVERSARIES, SENT, STANDS, Adversary, Findings, measured_leakage, shipped


@click.command()
@click.option("--table", "in_full", is_flag=True, help="Also show the figures of every boundary, defence and attack.")
@json_option
def privacy(in_full: bool, json_file: Path | None) -> None:
    """Show the privacy levels: what stays with the job owner, and what each kind of adversary could reconstruct."""
    findings = shipped()
    for level in LEVELS:
        console.line(f"{level}: {STAYS[level]}")
    console.line()
    for adversary, who in ADVERSARIES.items():
        console.line(f"{adversary}: {who}")
    console.line()
    console.table(("level", *ADVERSARIES), list(level_rows(findings)), title="What each adversary learns at each level")
    console.line()
    console.line(
        "Percentages: tokens of private text that the strongest attack recovered, over all depths that peers see."
    )
    for text in facts(findings):
        console.line(text)
    console.line(f"Measured on {findings.date} by `{findings.command}`; on your own model: `fusion audit --model DIR`.")
    if in_full:
        console.line()
        show_findings(findings)
    if json_file is not None:
        stands = {level: {who: cell(level, who, findings) for who in ADVERSARIES} for level in LEVELS}
        write_json(
            json_file,
            "privacy",
            {
                "levels": STAYS,
                "adversaries": ADVERSARIES,
                "stands": stands,
                "measured": msgspec.to_builtins(findings),
            },
        )


def level_rows(findings: Findings) -> Iterator[tuple[str, ...]]:
    """Yield a row for each level, with a cell for each adversary."""
    for level in LEVELS:
        yield (level, *(cell(level, who, findings) for who in ADVERSARIES))


def cell(level: PrivacyLevel, who: Adversary, findings: Findings) -> str:
    """Return what adversary `who` learns at `level`, with the measured share where it reconstructs text."""
    match STANDS[level][who]:
        case "reads tokens":
            return "reads 100%"
        case "reconstructs":
            return f"reconstructs {_figures(level, findings)}"
        case "only those trusted":
            return f"those you trust: {_figures(level, findings)}"
        case stand:
            return stand


def _figures(level: PrivacyLevel, findings: Findings) -> str:
    """Return the recovered share at `level`, for each form in which boundary tensors are sent."""
    by_form = {form: measured_leakage(level, findings, form).spelled for form in SENT if form in findings.defences}
    if len(set(by_form.values())) == 1:
        return next(iter(by_form.values()))
    return ", ".join(f"{figure} ({form})" for form, figure in by_form.items())
