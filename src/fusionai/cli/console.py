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


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    right: Sequence[int] = (),
    spare: Sequence[str] = (),
) -> None:
    """Print a table: framed on a terminal, elsewhere aligned columns without truncation. `right`: indices of columns to
    align right. `spare`: headers of columns that a narrow terminal leaves out, in this order, and names below the
    table; without them, cells would break within words."""
    cells = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _framed_table(headers, cells, title, {headers[place] for place in right}, spare)
        return
    if title:
        line(title)
    widths = _widths(headers, cells)
    for row in [list(headers), *cells]:
        padded = (
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        line("  ".join(padded).rstrip())


def _widths(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(row[place]) for row in [headers, *cells]) for place in range(len(headers))]


_BETWEEN_COLUMNS = 3
"""Characters of the frame for each column."""


def _framed_table(
    headers: Sequence[str], cells: Sequence[Sequence[str]], title: str, right: set[str], spare: Sequence[str]
) -> None:
    terminal = Console()
    widths = dict(zip(headers, _widths(headers, cells), strict=True))
    left_out: list[str] = []
    for header in spare:
        if sum(widths.values()) + _BETWEEN_COLUMNS * len(widths) + 1 <= terminal.width:
            break
        if header in widths:
            del widths[header]
            left_out.append(header)
    framed = Table(title=title or None, title_justify="left", header_style="bold")
    for header in widths:
        framed.add_column(header, justify="right" if header in right else "left", overflow="fold")
    for row in cells:
        named = zip(headers, row, strict=True)
        framed.add_row(*(Text(cell) for header, cell in named if header in widths))
    terminal.print(framed)
    if left_out:
        line(f"A wider terminal also shows: {', '.join(header for header in headers if header in left_out)}.")
