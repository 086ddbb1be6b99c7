"""Prints lines and tables: framed tables on a terminal, aligned plain text elsewhere. Every command prints through it.

Text from other machines (names, titles, reasons) passes through `printable`, so that it can't move the cursor or
colour the terminal. Live views are in `dashboard`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fusionai.primitives.printing import printable as printable


def line(text: str = "") -> None:
    """Print one line to standard output."""
    click.echo(text)


def error(message: str, hint: str | None = None) -> None:
    """Print what failed, and what to do next, to standard error."""
    click.echo(f"error: {printable(message)}", err=True)
    if hint:
        click.echo(printable(hint), err=True)


def note(message: str) -> None:
    """Print a progress note to standard error."""
    click.echo(printable(message), err=True)


def warning(message: str) -> None:
    """Print a warning to standard error; the command continues."""
    click.echo(f"warning: {printable(message)}", err=True)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", right: Sequence[int] = ()) -> None:
    """Print a table: framed on a terminal, elsewhere aligned columns without truncation. `right`: indices of columns to
    align right."""
    cells = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        framed = Table(title=title or None, title_justify="left", header_style="bold")
        for place, header in enumerate(headers):
            framed.add_column(header, justify="right" if place in right else "left", overflow="fold")
        for row in cells:
            framed.add_row(*(Text(cell) for cell in row))
        Console().print(framed)
        return
    if title:
        line(title)
    widths = [max(len(row[place]) for row in [list(headers), *cells]) for place in range(len(headers))]
    for row in [list(headers), *cells]:
        padded = (
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        line("  ".join(padded).rstrip())
