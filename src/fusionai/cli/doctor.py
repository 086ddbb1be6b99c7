"""`fusion doctor`: checks this machine and says what to fix.

Prints the findings, which `cli.findings` collects. Exits with 0 if the machine can take part in a pool, with 1 if
something must be fixed first.
"""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from fusionai.cli import console, findings
from fusionai.cli.options import device_option, home_option, json_option, port_option, threads_option, write_json

_MARKS = {"good": "ok", "note": "note", "bad": "FIX"}


@click.command()
@device_option("Measure this device")
@threads_option("Measure with this many threads")
@port_option(
    "If this machine has joined a pool, test whether its broker can connect to this TCP port; 0: any free one.",
    shown="0",
)
@home_option
@json_option
def doctor(device: str, threads: int | None, port: int, home: Path, json_file: Path | None) -> int:
    """Check this machine: devices, speed, memory, network and versions, with a remedy for each problem."""
    found = findings.everything(device=device, threads=threads, home=home, port=port)
    console.table(
        ("", "area", "found"), [(_MARKS[finding.state], finding.area, finding.what) for finding in found.findings]
    )
    remedies = [finding for finding in found.findings if finding.remedy]
    if remedies:
        console.line()
        console.line("What to do:")
        for finding in remedies:
            console.line(f"- {finding.area}: {console.printable(finding.remedy)}")
    write_json(json_file, "doctor", msgspec.to_builtins(found))
    return 1 if any(finding.state == "bad" for finding in found.findings) else 0
