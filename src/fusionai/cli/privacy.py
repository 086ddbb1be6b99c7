"""`fusion privacy`: the levels, what each holds against, and what peers could reconstruct, as it was measured.

Decides how that reads; the figures are those that ship with the product (`fusion audit` makes others). Neighbours:
`privacy.levels` has the words, `privacy.measured` the figures, `cli.audit_view` the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from fusionai.cli import console
from fusionai.cli.audit_view import facts, show_findings
from fusionai.cli.json_output import json_option, write_json
from fusionai.primitives.privacy import LEVELS, STAYS, PrivacyLevel
from fusionai.privacy.findings import Findings
from fusionai.privacy.levels import ADVERSARIES, STANDS, Adversary
from fusionai.privacy.measured import SENT, shipped, told


@click.command()
@click.option("--table", "in_full", is_flag=True, help="Every boundary, defence and attack.")
@json_option
def privacy(in_full: bool, json_file: Path | None) -> None:
    """The privacy levels: what stays with the job owner, what each holds against, what peers could reconstruct."""
    findings = shipped()
    for level in LEVELS:
        console.line(f"{level}: {STAYS[level]}")
    console.line()
    for adversary, who in ADVERSARIES.items():
        console.line(f"{adversary}: {who}")
    console.line()
    console.table(("level", *ADVERSARIES), list(level_rows(findings)), title="Against whom a level holds")
    console.line()
    console.line(
        "Percentages: tokens of private text recovered by the strongest attack, over all depths at which peers see it."
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
    """A row for each level, a cell for each adversary."""
    for level in LEVELS:
        yield (level, *(cell(level, who, findings) for who in ADVERSARIES))


def cell(level: PrivacyLevel, who: Adversary, findings: Findings) -> str:
    """What `level` does against `who`, with what was measured where that is a question of measuring."""
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
    """In each form that boundaries travel in."""
    by_form = {form: told(level, findings, form).spelled for form in SENT if form in findings.defences}
    if len(set(by_form.values())) == 1:
        return next(iter(by_form.values()))
    return ", ".join(f"{figure} ({form})" for form, figure in by_form.items())
